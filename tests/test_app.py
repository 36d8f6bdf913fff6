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
from fake_model import PROCESSOR, FakeModel, fake_inspection, fake_picture_shares
from gradio_client import Client, handle_file
from gradio_client.exceptions import AppError

import app
import paligemma
from paligemma import checkpoint, lens
from paligemma.masks import MaskDecoder
from paligemma.processing import image_to_pixels
from paligemma.view import models, runner, serving, tasks, words
from paligemma.view.examples import Example
from paligemma.view.models import ModelHost
from paligemma.view.picture import seen_picture
from paligemma.view.runner import Update
from paligemma.view.visit import Visit

ROOT = Path(__file__).parents[1]
BUNDLED_MASKS = ROOT / "assets/demo/mask_decoder.safetensors"
DECODING = {"max_new_tokens": 16, "temperature": 0, "top_k": 0, "top_p": 1, "seed": None, "top_n": 3}


def make_host(load: Callable | None, name: str = "scripted") -> ModelHost:
    host = ModelHost(name, load)
    host.start()
    return host


def ready_host(model: FakeModel, name: str = "scripted") -> ModelHost:
    host = make_host(lambda progress: model, name)
    assert host._finished.wait(10)
    return host


def make_visit(model: FakeModel | None = None, *others: ModelHost) -> Visit:
    return Visit((ready_host(model or FakeModel()), *others))


def upload(picture: Path | None) -> dict | None:
    return {"path": str(picture), "meta": {"_type": "gradio.FileData"}} if picture else None


def ask(visit: Visit, picture: Path | None, prompt: str = "caption en", **changes) -> dict:
    return app.ask(visit, upload(picture), prompt, *{**DECODING, **changes}.values())


def decoded(news: str | dict) -> Update:
    """What the page is told, with `gr.skip()` for what it is not."""
    changes = {} if news == gr.skip() else json.loads(news)
    return Update(*(changes.get(name, gr.skip()) for name in Update._fields))


def answer(visit: Visit) -> list[Update]:
    return list(map(decoded, app.answer_on_page(visit)))


def run_page(visit: Visit, picture: Path | None, prompt: str = "caption en", **changes) -> list[Update]:
    ask(visit, picture, prompt, **changes)
    return answer(visit)


def run_api(host: ModelHost, picture: Path | None, prompt: str = "caption en", **changes) -> list[dict]:
    return list(app.answer_over_api((host,), upload(picture), prompt, **{**DECODING, **changes}))


def shown_pieces(updates: list[Update]) -> list[str]:
    """What the strip shows once all updates have reached it."""
    pieces: list[str] = []
    for update in updates:
        if update.strip != gr.skip():
            assert update.strip["start"] <= len(pieces)
            pieces[update.strip["start"] :] = [token["piece"] for token in update.strip["tokens"]]
    return pieces


def event(**fields) -> gr.EventData:
    return gr.EventData(None, fields)


# Handlers


def test_the_strip_gets_each_token_once(picture_file, monkeypatch):
    monkeypatch.setattr(runner, "UPDATE_INTERVAL_S", 0)
    updates = run_page(make_visit(FakeModel(("▁a", "▁cat"))), picture_file)
    added = [[token["piece"] for token in update.strip["tokens"]] for update in updates if update.strip != gr.skip()]
    assert added == [[], ["␣a"], ["␣cat"], ["<eos>"]]
    assert words.spoken(updates[-1].notice).startswith("The answer is complete · 3 tokens · picture 0.01 s")
    assert updates[-1].strip["done"]


def test_news_are_numbered_and_what_was_missed_can_be_had_again(picture_file, monkeypatch):
    monkeypatch.setattr(runner, "UPDATE_INTERVAL_S", 0)
    visit = make_visit()
    assert app.send_all(visit) == gr.skip()  # there is no run yet
    ask(visit, picture_file)
    numbers = [json.loads(news)["number"] for news in app.answer_on_page(visit) if news != gr.skip()]
    assert numbers == list(range(1, len(numbers) + 1))
    again = decoded(app.send_all(visit))
    assert len(again.strip["tokens"]) == 3 and again.strip["done"] and again.scene["width"] == 64


def test_the_page_is_updated_at_most_twenty_times_a_second(picture_file):
    updates = run_page(make_visit(FakeModel(("▁a",) * 200, seconds_a_token=0.001)), picture_file)
    assert len(updates) < 100
    assert len(shown_pieces(updates)) == 201


def test_the_picture_and_the_runs_are_shown_as_a_run_begins(picture_file):
    visit = make_visit()
    updates = run_page(visit, picture_file, "detect cat")
    (scene,) = [update.scene for update in updates if update.scene != gr.skip()]
    assert (scene["width"], scene["height"], scene["side"]) == (64, 48, 56)
    assert updates[-1].runs["runs"][0]["prompt"] == "detect cat"
    again = run_page(visit, picture_file)
    assert all(update.scene == gr.skip() for update in again)  # it is there already
    assert [row["number"] for row in again[-1].runs["runs"]] == [1, 2]


