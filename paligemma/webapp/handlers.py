"""Event handlers of the page: short functions and generators that yield what the page shows."""

from __future__ import annotations

import base64
import json
import logging
import platform
import re
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import gradio as gr
import torch

from paligemma import lens
from paligemma.webapp import messages, run_file, runs, serving, tasks
from paligemma.webapp.execution import (
    PageUpdate,
    execute,
    full_page_update,
    image_view_of,
    require_same_model,
    show_earlier_run,
)
from paligemma.webapp.images import read_input_image
from paligemma.webapp.render import attention, objects
from paligemma.webapp.requests import (
    read_index,
    read_upload,
    uploaded_path,
)
from paligemma.webapp.runs import Run, RunRequest
from paligemma.webapp.served_models import ServedModel
from paligemma.webapp.session import Session

log = logging.getLogger("paligemma.app")


def submit_run(session: Session, image: Any, prompt: Any, *decoding: Any) -> messages.Status:
    """Run was asked for: line up, and end what this visitor still has running."""
    session.form = (uploaded_path(image), prompt)
    session.submit(RunRequest(session.requested_image(image), (prompt, *decoding)))
    return messages.status("busy", "Waiting for its turn")


def submit_step(session: Session, image: Any, prompt: Any, *decoding: Any) -> Any:
    """One token more: of the run on the page, or the first one when picture or prompt are others by now."""
    form = (uploaded_path(image), prompt)
    if session.form != form or session.history.current is None:
        session.form = form
        session.submit(RunRequest(session.requested_image(image), (prompt, *decoding), stop_after=1))
        return messages.status("busy", "Waiting for its turn")
    if not session.run_state.finished:
        return gr.skip()  # it is being written
    run_request = session.history.step_request()
    session.submit(run_request)
    return gr.skip() if run_request else messages.status("idle", "The answer has ended; nothing follows.")


def submit_branch(session: Session, event: gr.EventData) -> Any:
    """Another candidate was chosen: answer anew from there, by its id."""
    run_request = session.history.branch_request(*(_field(event, name) for name in ("run", "index", "token_id")))
    session.submit(run_request)
    return messages.status("busy", "Waiting for its turn") if run_request else _gone()


def submit_example(session: Session, event: gr.EventData, image: Any, *decoding: Any) -> tuple[Any, Any, Any]:
    """An example was chosen: (picture part, prompt, notice), and its run lines up."""
    example = _pick(session.examples, _field(event, "index"))
    if example is None:
        return gr.skip(), gr.skip(), gr.skip()
    session.form, session.example = (uploaded_path(image), example.prompt), example.path
    session.submit(RunRequest(example.path, (example.prompt, *decoding)))
    return _show_file(session, example.path), example.prompt, messages.status("busy", "Waiting for its turn")


def run_pending(session: Session) -> Iterator[Any]:
    """Do what was asked for last. Whatever goes wrong becomes a line of the page; what was written stays."""
    run_request, run_state = session.take_request(), session.run_state
    if run_request is None:
        yield gr.skip()
        return
    try:
        # Gradio closes an abandoned generator only once it has yielded: so yield before any work.
        yield encode_update(session, PageUpdate(messages.status("busy", "Preparing")))
        for update in execute(session.served_model, session, run_request, run_state):
            yield encode_update(session, update)
    except Exception as error:
        _forget_form(session, run_request)
        yield encode_update(session, PageUpdate(error_status(error)))
    finally:
        run_state.finished = True


def _forget_form(session: Session, run_request: RunRequest | None) -> None:
    """A plan came to nothing: what the form had for a new run is not what the run on the page was asked."""
    if run_request is None or (run_request.parent is None and run_request.replaces is None):
        session.form = None


def encode_update(session: Session, update: PageUpdate) -> str:
    """An update as one text: what changes, by its name, and a number by which the page sees whether it missed one.

    One output, because Gradio builds a component anew for each output that is skipped; and text, because of data it
    sends how they differ from the data before, which is longer than new tokens are.
    """
    session.num_updates += 1
    changes = {name: value for name, value in update._asdict().items() if value is not None}
    return json.dumps({"number": session.num_updates, **changes}, ensure_ascii=False, separators=(",", ":"))


