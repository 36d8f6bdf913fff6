"""The page: give PaliGemma a picture and a prompt, watch it answer token by token, and look at every token.

From top to bottom: the models that the server holds, the handlers (generators that run the model and yield what
the page shows, and short functions), the components, the wiring, and `main()`. What is shown is computed in
`paligemma/view/` and drawn by the scripts in `assets/`, one a part of the page.
"""

from __future__ import annotations

import argparse
import base64
import json
import logging
import os
import platform
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import gradio as gr
import torch

import paligemma
from paligemma import checkpoint, lens
from paligemma.masks import fetch_vae_oid
from paligemma.view import attention, events, examples, export, logs, objects, runs, tasks, tokens, words
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
from paligemma.view.runs import Plan
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

Hosts = Sequence[ModelHost]

log = logging.getLogger("paligemma.app")


# Handlers: what the page shows


def ask(visit: Visit, picture: Any, prompt: Any, *decoding: Any) -> words.Notice:
    """Run was asked for: line up, and end what this visitor still has running."""
    visit.form = (uploaded_path(picture), prompt)
    visit.ask(Plan(visit.picture or uploaded_path(picture), (prompt, *decoding)))
    return words.notice("busy", "Waiting for its turn")


def ask_for_step(visit: Visit, picture: Any, prompt: Any, *decoding: Any) -> Any:
    """One token more: of the run on the page, or the first one when picture or prompt are others by now."""
    form = (uploaded_path(picture), prompt)
    if visit.form != form or visit.history.current is None:
        visit.form = form
        visit.ask(Plan(visit.picture or form[0], (prompt, *decoding), stop_after=1))
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


def ask_for_example(visit: Visit, event: gr.EventData, *decoding: Any) -> tuple[Any, Any, Any]:
    """An example was chosen: (picture, prompt, notice), and its run lines up."""
    example = _pick(visit.examples, _field(event, "index"))
    if example is None:
        return gr.skip(), gr.skip(), gr.skip()
    visit.form = None
    visit.ask(Plan(str(example.path), (example.prompt, *decoding)))
    return str(example.path), example.prompt, words.notice("busy", "Waiting for its turn")


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
        yield _news(visit, Update(_failure(error)))
    finally:
        control.finished = True


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
    return _news(visit, whole_page(visit.host, visit, run)) if run else gr.skip()


def ask_to_stop(visit: Visit) -> Any:
    """Stop was asked for: the run ends behind the token that it is at."""
    if visit.control.finished:
        return gr.skip()
    visit.control.stop_asked = True
    return words.notice("busy", "Stopping after this token")


def show_picture(visit: Visit, upload: Any) -> tuple[Any, Any]:
    """A picture was chosen or taken away: (notice, picture part)."""
    host, path = visit.host, uploaded_path(upload)
    visit.picture = None
    if path is None:
        return gr.skip(), None
    if host.model is None:
        return gr.skip(), gr.skip()  # what the model sees is known once there is one
    try:
        picture = read_picture(path, host.model.processor)
    except Exception as error:
        return _failure(error), None
    visit.picture = picture
    return gr.skip(), scene_of(host, picture)


def clear_picture(visit: Visit) -> None:
    """Another picture is wanted: the field is empty again."""
    visit.picture = None


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
    return _news(visit, show_again(visit.host, visit, run) if run else Update(_gone()))


def compare_runs(visit: Visit, event: gr.EventData) -> Any:
    """Two runs were ticked in the tree."""
    numbers = _field(event, "runs")
    found = [visit.history.find(number) for number in numbers] if isinstance(numbers, list) else []
    return runs.run_tree(visit.history, [run for run in found if run])


def look_inside(visit: Visit, event: gr.EventData) -> Iterator[tuple[Any, Any]]:
    """Attention and logit lens of one token: (notice, look)."""
    yield words.notice("busy", "Looking inside"), gr.skip()
    try:
        host, run = visit.host, visit.history.find(_field(event, "run"))
        if run is None:
            raise ValueError(words.RUN_GONE)
        require_same_model(host, run)
        for state in host.wait():
            yield state, gr.skip()
        index = read_index(_field(event, "index"))
        found = lens.inspect(host.model, run.picture.seen, run.request["prompt"], run.token_ids, index)
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
        host, run = visit.host, visit.history.find(_field(event, "run"))
        if run is None or host.model is None:
            raise ValueError(words.RUN_GONE)
        require_same_model(host, run)
        shares = lens.picture_shares(host.model, run.picture.seen, run.request["prompt"], run.token_ids)
        yield words.summary(run), {"run": run.number, "shares": attention.mean_shares(shares)}
    except Exception as error:
        yield _failure(error), gr.skip()


