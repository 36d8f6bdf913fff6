"""A stand-in for `paligemma.PaliGemma` that answers from a script: no weights, no forward pass."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from PIL import Image

from paligemma.generation import Candidate, GenerationResult, Step, Timing

ALTERNATIVES = ("▁other", "▁else")


class FakeModel:
    """Writes `pieces`, one a step, and ends with `<eos>`. Records what it was asked and whether it was closed."""

    def __init__(self, pieces: tuple[str, ...] = ("▁a", "▁cat"), seconds_a_token: float = 0.0) -> None:
        self.pieces = (*pieces, "<eos>")
        self.seconds_a_token = seconds_a_token
        self.model = torch.nn.Linear(8, 8)
        self.config = SimpleNamespace(text_config=SimpleNamespace(final_logit_softcapping=None))
        self.device, self.dtype, self.revision = torch.device("cpu"), torch.float32, None
        self.requests: list[dict[str, Any]] = []
        self.closed_after: int | None = None

    def stream(self, image: Image.Image, prompt: str, **options: Any) -> Iterator[Step]:
        self.requests.append({"image": image, "prompt": prompt, **options})
        steps: list[Step] = []
        try:
            for index in range(len(self.pieces)):
                time.sleep(self.seconds_a_token)
                steps.append(self._step(index, options["top_n"]))
                yield steps[-1]
        finally:
            self.closed_after = len(steps)
        return GenerationResult(
            text=steps[-1].text,
            token_ids=tuple(step.token_id for step in steps),
            steps=tuple(steps),
            finish_reason="eos",
            timing=Timing(image_s=0.01, first_token_s=0.02, total_s=0.05, tokens_per_s=50.0),
            seed=7,
        )

    def _step(self, index: int, top_n: int) -> Step:
        is_last = index == len(self.pieces) - 1
        texts = ["" if piece == "<eos>" else piece.replace("▁", " ") for piece in self.pieces]
        top = tuple(
            make_candidate(10 * index + rank, piece, 5.0 - rank)
            for rank, piece in enumerate((self.pieces[index], *ALTERNATIVES)[:top_n])
        )
        return make_step(top, index, "".join(texts[: index + 1]), texts[index], "eos" if is_last else None)


def make_candidate(token_id: int, piece: str, logit: float, sampled_prob: float | None = None) -> Candidate:
    """A candidate of a distribution whose log-sum-exp is 5.5; greedy's first has the logit 5."""
    logprob = logit - 5.5
    sampled = float(logit == 5.0) if sampled_prob is None else sampled_prob
    return Candidate(token_id, piece, logit, logprob, math.exp(logprob), sampled)


def make_step(
    top: tuple[Candidate, ...],
    index: int = 0,
    text: str = "",
    text_delta: str = "",
    finish_reason: str | None = None,
    chosen: Candidate | None = None,
    rank: int = 1,
) -> Step:
    """A step whose chosen token is the first of `top`, unless another is given."""
    token = chosen or top[0]
    return Step(
        index=index,
        token_id=token.token_id,
        piece=token.piece,
        text_delta=text_delta,
        text=text,
        logit=token.logit,
        logprob=token.logprob,
        prob=token.prob,
        sampled_prob=token.sampled_prob,
        rank=rank,
        entropy=1.25,
        logsumexp=5.5,
        top=top,
        finish_reason=finish_reason,
        seconds=0.01 * (index + 1),
    )
