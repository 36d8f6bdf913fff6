"""Task chips: prompts that the loaded model was trained on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Task:
    """A kind of prompt.

    Attributes:
        name: label of the chip.
        language: language of the answer; "" if it has none.
        prefix: beginning of the prompt.
        example: an example of the rest of the prompt; "" if `prefix` is the whole prompt.
    """

    name: str
    language: str
    prefix: str
    example: str = ""


def _captions(languages: Iterable[str]) -> tuple[Task, ...]:
    return tuple(Task("caption", language, f"caption {language}") for language in languages)


_ANSWER = Task("answer", "en", "answer en ", "what is this?")
_DETECT = Task("detect", "", "detect ", "dog")
_SEGMENT = Task("segment", "", "segment ", "dog")
# Tasks whose prompts name objects, so that one prompt can be changed into the other.
_OBJECT_PREFIXES = {_DETECT.prefix, _SEGMENT.prefix}
BUNDLED_TASKS = (*_captions(("en", "es", "zh")), _DETECT, _SEGMENT, _ANSWER)
# The mix checkpoints are trained on captions in 34 languages (PaliGemma, arXiv 2407.07726).
MIX_TASKS = (*_captions(("en", "es", "fr", "zh")), _ANSWER, _DETECT, _SEGMENT, Task("ocr", "", "ocr"))
BUNDLED_NOTE = "Trained on emoji scenes only. Answers about photos are meaningless."
# Keyed by a substring of the checkpoint's hub id.
NOTES = {
    "-pt-": "Pre-trained checkpoint (pt): use prompts like these. For free-form questions, use a mix checkpoint.",
    "-ft-": "Checkpoint fine-tuned for one task (ft): use the prompts of that task only.",
}


def tasks_of(source: str | None) -> tuple[Task, ...]:
    """Return the tasks of a model by its `PaliGemma.source`."""
    return BUNDLED_TASKS if source == "bundled" else MIX_TASKS


def model_note(name: str, source: str | None) -> str:
    """Return the limitations of a model in one line, or "".

    Args:
        name: the model's name, as on the hub.
        source: `PaliGemma.source`.
    """
    return BUNDLED_NOTE if source == "bundled" else next((NOTES[part] for part in NOTES if part in name), "")


def task_chips(tasks: Iterable[Task], note: str = "") -> dict[str, Any]:
    """Return the value of the task chips, with a note below them."""
    return {
        "note": note,
        "chips": [
            {"label": task.name, "note": task.language, "hint": f"{task.prefix}{task.example}", "prefix": task.prefix}
            for task in tasks
        ],
    }


def apply_task(task: Task, prompt: str, tasks: Iterable[Task]) -> str:
    """Change a prompt to a task's prompt. Object names and questions are kept if the task can use them."""
    if not task.example:
        return task.prefix
    prefixes = sorted((other.prefix for other in tasks if other.example), key=len, reverse=True)
    current = next((prefix for prefix in prefixes if prompt.startswith(prefix)), None)
    if current is None or not (current == task.prefix or {current, task.prefix} <= _OBJECT_PREFIXES):
        return task.prefix
    return task.prefix + prompt.removeprefix(current).strip()
