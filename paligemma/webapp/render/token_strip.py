"""Steps -> the chips of the token strip, each with the candidates that the inspector shows for it."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from paligemma.parsing import LOCATIONS_PER_BOX

if TYPE_CHECKING:
    from paligemma.generation import Candidate, Step
    from paligemma.sampling import Sampling

Entry = dict[str, Any]

# (title, kind): "text" is a tokenizer's piece, "share" has a bar beside its number.
CANDIDATE_COLUMNS = (
    ("rank", "number"),
    ("token", "text"),
    ("id", "minor"),
    ("logit", "number"),
    ("÷ T", "number"),
    ("log p", "number"),
    ("p at T = 1", "number"),
    ("cumulative p", "number"),
    ("filter", "label"),
    ("p sampled", "share"),
)
LOCATION_ROLES = ("y_min", "x_min", "y_max", "x_max")
NOT_APPLIED = "–"

_LOCATION = re.compile(r"<loc[0-9]{4}>")
_CODE = re.compile(r"<seg[0-9]{3}>")
_SPECIAL = re.compile(r"<(eos|bos|pad|unk|0x[0-9A-F]{2})>")
_VISIBLE = {"▁": "␣", " ": "␣", "\n": "↵", "\t": "⇥", "\r": "␍"}
# Unicode's general categories of what draws nothing or draws over its neighbors.
_UNDRAWN = ("C", "M", "Z")


def visible_piece(piece: str) -> str:
    """A tokenizer's piece with every character to be seen: `▁cat` -> `␣cat`, a newline -> `↵`, U+200B -> `\\u200b`."""
    return "".join(_visible_character(character) for character in piece)


def token_kind(piece: str) -> str:
    """What a piece is: "loc", "seg", "special" (end token, bytes), "space" (nothing but white space) or "text"."""
    if _LOCATION.fullmatch(piece):
        return "loc"
    if _CODE.fullmatch(piece):
        return "seg"
    if _SPECIAL.fullmatch(piece):
        return "special"
    return "text" if piece.replace("▁", " ").strip() else "space"


def token_strip_state(
    run: int, steps: Sequence[Step], start: int, sampling: Sampling, num_forced: int = 0, done: bool = False
) -> Entry:
    """What the token strip has to add: the entries of `steps[start:]`, and nothing that it already has.

    `start` 0 empties the strip first. "count" is how many tokens the run has by now, so that a strip that missed an
    update can tell.
    """
    return {
        "run": run,
        "start": start,
        "count": len(steps),
        "done": done,
        "tokens": [token_entry(steps, index, sampling, num_forced) for index in range(start, len(steps))],
    }


def token_entry(steps: Sequence[Step], index: int, sampling: Sampling, num_forced: int = 0) -> Entry:
    """One token: its chip's numbers, and the inspector's table and facts for it.

    Rows are in the order of their logits; a chosen token that is not among them follows at the end with its rank.
    "chosen" is the row of the chosen id. A "forced" token was not chosen by the model in this run; the last
    of them was chosen "by_hand". "role" says which edge of a box a location token is, else it is "".
    """
    step = steps[index]
    rows = [_candidate_row(rank, candidate, step, sampling) for rank, candidate in enumerate(step.top, start=1)]
    for row, mass in zip(rows, _running_sum(step.top), strict=True):
        row["cells"][7] = format_share(mass)
    chosen = next((place for place, candidate in enumerate(step.top) if candidate.token_id == step.token_id), None)
    if chosen is None:
        chosen = len(rows)
        rows.append(_candidate_row(step.rank, step, step, sampling))
    return {
        "index": index,
        "id": step.token_id,
        "piece": visible_piece(step.piece),
        "kind": token_kind(step.piece),
        "role": _location_role(steps, index),
        "forced": index < num_forced,
        "by_hand": index == num_forced - 1,
        "text": step.text_delta,
        "prob": step.prob,
        "entropy": step.entropy,
        "rank": step.rank,
        "rows": rows,
        "chosen": chosen,
        "metrics": step_metrics(step),
    }


def step_metrics(step: Step) -> list[tuple[str, str]]:
    """What the list of candidates does not say: (name, number as text).

    Entropy (nats) and log-sum-exp are those of the whole distribution at temperature 1.
    """
    metrics = [("entropy (nats)", f"{step.entropy:.2f}")]
    if len(step.top) > 1:
        metrics.append(("top-2 logit margin", f"{step.top[0].logit - step.top[1].logit:.2f}"))
    covered = sum(candidate.prob for candidate in step.top)
    metrics.append(("top-k mass", format_share(min(covered, 1.0))))
    metrics.append(("log-sum-exp", f"{step.logsumexp:.2f}"))
    return metrics


def format_share(share: float) -> str:
    """A probability 0..1 as a percentage: `97.3 %`, `< 0.1 %`, `> 99.9 %`; 0 and 1 only where it is exact."""
    if share in (0.0, 1.0):
        return f"{share:.0%}".replace("%", " %")
    if share < 0.001:
        return "< 0.1 %"
    return "> 99.9 %" if share > 0.999 else f"{share * 100:.1f} %"


def filter_stage(rank: int, candidate: Candidate | Step, step: Step, sampling: Sampling) -> str:
    """What temperature, top-k and top-p did with a candidate: "kept", or what dropped it: "greedy", "top-k", "top-p".

    Top-k keeps what equals the k-th logit, as sampling does.
    """
    if candidate.sampled_prob > 0:
        return "kept"
    if sampling.temperature == 0:
        return "greedy"
    if 0 < sampling.top_k < rank:
        is_listed = sampling.top_k <= len(step.top)
        if not is_listed or candidate.logit < step.top[sampling.top_k - 1].logit:
            return "top-k"
    return "top-p" if sampling.top_p < 1 else "kept"  # without top-p it is kept, and only too small for a number


def _candidate_row(rank: int, candidate: Candidate | Step, step: Step, sampling: Sampling) -> Entry:
    """A row of a `Candidate`, or of a `Step`, which has the same numbers; its running sum is filled in later."""
    scaled = f"{candidate.logit / sampling.temperature:.2f}" if sampling.temperature > 0 else NOT_APPLIED
    stage = filter_stage(rank, candidate, step, sampling)
    return {
        "id": candidate.token_id,
        "cells": [
            str(rank),
            visible_piece(candidate.piece),
            str(candidate.token_id),
            f"{candidate.logit:.2f}",
            scaled,
            f"{candidate.logprob:.2f}",
            format_share(candidate.prob),
            NOT_APPLIED,
            stage,
            format_share(candidate.sampled_prob),
        ],
        "share": candidate.sampled_prob,
        "dropped": stage != "kept",
    }


def _running_sum(candidates: Sequence[Candidate]) -> list[float]:
    mass, sums = 0.0, []
    for candidate in candidates:
        mass = min(1.0, mass + candidate.prob)
        sums.append(mass)
    return sums


def _location_role(steps: Sequence[Step], index: int) -> str:
    """The edge that a location token is: its place among the location tokens in a row, four to a box."""
    before = 0
    if token_kind(steps[index].piece) != "loc":
        return ""
    while before < index and token_kind(steps[index - before - 1].piece) == "loc":
        before += 1
    return LOCATION_ROLES[before % LOCATIONS_PER_BOX]


def _visible_character(character: str) -> str:
    if character in _VISIBLE:
        return _VISIBLE[character]
    if unicodedata.category(character)[0] not in _UNDRAWN:
        return character
    code = ord(character)
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"
