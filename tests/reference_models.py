"""Random transformers models, and ours with the same weights, cached for all tests."""

from __future__ import annotations

from functools import lru_cache

import torch
import transformers

from paligemma.benchmarks.random_checkpoints import CASES, Case, hub_name, make_model
from paligemma.benchmarks.tiny_tokenizer import build_tiny_tokenizer
from paligemma.config import PaliGemmaConfig
from paligemma.modeling import PaliGemmaForConditionalGeneration

SHORT_PROMPT, LONG_PROMPT = "detect", "answer en the blue cat in the square"
FAST_CASES = ("paligemma1", "grouped", "paligemma2", "sliding")


@lru_cache
@torch.inference_mode(False)
def reference_model(case: str, seed: int = 0) -> transformers.PaliGemmaForConditionalGeneration:
    """transformers' float32 model of a case. Cached: do not modify it."""
    return make_model(case, seed)


@lru_cache
@torch.inference_mode(False)
def our_model(case: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> PaliGemmaForConditionalGeneration:
    """Our model with the same weights. Cached: do not modify it."""
    return convert(reference_model(case, seed)).to(dtype)


@torch.inference_mode(False)
def new_model(case: Case | str, seed: int = 0) -> PaliGemmaForConditionalGeneration:
    """Our model with random weights, not cached."""
    return convert(make_model(case, seed))


@torch.inference_mode(False)
def convert(reference: transformers.PaliGemmaForConditionalGeneration) -> PaliGemmaForConditionalGeneration:
    """Our model with the weights of transformers' model."""
    config = PaliGemmaConfig.from_dict(reference.config.to_dict())
    model = PaliGemmaForConditionalGeneration(config).eval()
    model.load_state_dict({hub_name(name): tensor for name, tensor in reference.state_dict().items()})
    return model


def config_of(case: str) -> PaliGemmaConfig:
    return our_model(case).config


def pixels_of(case: str, batch: int = 1, seed: int = 0) -> torch.Tensor:
    """Random pixels, (batch, 3, size, size), in [-1, 1]."""
    size = CASES[case].image_size
    generator = torch.Generator().manual_seed(seed)
    return torch.rand((batch, 3, size, size), generator=generator) * 2 - 1


def prompt_ids(case: str, prompt: str = SHORT_PROMPT) -> torch.Tensor:
    """Image tokens, bos, prompt, newline: (1, tokens)."""
    config = config_of(case)
    image = [config.image_token_index] * config.vision_config.num_image_tokens
    return torch.tensor([image + build_tiny_tokenizer().encode(prompt + "\n").ids])


def random_ids(count: int, batch: int = 1, seed: int = 0) -> torch.Tensor:
    """Random answer tokens, (batch, count), without special tokens."""
    return torch.randint(20, 1500, (batch, count), generator=torch.Generator().manual_seed(seed))


def reference_logits(case: str, input_ids: torch.Tensor, **inputs: torch.Tensor) -> torch.Tensor:
    """transformers' logits, with all tokens as prefix unless token_type_ids are given."""
    inputs.setdefault("token_type_ids", torch.zeros_like(input_ids))
    inputs.setdefault("pixel_values", pixels_of(case, len(input_ids)))
    with torch.inference_mode():
        return reference_model(case)(input_ids=input_ids, **inputs).logits