def test_objects_are_sent_only_when_they_change(picture_file, monkeypatch):
    monkeypatch.setattr(runner, "UPDATE_INTERVAL_S", 0)
    pieces = ("<loc0256>", "<loc0512>", "<loc0768>", "<loc1023>", "▁cat", "▁;", "▁", "▁a", "▁b")
    updates = run_page(make_visit(FakeModel(pieces)), picture_file)
    sent = [len(update.objects["objects"]) for update in updates if update.objects != gr.skip()]
    assert len(sent) < len(pieces) and sent[0] == 0 and sent[-1] == 1


def both_handlers(visit: Visit, picture: Path | None) -> tuple[Iterator, Iterator]:
    return app.answer_on_page(visit), app.answer_over_api(visit.hosts, upload(picture), "caption en", **DECODING)


def test_the_first_event_comes_before_any_work():
    visit = Visit(())  # no model: whatever is done with it fails
    ask(visit, None)
    for events in (app.answer_on_page(visit), app.answer_over_api((), None, "caption en", **DECODING)):
        assert next(events) is not None
    for looking in (app.look_inside, app.picture_shares):
        assert next(looking(visit, event())) is not None
    assert next(app.inspect_over_api((), None, "", [], 0)) is None


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
    visit = make_visit()
    last = run_page(visit, **request)[-1]
    assert last.notice["kind"] == "error" and message in last.notice["text"]
    assert last.strip == gr.skip()  # what stands there stays
    with pytest.raises(gr.Error, match=message):
        run_api(visit.host, **request)
    assert not visit.host.model.requests


def test_what_was_written_stays_when_the_model_fails_half_way(picture_file, monkeypatch):
    monkeypatch.setattr(runner, "UPDATE_INTERVAL_S", 0)
    model = FakeModel(("▁a", "▁cat"))
    written = model.stream
    monkeypatch.setattr(model, "stream", lambda *args, **kwargs: break_after(1, written(*args, **kwargs)))
    visit = make_visit(model)
    updates = run_page(visit, picture_file)
    assert "RuntimeError" in updates[-1].notice["text"] and "secret" not in updates[-1].notice["text"]
    assert shown_pieces(updates) == ["␣a"]
    assert visit.history.current.finish_reason == "stopped" and visit.control.finished


def break_after(count: int, stream: Iterator) -> Iterator:
    yield from (next(stream) for _ in range(count))
    raise RuntimeError("secret")


@pytest.mark.parametrize("which", [0, 1])
def test_closing_a_handler_closes_the_model_s_stream(which, picture_file):
    model = FakeModel(("▁a",) * 50, seconds_a_token=0.06)
    visit = make_visit(model)
    ask(visit, picture_file)
    events = both_handlers(visit, picture_file)[which]
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
    visit = make_visit()
    run_page(visit, picture_file, temperature=1.0)
    seed = visit.history.current.request["seed"]
    assert isinstance(seed, int) and visit.host.model.requests[0]["seed"] == seed


def test_the_api_sends_an_event_a_token_and_closes_with_objects_and_times(picture_file):
    events = run_api(ready_host(FakeModel(("▁a", "▁cat"))), picture_file)
    assert events[0]["step"] is None
    assert [event["step"]["index"] for event in events[1:]] == [0, 1, 2]
    assert [event["finish_reason"] for event in events] == [None, None, None, "eos"]
    assert [set(event) for event in events[:3]] == [{"text", "step", "finish_reason"}] * 3
    assert set(events[3]) - set(events[2]) == {"detections", "timing"}


def test_the_page_s_numbers_are_the_api_s(picture_file):
    visit = make_visit(FakeModel(("▁a", "▁cat")))
    run_page(visit, picture_file)
    events = [event["step"] for event in run_api(visit.host, picture_file) if event["step"]]
    entries = decoded(app.send_all(visit)).strip["tokens"]
    for entry, step in zip(entries, events, strict=True):
        assert (entry["id"], entry["prob"], entry["entropy"]) == (step["token_id"], step["prob"], step["entropy"])
        assert [row["id"] for row in entry["rows"]] == [candidate["token_id"] for candidate in step["top"]]


# Stopping, stepping, branching


