"""Errors with a code and values."""

from __future__ import annotations

import pickle

import pytest

from paligemma.errors import CheckpointError, CodedError, InputError, NonFiniteLogitsError


@pytest.mark.parametrize(
    ("kind", "base"), [(InputError, ValueError), (CheckpointError, InputError), (NonFiniteLogitsError, ArithmeticError)]
)
def test_error_has_a_message_a_code_and_values(kind, base):
    error = kind("sampling.top_k", "top_k must be >= {minimum}, got {value!r}.", minimum=0, value="x")
    assert isinstance(error, CodedError) and isinstance(error, base)
    assert str(error) == "top_k must be >= 0, got 'x'."
    assert (error.code, error.template) == ("sampling.top_k", "top_k must be >= {minimum}, got {value!r}.")
    assert error.values == {"minimum": 0, "value": "x"}


def test_values_can_have_any_name_and_contain_braces():
    error = InputError("test", "{code} {template}", code="{0}", template="{x}")
    assert str(error) == "{0} {x}"


@pytest.mark.parametrize("kind", [InputError, CheckpointError, NonFiniteLogitsError])
def test_error_can_be_pickled(kind):
    error = pickle.loads(pickle.dumps(kind("test", "{value} is wrong", value=3)))
    assert (type(error), str(error), error.code, error.values) == (kind, "3 is wrong", "test", {"value": 3})
