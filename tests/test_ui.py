"""Components of the page and how they are connected to the handlers."""

from __future__ import annotations

import pytest
from fake_model import FakeModel
from webapp_helpers import ready_served_model

from paligemma.webapp import api, handlers, ui


@pytest.fixture(scope="module")
def config() -> dict:
    return ui.build_app(ready_served_model(FakeModel())).get_config_file()


def test_only_the_api_s_endpoints_are_public(config):
    public = {event["api_name"] for event in config["dependencies"] if event["api_visibility"] == "public"}
    assert public == {"generate", "inspect", "models"}


def test_no_html_template_contains_data(config):
    parts = [component["props"] for component in config["components"] if component["type"] == "html"]
    assert len(parts) >= 10
    assert {props["html_template"] for props in parts} == {'<div class="part"></div>'}


def test_every_event_that_runs_the_model_shares_one_queue():
    app = ui.build_app(ready_served_model(FakeModel()))
    running = (
        handlers.run_pending,
        handlers.inspect_token,
        handlers.image_shares,
        api.answer_over_api,
        api.inspect_over_api,
    )
    events = [event for event in app.fns.values() if getattr(event.fn, "func", event.fn) in running]
    assert len(events) == 8  # four events submit a run
    assert {(event.concurrency_id, event.concurrency_limit) for event in events} == {("model", 1)}
