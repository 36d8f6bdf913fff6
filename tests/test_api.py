"""The HTTP API, with a scripted model and through the client of a launched app."""

from __future__ import annotations

import asyncio
import json
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import gradio as gr
import pytest
from fake_model import FakeModel
from gradio_client import Client, handle_file
from gradio_client.exceptions import AppError
from webapp_helpers import DECODING, ready_served_model, run_api, start_served_model, upload

import paligemma
from paligemma import lens, paths
from paligemma.webapp import api, cli, served_models, server, ui
from paligemma.webapp.uploads import open_image


def test_the_api_yields_before_any_work():
    assert next(api.answer_over_api((), None, "caption en", **DECODING)) is not None
    assert next(api.inspect_over_api((), None, "", [], 0)) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image": None}, "Choose"),
        ({"image": Path(__file__)}, "image"),
        ({"temperature": "hot"}, "temperature must be a number"),
        ({"prompt": "x" * 3000}, "3000"),
    ],
)
def test_an_invalid_request_is_an_error(image_file, change, message):
    served_model = ready_served_model(FakeModel())
    with pytest.raises(gr.Error, match=message):
        run_api(served_model, **{"image": image_file, **change})
    assert not served_model.model.requests


def test_closing_the_handler_closes_the_stream(image_file):
    model = FakeModel(("▁a",) * 50, seconds_per_token=0.06)
    served_models = (ready_served_model(model),)
    events = api.answer_over_api(served_models, upload(image_file), "caption en", **DECODING)
    for _ in range(5):  # more values than it yields before the model runs
        next(events)
    events.close()
    assert 0 < model.closed_after < 10


def test_each_token_is_one_event_and_the_last_has_detections_and_timing(image_file):
    events = run_api(ready_served_model(FakeModel(("▁a", "▁cat"))), image_file)
    assert events[0]["step"] is None
    assert [event["step"]["index"] for event in events[1:]] == [0, 1, 2]
    assert [event["finish_reason"] for event in events] == [None, None, None, "eos"]
    assert [set(event) for event in events[:3]] == [{"text", "step", "finish_reason"}] * 3
    assert set(events[3]) - set(events[2]) == {"detections", "timing"}


def test_requests_wait_while_the_model_loads(image_file, monkeypatch):
    monkeypatch.setattr(served_models, "WAIT_INTERVAL_S", 0.02)
    may_load = threading.Event()
    served_model = start_served_model(lambda progress: may_load.wait(10) and FakeModel())
    events = api.answer_over_api((served_model,), upload(image_file), "caption en", **DECODING)
    assert [next(events)["step"] for _ in range(4)] == [None] * 4
    assert served_model.loading and served_model.describe()["state"] == "loading"
    may_load.set()
    assert [event["step"]["piece"] for event in events if event["step"]] == ["▁a", "▁cat", "<eos>"]
    assert served_model.describe()["state"] == "ready"


# A launched app


@pytest.fixture(scope="module")
def client(tiny_checkpoint) -> Iterator[Client]:
    arguments = cli.build_parser().parse_args(["--model", str(tiny_checkpoint), "--device", "cpu"])
    (served_model,) = cli.build_served_models(arguments)
    served_model.start()
    app = ui.build_app(served_model)
    server.launch(app, prevent_thread_lock=True, quiet=True)
    yield Client(app.local_url, verbose=False)
    app.close()


def stream(client: Client, image: Path, **changes) -> list[dict]:
    request = {"image": handle_file(image), "prompt": "detect cat", "max_new_tokens": 6, "top_n": 4}
    job = client.submit(**{**request, **changes}, api_name="/generate")
    return list(job)


def test_the_client_receives_one_event_per_token_in_order(client, image_file, tiny_checkpoint):
    events = [event for event in stream(client, image_file) if event["step"]]
    assert [event["step"]["index"] for event in events] == list(range(len(events)))
    assert all(event["step"]["top"][0]["token_id"] == event["step"]["token_id"] for event in events)
    assert all(len(event["step"]["top"]) == 4 for event in events)
    assert "".join(event["step"]["text_delta"] for event in events) == events[-1]["text"]
    result = paligemma.load(tiny_checkpoint).generate(open_image(image_file), "detect cat", max_new_tokens=6, top_n=4)
    assert [event["step"]["token_id"] for event in events] == list(result.token_ids)
    assert [event["step"]["logit"] for event in events] == [step.logit for step in result.steps]
    assert events[-1]["finish_reason"] == result.finish_reason
    assert set(events[-1]["timing"]) == {"image_s", "first_token_s", "total_s", "tokens_per_s"}


