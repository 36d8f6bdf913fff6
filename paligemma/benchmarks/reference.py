"""One checkpoint, answered by transformers and by this package, and how far the two lie apart.

The reference is transformers with eager attention, `token_type_ids` of zero in the prefix and SigLIP's Pillow image
processor. Both sides go the way a user goes: from files, a picture and a prompt.
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

PREFIX_ROWS = 64  # of the prefix's logits, the last so many are compared; all of them would take 4 GB at 896 pixels


@dataclass(frozen=True)
class Request:
    """A picture and a prompt."""

    image: Image.Image
    prompt: str


@dataclass(frozen=True)
class Sample:
    """What one side made of a request.

    Attributes:
        input_ids: (prefix tokens,). pixels: (3, size, size), float32.
        greedy: the greedy answer's ids.
        logits: float32, (rows, pieces): at the end of the prefix and behind each token of the answer that was fed, for
            the ids that have a tokenizer piece.
    """

    input_ids: Tensor
    pixels: Tensor
    greedy: tuple[int, ...]
    logits: Tensor


def random_picture(seed: int) -> Image.Image:
    """Colored blocks, 90 x 70 pixels: enough for resizing and every patch to matter."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (7, 9, 3), generator=generator, dtype=torch.uint8)
    return Image.fromarray(blocks.numpy()).resize((90, 70), Image.Resampling.NEAREST)


def load_reference(folder: Path, dtype: torch.dtype | str) -> transformers.PaliGemmaForConditionalGeneration:
    """transformers' model, with eager attention; "auto" keeps the stored type."""
    return transformers.PaliGemmaForConditionalGeneration.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager"
    ).eval()


def load_reference_processor(folder: Path) -> transformers.PaliGemmaProcessor:
    """transformers' processor, with Pillow's resizing."""
    return transformers.AutoProcessor.from_pretrained(folder, backend="pil")


def reference_inputs(processor: transformers.PaliGemmaProcessor, request: Request) -> dict[str, Tensor]:
    """`input_ids`, `attention_mask` and `pixel_values` of one request."""
    # The token stands for the picture; without it the processor adds the same and warns.
    inputs = processor(images=request.image, text="<image>" + request.prompt, return_tensors="pt")
    return {name: inputs[name] for name in ("input_ids", "attention_mask", "pixel_values")}


def reference_samples(
    folder: Path,
    dtype: torch.dtype,
    requests: Sequence[Request],
    num_tokens: int,
    answers: Sequence[Sequence[int]] = (),
) -> list[Sample]:
    """transformers' side.

    Args:
        num_tokens: longest greedy answer.
        answers: fed behind each prefix for the logits; none: the greedy ones.
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
            Sample(inputs["input_ids"][0], inputs["pixel_values"][0], greedy, pieces_only(logits, config, allowed))
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
    """Prefix and answer in one pass, the answer marked as a causal suffix."""
    prefix, suffix = inputs["input_ids"], torch.tensor([list(answer)])
    input_ids = torch.cat((prefix, suffix), dim=1)
    output = model(
        input_ids=input_ids,
        pixel_values=inputs["pixel_values"].to(model.dtype),
        attention_mask=torch.ones_like(input_ids),
        token_type_ids=torch.cat((torch.zeros_like(prefix), torch.ones_like(suffix)), dim=1),
        logits_to_keep=min(prefix.shape[1], PREFIX_ROWS) + len(answer),
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
    """This package's side, with a cache; `answers` are fed token by token for the logits."""
    vlm = paligemma.load(folder, device="cpu", dtype=dtype, quantize=quantize)
    allowed = vlm.processor.allowed_tokens(vlm.config.text_config.vocab_size)
    samples = []
    for request, answer in zip(requests, answers, strict=True):
        inputs = vlm.processor([request.image], [request.prompt])
        greedy = vlm.generate(request.image, request.prompt, max_new_tokens=num_tokens).token_ids
        logits = our_logits(vlm.model, inputs, answer)
        samples.append(
            Sample(inputs["input_ids"][0], inputs["pixel_values"][0], greedy, pieces_only(logits, vlm.config, allowed))
        )
    return samples


@torch.inference_mode()
def our_logits(
    model: paligemma.PaliGemmaForConditionalGeneration,
    inputs: dict[str, Tensor],
    answer: Sequence[int],
    prefix_rows: int = PREFIX_ROWS,
) -> Tensor:
    """Logits of the prefix's last rows and behind each token of the answer, which is fed as it would be generated."""
    prefix = inputs["input_ids"]
    cache = KVCache(model.config, 1, prefix.shape[1] + len(answer), model.activation_dtype, model.device)
    rows = [model(prefix, inputs["pixel_values"], kv_cache=cache, logits_to_keep=prefix_rows)["logits"][0]]
    rows += [model(torch.tensor([[token]]), kv_cache=cache)["logits"][0] for token in answer]
    return torch.cat(rows)


def allowed_tokens(folder: Path, config: paligemma.PaliGemmaConfig) -> Tensor:
    """Which ids may be sampled, (vocabulary,), bool."""
    processor = paligemma.PaliGemmaProcessor.from_folder(folder, config)
    return processor.allowed_tokens(config.text_config.vocab_size)


def pieces_only(logits: Tensor, config: paligemma.PaliGemmaConfig, allowed: Tensor) -> Tensor:
    """The columns of ids with a tokenizer piece: those that may be sampled, and the image token where it has a row."""
    with_piece = allowed.clone()
    with_piece[config.image_token_index : config.image_token_index + 1] = True
    return logits[:, with_piece]


# Measures ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Agreement:
    """How two sides' samples of the same requests compare."""

    ids_equal: bool
    pixels_equal: bool
    greedy_equal: bool
    max_difference: float


def agreement(ours: Sequence[Sample], reference: Sequence[Sample]) -> Agreement:
    """Compare sample by sample."""
    pairs = list(zip(ours, reference, strict=True))
    return Agreement(
        ids_equal=all(torch.equal(a.input_ids, b.input_ids) for a, b in pairs),
        pixels_equal=all(torch.equal(a.pixels, b.pixels) for a, b in pairs),
        greedy_equal=all(a.greedy == b.greedy for a, b in pairs),
        max_difference=max((a.logits - b.logits).abs().max().item() for a, b in pairs),
    )


def mean_relative_error(samples: Sequence[Sample], reference: Sequence[Sample]) -> float:
    """Mean over the samples of |a - b| / |b|, 2-norms over all compared logits."""
    errors = [
        (torch.linalg.vector_norm(a.logits - b.logits) / torch.linalg.vector_norm(b.logits)).item()
        for a, b in zip(samples, reference, strict=True)
    ]
    return sum(errors) / len(errors)
