"""A launched app: concurrent clients, disconnects, sign-in, a full disk, and the process itself."""

from __future__ import annotations

import json
import os
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
from contextlib import contextmanager
from pathlib import Path

import gradio as gr
import pytest
from fake_model import FakeModel
from gradio_client import Client, handle_file
from PIL import Image
from webapp_helpers import DECODING, load_tiny, ready_served_model

import paligemma
from paligemma.errors import InputError
from paligemma.webapp import messages, server, ui
from paligemma.webapp.limits import Limits
from paligemma.webapp.served_models import ServedModel
from paligemma.webapp.session import Session

ROOT = Path(__file__).parents[1]


def wait_until(holds: Callable[[], bool]) -> None:
    """Poll for up to 60 seconds, for slow machines."""
    for _ in range(600):
        if holds():
            return
        time.sleep(0.1)
    raise AssertionError("timed out")


class GatedModel(FakeModel):
    """Waits after the first token until the gate is set."""

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
    app = ui.build_app(*served_models)
    server.launch(
        app, prevent_thread_lock=True, quiet=True, app_kwargs=server.server_settings(served_models), **settings
    )
    try:
        yield app
    finally:
        app.server.force_exit = True
        app.close(verbose=False)


def client_of(app: gr.Blocks, **settings) -> Client:
    return Client(app.local_url, verbose=False, **settings)


def submit(client: Client, image: Path, prompt: str = "caption en", **options):
    return client.submit(image=handle_file(image), prompt=prompt, api_name="/generate", **options)


def texts(job) -> list[str]:
    return [entry["text"] for entry in job if entry["step"]]


# Concurrent clients


def test_eight_concurrent_clients_get_the_same_answers_as_alone(tiny_checkpoint, image_file):
    requests = [{"prompt": f"detect {name}", "temperature": 1.0, "seed": seed} for seed, name in enumerate("abcdefgh")]
    with served(load_tiny(tiny_checkpoint)) as app:
        clients = [client_of(app) for _ in requests]
        alone = [texts(submit(clients[0], image_file, max_new_tokens=8, **request)) for request in requests]
        jobs = [
            submit(client, image_file, max_new_tokens=8, **request)
            for client, request in zip(clients, requests, strict=True)
        ]
        assert [texts(job) for job in jobs] == alone
    assert len(set(map(tuple, alone))) > 1


def test_a_full_queue_rejects_the_next_request_only(image_file):
    model = GatedModel()
    served_model = ServedModel("gated", lambda progress: model, limits=Limits(max_queue_size=2))
    served_model.load_now()
    with served(served_model) as app:
        client = client_of(app)
        first = submit(client, image_file)
        wait_until(lambda: first.outputs() and first.outputs()[-1]["step"])
        waiting = [submit(client, image_file) for _ in range(2)]
        wait_until(lambda: len(app._queue) == 2)
        refused = submit(client_of(app), image_file)
        with pytest.raises(Exception, match="Queue is full! Please try again"):
            refused.result(timeout=60)
        model.gate.set()
        assert all(texts(job) == [" a", " a cat", " a cat"] for job in (first, *waiting))


def test_a_run_works_after_twenty_canceled_requests(image_file):
    model = FakeModel(("▁a", "▁cat"), 0.15)
    with served(ready_served_model(model)) as app:
        client = client_of(app)
        for count in range(1, 21):
            job = submit(client, image_file)
            wait_until(lambda count=count: len(model.requests) == count)
            job.cancel()
        model.seconds_per_token = 0.0
        assert texts(submit(client, image_file)) == [" a", " a cat", " a cat"]
        assert len(model.requests) == 21


def test_generation_stops_when_the_client_disconnects(image_file):
    model = FakeModel(("▁a",) * 500, 0.05)
    with served(ready_served_model(model)) as app:
        client = client_of(app)
        path = client_upload(app, image_file)
        url = f"{app.local_url}gradio_api/call/generate"
        data = {"data": [{"path": path, "meta": {"_type": "gradio.FileData"}}, "a", 512, 0, 0, 1, None, 1] + [None] * 3}
        sent = urllib.request.Request(url, json.dumps(data).encode(), {"Content-Type": "application/json"})
        event_id = json.load(urllib.request.urlopen(sent))["event_id"]
        with urllib.request.urlopen(f"{url}/{event_id}") as stream:
            assert any(b'"token_id"' in line for line in stream)  # then the connection is closed
        wait_until(lambda: model.closed_after is not None)
        assert model.closed_after < 500
        model.pieces, model.seconds_per_token = ("▁b", "<eos>"), 0.0
        assert texts(submit(client, image_file)) == [" b", " b"]


