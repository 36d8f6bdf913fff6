"""The page's handlers with a scripted model, its wiring, and the HTTP API of a really launched app."""

from __future__ import annotations

import asyncio
import copy
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import gradio as gr
import numpy as np
import pytest
from fake_model import PROCESSOR, FakeModel, fake_image_shares, fake_inspection
from gradio_client import Client, handle_file
from gradio_client.exceptions import AppError

import paligemma
from paligemma import checkpoint, lens, paths
from paligemma.image_processing import resize
from paligemma.masks import MaskDecoder
from paligemma.webapp import api, cli, execution, handlers, messages, served_models, server, serving, tasks, ui
from paligemma.webapp.examples import Example
from paligemma.webapp.execution import PageUpdate
from paligemma.webapp.images import model_input_image, open_image
from paligemma.webapp.served_models import ServedModel
from paligemma.webapp.session import Session

ROOT = Path(__file__).parents[1]
BUNDLED_MASKS = ROOT / "assets/demo/mask_decoder.safetensors"
DECODING = {"max_new_tokens": 16, "temperature": 0, "top_k": 0, "top_p": 1, "seed": None, "top_n": 3}


def make_host(load: Callable | None, name: str = "scripted") -> ServedModel:
    served_model = ServedModel(name, load)
    served_model.start()
    return served_model


def ready_host(model: FakeModel, name: str = "scripted") -> ServedModel:
    served_model = make_host(lambda progress: model, name)
    assert served_model._finished.wait(10)
    return served_model


def make_visit(model: FakeModel | None = None, *others: ServedModel) -> Session:
    return Session((ready_host(model or FakeModel()), *others))


def upload(image: Path | None) -> dict | None:
    return {"path": str(image), "meta": {"_type": "gradio.FileData"}} if image else None


def submit_run(session: Session, image: Path | None, prompt: str = "caption en", **changes) -> dict:
    return handlers.submit_run(session, upload(image), prompt, *{**DECODING, **changes}.values())


def decoded(page_update: str | dict) -> PageUpdate:
    """What the page is told, with `gr.skip()` for what it is not."""
    changes = {} if page_update == gr.skip() else json.loads(page_update)
    return PageUpdate(*(changes.get(name, gr.skip()) for name in PageUpdate._fields))


def answer(session: Session) -> list[PageUpdate]:
    return list(map(decoded, handlers.run_pending(session)))


def run_page(session: Session, image: Path | None, prompt: str = "caption en", **changes) -> list[PageUpdate]:
    submit_run(session, image, prompt, **changes)
    return answer(session)


def run_api(served_model: ServedModel, image: Path | None, prompt: str = "caption en", **changes) -> list[dict]:
    return list(api.answer_over_api((served_model,), upload(image), prompt, **{**DECODING, **changes}))


def shown_pieces(updates: list[PageUpdate]) -> list[str]:
    """What the strip shows once all updates have reached it."""
    pieces: list[str] = []
    for update in updates:
        if update.token_strip != gr.skip():
            assert update.token_strip["start"] <= len(pieces)
            pieces[update.token_strip["start"] :] = [token["piece"] for token in update.token_strip["tokens"]]
    return pieces


def event(**fields) -> gr.EventData:
    return gr.EventData(None, fields)


# Handlers


def test_the_strip_gets_each_token_once(picture_file, monkeypatch):
    monkeypatch.setattr(execution, "UPDATE_INTERVAL_S", 0)
    updates = run_page(make_visit(FakeModel(("▁a", "▁cat"))), picture_file)
    added = [
        [token["piece"] for token in update.token_strip["tokens"]]
        for update in updates
        if update.token_strip != gr.skip()
    ]
    assert added == [[], ["␣a"], ["␣cat"], ["<eos>"]]
    assert messages.format_message(updates[-1].status).startswith("The answer is complete · 3 tokens · picture 0.01 s")
    assert updates[-1].token_strip["done"]


def test_news_are_numbered_and_what_was_missed_can_be_had_again(picture_file, monkeypatch):
    monkeypatch.setattr(execution, "UPDATE_INTERVAL_S", 0)
    session = make_visit()
    assert handlers.resend_page(session) == gr.skip()  # there is no run yet
    submit_run(session, picture_file)
    numbers = [
        json.loads(page_update)["number"] for page_update in handlers.run_pending(session) if page_update != gr.skip()
    ]
    assert numbers == list(range(1, len(numbers) + 1))
    again = decoded(handlers.resend_page(session))
    assert len(again.token_strip["tokens"]) == 3 and again.token_strip["done"] and again.image_view["width"] == 64


def test_the_page_is_updated_at_most_twenty_times_a_second(picture_file):
    updates = run_page(make_visit(FakeModel(("▁a",) * 200, seconds_a_token=0.001)), picture_file)
    assert len(updates) < 100
    assert len(shown_pieces(updates)) == 201


def test_the_picture_and_the_runs_are_shown_as_a_run_begins(picture_file):
    session = make_visit()
    updates = run_page(session, picture_file, "detect cat")
    (image_view_state,) = [update.image_view for update in updates if update.image_view != gr.skip()]
    assert (image_view_state["width"], image_view_state["height"], image_view_state["side"]) == (64, 48, 56)
    assert updates[-1].runs["runs"][0]["prompt"] == "detect cat"
    again = run_page(session, picture_file)
    assert all(update.image_view == gr.skip() for update in again)  # it is there already
    assert [row["number"] for row in again[-1].runs["runs"]] == [1, 2]


