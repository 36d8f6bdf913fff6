"""Draw the bundled model's learning curve: `python -m paligemma.training.plot`.

Losses, and the figures of the evaluations that ran while it trained, over the steps: `log.jsonl` of `train_demo` to
`assets/demo/training.png`.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from paligemma.training.evaluate import FEW, FOUR
from paligemma.training.icons import STYLES_HELD_OUT

LOSSES = {
    "vision_patches": "patches, vision stage",
    "single_patches": "patches, single stage",
    "single_words": "words, single stage",
    "single_locations": "<loc> tokens, single stage",
    "single_codes": "<seg> tokens, single stage",
}
FIGURES = {
    "caption_en exact": "caption en, exact",
    "caption_en recall": "caption en, objects named",
    "multi_detect f1_50": "several boxes, F1 at IoU 0.5",
    "detect iou": "one kind's boxes, mean IoU",
    "count exact": "how many",
    "color exact": "what color",
    "relation exact": "left of, above, ...",
}
SERIES = {
    f"trained {FEW}": "trained styles, 1 to 3 objects",
    f"trained {FOUR}": "trained styles, 4 objects",
    **{f"{style} {FEW}": f"{style} (never trained), 1 to 3 objects" for style in STYLES_HELD_OUT},
}
COLORS = ("#1f5fbf", "#7fb2e5", "#c8553d", "#e0a458")


@dataclass(frozen=True)
class TrainingLog:
    """What a log says: lines of losses, lines of evaluations, both by rising step, and the seconds trained.

    Where a run went back to an earlier step, only the later try is kept; its time counts as well.
    """

    losses: tuple[dict, ...]
    evaluations: tuple[dict, ...]
    seconds: int


def read_log(path: Path) -> TrainingLog:
    """Read `log.jsonl`. Each start of the script counts its seconds anew."""
    lines: list[dict] = []
    finished = current = 0
    for line in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
        # An evaluation follows the losses of its own step; anything else at or behind a line's step is an older try.
        first_dropped = line["step"] + ("evaluation" in line)
        while lines and lines[-1]["step"] >= first_dropped:
            lines.pop()
        lines.append(line)
        seconds = line.get("seconds", current)
        finished += current if seconds < current else 0
        current = seconds
    evaluations = tuple(line for line in lines if "evaluation" in line)
    return TrainingLog(tuple(line for line in lines if "evaluation" not in line), evaluations, finished + current)


def draw(log: TrainingLog) -> Figure:
    """One panel of losses, one for each of FIGURES."""
    figure = Figure(figsize=(14, 6.4), layout="constrained")
    panels = figure.subplots(2, 4, sharex=True).flat
    _draw_losses(panels[0], log)
    for axes, (name, title) in zip(panels[1:], FIGURES.items(), strict=True):
        _draw_figure(axes, log, name, title)
    handles, labels = panels[1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(SERIES), frameon=False)
    figure.suptitle(
        "Training of the bundled model. Figures: a few scenes, each token of an answer given the true ones before it",
        fontsize=11,
    )
    return figure


def _draw_losses(axes: Axes, log: TrainingLog) -> None:
    for name, label in LOSSES.items():
        points = [(line["step"], line[name]) for line in log.losses if name in line]
        if points:
            axes.plot(*zip(*points, strict=True), label=label, linewidth=1.2)
    axes.set_yscale("log")
    axes.set_title("losses", fontsize=10)
    axes.legend(fontsize=7, frameon=False)
    _finish(axes)


def _draw_figure(axes: Axes, log: TrainingLog, name: str, title: str) -> None:
    for (key, label), color in zip(SERIES.items(), COLORS, strict=True):
        found = [(line["step"], line["evaluation"].get(key, {}).get(name)) for line in log.evaluations]
        points = [point for point in found if point[1] is not None]
        steps, values = zip(*points, strict=True) if points else ((), ())
        axes.plot(steps, values, "o-", label=label, color=color, markersize=2.5, linewidth=1.2)
    axes.set_ylim(0, 1.02)
    axes.set_title(title, fontsize=10)
    _finish(axes)


def _finish(axes: Axes) -> None:
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_subplotspec().is_last_row():
        axes.set_xlabel("step")


def main() -> None:
    """Read --log, write --output."""
    parser = argparse.ArgumentParser(prog="python -m paligemma.training.plot", description=__doc__.split("\n")[0])
    parser.add_argument("--log", type=Path, default=Path("runs/demo/log.jsonl"))
    parser.add_argument("--output", type=Path, default=Path("assets/demo/training.png"), help="a .png or .svg file")
    options = parser.parse_args()
    draw(read_log(options.log)).savefig(options.output, dpi=110)
    print(f"wrote {options.output}")


if __name__ == "__main__":
    main()
