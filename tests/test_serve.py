"""The app left running for others: many at once, those who leave, faults, a GPU that is lent, the process itself."""

from __future__ import annotations

import json
import logging
import os
import pickle
import re
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace

import fake_spaces
import gradio as gr
import pytest
import torch
from fake_model import FakeModel, fake_inspection
from gradio_client import Client, handle_file
from PIL import Image
from test_app import (
    DECODING,
    answer,
    decoded,
    event,
    make_visit,
    ready_host,
    run_api,
    run_page,
    shown_pieces,
    submit_run,
    upload,
)

import paligemma
from paligemma import lens
from paligemma.generation import NonFiniteLogitsError
from paligemma.webapp import api, cli, execution, handlers, messages, runs, server, serving, ui, zerogpu
from paligemma.webapp.served_models import ServedModel
from paligemma.webapp.serving import Limits
from paligemma.webapp.session import Session

ROOT = Path(__file__).parents[1]
REQUEST = {
    "prompt": "caption en", "max_new_tokens": 16, "temperature": 0.0, "top_k": 0, "top_p": 1.0, "seed": None,
    "top_n": 3, "forced_ids": (), "time_limit": None,
}  # fmt: skip
FAULTS = (
    (MemoryError(), "not enough memory"),
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "not enough memory"),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"), "not enough memory"),
    (RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes"), "not enough memory"),
    (NonFiniteLogitsError("test", "the model's logits are not finite"), "not finite"),
    (KeyError("secret"), "KeyError"),
)


@pytest.fixture(autouse=True)
def every_update(monkeypatch) -> None:
    monkeypatch.setattr(execution, "UPDATE_INTERVAL_S", 0)


def tiny_host(folder: Path, **settings) -> ServedModel:
    served_model = ServedModel("tiny", lambda progress: paligemma.load(folder, device="cpu"), **settings)
    served_model.load_now()
    return served_model


def until(holds: Callable[[], bool]) -> None:
    """Wait for what is bound to happen; 60 seconds are for machines that have other things to do."""
    for _ in range(600):
        if holds():
            return
        time.sleep(0.1)
    raise AssertionError("it did not happen")


def image() -> Image.Image:
    return Image.linear_gradient("L").resize((64, 48)).convert("RGB")


# One model for all


def test_answers_written_in_turns_are_what_each_is_alone(tiny_checkpoint):
    served_model = tiny_host(tiny_checkpoint)
    submitted = [
        {**REQUEST, "prompt": prompt, "temperature": 1.0, "seed": seed} for prompt, seed in (("a", 1), ("b", 2))
    ]
    alone = [[step.token_id for step in served_model.stream(image(), **request)] for request in submitted]
    streams = [served_model.stream(image(), **request) for request in submitted]
    together: list[list[int]] = [[], []]
    while any(streams):
        for place, stream in enumerate(streams):
            step = next(stream, None) if stream else None
            streams[place] = stream if step else None
            together[place] += [step.token_id] if step else []
    assert together == alone and alone[0] != alone[1]