def test_objects_are_sent_only_when_they_change(picture_file, monkeypatch):
    monkeypatch.setattr(execution, "UPDATE_INTERVAL_S", 0)
    pieces = ("<loc0256>", "<loc0512>", "<loc0768>", "<loc1023>", "▁cat", "▁;", "▁", "▁a", "▁b")
    updates = run_page(make_visit(FakeModel(pieces)), picture_file)
    sent = [len(update.objects["objects"]) for update in updates if update.objects != gr.skip()]
    assert len(sent) < len(pieces) and sent[0] == 0 and sent[-1] == 1


def both_handlers(session: Session, image: Path | None) -> tuple[Iterator, Iterator]:
    return handlers.run_pending(session), api.answer_over_api(
        session.served_models, upload(image), "caption en", **DECODING
    )


def test_the_first_event_comes_before_any_work():
    session = Session(())  # no model: whatever is done with it fails
    submit_run(session, None)
    for events in (handlers.run_pending(session), api.answer_over_api((), None, "caption en", **DECODING)):
        assert next(events) is not None
    for looking in (handlers.inspect_token, handlers.image_shares):
        assert next(looking(session, event())) is not None
    assert next(api.inspect_over_api((), None, "", [], 0)) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image": None}, "Choose a picture"),
        ({"image": Path(__file__)}, "none of the pictures"),
        ({"temperature": "hot"}, "temperature must be a number"),
        ({"prompt": "x" * 3000}, "3000 characters"),
    ],
)
def test_a_bad_request_becomes_a_line_of_the_page_and_an_error_of_the_api(picture_file, change, message):
    request = {"image": picture_file, **change}
    session = make_visit()
    last = run_page(session, **request)[-1]
    assert last.status["kind"] == "error" and message in last.status["text"]
    assert last.token_strip == gr.skip()  # what stands there stays
    with pytest.raises(gr.Error, match=message):
        run_api(session.served_model, **request)
    assert not session.served_model.model.requests


def test_what_was_written_stays_when_the_model_fails_half_way(picture_file, monkeypatch):
    monkeypatch.setattr(execution, "UPDATE_INTERVAL_S", 0)
    model = FakeModel(("▁a", "▁cat"))
    written = model.stream
    monkeypatch.setattr(model, "stream", lambda *args, **kwargs: break_after(1, written(*args, **kwargs)))
    session = make_visit(model)
    updates = run_page(session, picture_file)
    assert "RuntimeError" in updates[-1].status["text"] and "secret" not in updates[-1].status["text"]
    assert shown_pieces(updates) == ["␣a"]
    assert session.history.current.finish_reason == "stopped" and session.run_state.finished


def break_after(count: int, stream: Iterator) -> Iterator:
    yield from (next(stream) for _ in range(count))
    raise RuntimeError("secret")


@pytest.mark.parametrize("which", [0, 1])
def test_closing_a_handler_closes_the_model_s_stream(which, picture_file):
    model = FakeModel(("▁a",) * 50, seconds_a_token=0.06)
    session = make_visit(model)
    submit_run(session, picture_file)
    events = both_handlers(session, picture_file)[which]
    for _ in range(5):  # beyond what either handler yields before the model runs
        next(events)
    events.close()
    assert 0 < model.closed_after < 10


def test_the_model_gets_what_the_controls_say(picture_file):
    model = FakeModel()
    run_page(make_visit(model), picture_file, "detect cat", temperature=0.5, top_k=4, top_p=0.9, seed=3, top_n=2)
    (request,) = model.requests
    assert request.pop("image").size == (56, 56)  # what the model sees
    assert request == {
        "prompt": "detect cat", "max_new_tokens": 16, "temperature": 0.5, "top_k": 4, "top_p": 0.9, "seed": 3,
        "top_n": 2, "forced_ids": (), "time_limit": 600.0,
    }  # fmt: skip


def test_a_run_without_a_seed_gets_one_and_keeps_it(picture_file):
    session = make_visit()
    run_page(session, picture_file, temperature=1.0)
    seed = session.history.current.request["seed"]
    assert isinstance(seed, int) and session.served_model.model.requests[0]["seed"] == seed


def test_the_api_sends_an_event_a_token_and_closes_with_objects_and_times(picture_file):
    events = run_api(ready_host(FakeModel(("▁a", "▁cat"))), picture_file)
    assert events[0]["step"] is None
    assert [event["step"]["index"] for event in events[1:]] == [0, 1, 2]
    assert [event["finish_reason"] for event in events] == [None, None, None, "eos"]
    assert [set(event) for event in events[:3]] == [{"text", "step", "finish_reason"}] * 3
    assert set(events[3]) - set(events[2]) == {"detections", "timing"}


def test_the_page_s_numbers_are_the_api_s(picture_file):
    session = make_visit(FakeModel(("▁a", "▁cat")))
    run_page(session, picture_file)
    events = [event["step"] for event in run_api(session.served_model, picture_file) if event["step"]]
    entries = decoded(handlers.resend_page(session)).token_strip["tokens"]
    for entry, step in zip(entries, events, strict=True):
        assert (entry["id"], entry["prob"], entry["entropy"]) == (step["token_id"], step["prob"], step["entropy"])
        assert [row["id"] for row in entry["rows"]] == [candidate["token_id"] for candidate in step["top"]]


# Stopping, stepping, branching


