"""Strict type checks for option values."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any


def is_integer(value: Any) -> bool:
    """Return whether `value` is a Python or NumPy integer; bool does not count."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_finite_number(value: Any) -> bool:
    """Return whether `value` is a real number of any type that is finite as a float; bool does not count."""
    try:
        return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer larger than every float
        return False