def test_stop_ends_a_run_behind_the_token_that_it_is_at(picture_file, monkeypatch):
    monkeypatch.setattr(runner, "UPDATE_INTERVAL_S", 0)
    model = FakeModel(("▁a",) * 50)
    visit = make_visit(model)
    assert app.ask_to_stop(visit) == gr.skip()  # nothing runs
    ask(visit, picture_file)
    updates = []
    for update in map(decoded, app.answer_on_page(visit)):
        updates.append(update)
        if len(shown_pieces(updates)) == 3 and not visit.control.stop_asked:
            assert app.ask_to_stop(visit)["text"] == "Stopping after this token"
    assert model.closed_after == 4
    assert words.spoken(updates[-1].notice) == "Stopped · 4 tokens"
    assert len(shown_pieces(updates)) == 4
    assert app.ask_to_stop(visit) == gr.skip()


def test_a_run_that_was_stopped_before_its_turn_does_nothing(picture_file):
    visit = make_visit()
    ask(visit, picture_file)
    assert app.ask_to_stop(visit) == words.notice("idle", "Stopped")  # at once: the line may be long
    assert app.ask_to_stop(visit) == gr.skip()
    assert answer(visit) == [Update(*[gr.skip()] * 5)] and not visit.host.model.requests
    step_once(visit, picture_file)  # nothing of it is left to go on from
    assert [len(run.steps) for run in visit.history] == [1]


def test_a_run_that_is_stopped_as_it_takes_its_turn_does_nothing(picture_file):
    visit = make_visit()
    ask(visit, picture_file)
    events = app.answer_on_page(visit)
    next(events)
    assert app.ask_to_stop(visit)["text"] == "Stopping after this token"
    assert decoded(list(events)[-1]).notice["text"] == "Stopped" and not visit.host.model.requests


def test_an_answer_that_is_stopped_at_its_last_token_is_complete(picture_file, monkeypatch):
    model = FakeModel(("▁a",))
    visit = make_visit(model)
    written = model.stream

    def stop_at_the_end(*args, **kwargs) -> Iterator:
        stream = written(*args, **kwargs)
        yield next(stream)
        app.ask_to_stop(visit)
        return (yield from stream)

    monkeypatch.setattr(model, "stream", stop_at_the_end)
    updates = run_page(visit, picture_file)
    assert words.spoken(updates[-1].notice).startswith("The answer is complete · 2 tokens · picture 0.01 s")


def test_of_several_requests_in_line_only_the_newest_runs(picture_file):
    visit = make_visit()
    ask(visit, picture_file, "first")
    control = visit.control
    ask(visit, picture_file, "second")
    assert control.stop_asked and not visit.control.stop_asked
    assert len(answer(visit)) > 2
    assert answer(visit) == [Update(*[gr.skip()] * 5)]
    assert [request["prompt"] for request in visit.host.model.requests] == ["second"]


def test_a_branch_answers_anew_by_id_and_keeps_the_earlier_run(picture_file):
    visit = make_visit(FakeModel(("▁a", "▁cat", "▁b")))
    run_page(visit, picture_file)
    app.ask_for_branch(visit, event(run=1, index=1, token_id=12))
    updates = answer(visit)
    assert visit.host.model.requests[-1]["forced_ids"] == (0, 12)
    assert shown_pieces(updates) == ["␣a", "␣else", "␣b", "<eos>"]
    rows = updates[-1].runs["runs"]
    assert [(row["number"], row["depth"], row["branched_at"], row["piece"]) for row in rows] == [
        (1, 0, None, ""), (2, 1, 2, "␣else"),
    ]  # fmt: skip
    tokens = decoded(app.send_all(visit)).strip["tokens"]
    assert [token["forced"] for token in tokens] == [True, True, False, False]
    assert [token["by_hand"] for token in tokens] == [False, True, False, False]
    assert tokens[1]["chosen"] == 2 and tokens[1]["rows"][2]["id"] == 12


def test_nothing_is_branched_from_what_does_not_exist(picture_file):
    visit = make_visit()
    assert app.ask_for_branch(visit, event(run=9, index=0, token_id=1))["text"] == words.RUN_GONE
    assert answer(visit) == [Update(*[gr.skip()] * 5)]


def step_once(visit: Visit, picture: Path, prompt: str = "caption en") -> list[Update]:
    app.ask_for_step(visit, upload(picture), prompt, *DECODING.values())
    return answer(visit)


def test_one_step_at_a_time_writes_the_same_run_on(picture_file):
    visit = make_visit(FakeModel(("▁a", "▁cat")))
    updates: list[Update] = []
    for count in (1, 2, 3):
        updates += step_once(visit, picture_file)
        assert len(shown_pieces(updates)) == count
    assert [request["forced_ids"] for request in visit.host.model.requests] == [(), (0,), (0, 10)]
    assert len(list(visit.history)) == 1 and visit.history.current.finish_reason == "eos"
    notice = app.ask_for_step(visit, upload(picture_file), "caption en", *DECODING.values())
    assert notice["text"] == "The answer has ended; nothing follows."
    step_once(visit, picture_file, "detect cat")  # another prompt begins another run
    assert len(list(visit.history)) == 2