def test_one_pass_runs_at_a_time_and_nobody_waits_for_a_whole_answer():
    running, most, order = [], [], []

    class Watched(FakeModel):
        def _step(self, *arguments):
            running.append(None)
            time.sleep(0.01)
            most.append(len(running))
            running.pop()
            return super()._step(*arguments)

    served_model = ready_host(Watched(("▁a",) * 10))

    def follow(name: str) -> None:
        for _ in served_model.stream(image(), **REQUEST):
            order.append(name)
            time.sleep(0.005)  # the queue does as much between two steps

    threads = [threading.Thread(target=follow, args=(name,)) for name in ("first", "second", "third")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(most) == {1} and len(order) == 33
    assert set(order[:20]) == {"first", "second", "third"}


def test_a_visitor_finds_nothing_of_another(picture_file):
    served_model = ready_host(FakeModel())
    one, other = Session((served_model,)), Session((served_model,))
    run_page(one, picture_file, temperature=1.0, seed=5)
    run_page(other, picture_file, "detect dog", temperature=1.0, seed=6)
    assert [run.request["seed"] for run in one.history] == [5]
    assert [run.request["prompt"] for run in other.history] == ["detect dog"]
    assert messages.RUN_EXPIRED in handlers.show_run(one, event(run=2)) and one.history.current.number == 1
    assert (
        handlers.submit_branch(Session((served_model,)), event(run=1, index=0, token_id=1))["text"]
        == messages.RUN_EXPIRED
    )


# Limits


def test_a_request_gets_no_more_than_the_server_allows(picture_file):
    model = FakeModel()
    served_model = ServedModel("scripted", lambda progress: model, limits=Limits(max_new_tokens=20, seconds=30))
    served_model.load_now()
    with pytest.raises(gr.Error, match="max_new_tokens is 21; this server allows at most 20"):
        run_api(served_model, picture_file, max_new_tokens=21)
    last = run_page(Session((served_model,)), picture_file, max_new_tokens=21)[-1]
    assert last.status["kind"] == "error" and last.token_strip == gr.skip()
    for submitted, given in ((None, 30), (5, 5), (10**9, 30)):
        run_api(served_model, picture_file, time_limit=submitted)
        assert model.requests[-1]["time_limit"] == given
    sliders = [block for block in ui.build_app(served_model).blocks.values() if isinstance(block, gr.Slider)]
    assert sliders[0].maximum == 20 and sliders[0].value <= 20


def test_limits_and_the_sign_in_come_from_the_environment():
    assert Limits.from_environment({}) == Limits(512, 600, 16)
    environment = {"MAX_NEW_TOKENS": "64", "MAX_SECONDS": " 30", "MAX_WAITING": "4"}
    assert Limits.from_environment(environment) == Limits(64, 30, 4)
    for value in ("0", "-1", "many", "1.5"):
        with pytest.raises(ValueError, match=f"MAX_SECONDS is '{value}'; allowed is a whole number of at least 1"):
            Limits.from_environment({"MAX_SECONDS": value})
    assert cli.read_sign_in({}) is None
    assert cli.read_sign_in({"SIGN_IN": "ann:one:two bob:x"}) == [("ann", "one:two"), ("bob", "x")]
    for value in ("secret", ":secret", "ann:", "ann:x secret"):
        with pytest.raises(ValueError, match="NAME:PASSWORD") as error:
            cli.read_sign_in({"SIGN_IN": value})
        assert "secret" not in str(error.value)


def test_what_a_visitor_makes_the_server_keep_is_bounded(picture_file, monkeypatch):
    monkeypatch.setattr(runs, "MAX_CANDIDATES", 30)  # a run has nine
    session = make_visit()
    for _ in range(6):
        run_page(session, picture_file)
    assert [run.number for run in session.history] == [3, 4, 5, 6]


# Faults


@pytest.mark.parametrize(("fault", "words_of_it"), FAULTS)
def test_after_a_fault_the_text_stays_and_the_next_request_works(fault, words_of_it, picture_file, monkeypatch):
    model = FakeModel(("▁a", "▁cat"))
    whole = model.stream

    def break_off(*arguments, **options):
        with closing(whole(*arguments, **options)) as stream:
            yield next(stream)
            raise fault

    session = make_visit(model)
    monkeypatch.setattr(model, "stream", break_off)
    updates = run_page(session, picture_file)
    assert updates[-1].status["kind"] == "error" and words_of_it in updates[-1].status["text"]
    assert "secret" not in updates[-1].status["text"]
    assert shown_pieces(updates) == ["␣a"] and session.history.current.text == " a"
    with pytest.raises(gr.Error, match=words_of_it):
        run_api(session.served_model, picture_file)
    monkeypatch.setattr(model, "stream", whole)
    assert shown_pieces(run_page(session, picture_file)) == ["␣a", "␣cat", "<eos>"]


def test_the_log_has_a_line_a_request_and_nothing_that_a_visitor_sent(picture_file, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    model = FakeModel(("▁private", "▁answer"))
    served_model = ready_host(model, "scripted")
    prompt = "detect secret\n2026 ERROR \x1b[31m hf_aaaaaaaaaaaaaaaaaaaa"
    run_page(Session((served_model,)), picture_file, prompt)
    with pytest.raises(gr.Error):
        run_api(served_model, picture_file, prompt, temperature="secret")

    def break_off(*_, **__):
        raise KeyError(prompt)
        yield

    monkeypatch.setattr(model, "stream", break_off)
    run_page(Session((served_model,)), picture_file, prompt)
    lines = [record.getMessage() for record in caplog.records if record.name == "paligemma.app"]
    assert re.fullmatch(r"request: model=scripted tokens=3 first=0.01 total=\d\.\d\d outcome=eos", lines[0])
    assert lines[1] == "request refused: ValueError"
    assert re.fullmatch(r"request: model=scripted tokens=0 first=- total=\d\.\d\d outcome=KeyError", lines[2])
    assert re.match(r"request failed: KeyError at test_serve\.py:\d+ ", lines[3]) and len(lines) == 4
    assert all("\n" not in line for line in lines)
    for private in ("secret", "answer", picture_file.name, "hf_", "\x1b"):
        assert private not in caplog.text


# A GPU that is lent for one request


@pytest.fixture
def lent(monkeypatch, tiny_checkpoint) -> ServedModel:
    if sys.platform == "win32":
        pytest.skip("processes are not forked on Windows")
    monkeypatch.setattr(zerogpu, "spaces", fake_spaces)
    monkeypatch.setattr(fake_spaces, "loans", [])
    monkeypatch.setenv("SPACES_ZERO_GPU", "true")
    arguments = cli.build_parser().parse_args(["--model", str(tiny_checkpoint), "--device", "cpu"])
    served_models = cli.build_served_models(arguments)
    cli.start_loading(served_models)
    assert served_models[0].state == "ready"  # before the page is there: a model that is loaded later sees no GPU
    return served_models[0]


def test_a_lent_gpu_gives_the_same_answer(lent, picture_file, tiny_checkpoint):
    submitted = {"temperature": 1.0, "seed": 3, "max_new_tokens": 12, "top_n": 50}
    own, borrowed = (
        run_api(served_model, picture_file, **submitted) for served_model in (tiny_host(tiny_checkpoint), lent)
    )
    assert [entry["text"] for entry in borrowed] == [entry["text"] for entry in own]
    assert [entry["step"] and entry["step"]["top"] for entry in borrowed] == [
        entry["step"] and entry["step"]["top"] for entry in own
    ]
    assert borrowed[-1]["finish_reason"] == own[-1]["finish_reason"] and "timing" in borrowed[-1]
    (loan,) = fake_spaces.loans
    assert max(loan.sizes) < 64_000 and loan.was_ended


def test_a_gpu_is_lent_for_as_long_as_the_request_needs(lent, picture_file):
    for count in (4, 200):
        run_api(lent, picture_file, max_new_tokens=count)
    short, long = fake_spaces.loans
    assert 20 < short.seconds < long.seconds <= 60
    request = serving.within_lease({"max_new_tokens": 200, "time_limit": 600})
    assert request["time_limit"] < long.seconds - 10  # it ends, with what it has, before the GPU is taken away


def test_leaving_gives_a_lent_gpu_back(lent, picture_file):
    stream = api.answer_over_api((lent,), upload(picture_file), "caption en", **{**DECODING, "max_new_tokens": 60})
    while next(stream)["step"] is None:
        pass
    stream.close()
    (loan,) = fake_spaces.loans
    assert loan.was_ended and len(loan.sizes) < 60


def test_errors_keep_their_words_over_a_lent_gpu(lent, picture_file):
    with pytest.raises(gr.Error, match="top_n is 51"):
        run_api(lent, picture_file, top_n=51)
    assert not fake_spaces.loans  # refused before a GPU was asked for
    with pytest.raises(ValueError, match="index is 9; allowed is"):
        lent.inspect(lens.inspect, image(), "a", (1,), 9)
    assert lent.inspect(fake_inspection, image(), "a", (1, 2), 1).grid == (4, 4)


def test_what_zero_gpu_says_of_a_quota_reaches_the_visitor(picture_file, monkeypatch):
    def refuse(*_, **__):
        raise gr.Error("You have exceeded your GPU quota (60s requested vs. 10s left). <a href='x'>Sign in</a>")

    model = FakeModel()
    monkeypatch.setattr(model, "stream", refuse)
    said = run_page(make_visit(model), picture_file)[-1].status["text"]
    assert said == "You have exceeded your GPU quota (60s requested vs. 10s left). Sign in"


def test_everything_that_may_cross_to_a_lent_gpu_can_be_pickled(picture_file):
    result = next(iter(ready_host(FakeModel()).stream(image(), **REQUEST)))
    for value in (result, REQUEST, image(), NonFiniteLogitsError("test", "x"), MemoryError()):
        assert len(pickle.dumps(value)) < 64_000
    assert zerogpu.with_gpu_lease is not None and not zerogpu.is_zerogpu()


# Served


class GatedModel(FakeModel):
    """Rests behind its first token until the gate is opened."""

    def __init__(self, pieces: tuple[str, ...] = ("▁a", "▁cat")) -> None:
        super().__init__(pieces)
        self.gate = threading.Event()

    def stream(self, image: Image.Image, prompt: str, **options) -> Iterator[paligemma.Step]:
        stream = super().stream(image, prompt, **options)
        yield next(stream)
        self.gate.wait(60)
        return (yield from stream)


@contextmanager
def served(*served_models: ServedModel, **settings) -> Iterator[gr.Blocks]:
    blocks = ui.build_app(*served_models)
    server.launch(
        blocks, prevent_thread_lock=True, quiet=True, app_kwargs=server.server_settings(served_models), **settings
    )
    try:
        yield blocks
    finally:
        blocks.server.force_exit = True
        blocks.close(verbose=False)


def client_of(blocks: gr.Blocks, **settings) -> Client:
    return Client(blocks.local_url, verbose=False, **settings)


def submit(client: Client, image: Path, prompt: str = "caption en", **options):
    return client.submit(image=handle_file(image), prompt=prompt, api_name="/generate", **options)


def texts(job) -> list[str]:
    return [entry["text"] for entry in job if entry["step"]]


def test_eight_clients_at_once_each_get_what_they_get_alone(tiny_checkpoint, picture_file):
    submitted = [{"prompt": f"detect {name}", "temperature": 1.0, "seed": seed} for seed, name in enumerate("abcdefgh")]
    with served(tiny_host(tiny_checkpoint)) as blocks:
        clients = [client_of(blocks) for _ in submitted]
        alone = [texts(submit(clients[0], picture_file, max_new_tokens=8, **request)) for request in submitted]
        jobs = [
            submit(client, picture_file, max_new_tokens=8, **request)
            for client, request in zip(clients, submitted, strict=True)
        ]
        assert [texts(job) for job in jobs] == alone
    assert len(set(map(tuple, alone))) > 1


def test_with_the_line_full_the_next_is_refused_in_words_and_nobody_else_suffers(picture_file):
    model = GatedModel()
    served_model = ServedModel("gated", lambda progress: model, limits=Limits(waiting=2))
    served_model.load_now()
    with served(served_model) as blocks:
        client = client_of(blocks)
        first = submit(client, picture_file)
        until(lambda: first.outputs() and first.outputs()[-1]["step"])
        waiting = [submit(client, picture_file) for _ in range(2)]
        until(lambda: len(blocks._queue) == 2)
        refused = submit(client_of(blocks), picture_file)
        with pytest.raises(Exception, match="Queue is full! Please try again"):
            refused.result(timeout=60)
        model.gate.set()
        assert all(texts(job) == [" a", " a cat", " a cat"] for job in (first, *waiting))


def test_twenty_cancels_during_the_first_step_and_then_a_clean_run(picture_file):
    model = FakeModel(("▁a", "▁cat"), 0.15)
    with served(ready_host(model)) as blocks:
        client = client_of(blocks)
        for count in range(1, 21):
            job = submit(client, picture_file)
            until(lambda count=count: len(model.requests) == count)
            job.cancel()
        model.seconds_a_token = 0.0
        assert texts(submit(client, picture_file)) == [" a", " a cat", " a cat"]
        assert len(model.requests) == 21


def test_a_client_that_vanishes_frees_the_model(picture_file):
    model = FakeModel(("▁a",) * 500, 0.05)
    with served(ready_host(model)) as blocks:
        client = client_of(blocks)
        path = client_upload(blocks, picture_file)
        url = f"{blocks.local_url}gradio_api/call/generate"
        data = {"data": [{"path": path, "meta": {"_type": "gradio.FileData"}}, "a", 512, 0, 0, 1, None, 1] + [None] * 3}
        sent = urllib.request.Request(url, json.dumps(data).encode(), {"Content-Type": "application/json"})
        number = json.load(urllib.request.urlopen(sent))["event_id"]
        with urllib.request.urlopen(f"{url}/{number}") as stream:
            assert any(b'"token_id"' in line for line in stream)  # and then it is dropped
        until(lambda: model.closed_after is not None)
        assert model.closed_after < 500
        model.pieces, model.seconds_a_token = ("▁b", "<eos>"), 0.0
        assert texts(submit(client, picture_file)) == [" b", " b"]


def client_upload(blocks: gr.Blocks, image: Path) -> str:
    """Where the server stored the picture."""
    body = (
        b'--x\r\nContent-Disposition: form-data; name="files"; filename="a.png"\r\n\r\n'
        + image.read_bytes()
        + b"\r\n--x--\r\n"
    )
    headers = {"Content-Type": "multipart/form-data; boundary=x"}
    with urllib.request.urlopen(urllib.request.Request(f"{blocks.local_url}gradio_api/upload", body, headers)) as sent:
        return json.load(sent)[0]


def test_a_visit_is_given_up_after_it_ended(picture_file):
    with served(ready_host(FakeModel())) as blocks:
        asking = next(fn for fn in blocks.fns.values() if getattr(fn.fn, "__name__", "") == "ask")
        data = [None, None, "caption en", *DECODING.values()]
        body = {"data": data, "fn_index": asking._id, "session_hash": "somebody"}
        headers = {"Content-Type": "application/json"}
        url = f"{blocks.local_url}gradio_api/run/predict"
        urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)).close()
        session = blocks.state_holder.session_data["somebody"]
        (session,) = [value for value in session.state_data.values() if isinstance(value, Session)]
        assert not session.run_state.finished and not session.run_state.stop_requested
        session.is_closed, session.STATE_TTL_WHEN_CLOSED = True, 0  # as if an hour had passed since
        until(lambda: not session.state_data)
        assert session.run_state.stop_requested


