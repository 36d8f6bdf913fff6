"""The runs of a visit: what was asked, what came, and which run branched from which."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paligemma.sampling import Sampling
from paligemma.webapp.render.token_strip import visible_piece

if TYPE_CHECKING:
    from paligemma.generation import GenerationResult, Step, Timing
    from paligemma.webapp.images import InputImage

MAX_RUNS = 20
MAX_CANDIDATES = 60_000  # some 30 MB: what a visitor may make the server keep
TEXT_SHOWN = 200
_CUT_TOKEN = re.compile(r"<[a-z]*\d*$")


@dataclass(frozen=True)
class RunRequest:
    """A run that is asked for. Nothing in it has been checked but for what is said here.

    Attributes:
        picture: where the uploaded picture lies, or the picture of the run that is continued; None: there is none.
        arguments: those of `read_request`, prompt first.
        parent: number of the run that this one branches from, and at which token.
        replaces: number of the run that this one continues, and whose place it takes.
        stop_after: tokens after which it rests, for one step at a time.
    """

    image: str | Path | InputImage | None
    arguments: tuple[Any, ...]
    parent: int | None = None
    branched_at: int | None = None
    replaces: int | None = None
    stop_after: int | None = None


@dataclass
class Run:
    """One answer, whole or under way.

    Attributes:
        request: the checked arguments of `PaliGemma.stream`, seed included, that give this run again.
        model: what describes the model that answered, as in the export.
        finish_reason: of the result; "stopped" when it was ended before, None while it runs.
        masks: what `objects.py` has decoded so far.
    """

    number: int
    image: InputImage
    request: dict[str, Any]
    model: dict[str, Any]
    parent: int | None = None
    branched_at: int | None = None
    steps: list[Step] = field(default_factory=list)
    finish_reason: str | None = None
    timing: Timing | None = None
    masks: dict[tuple[int, ...], str] = field(default_factory=dict, repr=False)
    imported: bool = False

    @property
    def sampling(self) -> Sampling:
        return Sampling(self.request["temperature"], self.request["top_k"], self.request["top_p"])

    @property
    def text(self) -> str:
        return self.steps[-1].text if self.steps else ""

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(step.token_id for step in self.steps)

    @property
    def num_forced(self) -> int:
        """Tokens at the beginning that the model did not choose in this run."""
        return 0 if self.branched_at is None else self.branched_at + 1

    def finish(self, result: GenerationResult | None) -> None:
        """Note how it ended; None: it was stopped."""
        self.finish_reason, self.timing = (result.finish_reason, result.timing) if result else ("stopped", None)


class History:
    """The last runs of a visit: at most MAX_RUNS, and fewer when they hold more than MAX_CANDIDATES candidates.

    `current` is the one on the page.
    """

    def __init__(self) -> None:
        self._runs: dict[int, Run] = {}
        self._last_number = 0
        self.current: Run | None = None

    def __iter__(self) -> Iterator[Run]:
        return iter(list(self._runs.values()))

    def next_number(self) -> int:
        self._last_number += 1
        return self._last_number

    def add(self, run: Run) -> Run:
        """Take a run in and show it; the oldest goes when there are too many."""
        self._runs[run.number] = run
        self.current = run
        while len(self._runs) > MAX_RUNS or (len(self._runs) > 1 and self._num_candidates() > MAX_CANDIDATES):
            del self._runs[next(number for number in self._runs if number != run.number)]
        return run

    def _num_candidates(self) -> int:
        return sum(len(step.top) for run in self for step in run.steps)

    def find(self, number: Any) -> Run | None:
        return self._runs.get(number) if isinstance(number, int) else None

    def branch_request(self, number: Any, index: Any, token_id: Any) -> RunRequest | None:
        """Answer anew from token `index` of a run, with `token_id` there; None for what the run does not have."""
        run = self.find(number)
        if run is None or not all(isinstance(value, int) for value in (index, token_id)):
            return None
        if not 0 <= index < len(run.steps):
            return None
        forced_ids = (*run.token_ids[:index], token_id)
        arguments = _arguments(run, len(forced_ids), forced_ids)
        return RunRequest(run.image, arguments, parent=run.number, branched_at=index)

    def step_request(self) -> RunRequest | None:
        """One token more for the current run; None where nothing can follow."""
        run = self.current
        if run is None or run.finish_reason in (None, "eos"):
            return None
        count = len(run.steps) + 1
        # A branch may have been stopped before all of its forced tokens came.
        forced_ids = (*run.token_ids, *run.request["forced_ids"][len(run.steps) :])
        arguments = _arguments(run, count, forced_ids)
        return RunRequest(run.image, arguments, run.parent, run.branched_at, run.number, stop_after=count)


def run_tree(history: History, compared: Sequence[Run] = ()) -> dict[str, Any]:
    """The value of the list of runs: every run behind the one that it branched from, and two side by side."""
    runs = list(history)
    numbers = {run.number for run in runs}
    children: dict[int | None, list[Run]] = {}
    for run in runs:
        children.setdefault(run.parent if run.parent in numbers else None, []).append(run)
    rows = [_tree_row(run, depth, history.current) for run, depth in _walk(children, None, 0)]
    return {"runs": rows, "compared": compare(*compared) if len(compared) == 2 else None}


def compare(left: Run, right: Run) -> list[dict[str, Any]]:
    """Two runs, token beside token: "same" where both have one id in one place."""
    same = [one == other for one, other in zip(left.token_ids, right.token_ids)]  # noqa: B905 - one may be longer
    return [
        {
            "number": run.number,
            "prompt": run.request["prompt"],
            "tokens": [
                {"piece": visible_piece(step.piece), "prob": step.prob, "same": index < len(same) and same[index]}
                for index, step in enumerate(run.steps)
            ],
        }
        for run in (left, right)
    ]


def _walk(children: dict[int | None, list[Run]], parent: int | None, depth: int) -> Iterator[tuple[Run, int]]:
    for run in children.get(parent, []):
        yield run, depth
        yield from _walk(children, run.number, depth + 1)


def _tree_row(run: Run, depth: int, current: Run | None) -> dict[str, Any]:
    at = run.branched_at
    piece = visible_piece(run.steps[at].piece) if at is not None and at < len(run.steps) else ""
    return {
        "number": run.number,
        "depth": depth,
        "prompt": run.request["prompt"],
        "text": _CUT_TOKEN.sub("", run.text[:TEXT_SHOWN]),
        "count": len(run.steps),
        "branched_at": None if at is None else at + 1,
        "piece": piece,
        "current": run is current,
        "imported": run.imported,
    }


def _arguments(run: Run, count: int, forced_ids: tuple[int, ...]) -> tuple[Any, ...]:
    """The arguments of `read_request` that ask for the same run again, from other tokens on, at least `count` long."""
    names = ("prompt", "max_new_tokens", "temperature", "top_k", "top_p", "seed", "top_n", "forced_ids", "time_limit")
    longest = max(count, run.request["max_new_tokens"])
    submitted = {**run.request, "forced_ids": forced_ids, "max_new_tokens": longest}
    return tuple(submitted[name] for name in names)
