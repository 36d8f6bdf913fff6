"""Runs, requests for runs, and the history of a session."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paligemma.sampling import Sampling
from paligemma.webapp.requests import GenerationRequest

if TYPE_CHECKING:
    from paligemma.generation import GenerationResult, Step, Timing
    from paligemma.webapp.images import InputImage

MAX_RUNS = 20
MAX_CANDIDATES = 60_000  # about 30 MB per session


@dataclass(frozen=True)
class RunRequest:
    """A pending run. Its values are not validated yet.

    Attributes:
        image: path of the uploaded image, or the image of the run to branch from or continue; None without an image.
        arguments: arguments of `read_request`, in order.
        parent: number of the run to branch from.
        branched_at: index of the token that differs from the parent run.
        continues: number of the run to continue.
        stop_after: number of tokens after which the run pauses; None: run to the end.
    """

    image: str | Path | InputImage | None
    arguments: tuple[Any, ...]
    parent: int | None = None
    branched_at: int | None = None
    continues: int | None = None
    stop_after: int | None = None


@dataclass
class Run:
    """One answer, complete or in progress.

    Attributes:
        number: number in the session, from 1.
        request: validated arguments of `PaliGemma.stream` with the seed that was used; they reproduce the run.
        model: metadata of the model, as exported.
        parent, branched_at: see `RunRequest`.
        finish_reason: as in `GenerationResult`, or "stopped"; None while in progress.
        timing: None for a run in progress or stopped.
        masks: cache of decoded masks as data URLs, by mask codes.
        imported: True if the run was read from a file.
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
        """The sampling settings, without the seed."""
        return Sampling(self.request["temperature"], self.request["top_k"], self.request["top_p"])

    @property
    def text(self) -> str:
        """The answer so far."""
        return self.steps[-1].text if self.steps else ""

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The ids of all tokens so far."""
        return tuple(step.token_id for step in self.steps)

    @property
    def num_forced(self) -> int:
        """Number of tokens taken from the parent run, including the one selected at the branch."""
        return 0 if self.branched_at is None else self.branched_at + 1

    def finish(self, result: GenerationResult | None) -> None:
        """Store the finish reason and the timing. `result` is None if the run was stopped."""
        self.finish_reason, self.timing = (result.finish_reason, result.timing) if result else ("stopped", None)


class History:
    """The most recent runs of a session: at most MAX_RUNS with at most MAX_CANDIDATES candidates in total.

    Attributes:
        current: the run on the page, or None.
    """

    def __init__(self) -> None:
        self._runs: dict[int, Run] = {}
        self._last_number = 0
        self.current: Run | None = None

    def __iter__(self) -> Iterator[Run]:
        """Iterate over a copy, oldest first."""
        return iter(list(self._runs.values()))

    def next_number(self) -> int:
        """Return the number for a new run."""
        self._last_number += 1
        return self._last_number

    def add(self, run: Run) -> Run:
        """Add a run, or replace the one with its number, and make it the current one. Evicts the oldest runs."""
        self._runs[run.number] = run
        self.current = run
        while len(self._runs) > MAX_RUNS or (len(self._runs) > 1 and self._num_candidates() > MAX_CANDIDATES):
            del self._runs[next(number for number in self._runs if number != run.number)]
        return run

    def find(self, number: Any) -> Run | None:
        """Return the run with this number, or None."""
        return self._runs.get(number) if isinstance(number, int) else None

    def branch_request(self, number: Any, index: Any, token_id: Any) -> RunRequest | None:
        """Return a request that replaces token `index` of a run by `token_id` and generates the rest.

        Returns None if there is no such run or token.
        """
        run = self.find(number)
        if run is None or not all(isinstance(value, int) for value in (index, token_id)):
            return None
        if not 0 <= index < len(run.steps):
            return None
        forced_ids = (*run.token_ids[:index], token_id)
        arguments = _arguments(run, len(forced_ids), forced_ids)
        return RunRequest(run.image, arguments, parent=run.number, branched_at=index)

    def step_request(self) -> RunRequest | None:
        """Return a request for one more token of the current run; None if it is in progress or complete."""
        run = self.current
        if run is None or run.finish_reason in (None, "eos"):
            return None
        num_tokens = len(run.steps) + 1
        # A branch may have been stopped before all of its forced tokens were generated.
        forced_ids = (*run.token_ids, *run.request["forced_ids"][len(run.steps) :])
        arguments = _arguments(run, num_tokens, forced_ids)
        return RunRequest(run.image, arguments, run.parent, run.branched_at, run.number, stop_after=num_tokens)

    def _num_candidates(self) -> int:
        return sum(len(step.top) for run in self for step in run.steps)


def _arguments(run: Run, num_tokens: int, forced_ids: tuple[int, ...]) -> tuple[Any, ...]:
    """Arguments of `read_request` to repeat a run with other forced tokens and at least `num_tokens` tokens."""
    max_new_tokens = max(num_tokens, run.request["max_new_tokens"])
    request = {**run.request, "forced_ids": forced_ids, "max_new_tokens": max_new_tokens}
    return tuple(request[name] for name in GenerationRequest.model_fields)
