"""The page's example images and their true answers."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import paligemma
from paligemma.tools.examples import EXAMPLES, find_question
from paligemma.training.captions import parse_caption
from paligemma.training.classes import CLASSES, COLORS
from paligemma.training.scenes import Scene, SceneObject
from paligemma.training.scoring import box_iou, parse_boxes

FOLDER = Path(__file__).parents[1] / "assets" / "examples"
ENTRIES = json.loads((FOLDER / "examples.json").read_text(encoding="utf-8"))
NAMES = "|".join(CLASSES)
PLURALS = "|".join(object_class.noun.plural for object_class in CLASSES.values())
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


def task_of(prompt: str) -> str | None:
    return next((name for name, pattern in PROMPTS.items() if re.fullmatch(pattern, prompt)), None)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry["file"])
def test_example_has_a_large_image_prompt_answer_and_credit(entry):
    with Image.open(FOLDER / entry["file"]) as image:
        image.load()
        assert min(image.size) >= 448 and image.mode == "RGB"
    assert set(entry) == {"file", "prompt", "answer", "credit"}
    assert "Noto" in entry["credit"] and "Apache-2.0" in entry["credit"]


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry["file"])
def test_example_prompt_is_a_task_prompt_with_a_valid_answer(entry):
    prompt, answer = entry["prompt"], entry["answer"]
    task = task_of(prompt)
    assert task is not None, prompt
    if task == "caption":
        assert parse_caption(answer, prompt[-2:]).total() in (1, 2, 3, 4)
    elif task in ("detect", "several", "segment"):
        labels = {label for label, _, _ in parse_boxes(answer)}
        assert labels == set(prompt.split(" ", 1)[1].split(" ; "))
    elif task == "color":
        assert answer in COLORS


def test_examples_cover_every_task_and_language():
    assert [(entry["file"], entry["prompt"]) for entry in ENTRIES] == [(f"{e.name}.png", e.prompt) for e in EXAMPLES]
    assert len({entry["file"] for entry in ENTRIES}) == len(ENTRIES) >= 12
    assert {task_of(entry["prompt"]) for entry in ENTRIES} == set(PROMPTS)
    assert {"caption en", "caption es", "caption zh"} <= {entry["prompt"] for entry in ENTRIES}


def test_examples_folder_contains_no_other_image_and_is_small():
    assert {path.name for path in FOLDER.glob("*.png")} == {entry["file"] for entry in ENTRIES}
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 1_500_000


def test_find_question_returns_the_true_answer():
    dog = SceneObject("dog", None, "shapes", np.array([5.0, 5, 25, 25]), np.full((20, 20), 255, np.uint8), (5, 5))
    scene = Scene(np.zeros((100, 100, 3), np.uint8), (dog,))
    assert find_question(scene, "where", "answer en where is the dog?").answer == "top left"
    with pytest.raises(ValueError, match="where is the cat"):
        find_question(scene, "where", "answer en where is the cat?")


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry["file"])
def test_bundled_model_answers_every_example_correctly(vlm, entry):
    """Exact match for text; for boxes, the same labels in the same order and an IoU of at least 0.5."""
    with Image.open(FOLDER / entry["file"]) as image:
        answer = vlm.generate(image, entry["prompt"]).text
    true, predicted = parse_boxes(entry["answer"]), parse_boxes(answer)
    assert [label for label, _, _ in predicted] == [label for label, _, _ in true]
    assert all(box_iou(true_box, box) >= 0.5 for (_, true_box, _), (_, box, _) in zip(true, predicted, strict=True))
    if not true:
        assert answer.strip() == entry["answer"]
    if task_of(entry["prompt"]) == "segment":
        assert [len(codes) for _, _, codes in predicted] == [16] * len(true)
