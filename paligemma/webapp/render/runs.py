"""Data for the list of runs: the tree of branches, and the comparison of two runs."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Any

from paligemma.webapp.render.formatting import visible_text
from paligemma.webapp.runs import History, Run

MAX_TEXT_CHARACTERS = 200
_INCOMPLETE_TOKEN = re.compile(r"<[a-z]*\d*$")


def run_tree(history: History, compared: Sequence[Run] = ()) -> dict[str, Any]:
    """Return the value of the list of runs: each run followed by its branches, and the comparison of two runs if given.

    Returns:
        {"runs": [{"number", "depth", "prompt", "text", "count": number of tokens, "branched_at": token number from 1 or
        None, "piece": token at the branch, "current", "imported"}], "compared": see `compare`, or None}
    """
    runs = list(history)
    numbers = {run.number for run in runs}
    children: dict[int | None, list[Run]] = {}
    for run in runs:
        parent = run.parent if run.parent in numbers else None
        children.setdefault(parent, []).append(run)
    items = [_tree_item(run, depth, history.current) for run, depth in _walk(children)]
    return {"runs": items, "compared": compare(*compared) if len(compared) == 2 else None}


def compare(left: Run, right: Run) -> list[dict[str, Any]]:
    """Compare two runs: per run {"number", "prompt", "tokens": [{"piece", "prob", "same"}]}.

    "same" is True if both runs have the same token id at this position.
    """
    pairs = itertools.zip_longest(left.token_ids, right.token_ids)
    same = [left_id == right_id for left_id, right_id in pairs]
    return [
        {
            "number": run.number,
            "prompt": run.request["prompt"],
            "tokens": [
                {"piece": visible_text(step.piece), "prob": step.prob, "same": same[index]}
                for index, step in enumerate(run.steps)
            ],
        }
        for run in (left, right)
    ]


def _walk(
    children: dict[int | None, list[Run]], parent: int | None = None, depth: int = 0
) -> Iterator[tuple[Run, int]]:
    """Yield (run, depth) in depth-first order."""
    for run in children.get(parent, []):
        yield run, depth
        yield from _walk(children, run.number, depth + 1)


def _tree_item(run: Run, depth: int, current: Run | None) -> dict[str, Any]:
    index = run.branched_at
    return {
        "number": run.number,
        "depth": depth,
        "prompt": run.request["prompt"],
        "text": _INCOMPLETE_TOKEN.sub("", run.text[:MAX_TEXT_CHARACTERS]),
        "count": len(run.steps),
        "branched_at": None if index is None else index + 1,
        "piece": visible_text(run.steps[index].piece) if index is not None and index < len(run.steps) else "",
        "current": run is current,
        "imported": run.imported,
    }