def resend_page(session: Session) -> Any:
    """The page missed an update: everything of the current run."""
    run = session.history.current
    session.image = None  # the picture may be what was missed
    return encode_update(session, full_page_update(session, run)) if run else gr.skip()


def report_queue_full(session: Session) -> messages.Status:
    """The queue took no more; nothing of the visit but what was asked for is lost."""
    _forget_form(session, session.take_request())
    session.run_state.finished = True
    return messages.status("error", messages.QUEUE_FULL)


def stop_run(session: Session) -> Any:
    """Stop was asked for: the run ends behind the token that it is at, and one that still waits never begins."""
    run_state = session.run_state
    if run_state.finished:
        return gr.skip()
    run_state.stop_requested = True  # first: a run that takes the plan at the same moment looks here before it begins
    run_request = session.take_request()
    if run_request:
        _forget_form(session, run_request)
        run_state.finished = True
        return messages.status("idle", "Stopped")
    return messages.status("busy", "Stopping after this token")


def show_image(session: Session, upload: Any) -> tuple[Any, Any]:
    """A picture was chosen or taken away: (notice, picture part)."""
    path = uploaded_path(upload)
    session.image = session.example = None
    if path is None:
        return gr.skip(), None
    try:
        return gr.skip(), _show_file(session, path)
    except Exception as error:
        return error_status(error), None


def _show_file(session: Session, path: str | Path) -> Any:
    """The picture part with this file; nothing before there is a model: only then it is known what that sees."""
    session.image = None
    if session.served_model.model is None:
        return gr.skip()
    session.image = read_input_image(path, session.served_model.model.processor)
    return image_view_of(session.served_model, session.image)


def clear_image(session: Session) -> None:
    """Another picture is wanted: the field is empty again."""
    session.image = session.example = None


def apply_task(session: Session, prompt: Any, event: gr.EventData) -> Any:
    """A task chip was pressed: it only writes the prompt."""
    known = _tasks(session.served_model)
    task = _pick(known, _field(event, "index"))
    return gr.skip() if task is None else tasks.apply_task(task, prompt if isinstance(prompt, str) else "", known)


def _field(event: gr.EventData, name: str) -> Any:
    """What the page said with an event; None for what it left out, as only a foreign client does."""
    data = getattr(event, "_data", None)
    return data.get(name) if isinstance(data, Mapping) else None


def _gone() -> messages.Status:
    return messages.status("error", messages.RUN_EXPIRED)


def _pick(choices: Sequence[Any], index: Any) -> Any:
    """One of the choices by the place that the page names; None for a place that does not exist."""
    return choices[index] if isinstance(index, int) and 0 <= index < len(choices) else None


def _tasks(served_model: ServedModel) -> tuple[tasks.Task, ...]:
    return tasks.tasks_of(served_model.model.source) if served_model.model else ()


def show_run(session: Session, event: gr.EventData) -> Any:
    """An earlier run was chosen in the tree."""
    run = session.history.find(_field(event, "run"))
    return encode_update(session, show_earlier_run(session, run) if run else PageUpdate(_gone()))


def compare_runs(session: Session, event: gr.EventData) -> Any:
    """Two runs were ticked in the tree."""
    numbers = _field(event, "runs")
    found = [session.history.find(number) for number in numbers] if isinstance(numbers, list) else []
    return runs.run_tree(session.history, [run for run in found if run])


def inspect_token(session: Session, event: gr.EventData) -> Iterator[tuple[Any, Any]]:
    """Attention and logit lens of one token: (notice, look)."""
    yield messages.status("busy", "Looking inside"), gr.skip()
    try:
        served_model, run = yield from _wait_to_look(session, event)
        index = read_index(_field(event, "index"))
        found = served_model.inspect(lens.inspect, run.image.model_input, run.request["prompt"], run.token_ids, index)
        yield (
            messages.status("idle", "Looked inside token {number}", number=index + 1),
            attention.inspect(run.number, found, index),
        )
    except Exception as error:
        yield error_status(error), gr.skip()


