"""The twelve official configurations: parameter names, shapes and counts, on the meta device."""

from __future__ import annotations

import pytest
import torch
import transformers

from paligemma.checkpoint import canonical_name
from paligemma.config import PaliGemmaConfig
from paligemma.modeling import PaliGemmaForConditionalGeneration

TOKENIZER_VOCAB, HUB_VOCAB = 257152, 257216
VISION = {
    "model_type": "siglip_vision_model",
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "patch_size": 14,
    "vision_use_head": False,
}
TEXT = {
    "PaliGemma 3B": {
        "model_type": "gemma",
        "hidden_size": 2048,
        "intermediate_size": 16384,
        "num_hidden_layers": 18,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
    },
    "PaliGemma 2 3B": {
        "model_type": "gemma2",
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    },
    "PaliGemma 2 10B": {
        "model_type": "gemma2",
        "hidden_size": 3584,
        "intermediate_size": 14336,
        "num_hidden_layers": 42,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
    },
    "PaliGemma 2 28B": {
        "model_type": "gemma2",
        "hidden_size": 4608,
        "intermediate_size": 36864,
        "num_hidden_layers": 46,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "query_pre_attn_scalar": 144,
    },
}
# With the tokenizer's vocabulary of 257,152; the hub's files have 64 unused ids more.
PARAMETERS = {
    ("PaliGemma 3B", 224): 2_923_335_408,
    ("PaliGemma 3B", 448): 2_924_220_144,
    ("PaliGemma 3B", 896): 2_927_759_088,
    ("PaliGemma 2 3B", 224): 3_032_094_960,
    ("PaliGemma 2 3B", 448): 3_032_979_696,
    ("PaliGemma 2 3B", 896): 3_036_518_640,
    ("PaliGemma 2 10B", 224): 9_662_409_456,
    ("PaliGemma 2 10B", 448): 9_663_294_192,
    ("PaliGemma 2 10B", 896): 9_666_833_136,
    ("PaliGemma 2 28B", 224): 27_650_192_112,
    ("PaliGemma 2 28B", 448): 27_651_076_848,
    ("PaliGemma 2 28B", 896): 27_654_615_792,
}
PARAMETERS_OF_HUB = {
    ("PaliGemma 3B", 224): 2_923_466_480,
    ("PaliGemma 3B", 896): 2_927_890_160,
    ("PaliGemma 2 3B", 224): 3_032_242_416,
}


def official_config(size: str, resolution: int, vocab_size: int) -> dict:
    return {
        "model_type": "paligemma",
        "hidden_size": 2048,
        "image_token_index": 257152,
        "projection_dim": TEXT[size]["hidden_size"],
        "text_config": {**TEXT[size], "vocab_size": vocab_size},
        "vision_config": {**VISION, "image_size": resolution, "projection_dim": TEXT[size]["hidden_size"]},
    }


def our_shapes(size: str, resolution: int, vocab_size: int) -> dict[str, torch.Size]:
    with torch.device("meta"):
        model = PaliGemmaForConditionalGeneration(
            PaliGemmaConfig.from_dict(official_config(size, resolution, vocab_size))
        )
    return {name: parameter.shape for name, parameter in model.named_parameters()}


def count(shapes: dict[str, torch.Size]) -> int:
    return sum(shape.numel() for shape in shapes.values())


@pytest.mark.parametrize(("size", "resolution"), PARAMETERS)
def test_parameter_names_and_shapes_equal_transformers(size: str, resolution: int):
    config = transformers.PaliGemmaConfig(**official_config(size, resolution, TOKENIZER_VOCAB))
    with torch.device("meta"):
        reference = transformers.PaliGemmaForConditionalGeneration(config)
    shapes = our_shapes(size, resolution, TOKENIZER_VOCAB)
    assert shapes == {canonical_name(name): parameter.shape for name, parameter in reference.named_parameters()}
    assert count(shapes) == PARAMETERS[size, resolution]


@pytest.mark.parametrize(("size", "resolution"), PARAMETERS_OF_HUB)
def test_parameter_counts_equal_the_hubs_files(size: str, resolution: int):
    assert count(our_shapes(size, resolution, HUB_VOCAB)) == PARAMETERS_OF_HUB[size, resolution]


def test_paligemma_3b_has_603_tensors():
    assert len(our_shapes("PaliGemma 3B", 896, HUB_VOCAB)) == 603
