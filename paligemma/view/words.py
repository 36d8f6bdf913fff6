"""States and errors -> the sentence that the page shows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from paligemma.generation import NonFiniteLogitsError

if TYPE_CHECKING:
    from paligemma.generation import GenerationResult, Step

NO_MODEL = (
    "This app has no model of its own yet. Name one when you start it: python app.py --model FOLDER_OR_HUB_ID, "
    "for example google/paligemma2-3b-mix-224."
)
FINISHED = {
    "eos": "The answer is complete",
    "length": "Stopped at the largest number of new tokens",
    "time": "Stopped at the time limit",
}


def notice(kind: str, text: str) -> dict[str, str]:
    """A line of the page: `kind` is "idle", "busy", "done" or "error", and chooses its colour."""
    return {"kind": kind, "text": text}


def summary(result: GenerationResult, with_seed: bool) -> dict[str, str]:
    """How an answer ended, how long it took, and the seed when chance had a part in it."""
    timing = result.timing
    parts = [
        FINISHED[result.finish_reason],
        f"{count_tokens(result.steps)} in {timing.total_s:.2f} s",
        f"the first after {timing.first_token_s:.2f} s",
    ]
    if timing.tokens_per_s is not None:
        parts.append(f"then {timing.tokens_per_s:.1f} a second")
    if with_seed:
        parts.append(f"seed {result.seed}")
    return notice("done", " · ".join(parts))


def count_tokens(steps: Sequence[Step]) -> str:
    """`1 token`, `12 tokens`."""
    return f"{len(steps)} token" + ("" if len(steps) == 1 else "s")


def explain(error: Exception) -> str:
    """An error as a sentence for the visitor: the library's own for a bad value, else none of its inner words."""
    if isinstance(error, ValueError | NonFiniteLogitsError):
        return str(error)
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return "There was not enough memory for this request. Ask for fewer tokens, or take a smaller model."
    return f"Something went wrong on the server ({type(error).__name__}). Its log says what."


def model_line(name: str, num_parameters: int, dtype: str, device: str, soft_cap: float | None) -> str:
    """The badge of a loaded model; `soft_cap` is the bound of its logits, None where they have none."""
    parts = [name, format_count(num_parameters), dtype, device]
    if soft_cap:
        parts.append(f"logits soft-capped at ±{soft_cap:g}")
    return " · ".join(parts)


def format_count(number: int) -> str:
    """A number of parameters: `3.7 M`, `2.92 B`."""
    if number >= 10**9:
        return f"{number / 10**9:.2f} B"
    return f"{number / 10**6:.1f} M" if number >= 10**5 else f"{number / 10**3:.0f} K"
