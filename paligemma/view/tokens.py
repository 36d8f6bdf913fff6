"""Steps -> the token list and the table of candidates."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paligemma.generation import Step

Row = dict[str, Any]

# (title, kind): "text" is a tokenizer's piece, "share" has a bar beside its number.
TOKEN_COLUMNS = (("#", "number"), ("token", "text"), ("logit", "number"), ("p at T = 1", "share"))
CANDIDATE_COLUMNS = (
    ("rank", "number"),
    ("token", "text"),
    ("id", "number"),
    ("logit", "number"),
    ("p at T = 1", "share"),
    ("p sampled", "number"),
)

_VISIBLE = {"▁": "␣", " ": "␣", "\n": "↵", "\t": "⇥", "\r": "␍"}
# Unicode's general categories of what draws nothing or draws over its neighbours.
_UNDRAWN = ("C", "M", "Z")


def visible_piece(piece: str) -> str:
    """A tokenizer's piece with every character to be seen: `▁cat` -> `␣cat`, a newline -> `↵`, U+200B -> `\\u200b`."""
    return "".join(_visible_character(character) for character in piece)


def token_list(steps: Sequence[Step]) -> Row:
    """The value of the token list: a row a step, the newest selected.

    Returns {"rows": [{"cells": TOKEN_COLUMNS as text, "share": probability 0..1}], "selected": index or None}.
    """
    return {"rows": [_token_row(step) for step in steps], "selected": len(steps) - 1 if steps else None}


def candidate_table(step: Step | None) -> Row:
    """The value of the candidate table for one step, or of the empty table for None.

    Rows are in the order of their logits; a chosen token that is not among them follows at the end with its rank.
    Returns {"title", "rows": [{"cells": CANDIDATE_COLUMNS as text, "share", "dropped"}], "selected": index of
    the chosen one, "facts": [(name, number)]}. "dropped" means that sampling could not have taken it.
    """
    if step is None:
        return {"title": "", "rows": [], "selected": None, "facts": []}
    rows = [_candidate_row(rank, candidate) for rank, candidate in enumerate(step.top, start=1)]
    chosen = next((index for index, row in enumerate(step.top) if row.token_id == step.token_id), None)
    if chosen is None:
        chosen = len(rows)
        rows.append(_candidate_row(step.rank, step))
    title = f"Token {step.index + 1}: {visible_piece(step.piece)}"
    return {"title": title, "rows": rows, "selected": chosen, "facts": step_facts(step)}


def step_facts(step: Step) -> list[tuple[str, str]]:
    """What the list of candidates does not say: (name, number as text).

    Entropy (nats) and log-sum-exp are those of the whole distribution at temperature 1.
    """
    facts = [("entropy", f"{step.entropy:.2f} nats")]
    if len(step.top) > 1:
        facts.append(("gap of the first two", f"{step.top[0].logit - step.top[1].logit:.2f}"))
    covered = sum(candidate.prob for candidate in step.top)
    facts.append((f"these {len(step.top)} cover", format_share(covered)))
    facts.append(("log-sum-exp", f"{step.logsumexp:.2f}"))
    return facts


def format_share(share: float) -> str:
    """A probability 0..1 as a percentage: `97.3 %`, `< 0.1 %`, `> 99.9 %`; 0 and 1 only where it is exact."""
    if share in (0.0, 1.0):
        return f"{share:.0%}".replace("%", " %")
    if share < 0.001:
        return "< 0.1 %"
    return "> 99.9 %" if share > 0.999 else f"{share * 100:.1f} %"


def _token_row(step: Step) -> Row:
    cells = (str(step.index + 1), visible_piece(step.piece), f"{step.logit:.2f}", format_share(step.prob))
    return {"cells": cells, "share": step.prob}


def _candidate_row(rank: int, candidate: Any) -> Row:
    """A row of a `Candidate`, or of a `Step`, which has the same numbers."""
    return {
        "cells": (
            str(rank),
            visible_piece(candidate.piece),
            str(candidate.token_id),
            f"{candidate.logit:.2f}",
            format_share(candidate.prob),
            format_share(candidate.sampled_prob),
        ),
        "share": candidate.prob,
        "dropped": candidate.sampled_prob == 0,
    }


def _visible_character(character: str) -> str:
    if character in _VISIBLE:
        return _VISIBLE[character]
    if unicodedata.category(character)[0] not in _UNDRAWN:
        return character
    code = ord(character)
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"
