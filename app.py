"""The page: give PaliGemma a picture and a prompt, watch it answer token by token, and look at every token.

From top to bottom: the models that the server holds, the handlers (generators that run the model and yield what
the page shows, and short functions), the components, the wiring, and `main()`. What is shown is computed in
`paligemma/view/` and drawn by the scripts in `assets/`, one a part of the page: candidates and branches in
`inspector.js`, the colours of tokens in `strip.js`, boxes in `scene.js`, the heat map in `look.js`, languages in
`header.js`, status lines and the badge in `notice.js`.
"""

from __future__ import annotations

import argparse
import base64
import json
import logging
import os
import platform
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial, wraps
from pathlib import Path
from typing import Any, NamedTuple

try:
    import spaces  # on Hugging Face's ZeroGPU it lends the GPU, and it has to come before CUDA is looked at
except ImportError:
    spaces = None
import gradio as gr
import torch
from fastapi import Request, Response
from fastapi.responses import PlainTextResponse
from fastapi.routing import APIRoute

import paligemma
from paligemma import checkpoint, lens
from paligemma.masks import fetch_vae_oid
from paligemma.view import attention, events, examples, export, logs, objects, runs, serving, tasks, tokens, words
from paligemma.view.models import ModelHost, host_named
from paligemma.view.picture import open_picture, read_picture
from paligemma.view.requests import (
    MAX_FILE_BYTES,
    MAX_PROMPT_CHARACTERS,
    check_prompt_length,
    read_ids,
    read_index,
    read_prompt,
    read_request,
    read_upload,
    uploaded_path,
)
from paligemma.view.runner import Following, Update, carry_out, require_same_model, scene_of, show_again, whole_page
from paligemma.view.runs import Plan, Run
from paligemma.view.visit import Visit

ASSETS = Path(__file__).parent / "assets"
# What the page and the API call the model that comes with the app: a name in the manner of the hub's.
BUNDLED_NAME = "paligemma-emoji"
MASK_DECODER_FILES = ("mask_decoder.safetensors", "vae-oid.npz")
# Every event that runs the model shares one queue, and one at a time of it runs.
MODEL_QUEUE = {"concurrency_id": "model", "concurrency_limit": 1}
PANELS = (
    ("panel-candidates", "Candidates"),
    ("panel-objects", "Objects"),
    ("panel-look", "Attention and lens"),
    ("panel-runs", "Runs"),
)
PRIVATE = {"api_visibility": "private", "show_progress": "hidden"}
AT_ONCE = {**PRIVATE, "queue": False}

# How long a visit is kept that asks for nothing: while its page is open, and (by Gradio) an hour once it is closed.
VISIT_SECONDS = 12 * 3600

Hosts = Sequence[ModelHost]

log = logging.getLogger("paligemma.app")


# Handlers: what the page shows


def ask(visit: Visit, picture: Any, prompt: Any, *decoding: Any) -> words.Notice:
    """Run was asked for: line up, and end what this visitor still has running."""
    visit.form = (uploaded_path(picture), prompt)
    visit.ask(Plan(visit.asked_about(picture), (prompt, *decoding)))
    return words.notice("busy", "Waiting for its turn")


def ask_for_step(visit: Visit, picture: Any, prompt: Any, *decoding: Any) -> Any:
    """One token more: of the run on the page, or the first one when picture or prompt are others by now."""
    form = (uploaded_path(picture), prompt)
    if visit.form != form or visit.history.current is None:
        visit.form = form
        visit.ask(Plan(visit.asked_about(picture), (prompt, *decoding), stop_after=1))
        return words.notice("busy", "Waiting for its turn")
    if not visit.control.finished:
        return gr.skip()  # it is being written
    plan = visit.history.plan_step()
    visit.ask(plan)
    return gr.skip() if plan else words.notice("idle", "The answer has ended; nothing follows.")


def ask_for_branch(visit: Visit, event: gr.EventData) -> Any:
    """Another candidate was chosen: answer anew from there, by its id."""
    plan = visit.history.plan_branch(*(_field(event, name) for name in ("run", "index", "token_id")))
    visit.ask(plan)
    return words.notice("busy", "Waiting for its turn") if plan else _gone()


def ask_for_example(visit: Visit, event: gr.EventData, picture: Any, *decoding: Any) -> tuple[Any, Any, Any]:
    """An example was chosen: (picture part, prompt, notice), and its run lines up."""
    example = _pick(visit.examples, _field(event, "index"))
    if example is None:
        return gr.skip(), gr.skip(), gr.skip()
    visit.form, visit.example = (uploaded_path(picture), example.prompt), example.path
    visit.ask(Plan(example.path, (example.prompt, *decoding)))
    return _show_file(visit, example.path), example.prompt, words.notice("busy", "Waiting for its turn")


