"""The server's log: one line per request, without user data or access tokens."""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paligemma.checkpoint.hub import redact_tokens

if TYPE_CHECKING:
    from paligemma.generation import Step

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"

log = logging.getLogger("paligemma.app")


class RedactingFormatter(logging.Formatter):
    """Remove access tokens from log lines and tracebacks."""

    def format(self, record: logging.LogRecord) -> str:
        return redact_tokens(super().format(record))


def configure_logging() -> None:
    """Log to stderr at INFO, without the HTTP clients' line per request."""
    handler = logging.StreamHandler()
    handler.setFormatter(RedactingFormatter(LOG_FORMAT))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    for client in ("httpx", "httpx2"):  # of Gradio and huggingface_hub
        logging.getLogger(client).setLevel(logging.WARNING)


@dataclass
class RequestEntry:
    """Log entry of a request that is being processed. `outcome` is its finish reason or error type."""

    outcome: str = "done"


@contextmanager
def log_request(kind: str, model: str, steps: Sequence[Step] | None = None) -> Iterator[RequestEntry]:
    """Log one line when a request ends, without user data: model, seconds and outcome.

    Args:
        steps: the steps so far, read at the end: adds their number and the time of the first; None: no generation.
    """
    started, entry = time.perf_counter(), RequestEntry()
    try:
        yield entry
    except GeneratorExit:
        entry.outcome = "stopped"
        raise
    except Exception as error:
        entry.outcome = type(error).__name__
        raise
    finally:
        total = time.perf_counter() - started
        tokens = "" if steps is None else f" tokens={len(steps)} first={_first_seconds(steps)}"
        log.info("%s: model=%s%s total=%.2f outcome=%s", kind, model, tokens, total, entry.outcome)


def _first_seconds(steps: Sequence[Step]) -> str:
    return f"{steps[0].seconds:.2f}" if steps else "-"


def error_location(error: BaseException) -> str:
    """Innermost four frames of a traceback, without the error's message, which may contain user data."""
    frames = traceback.extract_tb(error.__traceback__)[-4:]
    return " < ".join(f"{frame.filename.rpartition('/')[2]}:{frame.lineno} {frame.name}" for frame in reversed(frames))
