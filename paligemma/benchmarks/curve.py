"""speed --curve: time per token over context length, and time to first token over resolution.

The expected time per token is proportional to the bytes read (weights and KV cache), the expected time to first token
to the operations (vision tower, decoder and attention). Both are scaled to the first measured point.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

import paligemma
from paligemma.benchmarks.costs import Spread, Work
from paligemma.benchmarks.full_size import write_checkpoint
from paligemma.benchmarks.measure import PROMPT, forced_ids, kernel_name, prefix_length, work_of
from paligemma.benchmarks.random_checkpoints import Case
from paligemma.benchmarks.reference import random_image

CONTEXTS = (512, 1024, 2048, 3072, 4096)
RESOLUTIONS = (224, 448, 896)
ROUNDS = 5
TOKENS = 16  # decoded after each context
FILLER_WORD = " the"  # one token of the tiny tokenizer
MEASURED, EXPECTED = "#1f5fbf", "#c8553d"


@dataclass(frozen=True)
class Point:
    """Measured and expected seconds at a context length in tokens or an image side in pixels."""

    at: int
    seconds: Spread
    expected: float


@dataclass(frozen=True)
class Curve:
    """Both curves, with the model and its kernels."""

    model: str
    kernels: str
    tokens: tuple[Point, ...]
    first_tokens: tuple[Point, ...]


def measure_curve(name: str, case: Case, work_dir: Path, quantize: str | None = None, device: str = "auto") -> Curve:
    """Write one checkpoint per resolution and measure; 1/9 of PaliGemma 3B takes about two minutes on two cores."""
    models = []
    for resolution in RESOLUTIONS:
        folder = work_dir / f"{resolution}-pixels"
        write_checkpoint(folder, replace(case, image_size=resolution))
        models.append(paligemma.load(folder, device=device, quantize=quantize))
    work = work_of(models[0], quantize)
    token_spreads = [_token_seconds(models[0], context) for context in CONTEXTS]
    first_spreads = _first_token_seconds(models)
    return Curve(
        name,
        kernel_name(models[0]),
        _points(CONTEXTS, token_spreads, [work.bytes_per_token(context) for context in CONTEXTS]),
        _points(RESOLUTIONS, first_spreads, [_prefill_flops(vlm) for vlm in models]),
    )


def _points(at: Sequence[int], spreads: Sequence[Spread], work: Sequence[int]) -> tuple[Point, ...]:
    """Combine measurements with expected times, scaled from the first point in proportion to the work."""
    first = spreads[0].median / work[0]
    return tuple(Point(x, spread, first * amount) for x, spread, amount in zip(at, spreads, work, strict=True))


def _token_seconds(vlm: paligemma.PaliGemma, context: int) -> Spread:
    """Measure seconds per token after a prefix padded to `context` tokens with filler words."""
    image = random_image(0)
    shorter = prefix_length(vlm)
    if context < shorter:
        raise ValueError(f"context must be >= {shorter} (the tokens of image and prompt), got {context}.")
    prompt = PROMPT + FILLER_WORD * (context - shorter)
    steps = vlm.generate(image, prompt, max_new_tokens=TOKENS + 1, forced_ids=forced_ids(vlm, TOKENS + 1)).steps
    return Spread.of([step.seconds - before.seconds for before, step in pairwise(steps)])


def _first_token_seconds(models: Sequence[paligemma.PaliGemma]) -> list[Spread]:
    """Measure the time to first token, interleaved, with a new image per round and one warm-up round."""
    seconds: list[list[float]] = [[] for _ in models]
    for number in range(ROUNDS + 1):
        for vlm, found in zip(models, seconds, strict=True):
            result = vlm.generate(random_image(number), PROMPT, max_new_tokens=1)
            found.append(result.timing.first_token_s)
    return [Spread.of(found[1:]) for found in seconds]


def _prefill_flops(vlm: paligemma.PaliGemma) -> int:
    return Work.of(vlm.config, vlm.dtype).prefill_flops(prefix_length(vlm))


# Drawing


def draw(curve: Curve) -> Figure:
    """Plot milliseconds per token over context length, and time to first token over the image side."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    _draw_points(left, curve.tokens, 1000, "context (tokens)", "time per token (ms)")
    _draw_points(right, curve.first_tokens, 1, "image side (pixels)", "time to first token (s)")
    right.set_xticks([point.at for point in curve.first_tokens])
    left.legend(fontsize=8, frameon=False)
    figure.suptitle(f"{curve.model}: {curve.kernels}", fontsize=9)
    return figure


def _draw_points(axes: Axes, points: Sequence[Point], factor: float, x_label: str, y_label: str) -> None:
    places = [point.at for point in points]
    medians = [point.seconds.median * factor for point in points]
    below = [(point.seconds.median - point.seconds.lowest) * factor for point in points]
    above = [(point.seconds.highest - point.seconds.median) * factor for point in points]
    expected = [point.expected * factor for point in points]
    axes.plot(places, expected, "--", color=EXPECTED, linewidth=1.2, label="expected (scaled from the first point)")
    axes.errorbar(
        places,
        medians,
        (below, above),
        fmt="o-",
        color=MEASURED,
        markersize=4,
        capsize=3,
        label="measured (median and range)",
    )
    axes.set_ylim(0, 1.15 * max(*medians, *expected))
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def curve_lines(curve: Curve) -> list[str]:
    """Format the points as text."""
    return [
        f"{curve.model}: {curve.kernels}",
        *(
            f"  context {point.at:>5} tokens: {point.seconds.text(1, 1000)} ms/token, expected "
            f"{point.expected * 1000:.1f}"
            for point in curve.tokens
        ),
        *(
            f"  image side {point.at} pixels: {point.seconds.text(2)} s to first token, expected {point.expected:.2f}"
            for point in curve.first_tokens
        ),
    ]