def answer_on_page(visit: Visit) -> Iterator[Any]:
    """Do what was asked for last. Whatever goes wrong becomes a line of the page; what was written stays."""
    plan, control = visit.take_plan(), visit.control
    if plan is None:
        yield gr.skip()
        return
    try:
        # Gradio closes an abandoned generator only once it has yielded: so yield before any work.
        yield _news(visit, Update(words.notice("busy", "Preparing")))
        for update in carry_out(visit.host, visit, plan, control):
            yield _news(visit, update)
    except Exception as error:
        _forget_form(visit, plan)
        yield _news(visit, Update(_failure(error)))
    finally:
        control.finished = True


def _forget_form(visit: Visit, plan: Plan | None) -> None:
    """A plan came to nothing: what the form had for a new run is not what the run on the page was asked."""
    if plan is None or (plan.parent is None and plan.replaces is None):
        visit.form = None


def _news(visit: Visit, update: Update) -> str:
    """An update as one text: what changes, by its name, and a number by which the page sees whether it missed one.

    One output, because Gradio builds a component anew for each output that is skipped; and text, because of data it
    sends how they differ from the data before, which is longer than new tokens are.
    """
    visit.num_news += 1
    changes = {name: value for name, value in update._asdict().items() if value is not None}
    return json.dumps({"number": visit.num_news, **changes}, ensure_ascii=False, separators=(",", ":"))


def send_all(visit: Visit) -> Any:
    """The page missed an update: everything of the current run."""
    run = visit.history.current
    visit.picture = None  # the picture may be what was missed
    return _news(visit, whole_page(visit, run)) if run else gr.skip()


def tell_line_is_full(visit: Visit) -> words.Notice:
    """The queue took no more; nothing of the visit but what was asked for is lost."""
    _forget_form(visit, visit.take_plan())
    visit.control.finished = True
    return words.notice("error", words.LINE_IS_FULL)


def ask_to_stop(visit: Visit) -> Any:
    """Stop was asked for: the run ends behind the token that it is at, and one that still waits never begins."""
    control = visit.control
    if control.finished:
        return gr.skip()
    control.stop_asked = True  # first: a run that takes the plan at the same moment looks here before it begins
    plan = visit.take_plan()
    if plan:
        _forget_form(visit, plan)
        control.finished = True
        return words.notice("idle", "Stopped")
    return words.notice("busy", "Stopping after this token")


def show_picture(visit: Visit, upload: Any) -> tuple[Any, Any]:
    """A picture was chosen or taken away: (notice, picture part)."""
    path = uploaded_path(upload)
    visit.picture = visit.example = None
    if path is None:
        return gr.skip(), None
    try:
        return gr.skip(), _show_file(visit, path)
    except Exception as error:
        return _failure(error), None


def _show_file(visit: Visit, path: str | Path) -> Any:
    """The picture part with this file; nothing before there is a model: only then it is known what that sees."""
    visit.picture = None
    if visit.host.model is None:
        return gr.skip()
    visit.picture = read_picture(path, visit.host.model.processor)
    return scene_of(visit.host, visit.picture)


def clear_picture(visit: Visit) -> None:
    """Another picture is wanted: the field is empty again."""
    visit.picture = visit.example = None


def write_prompt(visit: Visit, prompt: Any, event: gr.EventData) -> Any:
    """A task chip was pressed: it only writes the prompt."""
    known = _tasks(visit.host)
    task = _pick(known, _field(event, "index"))
    return gr.skip() if task is None else tasks.write_prompt(task, prompt if isinstance(prompt, str) else "", known)


def _field(event: gr.EventData, name: str) -> Any:
    """What the page said with an event; None for what it left out, as only a foreign client does."""
    data = getattr(event, "_data", None)
    return data.get(name) if isinstance(data, Mapping) else None


def _gone() -> words.Notice:
    return words.notice("error", words.RUN_GONE)


def _pick(choices: Sequence[Any], index: Any) -> Any:
    """One of the choices by the place that the page names; None for a place that does not exist."""
    return choices[index] if isinstance(index, int) and 0 <= index < len(choices) else None


def _tasks(host: ModelHost) -> tuple[tasks.Task, ...]:
    return tasks.tasks_of(host.model.source) if host.model else ()


def show_run(visit: Visit, event: gr.EventData) -> Any:
    """An earlier run was chosen in the tree."""
    run = visit.history.find(_field(event, "run"))
    return _news(visit, show_again(visit, run) if run else Update(_gone()))


def compare_runs(visit: Visit, event: gr.EventData) -> Any:
    """Two runs were ticked in the tree."""
    numbers = _field(event, "runs")
    found = [visit.history.find(number) for number in numbers] if isinstance(numbers, list) else []
    return runs.run_tree(visit.history, [run for run in found if run])


def look_inside(visit: Visit, event: gr.EventData) -> Iterator[tuple[Any, Any]]:
    """Attention and logit lens of one token: (notice, look)."""
    yield words.notice("busy", "Looking inside"), gr.skip()
    try:
        host, run = yield from _wait_to_look(visit, event)
        index = read_index(_field(event, "index"))
        found = host.look(lens.inspect, run.picture.seen, run.request["prompt"], run.token_ids, index)
        yield (
            words.notice("idle", "Looked inside token {number}", number=index + 1),
            attention.look(run.number, found, index),
        )
    except Exception as error:
        yield _failure(error), gr.skip()


