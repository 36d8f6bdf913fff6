"""bench --accuracy: how far the quantized weights move the answers, beside what bfloat16 itself moves.

Two measures. The bundled model is fed the answers that it gives in float32, token by token (teacher forcing), and at
each position the likeliest token and the distribution are compared with float32's. Random PaliGemma 1 and 2, whose
logits hang on every weight, give the relative error of the logits.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

import paligemma
from paligemma.benchmarks.random_checkpoints import make_model, save_layout
from paligemma.benchmarks.reference import (
    Request,
    mean_relative_error,
    our_logits,
    our_samples,
    random_picture,
    reference_samples,
)

EXAMPLES = Path(__file__).parents[2] / "assets" / "examples"
LONGEST_ANSWER = 48
CAPTIONS = ("caption en", "caption es", "caption zh")
CASES = ("paligemma1", "paligemma2")
RANDOM_PROMPTS = ("caption en", "detect the cat ; blue square")
RANDOM_TOKENS = 12
SEEDS = 5
BIN = re.compile(r"<(loc|seg)(\d+)>")
MAX_BIN_DISTANCE = 4
MIN_AGREEMENT, MAX_DIVERGENCE, MAX_ERROR_RATIO = 0.99, 0.01, 1.2


@dataclass(frozen=True)
class Forced:
    """Teacher forcing against float32.

    Attributes:
        positions, answers: how many were compared.
        agreement: share of the positions with the same likeliest token, or a `<loc>` or `<seg>` within four bins.
        divergence: mean Kullback-Leibler divergence of the distribution from float32's, in nats.
    """

    positions: int
    answers: int
    agreement: float
    divergence: float


@dataclass(frozen=True)
class LogitErrors:
    """Mean relative errors of a random checkpoint's logits against float32, over several seeds."""

    bfloat16: float
    quantized: float

    @property
    def ratio(self) -> float:
        return self.quantized / self.bfloat16


# The bundled model ------------------------------------------------------------------------------------------------


def example_requests(exact: paligemma.PaliGemma) -> list[Request]:
    """What makes sense to ask about the examples: each its own question, captions, and where the things are.

    The things are those that the float32 model's caption names.
    """
    requests = []
    for example in json.loads((EXAMPLES / "examples.json").read_text(encoding="utf-8")):
        image = Image.open(EXAMPLES / example["file"]).convert("RGB")
        caption = exact.generate(image, CAPTIONS[0], max_new_tokens=LONGEST_ANSWER).text
        places = [f"{task} {thing}" for thing in things(caption) for task in ("detect", "segment")]
        prompts = dict.fromkeys((example["prompt"], *CAPTIONS, *places))
        requests += [Request(image, prompt) for prompt in prompts]
    return requests


def things(caption: str) -> list[str]:
    """What a caption such as "a cat, two dogs and an owl" names in the singular: cat, owl."""
    return re.findall(r"\ban? ([\w ]+?)(?=,| and |$)", caption)


def forced(exact: paligemma.PaliGemma, other: paligemma.PaliGemma, requests: Sequence[Request]) -> Forced:
    """Compare `other` with the float32 model `exact` along the latter's greedy answers."""
    agreeing, divergences = 0, []
    for request in requests:
        answer = exact.generate(request.image, request.prompt, max_new_tokens=LONGEST_ANSWER).token_ids
        rows, other_rows = (_rows(vlm, request, answer) for vlm in (exact, other))
        agreeing += count_agreeing(rows, other_rows, exact)
        divergences += divergence(rows, other_rows).tolist()
    positions = len(divergences)
    return Forced(positions, len(requests), agreeing / positions, sum(divergences) / positions)


def _rows(vlm: paligemma.PaliGemma, request: Request, answer: Sequence[int]) -> Tensor:
    """Logits of the ids that may be sampled, for each token of the answer: float64, (tokens, ids)."""
    inputs = vlm.processor([request.image], [request.prompt])
    logits = our_logits(vlm.model, inputs, answer[:-1], prefix_rows=1)
    return logits.cpu()[:, vlm.allowed_tokens].double()


