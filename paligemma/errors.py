"""Errors that a user can act on, with a code and values for translation."""

from __future__ import annotations

from typing import Any


class InputError(ValueError):
    """A bad value or file. `str(error)` is the English message.

    Attributes:
        code: dotted identifier of the message, such as "sampling.temperature"; user interfaces translate by it.
        template: the English message with `{placeholders}`.
        values: what fills the placeholders.
    """

    def __init__(self, code: str, template: str, /, **values: Any) -> None:
        self.code = code
        self.template = template
        self.values = values
        super().__init__(template.format(**values))

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (type(self), self.code, self.template, self.values)


class CheckpointError(InputError):
    """A checkpoint that is missing, incomplete or not supported."""


def _restore(cls: type[InputError], code: str, template: str, values: dict[str, Any]) -> InputError:
    return cls(code, template, **values)
