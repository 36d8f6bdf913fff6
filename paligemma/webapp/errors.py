"""Convert exceptions to the errors and statuses that users see."""

from __future__ import annotations

import errno
import re
from string import Formatter
from typing import Any

import gradio as gr

from paligemma.errors import CodedError, InputError
from paligemma.webapp.logs import error_location, log
from paligemma.webapp.messages import Status


def report_error(error: Exception) -> CodedError:
    """Log an exception, without user data, and return the error to show."""
    if isinstance(error, InputError | gr.Error):
        log.info("request rejected: %s", type(error).__name__)
    else:
        log.error("request failed: %s at %s", type(error).__name__, error_location(error))
    return to_coded_error(error)


def to_coded_error(error: Exception) -> CodedError:
    """Return the error to show for an exception. Only the type of an unexpected exception is shown, not its message."""
    if isinstance(error, CodedError):
        return error
    if isinstance(error, gr.Error):  # from ZeroGPU, such as an exceeded quota; contains HTML links
        return CodedError("server.zerogpu", "{message}", message=re.sub(r"<[^>]*>", "", str(error.message)))
    if is_out_of_memory(error):
        return CodedError(
            "server.out_of_memory", "Not enough memory for this request. Use fewer tokens or a smaller model."
        )
    if is_disk_full(error):
        return CodedError("server.disk_full", "The server's disk is full. Try again later; your results are kept.")
    return CodedError("server.internal", "Internal error ({type}). See the server log.", type=type(error).__name__)


def error_status(error: Exception) -> Status:
    """Log an exception, and return it as a status, which the page translates by its code."""
    return coded_status(report_error(error))


def coded_status(error: CodedError) -> Status:
    """Convert an error to a status. Values are formatted here, so that the page only replaces `{name}` with text.

    A value that is an error itself becomes a status too.
    """
    text, values = "", {}
    for literal, name, spec, conversion in Formatter().parse(error.template):
        text += literal
        if name is not None:
            text += f"{{{name}}}"
            values[name] = _page_value(error.values[name], spec or "", conversion)
    return {"kind": "error", "code": error.code, "text": text, "values": values}


def _page_value(value: Any, spec: str, conversion: str | None) -> Any:
    if isinstance(value, CodedError):
        return coded_status(value)
    return format(Formatter().convert_field(value, conversion), spec)


def is_disk_full(error: Exception) -> bool:
    """Whether the error is a full disk (ENOSPC)."""
    return isinstance(error, OSError) and error.errno == errno.ENOSPC


def is_out_of_memory(error: Exception) -> bool:
    """Whether the error is an out-of-memory error of Python, an accelerator or PyTorch on the CPU."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and ("can't allocate memory" in text or "not enough memory" in text)
