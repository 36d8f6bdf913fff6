"""Small random PaliGemma models, built with our own classes, with varied greedy answers."""

from __future__ import annotations

from functools import cache

import torch

from paligemma.benchmarks.random_checkpoints import random_weight
from paligemma.benchmarks.tiny_tokenizer import build_tiny_tokenizer
from paligemma.config import GemmaConfig, PaliGemmaConfig, SiglipVisionConfig
from paligemma.modeling import PaliGemmaForConditionalGeneration
from paligemma.processing import PaliGemmaProcessor

UNUSED_IDS = 32
WINDOW = 24  # longer than a short prefix (16 image tokens and a prompt), shorter than with a long answer
TEXT_SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
TEXT_CONFIGS = {
    "paligemma1": {**TEXT_SIZES, "model_type": "gemma", "num_key_value_heads": 1, "head_dim": 8},
    "paligemma2": {
        **TEXT_SIZES,
        "model_type": "gemma2",
        "num_key_value_heads": 2,
        "head_dim": 16,
        "query_pre_attn_scalar": 12,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "sliding_window": WINDOW,
    },
}
KINDS = tuple(TEXT_CONFIGS)


@cache
def tiny_processor() -> PaliGemmaProcessor:
    """A processor for 56 x 56 pixels and 16 image tokens."""
    return PaliGemmaProcessor(build_tiny_tokenizer(), image_size=56, num_image_tokens=16)


def tiny_config(kind: str, max_position_embeddings: int = 256) -> PaliGemmaConfig:
    """A configuration whose vocabulary is the tiny tokenizer's plus unused ids, as in Google's checkpoints."""
    image_token = tiny_processor().image_token_id
    return PaliGemmaConfig(
        vision_config=SiglipVisionConfig(
            hidden_size=24, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, image_size=56
        ),
        text_config=GemmaConfig(
            **TEXT_CONFIGS[kind],
            vocab_size=image_token + 1 + UNUSED_IDS,
            max_position_embeddings=max_position_embeddings,
        ),
        image_token_index=image_token,
    )


def tiny_model(
    kind: str = "paligemma1", dtype: torch.dtype = torch.float32, config: PaliGemmaConfig | None = None
) -> PaliGemmaForConditionalGeneration:
    """A model with the same weights at every call."""
    model = PaliGemmaForConditionalGeneration(config or tiny_config(kind)).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(10)
    for name, parameter in model.named_parameters():
        shared_name = name.replace("language_model.model.", "language_model.")
        parameter.copy_(random_weight(shared_name, parameter.shape, generator))
    return model.to(dtype)
