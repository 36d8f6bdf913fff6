"""The server's models: loading, mask decoder, concurrent requests, limits and log."""

from __future__ import annotations

import logging
import re
import shutil
import threading
import time
from pathlib import Path

import gradio as gr
import pytest
from fake_model import FakeModel, fake_inspection
from webapp_helpers import (
    BUNDLED_MASK_DECODER,
    DECODING,
    REQUEST,
    SEGMENTED,
    load_tiny,
    make_image,
    make_session,
    ready_served_model,
    run_api,
    run_page,
    shown_pieces,
    start_served_model,
    status_text,
    upload,
)

from paligemma.errors import CheckpointError
from paligemma.webapp import api, cli, handlers, messages, tasks, ui
from paligemma.webapp.limits import Limits
from paligemma.webapp.served_models import ServedModel
from paligemma.webapp.session import Session

# Loading


def test_the_badge_shows_progress_and_then_the_model():
    may_load = threading.Event()
    served_model = start_served_model(lambda progress: progress("loading", 1, 4) or (may_load.wait(10) and FakeModel()))
    session = Session((served_model,))
    while "25%" not in messages.format_message(served_model.status):
        time.sleep(0.01)
    status, chips, timer = handlers.show_model(session)
    assert timer.active and not chips["chips"] and messages.format_message(status) == "Loading scripted: 25%"
    may_load.set()
    assert served_model.join(10)
    status, chips, timer = handlers.show_model(session)
    assert chips["note"] == tasks.BUNDLED_NOTE
    assert status["kind"] == "done" and not timer.active
    assert messages.format_message(status) == "scripted · 0 K · float32 · cpu"
    assert chips["chips"]


def test_models_load_when_they_are_selected(image_file):
    second = ServedModel("second", lambda progress: FakeModel(("▁second",)))
    session = make_session(FakeModel(("▁first",)), second)
    assert shown_pieces(run_page(session, image_file)) == ["␣first", "<eos>"]
    assert second.describe()["state"] == "not loaded"
    assert second.describe()["message"] == "second loads on first use"
    handlers.choose_model(session, "second")
    assert shown_pieces(run_page(session, image_file)) == ["␣second", "<eos>"]
    with pytest.raises(gr.Error, match="one of scripted, second"):
        list(api.answer_over_api(session.served_models, upload(image_file), "a", **DECODING, model="third"))


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (CheckpointError("test.folder", "folder must contain config.json."), "folder must contain config.json."),
        (RuntimeError("secret"), "Internal error (RuntimeError). See the server log."),
        (ValueError("secret"), "Internal error (ValueError). See the server log."),
    ],
)
def test_a_failed_load_is_reported(error, message, image_file):
    def fail(progress):
        raise error

    served_model = start_served_model(fail, name="broken")
    assert served_model.join(10)
    text = messages.format_message(served_model.status)
    assert text.startswith("broken could not be loaded. ") and message in text and "secret" not in text
    assert status_text(run_page(Session((served_model,)), image_file)[-1]) == text
    assert served_model._error.__traceback__ is None  # which would hold the weights and the request
    assert served_model._error.values["reason"].__traceback__ is None


def test_a_request_waits_for_loading_until_its_time_limit(image_file):
    never = threading.Event()
    served_model = ServedModel("slow", lambda progress: never.wait(30), limits=Limits(seconds=0))
    served_model.start()
    session = Session((served_model,))
    assert "slow is still loading" in status_text(run_page(session, image_file)[-1])
    never.set()


# Mask decoder


def copy_with_mask_decoder(folder: Path, file: Path, tmp_path: Path) -> Path:
    """Copy of a checkpoint folder with a mask decoder."""
    copied = shutil.copytree(folder, tmp_path / "with-masks")
    shutil.copy(file, copied / file.name)
    return copied


def test_a_mask_decoder_in_the_checkpoint_folder_is_used(tiny_checkpoint, vae_oid_file, image_file, tmp_path):
    folder = copy_with_mask_decoder(tiny_checkpoint, vae_oid_file, tmp_path)
    (served_model,) = cli.build_served_models(
        cli.build_parser().parse_args(["--model", str(folder), "--device", "cpu"])
    )
    served_model.load_now()
    assert served_model.mask_decoder is not None
    served_model.model = FakeModel(SEGMENTED)
    last = run_page(Session((served_model,)), image_file)[-1].objects
    assert last["objects"][0]["mask"].startswith("data:image/png") and not last["masks_unavailable"]
    assert "mask" in run_api(served_model, image_file)[-1]["detections"][0]


def test_without_a_mask_decoder_boxes_are_drawn(image_file):
    def refuse() -> Path:
        raise OSError("offline")

    served_model = ServedModel("hub", lambda progress: FakeModel(SEGMENTED), [], refuse)
    served_model.load_now()
    last = run_page(Session((served_model,)), image_file)[-1].objects
    assert last["objects"][0]["mask"] is None and last["masks_unavailable"]
    assert len(last["objects"][0]["box"]) == 4