def count_agreeing(rows: Tensor, other_rows: Tensor, vlm: paligemma.PaliGemma) -> int:
    """At how many positions, of (positions, sampleable ids) each, the likeliest tokens agree."""
    token_ids = vlm.allowed_tokens.nonzero().flatten()
    pairs = zip(*(token_ids[likely.argmax(dim=1)].tolist() for likely in (rows, other_rows)), strict=True)
    return sum(is_close(vlm.processor.token_str(ours), vlm.processor.token_str(theirs)) for ours, theirs in pairs)


def is_close(piece: str, other: str) -> bool:
    """Whether two pieces are equal, or both `<loc>` or both `<seg>` with numbers at most four apart."""
    found, other_found = BIN.fullmatch(piece), BIN.fullmatch(other)
    if found is None or other_found is None or found[1] != other_found[1]:
        return piece == other
    return abs(int(found[2]) - int(other_found[2])) <= MAX_BIN_DISTANCE


def divergence(rows: Tensor, other_rows: Tensor) -> Tensor:
    """Kullback-Leibler divergence sum(p (log p - log q)) in nats, a row; p from `rows`, q from `other_rows`, logits."""
    log_p, log_q = rows.log_softmax(dim=1), other_rows.log_softmax(dim=1)
    return (log_p.exp() * (log_p - log_q)).sum(dim=1)


# Random checkpoints -----------------------------------------------------------------------------------------------


def logit_errors(case: str, work_dir: Path, quantize: str, seeds: int = SEEDS) -> LogitErrors:
    """Errors of bfloat16 and of the quantized weights along float32's greedy answers, a random model a seed."""
    errors: dict[str | None, list[float]] = {None: [], quantize: []}
    for seed in range(seeds):
        folder = save_layout(make_model(case, seed), work_dir / case)
        requests = [Request(random_picture(seed), prompt) for prompt in RANDOM_PROMPTS]
        exact = reference_samples(folder, torch.float32, requests, RANDOM_TOKENS)
        answers = [sample.greedy for sample in exact]
        for choice, found in errors.items():
            samples = our_samples(folder, torch.bfloat16, requests, RANDOM_TOKENS, answers, choice)
            found.append(mean_relative_error(samples, exact))
    plain, quantized = (sum(found) / len(found) for found in errors.values())
    return LogitErrors(plain, quantized)


# Report -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Accuracy:
    """All figures of accuracy, and whether the quantized ones are within their bounds."""

    bundled: dict[str, Forced]
    random: dict[str, LogitErrors]
    quantize: str

    @property
    def passed(self) -> bool:
        found = self.bundled[self.quantize]
        are_close = found.agreement >= MIN_AGREEMENT and found.divergence <= MAX_DIVERGENCE
        return are_close and all(errors.ratio <= MAX_ERROR_RATIO for errors in self.random.values())


def measure_accuracy(work_dir: Path, quantize: str) -> Accuracy:
    """Measure on the bundled model and on random ones; about a minute on two cores."""
    exact = paligemma.load(device="cpu", dtype="float32")
    requests = example_requests(exact)
    others = {
        "bfloat16": paligemma.load(device="cpu", dtype="bfloat16"),
        quantize: paligemma.load(device="cpu", dtype="bfloat16", quantize=quantize),
    }
    bundled = {name: forced(exact, other, requests) for name, other in others.items()}
    return Accuracy(bundled, {case: logit_errors(case, work_dir, quantize) for case in CASES}, quantize)


def accuracy_lines(accuracy: Accuracy) -> list[str]:
    """The figures as text."""
    found = accuracy.bundled[accuracy.quantize]
    lines = [
        f"bundled model against float32, teacher forcing: {found.positions} positions of {found.answers} answers",
        *(
            f"  {name:<10} same likeliest token {figures.agreement:.2%}, mean KL {figures.divergence:.5f} nats"
            for name, figures in accuracy.bundled.items()
        ),
        f"  bounds: at least {MIN_AGREEMENT:.0%} (<loc> and <seg> within {MAX_BIN_DISTANCE} bins), at most "
        f"{MAX_DIVERGENCE} nats",
        f"random checkpoints against float32, relative error of the logits, {SEEDS} seeds",
        *(
            f"  {case:<10} {accuracy.quantize} {errors.quantized:.4f}, bfloat16 {errors.bfloat16:.4f}: "
            f"{errors.ratio:.2f} x (bound {MAX_ERROR_RATIO} x)"
            for case, errors in accuracy.random.items()
        ),
    ]
    return [*lines, "all within their bounds" if accuracy.passed else "NOT within their bounds"]