def test_a_step_that_fails_takes_no_token_away(picture_file, monkeypatch):
    model = FakeModel(("▁a", "▁cat"))
    visit = make_visit(model)
    step_once(visit, picture_file)
    step_once(visit, picture_file)
    written = model.stream
    monkeypatch.setattr(model, "stream", lambda *args, **kwargs: break_after(1, written(*args, **kwargs)))
    assert "RuntimeError" in step_once(visit, picture_file)[-1].notice["text"]
    assert [len(run.steps) for run in visit.history] == [2]
    monkeypatch.undo()
    step_once(visit, picture_file)  # the same run goes on
    assert [len(run.steps) for run in visit.history] == [3]


def run_of_two_tokens(picture: Path) -> Visit:
    """A visit whose one run ended at its largest number of tokens, which is two."""
    visit = make_visit(FakeModel(("▁a", "▁cat", "▁b", "▁c")))
    run_page(visit, picture, max_new_tokens=2)  # which the scripted model does not heed
    run = visit.history.current
    run.steps, run.finish_reason = run.steps[:2], "length"
    return visit


def test_while_one_step_writes_a_run_again_that_keeps_what_it_has(picture_file):
    visit = run_of_two_tokens(picture_file)
    run, before = visit.history.current, copy.copy(visit.history.current)
    app.ask_for_step(visit, upload(picture_file), "caption en", *DECODING.values())
    events = app.answer_on_page(visit)
    while decoded(next(events)).notice["text"] != "One step on":
        pass
    assert visit.history.current is run and run.steps == before.steps
    app.ask_to_stop(visit)
    list(events)
    assert visit.history.current == before  # its reason and its times too


def test_a_run_that_went_on_can_be_branched_at_its_new_tokens(picture_file):
    visit = run_of_two_tokens(picture_file)
    for count in (3, 4):
        step_once(visit, picture_file)
        run = visit.history.current
        assert (len(run.steps), run.request["max_new_tokens"]) == (count, count)
        assert (run.finish_reason, run.timing) == ("stopped", None)
    app.ask_for_branch(visit, event(run=1, index=3, token_id=31))
    assert shown_pieces(answer(visit))[:4] == ["␣a", "␣cat", "␣b", "␣other"]
    request = visit.host.model.requests[-1]
    assert len(request["forced_ids"]) == request["max_new_tokens"] == 4


def test_what_found_the_line_full_is_not_asked_later(picture_file):
    visit = make_visit(FakeModel(("▁a", "▁cat")))
    run_page(visit, picture_file)
    ask(visit, picture_file, "detect cat")
    app.tell_line_is_full(visit)
    assert [update for update in answer(visit) if update.notice != gr.skip()] == []
    step_once(visit, picture_file, "detect cat")  # the run on the page was asked something else
    assert [len(run.steps) for run in visit.history] == [3, 1]


def test_a_request_waits_for_a_model_no_longer_than_it_may_take(picture_file):
    never = threading.Event()
    host = ModelHost("slow", lambda progress: never.wait(30), limits=serving.Limits(seconds=0))
    host.start()
    visit = Visit((host,))
    assert "slow is still loading" in run_page(visit, picture_file)[-1].notice["text"]
    never.set()


def test_models_that_go_by_one_name_are_refused(tmp_path):
    folders = [tmp_path / parent / "model" for parent in ("a", "b")]
    for folder in folders:
        folder.mkdir(parents=True)
    arguments = app.build_parser().parse_args(["--model", *map(str, folders)])
    with pytest.raises(ValueError, match="go by one name: model, model"):
        app.make_hosts(arguments)


def test_one_step_writes_an_example_or_an_imported_run_on(picture_file, tmp_path):
    visit, other = make_visit(FakeModel(("▁a", "▁cat"))), make_visit(FakeModel(("▁a", "▁cat")))
    step_once(visit, picture_file)
    import_file(other, tmp_path, app.export_run(visit)[1]["text"])
    app.ask_for_step(other, None, "caption en", *DECODING.values())
    answer(other)
    visit.examples = (Example(picture_file, "detect cat", "me"),)
    app.ask_for_example(visit, event(index=0), None, *DECODING.values())
    answer(visit)
    notice = app.ask_for_step(visit, None, "detect cat", *DECODING.values())
    assert notice["text"] == "The answer has ended; nothing follows."
    assert [len(run.steps) for run in other.history] == [2]