def test_the_first_available_mask_decoder_is_loaded(tmp_path):
    def refuse() -> Path:
        raise OSError("offline")

    local, downloaded, missing = (
        ServedModel("m", lambda progress: FakeModel(), files, download)
        for files, download in (
            ([tmp_path / "none.npz", BUNDLED_MASK_DECODER], refuse),
            ([tmp_path / "none.npz"], lambda: BUNDLED_MASK_DECODER),
            ([tmp_path / "none.npz"], refuse),
        )
    )
    for served_model in (local, downloaded, missing):
        served_model.load_now()
        assert served_model.state == "ready"
    assert local.mask_decoder and downloaded.mask_decoder and missing.mask_decoder is None


# Concurrent requests


def test_interleaved_requests_do_not_affect_each_other(tiny_checkpoint):
    served_model = load_tiny(tiny_checkpoint)
    requests = [
        {**REQUEST, "prompt": prompt, "temperature": 1.0, "seed": seed} for prompt, seed in (("a", 1), ("b", 2))
    ]
    alone = [[step.token_id for step in served_model.stream(make_image(), **request)] for request in requests]
    streams = [served_model.stream(make_image(), **request) for request in requests]
    together: list[list[int]] = [[], []]
    while any(streams):
        for index, stream in enumerate(streams):
            step = next(stream, None) if stream else None
            streams[index] = stream if step else None
            together[index] += [step.token_id] if step else []
    assert together == alone and alone[0] != alone[1]


def test_one_forward_pass_at_a_time_and_requests_alternate():
    running, concurrent, order = [], [], []

    class Watched(FakeModel):
        def _step(self, *arguments):
            running.append(None)
            time.sleep(0.01)
            concurrent.append(len(running))
            running.pop()
            return super()._step(*arguments)

    served_model = ready_served_model(Watched(("▁a",) * 10))

    def consume(name: str) -> None:
        for _ in served_model.stream(make_image(), **REQUEST):
            order.append(name)
            time.sleep(0.005)  # as Gradio takes between two steps

    threads = [threading.Thread(target=consume, args=(name,)) for name in ("first", "second", "third")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(concurrent) == {1} and len(order) == 33
    assert set(order[:20]) == {"first", "second", "third"}


# Limits and log


def test_requests_are_limited(image_file):
    model = FakeModel()
    served_model = ServedModel("scripted", lambda progress: model, limits=Limits(max_new_tokens=20, seconds=30))
    served_model.load_now()
    with pytest.raises(gr.Error, match="max_new_tokens must be <= 20 on this server, got 21"):
        run_api(served_model, image_file, max_new_tokens=21)
    last = run_page(Session((served_model,)), image_file, max_new_tokens=21)[-1]
    assert last.status["kind"] == "error" and last.token_strip == gr.skip()
    for requested, applied in ((None, 30), (5, 5), (10**9, 30)):
        run_api(served_model, image_file, time_limit=requested)
        assert model.requests[-1]["time_limit"] == applied
    sliders = [block for block in ui.build_app(served_model).blocks.values() if isinstance(block, gr.Slider)]
    assert sliders[0].maximum == 20 and sliders[0].value <= 20


def test_the_log_has_one_line_per_request_and_no_user_data(image_file, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    model = FakeModel(("▁private", "▁answer"))
    served_model = ready_served_model(model, "scripted")
    prompt = "detect secret\n2026 ERROR \x1b[31m hf_aaaaaaaaaaaaaaaaaaaa"
    run_page(Session((served_model,)), image_file, prompt)
    with pytest.raises(gr.Error):
        run_api(served_model, image_file, prompt, temperature="secret")

    def break_off(*_, **__):
        raise KeyError(prompt)
        yield

    monkeypatch.setattr(model, "stream", break_off)
    run_page(Session((served_model,)), image_file, prompt)
    served_model.inspect(fake_inspection, None, prompt, (3, 4), 1)
    lines = [record.getMessage() for record in caplog.records if record.name == "paligemma.app"]
    assert re.fullmatch(r"request: model=scripted tokens=3 first=0.01 total=\d\.\d\d outcome=eos", lines[0])
    assert re.fullmatch(r"request rejected: \w+Error", lines[1])
    assert re.fullmatch(r"request: model=scripted tokens=0 first=- total=\d\.\d\d outcome=KeyError", lines[2])
    assert re.match(r"request failed: KeyError at test_served_models\.py:\d+ ", lines[3])
    assert re.fullmatch(r"inspection: model=scripted total=\d\.\d\d outcome=done", lines[4]) and len(lines) == 5
    assert all("\n" not in line for line in lines)
    for private in ("secret", "answer", image_file.name, "hf_", "\x1b"):
        assert private not in caplog.text
