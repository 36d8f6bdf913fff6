"""Event handlers of the page: short functions, and generators where the model runs.

A handler takes the session and the values of components as Gradio sends them, and returns the new values of its output
components; `gr.skip()` leaves a component unchanged.
"""

from __future__ import annotations

import base64
import platform
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import gradio as gr
import torch

from paligemma import lens
from paligemma.errors import InputError
from paligemma.webapp import downloads, messages, run_file, tasks
from paligemma.webapp.errors import coded_status, error_status
from paligemma.webapp.execution import Execution, require_same_model
from paligemma.webapp.images import read_input_image
from paligemma.webapp.page_update import PageUpdate, encode_update, full_page_update, image_view, show_earlier_run
from paligemma.webapp.render import attention
from paligemma.webapp.render.runs import run_tree
from paligemma.webapp.requests import read_index
from paligemma.webapp.runs import Run, RunRequest
from paligemma.webapp.served_models import ServedModel
from paligemma.webapp.session import Session
from paligemma.webapp.uploads import read_upload, uploaded_path

# Runs: a handler submits a request, then `run_pending` executes it in the queue


def submit_run(session: Session, image: Any, prompt: Any, *decoding: Any) -> messages.Status:
    """Run: submit a new run, and stop the one in progress."""
    session.form = (uploaded_path(image), prompt)
    session.submit(RunRequest(session.requested_image(image), (prompt, *decoding)))
    return _queued()


def submit_step(session: Session, image: Any, prompt: Any, *decoding: Any) -> Any:
    """Step: generate one more token of the current run, or the first one if image or prompt have changed."""
    form = (uploaded_path(image), prompt)
    if session.form != form or session.history.current is None:
        session.form = form
        session.submit(RunRequest(session.requested_image(image), (prompt, *decoding), stop_after=1))
        return _queued()
    if not session.run_state.finished:
        return gr.skip()
    run_request = session.history.step_request()
    session.submit(run_request)
    return gr.skip() if run_request else messages.status("idle", "The answer is complete")


def submit_branch(session: Session, event: gr.EventData) -> messages.Status:
    """Branch: regenerate the answer from a token on, with another candidate in its place."""
    run_request = session.history.branch_request(*(_field(event, name) for name in ("run", "index", "token_id")))
    session.submit(run_request)
    return _queued() if run_request else coded_status(_run_expired())


def submit_example(session: Session, event: gr.EventData, image: Any, *decoding: Any) -> tuple[Any, Any, Any]:
    """Example: fill in the form and submit a run. Returns (image view, prompt, status)."""
    example = _pick(session.examples, _field(event, "index"))
    if example is None:
        return gr.skip(), gr.skip(), gr.skip()
    session.form, session.example = (uploaded_path(image), example.prompt), example.path
    session.submit(RunRequest(example.path, (example.prompt, *decoding)))
    return _load_image_view(session, example.path), example.prompt, _queued()


def run_pending(session: Session) -> Iterator[Any]:
    """Execute the pending run request and yield page updates. An error becomes a status; earlier tokens are kept."""
    run_request, run_state = session.take_request(), session.run_state
    if run_request is None:
        yield gr.skip()
        return
    try:
        # Yield before any work: Gradio 6 closes an abandoned generator only after its first value.
        yield encode_update(session, PageUpdate(messages.status("busy", "Preparing")))
        execution = Execution(session, run_request, run_state)
        for status in execution.served_model.wait():
            yield encode_update(session, PageUpdate(status))
            if run_state.stop_requested:
                break
        if run_state.stop_requested:
            yield encode_update(session, PageUpdate(messages.status("idle", "Stopped")))
            return
        first_update = execution.start()
        with closing(execution):
            yield encode_update(session, first_update)
            for step in execution.steps:
                if not execution.add(step):
                    break
                update = execution.due_update()
                if update is not None:
                    yield encode_update(session, update)
        yield encode_update(session, execution.finish())
    except Exception as error:
        _invalidate_form(session, run_request)
        yield encode_update(session, PageUpdate(error_status(error)))
    finally:
        run_state.finished = True


