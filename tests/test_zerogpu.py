"""ZeroGPU: the model runs in a forked process with a leased GPU, with a fake `spaces` package."""

from __future__ import annotations

import pickle
import sys

import fake_spaces
import gradio as gr
import pytest
from fake_model import FakeModel, fake_inspection
from PIL import Image
from webapp_helpers import (
    DECODING,
    REQUEST,
    load_tiny,
    make_image,
    make_session,
    ready_served_model,
    run_api,
    run_page,
    status_text,
    upload,
)

from paligemma import lens
from paligemma.errors import InputError, NonFiniteLogitsError
from paligemma.webapp import api, cli, zerogpu
from paligemma.webapp.served_models import ServedModel


@pytest.fixture
def leased_model(monkeypatch, tiny_checkpoint) -> ServedModel:
    if sys.platform == "win32":
        pytest.skip("processes are not forked on Windows")
    monkeypatch.setattr(zerogpu, "spaces", fake_spaces)
    monkeypatch.setattr(fake_spaces, "leases", [])
    monkeypatch.setenv("SPACES_ZERO_GPU", "true")
    arguments = cli.build_parser().parse_args(["--model", str(tiny_checkpoint), "--device", "cpu"])
    served_models = cli.build_served_models(arguments)
    cli.start_loading(served_models)
    assert served_models[0].state == "ready"  # loaded at startup: a later load sees no GPU
    return served_models[0]


def test_the_answer_is_the_same_on_a_leased_gpu(leased_model, image_file, tiny_checkpoint):
    request = {"temperature": 1.0, "seed": 3, "max_new_tokens": 12, "top_n": 50}
    local, leased = (
        run_api(served_model, image_file, **request) for served_model in (load_tiny(tiny_checkpoint), leased_model)
    )
    assert [entry["text"] for entry in leased] == [entry["text"] for entry in local]
    assert [entry["step"] and entry["step"]["top"] for entry in leased] == [
        entry["step"] and entry["step"]["top"] for entry in local
    ]
    assert leased[-1]["finish_reason"] == local[-1]["finish_reason"] and "timing" in leased[-1]
    (lease,) = fake_spaces.leases
    assert max(lease.sizes) < 64_000 and lease.was_ended


def test_the_lease_is_as_long_as_the_request_needs(leased_model, image_file):
    for count in (4, 200):
        run_api(leased_model, image_file, max_new_tokens=count)
    short, long = fake_spaces.leases
    assert 20 < short.seconds < long.seconds <= 60
    request = zerogpu.limit_to_lease({"max_new_tokens": 200, "time_limit": 600})
    assert request["time_limit"] < long.seconds - 10  # generation ends before the lease


def test_closing_the_stream_ends_the_lease(leased_model, image_file):
    stream = api.answer_over_api(
        (leased_model,), upload(image_file), "caption en", **{**DECODING, "max_new_tokens": 60}
    )
    while next(stream)["step"] is None:
        pass
    stream.close()
    (lease,) = fake_spaces.leases
    assert lease.was_ended and len(lease.sizes) < 60


def test_errors_in_the_gpu_process_keep_their_message(leased_model, image_file):
    with pytest.raises(gr.Error, match="top_n must be"):
        run_api(leased_model, image_file, top_n=51)
    assert not fake_spaces.leases  # checked before the lease
    with pytest.raises(ValueError, match="index"):
        leased_model.inspect(lens.inspect, make_image(), "a", (1,), 9)
    assert leased_model.inspect(fake_inspection, make_image(), "a", (1, 2), 1).grid == (4, 4)


def test_an_exceeded_quota_is_reported_without_html(image_file, monkeypatch):
    def refuse(*_, **__):
        raise gr.Error("You have exceeded your GPU quota (60s requested vs. 10s left). <a href='x'>Sign in</a>")

    model = FakeModel()
    monkeypatch.setattr(model, "stream", refuse)
    text = status_text(run_page(make_session(model), image_file)[-1])
    assert text == "You have exceeded your GPU quota (60s requested vs. 10s left). Sign in"


def test_messages_of_the_gpu_process_are_small():
    stream = ready_served_model(FakeModel()).stream(make_image(), **REQUEST)
    values = [*zerogpu.send_stream(stream), REQUEST, make_image(), MemoryError()]
    values += [NonFiniteLogitsError("test.logits", "{value}", value=1), InputError("test.value", "{value}", value=1)]
    for value in values:
        assert len(pickle.dumps(value)) < 64_000
        assert str(pickle.loads(pickle.dumps(value))) == str(value) or isinstance(value, Image.Image)


def test_the_server_is_not_on_zerogpu_by_default():
    assert not zerogpu.is_zerogpu()
