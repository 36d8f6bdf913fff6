"""Execution of runs with a scripted model: page updates, errors, Stop, Step and Branch."""

from __future__ import annotations

import copy
import inspect
import json
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import FrameType

import gradio as gr
import pytest
import torch
from fake_model import FakeModel
from webapp_helpers import (
    DECODING,
    NO_UPDATE,
    answer,
    decoded,
    event,
    import_file,
    make_session,
    ready_served_model,
    run_api,
    run_page,
    shown_pieces,
    status_text,
    step_once,
    submit_run,
    upload,
)

from paligemma.errors import InputError, NonFiniteLogitsError
from paligemma.webapp import execution, handlers, messages
from paligemma.webapp.examples import Example
from paligemma.webapp.page_update import PageUpdate
from paligemma.webapp.session import Session

pytestmark = pytest.mark.usefixtures("update_for_every_token")


def test_the_token_strip_gets_each_token_once(image_file):
    updates = run_page(make_session(FakeModel(("▁a", "▁cat"))), image_file)
    added = [
        [token["piece"] for token in update.token_strip["tokens"]]
        for update in updates
        if update.token_strip != gr.skip()
    ]
    assert added == [[], ["␣a"], ["␣cat"], ["<eos>"]]
    assert status_text(updates[-1]).startswith("The answer is complete · 3 tokens · image encoding 0.01 s")
    assert updates[-1].token_strip["done"]


def test_page_updates_are_numbered_and_can_be_resent(image_file):
    session = make_session()
    assert handlers.resend_page(session) == gr.skip()  # no run yet
    submit_run(session, image_file)
    numbers = [
        json.loads(page_update)["number"] for page_update in handlers.run_pending(session) if page_update != gr.skip()
    ]
    assert numbers == list(range(1, len(numbers) + 1))
    again = decoded(handlers.resend_page(session))
    assert len(again.token_strip["tokens"]) == 3 and again.token_strip["done"] and again.image_view["width"] == 64


def test_the_page_is_updated_at_most_twenty_times_per_second(image_file, monkeypatch):
    monkeypatch.setattr(execution, "UPDATE_INTERVAL_S", 0.05)
    updates = run_page(make_session(FakeModel(("▁a",) * 200, seconds_per_token=0.001)), image_file)
    assert len(updates) < 100
    assert len(shown_pieces(updates)) == 201


def test_a_new_run_updates_the_image_view_and_the_run_tree(image_file):
    session = make_session()
    updates = run_page(session, image_file, "detect cat")
    (image_view,) = [update.image_view for update in updates if update.image_view != gr.skip()]
    assert (image_view["width"], image_view["height"], image_view["side"]) == (64, 48, 56)
    assert updates[-1].runs["runs"][0]["prompt"] == "detect cat"
    again = run_page(session, image_file)
    assert all(update.image_view == gr.skip() for update in again)  # unchanged
    assert [row["number"] for row in again[-1].runs["runs"]] == [1, 2]


def test_objects_are_sent_only_when_they_change(image_file):
    pieces = ("<loc0256>", "<loc0512>", "<loc0768>", "<loc1023>", "▁cat", "▁;", "▁", "▁a", "▁b")
    updates = run_page(make_session(FakeModel(pieces)), image_file)
    sent = [len(update.objects["objects"]) for update in updates if update.objects != gr.skip()]
    assert len(sent) < len(pieces) and sent[0] == 0 and sent[-1] == 1


def test_a_handler_yields_before_any_work():
    session = Session(())  # without a model, any work fails
    submit_run(session, None)
    assert next(handlers.run_pending(session)) is not None
    for handler in (handlers.inspect_token, handlers.image_shares):
        assert next(handler(session, event())) is not None


INVALID_REQUESTS = [
    ({"image": None}, "Choose"),
    ({"image": Path(__file__)}, "image"),
    ({"temperature": "hot"}, "temperature must be a number"),
    ({"prompt": "x" * 3000}, "3000"),
]


@pytest.mark.parametrize(("change", "message"), INVALID_REQUESTS)
def test_an_invalid_request_is_an_error_status(image_file, change, message):
    session = make_session()
    last = run_page(session, **{"image": image_file, **change})[-1]
    assert last.status["kind"] == "error" and last.status["code"] and message in status_text(last)
    assert last.token_strip == gr.skip()  # the earlier answer stays on the page
    assert not session.served_model.model.requests


