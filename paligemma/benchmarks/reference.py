"""Run a checkpoint with transformers and with this package, and compare inputs, greedy answers and logits.

The reference is transformers with eager attention, `token_type_ids` of zero in the prefix and SigLIP's Pillow image
processor. Both implementations load the checkpoint from files and preprocess image and prompt themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from PIL import Image
from torch import Tensor

import paligemma
from paligemma.kv_cache import KVCache

PREFIX_POSITIONS = 64  # last prefix positions whose logits are compared; all would take 4 GB at 896 pixels


@dataclass(frozen=True)
class Request:
    """An image and a prompt."""

    image: Image.Image
    prompt: str


@dataclass(frozen=True)
class Sample:
    """Inputs and outputs of one implementation for a request.

    Attributes:
        input_ids: (prefix tokens,). pixels: (3, size, size), float32.
        greedy: token ids of the greedy answer.
        logits: float32, (positions, tokenizer vocabulary): the last prefix positions and each answer token.
    """

    input_ids: Tensor
    pixels: Tensor
    greedy: tuple[int, ...]
    logits: Tensor


def random_image(seed: int) -> Image.Image:
    """Return an image of random colored blocks, 90 x 70 pixels."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (7, 9, 3), generator=generator, dtype=torch.uint8)
    return Image.fromarray(blocks.numpy()).resize((90, 70), Image.Resampling.NEAREST)


def load_reference(folder: Path, dtype: torch.dtype | str) -> transformers.PaliGemmaForConditionalGeneration:
    """Load the transformers model with eager attention; "auto" keeps the stored dtype."""
    return transformers.PaliGemmaForConditionalGeneration.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager"
    ).eval()


def load_reference_processor(folder: Path) -> transformers.PaliGemmaProcessor:
    """Load the transformers processor with Pillow resizing."""
    return transformers.AutoProcessor.from_pretrained(folder, backend="pil")


def reference_inputs(processor: transformers.PaliGemmaProcessor, request: Request) -> dict[str, Tensor]:
    """Return `input_ids`, `attention_mask` and `pixel_values` of one request."""
    # Without "<image>", the processor adds it and warns.
    inputs = processor(images=request.image, text="<image>" + request.prompt, return_tensors="pt")
    return {name: inputs[name] for name in ("input_ids", "attention_mask", "pixel_values")}


def reference_samples(
    folder: Path,
    dtype: torch.dtype,
    requests: Sequence[Request],
    num_tokens: int,
    answers: Sequence[Sequence[int]] = (),
) -> list[Sample]:
    """Run transformers.

    Args:
        num_tokens: maximum length of the greedy answer.
        answers: token ids appended to each prefix for the logits (default: the greedy answers).
    """
    model, processor = load_reference(folder, dtype), load_reference_processor(folder)
    config = paligemma.PaliGemmaConfig.from_folder(folder)
    allowed = allowed_tokens(folder, config)
    samples = []
    for index, request in enumerate(requests):
        inputs = reference_inputs(processor, request)
        greedy = _reference_greedy(model, inputs, num_tokens, config, allowed)
        logits = _reference_logits(model, inputs, answers[index] if answers else greedy)
        samples.append(
            Sample(
                inputs["input_ids"][0], inputs["pixel_values"][0], greedy, select_token_logits(logits, config, allowed)
            )
        )
    return samples


@torch.inference_mode()
def _reference_greedy(
    model: transformers.PaliGemmaForConditionalGeneration,
    inputs: dict[str, Tensor],
    num_tokens: int,
    config: paligemma.PaliGemmaConfig,
    allowed: Tensor,
) -> tuple[int, ...]:
    settings = transformers.GenerationConfig(
        do_sample=False,
        max_new_tokens=num_tokens,
        eos_token_id=list(config.eos_token_ids),
        pad_token_id=config.pad_token_id,
        suppress_tokens=(~allowed).nonzero().flatten().tolist(),
    )
    inputs = {**inputs, "pixel_values": inputs["pixel_values"].to(model.dtype)}
    types = torch.zeros_like(inputs["input_ids"])
    output = model.generate(**inputs, token_type_ids=types, generation_config=settings)
    return tuple(output[0, inputs["input_ids"].shape[1] :].tolist())


