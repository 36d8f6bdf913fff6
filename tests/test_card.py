"""The bundled model's card, written from made-up figures."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from paligemma.training.card import (
    CardInputs,
    command,
    figure_table,
    pictures_trained_on,
    read_options,
    write_card,
)
from paligemma.training.icons import PACKAGES, STYLES
from paligemma.training.train import TrainOptions

REPORT = {
    style: {"1-3": {"scenes": 500, "caption_en exact": 0.9125, "detect iou": 0.8004}, "4": {"scenes": 150}}
    for style in STYLES
}
OPTIONS = TrainOptions(vision_steps=800, steps=30, cooldown_steps=9, seed=3)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_file({"weight": torch.zeros(1000, 2500), "bias": torch.zeros(7)}, tmp_path / "model.safetensors")
    save_file({"weight": torch.zeros(11)}, tmp_path / "mask_decoder.safetensors")
    return tmp_path


@pytest.fixture
def card(folder: Path) -> str:
    return write_card(CardInputs(REPORT, OPTIONS, 5400, folder, "2 CPU cores", "* a pig was called a bear"))


def test_the_card_says_what_how_well_and_at_what_cost(card, folder):
    assert card.startswith("---\nlicense: apache-2.0\n")
    assert "2.5 million parameters" in card and "2,500,007 parameters" in card
    assert f"{(folder / 'model.safetensors').stat().st_size:,} bytes" in card
    assert "1.5 hours" in card and "2 CPU cores" in card and "seed: 3" in card
    assert "* a pig was called a bear" in card and "knows nothing else" in card
    assert "{" not in card.replace("{seg", "")


def test_every_style_is_credited_with_its_version_and_license(card):
    for style, version in PACKAGES.items():
        row = next(line for line in card.splitlines() if line.startswith(f"| {style} {version} |"))
        assert any(license in row for license in ("Apache-2.0", "MIT", "CC-BY 4.0", "CC-BY-SA 4.0"))
        assert ("the test only" in row) == (style in ("emojione", "openmoji"))


def test_tables_show_figures_by_style_and_leave_gaps():
    table = figure_table(REPORT, "1-3").splitlines()
    assert "openmoji (never trained)" in table[0] and "| noto |" in table[0]
    assert len({line.count("|") for line in table}) == 1
    assert any("91.2 %" in line for line in table) and any("0.800" in line for line in table)
    assert "| 150 |" in figure_table(REPORT, "4")
    assert figure_table({"noto": {"1-3": {"scenes": 1}}}, "4") == "Not measured."


def test_options_come_back_from_the_training_s_file(tmp_path):
    path = tmp_path / "options.json"
    path.write_text(json.dumps({name: str(value) for name, value in asdict(OPTIONS).items()}), encoding="utf-8")
    assert read_options(path) == OPTIONS


def test_the_command_says_what_is_not_the_default():
    assert command(OPTIONS) == (
        "python -m paligemma.training.train --vision-steps 800 --steps 30 --cooldown-steps 9 --seed 3"
    )


def test_the_plan_s_pictures_are_counted():
    batch = OPTIONS.batch
    packed, single = 17, 13  # of 30 steps: single are every third of 21, every second of 6, and the last 3
    images = 800 * batch.vision_pictures + packed * batch.packed_pictures + single * batch.single_pictures
    assert pictures_trained_on(OPTIONS) == images
