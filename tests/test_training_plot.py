"""Reading the training's log and drawing its curve."""

from __future__ import annotations

import json
from pathlib import Path

from PIL import Image

from paligemma.training.plot import draw, read_log


def write_log(path: Path, lines: list[dict]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def losses(step: int, seconds: int, value: float = 1.0) -> dict:
    return {"step": step, "seconds": seconds, "single_words": value}


def evaluation(step: int, value: float = 0.5) -> dict:
    return {"step": step, "evaluation": {"trained 1-3": {"caption_en exact": value}}}


def test_a_later_start_adds_its_time_and_replaces_the_steps_it_repeats(tmp_path):
    first = [losses(50, 10), losses(100, 20, 2.0), evaluation(100), losses(150, 30), evaluation(150)]
    log = read_log(write_log(tmp_path / "log.jsonl", [*first, losses(100, 7, 3.0), evaluation(100, 0.9)]))
    assert log.seconds == 37
    assert [(line["step"], line["single_words"]) for line in log.losses] == [(50, 1.0), (100, 3.0)]
    assert log.evaluations == (evaluation(100, 0.9),)


def test_a_curve_is_drawn_of_a_whole_log_and_of_one_without_evaluations(tmp_path):
    whole = [losses(50, 10), losses(100, 20), evaluation(100), losses(150, 30), evaluation(150, 0.7)]
    for number, lines in enumerate((whole, whole[:1])):
        path = tmp_path / f"{number}.png"
        draw(read_log(write_log(tmp_path / "log.jsonl", lines))).savefig(path)
        with Image.open(path) as image:
            assert image.width > 1000