def report_queue_full(session: Session) -> messages.Status:
    """Drop the pending request, because the queue rejected the event that executes it."""
    _invalidate_form(session, session.take_request())
    session.run_state.finished = True
    return coded_status(InputError("queue.full", messages.QUEUE_FULL))


def stop_run(session: Session) -> Any:
    """Stop: end the run after the current token, or drop a request that is still queued."""
    run_state = session.run_state
    if run_state.finished:
        return gr.skip()
    run_state.stop_requested = True  # before take_request: run_pending may take it first, and then checks this flag
    run_request = session.take_request()
    if run_request:
        _invalidate_form(session, run_request)
        run_state.finished = True
        return messages.status("idle", "Stopped")
    return messages.status("busy", "Stopping after this token")


def _queued() -> messages.Status:
    return messages.status("busy", "Queued")


def _invalidate_form(session: Session, run_request: RunRequest | None) -> None:
    """After a failed request for a new run: the form no longer belongs to the current run, so Step starts a new one."""
    if run_request is None or (run_request.parent is None and run_request.continues is None):
        session.form = None


# Earlier runs


def resend_page(session: Session) -> Any:
    """Send all parts of the current run, because the page missed an update."""
    run = session.history.current
    session.image = None  # send the image too
    return encode_update(session, full_page_update(session, run)) if run else gr.skip()


def show_run(session: Session, event: gr.EventData) -> str:
    """Show an earlier run."""
    run = session.history.find(_field(event, "run"))
    return encode_update(session, show_earlier_run(session, run) if run else PageUpdate(coded_status(_run_expired())))


def compare_runs(session: Session, event: gr.EventData) -> dict[str, Any]:
    """The run tree, with the two selected runs next to each other."""
    numbers = _field(event, "runs")
    found = [session.history.find(number) for number in numbers] if isinstance(numbers, list) else []
    return run_tree(session.history, [run for run in found if run])


def export_run(session: Session) -> tuple[Any, Any]:
    """Download the current run as a file. Returns (status, download)."""
    run = session.history.current
    if run is None or not run.steps:
        return messages.status("idle", "No run to export."), gr.skip()
    versions = {"python": platform.python_version(), "torch": torch.__version__, "gradio": gr.__version__}
    text = run_file.write_run(run, versions)
    return gr.skip(), _download(session, f"run-{run.number}.json", "application/json", text=text)


def import_run(session: Session, upload: Any, image: Any, prompt: Any) -> Any:
    """Validate an uploaded run file and show its run. The form is unchanged."""
    path = uploaded_path(upload)
    if path is None:
        return gr.skip()
    try:
        run = session.history.add(run_file.read_run(read_upload(path), session.history.next_number()))
        session.form = (uploaded_path(image), prompt)
        return encode_update(session, show_earlier_run(session, run))
    except Exception as error:
        return encode_update(session, PageUpdate(error_status(error)))


# Inspection


def inspect_token(session: Session, event: gr.EventData) -> Iterator[tuple[Any, Any]]:
    """Attention and logit lens of one token: (status, inspection)."""
    yield messages.status("busy", "Inspecting"), gr.skip()
    try:
        served_model, run = yield from _wait_for_model(session, event)
        index = read_index(_field(event, "index"))
        found = served_model.inspect(lens.inspect, run.image.model_input, run.request["prompt"], run.token_ids, index)
        status = messages.status("idle", "Attention and logit lens for token {number}", number=index + 1)
        yield status, attention.attention_state(run.number, found)
    except Exception as error:
        yield error_status(error), gr.skip()


def image_shares(session: Session, event: gr.EventData) -> Iterator[tuple[Any, Any]]:
    """Share of each token's attention that is on the image: (status, shares)."""
    yield messages.status("busy", "Inspecting"), gr.skip()
    try:
        served_model, run = yield from _wait_for_model(session, event)
        shares = served_model.inspect(lens.image_shares, run.image.model_input, run.request["prompt"], run.token_ids)
        yield messages.summary(run), {"run": run.number, "shares": attention.mean_image_shares(shares)}
    except Exception as error:
        yield error_status(error), gr.skip()