def client_upload(app: gr.Blocks, image: Path) -> str:
    """Upload a file; returns its path on the server."""
    body = (
        b'--x\r\nContent-Disposition: form-data; name="files"; filename="a.png"\r\n\r\n'
        + image.read_bytes()
        + b"\r\n--x--\r\n"
    )
    headers = {"Content-Type": "multipart/form-data; boundary=x"}
    with urllib.request.urlopen(urllib.request.Request(f"{app.local_url}gradio_api/upload", body, headers)) as sent:
        return json.load(sent)[0]


def test_an_expired_session_stops_its_run():
    with served(ready_served_model(FakeModel())) as app:
        submit_run = next(fn for fn in app.fns.values() if getattr(fn.fn, "__name__", "") == "submit_run")
        data = [None, None, "caption en", *DECODING.values()]
        body = {"data": data, "fn_index": submit_run._id, "session_hash": "user"}
        headers = {"Content-Type": "application/json"}
        url = f"{app.local_url}gradio_api/run/predict"
        urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)).close()
        state = app.state_holder.session_data["user"]
        (session,) = [value for value in state.state_data.values() if isinstance(value, Session)]
        assert not session.run_state.finished and not session.run_state.stop_requested
        state.is_closed, state.STATE_TTL_WHEN_CLOSED = True, 0  # as an hour after the page was closed
        wait_until(lambda: not state.state_data)
        assert session.run_state.stop_requested


# Health, sign-in, disk


def read_health(url: str) -> tuple[int, dict]:
    try:
        with urllib.request.urlopen(f"{url}healthz") as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as reply:
        return reply.code, json.load(reply)


def test_healthz_reports_the_state_of_the_models_without_sign_in(tiny_checkpoint):
    may_load = threading.Event()
    served_model = ServedModel("tiny", lambda progress: may_load.wait(30) and FakeModel())
    broken = ServedModel("broken", lambda progress: (_ for _ in ()).throw(OSError(f"no {tiny_checkpoint}")))
    later = ServedModel("later", lambda progress: FakeModel())
    broken.load_now()
    served_model.start()
    with served(served_model, broken, later, auth=[("ann", "secret")]) as app:
        states = [
            {"name": "tiny", "state": "loading", "answered_by": None},
            {"name": "broken", "state": "error", "answered_by": None},
            {"name": "later", "state": "not loaded", "answered_by": None},
        ]
        assert read_health(app.local_url) == (503, {"state": "loading", "models": states})
        may_load.set()
        wait_until(lambda: served_model.state == "ready")
        status, body = read_health(app.local_url)
        assert (status, body["state"]) == (200, "ready") and "/" not in json.dumps(body)


def test_sign_in_is_required_for_uploads_and_calls(image_file):
    with served(ready_served_model(FakeModel()), auth=[("ann", "secret")]) as app:
        with pytest.raises(urllib.error.HTTPError, match="401"):
            client_upload(app, image_file)
        for auth in (None, ("ann", "wrong")):
            with pytest.raises(Exception):  # noqa: B017 - the client raises different types
                client_of(app, auth=auth).predict(api_name="/models")
        assert texts(submit(client_of(app, auth=("ann", "secret")), image_file))[-1] == " a cat"


