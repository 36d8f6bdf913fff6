"""Data for the token strip: the tokens of an answer, each with its candidate table."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from paligemma.parsing import LOCATIONS_PER_BOX
from paligemma.webapp.render.candidates import candidate_table
from paligemma.webapp.render.formatting import visible_text

if TYPE_CHECKING:
    from paligemma.generation import Step
    from paligemma.sampling import Sampling

LOCATION_ROLES = ("y_min", "x_min", "y_max", "x_max")

_LOCATION = re.compile(r"<loc[0-9]{4}>")
_CODE = re.compile(r"<seg[0-9]{3}>")
_SPECIAL = re.compile(r"<(eos|bos|pad|unk|0x[0-9A-F]{2})>")


def token_strip_state(
    run: int, steps: Sequence[Step], start: int, sampling: Sampling, num_forced: int = 0, done: bool = False
) -> dict[str, Any]:
    """Return an update of the token strip: the tokens from index `start` on.

    The token strip removes its tokens if `start` is 0. "count" is the length of the answer, by which it detects a
    missed update.
    """
    return {
        "run": run,
        "start": start,
        "count": len(steps),
        "done": done,
        "tokens": [token_state(steps, index, sampling, num_forced) for index in range(start, len(steps))],
    }


def token_state(steps: Sequence[Step], index: int, sampling: Sampling, num_forced: int = 0) -> dict[str, Any]:
    """Return the data of one token.

    "forced" tokens are the first `num_forced` ones, copied from the parent run; the user selected the last of them
    ("selected_manually"). "role" is the edge of the box that a location token encodes, else "". See `candidate_table`
    for "rows", "chosen" and "metrics".
    """
    step = steps[index]
    return {
        "index": index,
        "id": step.token_id,
        "piece": visible_text(step.piece),
        "kind": token_kind(step.piece),
        "role": _location_role(steps, index),
        "forced": index < num_forced,
        "selected_manually": index == num_forced - 1,
        "text": step.text_delta,
        "prob": step.prob,
        "entropy": step.entropy,
        "rank": step.rank,
        **candidate_table(step, sampling),
    }


def token_kind(token_str: str) -> str:
    """Classify a token: "loc", "seg", "special" (control and byte tokens), "space" (whitespace only) or "text"."""
    if _LOCATION.fullmatch(token_str):
        return "loc"
    if _CODE.fullmatch(token_str):
        return "seg"
    if _SPECIAL.fullmatch(token_str):
        return "special"
    return "text" if token_str.replace("▁", " ").strip() else "space"


def _location_role(steps: Sequence[Step], index: int) -> str:
    """The edge that a location token encodes, from its position in the sequence of location tokens around it."""
    if token_kind(steps[index].piece) != "loc":
        return ""
    first = index
    while first > 0 and token_kind(steps[first - 1].piece) == "loc":
        first -= 1
    return LOCATION_ROLES[(index - first) % LOCATIONS_PER_BOX]
