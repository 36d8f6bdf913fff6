"""Command-line options declared as the fields of a dataclass."""

import argparse
import dataclasses
from collections.abc import Sequence
from typing import Any, TypeVar, get_type_hints

T = TypeVar("T")


def parse_options(cls: type[T], prog: str, description: str, arguments: Sequence[str] | None = None) -> T:
    """Parse the options of a dataclass: every field of type `Annotated[type, "help text"]`, with its default value."""
    parser = argparse.ArgumentParser(prog=prog, description=description)
    hints = get_type_hints(cls, include_extras=True)
    fields: Any = dataclasses.fields(cls)  # type: ignore[arg-type]  # not every T is a dataclass
    for field in fields:
        if not hasattr(hints[field.name], "__metadata__"):
            continue
        flag, help = (
            f"--{field.name.replace('_', '-')}",
            f"{hints[field.name].__metadata__[0]} (default: {field.default})",
        )
        if isinstance(field.default, bool):
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=field.default, help=help)
        else:
            parser.add_argument(flag, type=type(field.default), default=field.default, help=help)
    return cls(**vars(parser.parse_args(arguments)))
