"""Errors that a user can act on, with a code and values for translation."""

from __future__ import annotations

from typing import Any, TypeVar


class CodedError(Exception):
    """Base of the errors shown to users. `str(error)` is the English message.

    Attributes:
        code: dotted identifier of the message, such as "sampling.temperature"; the key of its translations.
        template: the English message with `{placeholders}`.
        values: the values of the placeholders.
    """

    def __init__(self, code: str, template: str, /, **values: Any) -> None:
        self.code = code
        self.template = template
        self.values = values
        super().__init__(template.format(**values))

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (type(self), self.code, self.template, self.values)


class InputError(CodedError, ValueError):
    """An invalid argument or file."""


class CheckpointError(InputError):
    """A checkpoint that is missing, incomplete or not supported."""


class NonFiniteLogitsError(CodedError, ArithmeticError):
    """The logits contain NaN or infinity."""


AnyCodedError = TypeVar("AnyCodedError", bound=CodedError)


def _restore(cls: type[AnyCodedError], code: str, template: str, values: dict[str, Any]) -> AnyCodedError:
    """Rebuild a pickled error."""
    return cls(code, template, **values)