def picture_shares(visit: Visit, event: gr.EventData) -> Iterator[tuple[Any, Any]]:
    """How much of its attention each token of a run gave to the picture: (notice, shares)."""
    yield words.notice("busy", "Looking inside"), gr.skip()
    try:
        host, run = yield from _wait_to_look(visit, event)
        shares = host.look(lens.picture_shares, run.picture.seen, run.request["prompt"], run.token_ids)
        yield words.summary(run), {"run": run.number, "shares": attention.mean_shares(shares)}
    except Exception as error:
        yield _failure(error), gr.skip()


def _wait_to_look(visit: Visit, event: gr.EventData) -> Generator[tuple[Any, Any], None, tuple[ModelHost, Run]]:
    """The run that an event names and the model that made it, once that is loaded; ValueError where they are not so."""
    host, run = visit.host, visit.history.find(_field(event, "run"))
    if run is None:
        raise ValueError(words.RUN_GONE)
    for state in host.wait():
        yield state, gr.skip()
    require_same_model(host, run)
    return host, run


def download_objects(visit: Visit, event: gr.EventData) -> Any:
    """The picture with its objects as PNG, or the objects as COCO's JSON."""
    run = visit.history.find(_field(event, "run"))
    if run is None:
        return gr.skip()
    host = visit.host_of(run)
    decoder = host and host.mask_decoder
    if _field(event, "kind") == "png":
        file = base64.b64encode(objects.drawn_picture(run, decoder)).decode()
        return _download(visit, "objects.png", "image/png", base64=file)
    return _download(visit, "objects.json", "application/json", text=objects.coco_file(run, decoder))


def export_run(visit: Visit) -> tuple[Any, Any]:
    """The run on the page as a file: (notice, download)."""
    run = visit.history.current
    if run is None or not run.steps:
        return words.notice("idle", "There is no run yet."), gr.skip()
    versions = {"python": platform.python_version(), "torch": torch.__version__, "gradio": gr.__version__}
    text = export.write_run(run, versions)
    return gr.skip(), _download(visit, f"run-{run.number}.json", "application/json", text=text)


def import_run(visit: Visit, upload: Any, picture: Any, prompt: Any) -> Any:
    """A run from a file, checked like any input, becomes the run on the page; the form stays as it is."""
    path = uploaded_path(upload)
    if path is None:
        return gr.skip()
    try:
        run = visit.history.add(export.read_run(read_upload(path), visit.history.next_number()))
        visit.form = (uploaded_path(picture), prompt)
        return _news(visit, show_again(visit, run))
    except Exception as error:
        return _news(visit, Update(_failure(error)))


def _download(visit: Visit, name: str, media_type: str, **content: str) -> dict[str, Any]:
    visit.num_downloads += 1
    return {"serial": visit.num_downloads, "name": name, "type": media_type, **content}


def choose_model(visit: Visit, name: Any) -> tuple[Any, ...]:
    """Another model of the list shall answer; it is loaded now if it was not before."""
    visit.model = next((place for place, host in enumerate(visit.hosts) if host.name == name), 0)
    visit.host.start()
    return show_model(visit)


def show_model(visit: Visit) -> tuple[Any, Any, gr.Timer]:
    """(badge, task chips, timer): the state of the model, and whether to ask again."""
    host = visit.host
    loading = host.loading  # first: if it ends meanwhile, the timer asks once more
    chips = tasks.task_chips(_tasks(host), tasks.note_on(host.name, host.model.source if host.model else None))
    return host.notice, chips, gr.Timer(active=loading)


def _failure(error: Exception) -> words.Notice:
    """An error as a line of the page. Its text is shown as it is: braces in it are no holes."""
    return words.notice("error", _explain(error))


def _explain(error: Exception) -> str:
    """An error in words, and in the log, which gets none of what the visitor sent."""
    if isinstance(error, ValueError | gr.Error):
        log.info("request refused: %s", type(error).__name__)
    else:
        log.error("request failed: %s at %s", type(error).__name__, serving.place_of(error))
    if isinstance(error, gr.Error):  # such as ZeroGPU's, when a visitor's quota is used up
        return re.sub(r"<[^>]*>", "", str(error.message))
    return words.explain(error)


# Handlers: the HTTP API


def answer_over_api(
    hosts: Hosts,
    image: Any,
    prompt: Any,
    max_new_tokens: Any,
    temperature: Any,
    top_k: Any,
    top_p: Any,
    seed: Any = None,
    top_n: Any = 10,
    forced_ids: Any = None,
    time_limit: Any = None,
    model: Any = None,
) -> Iterator[events.Event]:
    """Answer a prompt about a picture: an event a token, in order.

    Every event is {"text", "step", "finish_reason"}; while the model is not ready or prepares, "step" is null. The
    last event adds "detections" and "timing".
    """
    yield events.WAITING_EVENT
    try:
        picture = open_picture(uploaded_path(image))
        request = read_request(prompt, max_new_tokens, temperature, top_k, top_p, seed, top_n, forced_ids, time_limit)
        host = host_named(hosts, model)
        for _ in host.wait():
            yield events.WAITING_EVENT
        check_prompt_length(host.model.processor, request["prompt"])
        with closing(host.stream(picture, **request)) as stream:
            following = Following(stream)
            for step in following:
                if step.finish_reason is None:
                    yield events.step_event(step)
        yield events.last_event(following.result, picture.size, host.mask_decoder)
    except Exception as error:
        raise gr.Error(_explain(error), print_exception=False) from None


