"""A stand-in for `paligemma.PaliGemma` that answers from a script: no weights, no forward pass."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from PIL import Image

from paligemma.generation import Candidate, GenerationResult, Step, Timing
from paligemma.image_processing import ImageSettings, normalize, resize
from paligemma.lens import Inspection, LensRow

ALTERNATIVES = ("▁other", "▁else")


# 56 pixels a side, and patches of 14: what a processor says of itself.
PROCESSOR = SimpleNamespace(
    image_size=56,
    num_image_tokens=16,
    image_settings=ImageSettings(),
    resize=partial(resize, size=56),
    normalize=normalize,
    encode_text=list,  # a token a character
)


class FakeModel:
    """Writes `pieces`, one a step, and ends with `<eos>`. Records what it was asked and whether it was closed.

    The token at a place has the id 10 * place, and its alternatives the two ids behind it. A forced id is written in
    its place, as the model would.
    """

    def __init__(self, pieces: tuple[str, ...] = ("▁a", "▁cat"), seconds_a_token: float = 0.0) -> None:
        self.pieces = (*pieces, "<eos>")
        self.seconds_a_token = seconds_a_token
        self.model = torch.nn.Linear(8, 8)
        self.config = SimpleNamespace(text_config=SimpleNamespace(final_logit_softcapping=None))
        self.device, self.dtype, self.revision, self.source = torch.device("cpu"), torch.float32, None, "bundled"
        self.quantize, self.backend, self.num_parameters = None, "float32", 72
        self.processor = PROCESSOR
        self.requests: list[dict[str, Any]] = []
        self.closed_after: int | None = None

    def stream(self, image: Image.Image, prompt: str, **options: Any) -> Iterator[Step]:
        self.requests.append({"image": image, "prompt": prompt, **options})
        steps: list[Step] = []
        try:
            for index in range(len(self.pieces)):
                time.sleep(self.seconds_a_token)
                steps.append(self._step(index, options["top_n"], options.get("forced_ids", ()), steps))
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

    def _step(self, index: int, top_n: int, forced_ids: tuple[int, ...], steps: list[Step]) -> Step:
        is_last = index == len(self.pieces) - 1
        top = tuple(
            make_candidate(10 * index + rank, piece, 5.0 - rank)
            for rank, piece in enumerate((self.pieces[index], *ALTERNATIVES)[:top_n])
        )
        forced = forced_ids[index] if index < len(forced_ids) else None
        place = next((place for place, candidate in enumerate(top) if candidate.token_id == forced), 0)
        piece = top[place].piece
        delta = "" if piece == "<eos>" else piece.replace("▁", " ")
        text = (steps[-1].text if steps else "") + delta
        return make_step(top, index, text, delta, "eos" if is_last else None, top[place], place + 1)


def fake_inspection(model: Any, image: Any, prompt: str, token_ids: Any, index: int) -> Inspection:
    """In place of `paligemma.lens.inspect`: 2 layers of 2 heads that all look at patch `index`, of 4 x 4."""
    attention = torch.zeros(2, 2, 16)
    attention[..., index % 16] = 0.5
    lens = tuple(LensRow(layer, token_ids[index], "▁cat", 0.25 * (layer + 1), 3 - layer, 1.5) for layer in range(3))
    return Inspection(index, token_ids[index], "▁cat", (4, 4), attention, attention.sum(dim=-1), lens)


def fake_image_shares(model: Any, image: Any, prompt: str, token_ids: Any) -> torch.Tensor:
    """In place of `paligemma.lens.picture_shares`: every token gives half of its attention to the picture."""
    return torch.full((len(token_ids), 2, 2), 0.5)


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