def test_tokens_are_kept_when_the_model_fails(image_file, monkeypatch):
    model = FakeModel(("▁a", "▁cat"))
    stream = model.stream
    monkeypatch.setattr(model, "stream", lambda *args, **kwargs: fail_after(1, stream(*args, **kwargs)))
    session = make_session(model)
    updates = run_page(session, image_file)
    assert "RuntimeError" in status_text(updates[-1]) and "secret" not in status_text(updates[-1])
    assert shown_pieces(updates) == ["␣a"]
    assert session.history.current.finish_reason == "stopped" and session.run_state.finished


def fail_after(count: int, stream: Iterator) -> Iterator:
    yield from (next(stream) for _ in range(count))
    raise RuntimeError("secret")


FAULTS = (
    (MemoryError(), "Not enough memory"),
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "Not enough memory"),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"), "Not enough memory"),
    (RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes"), "Not enough memory"),
    (OSError(28, "No space left on device"), "disk is full"),
    (NonFiniteLogitsError("test.logits", "logits are not finite"), "not finite"),
    (KeyError("secret"), "Internal error (KeyError). See the server log."),
)


@pytest.mark.parametrize(("fault", "message"), FAULTS)
def test_the_next_request_works_after_a_fault(fault, message, image_file, monkeypatch):
    model = FakeModel(("▁a", "▁cat"))
    stream = model.stream

    def break_off(*arguments, **options):
        with closing(stream(*arguments, **options)) as steps:
            yield next(steps)
            raise fault

    session = make_session(model)
    monkeypatch.setattr(model, "stream", break_off)
    updates = run_page(session, image_file)
    assert updates[-1].status["kind"] == "error" and message in status_text(updates[-1])
    assert "secret" not in status_text(updates[-1])
    assert shown_pieces(updates) == ["␣a"] and session.history.current.text == " a"
    with pytest.raises(gr.Error) as raised:
        run_api(session.served_model, image_file)
    assert message in raised.value.message
    monkeypatch.setattr(model, "stream", stream)
    assert shown_pieces(run_page(session, image_file)) == ["␣a", "␣cat", "<eos>"]


def test_error_values_are_formatted_for_the_page():
    reason = InputError("test.reason", "{value!r} of {size:.1f} GB", value="x", size=2)
    status = handlers.error_status(InputError("test.outer", "{name}: {reason} {{}}", name="a", reason=reason))
    assert (status["code"], status["text"]) == ("test.outer", "{name}: {reason} {}")
    inner = {"kind": "error", "code": "test.reason", "text": "{value} of {size} GB"}
    assert status["values"] == {"name": "a", "reason": {**inner, "values": {"value": "'x'", "size": "2.0"}}}
    json.dumps(status)


def test_closing_the_handler_closes_the_stream(image_file):
    model = FakeModel(("▁a",) * 50, seconds_per_token=0.06)
    session = make_session(model)
    submit_run(session, image_file)
    updates = handlers.run_pending(session)
    for _ in range(5):  # more values than it yields before the model runs
        next(updates)
    updates.close()
    assert 0 < model.closed_after < 10 and session.run_state.finished
    assert session.history.current.finish_reason == "stopped"
    submit_run(session, image_file)
    assert answer(session)[-1].token_strip["done"] and decoded(handlers.resend_page(session)).token_strip["done"]


def test_a_step_passes_through_three_generators(image_file):
    """The model's own, the served model's and the handler's."""
    depths = []

    class Watched(FakeModel):
        def _step(self, *arguments):
            depths.append(count_generators(sys._getframe()))
            return super()._step(*arguments)

    outside = count_generators(sys._getframe())
    run_page(make_session(Watched()), image_file)
    run_api(ready_served_model(Watched()), image_file)
    assert {depth - outside for depth in depths} == {3}


def count_generators(frame: FrameType | None) -> int:
    """Number of generators on the call stack."""
    return 0 if frame is None else bool(frame.f_code.co_flags & inspect.CO_GENERATOR) + count_generators(frame.f_back)


