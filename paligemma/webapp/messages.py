"""States and errors -> the sentence that the page shows.

A sentence is English with holes in braces; `assets/page/messages.json` has its translation under that same text, and the page
fills the holes. So this module knows one language, and the page can change its own at any time. What the library says
comes with its holes filled; the page finds the sentence in `words.json` that it fits, else it stays English.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from paligemma.generation import NonFiniteLogitsError

if TYPE_CHECKING:
    from paligemma.generation import Step
    from paligemma.webapp.runs import Run

Status = dict[str, Any]

NO_MODEL = (
    "This app has no model of its own yet. Name one when you start it: python app.py --model FOLDER_OR_HUB_ID, "
    "for example google/paligemma2-3b-mix-224."
)
WRONG_INPUTS = "The server cannot read this request: its inputs are not those that /gradio_api/info lists."
RUN_EXPIRED = "This run is no longer kept."
DISK_IS_FULL = "The server's disk is full. Try again later; what is on the page stays."
QUEUE_FULL = "Too many are waiting for the model. Try again in a minute; what is on the page stays."
FINISHED = {
    "eos": "The answer is complete",
    "length": "Stopped at the largest number of new tokens",
    "time": "Stopped at the time limit",
}


def status(kind: str, text: str, **values: Any) -> Status:
    """A line of the page: `kind` is "idle", "busy", "done" or "error", and chooses its color."""
    return {"kind": kind, "text": text, "values": values}


def format_message(line: Status) -> str:
    """A notice as plain English text."""
    sentences = line.get("joined") or [(line["text"], line["values"])]
    return " · ".join(text.format(**values) if values else text for text, values in sentences)


def summary(run: Run) -> Status:
    """How a run ended, its timings, and the settings of chance."""
    timing = run.timing
    if timing is None or run.finish_reason not in FINISHED:
        return {"kind": "idle", "joined": [("Stopped", {}), count_tokens(run.steps), *sampling_summary(run)]}
    parts: list[tuple[str, dict[str, Any]]] = [
        (FINISHED[run.finish_reason], {}),
        count_tokens(run.steps),
        ("picture {seconds} s", {"seconds": f"{timing.image_s:.2f}"}),
        ("first token {seconds} s", {"seconds": f"{timing.first_token_s:.2f}"}),
    ]
    if timing.tokens_per_s is not None:
        parts.append(("{rate} tokens a second", {"rate": f"{timing.tokens_per_s:.1f}"}))
    return {"kind": "done", "joined": [*parts, *sampling_summary(run)]}


def sampling_summary(run: Run) -> list[tuple[str, dict[str, Any]]]:
    """What chance was bound by: temperature, what top-k and top-p keep, and the seed; nothing for a greedy run."""
    request = run.request
    if request["temperature"] == 0:
        return []
    parts = [("temperature {value}", {"value": f"{request['temperature']:g}"})]
    if request["top_k"] > 0:
        parts.append(("top-k {value}", {"value": request["top_k"]}))
    if request["top_p"] < 1:
        parts.append(("top-p {value}", {"value": f"{request['top_p']:g}"}))
    return [*parts, ("seed {seed}", {"seed": request["seed"]})]


def run_shown(run: Run) -> Status:
    """An earlier run is on the page again."""
    parts = [("Run {number}", {"number": run.number}), count_tokens(run.steps)]
    return {"kind": "idle", "joined": [*parts, *sampling_summary(run)]}


def count_tokens(steps: Sequence[Step]) -> tuple[str, dict[str, Any]]:
    """`1 token`, `12 tokens`."""
    return ("1 token", {}) if len(steps) == 1 else ("{count} tokens", {"count": len(steps)})


def describe_error(error: Exception) -> str:
    """An error as a sentence for the visitor: the library's own for a bad value, else none of its inner words."""
    if isinstance(error, ValueError | NonFiniteLogitsError):
        return str(error)
    if is_out_of_memory(error):
        return "There was not enough memory for this request. Ask for fewer tokens, or take a smaller model."
    if is_disk_full(error):
        return DISK_IS_FULL
    return f"Something went wrong on the server ({type(error).__name__}). Its log says what."


def is_disk_full(error: Exception) -> bool:
    """Whether there was no room for a file."""
    return isinstance(error, OSError) and error.errno == errno.ENOSPC


def is_out_of_memory(error: Exception) -> bool:
    """Python's own, an accelerator's, or what PyTorch raises on a CPU."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and ("can't allocate memory" in text or "not enough memory" in text)


def model_line(name: str, num_parameters: int, backend: str, device: str, soft_cap: float | None) -> str:
    """The badge of a loaded model.

    `backend` is what computes, as in `PaliGemma.backend`; `soft_cap` is the bound of its logits, None where they have
    none.
    """
    parts = [name, format_count(num_parameters), backend, device]
    if soft_cap:
        parts.append(f"logits soft-capped at ±{soft_cap:g}")
    return " · ".join(parts)


def format_count(number: int) -> str:
    """A number of parameters: `3.7 M`, `2.92 B`."""
    if number >= 10**9:
        return f"{number / 10**9:.2f} B"
    return f"{number / 10**6:.1f} M" if number >= 10**5 else f"{number / 10**3:.0f} K"
