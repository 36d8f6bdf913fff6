"""Messages of the page: English templates and the values of their `{placeholders}`.

`assets/page/messages.json` has the translations, by error code or else by English template. The page looks them up and
fills in the values, so the server does not need the user's language.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paligemma.generation import Step
    from paligemma.webapp.runs import Run

# {"kind", "text", "values"} and, for an error, "code"; or {"kind", "joined": [[text, values], ...]} for several
# messages shown on one line. A value may be another status.
Status = dict[str, Any]
Message = tuple[str, dict[str, Any]]

NO_MODEL = (
    "There is no bundled model. Start the app with python app.py --model FOLDER_OR_HUB_ID, "
    "for example google/paligemma2-3b-mix-224."
)
RUN_EXPIRED = "This run has expired."
QUEUE_FULL = "The queue is full. Try again shortly; your results are kept."
FINISHED = {
    "eos": "The answer is complete",
    "length": "Stopped at max new tokens",
    "time": "Stopped at the time limit",
}


def status(kind: str, text: str, **values: Any) -> Status:
    """A status of the page. `kind` is "idle", "busy", "done" or "error", and determines the color."""
    return {"kind": kind, "text": text, "values": values}


def format_message(message: Status) -> str:
    """The English text of a status."""
    messages = message.get("joined") or [(message["text"], message["values"])]
    return " · ".join(_format(text, values) for text, values in messages)


def _format(text: str, values: Mapping[str, Any]) -> str:
    """Replace the placeholders as page.js does: a value that is a status by its text; unknown placeholders remain."""

    def value_of(placeholder: re.Match[str]) -> str:
        value = values.get(placeholder[1], placeholder[0])
        return format_message(value) if isinstance(value, dict) else str(value)

    return re.sub(r"\{(\w+)\}", value_of, text)


def summary(run: Run) -> Status:
    """Summarize why a run ended, its timing and its sampling settings."""
    timing = run.timing
    if timing is None or run.finish_reason not in FINISHED:
        return {"kind": "idle", "joined": [("Stopped", {}), count_tokens(run.steps), *sampling_summary(run)]}
    parts: list[Message] = [
        (FINISHED[run.finish_reason], {}),
        count_tokens(run.steps),
        ("image encoding {seconds} s", {"seconds": f"{timing.image_s:.2f}"}),
        ("first token {seconds} s", {"seconds": f"{timing.first_token_s:.2f}"}),
    ]
    if timing.tokens_per_s is not None:
        parts.append(("{rate} tokens/s", {"rate": f"{timing.tokens_per_s:.1f}"}))
    return {"kind": "done", "joined": [*parts, *sampling_summary(run)]}


def sampling_summary(run: Run) -> list[Message]:
    """Temperature, top-k and top-p if they are on, and the seed. Empty for greedy decoding."""
    request = run.request
    if request["temperature"] == 0:
        return []
    parts: list[Message] = [("temperature {value}", {"value": f"{request['temperature']:g}"})]
    if request["top_k"] > 0:
        parts.append(("top-k {value}", {"value": request["top_k"]}))
    if request["top_p"] < 1:
        parts.append(("top-p {value}", {"value": f"{request['top_p']:g}"}))
    return [*parts, ("seed {seed}", {"seed": request["seed"]})]


def run_shown(run: Run) -> Status:
    """The status when an earlier run is shown."""
    parts: list[Message] = [("Run {number}", {"number": run.number}), count_tokens(run.steps)]
    return {"kind": "idle", "joined": [*parts, *sampling_summary(run)]}


def count_tokens(steps: Sequence[Step]) -> Message:
    """`1 token`, `12 tokens`."""
    return ("1 token", {}) if len(steps) == 1 else ("{count} tokens", {"count": len(steps)})


def model_ready(name: str, num_parameters: int, backend: str, device: str, soft_cap: float | None) -> Status:
    """The badge of a loaded model.

    Args:
        backend: data type and kernels, as in `PaliGemma.backend`.
        soft_cap: bound of the logits, or None without soft-capping.
    """
    parts: list[Message] = [(text, {}) for text in (name, format_count(num_parameters), backend, device)]
    if soft_cap:
        parts.append(("logits soft-capped at ±{value}", {"value": f"{soft_cap:g}"}))
    return {"kind": "done", "joined": parts}


def format_count(number: int) -> str:
    """A number of parameters: `3.7 M`, `2.92 B`."""
    if number >= 10**9:
        return f"{number / 10**9:.2f} B"
    return f"{number / 10**6:.1f} M" if number >= 10**5 else f"{number / 10**3:.0f} K"