def test_the_form_values_are_passed_to_the_model(image_file):
    model = FakeModel()
    run_page(make_session(model), image_file, "detect cat", temperature=0.5, top_k=4, top_p=0.9, seed=3, top_n=2)
    (request,) = model.requests
    assert request.pop("image").size == (56, 56)  # the model input
    assert request == {
        "prompt": "detect cat", "max_new_tokens": 16, "temperature": 0.5, "top_k": 4, "top_p": 0.9, "seed": 3,
        "top_n": 2, "forced_ids": (), "time_limit": 600.0,
    }  # fmt: skip


def test_a_run_without_a_seed_stores_the_drawn_seed(image_file):
    session = make_session()
    run_page(session, image_file, temperature=1.0)
    seed = session.history.current.request["seed"]
    assert isinstance(seed, int) and session.served_model.model.requests[0]["seed"] == seed


def test_page_and_api_have_the_same_numbers(image_file):
    session = make_session(FakeModel(("▁a", "▁cat")))
    run_page(session, image_file)
    events = [event["step"] for event in run_api(session.served_model, image_file) if event["step"]]
    entries = decoded(handlers.resend_page(session)).token_strip["tokens"]
    for entry, step in zip(entries, events, strict=True):
        assert (entry["id"], entry["prob"], entry["entropy"]) == (step["token_id"], step["prob"], step["entropy"])
        assert [row["id"] for row in entry["rows"]] == [candidate["token_id"] for candidate in step["top"]]


# Stop, step, branch


def test_stop_ends_the_run_after_the_current_token(image_file):
    model = FakeModel(("▁a",) * 50)
    session = make_session(model)
    assert handlers.stop_run(session) == gr.skip()  # nothing runs
    submit_run(session, image_file)
    updates = []
    for update in map(decoded, handlers.run_pending(session)):
        updates.append(update)
        if len(shown_pieces(updates)) == 3 and not session.run_state.stop_requested:
            assert handlers.stop_run(session)["text"] == "Stopping after this token"
    assert model.closed_after == 4
    assert status_text(updates[-1]) == "Stopped · 4 tokens"
    assert len(shown_pieces(updates)) == 4
    assert handlers.stop_run(session) == gr.skip()


def test_a_run_stopped_in_the_queue_does_not_start(image_file):
    session = make_session()
    submit_run(session, image_file)
    assert handlers.stop_run(session) == messages.status("idle", "Stopped")  # immediately, not after the queue
    assert handlers.stop_run(session) == gr.skip()
    assert answer(session) == [NO_UPDATE] and not session.served_model.model.requests
    step_once(session, image_file)  # the stopped run cannot be continued
    assert [len(run.steps) for run in session.history] == [1]


def test_a_run_stopped_while_it_is_prepared_does_not_start(image_file):
    session = make_session()
    submit_run(session, image_file)
    events = handlers.run_pending(session)
    next(events)
    assert handlers.stop_run(session)["text"] == "Stopping after this token"
    assert status_text(decoded(list(events)[-1])) == "Stopped" and not session.served_model.model.requests


def test_an_answer_stopped_at_its_last_token_is_complete(image_file, monkeypatch):
    model = FakeModel(("▁a",))
    session = make_session(model)
    original = model.stream

    def stop_at_the_end(*args, **kwargs) -> Iterator:
        stream = original(*args, **kwargs)
        yield next(stream)
        handlers.stop_run(session)
        return (yield from stream)

    monkeypatch.setattr(model, "stream", stop_at_the_end)
    updates = run_page(session, image_file)
    assert status_text(updates[-1]).startswith("The answer is complete · 2 tokens · image encoding 0.01 s")


def test_only_the_newest_queued_request_runs(image_file):
    session = make_session()
    submit_run(session, image_file, "first")
    run_state = session.run_state
    submit_run(session, image_file, "second")
    assert run_state.stop_requested and not session.run_state.stop_requested
    assert len(answer(session)) > 2
    assert answer(session) == [NO_UPDATE]
    assert [request["prompt"] for request in session.served_model.model.requests] == ["second"]


def test_a_branch_forces_token_ids_and_keeps_the_parent_run(image_file):
    session = make_session(FakeModel(("▁a", "▁cat", "▁b")))
    run_page(session, image_file)
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
    assert [token["selected_manually"] for token in tokens] == [False, True, False, False]
    assert tokens[1]["chosen"] == 2 and tokens[1]["rows"][2]["id"] == 12


def test_an_unknown_run_cannot_be_branched(image_file):
    session = make_session()
    assert handlers.submit_branch(session, event(run=9, index=0, token_id=1))["text"] == messages.RUN_EXPIRED
    assert answer(session) == [NO_UPDATE]