@torch.inference_mode()
def _reference_logits(
    model: transformers.PaliGemmaForConditionalGeneration, inputs: dict[str, Tensor], answer: Sequence[int]
) -> Tensor:
    """Return the logits of prefix and answer from one forward pass, with the answer as a causal suffix."""
    prefix, suffix = inputs["input_ids"], torch.tensor([list(answer)])
    input_ids = torch.cat((prefix, suffix), dim=1)
    output = model(
        input_ids=input_ids,
        pixel_values=inputs["pixel_values"].to(model.dtype),
        attention_mask=torch.ones_like(input_ids),
        token_type_ids=torch.cat((torch.zeros_like(prefix), torch.ones_like(suffix)), dim=1),
        logits_to_keep=min(prefix.shape[1], PREFIX_POSITIONS) + len(answer),
    )
    return output.logits[0].float()


def our_samples(
    folder: Path,
    dtype: torch.dtype,
    requests: Sequence[Request],
    num_tokens: int,
    answers: Sequence[Sequence[int]],
    quantize: str | None = None,
) -> list[Sample]:
    """Run this package with a KV cache; `answers` are decoded token by token for the logits."""
    vlm = paligemma.load(folder, device="cpu", dtype=dtype, quantize=quantize)
    allowed = vlm.processor.allowed_tokens(vlm.config.text_config.vocab_size)
    samples = []
    for request, answer in zip(requests, answers, strict=True):
        inputs = vlm.processor([request.image], [request.prompt])
        greedy = vlm.generate(request.image, request.prompt, max_new_tokens=num_tokens).token_ids
        logits = our_logits(vlm.model, inputs, answer)
        samples.append(
            Sample(
                inputs["input_ids"][0],
                inputs["pixel_values"][0],
                greedy,
                select_token_logits(logits, vlm.config, allowed),
            )
        )
    return samples


@torch.inference_mode()
def our_logits(
    model: paligemma.PaliGemmaForConditionalGeneration,
    inputs: dict[str, Tensor],
    answer: Sequence[int],
    prefix_positions: int = PREFIX_POSITIONS,
) -> Tensor:
    """Return the logits of the last prefix positions and of each answer token, decoded with a KV cache."""
    prefix = inputs["input_ids"]
    cache = KVCache(model.config, 1, prefix.shape[1] + len(answer), model.activation_dtype, model.device)
    logits = [model(prefix, inputs["pixel_values"], kv_cache=cache, logits_to_keep=prefix_positions)["logits"][0]]
    logits += [model(torch.tensor([[token]]), kv_cache=cache)["logits"][0] for token in answer]
    return torch.cat(logits)


def allowed_tokens(folder: Path, config: paligemma.PaliGemmaConfig) -> Tensor:
    """Return the mask of allowed tokens: bool, (vocab_size,)."""
    processor = paligemma.PaliGemmaProcessor.from_folder(folder, config)
    return processor.allowed_tokens(config.text_config.vocab_size)


def select_token_logits(logits: Tensor, config: paligemma.PaliGemmaConfig, allowed: Tensor) -> Tensor:
    """Select the logits of tokens in the tokenizer: allowed tokens, and the image token if it has an embedding."""
    in_tokenizer = allowed.clone()
    in_tokenizer[config.image_token_index : config.image_token_index + 1] = True
    return logits[:, in_tokenizer]


# Measures


@dataclass(frozen=True)
class Agreement:
    """Comparison of two implementations on the same requests."""

    ids_equal: bool
    pixels_equal: bool
    greedy_equal: bool
    max_difference: float


def agreement(ours: Sequence[Sample], reference: Sequence[Sample]) -> Agreement:
    """Compare the samples pairwise."""
    pairs = list(zip(ours, reference, strict=True))
    return Agreement(
        ids_equal=all(torch.equal(a.input_ids, b.input_ids) for a, b in pairs),
        pixels_equal=all(torch.equal(a.pixels, b.pixels) for a, b in pairs),
        greedy_equal=all(a.greedy == b.greedy for a, b in pairs),
        max_difference=max((a.logits - b.logits).abs().max().item() for a, b in pairs),
    )


def mean_relative_error(samples: Sequence[Sample], reference: Sequence[Sample]) -> float:
    """Return the mean over samples of |a - b| / |b|, with 2-norms over all compared logits."""
    errors = [
        (torch.linalg.vector_norm(a.logits - b.logits) / torch.linalg.vector_norm(b.logits)).item()
        for a, b in zip(samples, reference, strict=True)
    ]
    return sum(errors) / len(errors)