def test_stop_ends_a_run_behind_the_token_that_it_is_at(picture_file, monkeypatch):
    monkeypatch.setattr(execution, "UPDATE_INTERVAL_S", 0)
    model = FakeModel(("▁a",) * 50)
    session = make_visit(model)
    assert handlers.stop_run(session) == gr.skip()  # nothing runs
    submit_run(session, picture_file)
    updates = []
    for update in map(decoded, handlers.run_pending(session)):
        updates.append(update)
        if len(shown_pieces(updates)) == 3 and not session.run_state.stop_requested:
            assert handlers.stop_run(session)["text"] == "Stopping after this token"
    assert model.closed_after == 4
    assert messages.format_message(updates[-1].status) == "Stopped · 4 tokens"
    assert len(shown_pieces(updates)) == 4
    assert handlers.stop_run(session) == gr.skip()


def test_a_run_that_was_stopped_before_its_turn_does_nothing(picture_file):
    session = make_visit()
    submit_run(session, picture_file)
    assert handlers.stop_run(session) == messages.status("idle", "Stopped")  # at once: the line may be long
    assert handlers.stop_run(session) == gr.skip()
    assert answer(session) == [PageUpdate(*[gr.skip()] * 5)] and not session.served_model.model.requests
    step_once(session, picture_file)  # nothing of it is left to go on from
    assert [len(run.steps) for run in session.history] == [1]


def test_a_run_that_is_stopped_as_it_takes_its_turn_does_nothing(picture_file):
    session = make_visit()
    submit_run(session, picture_file)
    events = handlers.run_pending(session)
    next(events)
    assert handlers.stop_run(session)["text"] == "Stopping after this token"
    assert decoded(list(events)[-1]).status["text"] == "Stopped" and not session.served_model.model.requests


def test_an_answer_that_is_stopped_at_its_last_token_is_complete(picture_file, monkeypatch):
    model = FakeModel(("▁a",))
    session = make_visit(model)
    written = model.stream

    def stop_at_the_end(*args, **kwargs) -> Iterator:
        stream = written(*args, **kwargs)
        yield next(stream)
        handlers.stop_run(session)
        return (yield from stream)

    monkeypatch.setattr(model, "stream", stop_at_the_end)
    updates = run_page(session, picture_file)
    assert messages.format_message(updates[-1].status).startswith("The answer is complete · 2 tokens · picture 0.01 s")


def test_of_several_requests_in_line_only_the_newest_runs(picture_file):
    session = make_visit()
    submit_run(session, picture_file, "first")
    run_state = session.run_state
    submit_run(session, picture_file, "second")
    assert run_state.stop_requested and not session.run_state.stop_requested
    assert len(answer(session)) > 2
    assert answer(session) == [PageUpdate(*[gr.skip()] * 5)]
    assert [request["prompt"] for request in session.served_model.model.requests] == ["second"]


def test_a_branch_answers_anew_by_id_and_keeps_the_earlier_run(picture_file):
    session = make_visit(FakeModel(("▁a", "▁cat", "▁b")))
    run_page(session, picture_file)
    handlers.submit_branch(session, event(run=1, index=1, token_id=12))
    updates = answer(session)
    assert session.served_model.model.requests[-1]["forced_ids"] == (0, 12)
    assert shown_pieces(updates) == ["␣a", "␣else", "␣b", "<eos>"]
    rows = updates[-1].runs["runs"]
    assert [(row["number"], row["depth"], row["branched_at"], row["piece"]) for row in rows] == [
        (1, 0, None, ""), (2, 1, 2, "␣else"),
    ]  # fmt: skip
    tokens = decoded(handlers.resend_page(session)).token_strip["tokens"]
    assert [token["forced"] for token in tokens] == [True, True, False, False]
    assert [token["by_hand"] for token in tokens] == [False, True, False, False]
    assert tokens[1]["chosen"] == 2 and tokens[1]["rows"][2]["id"] == 12


def test_nothing_is_branched_from_what_does_not_exist(picture_file):
    session = make_visit()
    assert handlers.submit_branch(session, event(run=9, index=0, token_id=1))["text"] == messages.RUN_EXPIRED
    assert answer(session) == [PageUpdate(*[gr.skip()] * 5)]


def step_once(session: Session, image: Path, prompt: str = "caption en") -> list[PageUpdate]:
    handlers.submit_step(session, upload(image), prompt, *DECODING.values())
    return answer(session)


def test_one_step_at_a_time_writes_the_same_run_on(picture_file):
    session = make_visit(FakeModel(("▁a", "▁cat")))
    updates: list[PageUpdate] = []
    for count in (1, 2, 3):
        updates += step_once(session, picture_file)
        assert len(shown_pieces(updates)) == count
    assert [request["forced_ids"] for request in session.served_model.model.requests] == [(), (0,), (0, 10)]
    assert len(list(session.history)) == 1 and session.history.current.finish_reason == "eos"
    status = handlers.submit_step(session, upload(picture_file), "caption en", *DECODING.values())
    assert status["text"] == "The answer has ended; nothing follows."
    step_once(session, picture_file, "detect cat")  # another prompt begins another run
    assert len(list(session.history)) == 2


