"""Sizes and options of a PaliGemma, read from the hub's config.json.

Three frozen dataclasses, nested as the model is nested. Field names are the hub's. The dataclasses' own defaults are
the sizes of PaliGemma 3B at 224 pixels; a key that a config.json leaves out takes the default of its format instead.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from numbers import Integral, Real
from pathlib import Path
from typing import Any

TANH_GELU_NAMES = (
    "gelu_pytorch_tanh",
    "gelu",
    "gelu_new",
    "gelu_fast",
)  # older files say "gelu" and mean tanh
# Far beyond every PaliGemma. A file that asks for more would keep the machine busy before its weights are looked at.
MAX_PARAMETERS = 10**11
MAX_LAYERS = 1000
MAX_SIZE = 10**7
SLIDING_ATTENTION = "sliding_attention"
FULL_ATTENTION = "full_attention"


@dataclass(frozen=True)
class SiglipVisionConfig:
    """The vision tower; the defaults are SigLIP So400m/14 (Zhai et al., arXiv 2303.15343), as in every PaliGemma."""

    hidden_size: int = 1152
    intermediate_size: int = 4304
    num_hidden_layers: int = 27
    num_attention_heads: int = 16
    num_channels: int = 3
    image_size: int = 224
    patch_size: int = 14
    layer_norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        _require_positive_numbers(self)
        if self.num_channels != 3:
            raise ValueError(f"num_channels is {self.num_channels}; pictures have 3, red, green and blue")
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"vision hidden_size {self.hidden_size} is not a multiple of num_attention_heads "
                f"{self.num_attention_heads}"
            )
        if self.patch_size > self.image_size:
            raise ValueError(f"patch_size {self.patch_size} is larger than image_size {self.image_size}")

    @property
    def approximate_parameters(self) -> int:
        """Weights of the tower's matrices; norms and biases are left out."""
        layer = 4 * self.hidden_size**2 + 2 * self.hidden_size * self.intermediate_size
        patches = self.num_image_tokens + self.num_channels * self.patch_size**2
        return self.num_hidden_layers * layer + patches * self.hidden_size

    @property
    def num_image_tokens(self) -> int:
        """Patches of one picture, the number of image tokens in a prompt (256 at 224 pixels and patch 14)."""
        return (self.image_size // self.patch_size) ** 2


@dataclass(frozen=True)
class GemmaConfig:
    """The decoder, Gemma (arXiv 2403.08295) or Gemma 2 (arXiv 2408.00118).

    The three fields that only Gemma 2 has, `attn_logit_softcapping`, `final_logit_softcapping` and
    `sliding_window`, are None for Gemma 1.
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
            raise ValueError(
                f"the text model's type is {self.model_type!r}; 'gemma' and 'gemma2' are the ones of PaliGemma"
            )
        _require_positive_numbers(self)
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of num_key_value_heads "
                f"{self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}; rotary embeddings need an even number")
        object.__setattr__(self, "layer_types", self._checked_layer_types())

    def _checked_layer_types(self) -> tuple[str, ...]:
        types = self.layer_types
        if types is None:
            windowed = self.sliding_window is not None
            types = tuple(
                SLIDING_ATTENTION if windowed and index % 2 == 0 else FULL_ATTENTION
                for index in range(self.num_hidden_layers)
            )
        names = (SLIDING_ATTENTION, FULL_ATTENTION)
        are_known = isinstance(types, (list, tuple)) and all(kind in names for kind in types)
        if not are_known or len(types) != self.num_hidden_layers:
            raise ValueError(
                f"layer_types {types!r} must name {SLIDING_ATTENTION!r} or {FULL_ATTENTION!r} once for each of "
                f"{self.num_hidden_layers} layers"
            )
        return tuple(types)

    @property
    def approximate_parameters(self) -> int:
        """Weights of the decoder's matrices, the tied head once; norms are left out."""
        heads = 2 * (self.num_attention_heads + self.num_key_value_heads) * self.head_dim
        layer = self.hidden_size * (heads + 3 * self.intermediate_size)
        return self.num_hidden_layers * layer + self.vocab_size * self.hidden_size

    @property
    def attention_scale(self) -> float:
        """What query-key products are multiplied by: query_pre_attn_scalar (Gemma 1: head_dim) ** -0.5."""
        return (self.query_pre_attn_scalar or self.head_dim) ** -0.5

    def window_of_layer(self, layer_idx: int) -> int | None:
        """How many keys a generated token sees in this layer, itself included; None: all of them."""
        return self.sliding_window if self.layer_types[layer_idx] == SLIDING_ATTENTION else None


# A Gemma 1 file may carry these too; Gemma 1 does not compute them.
GEMMA2_FIELDS = (
    "query_pre_attn_scalar",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "sliding_window",
    "layer_types",
)
# What a config.json means by leaving a key out. Writers leave out what equals their format's own default, which is not
# PaliGemma's: Gemma 7B (arXiv 2403.08295, table 1), Gemma 2 2B (arXiv 2408.00118, table 1), SigLIP B/16.
TEXT_DEFAULTS = {
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
    """A whole PaliGemma (arXiv 2407.07726) or PaliGemma 2 (arXiv 2412.03555)."""

    vision_config: SiglipVisionConfig
    text_config: GemmaConfig
    image_token_index: int = 257152
    bos_token_id: int = 2
    pad_token_id: int = 0
    eos_token_ids: tuple[int, ...] = (1,)
    dtype: str | None = None

    def __post_init__(self) -> None:
        if self.approximate_parameters > MAX_PARAMETERS:
            raise ValueError(
                f"the sizes make about {self.approximate_parameters:.2g} parameters; allowed are {MAX_PARAMETERS:.2g}, "
                "and the largest PaliGemma has 2.8e+10"
            )
        token_ids = {
            "image_token_index": self.image_token_index,
            "bos_token_id": self.bos_token_id,
            "pad_token_id": self.pad_token_id,
            **{f"eos_token_id {token_id!r}": token_id for token_id in self.eos_token_ids},
        }
        for name, token_id in token_ids.items():
            if not _is_number(token_id, Integral) or token_id < 0:
                raise ValueError(f"{name} is {token_id!r}; it must be a whole number, 0 or above")

    @property
    def approximate_parameters(self) -> int:
        """Weights of both halves' matrices."""
        return self.text_config.approximate_parameters + self.vision_config.approximate_parameters

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> PaliGemmaConfig:
        """Read a config.json, and generation_config.json for its end tokens, given as mappings.

        Old and new spellings are read (`torch_dtype`/`dtype`, `rope_theta`/`rope_parameters`,
        `hidden_act`/`hidden_activation`, `image_token_index`/`image_token_id`).
        Raises ValueError where the file describes something that this model does not compute.
        """
        if data.get("model_type") != "paligemma":
            raise ValueError(
                f"config.json says model_type {data.get('model_type')!r}; only 'paligemma' (PaliGemma 1 and 2) "
                "can be loaded, such as google/paligemma2-3b-mix-224"
            )
        quantization = data.get("quantization_config")
        if quantization is not None:
            method = quantization.get("quant_method") if isinstance(quantization, Mapping) else quantization
            raise ValueError(
                f"config.json says that the weights are quantized ({method}); take the model that they were made from, "
                "with weights in float32, bfloat16 or float16"
            )
        text, vision = data.get("text_config"), data.get("vision_config")
        if not isinstance(text, Mapping) or not isinstance(vision, Mapping):
            raise ValueError("config.json has no text_config or no vision_config")
        text_config = _read_text_config(text)
        image_token = _first(data, "image_token_index", "image_token_id", default=257152)
        return cls(
            vision_config=_read_vision_config(vision),
            text_config=text_config,
            image_token_index=image_token,
            bos_token_id=_first(data, "bos_token_id", default=_first(text, "bos_token_id", default=2)),
            pad_token_id=_first(data, "pad_token_id", default=_first(text, "pad_token_id", default=0)),
            eos_token_ids=_end_tokens(generation or {}, data, text),
            dtype=_first(data, "dtype", "torch_dtype", default=_first(text, "dtype", "torch_dtype")),
        )

    @classmethod
    def from_folder(cls, folder: str | Path) -> PaliGemmaConfig:
        """Read `config.json`, and `generation_config.json` where there is one."""
        folder = Path(folder)
        generation = folder / "generation_config.json"
        return cls.from_dict(
            _read_json(folder / "config.json"), _read_json(generation) if generation.exists() else None
        )

    def to_dict(self) -> dict[str, Any]:
        """The config.json of this model, complete and in the hub's names; `from_dict` reads it back equal.

        Gemma 2's None becomes null, since a key that is left out has a default. Only `query_pre_attn_scalar` may not
        be null there: in its place stands the `head_dim` that None means.
        """
        text = {**asdict(self.text_config), "layer_types": list(self.text_config.layer_types)}
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
            "text_config": {
                **text,
                "hidden_activation": "gelu_pytorch_tanh",
                "hidden_act": "gelu_pytorch_tanh",
            },
            "vision_config": {**vision, "projection_dim": self.text_config.hidden_size},
        }


def _read_text_config(data: Mapping[str, Any]) -> GemmaConfig:
    model_type = data.get("model_type", "gemma")
    _refuse(data, "text_config", "attention_bias", allowed=(False, None))
    _refuse(data, "text_config", "use_bidirectional_attention", allowed=(True, None))
    # Gemma 1 files carry a leftover "hidden_act" beside the "hidden_activation" that counts.
    activation = _first(data, "hidden_activation", "hidden_act", default="gelu_pytorch_tanh")
    if activation not in TANH_GELU_NAMES:
        raise ValueError(f"text_config: activation {activation!r} is not computed here; Gemma uses gelu_pytorch_tanh")
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
    _refuse(data, "vision_config", "hidden_act", allowed=(*TANH_GELU_NAMES, None))
    return SiglipVisionConfig(**{**VISION_DEFAULTS, **_known_fields(SiglipVisionConfig, data)})


def _known_fields(cls: type, data: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that this model needs. The rest of a hub file concerns training, other tasks or other software."""
    nullable = {
        "attn_logit_softcapping",
        "final_logit_softcapping",
        "sliding_window",
    }  # null there means: none
    names = {field.name for field in fields(cls)}
    return {name: data[name] for name in names & data.keys() if data[name] is not None or name in nullable}


def _rope_theta(data: Mapping[str, Any]) -> float:
    parameters = _first(data, "rope_parameters", "rope_scaling", default={})
    if not isinstance(parameters, Mapping) or any(isinstance(value, Mapping) for value in parameters.values()):
        raise ValueError(f"text_config: rope_parameters {parameters!r} must be one set of numbers for all layers")
    kind = _first(parameters, "rope_type", "type", default="default")
    if kind != "default":
        raise ValueError(f"text_config: rotary embeddings of type {kind!r} are not computed here, only 'default'")
    return _first(parameters, "rope_theta", default=_first(data, "rope_theta", default=10000.0))


def _end_tokens(*sources: Mapping[str, Any]) -> tuple[int, ...]:
    """Every end token that any of the files names, in the order met: PaliGemma 2 lists [1, 107] in text_config."""
    found: list[int] = []
    for source in sources:
        value = source.get("eos_token_id")
        token_ids = value if isinstance(value, (list, tuple)) else [value]
        found += [token_id for token_id in token_ids if token_id is not None and token_id not in found]
    return tuple(found) or (1,)


def _first(data: Mapping[str, Any], *names: str, default: Any = None) -> Any:
    return next((data[name] for name in names if data.get(name) is not None), default)


def _refuse(data: Mapping[str, Any], section: str, name: str, allowed: tuple[Any, ...]) -> None:
    if data.get(name) not in allowed:
        raise ValueError(f"{section}: {name} {data[name]!r} is not computed here; allowed: {allowed}")


def _require_positive_numbers(config: object) -> None:
    """Every field that is declared as a number must be one, above 0; where the declaration has None, it may be None."""
    for field in fields(config):
        kind = {"int": Integral, "float": Real}.get(field.type.split(" | ")[0])
        value = getattr(config, field.name)
        if kind is None or (value is None and field.type.endswith("None")):
            continue
        if not (_is_number(value, kind) and 0 < value < math.inf):
            allowed = "a whole number" if kind is Integral else "a number"
            raise ValueError(f"{field.name} is {value!r}; it must be {allowed} above 0")
        largest = MAX_LAYERS if field.name == "num_hidden_layers" else MAX_SIZE
        if kind is Integral and value > largest:
            raise ValueError(f"{field.name} is {value:.3g}; allowed is at most {largest}")


def _is_number(value: Any, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(f"{path.parent} has no {path.name}") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise ValueError(f"{path} holds a {type(data).__name__}, not a JSON object")
    return data