def test_an_earlier_run_is_shown_again_as_it_was(picture_file):
    visit = make_visit(FakeModel(("▁a", "▁cat")))
    run_page(visit, picture_file)
    run_page(visit, picture_file, "detect cat")
    update = decoded(app.show_run(visit, event(run=1)))
    assert update.strip["run"] == 1 and update.strip["start"] == 0 and len(update.strip["tokens"]) == 3
    assert [row["current"] for row in update.runs["runs"]] == [True, False]
    assert decoded(app.show_run(visit, event(run=99))).notice["text"] == words.RUN_GONE
    assert app.compare_runs(visit, event(runs=[1, 2]))["compared"] is not None
    assert app.compare_runs(visit, event(runs=[1, 99]))["compared"] is None


@pytest.mark.parametrize(
    "told", [None, {}, "run index kind", {"run": [1], "index": {}, "runs": [[1]], "token_id": "1"}]
)
def test_a_call_that_the_page_did_not_make_is_answered_too(told, picture_file):
    visit = make_visit()
    run_page(visit, picture_file)
    call = gr.EventData(None, told)
    assert app.ask_for_branch(visit, call)["kind"] == "error"
    assert decoded(app.show_run(visit, call)).notice["kind"] == "error"
    for looking in (app.look_inside, app.picture_shares):
        assert list(looking(visit, call))[-1][0]["kind"] == "error"
    assert app.compare_runs(visit, call)["compared"] is None
    assert app.download_objects(visit, call) == app.write_prompt(visit, "a", call) == gr.skip()
    assert app.ask_for_example(visit, call, None, *DECODING.values()) == (gr.skip(),) * 3
    assert answer(visit) == [Update(*[gr.skip()] * 5)]


# Looking inside, files


def test_looking_inside_shows_the_token_that_was_asked_for(picture_file, monkeypatch):
    monkeypatch.setattr(app.lens, "inspect", fake_inspection)
    monkeypatch.setattr(app.lens, "picture_shares", fake_picture_shares)
    visit = make_visit()
    run_page(visit, picture_file)
    _, look = list(app.look_inside(visit, event(run=1, index=1)))[-1]
    assert (look["run"], look["index"], look["attention"][0][0][1]) == (1, 1, 0.5)
    _, shares = list(app.picture_shares(visit, event(run=1)))[-1]
    assert shares == {"run": 1, "shares": [0.5, 0.5, 0.5]}
    for unknown in ({"run": 9, "index": 0}, {"run": 1, "index": "0"}):
        notice, look = list(app.look_inside(visit, event(**unknown)))[-1]
        assert notice["kind"] == "error" and look == gr.skip()


def import_file(visit: Visit, folder: Path, text: str) -> dict | str:
    (folder / "run.json").write_text(text, encoding="utf-8")
    return app.import_run(visit, upload(folder / "run.json"), None, "caption en")


def test_a_run_is_exported_and_imported(picture_file, tmp_path):
    visit = make_visit()
    assert app.export_run(visit)[1] == gr.skip()  # there is none yet
    run_page(visit, picture_file)
    _, file = app.export_run(visit)
    assert file["name"] == "run-1.json"
    other = make_visit()
    update = decoded(import_file(other, tmp_path, file["text"]))
    assert [token["piece"] for token in update.strip["tokens"]] == ["␣a", "␣cat", "<eos>"]
    assert update.runs["runs"][0]["imported"] and update.scene["width"] == 64
    app.ask_for_branch(other, event(run=1, index=0, token_id=1))
    assert "␣other" in shown_pieces(answer(other))
    bad = decoded(import_file(other, tmp_path, "{}"))
    assert bad.notice["kind"] == "error" and bad.strip == gr.skip()


def test_another_model_s_run_is_shown_but_not_continued(picture_file, tmp_path):
    visit = make_visit()
    run_page(visit, picture_file)
    text = app.export_run(visit)[1]["text"].replace('"name": "scripted"', '"name": "other"')
    import_file(visit, tmp_path, text)
    app.ask_for_branch(visit, event(run=2, index=0, token_id=1))
    assert "made by other" in answer(visit)[-1].notice["text"]


def processor_of_side(side: int) -> SimpleNamespace:
    changes = {"image_size": side, "num_image_tokens": 4, "image_to_pixels": partial(image_to_pixels, size=side)}
    return SimpleNamespace(**{**vars(PROCESSOR), **changes})