def test_a_step_that_fails_takes_no_token_away(picture_file, monkeypatch):
    model = FakeModel(("▁a", "▁cat"))
    session = make_visit(model)
    step_once(session, picture_file)
    step_once(session, picture_file)
    written = model.stream
    monkeypatch.setattr(model, "stream", lambda *args, **kwargs: break_after(1, written(*args, **kwargs)))
    assert "RuntimeError" in step_once(session, picture_file)[-1].status["text"]
    assert [len(run.steps) for run in session.history] == [2]
    monkeypatch.undo()
    step_once(session, picture_file)  # the same run goes on
    assert [len(run.steps) for run in session.history] == [3]


def run_of_two_tokens(image: Path) -> Session:
    """A visit whose one run ended at its largest number of tokens, which is two."""
    session = make_visit(FakeModel(("▁a", "▁cat", "▁b", "▁c")))
    run_page(session, image, max_new_tokens=2)  # which the scripted model does not heed
    run = session.history.current
    run.steps, run.finish_reason = run.steps[:2], "length"
    return session


def test_while_one_step_writes_a_run_again_that_keeps_what_it_has(picture_file):
    session = run_of_two_tokens(picture_file)
    run, before = session.history.current, copy.copy(session.history.current)
    handlers.submit_step(session, upload(picture_file), "caption en", *DECODING.values())
    events = handlers.run_pending(session)
    while decoded(next(events)).status["text"] != "One step on":
        pass
    assert session.history.current is run and run.steps == before.steps
    handlers.stop_run(session)
    list(events)
    assert session.history.current == before  # its reason and its times too


def test_a_run_that_went_on_can_be_branched_at_its_new_tokens(picture_file):
    session = run_of_two_tokens(picture_file)
    for count in (3, 4):
        step_once(session, picture_file)
        run = session.history.current
        assert (len(run.steps), run.request["max_new_tokens"]) == (count, count)
        assert (run.finish_reason, run.timing) == ("stopped", None)
    handlers.submit_branch(session, event(run=1, index=3, token_id=31))
    assert shown_pieces(answer(session))[:4] == ["␣a", "␣cat", "␣b", "␣other"]
    request = session.served_model.model.requests[-1]
    assert len(request["forced_ids"]) == request["max_new_tokens"] == 4


def test_what_found_the_line_full_is_not_asked_later(picture_file):
    session = make_visit(FakeModel(("▁a", "▁cat")))
    run_page(session, picture_file)
    submit_run(session, picture_file, "detect cat")
    handlers.report_queue_full(session)
    assert [update for update in answer(session) if update.status != gr.skip()] == []
    step_once(session, picture_file, "detect cat")  # the run on the page was asked something else
    assert [len(run.steps) for run in session.history] == [3, 1]


def test_a_request_waits_for_a_model_no_longer_than_it_may_take(picture_file):
    never = threading.Event()
    served_model = ServedModel("slow", lambda progress: never.wait(30), limits=serving.Limits(seconds=0))
    served_model.start()
    session = Session((served_model,))
    assert "slow is still loading" in run_page(session, picture_file)[-1].status["text"]
    never.set()


def test_models_that_go_by_one_name_are_refused(tmp_path):
    folders = [tmp_path / parent / "model" for parent in ("a", "b")]
    for folder in folders:
        folder.mkdir(parents=True)
    arguments = cli.build_parser().parse_args(["--model", *map(str, folders)])
    with pytest.raises(ValueError, match="go by one name: model, model"):
        cli.build_served_models(arguments)


def test_one_step_writes_an_example_or_an_imported_run_on(picture_file, tmp_path):
    session, other = make_visit(FakeModel(("▁a", "▁cat"))), make_visit(FakeModel(("▁a", "▁cat")))
    step_once(session, picture_file)
    import_file(other, tmp_path, handlers.export_run(session)[1]["text"])
    handlers.submit_step(other, None, "caption en", *DECODING.values())
    answer(other)
    session.examples = (Example(picture_file, "detect cat", "me"),)
    handlers.submit_example(session, event(index=0), None, *DECODING.values())
    answer(session)
    status = handlers.submit_step(session, None, "detect cat", *DECODING.values())
    assert status["text"] == "The answer has ended; nothing follows."
    assert [len(run.steps) for run in other.history] == [2]


def test_an_earlier_run_is_shown_again_as_it_was(picture_file):
    session = make_visit(FakeModel(("▁a", "▁cat")))
    run_page(session, picture_file)
    run_page(session, picture_file, "detect cat")
    update = decoded(handlers.show_run(session, event(run=1)))
    assert (
        update.token_strip["run"] == 1 and update.token_strip["start"] == 0 and len(update.token_strip["tokens"]) == 3
    )
    assert [row["current"] for row in update.runs["runs"]] == [True, False]
    assert decoded(handlers.show_run(session, event(run=99))).status["text"] == messages.RUN_EXPIRED
    assert handlers.compare_runs(session, event(runs=[1, 2]))["compared"] is not None
    assert handlers.compare_runs(session, event(runs=[1, 99]))["compared"] is None


@pytest.mark.parametrize(
    "told", [None, {}, "run index kind", {"run": [1], "index": {}, "runs": [[1]], "token_id": "1"}]
)
def test_a_call_that_the_page_did_not_make_is_answered_too(told, picture_file):
    session = make_visit()
    run_page(session, picture_file)
    call = gr.EventData(None, told)
    assert handlers.submit_branch(session, call)["kind"] == "error"
    assert decoded(handlers.show_run(session, call)).status["kind"] == "error"
    for looking in (handlers.inspect_token, handlers.image_shares):
        assert list(looking(session, call))[-1][0]["kind"] == "error"
    assert handlers.compare_runs(session, call)["compared"] is None
    assert handlers.download_objects(session, call) == handlers.apply_task(session, "a", call) == gr.skip()
    assert handlers.submit_example(session, call, None, *DECODING.values()) == (gr.skip(),) * 3
    assert answer(session) == [PageUpdate(*[gr.skip()] * 5)]