def inspect_over_api(
    hosts: Hosts, image: Any, prompt: Any, token_ids: Any, index: Any, model: Any = None
) -> Iterator[dict[str, Any] | None]:
    """Look inside the step that wrote token `index` of an answer, whose ids are `token_ids`.

    null while the model is not ready; then {"index", "grid": [rows, columns] of patches, "attention": per layer and
    head the weight of each patch, row by row, "picture_share": per layer and head, "lens": per depth {"layer",
    "token_id", "piece", "prob", "rank_of_final", "entropy"}}. Attention is not an explanation.
    """
    yield None
    try:
        picture, prompt = open_picture(uploaded_path(image)), read_prompt(prompt)
        ids, place = read_ids("token_ids", token_ids), read_index(index)
        host = host_named(hosts, model)
        for _ in host.wait():
            yield None
        check_prompt_length(host.model.processor, prompt)
        yield attention.inspection_event(host.look(lens.inspect, picture, prompt, ids, place), place)
    except Exception as error:
        raise gr.Error(_explain(error), print_exception=False) from None


class Page(gr.Blocks):
    """Blocks that also say in words what is wrong with a call that never reaches its handler."""

    async def process_api(self, *arguments: Any, **options: Any) -> dict[str, Any]:
        """As Gradio's, which answers such calls with an error without words."""
        try:
            return await super().process_api(*arguments, **options)
        except gr.Error:
            raise
        except ValueError as error:  # inputs are missing, are of another shape, or name a file that was not uploaded
            log.info("call refused: %s at %s", type(error).__name__, serving.place_of(error))
            raise gr.Error(words.WRONG_INPUTS, print_exception=False) from None
        except Exception as error:
            raise gr.Error(_explain(error), print_exception=False) from None


# Components


def part(script: str, value: Any = None, **settings: Any) -> gr.HTML:
    """A part of the page that `assets/<script>.js` draws from data.

    The template is static and holds no data, because Gradio compiles templates into code; the script writes what it
    gets as text.
    """
    return gr.HTML(
        value,
        html_template='<div class="part"></div>',
        js_on_load=(ASSETS / f"{script}.js").read_text(encoding="utf-8"),
        apply_default_css=False,
        **settings,
    )


class Form(NamedTuple):
    """The components of a request, in the order in which the handlers take them."""

    picture: gr.Image
    prompt: gr.Textbox
    max_new_tokens: gr.Slider
    temperature: gr.Slider
    top_k: gr.Slider
    top_p: gr.Slider
    seed: gr.Number
    top_n: gr.Slider

    @property
    def decoding(self) -> tuple[Any, ...]:
        return self[2:]


class Buttons(NamedTuple):
    """What starts and ends runs."""

    run: gr.Button
    step: gr.Button
    stop: gr.Button


class Parts(NamedTuple):
    """The other parts of the page that events read or write."""

    badge: gr.HTML
    models: gr.Dropdown
    tasks: gr.HTML
    notice: gr.HTML
    examples: gr.HTML
    scene: gr.HTML
    strip: gr.HTML
    inspector: gr.HTML
    objects: gr.HTML
    look: gr.HTML
    shares: gr.HTML
    runs: gr.HTML
    export: gr.Button
    imported: gr.UploadButton
    download: gr.HTML
    news: gr.HTML


def _header(hosts: Hosts) -> tuple[gr.HTML, gr.Dropdown]:
    """(badge, list of models); the list is shown where there is a choice."""
    with gr.Row(elem_id="header"):
        part("heading", text="PaliGemma, token by token", tag="h1", elem_id="title")
        badge = part("notice", hosts[0].notice, follows=False, elem_id="badge")
        names = [host.name for host in hosts]
        models = gr.Dropdown(
            names, value=names[0], label="Model", visible=len(hosts) > 1, elem_id="models", container=False
        )
        part("header", elem_id="choices")
    return badge, models


def _picture_field() -> gr.Image:
    return gr.Image(
        label="Picture",
        type="filepath",
        image_mode=None,
        placeholder="Drop a picture here, paste it, or click",
        sources=["upload", "clipboard", "webcam"],
        height=240,
        buttons=["fullscreen"],
        elem_id="picture",
    )


def _prompt_field() -> gr.Textbox:
    return gr.Textbox(
        label="Prompt",
        value="caption en",
        placeholder="caption en · detect dog · answer en what is this?",
        max_length=MAX_PROMPT_CHARACTERS,
        max_lines=4,
        elem_id="prompt",
    )


