"""The page's handlers with a scripted model, its wiring, and the HTTP API of a really launched app."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import gradio as gr
import pytest
from fake_model import FakeModel
from gradio_client import Client, handle_file
from gradio_client.exceptions import AppError

import app
import paligemma
from paligemma.view import words

ROOT = Path(__file__).parents[1]
DECODING = {"max_new_tokens": 16, "temperature": 0, "top_k": 0, "top_p": 1, "seed": None, "top_n": 3}


def make_host(load: Callable | None, name: str = "scripted") -> app.ModelHost:
    host = app.ModelHost(name, load)
    host.start()
    return host


def ready_host(model: FakeModel) -> app.ModelHost:
    host = make_host(lambda progress: model)
    assert host._finished.wait(10)
    return host


def run_page(host: app.ModelHost, picture: Path | None, prompt: str = "caption en", **changes) -> list[app.PageUpdate]:
    upload = {"path": str(picture)} if picture else None
    return list(app.answer_on_page(host, app.RunControl(), upload, prompt, *{**DECODING, **changes}.values()))


def run_api(host: app.ModelHost, picture: Path | None, prompt: str = "caption en", **changes) -> list[dict]:
    upload = {"path": str(picture)} if picture else None
    return list(app.answer_over_api(host, upload, prompt, **{**DECODING, **changes}))


# Handlers


def test_the_page_shows_the_answer_its_tokens_and_the_newest_candidates(picture_file, monkeypatch):
    monkeypatch.setattr(app, "UPDATE_INTERVAL_S", 0)
    updates = run_page(ready_host(FakeModel(("▁a", "▁cat"))), picture_file)
    shown = [update for update in updates if isinstance(update.answer, str) and update.answer]
    assert [update.answer for update in shown] == [" a", " a cat", " a cat", " a cat"]
    assert [len(update.tokens["rows"]) for update in shown] == [1, 2, 3, 3]
    assert [update.candidates["title"] for update in shown[:3]] == ["Token 1: ␣a", "Token 2: ␣cat", "Token 3: <eos>"]
    assert updates[-1].notice["kind"] == "done"
    assert [step.piece for step in updates[-1].steps] == ["▁a", "▁cat", "<eos>"]


def test_the_page_is_updated_at_most_twenty_times_a_second(picture_file):
    updates = run_page(ready_host(FakeModel(("▁a",) * 200, seconds_a_token=0.001)), picture_file)
    assert len(updates) < 100
    assert len(updates[-1].tokens["rows"]) == 201


def both_handlers(host: app.ModelHost, upload: dict | None) -> tuple[Iterator, Iterator]:
    return (
        app.answer_on_page(host, app.RunControl(), upload, "caption en", *DECODING.values()),
        app.answer_over_api(host, upload, "caption en", **DECODING),
    )


def test_the_first_event_comes_before_any_work():
    host = SimpleNamespace()  # has nothing that work could be done with
    for events in both_handlers(host, None):
        assert next(events) is not None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"picture": None}, "Choose a picture"),
        ({"picture": Path(__file__)}, "none of the pictures"),
        ({"temperature": "hot"}, "temperature must be a number"),
        ({"prompt": "x" * 3000}, "3000 characters"),
    ],
)
def test_a_bad_request_becomes_a_line_of_the_page_and_an_error_of_the_api(picture_file, change, message):
    request = {"picture": picture_file, **change}
    host = ready_host(FakeModel())
    last = run_page(host, **request)[-1]
    assert last.notice["kind"] == "error" and message in last.notice["text"]
    assert last.answer == gr.skip()  # what stands there stays
    with pytest.raises(gr.Error, match=message):
        run_api(host, **request)
    assert not host.model.requests


def test_what_was_written_stays_when_the_model_fails_half_way(picture_file, monkeypatch):
    model = FakeModel(("▁a", "▁cat"))
    written = model.stream
    monkeypatch.setattr(model, "stream", lambda *args, **kwargs: break_after(1, written(*args, **kwargs)))
    updates = run_page(ready_host(model), picture_file)
    assert updates[-1].notice == words.notice("error", words.explain(RuntimeError()))
    assert updates[-1].answer == gr.skip()
    assert updates[-2].answer == " a"


def break_after(count: int, stream: Iterator) -> Iterator:
    yield from (next(stream) for _ in range(count))
    raise RuntimeError("secret")


@pytest.mark.parametrize("which", [0, 1])
def test_closing_a_handler_closes_the_model_s_stream(which, picture_file):
    model = FakeModel(("▁a",) * 50, seconds_a_token=0.06)
    events = both_handlers(ready_host(model), {"path": str(picture_file)})[which]
    for _ in range(5):  # beyond what either handler yields before the model runs
        next(events)
    events.close()
    assert 0 < model.closed_after < 10


def test_the_model_gets_what_the_controls_say(picture_file):
    model = FakeModel()
    run_page(ready_host(model), picture_file, "detect cat", temperature=0.5, top_k=4, top_p=0.9, seed=3, top_n=2)
    (request,) = model.requests
    assert request.pop("image").size == (64, 48)
    assert request == {
        "prompt": "detect cat", "max_new_tokens": 16, "temperature": 0.5, "top_k": 4, "top_p": 0.9, "seed": 3,
        "top_n": 2, "forced_ids": (), "time_limit": 600.0,
    }  # fmt: skip


def test_the_api_sends_an_event_a_token_and_closes_with_objects_and_times(picture_file):
    events = run_api(ready_host(FakeModel(("▁a", "▁cat"))), picture_file)
    assert events[0]["step"] is None
    assert [event["step"]["index"] for event in events[1:]] == [0, 1, 2]
    assert [event["finish_reason"] for event in events] == [None, None, None, "eos"]
    assert [set(event) for event in events[:3]] == [{"text", "step", "finish_reason"}] * 3
    assert set(events[3]) - set(events[2]) == {"detections", "timing"}


def test_choosing_a_row_shows_its_candidates(picture_file):
    steps = run_page(ready_host(FakeModel(("▁a", "▁cat"))), picture_file)[-1].steps
    assert app.show_candidates(steps, gr.EventData(None, {"index": 1}))["title"] == "Token 2: ␣cat"
    for unknown in (-1, 3, "1", None):
        assert app.show_candidates(steps, gr.EventData(None, {"index": unknown})) == gr.skip()


def test_stop_ends_a_run_behind_the_token_that_it_is_at(picture_file, monkeypatch):
    monkeypatch.setattr(app, "UPDATE_INTERVAL_S", 0)
    model, control = FakeModel(("▁a",) * 50), app.RunControl()
    updates = []
    for update in app.answer_on_page(
        ready_host(model), control, {"path": str(picture_file)}, "caption en", *DECODING.values()
    ):
        updates.append(update)
        if isinstance(update.steps, list) and len(update.steps) == 3:
            assert app.ask_to_stop(control)["text"] == "Stopping after this token"
    assert model.closed_after == 4
    assert updates[-1].notice["text"] == "Stopped after 4 tokens"
    assert len(updates[-1].tokens["rows"]) == 4
    assert app.ask_to_stop(control) == app.ask_to_stop(None) == gr.skip()  # nothing runs


def test_a_run_that_was_stopped_before_its_turn_does_nothing(picture_file):
    model, control = FakeModel(), app.RunControl()
    control.stop_asked = True
    updates = list(
        app.answer_on_page(ready_host(model), control, {"path": str(picture_file)}, "caption en", *DECODING.values())
    )
    assert updates[-1].notice["text"] == "Stopped" and not model.requests


def test_run_ends_the_run_before_it():
    first, _ = app.begin_run(None)
    second, notice = app.begin_run(first)
    assert first.stop_asked and not second.stop_asked and notice["kind"] == "busy"


# The model's state


def test_requests_wait_while_the_model_loads(picture_file, monkeypatch):
    monkeypatch.setattr(app, "WAIT_INTERVAL_S", 0.02)
    may_load = threading.Event()
    host = make_host(lambda progress: may_load.wait(10) and FakeModel())
    events = app.answer_over_api(host, {"path": str(picture_file)}, "caption en", **DECODING)
    assert [next(events)["step"] for _ in range(4)] == [None] * 4
    assert host.loading and host.describe()[0]["state"] == "loading"
    may_load.set()
    assert [event["step"]["piece"] for event in events if event["step"]] == ["▁a", "▁cat", "<eos>"]
    assert host.describe()[0]["state"] == "ready"


def test_the_badge_follows_the_loading_and_then_rests():
    may_load = threading.Event()
    host = make_host(lambda progress: progress(1, 4) or (may_load.wait(10) and FakeModel()))
    while "25%" not in host.notice["text"]:
        time.sleep(0.01)
    assert app.show_model(host)[1].active
    may_load.set()
    assert host._finished.wait(10)
    notice, timer = app.show_model(host)
    assert notice == words.notice("done", "scripted · 0 K · float32 · cpu") and not timer.active


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("give the folder that holds config.json"), "give the folder"),
        (RuntimeError("secret"), "RuntimeError"),
    ],
)
def test_a_model_that_does_not_load_is_said_so(error, message, picture_file):
    def fail(progress):
        raise error

    host = make_host(fail, name="broken")
    assert host._finished.wait(10)
    assert "broken could not be loaded" in host.notice["text"] and message in host.notice["text"]
    assert "secret" not in host.notice["text"]
    assert run_page(host, picture_file)[-1].notice == host.notice


def test_without_a_model_the_page_says_how_to_name_one(picture_file, monkeypatch, tmp_path):
    monkeypatch.setattr(app, "ASSETS", tmp_path)
    arguments = Namespace(model=None, revision=None, device="auto", dtype="auto")
    host = app.make_host(arguments)
    host.start()
    assert run_page(host, picture_file)[-1].notice == words.notice("error", words.NO_MODEL)
    with pytest.raises(gr.Error, match="--model"):
        run_api(host, picture_file)


def test_the_model_s_name_comes_from_the_command_line_or_the_environment(monkeypatch):
    monkeypatch.setenv("MODEL_ID", "someone/from-environment")
    assert app.build_parser().parse_args([]).model == "someone/from-environment"
    assert app.build_parser().parse_args(["--model", "someone/named"]).model == "someone/named"
    assert app.make_host(app.build_parser().parse_args([])).name == "someone/from-environment"
    monkeypatch.setenv("MODEL_ID", "")
    assert app.build_parser().parse_args([]).model is None


def test_a_folder_is_shown_by_its_own_name_only(tiny_checkpoint):
    assert app.make_host(app.build_parser().parse_args(["--model", str(tiny_checkpoint)])).name == "tiny-random"


# Wiring


@pytest.fixture(scope="module")
def config() -> dict:
    return app.build_app(ready_host(FakeModel())).get_config_file()


def test_only_the_api_s_endpoints_are_public(config):
    public = {event["api_name"] for event in config["dependencies"] if event["api_visibility"] == "public"}
    assert public == {"generate", "models"}


def test_no_template_holds_data(config):
    parts = [component["props"] for component in config["components"] if component["type"] == "html"]
    assert len(parts) >= 4
    for props in parts:
        if "PaliGemma, token by token" not in str(props["value"]):
            assert not re.search(r"[{$`\\]", props["html_template"])


def test_every_event_that_runs_the_model_shares_one_queue():
    blocks = app.build_app(ready_host(FakeModel()))
    running = [
        event for event in blocks.fns.values() if isinstance(event.fn, partial) and "answer" in event.fn.func.__name__
    ]
    assert len(running) == 2
    assert {(event.concurrency_id, event.concurrency_limit) for event in running} == {("model", 1)}


# Launched


@pytest.fixture(scope="module")
def client(tiny_checkpoint) -> Iterator[Client]:
    arguments = app.build_parser().parse_args(["--model", str(tiny_checkpoint), "--device", "cpu"])
    host = app.make_host(arguments)
    host.start()
    blocks = app.build_app(host)
    app.launch(blocks, prevent_thread_lock=True, quiet=True)
    yield Client(blocks.local_url, verbose=False)
    blocks.close()


def ask(client: Client, picture: Path, **changes) -> list[dict]:
    request = {"image": handle_file(picture), "prompt": "detect cat", "max_new_tokens": 6, "top_n": 4}
    job = client.submit(**{**request, **changes}, api_name="/generate")
    return list(job)


def test_a_stream_through_the_client_is_an_event_a_token_in_order(client, picture_file, tiny_checkpoint):
    events = [event for event in ask(client, picture_file) if event["step"]]
    assert [event["step"]["index"] for event in events] == list(range(len(events)))
    assert all(event["step"]["top"][0]["token_id"] == event["step"]["token_id"] for event in events)
    assert all(len(event["step"]["top"]) == 4 for event in events)
    assert "".join(event["step"]["text_delta"] for event in events) == events[-1]["text"]
    result = paligemma.load(tiny_checkpoint).generate(
        app.open_picture(picture_file), "detect cat", max_new_tokens=6, top_n=4
    )
    assert [event["step"]["token_id"] for event in events] == list(result.token_ids)
    assert [event["step"]["logit"] for event in events] == [step.logit for step in result.steps]
    assert events[-1]["finish_reason"] == result.finish_reason
    assert set(events[-1]["timing"]) == {"image_s", "first_token_s", "total_s", "tokens_per_s"}


def test_forced_ids_begin_the_answer(client, picture_file):
    free = [event["step"]["token_id"] for event in ask(client, picture_file) if event["step"]]
    other = ask(client, picture_file, forced_ids=[*free[:2], free[0]])
    assert [event["step"]["token_id"] for event in other if event["step"]][:3] == [*free[:2], free[0]]


def test_the_same_seed_gives_the_same_answer_over_the_api(client, picture_file):
    first, second = (ask(client, picture_file, temperature=1.0, seed=5)[-1]["text"] for _ in range(2))
    assert first == second


@pytest.mark.parametrize(
    ("change", "message"),
    [({"top_n": 51}, "top_n is 51"), ({"temperature": -1}, "temperature is -1"), ({"image": None}, "Choose a picture")],
)
def test_a_client_is_told_what_is_allowed(client, picture_file, change, message):
    with pytest.raises(AppError, match=message):
        client.predict(
            **{"image": handle_file(picture_file), "prompt": "a", **change},
            api_name="/generate",
        )


def test_the_server_opens_no_file_that_was_not_uploaded(client):
    with pytest.raises(AppError) as refusal:
        client.predict(
            image={"path": "/etc/passwd", "meta": {"_type": "gradio.FileData"}}, prompt="a", api_name="/generate"
        )
    assert "passwd" not in str(refusal.value)


def test_the_models_are_listed(client):
    (model,) = client.predict(api_name="/models")
    assert (model["name"], model["state"], model["dtype"]) == ("tiny-random", "ready", "float32")


@pytest.mark.skipif(sys.platform == "win32", reason="SIGTERM cannot be caught on Windows")
def test_the_command_serves_the_page_and_ends_on_sigterm(tiny_checkpoint):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "app.py", "--model", str(tiny_checkpoint), "--port", str(port)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    server = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        page = fetch(f"http://127.0.0.1:{port}/", server)
        assert "PaliGemma, token by token" in page
    finally:
        server.send_signal(signal.SIGTERM)
        errors = server.communicate(timeout=30)[1].decode()
    assert server.returncode == 0 and "Traceback" not in errors


def fetch(url: str, server: subprocess.Popen) -> str:
    """The page, as soon as the server answers; 90 seconds are for machines that have other things to do."""
    for _ in range(180):
        assert server.poll() is None, server.stderr.read().decode()
        try:
            return urllib.request.urlopen(url, timeout=10).read().decode()
        except OSError:
            time.sleep(0.5)
    raise AssertionError(f"nothing answers at {url}")