def test_forced_ids_start_the_answer(client, image_file):
    free = [event["step"]["token_id"] for event in stream(client, image_file) if event["step"]]
    other = stream(client, image_file, forced_ids=[*free[:2], free[0]])
    assert [event["step"]["token_id"] for event in other if event["step"]][:3] == [*free[:2], free[0]]


def test_the_same_seed_gives_the_same_answer(client, image_file):
    first, second = (stream(client, image_file, temperature=1.0, seed=5)[-1]["text"] for _ in range(2))
    assert first == second


@pytest.mark.parametrize(
    ("change", "message"),
    [({"top_n": 51}, "top_n must be"), ({"temperature": -1}, "temperature must be"), ({"image": None}, "Choose")],
)
def test_the_client_receives_the_error_message(client, image_file, change, message):
    with pytest.raises(AppError, match=message):
        client.predict(
            **{"image": handle_file(image_file), "prompt": "a", **change},
            api_name="/generate",
        )


def call_raw(client: Client, inputs: list) -> str:
    """The event stream of /generate for inputs that the client would reject or upload first."""
    url = client.src.rstrip("/") + "/gradio_api/call/generate"
    body = json.dumps({"data": inputs}).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        event_id = json.load(answer)["event_id"]
    with urllib.request.urlopen(f"{url}/{event_id}") as answer:
        return answer.read().decode()


@pytest.mark.parametrize("meta", [{}, {"meta": {"_type": "gradio.FileData"}}, {"meta": None}, {"meta": {}}])
@pytest.mark.parametrize("path", ["/etc/passwd", "/etc/nothing", str(paths.ASSETS / "examples" / "cats.png")])
def test_files_of_the_server_are_not_opened(client, path, meta):
    """Whether or not the client marks the path as a file, and not even the app's own images."""
    answer = call_raw(client, [{"path": path, **meta}, "a", 2, 0, 0, 1, None, 1, None, None])
    assert "event: error" in answer
    assert '"token_id"' not in answer and Path(path).name not in answer


def test_a_token_is_inspected(client, image_file, tiny_checkpoint):
    ids = [event["step"]["token_id"] for event in stream(client, image_file) if event["step"]]
    inspection = client.predict(
        image=handle_file(image_file), prompt="detect cat", token_ids=ids, index=2, api_name="/inspect"
    )
    found = lens.inspect(paligemma.load(tiny_checkpoint), open_image(image_file), "detect cat", ids, 2)
    assert inspection["grid"] == list(found.grid)
    assert inspection["attention"][1][0] == pytest.approx(found.attention[1, 0].tolist(), abs=1e-5)
    assert inspection["lens"][-1]["token_id"] == found.lens[-1].token_id


def test_every_input_has_a_json_type(client):
    """MCP clients reject a tool if one of its inputs has no type."""
    endpoints = client.view_api(return_format="dict", print_info=False)["named_endpoints"]
    assert set(endpoints) == {"/generate", "/inspect", "/models"}
    types = {
        field["parameter_name"]: field["type"].get("type") for one in endpoints.values() for field in one["parameters"]
    }
    assert types["forced_ids"] == types["token_ids"] == "array" and types["seed"] == "integer"
    assert all(types[name] for name in types if name != "image")  # which has the schema of a file


def test_mcp_tools_work_and_reject_paths_of_the_server():
    pytest.importorskip("mcp", reason="needs gradio[mcp]")
    app = ui.build_app(ready_served_model(FakeModel()))
    server.launch(app, prevent_thread_lock=True, quiet=True, mcp_server=True)
    try:
        names, listed, refused = asyncio.run(call_tools(app.local_url + "gradio_api/mcp/"))
    finally:
        app.close()
    assert set(names) == {"generate", "inspect", "models"}
    assert "scripted" in str(listed.content) and refused.isError


async def call_tools(url: str) -> tuple:
    from mcp import ClientSession
    from mcp.client.streamable_http import streamablehttp_client

    async with streamablehttp_client(url) as (read, write, _), ClientSession(read, write) as session:
        await session.initialize()
        tools = (await session.list_tools()).tools
        listed = await session.call_tool("models", {})
        refused = await session.call_tool("generate", {"image": str(paths.ASSETS / "examples" / "cats.png")})
        return [tool.name for tool in tools], listed, refused


def test_the_models_are_listed(client):
    (model,) = client.predict(api_name="/models")
    assert (model["name"], model["state"], model["dtype"]) == ("tiny-random", "ready", "float32")