def image_shares(session: Session, event: gr.EventData) -> Iterator[tuple[Any, Any]]:
    """How much of its attention each token of a run gave to the picture: (notice, shares)."""
    yield messages.status("busy", "Looking inside"), gr.skip()
    try:
        served_model, run = yield from _wait_to_look(session, event)
        shares = served_model.inspect(lens.image_shares, run.image.model_input, run.request["prompt"], run.token_ids)
        yield messages.summary(run), {"run": run.number, "shares": attention.mean_shares(shares)}
    except Exception as error:
        yield error_status(error), gr.skip()


def _wait_to_look(session: Session, event: gr.EventData) -> Generator[tuple[Any, Any], None, tuple[ServedModel, Run]]:
    """The run that an event names and the model that made it, once that is loaded; ValueError where they are not so."""
    served_model, run = session.served_model, session.history.find(_field(event, "run"))
    if run is None:
        raise ValueError(messages.RUN_EXPIRED)
    for state in served_model.wait():
        yield state, gr.skip()
    require_same_model(served_model, run)
    return served_model, run


def download_objects(session: Session, event: gr.EventData) -> Any:
    """The picture with its objects as PNG, or the objects as COCO's JSON."""
    run = session.history.find(_field(event, "run"))
    if run is None:
        return gr.skip()
    served_model = session.served_model_of(run)
    decoder = served_model and served_model.mask_decoder
    if _field(event, "kind") == "png":
        file = base64.b64encode(objects.annotated_image(run, decoder)).decode()
        return _download(session, "objects.png", "image/png", base64=file)
    return _download(session, "objects.json", "application/json", text=objects.coco_file(run, decoder))


def export_run(session: Session) -> tuple[Any, Any]:
    """The run on the page as a file: (notice, download)."""
    run = session.history.current
    if run is None or not run.steps:
        return messages.status("idle", "There is no run yet."), gr.skip()
    versions = {"python": platform.python_version(), "torch": torch.__version__, "gradio": gr.__version__}
    text = run_file.write_run(run, versions)
    return gr.skip(), _download(session, f"run-{run.number}.json", "application/json", text=text)


def import_run(session: Session, upload: Any, image: Any, prompt: Any) -> Any:
    """A run from a file, checked like any input, becomes the run on the page; the form stays as it is."""
    path = uploaded_path(upload)
    if path is None:
        return gr.skip()
    try:
        run = session.history.add(run_file.read_run(read_upload(path), session.history.next_number()))
        session.form = (uploaded_path(image), prompt)
        return encode_update(session, show_earlier_run(session, run))
    except Exception as error:
        return encode_update(session, PageUpdate(error_status(error)))


def _download(session: Session, name: str, media_type: str, **content: str) -> dict[str, Any]:
    session.num_downloads += 1
    return {"serial": session.num_downloads, "name": name, "type": media_type, **content}


def choose_model(session: Session, name: Any) -> tuple[Any, ...]:
    """Another model of the list shall answer; it is loaded now if it was not before."""
    session.model = next(
        (place for place, served_model in enumerate(session.served_models) if served_model.name == name), 0
    )
    session.served_model.start()
    return show_model(session)


def show_model(session: Session) -> tuple[Any, Any, gr.Timer]:
    """(badge, task chips, timer): the state of the model, and whether to ask again."""
    served_model = session.served_model
    loading = served_model.loading  # first: if it ends meanwhile, the timer asks once more
    chips = tasks.task_chips(
        _tasks(served_model),
        tasks.note_on(served_model.name, served_model.model.source if served_model.model else None),
    )
    return served_model.status, chips, gr.Timer(active=loading)


def error_status(error: Exception) -> messages.Status:
    """An error as a line of the page. Its text is shown as it is: braces in it are no holes."""
    return messages.status("error", _explain(error))


def _explain(error: Exception) -> str:
    """An error in words, and in the log, which gets none of what the visitor sent."""
    if isinstance(error, ValueError | gr.Error):
        log.info("request refused: %s", type(error).__name__)
    else:
        log.error("request failed: %s at %s", type(error).__name__, serving.place_of(error))
    if isinstance(error, gr.Error):  # such as ZeroGPU's, when a visitor's quota is used up
        return re.sub(r"<[^>]*>", "", str(error.message))
    return messages.describe_error(error)