def test_another_model_is_asked_about_the_picture_on_the_page_as_it_sees_it(picture_file, tmp_path):
    visit = make_visit()
    run_page(visit, picture_file)
    text = app.export_run(visit)[1]["text"]
    smaller = FakeModel()
    smaller.processor = processor_of_side(28)
    for picture in (picture_file, None):  # one from a file, and one that came with a run
        other = make_visit(FakeModel(), ready_host(smaller, "smaller"))
        if picture:
            app.show_picture(other, upload(picture))
        else:
            import_file(other, tmp_path, text)
        app.choose_model(other, "smaller")
        (scene,) = [update.scene for update in run_page(other, picture) if update.scene != gr.skip()]
        assert (scene["width"], scene["side"], scene["patches"]) == (64, 28, 4)
        seen, wanted = smaller.requests[-1]["image"], seen_picture(app.open_picture(picture_file), smaller.processor)
        difference = np.abs(np.asarray(seen, dtype=int) - np.asarray(wanted))
        assert difference.max() <= (0 if picture else 8)  # what is shown is a JPEG file


def test_a_run_is_shown_as_the_model_reads_it_that_made_it(picture_file, tmp_path):
    second = ready_host(FakeModel(SEGMENTED), "second")
    second.mask_decoder = MaskDecoder.load(BUNDLED_MASKS)
    capped = SimpleNamespace(final_logit_softcapping=30.0)
    second.model.config = SimpleNamespace(text_config=capped)
    visit = make_visit(FakeModel(), second)
    app.choose_model(visit, "second")
    assert all(update.strip["soft_capped"] for update in run_page(visit, picture_file) if update.strip != gr.skip())
    text = app.export_run(visit)[1]["text"]
    app.choose_model(visit, "scripted")
    shown = decoded(app.show_run(visit, event(run=1)))
    assert shown.objects["objects"][0]["mask"] and shown.strip["soft_capped"]
    assert '"counts"' in app.download_objects(visit, event(run=1, kind="coco"))["text"]
    other = make_visit()
    other.host.mask_decoder = second.mask_decoder  # it reads the codes of its own model only
    shown = decoded(import_file(other, tmp_path, text))
    assert shown.objects["has_codes"] and shown.scene["patches"] is None and not shown.strip["soft_capped"]
    assert '"counts"' not in app.download_objects(other, event(run=1, kind="coco"))["text"]


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
    (host,) = app.make_hosts(app.build_parser().parse_args(["--model", str(folder), "--device", "cpu"]))
    host.start()
    assert host._finished.wait(30) and host.mask_decoder is not None
    host.model = FakeModel(SEGMENTED)
    last = run_page(Visit((host,)), picture_file)[-1].objects
    assert last["objects"][0]["mask"].startswith("data:image/png") and not last["has_codes"]
    assert "mask" in run_api(host, picture_file)[-1]["detections"][0]


def test_without_a_decoder_there_are_boxes_and_a_sentence(picture_file):
    def refuse() -> Path:
        raise OSError("offline")

    host = ModelHost("hub", lambda progress: FakeModel(SEGMENTED), [], refuse)
    host.start()
    last = run_page(Visit((host,)), picture_file)[-1].objects
    assert last["objects"][0]["mask"] is None and last["has_codes"]  # of which the table makes a sentence
    assert len(last["objects"][0]["box"]) == 4


def test_objects_are_downloaded(picture_file):
    visit = make_visit(FakeModel(("<loc0256>", "<loc0512>", "<loc0768>", "<loc1023>", "▁cat")))
    run_page(visit, picture_file)
    png, coco = (app.download_objects(visit, event(run=1, kind=kind)) for kind in ("png", "coco"))
    assert png["type"] == "image/png" and '"bbox"' in coco["text"] and png["serial"] != coco["serial"]
    assert app.download_objects(visit, event(run=9, kind="png")) == gr.skip()


# The form


def test_a_chosen_picture_is_shown_with_what_the_model_sees(picture_file, tmp_path):
    visit = make_visit()
    notice, scene = app.show_picture(visit, upload(picture_file))
    assert notice == gr.skip() and scene["side"] == 56 and scene["patches"] == 16
    assert app.show_picture(visit, None) == (gr.skip(), None)
    (tmp_path / "text.png").write_text("no picture")
    notice, scene = app.show_picture(visit, upload(tmp_path / "text.png"))
    assert notice["kind"] == "error" and scene is None


def test_a_task_chip_only_writes_the_prompt():
    visit = make_visit()
    chips = app.show_model(visit)[1]["chips"]
    segment = next(index for index, chip in enumerate(chips) if chip["label"] == "segment")
    assert app.write_prompt(visit, "detect cat", event(index=segment)) == "segment cat"
    for unknown in (-1, 99, "1", None):
        assert app.write_prompt(visit, "detect cat", event(index=unknown)) == gr.skip()
    assert not visit.host.model.requests


def test_a_picture_that_came_with_a_run_is_asked_about_like_a_chosen_one(picture_file, tmp_path):
    visit = make_visit()
    run_page(visit, picture_file)
    other = make_visit()
    import_file(other, tmp_path, app.export_run(visit)[1]["text"])
    assert shown_pieces(run_page(other, None, "detect cat")) == ["␣a", "␣cat", "<eos>"]