def _buttons() -> Buttons:
    with gr.Row(elem_id="buttons"):
        run = gr.Button("Run", variant="primary", elem_id="run", min_width=80)
        step = gr.Button("One step", variant="secondary", elem_id="step", min_width=80)
        stop = gr.Button("Stop", variant="secondary", elem_id="stop", min_width=80)
    return Buttons(run, step, stop)


def _decoding_controls(most_tokens: int) -> tuple[gr.Slider, gr.Slider, gr.Slider, gr.Slider, gr.Number, gr.Slider]:
    with gr.Accordion("Decoding", open=False, elem_id="decoding"):
        max_new_tokens = gr.Slider(
            1, most_tokens, value=min(128, most_tokens), step=1, label="Largest number of new tokens"
        )
        temperature = gr.Slider(0, 2, value=0, step=0.05, label="Temperature", info="0 takes the likeliest token")
        top_k = gr.Slider(0, 100, value=0, step=1, label="Top-k", info="0 keeps all")
        top_p = gr.Slider(0.01, 1, value=1, step=0.01, label="Top-p", info="1 keeps all")
        # Of None, Gradio's script makes 0; an empty text it leaves empty.
        seed = gr.Number(value="", label="Seed", placeholder="a fresh one for every run")
        top_n = gr.Slider(1, 50, value=10, step=1, label="Candidates shown")
    return max_new_tokens, temperature, top_k, top_p, seed, top_n


def _ask_column(most_tokens: int) -> tuple[Form, Buttons, gr.HTML, gr.HTML, gr.HTML]:
    """What a person gives: (form, buttons, picture part, task chips, notice)."""
    with gr.Column(elem_id="ask", min_width=300):
        with gr.Column(elem_classes="card"):
            picture = _picture_field()
            scene_part = part("scene", elem_id="scene")
        with gr.Column(elem_classes="card"):
            task_chips = part("chips", name="Tasks", elem_id="tasks")
            prompt = _prompt_field()
            buttons = _buttons()
            welcome = words.notice("idle", "Choose a picture, write a prompt, press Enter.")
            notice = part("notice", welcome, follows=True, elem_id="notice")
            decoding = _decoding_controls(most_tokens)
    return Form(picture, prompt, *decoding), buttons, scene_part, task_chips, notice


def _examples_column(shelf: Sequence[examples.Example]) -> gr.HTML:
    with gr.Column(elem_id="examples", min_width=300, visible=bool(shelf)), gr.Column(elem_classes="card"):
        part("heading", text="Examples", tag="h2")
        return part("chips", examples.example_chips(shelf), name="Examples", elem_id="example-chips")


def _answer_column() -> dict[str, Any]:
    """The answer and everything that can be seen of it, by the names of `Parts`."""
    candidates, found, inside, history = ({"elem_id": name, "min_width": 0} for name, _ in PANELS)
    with gr.Column(elem_id="answer", min_width=300):
        with gr.Column(elem_classes="card"):
            strip = part("strip", elem_id="strip")
        with gr.Column(elem_classes="card"):
            part("tabs", panels=PANELS)
            with gr.Column(**candidates):
                inspector = part("inspector", columns=tokens.CANDIDATE_COLUMNS, elem_id="inspector")
            with gr.Column(**found):
                object_table = part("objects", elem_id="objects")
            with gr.Column(**inside):
                look = part("look", columns=attention.LENS_COLUMNS, elem_id="look")
            with gr.Column(**history):
                tree, export_button, imported = _runs_panel()
            # These draw nothing.
            shares, download, news = part("relay", topic="shares"), part("download"), part("news")
    return {
        "strip": strip,
        "inspector": inspector,
        "objects": object_table,
        "look": look,
        "runs": tree,
        "export": export_button,
        "imported": imported,
        "shares": shares,
        "download": download,
        "news": news,
    }


def _runs_panel() -> tuple[gr.HTML, gr.Button, gr.UploadButton]:
    tree = part("runs", most=runs.MAX_RUNS, elem_id="runs")
    with gr.Row(elem_id="files"):
        export_button = gr.Button("Export this run", size="sm", elem_id="export")
        imported = gr.UploadButton("Import a run", file_types=[".json"], size="sm", elem_id="import")
    return tree, export_button, imported


# Wiring


def build_app(*hosts: ModelHost) -> gr.Blocks:
    """The page and the HTTP API for these models, the first one first. Nothing is launched or loaded here."""
    shelf, limits = examples.load_examples(ASSETS / "examples"), hosts[0].limits
    with Page(
        title="PaliGemma, token by token", analytics_enabled=False, delete_cache=(600, 3600), fill_width=True
    ) as app:
        badge, models = _header(hosts)
        with gr.Row(elem_id="main"):
            form, buttons, scene_part, task_chips, notice = _ask_column(limits.max_new_tokens)
            answer = _answer_column()
            example_chips = _examples_column(shelf)
        parts = Parts(badge, models, task_chips, notice, example_chips, scene_part, **answer)
        visit = gr.State(Visit(hosts, shelf), time_to_live=VISIT_SECONDS, delete_callback=ask_to_stop)
        _wire_runs(visit, form, buttons, parts)
        _wire_form(visit, form, parts)
        _wire_answer(visit, form, parts)
        _wire_model_state(app, visit, parts)
        _wire_api(hosts, form)
    return app.queue(default_concurrency_limit=1, max_size=limits.waiting)