def read_health(blocks: gr.Blocks) -> tuple[int, dict]:
    try:
        with urllib.request.urlopen(f"{blocks.local_url}healthz") as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as reply:
        return reply.code, json.load(reply)


def test_healthz_says_whether_the_model_is_ready_also_behind_a_sign_in(tiny_checkpoint):
    may_load = threading.Event()
    served_model = ServedModel("tiny", lambda progress: may_load.wait(30) and FakeModel())
    broken = ServedModel("broken", lambda progress: (_ for _ in ()).throw(OSError(f"no {tiny_checkpoint}")))
    later = ServedModel("later", lambda progress: FakeModel())
    broken.load_now()
    served_model.start()
    with served(served_model, broken, later, auth=[("ann", "secret")]) as blocks:
        states = [
            {"name": "tiny", "state": "loading", "answered_by": None},
            {"name": "broken", "state": "error", "answered_by": None},
            {"name": "later", "state": "not loaded", "answered_by": None},
        ]
        assert read_health(blocks) == (503, {"state": "loading", "models": states})
        may_load.set()
        until(lambda: served_model.state == "ready")
        status, said = read_health(blocks)
        assert (status, said["state"]) == (200, "ready") and "/" not in json.dumps(said)


def test_whoever_has_to_sign_in_gets_nothing_before(picture_file):
    with served(ready_host(FakeModel()), auth=[("ann", "secret")]) as blocks:
        with pytest.raises(urllib.error.HTTPError, match="401"):
            client_upload(blocks, picture_file)
        for auth in (None, ("ann", "wrong")):
            with pytest.raises(Exception):  # noqa: B017 - the client says it in several ways
                client_of(blocks, auth=auth).predict(api_name="/models")
        assert texts(submit(client_of(blocks, auth=("ann", "secret")), picture_file))[-1] == " a cat"


