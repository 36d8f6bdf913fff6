"""Small random PaliGemma checkpoints, built with transformers, whose outputs depend on every weight.

Default initialization hides errors: norms and biases have no effect, attention is nearly uniform, and the greedy answer
repeats one token. Here norms and biases are far from their neutral values, and matrices are scaled so that attention is
sharp, answers are varied and logits do not nearly tie. All weights are seeded. Structure, key names and config.json are
those of Google's checkpoints.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import save_torch_state_dict
from torch import Tensor

from paligemma.benchmarks.tiny_tokenizer import build_tiny_tokenizer

LAYOUTS = ("hub", "transformers-4.52", "transformers-5", "transformers-5-plain")
SHARD_SIZE = "400KB"


def save_processor_files(folder: Path, image_size: int, image_token_id: int = 0) -> None:
    """Write the tokenizer and image processor files of a hub checkpoint."""
    tokenizer = build_tiny_tokenizer(image_token_id)
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "add_bos_token": True,
            "add_eos_token": False,
            "additional_special_tokens": ["<image>"],
            "bos_token": "<bos>",
            "clean_up_tokenization_spaces": False,
            "eos_token": "<eos>",
            "pad_token": "<pad>",
            "processor_class": "PaliGemmaProcessor",
            "tokenizer_class": "GemmaTokenizer",
            "unk_token": "<unk>",
        },
    )
    _write_json(
        folder / "preprocessor_config.json",
        {
            "do_convert_rgb": None,
            "do_normalize": True,
            "do_rescale": True,
            "do_resize": True,
            "image_mean": [0.5, 0.5, 0.5],
            "image_processor_type": "SiglipImageProcessor",
            "image_seq_length": (image_size // 14) ** 2,
            "image_std": [0.5, 0.5, 0.5],
            "processor_class": "PaliGemmaProcessor",
            "resample": 3,
            "rescale_factor": 1 / 255,
            "size": {"height": image_size, "width": image_size},
        },
    )


# Models

GEMMA1 = {
    "model_type": "gemma",
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 256,
}
GEMMA2 = {
    "model_type": "gemma2",
    "hidden_size": 72,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 144,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "sliding_window": 4096,
    "eos_token_id": [1, 5],
}
VISION = {
    "model_type": "siglip_vision_model",
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "patch_size": 14,
}


@dataclass(frozen=True)
class Case:
    """Configuration of a random PaliGemma.

    Attributes:
        text, vision: keys of config.json's text_config and vision_config.
        image_size: image side in pixels, a multiple of 14.
        top_level_hidden_size: the top-level `hidden_size` of config.json (default: the decoder's). The hub's
            PaliGemma 2 files have 2048 for all decoder sizes, so models must not use it.
        vocab_size: size of the embedding (default: the tokenizer's, rounded up to a multiple of 64).
        image_token_id: id of `<image>` (0: directly after the tiny tokenizer's other tokens).
    """

    text: dict[str, Any] = field(default_factory=lambda: dict(GEMMA1))
    vision: dict[str, Any] = field(default_factory=lambda: dict(VISION))
    image_size: int = 56
    top_level_hidden_size: int | None = None
    vocab_size: int | None = None
    image_token_id: int = 0


CASES = {
    "paligemma1": Case(),
    "grouped": Case({**GEMMA1, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 20}),
    "paligemma2": Case(GEMMA2, top_level_hidden_size=64),
    "sliding": Case({**GEMMA2, "sliding_window": 8}, image_size=28, top_level_hidden_size=64),
    "paligemma1-112": Case(image_size=112),
    "paligemma2-112": Case(GEMMA2, image_size=112, top_level_hidden_size=64),
    "paligemma1-224": Case(image_size=224),
}


def make_config(case: Case) -> transformers.PaliGemmaConfig:
    """Return the transformers configuration."""
    image_token: int = build_tiny_tokenizer(case.image_token_id).get_vocab()["<image>"]
    vocab_size = case.vocab_size or (image_token // 64 + 1) * 64
    hidden_size = case.text["hidden_size"]
    image = {"image_size": case.image_size, "projection_dim": hidden_size}
    special_ids: dict[str, Any] = {"bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0}
    return transformers.PaliGemmaConfig(
        vision_config={**case.vision, "vision_use_head": False, **image},
        text_config={**case.text, "vocab_size": vocab_size},
        image_token_index=image_token,
        projection_dim=hidden_size,
        hidden_size=case.top_level_hidden_size or hidden_size,
        **special_ids,
    )


def make_model(case: Case | str, seed: int = 0) -> transformers.PaliGemmaForConditionalGeneration:
    """Build a random float32 transformers model with eager attention, in evaluation mode."""
    config = make_config(CASES[case] if isinstance(case, str) else case)
    config._attn_implementation = "eager"
    model = transformers.PaliGemmaForConditionalGeneration(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            parameter.copy_(random_weight(name, parameter.shape, generator))
    return model


def random_weight(name: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
    """Return a random float32 tensor, scaled by the kind of parameter.

    Gemma's norms multiply by 1 + weight, SigLIP's by weight. The decoder's final norm has factors of both signs: with
    a tied head and positive factors, the most probable next token would be the previous token.
    """
    noise = torch.randn(shape, generator=generator)
    if name.endswith(".bias"):
        return 0.1 + 0.3 * noise
    if name.endswith("language_model.norm.weight"):
        return 1.3 * noise - 1.0
    if len(shape) == 1:
        neutral = 1.0 if "vision_tower" in name else 0.0
        return neutral + 0.3 + 0.3 * noise
    if "position_embedding" in name:
        return 0.5 * noise
    if "embed_tokens" in name:
        return 2.0 * noise * shape[-1] ** -0.5
    fan_in = noise[0].numel()
    return 1.3 * noise * fan_in**-0.5


# Files

# Keys of the hub's config.json files. All other values are defaults.
SPARSE_TOP_KEYS = {
    *("architectures", "bos_token_id", "eos_token_id", "hidden_size", "image_token_index", "model_type"),
    *("pad_token_id", "projection_dim", "torch_dtype", "text_config", "vision_config"),
}
SPARSE_VISION_KEYS = {
    *("hidden_size", "intermediate_size", "model_type", "num_attention_heads", "num_hidden_layers"),
    *("patch_size", "projection_dim", "vision_use_head"),
}
SPARSE_TEXT_KEYS = {
    "gemma": {
        *("hidden_size", "intermediate_size", "model_type", "num_attention_heads", "num_hidden_layers"),
        *("num_key_value_heads", "num_image_tokens", "torch_dtype", "vocab_size"),
    },
    "gemma2": {
        *("attn_logit_softcapping", "eos_token_id", "final_logit_softcapping", "hidden_size", "intermediate_size"),
        *("model_type", "num_hidden_layers", "num_image_tokens", "num_key_value_heads", "query_pre_attn_scalar"),
        *("sliding_window", "torch_dtype", "vocab_size"),
    },
}


def sparse_config(full: dict[str, Any]) -> dict[str, Any]:
    """Reduce a full config.json to the keys of the hub's files.

    Omitted values must be defaults: head_dim 256 and, for PaliGemma 2, 8 heads. The vision tower's `image_size` is
    omitted only if it is 224.
    """
    text, vision = full["text_config"], full["vision_config"]
    if text["head_dim"] != 256 or (text["model_type"] == "gemma2" and text["num_attention_heads"] != 8):
        raise ValueError(
            "a sparse config.json requires head_dim 256 and, for PaliGemma 2, 8 heads, got "
            f"head_dim {text['head_dim']} and {text['num_attention_heads']} heads."
        )
    stored_dtype = {"torch_dtype": full["dtype"]}
    text, vision = {**text, **stored_dtype}, dict(vision)
    vision_keys = SPARSE_VISION_KEYS | (set() if vision["image_size"] == 224 else {"image_size"})
    return {
        **_only({**full, **stored_dtype}, SPARSE_TOP_KEYS),
        "text_config": _only(text, SPARSE_TEXT_KEYS[text["model_type"]]),
        "vision_config": _only(vision, vision_keys),
    }


def _only(data: dict[str, Any], keys: set[str]) -> dict[str, Any]:
    return {key: value for key, value in data.items() if key in keys}


def hub_name(name: str) -> str:
    """Convert a parameter name of transformers 5 (`model.vision_tower.embeddings…`) to the key of the hub's files."""
    prefixes = {
        "model.language_model.": "language_model.model.",
        "model.vision_tower.": "vision_tower.vision_model.",
        "model.multi_modal_projector.": "multi_modal_projector.",
        "lm_head.": "language_model.lm_head.",
    }
    prefix = next(prefix for prefix in prefixes if name.startswith(prefix))
    return prefixes[prefix] + name.removeprefix(prefix)


def transformers_4_52_name(name: str) -> str:
    """Convert a parameter name of transformers 5 to that of transformers 4.52, with `vision_model`."""
    return name.replace("model.vision_tower.", "model.vision_tower.vision_model.", 1)


def save_layout(
    model: transformers.PaliGemmaForConditionalGeneration,
    folder: str | Path,
    layout: str = "hub",
    sharded: bool = False,
    sparse: bool = False,
) -> Path:
    """Write a checkpoint folder: weights, config.json, generation_config.json, tokenizer and image processor.

    Args:
        layout: one of LAYOUTS: keys of Google's files on the hub, of transformers 4.52, of transformers 5, or of
            transformers 5 with save_original_format=False. transformers itself writes the last two.
        sharded: write shards of at most SHARD_SIZE and an index.
        sparse: write a config.json with only the keys of the hub's files.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {LAYOUTS}, got {layout!r}.")
    folder = Path(folder)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    shard_size = SHARD_SIZE if sharded else "10GB"
    model.save_pretrained(folder, max_shard_size=shard_size, save_original_format=layout != "transformers-5-plain")
    if layout in ("hub", "transformers-4.52"):
        for file in folder.glob("model*.safetensors*"):
            file.unlink()
        rename = hub_name if layout == "hub" else transformers_4_52_name
        tensors = {rename(name): tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
        save_torch_state_dict(tensors, folder, max_shard_size=shard_size, metadata={"format": "pt"})
    save_config_files(model.config, folder, sparse)
    return folder


def save_config_files(config: Any, folder: Path, sparse: bool) -> None:
    """Write all files of a checkpoint folder except the weights."""
    config.save_pretrained(folder)
    if sparse:
        config_file = folder / "config.json"
        _write_json(config_file, sparse_config(json.loads(config_file.read_text(encoding="utf-8"))))
    _write_json(folder / "generation_config.json", {"bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0})
    save_processor_files(folder, config.vision_config.image_size, image_token_id=config.image_token_index)


def _write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
