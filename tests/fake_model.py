"""A fake of `paligemma.PaliGemma` that generates scripted tokens, without weights or a forward pass."""

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

# A processor for images of 56 x 56 pixels and patches of 14 x 14.
PROCESSOR = SimpleNamespace(
    image_size=56,
    num_image_tokens=16,
    image_settings=ImageSettings(),
    resize=partial(resize, size=56),
    normalize=normalize,
    encode_text=list,  # one token per character
)


class FakeModel:
    """Generates `pieces`, one per step, and then `<eos>`.

    The token at index i has the id 10 * i, and its alternatives the next two ids. A forced id replaces the token.

    Attributes:
        requests: arguments of each call of `stream`.
        closed_after: number of steps of the last stream that has ended or was closed.
    """

    def __init__(self, pieces: tuple[str, ...] = ("▁a", "▁cat"), seconds_per_token: float = 0.0) -> None:
        self.pieces = (*pieces, "<eos>")
        self.seconds_per_token = seconds_per_token
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
                time.sleep(self.seconds_per_token)
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
        chosen = next((rank for rank, candidate in enumerate(top) if candidate.token_id == forced), 0)
        piece = top[chosen].piece
        delta = "" if piece == "<eos>" else piece.replace("▁", " ")
        text = (steps[-1].text if steps else "") + delta
        return make_step(top, index, text, delta, "eos" if is_last else None, top[chosen], chosen + 1)


def fake_inspection(model: Any, image: Any, prompt: str, token_ids: Any, index: int) -> Inspection:
    """Fake of `paligemma.lens.inspect`: 2 layers with 2 heads that attend to patch `index` of 4 x 4 patches."""
    attention = torch.zeros(2, 2, 16)
    attention[..., index % 16] = 0.5
    lens = tuple(LensRow(layer, token_ids[index], "▁cat", 0.25 * (layer + 1), 3 - layer, 1.5) for layer in range(3))
    return Inspection(index, token_ids[index], "▁cat", (4, 4), attention, attention.sum(dim=-1), lens)


def fake_image_shares(model: Any, image: Any, prompt: str, token_ids: Any) -> torch.Tensor:
    """Fake of `paligemma.lens.image_shares`: half of each token's attention goes to the image."""
    return torch.full((len(token_ids), 2, 2), 0.5)


def make_candidate(token_id: int, piece: str, logit: float, sampled_prob: float | None = None) -> Candidate:
    """A candidate of a distribution with logsumexp 5.5. By default the one with logit 5 is sampled greedily."""
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
    """A step that samples the first of `top` unless `chosen` is given."""
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
