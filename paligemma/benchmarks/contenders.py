"""bench: who answers the same requests in turn, each timed from the picture and the prompt to its last token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Protocol

import torch
import transformers
from torch import Tensor, nn

import paligemma
from paligemma.benchmarks.costs import synchronize
from paligemma.benchmarks.reference import Request, load_reference, load_reference_processor, reference_inputs


@dataclass(frozen=True)
class Times:
    """Seconds of one answer.

    Attributes:
        picture_s: vision tower and projector (transformers: the tower alone).
        first_token_s: from the request, picture and prompt as a user gives them, to the first token.
        token_s: a token behind the first one, as the mean of one answer.
        tower_runs: how often the vision tower ran.
    """

    picture_s: float
    first_token_s: float
    token_s: float
    tower_runs: int


class Contender(Protocol):
    """Whoever answers; `quantize` says how the weights are kept, None for their own type."""

    name: str
    quantize: str | None

    def answer(self, request: Request, token_ids: Sequence[int]) -> Times:
        """Write exactly these ids, at least two, computing and choosing as ever for each."""


class Ours:
    """This package, through `generate`: the times include what a Step tells (candidates, probabilities, text)."""

    def __init__(self, name: str, vlm: paligemma.PaliGemma, quantize: str | None = None) -> None:
        self.name = name
        self.vlm = vlm
        self.quantize = quantize

    def answer(self, request: Request, token_ids: Sequence[int]) -> Times:
        with tower_stopwatch(self.vlm.model.vision_tower, self.vlm.device) as tower:
            result = self.vlm.generate(
                request.image, request.prompt, max_new_tokens=len(token_ids), forced_ids=token_ids
            )
        timing = result.timing
        return Times(timing.image_s, timing.first_token_s, 1 / timing.tokens_per_s, len(tower))


class Transformers:
    """transformers with its own cache, logits for the last position only, and the likeliest token chosen.

    Its forward pass is called directly, which spares it what its `generate` adds.
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
    def answer(self, request: Request, token_ids: Sequence[int]) -> Times:
        self._model.set_attn_implementation(self._attention)
        device = self._model.device
        with tower_stopwatch(self._model.model.vision_tower, device) as tower:
            began = perf_counter()
            inputs = {name: tensor.to(device) for name, tensor in reference_inputs(self._processor, request).items()}
            inputs["pixel_values"] = inputs["pixel_values"].to(self._model.dtype)
            types = torch.zeros_like(inputs["input_ids"])
            output = self._model(**inputs, token_type_ids=types, use_cache=True, logits_to_keep=1)
            _choose(output.logits)
            first = perf_counter()
            for token_id in token_ids[:-1]:
                token = types.new_tensor([[token_id]])
                output = self._model(input_ids=token, cache=output.cache, use_cache=True, logits_to_keep=1)
                _choose(output.logits)
            seconds = (perf_counter() - first) / (len(token_ids) - 1)
        return Times(sum(tower), first - began, seconds, len(tower))


def _choose(logits: Tensor) -> int:
    return int(logits[0, -1].argmax())


def load_transformers(folder: Path, dtype: torch.dtype, device: torch.device) -> list[Transformers]:
    """One model, as a contender for each kind of attention that transformers has for it."""
    model = load_reference(folder, dtype).to(device)
    processor = load_reference_processor(folder)
    # Soft-capped attention, which PaliGemma 2 needs, is not in PyTorch's fused kernel.
    kinds = ("eager",) if model.config.text_config.model_type == "gemma2" else ("eager", "sdpa")
    return [Transformers(model, processor, kind) for kind in kinds]


@contextmanager
def tower_stopwatch(tower: nn.Module, device: torch.device) -> Iterator[list[float]]:
    """A list of the seconds of each run of the vision tower."""
    began: list[float] = []
    seconds: list[float] = []

    def start(*_: object) -> None:
        synchronize(device)
        began.append(perf_counter())

    def stop(*_: object) -> None:
        synchronize(device)
        seconds.append(perf_counter() - began[-1])

    handles = (tower.register_forward_pre_hook(start), tower.register_forward_hook(stop))
    try:
        yield seconds
    finally:
        for handle in handles:
            handle.remove()


@dataclass(frozen=True)
class Rounds:
    """What was measured round by round.

    Attributes:
        times: by contender, a Times a round.
        second_prompt: by contender of ours, likewise, for another prompt on the picture of the same round.
    """

    times: dict[str, list[Times]]
    second_prompt: dict[str, list[Times]]


def take_turns(
    contenders: Sequence[Contender], requests: Sequence[Request], token_ids: Sequence[int], second_prompt: str
) -> Rounds:
    """Every contender answers every request, A B A B ...; ours then answer a second prompt on the same picture."""
    rounds = Rounds({}, {})
    for request in requests:
        for contender in contenders:
            rounds.times.setdefault(contender.name, []).append(contender.answer(request, token_ids))
            if isinstance(contender, Ours):
                again = contender.answer(replace(request, prompt=second_prompt), token_ids[:2])
                rounds.second_prompt.setdefault(contender.name, []).append(again)
    return rounds


def faster(contenders: Sequence[Transformers], request: Request, token_ids: Sequence[int]) -> list[Transformers]:
    """Those that are the fastest to the first token or a token: one, or two that divide it between them."""
    times = [contender.answer(request, token_ids) for contender in contenders]
    indices = range(len(contenders))
    best = {
        min(indices, key=lambda index: times[index].first_token_s),
        min(indices, key=lambda index: times[index].token_s),
    }
    return [contenders[index] for index in sorted(best)]