def test_an_example_fills_the_form_in_and_runs(picture_file):
    visit = make_visit()
    visit.examples = (Example(picture_file, "detect cat", "me"),)
    scene, prompt, _ = app.ask_for_example(visit, event(index=0), None, *DECODING.values())
    assert (scene["width"], prompt) == (64, "detect cat")
    assert shown_pieces(answer(visit)) == ["␣a", "␣cat", "<eos>"]
    assert len(run_page(visit, None, "detect dog")) > 2  # its picture stays for what is asked next
    app.clear_picture(visit)
    assert run_page(visit, None)[-1].notice["text"] == "Choose a picture first."
    assert app.ask_for_example(visit, event(index=1), None, *DECODING.values()) == (gr.skip(),) * 3


# The model's state


def test_requests_wait_while_the_model_loads(picture_file, monkeypatch):
    monkeypatch.setattr(models, "WAIT_INTERVAL_S", 0.02)
    may_load = threading.Event()
    host = make_host(lambda progress: may_load.wait(10) and FakeModel())
    events = app.answer_over_api((host,), upload(picture_file), "caption en", **DECODING)
    assert [next(events)["step"] for _ in range(4)] == [None] * 4
    assert host.loading and host.describe()["state"] == "loading"
    may_load.set()
    assert [event["step"]["piece"] for event in events if event["step"]] == ["▁a", "▁cat", "<eos>"]
    assert host.describe()["state"] == "ready"


def test_the_badge_follows_the_loading_and_then_rests():
    may_load = threading.Event()
    host = make_host(lambda progress: progress("loading", 1, 4) or (may_load.wait(10) and FakeModel()))
    visit = Visit((host,))
    while "25%" not in words.spoken(host.notice):
        time.sleep(0.01)
    notice, chips, timer = app.show_model(visit)
    assert timer.active and not chips["chips"] and words.spoken(notice) == "Loading scripted: 25%"
    may_load.set()
    assert host._finished.wait(10)
    notice, chips, timer = app.show_model(visit)
    assert chips["note"] == tasks.BUNDLED_NOTE
    assert notice == words.notice("done", "scripted · 0 K · float32 · cpu") and not timer.active
    assert chips["chips"]


def test_models_of_the_list_are_loaded_when_they_are_chosen(picture_file):
    second = ModelHost("second", lambda progress: FakeModel(("▁second",)))
    visit = make_visit(FakeModel(("▁first",)), second)
    assert shown_pieces(run_page(visit, picture_file)) == ["␣first", "<eos>"]
    assert second.describe()["state"] == "not loaded"
    assert second.describe()["message"] == "second is loaded once it is asked for"
    app.choose_model(visit, "second")
    assert shown_pieces(run_page(visit, picture_file)) == ["␣second", "<eos>"]
    with pytest.raises(gr.Error, match="allowed are scripted, second"):
        list(app.answer_over_api(visit.hosts, upload(picture_file), "a", **DECODING, model="third"))


def test_a_mask_decoder_that_cannot_be_had_is_no_reason_not_to_answer(tmp_path):
    def refuse() -> Path:
        raise OSError("offline")

    found, fetched, missing = (
        ModelHost("m", lambda progress: FakeModel(), files, fetch)
        for files, fetch in (
            ([tmp_path / "none.npz", BUNDLED_MASKS], refuse),
            ([tmp_path / "none.npz"], lambda: BUNDLED_MASKS),
            ([tmp_path / "none.npz"], refuse),
        )
    )
    for host in (found, fetched, missing):
        host.start()
        assert host._finished.wait(10) and host.state == "ready"
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

    host = make_host(fail, name="broken")
    assert host._finished.wait(10)
    said = words.spoken(host.notice)
    assert "broken could not be loaded" in said and message in said and "secret" not in said
    assert run_page(Visit((host,)), picture_file)[-1].notice["text"] == said


def test_without_a_model_the_page_says_how_to_name_one(picture_file, monkeypatch, tmp_path):
    monkeypatch.setattr(app, "ASSETS", tmp_path)
    (host,) = app.make_hosts(app.build_parser().parse_args([]))
    host.start()
    assert run_page(Visit((host,)), picture_file)[-1].notice == words.notice("error", words.NO_MODEL)
    with pytest.raises(gr.Error, match="--model"):
        run_api(host, picture_file)


