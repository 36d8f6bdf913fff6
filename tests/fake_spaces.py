"""In place of Hugging Face's `spaces`: a function with a lent GPU runs in another process, as on ZeroGPU.

What goes there and what comes back is pickled; an error there becomes one without its words here; what the function
returns at the end of a generator is lost. `loans` notes each call: its seconds and the sizes of what came back.
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
class Loan:
    seconds: int
    sizes: list[int] = field(default_factory=list)
    was_ended: bool = False


loans: list[Loan] = []


def GPU(duration: Callable[..., int]) -> Callable[[Callable], Callable]:  # noqa: N802 - the name is not ours
    def gpu_lease(task: Callable) -> Callable:
        def generator(*arguments: Any) -> Iterator[Any]:
            yield from _call(_each, task, arguments, duration(*arguments))

        def function(*arguments: Any) -> Any:
            (result,) = _call(_once, task, arguments, duration(*arguments))
            return result

        return generator if inspect.isgeneratorfunction(task) else function

    return gpu_lease


def gradio_auto_wrap(task: Callable) -> Callable:
    """Gradio asks for this; by default it changes nothing."""
    return task


def _each(task: Callable, arguments: tuple) -> Iterator[Any]:
    yield from task(*arguments)


def _once(task: Callable, arguments: tuple) -> Iterator[Any]:
    yield task(*arguments)


def _call(run: Callable, task: Callable, arguments: tuple, seconds: int) -> Iterator[Any]:
    context = multiprocessing.get_context("fork")
    (here, there), stop, loan = context.Pipe(), context.Event(), Loan(seconds)
    loans.append(loan)
    process = context.Process(target=_work, args=(run, task, pickle.dumps(arguments), there, stop), daemon=True)
    process.start()
    try:
        while (sent := here.recv_bytes()) != b"end":
            if sent.startswith(b"error"):
                raise RuntimeError("worker error: " + sent.decode().split()[1])
            loan.sizes.append(len(sent))
            yield pickle.loads(sent)
    finally:
        stop.set()
        process.join(30)
        loan.was_ended = not process.is_alive()
        if "LOANS_FILE" in os.environ:
            with open(os.environ["LOANS_FILE"], "a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(loan)) + "\n")


def _work(run: Callable, task: Callable, arguments: bytes, there: Any, stop: Any) -> None:
    try:
        for item in run(task, pickle.loads(arguments)):
            if stop.is_set():
                return
            there.send_bytes(pickle.dumps(item))
        there.send_bytes(b"end")
    except Exception as error:
        there.send_bytes(f"error {type(error).__name__}".encode())
