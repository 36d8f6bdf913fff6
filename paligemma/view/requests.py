"""What a visitor or a client sent -> checked arguments of `PaliGemma.stream`.

Components and JSON bring numbers of any type; here they become the types that the library asks for. Whether a
number is in its range, the library itself says.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MAX_PROMPT_CHARACTERS = 2_000
MAX_SECONDS = 600.0


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

    `seed`, `forced_ids` and `time_limit` may be None. No request gets more than MAX_SECONDS.

    Raises ValueError, naming the field, for a wrong type or a prompt of more than MAX_PROMPT_CHARACTERS.
    """
    seconds = MAX_SECONDS if time_limit is None else _real("time_limit", time_limit)
    return {
        "prompt": _read_prompt(prompt),
        "max_new_tokens": _whole("max_new_tokens", max_new_tokens),
        "temperature": _real("temperature", temperature),
        "top_k": _whole("top_k", top_k),
        "top_p": _real("top_p", top_p),
        "seed": None if seed is None else _whole("seed", seed),
        "top_n": _whole("top_n", top_n),
        "forced_ids": read_ids("forced_ids", forced_ids),
        "time_limit": min(seconds, MAX_SECONDS),
    }


def read_ids(name: str, token_ids: Any) -> tuple[int, ...]:
    """Token ids as whole numbers, none for None; ValueError for anything else."""
    if not isinstance(token_ids, list | tuple | None):
        raise ValueError(f"{name} must be a list of token ids, got {type(token_ids).__name__}")
    return tuple(_whole(name, token_id) for token_id in token_ids or ())


def read_index(index: Any) -> int:
    """The place of a token in an answer, from 0; ValueError for anything but a whole number."""
    return _whole("index", index)


def picture_path(upload: Any) -> str | None:
    """Where Gradio stored an uploaded file; None when there is none.

    Gradio checks that a file was uploaded only where the client marked it as a file. An unmarked path may be any
    of the server's files, so it counts as none.
    """
    meta = upload.get("meta") if isinstance(upload, Mapping) else None
    if not isinstance(meta, Mapping) or meta.get("_type") != "gradio.FileData":
        return None
    path = upload.get("path")
    return path if isinstance(path, str) else None


def _read_prompt(prompt: Any) -> str:
    if not isinstance(prompt, str | None):
        raise ValueError(f"prompt must be text, got {type(prompt).__name__}")
    if prompt and len(prompt) > MAX_PROMPT_CHARACTERS:
        raise ValueError(f"prompt has {len(prompt)} characters; at most {MAX_PROMPT_CHARACTERS} are allowed")
    return prompt or ""


def _whole(name: str, value: Any) -> int:
    """An int; 5.0 counts, as JSON does not tell the two apart."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value % 1 != 0:
        raise ValueError(f"{name} must be a whole number, got {_quote(value)}")
    return int(value)


def _real(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} must be a number, got {_quote(value)}")
    return float(value)


def _quote(value: Any) -> str:
    return "nothing" if value is None else repr(value)[:40]