def test_a_full_disk_is_said_and_the_next_upload_works(picture_file, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    with served(ready_host(FakeModel())) as blocks:
        client = client_of(blocks)
        with monkeypatch.context() as patched:
            patched.setattr("gradio.route_utils.NamedTemporaryFile", full)
            with pytest.raises(urllib.error.HTTPError) as refused:
                client_upload(blocks, picture_file)
        assert refused.value.code == 507 and "disk is full" in refused.value.read().decode()
        assert texts(submit(client, picture_file))[-1] == " a cat"


@pytest.mark.browser
def test_the_page_shows_the_place_in_line_and_says_when_it_is_full(browser, picture_file):
    served_model = ServedModel("slow", lambda progress: FakeModel(("▁a",) * 25, 0.2), limits=Limits(waiting=1))
    served_model.load_now()
    with served(served_model) as blocks:
        pages = [browser.new_page(locale="en-US") for _ in range(3)]
        for page in pages:
            page.set_default_timeout(60_000)
            page.goto(blocks.local_url)
            page.wait_for_selector("#tasks .chip")
            page.set_input_files("#image input[type=file]", str(picture_file))
            page.wait_for_selector("#image-view .picture img")
        running, waiting, refused = pages
        running.click("#run")
        running.wait_for_selector("#token-strip .token")
        waiting.click("#run")
        waiting.wait_for_function("document.querySelector('#status .words').textContent.includes('place 1 of 1')")
        refused.click("#run")
        refused.wait_for_selector("#status .status.error")
        assert refused.inner_text("#status .words") == messages.QUEUE_FULL
        running.close()  # leaving frees the model for who waits
        waiting.wait_for_selector("#token-strip .token")
        assert "place" not in waiting.inner_text("#status .words")
        waiting.close()
        refused.close()


# The process


def test_the_folder_for_uploads_is_private_and_goes(tmp_path, monkeypatch):
    monkeypatch.setenv("GRADIO_TEMP_DIR", str(tmp_path / "uploads"))
    with server.private_folder() as folder:
        assert os.environ["GRADIO_TEMP_DIR"] == str(folder) and folder.parent == tmp_path / "uploads"
        assert sys.platform == "win32" or stat.S_IMODE(folder.stat().st_mode) == 0o700
        (folder / "picture.png").write_bytes(b"x")
    assert not folder.exists()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def start(tmp_path: Path, seconds: float, port: int) -> subprocess.Popen:
    """app.py with a model of `seconds` a token, once it answers."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", "OMP_NUM_THREADS": "1",
                   "GRADIO_TEMP_DIR": str(tmp_path)}  # fmt: skip
    command = [sys.executable, str(ROOT / "tests" / "slow_app.py"), str(seconds), "--port", str(port)]
    pipe = subprocess.PIPE
    server = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=pipe, stderr=pipe, text=True)
    place = SimpleNamespace(local_url=f"http://127.0.0.1:{port}/")

    def is_ready() -> bool:
        assert server.poll() is None, server.stderr.read()
        try:
            return read_health(place)[0] == 200
        except OSError:
            return False

    try:
        until(is_ready)
    except AssertionError:
        server.kill()
        raise
    return server


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="signals cannot be caught on Windows")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_told_to_end_while_answering_the_process_ends_cleanly(number, tmp_path, picture_file):
    port = free_port()
    server = start(tmp_path, 60.0, port)  # a step of a minute: ending does not wait for it
    try:
        client = Client(f"http://127.0.0.1:{port}/", verbose=False)
        job = submit(client, picture_file)
        until(lambda: job.outputs())
        assert list(tmp_path.glob("paligemma-*"))
    finally:
        server.send_signal(number)
        out, errors = server.communicate(timeout=40)
    assert server.returncode == 0 and "Traceback" not in out + errors
    assert not list(tmp_path.glob("paligemma-*"))


def test_a_port_in_use_is_said_in_one_sentence():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        blocks = ui.build_app(ready_host(FakeModel()))
        with pytest.raises(ValueError, match=f"Port {port} cannot be had.*--port"):
            server.launch(blocks, prevent_thread_lock=True, quiet=True, server_port=port)


def test_a_port_that_is_none_is_said_in_one_sentence():
    with pytest.raises(ValueError, match=r"Port 99999 cannot be had.*65535.*--port"):
        server.launch(ui.build_app(ready_host(FakeModel())), prevent_thread_lock=True, quiet=True, server_port=99999)


@pytest.mark.parametrize(("name", "value"), [("MAX_SECONDS", "soon"), ("SIGN_IN", "secret")])
def test_a_wrong_setting_ends_the_start_with_a_sentence(name, value, monkeypatch, capsys):
    monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["app.py"])
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    with pytest.raises(SystemExit):
        cli.main()
    said = capsys.readouterr().err.splitlines()[-1]
    assert f"error: {name} is" in said and "secret" not in said


def test_answers_of_the_page_are_stopped_by_who_leaves(picture_file):
    model = FakeModel(("▁a",) * 50)
    session = make_visit(model)
    submit_run(session, picture_file)
    updates = handlers.run_pending(session)
    for _ in range(4):
        next(updates)
    updates.close()
    assert model.closed_after is not None and session.run_state.finished
    assert session.history.current.finish_reason == "stopped"
    submit_run(session, picture_file)
    assert answer(session)[-1].token_strip["done"] and decoded(handlers.resend_page(session)).token_strip["done"]