def _wait_for_model(session: Session, event: gr.EventData) -> Generator[tuple[Any, Any], None, tuple[ServedModel, Run]]:
    """Yield the loading state, then return the loaded model and the event's run, which it must have generated."""
    served_model, run = session.served_model, session.history.find(_field(event, "run"))
    if run is None:
        raise _run_expired()
    for status in served_model.wait():
        yield status, gr.skip()
    require_same_model(served_model, run)
    return served_model, run


def download_objects(session: Session, event: gr.EventData) -> Any:
    """Download the image with its objects as PNG, or the objects as COCO JSON."""
    run = session.history.find(_field(event, "run"))
    if run is None:
        return gr.skip()
    served_model = session.served_model_of(run)
    decoder = served_model.mask_decoder if served_model else None
    if _field(event, "kind") == "png":
        file = base64.b64encode(downloads.annotated_png(run, decoder)).decode()
        return _download(session, "objects.png", "image/png", base64=file)
    return _download(session, "objects.json", "application/json", text=downloads.coco_json(run, decoder))


def _download(session: Session, name: str, media_type: str, **content: str) -> dict[str, Any]:
    session.num_downloads += 1
    return {"serial": session.num_downloads, "name": name, "type": media_type, **content}


# Form


def show_image(session: Session, upload: Any) -> tuple[Any, Any]:
    """Show an uploaded image, or none after its removal. Returns (status, image view)."""
    path = uploaded_path(upload)
    clear_image(session)
    if path is None:
        return gr.skip(), None
    try:
        return gr.skip(), _load_image_view(session, path)
    except Exception as error:
        return error_status(error), None


def _load_image_view(session: Session, path: str | Path) -> Any:
    """The image view for a file; unchanged before the model is loaded, because it determines the resolution."""
    session.image = None
    model = session.served_model.model
    if model is None:
        return gr.skip()
    session.image = read_input_image(path, model.processor)
    return image_view(session.served_model, session.image)


def clear_image(session: Session) -> None:
    """Clear the image after its removal from the image view."""
    session.image = session.example = None


def apply_task(session: Session, prompt: Any, event: gr.EventData) -> Any:
    """Task chip: write the task's prompt into the form."""
    available = _tasks(session.served_model)
    task = _pick(available, _field(event, "index"))
    return gr.skip() if task is None else tasks.apply_task(task, prompt if isinstance(prompt, str) else "", available)


def choose_model(session: Session, name: Any) -> tuple[Any, ...]:
    """Select a model and load it if needed. Returns the outputs of `show_model`."""
    names = [served_model.name for served_model in session.served_models]
    session.model_index = names.index(name) if name in names else 0
    session.served_model.start()
    return show_model(session)


def show_model(session: Session) -> tuple[Any, Any, gr.Timer]:
    """The selected model's state: (badge, task chips, timer that polls while the model loads)."""
    served_model = session.served_model
    loading = served_model.loading  # read before the status: if loading ends in between, the timer polls once more
    note = tasks.model_note(served_model.name, served_model.model.source if served_model.model else None)
    return served_model.status, tasks.task_chips(_tasks(served_model), note), gr.Timer(active=loading)


def _tasks(served_model: ServedModel) -> tuple[tasks.Task, ...]:
    return tasks.tasks_of(served_model.model.source) if served_model.model else ()


# Event data, which any client can send


def _field(event: gr.EventData, name: str) -> Any:
    """A field of an event's data, or None."""
    data = getattr(event, "_data", None)
    return data.get(name) if isinstance(data, Mapping) else None


def _pick(choices: Sequence[Any], index: Any) -> Any:
    """The choice at an index, or None if there is none."""
    return choices[index] if isinstance(index, int) and 0 <= index < len(choices) else None


def _run_expired() -> InputError:
    return InputError("run.expired", messages.RUN_EXPIRED)