def download_objects(visit: Visit, event: gr.EventData) -> Any:
    """The picture with its objects as PNG, or the objects as COCO's JSON."""
    run, decoder = visit.history.find(_field(event, "run")), visit.host.mask_decoder
    if run is None:
        return gr.skip()
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


def import_run(visit: Visit, upload: Any) -> Any:
    """A run from a file, checked like any input, becomes the run on the page."""
    path = uploaded_path(upload)
    if path is None:
        return gr.skip()
    try:
        run = visit.history.add(export.read_run(read_upload(path), visit.history.next_number()))
        return _news(visit, show_again(visit.host, visit, run))
    except Exception as error:
        return _news(visit, Update(_failure(error)))


def _download(visit: Visit, name: str, media_type: str, **content: str) -> dict[str, Any]:
    visit.num_downloads += 1
    return {"serial": visit.num_downloads, "name": name, "type": media_type, **content}


def choose_model(visit: Visit, name: Any) -> tuple[Any, ...]:
    """Another model of the list shall answer; it is loaded now if it was not before."""
    visit.model = next((place for place, host in enumerate(visit.hosts) if host.name == name), 0)
    visit.host.start()
    visit.picture = None  # the next model may see it otherwise
    return show_model(visit)


def show_model(visit: Visit) -> tuple[Any, Any, Any, gr.Timer]:
    """(badge, task chips, inspector, timer): the state of the model, and whether to ask again."""
    host = visit.host
    cap = host.model.config.text_config.final_logit_softcapping if host.model else None
    chips = tasks.task_chips(_tasks(host), tasks.note_on(host.name, host.model.source if host.model else None))
    return host.notice, chips, {"soft_cap": cap}, gr.Timer(active=host.loading)


def _failure(error: Exception) -> words.Notice:
    _log(error)
    return words.failure(error)


def _log(error: Exception) -> None:
    if not isinstance(error, ValueError):
        log.error("a request failed", exc_info=error)


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
        with closing(host.model.stream(picture, **request)) as stream:
            following = Following(stream)
            for step in following:
                if step.finish_reason is None:
                    yield events.step_event(step)
        yield events.last_event(following.result, picture.size, host.mask_decoder)
    except Exception as error:
        _log(error)
        raise gr.Error(words.explain(error), print_exception=False) from error


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
        yield attention.inspection_event(lens.inspect(host.model, picture, prompt, ids, place), place)
    except Exception as error:
        _log(error)
        raise gr.Error(words.explain(error), print_exception=False) from error


class Page(gr.Blocks):
    """Blocks that also say in words what is wrong with a call that never reaches its handler."""

    async def process_api(self, *arguments: Any, **options: Any) -> dict[str, Any]:
        """As Gradio's, which answers such calls with an error without words."""
        try:
            return await super().process_api(*arguments, **options)
        except gr.Error:
            raise
        except ValueError:  # inputs are missing, are of another shape, or name a file that was not uploaded
            raise gr.Error(words.WRONG_INPUTS, print_exception=False) from None
        except Exception as error:
            _log(error)
            raise gr.Error(words.explain(error), print_exception=False) from None


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


def _decoding_controls() -> tuple[gr.Slider, gr.Slider, gr.Slider, gr.Slider, gr.Number, gr.Slider]:
    with gr.Accordion("Decoding", open=False, elem_id="decoding"):
        max_new_tokens = gr.Slider(1, 512, value=128, step=1, label="Largest number of new tokens")
        temperature = gr.Slider(0, 2, value=0, step=0.05, label="Temperature", info="0 takes the likeliest token")
        top_k = gr.Slider(0, 100, value=0, step=1, label="Top-k", info="0 keeps all")
        top_p = gr.Slider(0.01, 1, value=1, step=0.01, label="Top-p", info="1 keeps all")
        # Of None, Gradio's script makes 0; an empty text it leaves empty.
        seed = gr.Number(value="", label="Seed", placeholder="a fresh one for every run")
        top_n = gr.Slider(1, 50, value=10, step=1, label="Candidates shown")
    return max_new_tokens, temperature, top_k, top_p, seed, top_n


