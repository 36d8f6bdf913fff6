"""Limits of one request, read from environment variables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paligemma.errors import InputError


@dataclass(frozen=True)
class Limits:
    """Limits of one request.

    Attributes:
        max_new_tokens: tokens of one answer, at least 1.
        seconds: time limit of one answer, at least 1; generation stops after it and keeps the tokens so far.
        max_queue_size: maximum number of queued requests, at least 1.
    """

    max_new_tokens: int = 512
    seconds: int = 600
    max_queue_size: int = 16

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Limits:
        """Read MAX_NEW_TOKENS, MAX_SECONDS and MAX_WAITING. Raises InputError unless each is an integer >= 1."""
        default = cls()
        return cls(
            _positive_int(environment, "MAX_NEW_TOKENS", default.max_new_tokens),
            _positive_int(environment, "MAX_SECONDS", default.seconds),
            _positive_int(environment, "MAX_WAITING", default.max_queue_size),
        )

    def apply(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of `PaliGemma.stream` with a time limit. Raises InputError for too many tokens."""
        if request["max_new_tokens"] > self.max_new_tokens:
            raise InputError(
                "limits.max_new_tokens",
                "max_new_tokens must be <= {limit} on this server, got {value}.",
                limit=self.max_new_tokens,
                value=request["max_new_tokens"],
            )
        time_limit = request["time_limit"]
        return {**request, "time_limit": self.seconds if time_limit is None else min(time_limit, self.seconds)}


def _positive_int(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name, "").strip() or str(default)
    if not text.isdecimal() or int(text) < 1:
        raise InputError("limits.integer", "{name} must be an integer >= 1, got {text!r}.", name=name, text=text)
    return int(text)
