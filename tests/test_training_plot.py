"""Reading the training log and plotting the training curves."""

from __future__ import annotations

import json
from pathlib import Path

from PIL import Image

from paligemma.training.plot import plot, read_log


def write_log(path: Path, entries: list[dict]) -> Path:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries), encoding="utf-8")
    return path


def losses(step: int, seconds: int, value: float = 1.0) -> dict:
    return {"step": step, "seconds": seconds, "single_words": value}


def evaluation(step: int, value: float = 0.5) -> dict:
    return {"step": step, "evaluation": {"trained 1-3": {"caption_en exact": value}}}


def test_resumed_run_adds_its_time_and_replaces_repeated_steps(tmp_path):
    first = [losses(50, 10), losses(100, 20, 2.0), evaluation(100), losses(150, 30), evaluation(150)]
    log = read_log(write_log(tmp_path / "log.jsonl", [*first, losses(100, 7, 3.0), evaluation(100, 0.9)]))
    assert log.seconds == 37
    assert [(entry["step"], entry["single_words"]) for entry in log.losses] == [(50, 1.0), (100, 3.0)]
    assert log.evaluations == (evaluation(100, 0.9),)


def test_plot_of_logs_with_and_without_evaluations(tmp_path):
    complete = [losses(50, 10), losses(100, 20), evaluation(100), losses(150, 30), evaluation(150, 0.7)]
    for index, entries in enumerate((complete, complete[:1])):
        path = tmp_path / f"{index}.png"
        plot(read_log(write_log(tmp_path / "log.jsonl", entries))).savefig(path)
        with Image.open(path) as image:
            assert image.width > 1000
