"""Validate the inputs of a request, which can be JSON values of any type.

Types and sizes are checked here. `PaliGemma.stream` checks the ranges.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    Strict,
    TypeAdapter,
    ValidationError,
)

from paligemma.errors import InputError
from paligemma.processing import replace_lone_surrogates

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

    from paligemma.processing import PaliGemmaProcessor

MAX_PROMPT_CHARACTERS = 2_000
# The prefix is encoded in one forward pass, and a character can be four tokens.
MAX_PROMPT_TOKENS = 512
# Larger than every limit of the library, and small enough for a tensor of int64.
MAX_NUMBER = 2**63 - 1
MAX_QUOTED_CHARACTERS = 40

T = TypeVar("T")


def _integral_float_to_int(value: Any) -> Any:
    """Accept 5.0 as an integer: JSON has one number type."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _empty_to_none(value: Any) -> Any:
    """Convert "", the value of an empty number field, to None."""
    return None if value == "" else value


def _to_unicode(prompt: Any) -> Any:
    """Replace lone surrogates, which cannot be sent as UTF-8. None is the empty prompt."""
    return replace_lone_surrogates(prompt) if isinstance(prompt, str) else "" if prompt is None else prompt


_IN_RANGE = Field(ge=-MAX_NUMBER, le=MAX_NUMBER)
Integer = Annotated[int, Strict(), _IN_RANGE, BeforeValidator(_integral_float_to_int)]
Number = Annotated[float, Strict(), _IN_RANGE, Field(allow_inf_nan=False)]
Prompt = Annotated[str, Strict(), Field(max_length=MAX_PROMPT_CHARACTERS), BeforeValidator(_to_unicode)]
TokenIds = Annotated[tuple[Integer, ...], FailFast(), BeforeValidator(lambda ids: () if ids is None else ids)]


class GenerationRequest(BaseModel):
    """The arguments of `PaliGemma.stream`, without the image."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    prompt: Prompt
    max_new_tokens: Integer
    temperature: Number
    top_k: Integer
    top_p: Number
    seed: Annotated[Integer | None, BeforeValidator(_empty_to_none)]
    top_n: Integer
    forced_ids: TokenIds
    time_limit: Number | None


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
    """Return the keyword arguments of `PaliGemma.stream`, without the image.

    `seed`, `forced_ids` and `time_limit` may be None. A `seed` of "" is None.

    Raises:
        InputError: for a wrong type, a number beyond MAX_NUMBER or a prompt of more than MAX_PROMPT_CHARACTERS.
    """
    try:
        request = GenerationRequest(
            prompt=prompt,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            top_n=top_n,
            forced_ids=forced_ids,
            time_limit=time_limit,
        )
    except ValidationError as error:
        raise _to_input_error(error) from error
    return request.model_dump()


def read_ids(name: str, token_ids: Any) -> tuple[int, ...]:
    """Validate a list of token ids; None is an empty list. Raises InputError."""
    return _validate(name, TypeAdapter(TokenIds), token_ids)


def read_index(index: Any) -> int:
    """Validate the index of a token. Raises InputError."""
    return _validate("index", TypeAdapter(Integer), index)


def read_prompt(prompt: Any) -> str:
    """Validate a prompt; None is the empty prompt. Raises InputError."""
    return _validate("prompt", TypeAdapter(Prompt), prompt)


def check_prompt_length(processor: PaliGemmaProcessor, prompt: str) -> None:
    """Raise InputError for a prompt of more than MAX_PROMPT_TOKENS tokens."""
    count = len(processor.encode_text(prompt))
    if count > MAX_PROMPT_TOKENS:
        raise InputError(
            "request.prompt_tokens",
            "prompt must have at most {maximum} tokens, got {count}.",
            maximum=MAX_PROMPT_TOKENS,
            count=count,
        )


def quote(value: Any) -> str:
    """Format a value of any type for an error message. Strings are truncated; lists and objects are shown by type."""
    if isinstance(value, str):
        return repr(value[:MAX_QUOTED_CHARACTERS])
    if isinstance(value, int) and abs(value) > MAX_NUMBER:
        return "an integer beyond 64 bits"
    return repr(value) if value is None or isinstance(value, int | float) else type(value).__name__


def format_location(location: tuple[int | str, ...]) -> str:
    """Format the location of a pydantic error: ("tokens", 0, "prob") as `tokens[0].prob`."""
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    return "".join(parts).removeprefix(".")


def _validate(name: str, adapter: TypeAdapter[T], value: Any) -> T:
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        raise _to_input_error(error, name) from error


def _to_input_error(error: ValidationError, name: str = "") -> InputError:
    """Convert the first error that pydantic reports. `name` is the field if a single value was validated."""
    first: ErrorDetails = error.errors(include_url=False)[0]
    field = format_location((name, *first["loc"]) if name else first["loc"])
    value = quote(first["input"])
    match first["type"]:
        case "string_too_long":
            return InputError(
                "request.prompt_length",
                "prompt must have at most {maximum} characters, got {count}.",
                maximum=MAX_PROMPT_CHARACTERS,
                count=len(first["input"]),
            )
        case "string_type":
            return InputError("request.string", "{field} must be a string, got {value}.", field=field, value=value)
        case "int_type":
            return InputError("request.integer", "{field} must be an integer, got {value}.", field=field, value=value)
        case "float_type":
            return InputError("request.number", "{field} must be a number, got {value}.", field=field, value=value)
        case "finite_number":
            return InputError("request.finite", "{field} must be finite, got {value}.", field=field, value=value)
        case "greater_than_equal" | "less_than_equal":
            return InputError(
                "request.range",
                "{field} must be in the range of a 64-bit integer, got {value}.",
                field=field,
                value=value,
            )
        case _:
            return InputError(
                "request.token_ids", "{field} must be a list of token ids, got {value}.", field=field, value=value
            )
