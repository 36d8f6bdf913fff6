"""Implementations measured by the speed benchmark: this package and transformers, timed from request to last token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

import torch
import transformers
from torch import Tensor, nn

import paligemma
from paligemma.benchmarks.costs import synchronize
from paligemma.benchmarks.reference import Request, load_reference, load_reference_processor, reference_inputs


@dataclass(frozen=True)
class Times:
    """Times of one request.

    Attributes:
        image_s: seconds in the vision tower and projector (transformers: vision tower only).
        first_token_s: time to first token in seconds, including preprocessing.
        token_s: mean seconds per token after the first.
        tower_runs: number of forward passes of the vision tower.
    """

    image_s: float
    first_token_s: float
    token_s: float
    tower_runs: int


class Implementation(Protocol):
    """An implementation to measure; `quantize` is its weight quantization or None."""

    @property
    def name(self) -> str: ...

    @property
    def quantize(self) -> str | None: ...

    def generate(self, request: Request, token_ids: Sequence[int]) -> Times:
        """Generate and time exactly these tokens (at least 2), with the full computation for each."""


class Ours:
    """This package's `generate`; the times include candidates, probabilities and text of each step."""

    def __init__(self, name: str, vlm: paligemma.PaliGemma, quantize: str | None = None) -> None:
        self.name = name
        self.vlm = vlm
        self.quantize = quantize

    def generate(self, request: Request, token_ids: Sequence[int]) -> Times:
        with time_vision_tower(self.vlm.model.vision_tower, self.vlm.device) as tower:
            result = self.vlm.generate(
                request.image, request.prompt, max_new_tokens=len(token_ids), forced_ids=token_ids
            )
        timing = result.timing
        if timing.tokens_per_s is None:
            raise ValueError(f"token_ids must contain at least 2 tokens, got {len(token_ids)}.")
        return Times(timing.image_s, timing.first_token_s, 1 / timing.tokens_per_s, len(tower))


class Transformers:
    """transformers with its own KV cache, last-position logits and greedy decoding.

    The forward pass is called directly, without the overhead of transformers' `generate`.
    """

    quantize = None

    def __init__(
        self,
        model: transformers.PaliGemmaForConditionalGeneration,
        processor: transformers.PaliGemmaProcessor,
        attention: str,
    ) -> None:
        self.name = f"transformers {attention}"
        self._model = model
        self._processor = processor
        self._attention = attention

    @torch.inference_mode()
    def generate(self, request: Request, token_ids: Sequence[int]) -> Times:
        self._model.set_attn_implementation(self._attention)
        device = self._model.device
        with time_vision_tower(self._model.model.vision_tower, device) as tower:
            started = perf_counter()
            inputs = {name: tensor.to(device) for name, tensor in reference_inputs(self._processor, request).items()}
            inputs["pixel_values"] = inputs["pixel_values"].to(self._model.dtype)
            types = torch.zeros_like(inputs["input_ids"])
            output = self._model(**inputs, token_type_ids=types, use_cache=True, logits_to_keep=1)
            _greedy_token(output.logits)
            first = perf_counter()
            for token_id in token_ids[:-1]:
                token = types.new_tensor([[token_id]])
                output = self._model(input_ids=token, cache=output.cache, use_cache=True, logits_to_keep=1)
                _greedy_token(output.logits)
            seconds = (perf_counter() - first) / (len(token_ids) - 1)
        return Times(sum(tower), first - started, seconds, len(tower))


def _greedy_token(logits: Tensor) -> int:
    return int(logits[0, -1].argmax())


def load_transformers(folder: Path, dtype: torch.dtype, device: torch.device) -> list[Transformers]:
    """Load the model once and return one implementation per supported attention kernel."""
    model = load_reference(folder, dtype)
    nn.Module.to(model, device)  # the declared type of PreTrainedModel.to rejects a device
    processor = load_reference_processor(folder)
    # PyTorch's fused attention has no soft-capping, which PaliGemma 2 needs.
    text_config: Any = model.config.text_config
    kinds = ("eager",) if text_config.model_type == "gemma2" else ("eager", "sdpa")
    return [Transformers(model, processor, kind) for kind in kinds]


@contextmanager
def time_vision_tower(tower: nn.Module, device: torch.device) -> Iterator[list[float]]:
    """Yield a list that receives the seconds of each forward pass of the vision tower."""
    started: list[float] = []
    seconds: list[float] = []

    def start(*_: object) -> None:
        synchronize(device)
        started.append(perf_counter())

    def stop(*_: object) -> None:
        synchronize(device)
        seconds.append(perf_counter() - started[-1])

    handles = (tower.register_forward_pre_hook(start), tower.register_forward_hook(stop))
    try:
        yield seconds
    finally:
        for handle in handles:
            handle.remove()


@dataclass(frozen=True)
class Rounds:
    """Times of all rounds.

    Attributes:
        times: by implementation name, one Times per round.
        second_prompt: the same for a second prompt on each round's image (this package only).
    """

    times: dict[str, list[Times]]
    second_prompt: dict[str, list[Times]]


def run_interleaved(
    implementations: Sequence[Implementation],
    requests: Sequence[Request],
    token_ids: Sequence[int],
    second_prompt: str,
) -> Rounds:
    """Run each request on all implementations in turn, so that drift of the machine affects all of them equally."""
    rounds = Rounds({}, {})
    for request in requests:
        for implementation in implementations:
            rounds.times.setdefault(implementation.name, []).append(implementation.generate(request, token_ids))
            if isinstance(implementation, Ours):
                second = implementation.generate(replace(request, prompt=second_prompt), token_ids[:2])
                rounds.second_prompt.setdefault(implementation.name, []).append(second)
    return rounds


def fastest(implementations: Sequence[Transformers], request: Request, token_ids: Sequence[int]) -> list[Transformers]:
    """Return the implementations with the shortest time to first token and time per token (one or two)."""
    times = [implementation.generate(request, token_ids) for implementation in implementations]
    indices = range(len(implementations))
    best = {
        min(indices, key=lambda index: times[index].first_token_s),
        min(indices, key=lambda index: times[index].token_s),
    }
    return [implementations[index] for index in sorted(best)]