def _ask_column() -> tuple[Form, Buttons, gr.HTML, gr.HTML, gr.HTML]:
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
            decoding = _decoding_controls()
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
    tree = part("runs", elem_id="runs")
    with gr.Row(elem_id="files"):
        export_button = gr.Button("Export this run", size="sm", elem_id="export")
        imported = gr.UploadButton("Import a run", file_types=[".json"], size="sm", elem_id="import")
    return tree, export_button, imported


# Wiring


def build_app(*hosts: ModelHost) -> gr.Blocks:
    """The page and the HTTP API for these models, the first one first. Nothing is launched or loaded here."""
    shelf = examples.load_examples(ASSETS / "examples")
    with Page(
        title="PaliGemma, token by token", analytics_enabled=False, delete_cache=(600, 3600), fill_width=True
    ) as app:
        badge, models = _header(hosts)
        with gr.Row(elem_id="main"):
            form, buttons, scene_part, task_chips, notice = _ask_column()
            answer = _answer_column()
            example_chips = _examples_column(shelf)
        parts = Parts(badge, models, task_chips, notice, example_chips, scene_part, **answer)
        visit = gr.State(Visit(hosts, shelf))
        _wire_runs(visit, form, buttons, parts)
        _wire_form(visit, form, parts)
        _wire_answer(visit, parts)
        _wire_model_state(app, visit, parts)
        _wire_api(hosts, form)
    return app.queue(default_concurrency_limit=1, max_size=16)


def _wire_runs(visit: gr.State, form: Form, buttons: Buttons, parts: Parts) -> None:
    """What starts a run: each way lines up a plan at once, and then the plan is carried out in the queue."""
    # Without preprocessing the upload arrives as a checked path, unopened, and numbers as they were sent: opening
    # the one is up to open_picture, and reading the others to read_request.
    unopened = {"preprocess": False, **AT_ONCE}
    asked = [
        gr.on([form.prompt.submit, buttons.run.click], ask, [visit, *form], parts.notice, **unopened),
        buttons.step.click(ask_for_step, [visit, *form], parts.notice, **unopened),
        parts.inspector.branch(ask_for_branch, visit, parts.notice, **AT_ONCE),
        parts.examples.select(
            ask_for_example,
            [visit, *form.decoding],
            [form.picture, form.prompt, parts.notice],
            **unopened,
        ),
    ]
    for event in asked:
        event.then(answer_on_page, visit, parts.news, trigger_mode="multiple", **MODEL_QUEUE, **PRIVATE)
    # Gradio's own `cancels` ignores Run until the running step is over, and then reports an error.
    buttons.stop.click(ask_to_stop, visit, parts.notice, **AT_ONCE)


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


def _wire_answer(visit: gr.State, parts: Parts) -> None:
    """What can be done with an answer. Tokens and candidates need no event: the strip has their numbers."""
    parts.news.resync(send_all, visit, parts.news, **AT_ONCE)
    parts.strip.shares(picture_shares, visit, [parts.notice, parts.shares], **MODEL_QUEUE, **PRIVATE)
    parts.look.inspect(look_inside, visit, [parts.notice, parts.look], **MODEL_QUEUE, **PRIVATE)
    parts.objects.download(download_objects, visit, parts.download, **AT_ONCE)
    parts.runs.open(show_run, visit, parts.news, **AT_ONCE)
    parts.runs.compare(compare_runs, visit, parts.runs, **AT_ONCE)
    parts.export.click(export_run, visit, [parts.notice, parts.download], **AT_ONCE)
    parts.imported.upload(import_run, [visit, parts.imported], parts.news, preprocess=False, **AT_ONCE)


