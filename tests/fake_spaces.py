"""Fake of Hugging Face's `spaces` package: a decorated function runs in a forked process, as on ZeroGPU.

Arguments and results are pickled, an exception loses its message, and the return value of a generator is lost.
"""

from __future__ import annotations

import inspect
import json
import multiprocessing
import os
import pickle
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class Lease:
    """One call of a decorated function.

    Attributes:
        seconds: requested duration.
        sizes: bytes of each pickled result.
        was_ended: whether the process has exited.
    """

    seconds: int
    sizes: list[int] = field(default_factory=list)
    was_ended: bool = False


leases: list[Lease] = []


def GPU(duration: Callable[..., int]) -> Callable[[Callable], Callable]:  # noqa: N802 - the name in `spaces`
    def decorate(task: Callable) -> Callable:
        def generator(*arguments: Any) -> Iterator[Any]:
            yield from _call(_iterate, task, arguments, duration(*arguments))

        def function(*arguments: Any) -> Any:
            (result,) = _call(_call_once, task, arguments, duration(*arguments))
            return result

        return generator if inspect.isgeneratorfunction(task) else function

    return decorate


def gradio_auto_wrap(task: Callable) -> Callable:
    """Gradio calls this on Spaces; the default returns the task unchanged."""
    return task


def _iterate(task: Callable, arguments: tuple) -> Iterator[Any]:
    yield from task(*arguments)


def _call_once(task: Callable, arguments: tuple) -> Iterator[Any]:
    yield task(*arguments)


def _call(run: Callable, task: Callable, arguments: tuple, seconds: int) -> Iterator[Any]:
    context = multiprocessing.get_context("fork")
    (receiver, sender), stop, lease = context.Pipe(), context.Event(), Lease(seconds)
    leases.append(lease)
    process = context.Process(target=_work, args=(run, task, pickle.dumps(arguments), sender, stop), daemon=True)
    process.start()
    try:
        while (message := receiver.recv_bytes()) != b"end":
            if message.startswith(b"error"):
                raise RuntimeError("worker error: " + message.decode().split()[1])
            lease.sizes.append(len(message))
            yield pickle.loads(message)
    finally:
        stop.set()
        process.join(30)
        lease.was_ended = not process.is_alive()
        if "LEASES_FILE" in os.environ:
            with open(os.environ["LEASES_FILE"], "a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(lease)) + "\n")


def _work(run: Callable, task: Callable, arguments: bytes, sender: Any, stop: Any) -> None:
    try:
        for item in run(task, pickle.loads(arguments)):
            if stop.is_set():
                return
            sender.send_bytes(pickle.dumps(item))
        sender.send_bytes(b"end")
    except Exception as error:
        sender.send_bytes(f"error {type(error).__name__}".encode())
