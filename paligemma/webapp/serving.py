"""One request at the model: within the server's limits, one forward pass at a time, and a line of the log at its end.

A GPU may be the server's own, or lent for one request (Hugging Face's ZeroGPU). Then the model runs in another
process: what goes there and what comes back is pickled, so it is small, and errors come back as values.
"""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from paligemma.generation import GenerationResult, Step

# What comes from where the model runs: its steps, at the end the result without them, or what went wrong.
Item = Step | GenerationResult | Exception
# A function that runs the model, and the seconds that a call of it needs -> the same function, with a GPU lent for it.
GpuLease = Callable[[Callable, Callable[..., int]], Callable]

# Seconds of a lent GPU: the weights are moved there, picture and prompt are read, and each token is written.
LEASE_TRANSFER_S, LEASE_PREFILL_S, LEASE_TOKEN_S = 20, 5, 0.08

log = logging.getLogger("paligemma.app")


@dataclass(frozen=True)
class Limits:
    """What a request may take, whatever it asks for.

    Attributes:
        max_new_tokens: tokens of an answer, at least 1.
        seconds: of an answer, at least 1; then it ends with what it has.
        waiting: requests that may wait in line, at least 1.
    """

    max_new_tokens: int = 512
    seconds: int = 600
    waiting: int = 16

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Limits:
        """MAX_NEW_TOKENS, MAX_SECONDS and MAX_WAITING; ValueError for anything but a whole number of at least 1."""
        default = cls()
        return cls(
            _positive(environment, "MAX_NEW_TOKENS", default.max_new_tokens),
            _positive(environment, "MAX_SECONDS", default.seconds),
            _positive(environment, "MAX_WAITING", default.waiting),
        )

    def applied(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of `PaliGemma.stream` with the time limited; ValueError for more tokens than are allowed."""
        if request["max_new_tokens"] > self.max_new_tokens:
            raise ValueError(
                f"max_new_tokens is {request['max_new_tokens']}; this server allows at most {self.max_new_tokens}"
            )
        submitted = request["time_limit"]
        return {**request, "time_limit": self.seconds if submitted is None else min(submitted, self.seconds)}


def _positive(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name, "").strip() or str(default)
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{name} is {text!r}; allowed is a whole number of at least 1")
    return int(text)


# Where the model runs, which may be another process


def items(stream: Iterator[Step]) -> Iterator[Item]:
    """A model's stream as values that can be sent between processes."""
    try:
        with closing(stream):
            result = yield from stream
        yield replace(result, steps=())  # the other side has them already
    except Exception as error:
        yield error


def answer_seconds(image: Any, request: Mapping[str, Any]) -> int:
    """How long a GPU is lent for an answer: the quota is charged with what is asked for, so no more than it needs."""
    return LEASE_TRANSFER_S + round(_seconds_of_work(request))


def inspection_seconds(*_: Any) -> int:
    """How long a GPU is lent for a look inside an answer."""
    return LEASE_TRANSFER_S + LEASE_PREFILL_S


def within_lease(request: Mapping[str, Any]) -> dict[str, Any]:
    """The request with a time limit that ends the answer before the GPU is taken away."""
    return {**request, "time_limit": min(request["time_limit"], _seconds_of_work(request))}


def _seconds_of_work(request: Mapping[str, Any]) -> float:
    return LEASE_PREFILL_S + LEASE_TOKEN_S * request["max_new_tokens"]


# Where the visitor is served


def follow(
    model: str, received: Iterator[Item], forward_lock: threading.Lock
) -> Generator[Step, None, GenerationResult]:
    """The steps of an answer, and its result at the end; closing it ends the work.

    `turn` is held for one forward pass at a time. Answers share nothing but the weights, so it is not needed for what
    they say: it keeps the memory and the time of a pass to one, also where a generator that was given up has not
    ended yet, and nobody waits for more than one step of it.
    """
    steps: list[Step] = []
    with logged("request", model, steps) as line, closing(received):
        while True:
            with forward_lock:
                item = next(received)
            if isinstance(item, Exception):
                try:
                    raise item
                finally:
                    del item  # else its traceback would hold this frame, and this frame it and the request's memory
            if isinstance(item, GenerationResult):
                line.outcome = item.finish_reason
                return replace(item, steps=tuple(steps))
            steps.append(item)
            yield item


@dataclass
class Line:
    """How a request ended, for the log."""

    outcome: str


@contextmanager
def logged(kind: str, model: str, steps: list[Step]) -> Iterator[Line]:
    """One line of the log at the end, without anything that the visitor wrote or got."""
    began, line = time.perf_counter(), Line("done")
    try:
        yield line
    except GeneratorExit:
        line.outcome = "stopped"
        raise
    except Exception as error:
        line.outcome = type(error).__name__
        raise
    finally:
        first = f"{steps[0].seconds:.2f}" if steps else "-"
        total = time.perf_counter() - began
        log.info("%s: model=%s tokens=%d first=%s total=%.2f outcome=%s",
                 kind, model, len(steps), first, total, line.outcome)  # fmt: skip


def place_of(error: BaseException) -> str:
    """Where an error came from, innermost first, without its message, which may hold what a visitor wrote."""
    frames = traceback.extract_tb(error.__traceback__)[-4:]
    return " < ".join(f"{frame.filename.rpartition('/')[2]}:{frame.lineno} {frame.name}" for frame in reversed(frames))


def use_one_thread() -> None:
    """For where a GPU is lent: in a fork of the server OpenMP would wait for threads that did not come along."""
    torch.set_num_threads(1)