# Looking inside, files


def test_looking_inside_shows_the_token_that_was_asked_for(picture_file, monkeypatch):
    monkeypatch.setattr(lens, "inspect", fake_inspection)
    monkeypatch.setattr(lens, "image_shares", fake_image_shares)
    session = make_visit()
    run_page(session, picture_file)
    _, inspect = list(handlers.inspect_token(session, event(run=1, index=1)))[-1]
    assert (inspect["run"], inspect["index"], inspect["attention"][0][0][1]) == (1, 1, 0.5)
    _, shares = list(handlers.image_shares(session, event(run=1)))[-1]
    assert shares == {"run": 1, "shares": [0.5, 0.5, 0.5]}
    for unknown in ({"run": 9, "index": 0}, {"run": 1, "index": "0"}):
        status, inspect = list(handlers.inspect_token(session, event(**unknown)))[-1]
        assert status["kind"] == "error" and inspect == gr.skip()


def import_file(session: Session, folder: Path, text: str) -> dict | str:
    (folder / "run.json").write_text(text, encoding="utf-8")
    return handlers.import_run(session, upload(folder / "run.json"), None, "caption en")


def test_a_run_is_exported_and_imported(picture_file, tmp_path):
    session = make_visit()
    assert handlers.export_run(session)[1] == gr.skip()  # there is none yet
    run_page(session, picture_file)
    _, file = handlers.export_run(session)
    assert file["name"] == "run-1.json"
    other = make_visit()
    update = decoded(import_file(other, tmp_path, file["text"]))
    assert [token["piece"] for token in update.token_strip["tokens"]] == ["␣a", "␣cat", "<eos>"]
    assert update.runs["runs"][0]["imported"] and update.image_view["width"] == 64
    handlers.submit_branch(other, event(run=1, index=0, token_id=1))
    assert "␣other" in shown_pieces(answer(other))
    bad = decoded(import_file(other, tmp_path, "{}"))
    assert bad.status["kind"] == "error" and bad.token_strip == gr.skip()


def test_another_model_s_run_is_shown_but_not_continued(picture_file, tmp_path):
    session = make_visit()
    run_page(session, picture_file)
    text = handlers.export_run(session)[1]["text"].replace('"name": "scripted"', '"name": "other"')
    import_file(session, tmp_path, text)
    handlers.submit_branch(session, event(run=2, index=0, token_id=1))
    assert "made by other" in answer(session)[-1].status["text"]


def processor_of_side(side: int) -> SimpleNamespace:
    changes = {"image_size": side, "num_image_tokens": 4, "resize": partial(resize, size=side)}
    return SimpleNamespace(**{**vars(PROCESSOR), **changes})


def test_another_model_is_asked_about_the_picture_on_the_page_as_it_sees_it(picture_file, tmp_path):
    session = make_visit()
    run_page(session, picture_file)
    text = handlers.export_run(session)[1]["text"]
    smaller = FakeModel()
    smaller.processor = processor_of_side(28)
    for image in (picture_file, None):  # one from a file, and one that came with a run
        other = make_visit(FakeModel(), ready_host(smaller, "smaller"))
        if image:
            handlers.show_image(other, upload(image))
        else:
            import_file(other, tmp_path, text)
        handlers.choose_model(other, "smaller")
        (image_view_state,) = [update.image_view for update in run_page(other, image) if update.image_view != gr.skip()]
        assert (image_view_state["width"], image_view_state["side"], image_view_state["patches"]) == (64, 28, 4)
        model_input, wanted = (
            smaller.requests[-1]["image"],
            model_input_image(open_image(picture_file), smaller.processor),
        )
        difference = np.abs(np.asarray(model_input, dtype=int) - np.asarray(wanted))
        assert difference.max() <= (0 if image else 8)  # what is shown is a JPEG file


def test_a_run_is_shown_as_the_model_reads_it_that_made_it(picture_file, tmp_path):
    second = ready_host(FakeModel(SEGMENTED), "second")
    second.mask_decoder = MaskDecoder.load(BUNDLED_MASKS)
    capped = SimpleNamespace(final_logit_softcapping=30.0)
    second.model.config = SimpleNamespace(text_config=capped)
    session = make_visit(FakeModel(), second)
    handlers.choose_model(session, "second")
    assert all(
        update.token_strip["soft_capped"]
        for update in run_page(session, picture_file)
        if update.token_strip != gr.skip()
    )
    text = handlers.export_run(session)[1]["text"]
    handlers.choose_model(session, "scripted")
    preview = decoded(handlers.show_run(session, event(run=1)))
    assert preview.objects["objects"][0]["mask"] and preview.token_strip["soft_capped"]
    assert '"counts"' in handlers.download_objects(session, event(run=1, kind="coco"))["text"]
    other = make_visit()
    other.served_model.mask_decoder = second.mask_decoder  # it reads the codes of its own model only
    preview = decoded(import_file(other, tmp_path, text))
    assert (
        preview.objects["has_codes"]
        and preview.image_view["patches"] is None
        and not preview.token_strip["soft_capped"]
    )
    assert '"counts"' not in handlers.download_objects(other, event(run=1, kind="coco"))["text"]


