"""Model configuration, read from the hub's config.json.

Three frozen dataclasses, nested like the model, with the hub's field names. Their defaults are PaliGemma 3B at 224
pixels; keys missing from config.json take transformers' defaults instead (`TEXT_DEFAULTS`, `VISION_DEFAULTS`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from paligemma.errors import InputError
from paligemma.validation import is_finite_number, is_integer

IGNORE_INDEX = -100  # label of positions without a loss, the default of F.cross_entropy
# Older files use "gelu" for the tanh approximation.
TANH_GELU_NAMES = ("gelu_pytorch_tanh", "gelu", "gelu_new", "gelu_fast")
# Limits far above any PaliGemma model, so that an invalid config.json is rejected before anything is allocated.
MAX_PARAMETERS = 10**11
MAX_LAYERS = 1000
MAX_SIZE = 10**7
SLIDING_ATTENTION = "sliding_attention"
FULL_ATTENTION = "full_attention"
ATTENTION_TYPES = (SLIDING_ATTENTION, FULL_ATTENTION)


@dataclass(frozen=True)
class SiglipVisionConfig:
    """The vision tower, by default SigLIP So400m/14 (Zhai et al., arXiv 2303.15343), as in all PaliGemma models."""

    hidden_size: int = 1152
    intermediate_size: int = 4304
    num_hidden_layers: int = 27
    num_attention_heads: int = 16
    num_channels: int = 3
    image_size: int = 224
    patch_size: int = 14
    layer_norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        _check_numbers(self)
        if self.num_channels != 3:
            raise InputError("config.num_channels", "num_channels must be 3, got {value}.", value=self.num_channels)
        if self.hidden_size % self.num_attention_heads:
            raise InputError(
                "config.vision_heads",
                "vision_config.hidden_size must be a multiple of num_attention_heads, got {hidden_size} and {heads}.",
                hidden_size=self.hidden_size,
                heads=self.num_attention_heads,
            )
        if self.patch_size > self.image_size:
            raise InputError(
                "config.patch_size",
                "patch_size must be <= image_size, got {patch_size} and {image_size}.",
                patch_size=self.patch_size,
                image_size=self.image_size,
            )

    @property
    def approximate_parameters(self) -> int:
        """Number of parameters, excluding norms and biases."""
        layer = 4 * self.hidden_size**2 + 2 * self.hidden_size * self.intermediate_size
        patches = self.num_image_tokens + self.num_channels * self.patch_size**2
        return self.num_hidden_layers * layer + patches * self.hidden_size

    @property
    def num_image_tokens(self) -> int:
        """Number of patches, and of image tokens in a prompt (256 for 224 pixels and patches of 14)."""
        return (self.image_size // self.patch_size) ** 2


@dataclass(frozen=True)
class GemmaConfig:
    """The decoder: Gemma (arXiv 2403.08295) or Gemma 2 (arXiv 2408.00118).

    `attn_logit_softcapping`, `final_logit_softcapping` and `sliding_window` are None for Gemma 1.
    """

    model_type: str = "gemma"
    vocab_size: int = 257152
    hidden_size: int = 2048
    intermediate_size: int = 16384
    num_hidden_layers: int = 18
    num_attention_heads: int = 8
    num_key_value_heads: int = 1
    head_dim: int = 256
    max_position_embeddings: int = 8192
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    query_pre_attn_scalar: float | None = None
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    sliding_window: int | None = None
    layer_types: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.model_type not in ("gemma", "gemma2"):
            raise InputError(
                "config.text_model_type",
                "text_config.model_type must be 'gemma' or 'gemma2', got {value!r}.",
                value=self.model_type,
            )
        _check_numbers(self)
        if self.num_attention_heads % self.num_key_value_heads:
            raise InputError(
                "config.key_value_heads",
                "num_attention_heads must be a multiple of num_key_value_heads, got {heads} and {key_value_heads}.",
                heads=self.num_attention_heads,
                key_value_heads=self.num_key_value_heads,
            )
        if self.head_dim % 2:
            raise InputError("config.head_dim", "head_dim must be even, got {value}.", value=self.head_dim)
        object.__setattr__(self, "layer_types", self._checked_layer_types())

    def _checked_layer_types(self) -> tuple[str, ...]:
        types = self.layer_types
        if types is None:
            # Gemma 2 alternates: sliding window in even layers, full attention in odd ones.
            even_type = FULL_ATTENTION if self.sliding_window is None else SLIDING_ATTENTION
            return tuple(FULL_ATTENTION if index % 2 else even_type for index in range(self.num_hidden_layers))
        are_known = isinstance(types, (list, tuple)) and all(kind in ATTENTION_TYPES for kind in types)
        if not are_known or len(types) != self.num_hidden_layers:
            raise InputError(
                "config.layer_types",
                "layer_types must have {count} entries, each 'sliding_attention' or 'full_attention', got {value!r}.",
                count=self.num_hidden_layers,
                value=types,
            )
        return tuple(types)

    @property
    def approximate_parameters(self) -> int:
        """Number of parameters, excluding norms; the tied embedding and head are counted once."""
        heads = 2 * (self.num_attention_heads + self.num_key_value_heads) * self.head_dim
        layer = self.hidden_size * (heads + 3 * self.intermediate_size)
        return self.num_hidden_layers * layer + self.vocab_size * self.hidden_size

    @property
    def attention_scale(self) -> float:
        """Scale of the attention scores: query_pre_attn_scalar ** -0.5 (Gemma 1: head_dim ** -0.5)."""
        return (self.query_pre_attn_scalar or self.head_dim) ** -0.5

    def window_of_layer(self, layer_idx: int) -> int | None:
        """Number of tokens that a generated token attends to in this layer, including itself; None: all."""
        return self.sliding_window if self.layer_types and self.layer_types[layer_idx] == SLIDING_ATTENTION else None


# Ignored in a Gemma 1 configuration.
GEMMA2_FIELDS = (
    "query_pre_attn_scalar",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "sliding_window",
    "layer_types",
)
# Values of keys missing from config.json: transformers omits keys that equal its defaults, which are the sizes of
# Gemma 7B (arXiv 2403.08295, table 1), Gemma 2 2B (arXiv 2408.00118, table 1) and SigLIP B/16.
TEXT_DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma": {
        "vocab_size": 256000,
        "hidden_size": 3072,
        "intermediate_size": 24576,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
    },
    "gemma2": {
        "vocab_size": 256000,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "sliding_window": 4096,
    },
}
VISION_DEFAULTS = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "patch_size": 16,
}


@dataclass(frozen=True)
class PaliGemmaConfig:
    """The full model: PaliGemma (arXiv 2407.07726) or PaliGemma 2 (arXiv 2412.03555)."""

    vision_config: SiglipVisionConfig
    text_config: GemmaConfig
    image_token_index: int = 257152
    bos_token_id: int = 2
    pad_token_id: int = 0
    eos_token_ids: tuple[int, ...] = (1,)
    dtype: str | None = None

    def __post_init__(self) -> None:
        if self.approximate_parameters > MAX_PARAMETERS:
            raise InputError(
                "config.num_parameters",
                "The model must have at most {limit:.2g} parameters, got about {count:.2g}.",
                limit=MAX_PARAMETERS,
                count=self.approximate_parameters,
            )
        token_ids = {
            "image_token_index": self.image_token_index,
            "bos_token_id": self.bos_token_id,
            "pad_token_id": self.pad_token_id,
        }
        for name, token_id in [*token_ids.items(), *(("eos_token_id", token_id) for token_id in self.eos_token_ids)]:
            if not is_integer(token_id) or token_id < 0:
                raise InputError(
                    "config.token_id", "{name} must be an integer >= 0, got {value!r}.", name=name, value=token_id
                )

    @property
    def approximate_parameters(self) -> int:
        """Number of parameters, excluding norms, biases and the projector."""
        return self.text_config.approximate_parameters + self.vision_config.approximate_parameters

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> PaliGemmaConfig:
        """Build from the contents of config.json and generation_config.json (only its `eos_token_id`).

        Old and new key names are accepted (`torch_dtype`/`dtype`, `rope_theta`/`rope_parameters`,
        `hidden_act`/`hidden_activation`, `image_token_index`/`image_token_id`).

        Raises:
            InputError: if a value is invalid or describes a model that this package does not implement.
        """
        if data.get("model_type") != "paligemma":
            raise InputError(
                "config.model_type",
                "model_type in config.json must be 'paligemma' (PaliGemma 1 or 2), got {value!r}. "
                "Load a PaliGemma checkpoint such as google/paligemma2-3b-mix-224.",
                value=data.get("model_type"),
            )
        quantization = data.get("quantization_config")
        if quantization is not None:
            method = quantization.get("quant_method") if isinstance(quantization, Mapping) else quantization
            raise InputError(
                "config.quantized",
                "The weights must be float32, bfloat16 or float16, got a quantized checkpoint ({method}). "
                "Load the unquantized checkpoint instead.",
                method=method,
            )
        text, vision = data.get("text_config"), data.get("vision_config")
        if not isinstance(text, Mapping) or not isinstance(vision, Mapping):
            raise InputError("config.sections", "config.json must contain text_config and vision_config.")
        text_config = _read_text_config(text)
        image_token = _first(data, "image_token_index", "image_token_id", default=257152)
        return cls(
            vision_config=_read_vision_config(vision),
            text_config=text_config,
            image_token_index=image_token,
            bos_token_id=_first(data, "bos_token_id", default=_first(text, "bos_token_id", default=2)),
            pad_token_id=_first(data, "pad_token_id", default=_first(text, "pad_token_id", default=0)),
            eos_token_ids=_eos_token_ids(generation or {}, data, text),
            dtype=_first(data, "dtype", "torch_dtype", default=_first(text, "dtype", "torch_dtype")),
        )

    @classmethod
    def from_folder(cls, folder: str | Path) -> PaliGemmaConfig:
        """Read config.json and, if present, generation_config.json."""
        folder = Path(folder)
        generation_file = folder / "generation_config.json"
        generation = _read_json(generation_file) if generation_file.exists() else None
        return cls.from_dict(_read_json(folder / "config.json"), generation)

    def to_dict(self) -> dict[str, Any]:
        """Return the contents of config.json, in the hub's format; `from_dict` reads it back.

        None is written as null, because a missing key would take its default. `query_pre_attn_scalar` cannot be null in
        transformers, so it is written as `head_dim`, which has the same meaning.
        """
        text = {**asdict(self.text_config), "layer_types": list(self.text_config.layer_types or ())}
        if self.text_config.model_type == "gemma2":
            text["query_pre_attn_scalar"] = text["query_pre_attn_scalar"] or text["head_dim"]
        else:
            for name in GEMMA2_FIELDS:
                del text[name]
        vision = {"model_type": "siglip_vision_model", "vision_use_head": False, **asdict(self.vision_config)}
        return {
            "architectures": ["PaliGemmaForConditionalGeneration"],
            "model_type": "paligemma",
            "dtype": self.dtype,
            "image_token_index": self.image_token_index,
            "bos_token_id": self.bos_token_id,
            "pad_token_id": self.pad_token_id,
            "eos_token_id": self.eos_token_ids[0] if len(self.eos_token_ids) == 1 else list(self.eos_token_ids),
            "hidden_size": self.text_config.hidden_size,
            "projection_dim": self.text_config.hidden_size,
            "tie_word_embeddings": True,
            "text_config": {**text, "hidden_activation": "gelu_pytorch_tanh", "hidden_act": "gelu_pytorch_tanh"},
            "vision_config": {**vision, "projection_dim": self.text_config.hidden_size},
        }


def _read_text_config(data: Mapping[str, Any]) -> GemmaConfig:
    model_type = data.get("model_type", "gemma")
    _require("text_config.attention_bias", data.get("attention_bias"), allowed=(False, None))
    _require("text_config.use_bidirectional_attention", data.get("use_bidirectional_attention"), allowed=(True, None))
    # Gemma 1 files have an obsolete "hidden_act" beside "hidden_activation".
    activation = _first(data, "hidden_activation", "hidden_act", default="gelu_pytorch_tanh")
    _require("text_config.hidden_activation", activation, allowed=TANH_GELU_NAMES)
    values = {
        **TEXT_DEFAULTS.get(str(model_type), {}),
        **_known_fields(GemmaConfig, data),
        "model_type": model_type,
        "rope_theta": _rope_theta(data),
    }
    if model_type == "gemma":
        for name in GEMMA2_FIELDS:
            values.pop(name, None)
    return GemmaConfig(**values)


def _read_vision_config(data: Mapping[str, Any]) -> SiglipVisionConfig:
    _require("vision_config.hidden_act", data.get("hidden_act"), allowed=(*TANH_GELU_NAMES, None))
    return SiglipVisionConfig(**{**VISION_DEFAULTS, **_known_fields(SiglipVisionConfig, data)})


def _known_fields(cls: type, data: Mapping[str, Any]) -> dict[str, Any]:
    """Select the keys that are fields of `cls`. A null value counts as missing unless the field can be None."""
    nullable = {"attn_logit_softcapping", "final_logit_softcapping", "sliding_window"}
    names = {field.name for field in fields(cls)}
    return {name: data[name] for name in names & data.keys() if data[name] is not None or name in nullable}


def _rope_theta(data: Mapping[str, Any]) -> float:
    parameters = _first(data, "rope_parameters", "rope_scaling", default={})
    if not isinstance(parameters, Mapping) or any(isinstance(value, Mapping) for value in parameters.values()):
        raise InputError(
            "config.rope_parameters",
            "rope_parameters must be a single object shared by all layers, got {value!r}.",
            value=parameters,
        )
    _require("rope_type", _first(parameters, "rope_type", "type", default="default"), allowed=("default",))
    return _first(parameters, "rope_theta", default=_first(data, "rope_theta", default=10000.0))


def _eos_token_ids(*sources: Mapping[str, Any]) -> tuple[int, ...]:
    """Collect the EOS tokens of all sources: PaliGemma 2 has `1` in config.json and `[1, 107]` in its text_config."""
    found: list[int] = []
    for source in sources:
        value = source.get("eos_token_id")
        token_ids = value if isinstance(value, (list, tuple)) else [value]
        found += [token_id for token_id in token_ids if token_id is not None and token_id not in found]
    return tuple(found) or (1,)


def _first(data: Mapping[str, Any], *names: str, default: Any = None) -> Any:
    return next((data[name] for name in names if data.get(name) is not None), default)


def _require(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    if value not in allowed:
        raise InputError(
            "config.unsupported_value",
            "{name} must be {allowed}, got {value!r}.",
            name=name,
            allowed=" or ".join(repr(option) for option in allowed if option is not None),
            value=value,
        )


def _check_numbers(config: SiglipVisionConfig | GemmaConfig) -> None:
    """Check that every numeric field is a number > 0 (or None, if declared optional) and within the limits."""
    for field in fields(config):
        name, value = field.name, getattr(config, field.name)
        kind, _, optional = field.type.partition(" | ")
        if kind not in ("int", "float") or (value is None and optional):
            continue
        if kind == "float" and not (is_finite_number(value) and value > 0):
            raise InputError("config.number", "{name} must be a number > 0, got {value!r}.", name=name, value=value)
        if kind == "int":
            if not is_integer(value) or value <= 0:
                raise InputError(
                    "config.integer", "{name} must be an integer > 0, got {value!r}.", name=name, value=value
                )
            limit = MAX_LAYERS if name == "num_hidden_layers" else MAX_SIZE
            if value > limit:
                raise InputError(
                    "config.too_large", "{name} must be <= {limit}, got {value}.", name=name, limit=limit, value=value
                )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InputError(
            "config.invalid_json", "{file} is not valid JSON: {reason}.", file=str(path), reason=str(error)
        ) from None
    if not isinstance(data, dict):
        raise InputError("config.not_an_object", "{file} must contain a JSON object.", file=str(path))
    return data
