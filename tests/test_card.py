"""The model card, with invented metrics."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from paligemma.paths import BUNDLED_MODEL
from paligemma.training.card import (
    CARD,
    CardInputs,
    command,
    describe_sizes,
    metrics_table,
    num_training_images,
    read_options,
    write_card,
)
from paligemma.training.icons import HELD_OUT_STYLES, PACKAGES, STYLES
from paligemma.training.options import TrainOptions

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
    return write_card(CardInputs(REPORT, OPTIONS, 5400, folder, "2 CPU cores", "* Pigs are mistaken for bears."))


def test_card_contains_sizes_time_hardware_and_failures(card, folder):
    assert card.startswith("---\nlicense: apache-2.0\n")
    assert "2.5M parameters" in card and "2,500,007 parameters" in card
    assert f"{(folder / 'model.safetensors').stat().st_size:,} bytes" in card
    assert "1.5 hours" in card and "2 CPU cores" in card and "Seed: 3" in card
    assert "* Pigs are mistaken for bears." in card and "Trained on emoji scenes only" in card
    assert "{" not in card.replace("{seg", "")


def test_bundled_card_matches_the_template():
    position, card = 0, (BUNDLED_MODEL / "README.md").read_text(encoding="utf-8")
    for text in re.split(r"\{\w+\}", CARD):
        assert text in card[position:]
        position = card.index(text, position) + len(text)


def test_bundled_card_states_the_actual_sizes_of_the_weights():
    card = (BUNDLED_MODEL / "README.md").read_text(encoding="utf-8").splitlines()
    weights = describe_sizes(BUNDLED_MODEL).splitlines()[:2]
    assert card[-3:-1] == weights


def test_card_credits_every_style_with_version_and_license(card):
    for style, version in PACKAGES.items():
        row = next(line for line in card.splitlines() if line.startswith(f"| {style} {version} |"))
        assert any(license in row for license in ("Apache-2.0", "MIT", "CC-BY 4.0", "CC-BY-SA 4.0"))
        assert ("evaluation only" in row) == (style in HELD_OUT_STYLES)


def test_table_has_one_column_per_style_and_empty_cells_for_missing_metrics():
    table = metrics_table(REPORT, "1-3").splitlines()
    assert "openmoji (held out)" in table[0] and "| noto |" in table[0]
    assert len({line.count("|") for line in table}) == 1
    assert any("91.2%" in line for line in table) and any("0.800" in line for line in table)
    assert "| 150 |" in metrics_table(REPORT, "4")
    assert metrics_table({"noto": {"1-3": {"scenes": 1}}}, "4") == "Not evaluated."


def test_options_are_read_from_options_json(tmp_path):
    path = tmp_path / "options.json"
    path.write_text(json.dumps({name: str(value) for name, value in asdict(OPTIONS).items()}), encoding="utf-8")
    assert read_options(path) == OPTIONS


def test_command_contains_seed_and_non_default_options():
    assert command(OPTIONS) == (
        "python -m paligemma.training.train --vision-steps 800 --steps 30 --cooldown-steps 9 --seed 3"
    )


def test_number_of_training_images():
    batch = OPTIONS.batch
    packed, single = 17, 13  # of 30 steps: every third of 21, every second of 6, and the last 3 are single
    images = 800 * batch.vision_images + packed * batch.packed_images + single * batch.single_images
    assert num_training_images(OPTIONS) == images
