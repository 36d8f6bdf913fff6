"""Validation of requests. tests/test_hostile_input.py has the wrong values."""

from __future__ import annotations

import pytest
from run_helpers import DECODING

from paligemma.errors import InputError
from paligemma.webapp.requests import MAX_PROMPT_CHARACTERS, read_ids, read_index, read_request


def test_a_request_becomes_the_arguments_of_stream():
    assert read_request("caption en", **{**DECODING, "max_new_tokens": 16.0, "seed": 3}) == {
        "prompt": "caption en",
        "max_new_tokens": 16,
        "temperature": 0.0,
        "top_k": 0,
        "top_p": 1.0,
        "seed": 3,
        "top_n": 10,
        "forced_ids": (),
        "time_limit": None,
    }


def test_empty_fields_have_defaults():
    assert read_request(None, **DECODING)["prompt"] == ""
    assert read_request("", **{**DECODING, "seed": ""})["seed"] is None


def test_forced_ids_and_time_limit_are_optional():
    request = read_request("", **DECODING, forced_ids=[1, 2.0], time_limit=9)
    assert (request["forced_ids"], request["time_limit"]) == ((1, 2), 9)


def test_ids_and_index_of_an_inspection():
    assert read_ids("token_ids", [3, 4]) == (3, 4) and read_ids("token_ids", None) == () and read_index(2.0) == 2
    with pytest.raises(InputError, match=r"^token_ids\[1\] must be an integer, got 'x'"):
        read_ids("token_ids", [3, "x"])
    with pytest.raises(InputError, match=r"^index must be an integer, got None"):
        read_index(None)


@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        ({"max_new_tokens": 1.5}, "request.integer"),
        ({"max_new_tokens": None}, "request.integer"),
        ({"top_k": "4"}, "request.integer"),
        ({"top_n": True}, "request.integer"),
        ({"temperature": "hot"}, "request.number"),
        ({"top_p": None}, "request.number"),
        ({"seed": float("nan")}, "request.integer"),
        ({"temperature": float("inf")}, "request.finite"),
        ({"forced_ids": "12"}, "request.token_ids"),
        ({"forced_ids": [1, "2"]}, "request.integer"),
        ({"time_limit": [1]}, "request.number"),
        ({"max_new_tokens": 1e308}, "request.range"),
        ({"seed": -(10**400)}, "request.range"),
    ],
)
def test_an_error_names_the_field(wrong, code):
    (field,) = wrong
    with pytest.raises(InputError, match=f"^{field}") as caught:
        read_request("caption en", **{**DECODING, **wrong})
    assert caught.value.code == code and len(str(caught.value)) < 100


def test_a_prompt_may_have_the_maximum_length():
    assert read_request("x" * MAX_PROMPT_CHARACTERS, **DECODING)
    with pytest.raises(
        InputError, match=f"at most {MAX_PROMPT_CHARACTERS} characters, got {MAX_PROMPT_CHARACTERS + 1}"
    ):
        read_request("x" * (MAX_PROMPT_CHARACTERS + 1), **DECODING)
