"""What a visitor or a client sent -> checked arguments of `PaliGemma.stream`, and the content of uploaded files.

Components and JSON bring values of any type; here they become the types that the library asks for. Whether a
number is in its range, the library itself says.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paligemma.processing import replace_lone_surrogates

if TYPE_CHECKING:
    from paligemma.processing import PaliGemmaProcessor

MAX_PROMPT_CHARACTERS = 2_000
# Characters alone do not bound the work: a rare one is four tokens, and the prefix is read in one go.
MAX_PROMPT_TOKENS = 512
MAX_FILE_BYTES = 10 * 2**20
# Beyond every limit of the library, and within what JSON, torch and a message can hold.
MAX_NUMBER = 2**63 - 1


def read_request(
    prompt: Any,
    max_new_tokens: Any,
    temperature: Any,
    top_k: Any,
    top_p: Any,
    seed: Any,
    top_n: Any,
    forced_ids: Any = None,
    time_limit: Any = None,
) -> dict[str, Any]:
    """The keyword arguments of `PaliGemma.stream`, all but the picture.

    `seed`, `forced_ids` and `time_limit` may be None; a `seed` of "" is the page's empty field.

    Raises ValueError, naming the field, for a wrong type or a prompt of more than MAX_PROMPT_CHARACTERS.
    """
    return {
        "prompt": read_prompt(prompt),
        "max_new_tokens": _whole("max_new_tokens", max_new_tokens),
        "temperature": _real("temperature", temperature),
        "top_k": _whole("top_k", top_k),
        "top_p": _real("top_p", top_p),
        "seed": None if seed in (None, "") else _whole("seed", seed),
        "top_n": _whole("top_n", top_n),
        "forced_ids": read_ids("forced_ids", forced_ids),
        "time_limit": None if time_limit is None else _real("time_limit", time_limit),
    }


def read_ids(name: str, token_ids: Any) -> tuple[int, ...]:
    """Token ids as whole numbers, none for None; ValueError for anything else."""
    if not isinstance(token_ids, list | tuple | None):
        raise ValueError(f"{name} must be a list of token ids, got {type(token_ids).__name__}")
    return tuple(_whole(name, token_id) for token_id in token_ids or ())


def read_index(index: Any) -> int:
    """The place of a token in an answer, from 0; ValueError for anything but a whole number."""
    return _whole("index", index)


def read_prompt(prompt: Any) -> str:
    """The prompt as text that can be sent back, "" for None.

    Raises ValueError for anything but text, and for more than MAX_PROMPT_CHARACTERS.
    """
    if not isinstance(prompt, str | None):
        raise ValueError(f"prompt must be text, got {quote(prompt)}")
    if prompt and len(prompt) > MAX_PROMPT_CHARACTERS:
        raise ValueError(f"prompt has {len(prompt)} characters; at most {MAX_PROMPT_CHARACTERS} are allowed")
    return replace_lone_surrogates(prompt or "")  # no answer could carry one back


def check_prompt_length(processor: PaliGemmaProcessor, prompt: str) -> None:
    """Raise ValueError, with both numbers, for a prompt of more than MAX_PROMPT_TOKENS tokens."""
    count = len(processor.encode_text(prompt))
    if count > MAX_PROMPT_TOKENS:
        raise ValueError(f"prompt has {count} tokens; at most {MAX_PROMPT_TOKENS} are allowed")


def uploaded_path(upload: Any) -> str | None:
    """Where Gradio stored an uploaded file; None when there is none.

    Gradio checks that a file was uploaded only where the client marked it as a file. An unmarked path may be any
    of the server's files, so it counts as none.
    """
    meta = upload.get("meta") if isinstance(upload, Mapping) else None
    if not isinstance(meta, Mapping) or meta.get("_type") != "gradio.FileData":
        return None
    path = upload.get("path")
    return path if isinstance(path, str) else None


def read_upload(path: str | Path) -> bytes:
    """The content of an uploaded file.

    Raises ValueError, in words for the visitor, for what is no ordinary file (a pipe would keep the reader waiting,
    a device never ends), cannot be read, or has more than MAX_FILE_BYTES.
    """
    try:
        if not Path(path).is_file():
            raise ValueError("This file is not there any more, or is no ordinary file. Choose it again.")
        with open(path, "rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ValueError("This file cannot be read. Choose it again.") from error
    if len(content) > MAX_FILE_BYTES:
        raise ValueError(f"This file has more than {MAX_FILE_BYTES // 2**20} MB, which is the most that is read.")
    return content


def quote(value: Any) -> str:
    """A value as a message shows it: short, and of anything but a text, a number or nothing only the type."""
    if value is None:
        return "nothing"
    if isinstance(value, str):
        return repr(value[:40])
    if isinstance(value, int) and abs(value) > MAX_NUMBER:
        return "a number of many digits"
    return repr(value) if isinstance(value, int | float) else type(value).__name__


def _whole(name: str, value: Any) -> int:
    """An int; 5.0 counts, as JSON does not tell the two apart."""
    if _real(name, value, "whole number") % 1 != 0:
        raise ValueError(f"{name} must be a whole number, got {quote(value)}")
    return int(value)


def _real(name: str, value: Any, kind: str = "number") -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} must be a {kind}, got {quote(value)}")
    if not -MAX_NUMBER <= value <= MAX_NUMBER:  # NaN is not either
        raise ValueError(f"{name} is {quote(value)}; allowed are numbers from -2^63 to 2^63")
    return float(value)