def _wire_runs(visit: gr.State, form: Form, buttons: Buttons, parts: Parts) -> None:
    """What starts a run: each way lines up a plan at once, and then the plan is carried out in the queue."""
    # Without preprocessing the upload arrives as a checked path, unopened, and numbers as they were sent: opening
    # the one is up to open_picture, and reading the others to read_request.
    unopened = {"preprocess": False, **AT_ONCE}
    noticed = [visit, parts.notice]
    # The place in the queue goes to the notice, whose script puts it in words.
    queued = {**PRIVATE, **MODEL_QUEUE, "show_progress": "minimal", "show_progress_on": parts.notice}
    asked = [
        gr.on([form.prompt.submit, buttons.run.click], _renew(ask), [visit, *form], noticed, **unopened),
        buttons.step.click(_renew(ask_for_step), [visit, *form], noticed, **unopened),
        parts.inspector.branch(_renew(ask_for_branch), visit, noticed, **AT_ONCE),
        parts.examples.select(
            _renew(ask_for_example),
            [visit, form.picture, *form.decoding],
            [visit, parts.scene, form.prompt, parts.notice],
            **unopened,
        ),
    ]
    for event in asked:
        answer = event.then(answer_on_page, visit, parts.news, trigger_mode="multiple", **queued)
        # Errors of a run become lines of the page, so a failure means that the queue did not take it.
        answer.failure(tell_line_is_full, visit, parts.notice, **AT_ONCE)
    # Gradio's own `cancels` ignores Run until the running step is over, and then reports an error.
    buttons.stop.click(ask_to_stop, visit, parts.notice, **AT_ONCE)


def _renew(handler: Callable[..., Any]) -> Callable[..., Any]:
    """The handler with the visit before its outputs: Gradio counts a visit's age from when it was last given back."""

    @wraps(handler)
    def handle(visit: Visit, *arguments: Any, **event: Any) -> tuple[Any, ...]:
        outputs = handler(visit, *arguments, **event)
        return (visit, *outputs) if isinstance(outputs, tuple) else (visit, outputs)

    return handle


def _wire_form(visit: gr.State, form: Form, parts: Parts) -> None:
    form.picture.change(
        show_picture,
        [visit, form.picture],
        [parts.notice, parts.scene],
        preprocess=False,
        **AT_ONCE,
    )
    parts.scene.clear(clear_picture, visit, form.picture, **AT_ONCE)
    parts.tasks.select(write_prompt, [visit, form.prompt], form.prompt, **AT_ONCE).then(
        None, js="() => document.querySelector('#prompt textarea').focus()", **PRIVATE
    )


def _wire_answer(visit: gr.State, form: Form, parts: Parts) -> None:
    """What can be done with an answer. Tokens and candidates need no event: the strip has their numbers."""
    parts.news.resync(send_all, visit, parts.news, **AT_ONCE)
    parts.strip.shares(picture_shares, visit, [parts.notice, parts.shares], **MODEL_QUEUE, **PRIVATE)
    parts.look.inspect(look_inside, visit, [parts.notice, parts.look], **MODEL_QUEUE, **PRIVATE)
    parts.objects.download(download_objects, visit, parts.download, **AT_ONCE)
    parts.runs.open(show_run, visit, parts.news, **AT_ONCE)
    parts.runs.compare(compare_runs, visit, parts.runs, **AT_ONCE)
    parts.export.click(export_run, visit, [parts.notice, parts.download], **AT_ONCE)
    imported = [visit, parts.imported, form.picture, form.prompt]
    parts.imported.upload(import_run, imported, parts.news, preprocess=False, **AT_ONCE)


def _wire_model_state(app: gr.Blocks, visit: gr.State, parts: Parts) -> None:
    timer = gr.Timer(1.0)
    shown = [parts.badge, parts.tasks, timer]
    gr.on([app.load, timer.tick], show_model, visit, shown, **AT_ONCE)
    parts.models.input(choose_model, [visit, parts.models], shown, **AT_ONCE)


