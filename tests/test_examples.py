"""The example pictures that the page offers, and how their true answers are found."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import paligemma
from paligemma.tools.examples import true_question
from paligemma.training.icons import CLASSES, COLORS
from paligemma.training.scenes import Scene, SceneObject
from paligemma.training.tasks import box_iou, caption_counts, parse_boxes

FOLDER = Path(__file__).parents[1] / "assets" / "examples"
ENTRIES = json.loads((FOLDER / "examples.json").read_text(encoding="utf-8"))
NAMES = "|".join(CLASSES)
PLURALS = "|".join(icon_class.noun.plural for icon_class in CLASSES.values())
PROMPTS = {
    "caption": r"caption (en|es|zh)",
    "detect": rf"detect ({NAMES})",
    "several": rf"detect ({NAMES})( ; ({NAMES}))+",
    "segment": rf"segment ({NAMES})",
    "count": rf"answer en how many ({PLURALS}) are there\?",
    "present": rf"answer en is there an? ({NAMES})\?",
    "color": rf"answer en what colou?r is the ({NAMES})\?",
    "where": rf"answer en where is the ({NAMES})\?",
    "relation": rf"answer en what is (left of|right of|above|below) the ({NAMES})\?",
}


@pytest.fixture(scope="module")
def vlm() -> paligemma.PaliGemma:
    return paligemma.load(device="cpu")


def kind(prompt: str) -> str | None:
    return next((name for name, pattern in PROMPTS.items() if re.fullmatch(pattern, prompt)), None)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry["file"])
def test_every_example_is_a_large_picture_with_prompt_answer_and_credit(entry):
    with Image.open(FOLDER / entry["file"]) as image:
        image.load()
        assert min(image.size) >= 448 and image.mode == "RGB"
    assert set(entry) == {"file", "prompt", "answer", "credit"}
    assert "Noto" in entry["credit"] and "Apache-2.0" in entry["credit"]


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry["file"])
def test_every_prompt_is_one_that_the_model_knows_and_the_answer_fits_it(entry):
    prompt, answer = entry["prompt"], entry["answer"]
    asked = kind(prompt)
    assert asked is not None, prompt
    if asked == "caption":
        assert caption_counts(answer, prompt[-2:]).total() in (1, 2, 3, 4)
    elif asked in ("detect", "several", "segment"):
        labels = {label for label, _, _ in parse_boxes(answer)}
        assert labels == set(prompt.split(" ", 1)[1].split(" ; "))
    elif asked == "color":
        assert answer in COLORS


def test_the_examples_show_every_task_and_language():
    assert len({entry["file"] for entry in ENTRIES}) == len(ENTRIES) >= 12
    assert {kind(entry["prompt"]) for entry in ENTRIES} == set(PROMPTS)
    assert {"caption en", "caption es", "caption zh"} <= {entry["prompt"] for entry in ENTRIES}


def test_the_folder_holds_no_other_picture_and_stays_small():
    assert {path.name for path in FOLDER.glob("*.png")} == {entry["file"] for entry in ENTRIES}
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 1_500_000


def test_the_true_answer_is_found_by_its_prompt():
    dog = SceneObject("dog", None, "shapes", np.array([5.0, 5, 25, 25]), np.full((20, 20), 255, np.uint8), (5, 5))
    scene = Scene(np.zeros((100, 100, 3), np.uint8), (dog,))
    assert true_question(scene, "where", "answer en where is the dog?").answer == "top left"
    with pytest.raises(ValueError, match="where is the cat"):
        true_question(scene, "where", "answer en where is the cat?")


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry["file"])
def test_the_bundled_model_answers_every_example_rightly(vlm, entry):
    """Words exactly; boxes by name and order, each over at least half of what it and the true one cover together."""
    with Image.open(FOLDER / entry["file"]) as image:
        answer = vlm.generate(image, entry["prompt"]).text
    true, said = parse_boxes(entry["answer"]), parse_boxes(answer)
    assert [label for label, _, _ in said] == [label for label, _, _ in true]
    assert all(box_iou(true_box, box) >= 0.5 for (_, true_box, _), (_, box, _) in zip(true, said, strict=True))
    if not true:
        assert answer.strip() == entry["answer"]
    if kind(entry["prompt"]) == "segment":
        assert [len(codes) for _, _, codes in said] == [16] * len(true)
