"""speed --accuracy: accuracy of quantized weights and of bfloat16, relative to float32.

Two measures: with teacher forcing along the float32 answers of the bundled model, top-1 agreement and KL divergence per
position; and the relative error of the logits of random PaliGemma 1 and 2 checkpoints, which depend on every weight.
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
    random_image,
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
    """Accuracy relative to float32 with teacher forcing.

    Attributes:
        positions, answers: number of compared positions and answers.
        agreement: fraction of positions with equal top-1 tokens, or `<loc>` or `<seg>` tokens within four bins.
        divergence: mean KL divergence KL(float32 || other) in nats.
    """

    positions: int
    answers: int
    agreement: float
    divergence: float


@dataclass(frozen=True)
class LogitErrors:
    """Mean relative errors of random checkpoints' logits relative to float32, over several seeds."""

    bfloat16: float
    quantized: float

    @property
    def ratio(self) -> float:
        return self.quantized / self.bfloat16


# Bundled model


def example_requests(exact: paligemma.PaliGemma) -> list[Request]:
    """Return for each example its prompt, captions, and detect and segment prompts for the captioned objects."""
    requests = []
    for example in json.loads((EXAMPLES / "examples.json").read_text(encoding="utf-8")):
        image = Image.open(EXAMPLES / example["file"]).convert("RGB")
        caption = exact.generate(image, CAPTIONS[0], max_new_tokens=LONGEST_ANSWER).text
        localization = [f"{task} {name}" for name in object_names(caption) for task in ("detect", "segment")]
        prompts = dict.fromkeys((example["prompt"], *CAPTIONS, *localization))
        requests += [Request(image, prompt) for prompt in prompts]
    return requests


def object_names(caption: str) -> list[str]:
    """Return the singular objects of a caption: "a cat, two dogs and an owl" gives cat and owl."""
    return re.findall(r"\ban? ([\w ]+?)(?=,| and |$)", caption)


def forced(exact: paligemma.PaliGemma, other: paligemma.PaliGemma, requests: Sequence[Request]) -> Forced:
    """Compare `other` with the float32 model `exact` along the greedy answers of `exact`."""
    agreeing, divergences = 0, []
    for request in requests:
        answer = exact.generate(request.image, request.prompt, max_new_tokens=LONGEST_ANSWER).token_ids
        logits, other_logits = (_allowed_logits(vlm, request, answer) for vlm in (exact, other))
        agreeing += count_agreeing(logits, other_logits, exact)
        divergences += kl_divergence(logits, other_logits).tolist()
    positions = len(divergences)
    return Forced(positions, len(requests), agreeing / positions, sum(divergences) / positions)


def _allowed_logits(vlm: paligemma.PaliGemma, request: Request, answer: Sequence[int]) -> Tensor:
    """Return the logits of allowed tokens at each position of the answer: float64, (positions, allowed tokens)."""
    inputs = vlm.processor([request.image], [request.prompt])
    logits = our_logits(vlm.model, inputs, answer[:-1], prefix_positions=1)
    return logits.cpu()[:, vlm.allowed_tokens].double()


def count_agreeing(logits: Tensor, other_logits: Tensor, vlm: paligemma.PaliGemma) -> int:
    """Count the positions with agreeing top-1 tokens; logits are (positions, allowed tokens)."""
    token_ids = vlm.allowed_tokens.nonzero().flatten()
    pairs = zip(*(token_ids[values.argmax(dim=1)].tolist() for values in (logits, other_logits)), strict=True)
    return sum(is_close(vlm.processor.token_str(ours), vlm.processor.token_str(theirs)) for ours, theirs in pairs)


def is_close(token: str, other: str) -> bool:
    """Whether two tokens are equal, or both `<loc>` or both `<seg>` within four bins."""
    found, other_found = BIN.fullmatch(token), BIN.fullmatch(other)
    if found is None or other_found is None or found[1] != other_found[1]:
        return token == other
    return abs(int(found[2]) - int(other_found[2])) <= MAX_BIN_DISTANCE


def kl_divergence(logits: Tensor, other_logits: Tensor) -> Tensor:
    """Return KL(p || q) = sum(p (log p - log q)) in nats per position, p from `logits` and q from `other_logits`."""
    log_p, log_q = logits.log_softmax(dim=1), other_logits.log_softmax(dim=1)
    return (log_p.exp() * (log_p - log_q)).sum(dim=1)


# Random checkpoints


def logit_errors(case: str, work_dir: Path, quantize: str, seeds: int = SEEDS) -> LogitErrors:
    """Measure bfloat16 and quantized weights along the float32 greedy answers, with one random model per seed."""
    errors: dict[str | None, list[float]] = {None: [], quantize: []}
    for seed in range(seeds):
        folder = save_layout(make_model(case, seed), work_dir / case)
        requests = [Request(random_image(seed), prompt) for prompt in RANDOM_PROMPTS]
        exact = reference_samples(folder, torch.float32, requests, RANDOM_TOKENS)
        answers = [sample.greedy for sample in exact]
        for choice, found in errors.items():
            samples = our_samples(folder, torch.bfloat16, requests, RANDOM_TOKENS, answers, choice)
            found.append(mean_relative_error(samples, exact))
    plain, quantized = (sum(found) / len(found) for found in errors.values())
    return LogitErrors(plain, quantized)


# Report


@dataclass(frozen=True)
class Accuracy:
    """Accuracy of the bundled model and random checkpoints, and whether quantization is within its limits."""

    bundled: dict[str, Forced]
    random: dict[str, LogitErrors]
    quantize: str

    @property
    def passed(self) -> bool:
        found = self.bundled[self.quantize]
        are_close = found.agreement >= MIN_AGREEMENT and found.divergence <= MAX_DIVERGENCE
        return are_close and all(errors.ratio <= MAX_ERROR_RATIO for errors in self.random.values())


def measure_accuracy(work_dir: Path, quantize: str) -> Accuracy:
    """Measure the bundled model and random checkpoints; takes about a minute on two cores."""
    exact = paligemma.load(device="cpu", dtype="float32")
    requests = example_requests(exact)
    others = {
        "bfloat16": paligemma.load(device="cpu", dtype="bfloat16"),
        quantize: paligemma.load(device="cpu", dtype="bfloat16", quantize=quantize),
    }
    bundled = {name: forced(exact, other, requests) for name, other in others.items()}
    return Accuracy(bundled, {case: logit_errors(case, work_dir, quantize) for case in CASES}, quantize)


def accuracy_lines(accuracy: Accuracy) -> list[str]:
    """Format the results as text."""
    found = accuracy.bundled[accuracy.quantize]
    lines = [
        f"bundled model vs float32, teacher forcing: {found.positions} positions of {found.answers} answers",
        *(
            f"  {name:<10} top-1 agreement {figures.agreement:.2%}, mean KL {figures.divergence:.5f} nats"
            for name, figures in accuracy.bundled.items()
        ),
        f"  limits: at least {MIN_AGREEMENT:.0%} (<loc> and <seg> within {MAX_BIN_DISTANCE} bins), at most "
        f"{MAX_DIVERGENCE} nats",
        f"random checkpoints vs float32, relative error of the logits, {SEEDS} seeds",
        *(
            f"  {case:<10} {accuracy.quantize} {errors.quantized:.4f}, bfloat16 {errors.bfloat16:.4f}: "
            f"{errors.ratio:.2f} x (limit {MAX_ERROR_RATIO} x)"
            for case, errors in accuracy.random.items()
        ),
    ]
    return [*lines, "all within limits" if accuracy.passed else "NOT within limits"]