SEGMENTED = (*(f"<loc{place:04}>" for place in (256, 512, 768, 1023)), *["<seg010>"] * 16, "▁cat")


def folder_with_masks(folder: Path, file: Path, tmp_path: Path) -> Path:
    """A copy of a checkpoint's folder with a mask decoder in it."""
    copied = shutil.copytree(folder, tmp_path / "with-masks")
    shutil.copy(file, copied / file.name)
    return copied


def test_a_decoder_beside_the_model_turns_sixteen_codes_into_a_mask(
    tiny_checkpoint, vae_oid_file, picture_file, tmp_path
):
    folder = folder_with_masks(tiny_checkpoint, vae_oid_file, tmp_path)
    (served_model,) = cli.build_served_models(
        cli.build_parser().parse_args(["--model", str(folder), "--device", "cpu"])
    )
    served_model.start()
    assert served_model._finished.wait(30) and served_model.mask_decoder is not None
    served_model.model = FakeModel(SEGMENTED)
    last = run_page(Session((served_model,)), picture_file)[-1].objects
    assert last["objects"][0]["mask"].startswith("data:image/png") and not last["has_codes"]
    assert "mask" in run_api(served_model, picture_file)[-1]["detections"][0]


def test_without_a_decoder_there_are_boxes_and_a_sentence(picture_file):
    def refuse() -> Path:
        raise OSError("offline")

    served_model = ServedModel("hub", lambda progress: FakeModel(SEGMENTED), [], refuse)
    served_model.start()
    last = run_page(Session((served_model,)), picture_file)[-1].objects
    assert last["objects"][0]["mask"] is None and last["has_codes"]  # of which the table makes a sentence
    assert len(last["objects"][0]["box"]) == 4


def test_objects_are_downloaded(picture_file):
    session = make_visit(FakeModel(("<loc0256>", "<loc0512>", "<loc0768>", "<loc1023>", "▁cat")))
    run_page(session, picture_file)
    png, coco = (handlers.download_objects(session, event(run=1, kind=kind)) for kind in ("png", "coco"))
    assert png["type"] == "image/png" and '"bbox"' in coco["text"] and png["serial"] != coco["serial"]
    assert handlers.download_objects(session, event(run=9, kind="png")) == gr.skip()


# The form


def test_a_chosen_picture_is_shown_with_what_the_model_sees(picture_file, tmp_path):
    session = make_visit()
    status, image_view_state = handlers.show_image(session, upload(picture_file))
    assert status == gr.skip() and image_view_state["side"] == 56 and image_view_state["patches"] == 16
    assert handlers.show_image(session, None) == (gr.skip(), None)
    (tmp_path / "text.png").write_text("no picture")
    status, image_view_state = handlers.show_image(session, upload(tmp_path / "text.png"))
    assert status["kind"] == "error" and image_view_state is None


def test_a_task_chip_only_writes_the_prompt():
    session = make_visit()
    chips = handlers.show_model(session)[1]["chips"]
    segment = next(index for index, chip in enumerate(chips) if chip["label"] == "segment")
    assert handlers.apply_task(session, "detect cat", event(index=segment)) == "segment cat"
    for unknown in (-1, 99, "1", None):
        assert handlers.apply_task(session, "detect cat", event(index=unknown)) == gr.skip()
    assert not session.served_model.model.requests


def test_a_picture_that_came_with_a_run_is_asked_about_like_a_chosen_one(picture_file, tmp_path):
    session = make_visit()
    run_page(session, picture_file)
    other = make_visit()
    import_file(other, tmp_path, handlers.export_run(session)[1]["text"])
    assert shown_pieces(run_page(other, None, "detect cat")) == ["␣a", "␣cat", "<eos>"]


def test_an_example_fills_the_form_in_and_runs(picture_file):
    session = make_visit()
    session.examples = (Example(picture_file, "detect cat", "me"),)
    image_view_state, prompt, _ = handlers.submit_example(session, event(index=0), None, *DECODING.values())
    assert (image_view_state["width"], prompt) == (64, "detect cat")
    assert shown_pieces(answer(session)) == ["␣a", "␣cat", "<eos>"]
    assert len(run_page(session, None, "detect dog")) > 2  # its picture stays for what is asked next
    handlers.clear_image(session)
    assert run_page(session, None)[-1].status["text"] == "Choose a picture first."
    assert handlers.submit_example(session, event(index=1), None, *DECODING.values()) == (gr.skip(),) * 3


# The model's state


def test_requests_wait_while_the_model_loads(picture_file, monkeypatch):
    monkeypatch.setattr(served_models, "WAIT_INTERVAL_S", 0.02)
    may_load = threading.Event()
    served_model = make_host(lambda progress: may_load.wait(10) and FakeModel())
    events = api.answer_over_api((served_model,), upload(picture_file), "caption en", **DECODING)
    assert [next(events)["step"] for _ in range(4)] == [None] * 4
    assert served_model.loading and served_model.describe()["state"] == "loading"
    may_load.set()
    assert [event["step"]["piece"] for event in events if event["step"]] == ["▁a", "▁cat", "<eos>"]
    assert served_model.describe()["state"] == "ready"


