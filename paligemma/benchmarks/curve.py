"""bench --curve: time per token against context length, and first token against resolution, beside what to expect.

Expected per token: in proportion to the bytes read (weights, and keys and values of the context). Expected first
token: in proportion to the operations (tower, decoder and attention). Both lines go through the first point measured.
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
from paligemma.benchmarks.measure import PROMPT, forced_ids, kernels_of, prefix_length, work_of
from paligemma.benchmarks.random_checkpoints import Case
from paligemma.benchmarks.reference import random_picture

CONTEXTS = (512, 1024, 2048, 3072, 4096)
RESOLUTIONS = (224, 448, 896)
ROUNDS = 5
TOKENS = 16  # behind each context
FILLER_WORD = " the"  # one token of the random checkpoints' tokenizer
MEASURED, EXPECTED = "#1f5fbf", "#c8553d"


@dataclass(frozen=True)
class Point:
    """One measurement: tokens of context, or pixels a side, then seconds, and the seconds to expect."""

    at: int
    seconds: Spread
    expected: float


@dataclass(frozen=True)
class Curve:
    """Both curves, and of which model, type and kernels."""

    model: str
    kernels: str
    tokens: tuple[Point, ...]
    first_tokens: tuple[Point, ...]


def measure_curve(name: str, case: Case, work_dir: Path, quantize: str | None = None, device: str = "auto") -> Curve:
    """Write a checkpoint a resolution and measure; on two cores and a ninth of PaliGemma 3B about two minutes."""
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
        kernels_of(models[0]),
        _points(CONTEXTS, token_spreads, [work.token_bytes(context) for context in CONTEXTS]),
        _points(RESOLUTIONS, first_spreads, [_first_token_operations(vlm) for vlm in models]),
    )


def _points(at: Sequence[int], spreads: Sequence[Spread], work: Sequence[int]) -> tuple[Point, ...]:
    """Points with what to expect: the first one's time, in proportion to the work."""
    first = spreads[0].median / work[0]
    return tuple(Point(place, spread, first * amount) for place, spread, amount in zip(at, spreads, work, strict=True))


def _token_seconds(vlm: paligemma.PaliGemma, context: int) -> Spread:
    """Seconds a token behind a prefix that is filled up to `context` tokens with words."""
    image = random_picture(0)
    shorter = prefix_length(vlm)
    if context < shorter:
        raise ValueError(f"a context of {context} tokens is asked for; picture and prompt already take {shorter}")
    prompt = PROMPT + FILLER_WORD * (context - shorter)
    steps = vlm.generate(image, prompt, max_new_tokens=TOKENS + 1, forced_ids=forced_ids(vlm, TOKENS + 1)).steps
    return Spread.of([step.seconds - before.seconds for before, step in pairwise(steps)])


def _first_token_seconds(models: Sequence[paligemma.PaliGemma]) -> list[Spread]:
    """Seconds to the first token, in turns, a new picture a round; a round before them is not counted."""
    seconds: list[list[float]] = [[] for _ in models]
    for number in range(ROUNDS + 1):
        for vlm, found in zip(models, seconds, strict=True):
            result = vlm.generate(random_picture(number), PROMPT, max_new_tokens=1)
            found.append(result.timing.first_token_s)
    return [Spread.of(found[1:]) for found in seconds]


def _first_token_operations(vlm: paligemma.PaliGemma) -> int:
    return Work.of(vlm.config, vlm.dtype).first_token_operations(prefix_length(vlm))


# Drawing ----------------------------------------------------------------------------------------------------------


def draw(curve: Curve) -> Figure:
    """Two panels: milliseconds a token over the context, seconds to the first token over the picture's side."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    _draw_points(left, curve.tokens, 1000, "tokens before it", "milliseconds a token")
    _draw_points(right, curve.first_tokens, 1, "pixels a side", "seconds to the first token")
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
    axes.plot(places, expected, "--", color=EXPECTED, linewidth=1.2, label="expected from the first point")
    axes.errorbar(
        places, medians, (below, above), fmt="o-", color=MEASURED, markersize=4, capsize=3, label="median and range"
    )
    axes.set_ylim(0, 1.15 * max(*medians, *expected))
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def curve_lines(curve: Curve) -> list[str]:
    """The points as text."""
    return [
        f"{curve.model}: {curve.kernels}",
        *(
            f"  behind {point.at:>5} tokens: {point.seconds.text(1, 1000)} ms a token, expected "
            f"{point.expected * 1000:.1f}"
            for point in curve.tokens
        ),
        *(
            f"  at {point.at} pixels: {point.seconds.text(2)} s to the first token, expected {point.expected:.2f}"
            for point in curve.first_tokens
        ),
    ]
