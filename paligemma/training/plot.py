"""Plot the training curves of the bundled model: `python -m paligemma.training.plot`.

Reads the losses and evaluations in `log.jsonl` of the training script and writes `assets/demo/training.png`.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from paligemma.training.evaluate import FEW, FOUR
from paligemma.training.icons import HELD_OUT_STYLES

LOSSES = {
    "vision_patches": "patches, vision stage",
    "single_patches": "patches, single stage",
    "single_words": "words, single stage",
    "single_locations": "<loc> tokens, single stage",
    "single_codes": "<seg> tokens, single stage",
}
METRICS = {
    "caption_en exact": "caption en: exact match",
    "caption_en recall": "caption en: object recall",
    "multi_detect f1_50": "detect, several classes: F1 at IoU 0.5",
    "detect iou": "detect, one class: mean IoU",
    "count exact": "counting: accuracy",
    "color exact": "color: accuracy",
    "relation exact": "spatial relations: accuracy",
}
SERIES = {
    f"trained {FEW}": ("trained styles, 1 to 3 objects", "#1f5fbf"),
    f"trained {FOUR}": ("trained styles, 4 objects", "#7fb2e5"),
    **{
        f"{style} {FEW}": (f"{style} (held out), 1 to 3 objects", color)
        for style, color in zip(HELD_OUT_STYLES, ("#c8553d", "#e0a458"), strict=True)
    },
}


@dataclass(frozen=True)
class TrainingLog:
    """Contents of `log.jsonl`, ordered by step.

    Attributes:
        losses, evaluations: entries of the log. If steps were repeated after a resume, only the last ones are kept.
        seconds: training time, including repeated steps.
    """

    losses: tuple[dict, ...]
    evaluations: tuple[dict, ...]
    seconds: int


def read_log(path: Path) -> TrainingLog:
    """Read `log.jsonl`, in which the seconds restart at 0 whenever the script is started."""
    entries: list[dict] = []
    finished = current = 0
    for entry in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
        # An evaluation follows the losses of its step; all other entries from this step on are from an earlier attempt.
        first_dropped = entry["step"] + ("evaluation" in entry)
        while entries and entries[-1]["step"] >= first_dropped:
            entries.pop()
        entries.append(entry)
        seconds = entry.get("seconds", current)
        finished += current if seconds < current else 0
        current = seconds
    evaluations = tuple(entry for entry in entries if "evaluation" in entry)
    return TrainingLog(tuple(entry for entry in entries if "evaluation" not in entry), evaluations, finished + current)


def plot(log: TrainingLog) -> Figure:
    """Plot the losses and the metrics over the training steps."""
    figure = Figure(figsize=(14, 6.4), layout="constrained")
    panels = figure.subplots(2, 4, sharex=True).flat
    _plot_losses(panels[0], log)
    for axes, (name, title) in zip(panels[1:], METRICS.items(), strict=True):
        _plot_metric(axes, log, name, title)
    handles, labels = panels[1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(SERIES), frameon=False)
    figure.suptitle("Training of the bundled model (metrics with teacher forcing, few scenes)", fontsize=11)
    return figure


def _plot_losses(axes: Axes, log: TrainingLog) -> None:
    for name, label in LOSSES.items():
        points = [(entry["step"], entry[name]) for entry in log.losses if name in entry]
        if points:
            axes.plot(*zip(*points, strict=True), label=label, linewidth=1.2)
    axes.set_yscale("log")
    axes.set_title("losses", fontsize=10)
    axes.legend(fontsize=7, frameon=False)
    _style_axes(axes)


def _plot_metric(axes: Axes, log: TrainingLog, name: str, title: str) -> None:
    for key, (label, color) in SERIES.items():
        values = [(entry["step"], entry["evaluation"].get(key, {}).get(name)) for entry in log.evaluations]
        points = [point for point in values if point[1] is not None]
        x, y = zip(*points, strict=True) if points else ((), ())
        axes.plot(x, y, "o-", label=label, color=color, markersize=2.5, linewidth=1.2)
    axes.set_ylim(0, 1.02)
    axes.set_title(title, fontsize=10)
    _style_axes(axes)


def _style_axes(axes: Axes) -> None:
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    subplot = axes.get_subplotspec()
    if subplot is not None and subplot.is_last_row():
        axes.set_xlabel("step")


def main() -> None:
    """Read --log and write --output."""
    parser = argparse.ArgumentParser(
        prog="python -m paligemma.training.plot", description="Plot the training curves of the bundled model."
    )
    parser.add_argument("--log", type=Path, default=Path("runs/demo/log.jsonl"), help="log of the training script")
    parser.add_argument("--output", type=Path, default=Path("assets/demo/training.png"), help="PNG or SVG file")
    options = parser.parse_args()
    plot(read_log(options.log)).savefig(options.output, dpi=110)
    print(f"Wrote {options.output}.")


if __name__ == "__main__":
    main()