def test_step_continues_the_same_run(image_file):
    session = make_session(FakeModel(("▁a", "▁cat")))
    updates: list[PageUpdate] = []
    for count in (1, 2, 3):
        updates += step_once(session, image_file)
        assert len(shown_pieces(updates)) == count
    assert [request["forced_ids"] for request in session.served_model.model.requests] == [(), (0,), (0, 10)]
    assert len(list(session.history)) == 1 and session.history.current.finish_reason == "eos"
    status = handlers.submit_step(session, upload(image_file), "caption en", *DECODING.values())
    assert status["text"] == "The answer is complete"
    step_once(session, image_file, "detect cat")  # another prompt starts a new run
    assert len(list(session.history)) == 2


def test_a_failed_step_keeps_all_tokens(image_file, monkeypatch):
    model = FakeModel(("▁a", "▁cat"))
    session = make_session(model)
    step_once(session, image_file)
    step_once(session, image_file)
    stream = model.stream
    monkeypatch.setattr(model, "stream", lambda *args, **kwargs: fail_after(1, stream(*args, **kwargs)))
    assert "RuntimeError" in status_text(step_once(session, image_file)[-1])
    assert [len(run.steps) for run in session.history] == [2]
    monkeypatch.undo()
    step_once(session, image_file)  # continues the same run
    assert [len(run.steps) for run in session.history] == [3]


def session_with_two_tokens(image: Path) -> Session:
    """A session with one run that ended at max_new_tokens = 2."""
    session = make_session(FakeModel(("▁a", "▁cat", "▁b", "▁c")))
    run_page(session, image, max_new_tokens=2)  # the scripted model ignores max_new_tokens
    run = session.history.current
    run.steps, run.finish_reason = run.steps[:2], "length"
    return session


def test_a_stopped_step_leaves_the_run_unchanged(image_file):
    session = session_with_two_tokens(image_file)
    run, before = session.history.current, copy.copy(session.history.current)
    handlers.submit_step(session, upload(image_file), "caption en", *DECODING.values())
    events = handlers.run_pending(session)
    while status_text(decoded(next(events))) != "Step":
        pass
    assert session.history.current is run and run.steps == before.steps
    handlers.stop_run(session)
    list(events)
    assert session.history.current == before  # including finish reason and timing


def test_a_continued_run_can_be_branched_at_its_new_tokens(image_file):
    session = session_with_two_tokens(image_file)
    for count in (3, 4):
        step_once(session, image_file)
        run = session.history.current
        assert (len(run.steps), run.request["max_new_tokens"]) == (count, count)
        assert (run.finish_reason, run.timing) == ("stopped", None)
    handlers.submit_branch(session, event(run=1, index=3, token_id=31))
    assert shown_pieces(answer(session))[:4] == ["␣a", "␣cat", "␣b", "␣other"]
    request = session.served_model.model.requests[-1]
    assert len(request["forced_ids"]) == request["max_new_tokens"] == 4


def test_a_request_rejected_by_the_queue_is_dropped(image_file):
    session = make_session(FakeModel(("▁a", "▁cat")))
    run_page(session, image_file)
    submit_run(session, image_file, "detect cat")
    status = handlers.report_queue_full(session)
    assert (status["code"], status["text"]) == ("queue.full", messages.QUEUE_FULL)
    assert answer(session) == [NO_UPDATE]
    step_once(session, image_file, "detect cat")  # the current run has another prompt
    assert [len(run.steps) for run in session.history] == [3, 1]


def test_step_continues_an_example_and_an_imported_run(image_file, tmp_path):
    session, other = make_session(FakeModel(("▁a", "▁cat"))), make_session(FakeModel(("▁a", "▁cat")))
    step_once(session, image_file)
    import_file(other, tmp_path, handlers.export_run(session)[1]["text"])
    handlers.submit_step(other, None, "caption en", *DECODING.values())
    answer(other)
    session.examples = (Example(image_file, "detect cat", "me"),)
    handlers.submit_example(session, event(index=0), None, *DECODING.values())
    answer(session)
    status = handlers.submit_step(session, None, "detect cat", *DECODING.values())
    assert status["text"] == "The answer is complete"
    assert [len(run.steps) for run in other.history] == [2]
