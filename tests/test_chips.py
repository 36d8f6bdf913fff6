"""Task chips and example chips."""

from __future__ import annotations

import pytest

from paligemma.paths import ASSETS
from paligemma.webapp.examples import example_chips, load_examples
from paligemma.webapp.tasks import BUNDLED_NOTE, MIX_TASKS, apply_task, model_note, task_chips, tasks_of
from paligemma.webapp.uploads import open_image


def test_a_task_keeps_the_object_names_of_the_prompt():
    detect, segment = (next(task for task in MIX_TASKS if task.name == name) for name in ("detect", "segment"))
    caption = MIX_TASKS[0]
    assert apply_task(segment, "detect two dogs", MIX_TASKS) == "segment two dogs"
    assert apply_task(detect, "detect cat", MIX_TASKS) == "detect cat"
    assert apply_task(detect, "caption en", MIX_TASKS) == "detect "
    assert apply_task(detect, "answer en where?", MIX_TASKS) == "detect "
    assert apply_task(caption, "detect dog", MIX_TASKS) == "caption en"


def test_tasks_are_those_the_model_was_trained_on():
    assert "ocr" not in {task.name for task in tasks_of("bundled")}
    assert {"caption", "detect", "segment", "answer", "ocr"} == {task.name for task in tasks_of("hub")}


@pytest.mark.parametrize(
    ("name", "source", "note"),
    [
        ("paligemma-emoji", "bundled", "emoji"),
        ("google/paligemma2-3b-pt-224", "hub", "Pre-trained"),
        ("paligemma-3b-pt-448", "folder", "Pre-trained"),
        ("google/paligemma-3b-ft-docvqa-224", "hub", "fine-tuned"),
    ],
)
def test_the_limits_of_a_model_are_noted(name, source, note):
    assert note in model_note(name, source)
    assert task_chips(tasks_of(source), model_note(name, source))["note"] == model_note(name, source)
    assert model_note("google/paligemma2-3b-mix-224", source) == (BUNDLED_NOTE if source == "bundled" else "")


def test_every_example_has_an_image_a_prompt_and_a_credit():
    examples = load_examples(ASSETS / "examples")
    assert examples and all(open_image(example.path) and example.prompt and example.credit for example in examples)
    chips = example_chips(examples)["chips"]
    assert len(chips) == len(examples) and all(chip["image"].startswith("data:image/png") for chip in chips)


def test_a_missing_example_image_is_an_error(tmp_path):
    assert load_examples(tmp_path) == ()
    (tmp_path / "examples.json").write_text('[{"file": "a.png", "prompt": "caption en"}]')
    with pytest.raises(FileNotFoundError, match=r"a\.png"):
        load_examples(tmp_path)