def _wire_api(hosts: Hosts, form: Form) -> None:
    """The endpoints hang on components that the page does not show, so that Gradio checks files for them too."""
    form = form._replace(seed=gr.Number(visible=False, value=None, precision=0, label="empty: a fresh one"))
    generate, inspect = partial(answer_over_api, hosts), partial(inspect_over_api, hosts)
    generate.__name__, inspect.__name__ = "generate", "inspect"  # as MCP tools they are called so
    model = gr.Textbox(visible=False, value=None, label="one of /models; empty: the first one")
    forced_ids = _token_ids("token ids to begin the answer with")
    time_limit = gr.Number(visible=False, label="seconds")
    gr.Button(visible=False).click(
        generate,
        [*form, forced_ids, time_limit, model],
        gr.JSON(visible=False, label="event"),
        api_name="generate",
        api_description=answer_over_api.__doc__,
        preprocess=False,
        **MODEL_QUEUE,
    )
    token_ids = _token_ids("the ids of an answer")
    index = gr.Number(visible=False, label="which of them, from 0")
    gr.Button(visible=False).click(
        inspect,
        [form.picture, form.prompt, token_ids, index, model],
        gr.JSON(visible=False, label="inspection"),
        api_name="inspect",
        api_description=inspect_over_api.__doc__,
        preprocess=False,
        **MODEL_QUEUE,
    )

    def models() -> list[dict[str, Any]]:
        return [host.describe() for host in hosts]

    gr.api(models, api_name="models", api_description="The models of this server.", queue=False)


def _token_ids(label: str) -> gr.JSON:
    """A field of token ids that says so: of "any JSON", which Gradio would say, MCP clients can call no tool."""
    field = gr.JSON(visible=False, label=label)
    field.api_info = lambda: {"type": "array", "items": {"type": "integer"}}
    return field


# The process


def build_parser() -> argparse.ArgumentParser:
    """The command line; `--model` falls back to the environment variable MODEL_ID."""
    parser = argparse.ArgumentParser(
        description="A page on which PaliGemma answers prompts about pictures, with the candidates behind every token."
    )
    parser.add_argument(
        "--model",
        nargs="+",
        default=os.environ.get("MODEL_ID", "").split(),
        help="a folder in the hub's layout, or a hub id; several make a list to choose from "
        "(default: MODEL_ID from the environment, else the bundled one)",
    )
    parser.add_argument("--revision", help="the hub's branch, tag or commit")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N or mps (default: %(default)s)")
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16 (default: %(default)s)")
    parser.add_argument(
        "--quantize", help="int8: smaller, a little less exact; faster on a CPU, slower elsewhere (default: off)"
    )
    parser.add_argument(
        "--mask-decoder",
        type=Path,
        help="vae-oid.npz, which reads the masks of Google's checkpoints (default: beside the model)",
    )
    parser.add_argument("--mcp", action="store_true", help="offer the API as MCP tools too; needs gradio[mcp]")
    parser.add_argument("--host", help="the address to listen on (default: GRADIO_SERVER_NAME, else 127.0.0.1)")
    parser.add_argument("--port", type=int, help="the port to listen on (default: the first free one from 7860)")
    return parser


def make_hosts(arguments: argparse.Namespace, limits: serving.Limits | None = None) -> list[ModelHost]:
    """A host for each model that the command line names; nothing is loaded yet.

    The bundled model answers where one of them cannot be loaded. Raises ValueError for a model or a mask decoder that
    can be none.
    """
    if arguments.mask_decoder and not arguments.mask_decoder.is_file():
        raise ValueError(f"--mask-decoder is {str(arguments.mask_decoder)!r}, and there is no such file")
    how = {"limits": limits or serving.Limits(), "lend": lend_gpu if is_on_zero_gpu() else None}
    bundled = _bundled_host(arguments, **how)
    hosts = [_make_host(name, arguments, bundled, **how) for name in arguments.model] or [bundled]
    names = [host.name for host in hosts]
    if len(set(names)) < len(names):
        raise ValueError(f"--model names models that go by one name: {', '.join(names)}. Rename a folder.")
    return hosts


def _bundled_host(arguments: argparse.Namespace, **how: Any) -> ModelHost:
    folder = ASSETS / "demo"
    if not (folder / "config.json").is_file():
        return ModelHost("no model", None, **how)
    # Named models may ask for a device or a type that is not to be had; as their stand-in this one asks for neither.
    own = ("revision", "device", "dtype", "quantize")
    wanted = {} if arguments.model else {name: getattr(arguments, name) for name in own}
    mask_decoders = _mask_decoders(folder, None if arguments.model else arguments.mask_decoder)
    return ModelHost(BUNDLED_NAME, partial(paligemma.load, None, **wanted), mask_decoders, **how)


def _make_host(source: str, arguments: argparse.Namespace, bundled: ModelHost, **how: Any) -> ModelHost:
    folder = checkpoint.local_path(source)
    is_folder = folder.is_dir()
    name = BUNDLED_NAME if checkpoint.is_bundled(folder) else folder.resolve().name if is_folder else source
    return ModelHost(
        name,
        partial(paligemma.load, source, arguments.revision, arguments.device, arguments.dtype, arguments.quantize),
        _mask_decoders(folder, arguments.mask_decoder),
        None if is_folder else fetch_vae_oid,
        fallback=bundled,
        **how,
    )


def _mask_decoders(folder: Path, named: Path | None) -> list[Path]:
    """Where a model's mask decoder may lie."""
    return [named] if named else [folder / file for file in MASK_DECODER_FILES]


def is_on_zero_gpu() -> bool:
    """Whether this is a Space whose GPU is lent for one request at a time."""
    return spaces is not None and os.environ.get("SPACES_ZERO_GPU", "").lower() in ("1", "t", "true")