def test_the_badge_follows_the_loading_and_then_rests():
    may_load = threading.Event()
    served_model = make_host(lambda progress: progress("loading", 1, 4) or (may_load.wait(10) and FakeModel()))
    session = Session((served_model,))
    while "25%" not in messages.format_message(served_model.status):
        time.sleep(0.01)
    status, chips, timer = handlers.show_model(session)
    assert timer.active and not chips["chips"] and messages.format_message(status) == "Loading scripted: 25%"
    may_load.set()
    assert served_model._finished.wait(10)
    status, chips, timer = handlers.show_model(session)
    assert chips["note"] == tasks.BUNDLED_NOTE
    assert status == messages.status("done", "scripted · 0 K · float32 · cpu") and not timer.active
    assert chips["chips"]


def test_models_of_the_list_are_loaded_when_they_are_chosen(picture_file):
    second = ServedModel("second", lambda progress: FakeModel(("▁second",)))
    session = make_visit(FakeModel(("▁first",)), second)
    assert shown_pieces(run_page(session, picture_file)) == ["␣first", "<eos>"]
    assert second.describe()["state"] == "not loaded"
    assert second.describe()["message"] == "second is loaded once it is asked for"
    handlers.choose_model(session, "second")
    assert shown_pieces(run_page(session, picture_file)) == ["␣second", "<eos>"]
    with pytest.raises(gr.Error, match="allowed are scripted, second"):
        list(api.answer_over_api(session.served_models, upload(picture_file), "a", **DECODING, model="third"))


def test_a_mask_decoder_that_cannot_be_had_is_no_reason_not_to_answer(tmp_path):
    def refuse() -> Path:
        raise OSError("offline")

    found, fetched, missing = (
        ServedModel("m", lambda progress: FakeModel(), files, fetch)
        for files, fetch in (
            ([tmp_path / "none.npz", BUNDLED_MASKS], refuse),
            ([tmp_path / "none.npz"], lambda: BUNDLED_MASKS),
            ([tmp_path / "none.npz"], refuse),
        )
    )
    for served_model in (found, fetched, missing):
        served_model.start()
        assert served_model._finished.wait(10) and served_model.state == "ready"
    assert found.mask_decoder and fetched.mask_decoder and missing.mask_decoder is None


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

    served_model = make_host(fail, name="broken")
    assert served_model._finished.wait(10)
    said = messages.format_message(served_model.status)
    assert "broken could not be loaded" in said and message in said and "secret" not in said
    assert run_page(Session((served_model,)), picture_file)[-1].status["text"] == said


def test_without_a_model_the_page_says_how_to_name_one(picture_file, monkeypatch, tmp_path):
    monkeypatch.setattr(ui, "ASSETS", tmp_path)
    (served_model,) = cli.build_served_models(cli.build_parser().parse_args([]))
    served_model.start()
    assert run_page(Session((served_model,)), picture_file)[-1].status == messages.status("error", messages.NO_MODEL)
    with pytest.raises(gr.Error, match="--model"):
        run_api(served_model, picture_file)


def test_models_come_from_the_command_line_or_the_environment(monkeypatch):
    def names(*arguments: str) -> list[str]:
        return [served_model.name for served_model in cli.build_served_models(cli.build_parser().parse_args(arguments))]

    monkeypatch.setenv("MODEL_ID", "someone/from-environment")
    assert names() == ["someone/from-environment"]
    assert names("--model", "someone/named", "someone/other") == ["someone/named", "someone/other"]
    monkeypatch.setenv("MODEL_ID", "")
    assert cli.build_parser().parse_args([]).model == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--model", "~nobody-of-this-name/x"], "no folder and no hub id"), (["--mask-decoder", "none.npz"], "no such")],
)
def test_what_can_be_no_model_is_said_at_the_start(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["app.py", *arguments])
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    with pytest.raises(SystemExit):
        cli.main()
    assert message in capsys.readouterr().err


def test_a_folder_is_shown_by_its_own_name_only(tiny_checkpoint):
    (served_model,) = cli.build_served_models(cli.build_parser().parse_args(["--model", str(tiny_checkpoint)]))
    assert served_model.name == "tiny-random"


def test_the_bundled_model_s_folder_goes_by_its_name_beside_another(tiny_checkpoint):
    folder = str(checkpoint.BUNDLED_FOLDER)
    served_models = cli.build_served_models(cli.build_parser().parse_args(["--model", folder, str(tiny_checkpoint)]))
    assert [served_model.name for served_model in served_models] == [cli.BUNDLED_NAME, "tiny-random"]


# Wiring


@pytest.fixture(scope="module")
def config() -> dict:
    return ui.build_app(ready_host(FakeModel())).get_config_file()


def test_only_the_api_s_endpoints_are_public(config):
    public = {event["api_name"] for event in config["dependencies"] if event["api_visibility"] == "public"}
    assert public == {"generate", "inspect", "models"}


def test_no_template_holds_data(config):
    parts = [component["props"] for component in config["components"] if component["type"] == "html"]
    assert len(parts) >= 10
    assert {props["html_template"] for props in parts} == {'<div class="part"></div>'}


def test_every_event_that_runs_the_model_shares_one_queue():
    blocks = ui.build_app(ready_host(FakeModel()))
    running = (
        handlers.run_pending,
        handlers.inspect_token,
        handlers.image_shares,
        api.answer_over_api,
        api.inspect_over_api,
    )
    events = [event for event in blocks.fns.values() if getattr(event.fn, "func", event.fn) in running]
    assert len(events) == 8  # a run has four ways to begin
    assert {(event.concurrency_id, event.concurrency_limit) for event in events} == {("model", 1)}


