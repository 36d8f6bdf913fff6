"""Hugging Face ZeroGPU: each request leases a GPU, and the model runs in a forked process that has it.

Arguments and results are pickled, so they are kept small. `spaces` drops the return value of a generator and the
message of an exception, so both are sent as values.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from typing import Any

import torch

from paligemma.generation import GenerationResult, Step, StepCollector

try:
    import spaces  # only installed on Spaces; patches CUDA, so app.py imports it before torch
except ImportError:
    spaces = None

# What the GPU process sends: the steps, then the result without its steps, or an error.
Message = Step | GenerationResult | Exception
# (function, function that returns the lease in seconds for the same arguments) -> function that runs on a leased GPU.
GpuLease = Callable[[Callable, Callable[..., int]], Callable]

# Seconds of a lease: weight transfer to the GPU, prefill (image and prompt), and each token.
TRANSFER_S, PREFILL_S, TOKEN_S = 20, 5, 0.08


def is_zerogpu() -> bool:
    """Whether this process runs on a ZeroGPU Space."""
    return spaces is not None and os.environ.get("SPACES_ZERO_GPU", "").lower() in ("1", "t", "true")


def with_gpu_lease(function: Callable, seconds: Callable[..., int]) -> Callable:
    """Wrap a function to run on a GPU that is leased for `seconds(*arguments)` seconds."""
    return spaces.GPU(duration=seconds)(function)


def answer_seconds(image: Any, request: Mapping[str, Any]) -> int:
    """Seconds to lease for an answer. ZeroGPU charges a user's quota for the requested time, not the used time."""
    return TRANSFER_S + round(_generation_seconds(request))


def inspection_seconds(*_: Any) -> int:
    """Seconds to lease for an inspection."""
    return TRANSFER_S + PREFILL_S


def limit_to_lease(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the request with a time limit that ends generation before the lease."""
    return {**request, "time_limit": min(request["time_limit"], _generation_seconds(request))}


def _generation_seconds(request: Mapping[str, Any]) -> float:
    return PREFILL_S + TOKEN_S * request["max_new_tokens"]


def send_stream(stream: Generator[Step, None, GenerationResult]) -> Iterator[Message]:
    """In the GPU process: yield a stream's steps, its return value and its error as values that can be pickled."""
    try:
        with closing(stream):
            result = yield from stream
        yield replace(result, steps=())  # LeasedSteps has the steps
    except Exception as error:
        yield error


def use_one_thread() -> None:
    """In the GPU process: compute in one thread, because OpenMP's thread pool does not survive a fork."""
    torch.set_num_threads(1)


class LeasedSteps(StepCollector):
    """In the server: collect the steps and the result that `send_stream` yields, and raise its error."""

    def __next__(self) -> Step:
        message: Any = next(self._stream)
        if isinstance(message, GenerationResult):
            self.result = replace(message, steps=tuple(self.steps))
            raise StopIteration
        if isinstance(message, Exception):
            try:
                raise message
            finally:
                del message  # break the reference cycle with the traceback, which would keep the request in memory
        self.steps.append(message)
        return message