def _wire_model_state(app: gr.Blocks, visit: gr.State, parts: Parts) -> None:
    timer = gr.Timer(1.0)
    shown = [parts.badge, parts.tasks, parts.inspector, timer]
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
    parser.add_argument("--quantize", help="int8: smaller and faster, a little less exact (default: off)")
    parser.add_argument(
        "--mask-decoder",
        type=Path,
        help="vae-oid.npz, which reads the masks of Google's checkpoints (default: beside the model)",
    )
    parser.add_argument("--mcp", action="store_true", help="offer the API as MCP tools too; needs gradio[mcp]")
    parser.add_argument("--host", help="the address to listen on (default: GRADIO_SERVER_NAME, else 127.0.0.1)")
    parser.add_argument("--port", type=int, help="the port to listen on (default: the first free one from 7860)")
    return parser


def make_hosts(arguments: argparse.Namespace) -> list[ModelHost]:
    """A host for each model that the command line names; nothing is loaded yet.

    The bundled model answers where one of them cannot be loaded. Raises ValueError for a model or a mask decoder that
    can be none.
    """
    if arguments.mask_decoder and not arguments.mask_decoder.is_file():
        raise ValueError(f"--mask-decoder is {str(arguments.mask_decoder)!r}, and there is no such file")
    bundled = _bundled_host(arguments)
    return [_make_host(name, arguments, bundled) for name in arguments.model] or [bundled]


def _bundled_host(arguments: argparse.Namespace) -> ModelHost:
    folder = ASSETS / "demo"
    if not (folder / "config.json").is_file():
        return ModelHost("no model", None)
    # Named models may ask for a device or a type that is not to be had; as their stand-in this one asks for neither.
    own = ("revision", "device", "dtype", "quantize")
    wanted = {} if arguments.model else {name: getattr(arguments, name) for name in own}
    load = partial(paligemma.load, None, **wanted)
    return ModelHost(BUNDLED_NAME, load, _mask_decoders(folder, None if arguments.model else arguments.mask_decoder))


def _make_host(source: str, arguments: argparse.Namespace, bundled: ModelHost) -> ModelHost:
    folder = checkpoint.local_path(source)
    is_folder = folder.is_dir()
    return ModelHost(
        folder.resolve().name if is_folder else source,
        partial(paligemma.load, source, arguments.revision, arguments.device, arguments.dtype, arguments.quantize),
        _mask_decoders(folder, arguments.mask_decoder),
        None if is_folder else fetch_vae_oid,
        fallback=bundled,
    )


def _mask_decoders(folder: Path, named: Path | None) -> list[Path]:
    """Where a model's mask decoder may lie."""
    return [named] if named else [folder / file for file in MASK_DECODER_FILES]


def launch(app: gr.Blocks, **settings: Any) -> None:
    """Serve the page. Nothing is shared, reported or kept beyond the visit."""
    app.launch(
        theme=gr.themes.Base(font=("system-ui", "sans-serif"), font_mono=("ui-monospace", "monospace")),
        css_paths=[ASSETS / "page.css"],
        head=_head(),
        footer_links=["api"],
        allowed_paths=[str(ASSETS / "examples")],
        max_file_size=MAX_FILE_BYTES,
        show_error=False,
        enable_monitoring=False,
        run_history=False,
        state_session_capacity=200,
        ssr_mode=False,
        **settings,
    )


def _head() -> str:
    """What all parts of the page share: the words and `page.js`."""
    words_text = json.dumps(json.loads((ASSETS / "words.json").read_text(encoding="utf-8")), ensure_ascii=False)
    words_text = words_text.replace("<", "\\u003c")  # no word may end the script
    script = (ASSETS / "page.js").read_text(encoding="utf-8")
    return f"<script>window.paligemmaWords = {words_text};\n{script}</script>"


def _stop_like_ctrl_c(*_: Any) -> None:
    raise KeyboardInterrupt


def main() -> None:
    parser = build_parser()
    arguments = parser.parse_args()
    logs.set_up()
    signal.signal(signal.SIGTERM, _stop_like_ctrl_c)
    try:
        hosts = make_hosts(arguments)
    except ValueError as error:
        parser.error(str(error))
    hosts[0].start()
    with suppress(KeyboardInterrupt):
        launch(
            build_app(*hosts),
            server_name=arguments.host,
            server_port=arguments.port,
            mcp_server=arguments.mcp or None,
        )


if __name__ == "__main__":
    main()
