"""The task chips: what the loaded model was trained to answer, as prompts to begin with."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Task:
    """A chip. `prefix` is what it writes; `example` stands for the words that a person adds, "" where none are."""

    name: str
    language: str
    prefix: str
    example: str = ""


def _captions(languages: Iterable[str]) -> tuple[Task, ...]:
    return tuple(Task("caption", language, f"caption {language}") for language in languages)


_ANSWER = Task("answer", "en", "answer en ", "what is this?")
_DETECT = Task("detect", "", "detect ", "dog")
_SEGMENT = Task("segment", "", "segment ", "dog")
# The bundled model has learned these; the mix checkpoints know them in 34 languages (PaliGemma, arXiv 2407.07726).
BUNDLED_TASKS = (*_captions(("en", "es", "zh")), _DETECT, _SEGMENT, _ANSWER)
BUNDLED_NOTE = (
    "This model knows only pictures of emoji like those in the examples. To a photo it gives an answer too, which "
    "means nothing."
)
# By a mark in the name, as Google names its checkpoints.
NOTES = {
    "-pt-": "This checkpoint (pt) is only pre-trained: it answers the prompts of its training, such as these, and free "
    "questions poorly. A mix checkpoint answers more.",
    "-ft-": "This checkpoint (ft) is fine-tuned for one task: it answers the prompts of that task only.",
}
MIX_TASKS = (*_captions(("en", "es", "fr", "zh")), _ANSWER, _DETECT, _SEGMENT, Task("ocr", "", "ocr"))


def tasks_of(source: str | None) -> tuple[Task, ...]:
    """The tasks of a model by where it came from: `PaliGemma.source`."""
    return BUNDLED_TASKS if source == "bundled" else MIX_TASKS


def note_on(name: str, source: str | None) -> str:
    """A sentence on a model that can be asked less than a person may expect; "" for any other.

    `name` as on the hub, `source` as in `PaliGemma.source`.
    """
    return BUNDLED_NOTE if source == "bundled" else next((NOTES[mark] for mark in NOTES if mark in name), "")


def task_chips(tasks: Iterable[Task], note: str = "") -> dict[str, Any]:
    """The value of the chips, with the sentence below them."""
    return {
        "note": note,
        "chips": [
            {"label": task.name, "note": task.language, "hint": f"{task.prefix}{task.example}", "prefix": task.prefix}
            for task in tasks
        ],
    }


def apply_task(task: Task, prompt: str, tasks: Iterable[Task]) -> str:
    """The prompt once a chip is pressed: the task's own beginning, and what the person had already asked about."""
    if not task.example:
        return task.prefix
    known = sorted((other.prefix for other in tasks if other.example), key=len, reverse=True)
    used = next((prefix for prefix in known if prompt.startswith(prefix)), None)
    subject = prompt.removeprefix(used).strip() if used else ""
    is_same_sort = used is not None and (used == task.prefix or {used, task.prefix} <= {"detect ", "segment "})
    return task.prefix + (subject if is_same_sort else "")