def test_models_come_from_the_command_line_or_the_environment(monkeypatch):
    def names(*arguments: str) -> list[str]:
        return [host.name for host in app.make_hosts(app.build_parser().parse_args(arguments))]

    monkeypatch.setenv("MODEL_ID", "someone/from-environment")
    assert names() == ["someone/from-environment"]
    assert names("--model", "someone/named", "someone/other") == ["someone/named", "someone/other"]
    monkeypatch.setenv("MODEL_ID", "")
    assert app.build_parser().parse_args([]).model == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--model", "~nobody-of-this-name/x"], "no folder and no hub id"), (["--mask-decoder", "none.npz"], "no such")],
)
def test_what_can_be_no_model_is_said_at_the_start(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["app.py", *arguments])
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    with pytest.raises(SystemExit):
        app.main()
    assert message in capsys.readouterr().err


def test_a_folder_is_shown_by_its_own_name_only(tiny_checkpoint):
    (host,) = app.make_hosts(app.build_parser().parse_args(["--model", str(tiny_checkpoint)]))
    assert host.name == "tiny-random"


def test_the_bundled_model_s_folder_goes_by_its_name_beside_another(tiny_checkpoint):
    folder = str(checkpoint.BUNDLED_FOLDER)
    hosts = app.make_hosts(app.build_parser().parse_args(["--model", folder, str(tiny_checkpoint)]))
    assert [host.name for host in hosts] == [app.BUNDLED_NAME, "tiny-random"]


# Wiring


@pytest.fixture(scope="module")
def config() -> dict:
    return app.build_app(ready_host(FakeModel())).get_config_file()


def test_only_the_api_s_endpoints_are_public(config):
    public = {event["api_name"] for event in config["dependencies"] if event["api_visibility"] == "public"}
    assert public == {"generate", "inspect", "models"}


def test_no_template_holds_data(config):
    parts = [component["props"] for component in config["components"] if component["type"] == "html"]
    assert len(parts) >= 10
    assert {props["html_template"] for props in parts} == {'<div class="part"></div>'}


def test_every_event_that_runs_the_model_shares_one_queue():
    blocks = app.build_app(ready_host(FakeModel()))
    running = (app.answer_on_page, app.look_inside, app.picture_shares, app.answer_over_api, app.inspect_over_api)
    events = [event for event in blocks.fns.values() if getattr(event.fn, "func", event.fn) in running]
    assert len(events) == 8  # a run has four ways to begin
    assert {(event.concurrency_id, event.concurrency_limit) for event in events} == {("model", 1)}


def test_a_visit_begins_with_the_server_s_own_models():
    visit = make_visit()
    copied = copy.deepcopy(visit)
    assert copied.host is visit.host and copied.history is not visit.history


# Launched


@pytest.fixture(scope="module")
def client(tiny_checkpoint) -> Iterator[Client]:
    arguments = app.build_parser().parse_args(["--model", str(tiny_checkpoint), "--device", "cpu"])
    (host,) = app.make_hosts(arguments)
    host.start()
    blocks = app.build_app(host)
    app.launch(blocks, prevent_thread_lock=True, quiet=True)
    yield Client(blocks.local_url, verbose=False)
    blocks.close()


def stream(client: Client, picture: Path, **changes) -> list[dict]:
    request = {"image": handle_file(picture), "prompt": "detect cat", "max_new_tokens": 6, "top_n": 4}
    job = client.submit(**{**request, **changes}, api_name="/generate")
    return list(job)


def test_a_stream_through_the_client_is_an_event_a_token_in_order(client, picture_file, tiny_checkpoint):
    events = [event for event in stream(client, picture_file) if event["step"]]
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
@pytest.mark.parametrize("path", ["/etc/passwd", "/etc/nothing", str(app.ASSETS / "examples" / "cats.png")])
def test_the_server_opens_no_file_that_was_not_uploaded(client, path, meta):
    """Not even a picture of its own, and whether the client marks the path as a file or not."""
    answer = call_raw(client, [{"path": path, **meta}, "a", 2, 0, 0, 1, None, 1, None, None])
    assert "event: error" in answer
    assert '"token_id"' not in answer and Path(path).name not in answer


def test_a_step_is_inspected_over_the_api(client, picture_file, tiny_checkpoint):
    ids = [event["step"]["token_id"] for event in stream(client, picture_file) if event["step"]]
    seen = client.predict(
        image=handle_file(picture_file), prompt="detect cat", token_ids=ids, index=2, api_name="/inspect"
    )
    found = lens.inspect(paligemma.load(tiny_checkpoint), app.open_picture(picture_file), "detect cat", ids, 2)
    assert seen["grid"] == list(found.grid)
    assert seen["attention"][1][0] == pytest.approx(found.attention[1, 0].tolist(), abs=1e-5)
    assert seen["lens"][-1]["token_id"] == found.lens[-1].token_id


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
    blocks = app.build_app(ready_host(FakeModel()))
    app.launch(blocks, prevent_thread_lock=True, quiet=True, mcp_server=True)
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
        refused = await session.call_tool("generate", {"image": str(app.ASSETS / "examples" / "cats.png")})
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