def test_a_full_disk_is_reported_and_the_next_upload_works(image_file, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    with served(ready_served_model(FakeModel())) as app:
        client = client_of(app)
        with monkeypatch.context() as patched:
            patched.setattr("gradio.route_utils.NamedTemporaryFile", full)
            with pytest.raises(urllib.error.HTTPError) as raised:
                client_upload(app, image_file)
        assert raised.value.code == 507 and "disk is full" in raised.value.read().decode()
        assert texts(submit(client, image_file))[-1] == " a cat"


@pytest.mark.browser
def test_the_page_shows_the_queue_position_and_a_full_queue(browser, image_file):
    served_model = ServedModel("slow", lambda progress: FakeModel(("▁a",) * 25, 0.2), limits=Limits(max_queue_size=1))
    served_model.load_now()
    with served(served_model) as app:
        pages = [browser.new_page(locale="en-US") for _ in range(3)]
        for page in pages:
            page.set_default_timeout(60_000)
            page.goto(app.local_url)
            page.wait_for_selector("#tasks .chip")
            page.set_input_files("#image input[type=file]", str(image_file))
            page.wait_for_selector("#image-view .figure img")
        running, waiting, rejected = pages
        running.click("#run")
        running.wait_for_selector("#token-strip .token")
        waiting.click("#run")
        waiting.wait_for_function("document.querySelector('#status .message').textContent.includes('position 1 of 1')")
        rejected.click("#run")
        rejected.wait_for_selector("#status .status.error")
        assert rejected.inner_text("#status .message") == messages.QUEUE_FULL
        running.close()  # stops its run
        waiting.wait_for_selector("#token-strip .token")
        assert "position" not in waiting.inner_text("#status .message")
        waiting.close()
        rejected.close()


# Process


def test_the_upload_folder_is_private_and_removed(tmp_path, monkeypatch):
    monkeypatch.setenv("GRADIO_TEMP_DIR", str(tmp_path / "uploads"))
    with server.private_folder() as folder:
        assert os.environ["GRADIO_TEMP_DIR"] == str(folder) and folder.parent == tmp_path / "uploads"
        assert sys.platform == "win32" or stat.S_IMODE(folder.stat().st_mode) == 0o700
        (folder / "image.png").write_bytes(b"x")
    assert not folder.exists()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def start_slow_app(tmp_path: Path, seconds: float, port: int) -> subprocess.Popen:
    """Start app.py with a model that takes `seconds` per token, and wait until it is ready."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", "OMP_NUM_THREADS": "1",
                   "GRADIO_TEMP_DIR": str(tmp_path)}  # fmt: skip
    command = [sys.executable, str(ROOT / "tests" / "slow_app.py"), str(seconds), "--port", str(port)]
    pipe = subprocess.PIPE
    server = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=pipe, stderr=pipe, text=True)

    def is_ready() -> bool:
        assert server.poll() is None, server.stderr.read()
        try:
            return read_health(f"http://127.0.0.1:{port}/")[0] == 200
        except OSError:
            return False

    try:
        wait_until(is_ready)
    except AssertionError:
        server.kill()
        raise
    return server


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="signals cannot be caught on Windows")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_process_exits_cleanly_during_generation(number, tmp_path, image_file):
    port = free_port()
    server = start_slow_app(tmp_path, 60.0, port)  # a step takes a minute; the exit does not wait for it
    try:
        client = Client(f"http://127.0.0.1:{port}/", verbose=False)
        job = submit(client, image_file)
        wait_until(lambda: job.outputs())
        assert list(tmp_path.glob("paligemma-*"))
    finally:
        server.send_signal(number)
        out, errors = server.communicate(timeout=40)
    assert server.returncode == 0 and "Traceback" not in out + errors
    assert not list(tmp_path.glob("paligemma-*"))


@pytest.mark.skipif(sys.platform == "win32", reason="SIGTERM cannot be caught on Windows")
def test_app_py_serves_the_page_and_exits_on_sigterm(tiny_checkpoint):
    port = free_port()
    command = [sys.executable, "app.py", "--model", str(tiny_checkpoint), "--port", str(port)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        page = fetch(f"http://127.0.0.1:{port}/", process)
        assert "PaliGemma, token by token" in page
    finally:
        process.send_signal(signal.SIGTERM)
        errors = process.communicate(timeout=30)[1].decode()
    assert process.returncode == 0 and "Traceback" not in errors


def fetch(url: str, process: subprocess.Popen) -> str:
    """Fetch the page as soon as the server answers, for up to 90 seconds."""
    for _ in range(180):
        assert process.poll() is None, process.stderr.read().decode()
        try:
            return urllib.request.urlopen(url, timeout=10).read().decode()
        except OSError:
            time.sleep(0.5)
    raise AssertionError(f"no answer from {url}")


def test_a_port_in_use_is_reported():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        check_unavailable_port(taken.getsockname()[1])


def test_an_invalid_port_is_reported():
    check_unavailable_port(99999)


def check_unavailable_port(port: int) -> None:
    app = ui.build_app(ready_served_model(FakeModel()))
    with pytest.raises(InputError, match=rf"Cannot bind port {port}: .*1-65535.*--port"):
        server.launch(app, prevent_thread_lock=True, quiet=True, server_port=port)