def test_a_visit_begins_with_the_server_s_own_models():
    session = make_visit()
    copied = copy.deepcopy(session)
    assert copied.served_model is session.served_model and copied.history is not session.history


# Launched


@pytest.fixture(scope="module")
def client(tiny_checkpoint) -> Iterator[Client]:
    arguments = cli.build_parser().parse_args(["--model", str(tiny_checkpoint), "--device", "cpu"])
    (served_model,) = cli.build_served_models(arguments)
    served_model.start()
    blocks = ui.build_app(served_model)
    server.launch(blocks, prevent_thread_lock=True, quiet=True)
    yield Client(blocks.local_url, verbose=False)
    blocks.close()


def stream(client: Client, image: Path, **changes) -> list[dict]:
    request = {"image": handle_file(image), "prompt": "detect cat", "max_new_tokens": 6, "top_n": 4}
    job = client.submit(**{**request, **changes}, api_name="/generate")
    return list(job)


def test_a_stream_through_the_client_is_an_event_a_token_in_order(client, picture_file, tiny_checkpoint):
    events = [event for event in stream(client, picture_file) if event["step"]]
    assert [event["step"]["index"] for event in events] == list(range(len(events)))
    assert all(event["step"]["top"][0]["token_id"] == event["step"]["token_id"] for event in events)
    assert all(len(event["step"]["top"]) == 4 for event in events)
    assert "".join(event["step"]["text_delta"] for event in events) == events[-1]["text"]
    result = paligemma.load(tiny_checkpoint).generate(open_image(picture_file), "detect cat", max_new_tokens=6, top_n=4)
    assert [event["step"]["token_id"] for event in events] == list(result.token_ids)
    assert [event["step"]["logit"] for event in events] == [step.logit for step in result.steps]
    assert events[-1]["finish_reason"] == result.finish_reason
    assert set(events[-1]["timing"]) == {"image_s", "first_token_s", "total_s", "tokens_per_s"}


def test_forced_ids_begin_the_answer(client, picture_file):
    free = [event["step"]["token_id"] for event in stream(client, picture_file) if event["step"]]
    other = stream(client, picture_file, forced_ids=[*free[:2], free[0]])
    assert [event["step"]["token_id"] for event in other if event["step"]][:3] == [*free[:2], free[0]]


def test_the_same_seed_gives_the_same_answer_over_the_api(client, picture_file):
    first, second = (stream(client, picture_file, temperature=1.0, seed=5)[-1]["text"] for _ in range(2))
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


def call_raw(client: Client, inputs: list) -> str:
    """What the server streams for /generate, asked without a client that would upload files first."""
    url = client.src.rstrip("/") + "/gradio_api/call/generate"
    body = json.dumps({"data": inputs}).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        event_id = json.load(answer)["event_id"]
    with urllib.request.urlopen(f"{url}/{event_id}") as answer:
        return answer.read().decode()


@pytest.mark.parametrize("meta", [{}, {"meta": {"_type": "gradio.FileData"}}, {"meta": None}, {"meta": {}}])
@pytest.mark.parametrize("path", ["/etc/passwd", "/etc/nothing", str(paths.ASSETS / "examples" / "cats.png")])
def test_the_server_opens_no_file_that_was_not_uploaded(client, path, meta):
    """Not even a picture of its own, and whether the client marks the path as a file or not."""
    answer = call_raw(client, [{"path": path, **meta}, "a", 2, 0, 0, 1, None, 1, None, None])
    assert "event: error" in answer
    assert '"token_id"' not in answer and Path(path).name not in answer


def test_a_step_is_inspected_over_the_api(client, picture_file, tiny_checkpoint):
    ids = [event["step"]["token_id"] for event in stream(client, picture_file) if event["step"]]
    model_input = client.predict(
        image=handle_file(picture_file), prompt="detect cat", token_ids=ids, index=2, api_name="/inspect"
    )
    found = lens.inspect(paligemma.load(tiny_checkpoint), open_image(picture_file), "detect cat", ids, 2)
    assert model_input["grid"] == list(found.grid)
    assert model_input["attention"][1][0] == pytest.approx(found.attention[1, 0].tolist(), abs=1e-5)
    assert model_input["lens"][-1]["token_id"] == found.lens[-1].token_id


def test_every_input_of_the_api_says_its_type(client):
    """MCP clients refuse a tool, all of it, for one input without."""
    endpoints = client.view_api(return_format="dict", print_info=False)["named_endpoints"]
    assert set(endpoints) == {"/generate", "/inspect", "/models"}
    types = {
        field["parameter_name"]: field["type"].get("type") for one in endpoints.values() for field in one["parameters"]
    }
    assert types["forced_ids"] == types["token_ids"] == "array" and types["seed"] == "integer"
    assert all(types[name] for name in types if name != "image")  # that is a file's schema


def test_as_mcp_tools_the_api_answers_and_takes_no_path_of_the_server():
    pytest.importorskip("mcp", reason="needs gradio[mcp]")
    blocks = ui.build_app(ready_host(FakeModel()))
    server.launch(blocks, prevent_thread_lock=True, quiet=True, mcp_server=True)
    try:
        names, listed, refused = asyncio.run(talk_to_tools(blocks.local_url + "gradio_api/mcp/"))
    finally:
        blocks.close()
    assert set(names) == {"generate", "inspect", "models"}
    assert "scripted" in str(listed.content) and refused.isError


async def talk_to_tools(url: str) -> tuple:
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