def lend_gpu(function: Callable, seconds: Callable[..., int]) -> Callable:
    """The function in a process that has the GPU, for as many seconds as `seconds` says of the same arguments."""
    return spaces.GPU(duration=seconds)(function)


def start_hosts(hosts: Hosts) -> None:
    """Load the first model in a thread; where the GPU is lent, all of them now, since later there is none to see."""
    if not is_on_zero_gpu():
        return hosts[0].start()
    for host in hosts:
        host.load_now()


def read_sign_in(environment: Mapping[str, str]) -> list[tuple[str, str]] | None:
    """The names and passwords of SIGN_IN, "NAME:PASSWORD", several with spaces between; None: everybody may come in.

    Raises ValueError, which does not hold them, for anything else.
    """
    pairs = [tuple(pair.split(":", 1)) for pair in environment.get("SIGN_IN", "").split()]
    if not all(len(pair) == 2 and all(pair) for pair in pairs):
        raise ValueError("SIGN_IN is not what is allowed: NAME:PASSWORD, or several of them with spaces between")
    return pairs or None


@contextmanager
def private_folder() -> Iterator[Path]:
    """A new folder for what visitors upload, closed to other users of the machine, and removed at the end.

    It lies in GRADIO_TEMP_DIR, or in the system's folder for such things.
    """
    parent = os.environ.get("GRADIO_TEMP_DIR")
    if parent:
        Path(parent).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="paligemma-", dir=parent, ignore_cleanup_errors=True) as folder:
        os.environ["GRADIO_TEMP_DIR"] = folder
        yield Path(folder)


def launch(app: gr.Blocks, **settings: Any) -> None:
    """Serve the page. Nothing is shared, reported or kept beyond the visit.

    Raises ValueError, with what to do, where the address or the port cannot be had.
    """
    try:
        app.launch(
            theme=gr.themes.Base(font=("system-ui", "sans-serif"), font_mono=("ui-monospace", "monospace")),
            css_paths=[ASSETS / "page.css"],
            head=_head(),
            footer_links=["api"],
            allowed_paths=[],
            max_file_size=MAX_FILE_BYTES,
            show_error=False,
            enable_monitoring=False,
            run_history=False,
            state_session_capacity=200,
            ssr_mode=False,
            **settings,
        )
    except (OSError, OverflowError) as error:
        if isinstance(error, OSError) and "empty port" not in str(error):
            raise
        port = settings.get("server_port") or os.environ.get("GRADIO_SERVER_PORT", "7860 and the hundred behind it")
        raise ValueError(
            f"Port {port} cannot be had: it is beyond 65535, something else listens there, or the address is not this "
            "machine's. End that, or choose another one: python app.py --port 8080"
        ) from None


def _head() -> str:
    """What all parts of the page share: the words and `page.js`."""
    words_text = json.dumps(json.loads((ASSETS / "words.json").read_text(encoding="utf-8")), ensure_ascii=False)
    words_text = words_text.replace("<", "\\u003c")  # no word may end the script
    script = (ASSETS / "page.js").read_text(encoding="utf-8")
    return f"<script>window.paligemmaWords = {words_text};\n{script}</script>"


def server_settings(hosts: Hosts) -> dict[str, Any]:
    """What Gradio's server gets beside the page: /healthz, and words for a disk that is full.

    /healthz says whether the first model is ready to answer (200) or not (503), the state of each, and which model
    answers for it.
    """

    def health(response: Response) -> dict[str, Any]:
        response.status_code = 200 if hosts[0].state == "ready" else 503
        names = ("name", "state", "answered_by")
        models = [{name: host.describe()[name] for name in names} for host in hosts]
        return {"state": hosts[0].state, "models": models}

    def say_what_failed(request: Request, error: OSError) -> PlainTextResponse:
        return PlainTextResponse(_explain(error), 507 if words.is_disk_full(error) else 500)

    return {"routes": [APIRoute("/healthz", health)], "exception_handlers": {OSError: say_what_failed}}


def serve(hosts: Hosts, **settings: Any) -> None:
    """Serve the page until the process is told to end, and leave nothing behind."""
    with private_folder():
        app = build_app(*hosts)
        launch(app, prevent_thread_lock=True, app_kwargs=server_settings(hosts), **settings)
        try:
            while True:
                time.sleep(0.5)
        finally:
            # Open pages never hang up by themselves; that they are hung up on is no news.
            logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
            app.server.force_exit = True
            app.close(verbose=False)


def _end(*_: Any) -> None:
    sys.exit(0)


def main() -> None:
    parser = build_parser()
    arguments = parser.parse_args()
    logs.set_up()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _end)
    try:
        limits, sign_in = serving.Limits.from_environment(os.environ), read_sign_in(os.environ)
        hosts = make_hosts(arguments, limits)
        start_hosts(hosts)
        serve(
            hosts,
            server_name=arguments.host,
            server_port=arguments.port,
            auth=sign_in,
            mcp_server=arguments.mcp or None,
        )
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
