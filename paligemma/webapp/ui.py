"""The components of the page, and their connections to the handlers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, NamedTuple

import gradio as gr

from paligemma.paths import ASSETS
from paligemma.webapp import examples, messages, runs
from paligemma.webapp.api import MODEL_QUEUE, PRIVATE, Page, add_api
from paligemma.webapp.handlers import (
    apply_task,
    choose_model,
    clear_image,
    compare_runs,
    download_objects,
    export_run,
    image_shares,
    import_run,
    inspect_token,
    report_queue_full,
    resend_page,
    run_pending,
    show_image,
    show_model,
    show_run,
    stop_run,
    submit_branch,
    submit_example,
    submit_run,
    submit_step,
)
from paligemma.webapp.render.attention import LENS_COLUMNS
from paligemma.webapp.render.candidates import CANDIDATE_COLUMNS
from paligemma.webapp.requests import MAX_PROMPT_CHARACTERS
from paligemma.webapp.served_models import ServedModel, ServedModels
from paligemma.webapp.session import Session

PANELS = (
    ("panel-candidates", "Candidates"),
    ("panel-objects", "Objects"),
    ("panel-attention", "Attention and lens"),
    ("panel-runs", "Runs"),
)
UNQUEUED = {**PRIVATE, "queue": False}
# Without preprocessing, a handler receives the path of an upload that is not opened yet, and numbers as they were sent;
# `open_image` and `read_request` check them.
UNQUEUED_RAW = {**UNQUEUED, "preprocess": False}
# Lifetime of an idle session while its page is open. Gradio removes it an hour after the page is closed.
SESSION_SECONDS = 12 * 3600


def part(script: str, value: Any = None, **settings: Any) -> gr.HTML:
    """Build a part of the page, which `assets/page/<script>.js` draws from its value.

    Gradio 6 compiles templates into JavaScript, so the template is static and contains no data; the script sets data
    as text.
    """
    return gr.HTML(
        value,
        html_template='<div class="part"></div>',
        js_on_load=(ASSETS / "page" / f"{script}.js").read_text(encoding="utf-8"),
        apply_default_css=False,
        **settings,
    )


class Form(NamedTuple):
    """The components of a request, in the order of the handlers' parameters."""

    image: gr.Image
    prompt: gr.Textbox
    max_new_tokens: gr.Slider
    temperature: gr.Slider
    top_k: gr.Slider
    top_p: gr.Slider
    seed: gr.Number
    top_n: gr.Slider

    @property
    def decoding(self) -> tuple[Any, ...]:
        """All but image and prompt."""
        return self[2:]


class Buttons(NamedTuple):
    """The buttons that start and stop a run."""

    run: gr.Button
    step: gr.Button
    stop: gr.Button


class Parts(NamedTuple):
    """The other components that events read or write."""

    badge: gr.HTML
    models: gr.Dropdown
    tasks: gr.HTML
    status: gr.HTML
    examples: gr.HTML
    image_view: gr.HTML
    token_strip: gr.HTML
    candidates: gr.HTML
    objects: gr.HTML
    attention: gr.HTML
    shares: gr.HTML
    runs: gr.HTML
    export_button: gr.Button
    import_button: gr.UploadButton
    download: gr.HTML
    page_update: gr.HTML


def build_app(*served_models: ServedModel) -> gr.Blocks:
    """Build the page and the HTTP API for these models; the first one is the default.

    Does not launch the app or load a model.
    """
    example_list, limits = examples.load_examples(ASSETS / "examples"), served_models[0].limits
    with Page(
        title="PaliGemma, token by token", analytics_enabled=False, delete_cache=(600, 3600), fill_width=True
    ) as app:
        badge, models = _header(served_models)
        with gr.Row(elem_id="main"):
            form, buttons, image_view, task_chips, status = _request_column(limits.max_new_tokens)
            answer = _answer_column()
            example_chips = _examples_column(example_list)
        parts = Parts(badge, models, task_chips, status, example_chips, image_view, **answer)
        session = gr.State(Session(served_models, example_list), time_to_live=SESSION_SECONDS, delete_callback=stop_run)
        _connect_runs(session, form, buttons, parts)
        _connect_form(session, form, parts)
        _connect_answer(session, form, parts)
        _connect_model(app, session, parts)
        add_api(served_models, form)
    return app.queue(default_concurrency_limit=1, max_size=limits.max_queue_size)


# Components


def _header(served_models: ServedModels) -> tuple[gr.HTML, gr.Dropdown]:
    """Build the header. Returns (badge, model list); the list is hidden if there is one model."""
    with gr.Row(elem_id="header"):
        part("heading", text="PaliGemma, token by token", tag="h1", elem_id="title")
        badge = part("status", served_models[0].status, shows_updates=False, elem_id="badge")
        names = [served_model.name for served_model in served_models]
        models = gr.Dropdown(
            names, value=names[0], label="Model", visible=len(served_models) > 1, elem_id="models", container=False
        )
        part("preferences", elem_id="preferences")
    return badge, models


def _request_column(max_tokens: int) -> tuple[Form, Buttons, gr.HTML, gr.HTML, gr.HTML]:
    """Build the request column. Returns (form, buttons, image view, task chips, status)."""
    with gr.Column(elem_id="request", min_width=300):
        with gr.Column(elem_classes="card"):
            image = _image_field()
            image_view = part("image_view", elem_id="image-view")
        with gr.Column(elem_classes="card"):
            task_chips = part("chips", name="Tasks", elem_id="tasks")
            prompt = _prompt_field()
            buttons = _buttons()
            hint = messages.status("idle", "Choose an image, enter a prompt, then press Run or Enter.")
            status = part("status", hint, shows_updates=True, elem_id="status")
            decoding = _decoding_controls(max_tokens)
    return Form(image, prompt, *decoding), buttons, image_view, task_chips, status


def _image_field() -> gr.Image:
    return gr.Image(
        label="Image",
        type="filepath",
        image_mode=None,
        placeholder="Drop, paste or click to choose an image",
        sources=["upload", "clipboard", "webcam"],
        height=240,
        buttons=["fullscreen"],
        elem_id="image",
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
        step = gr.Button("Step", variant="secondary", elem_id="step", min_width=80)
        stop = gr.Button("Stop", variant="secondary", elem_id="stop", min_width=80)
    return Buttons(run, step, stop)


def _decoding_controls(max_tokens: int) -> tuple[gr.Slider, gr.Slider, gr.Slider, gr.Slider, gr.Number, gr.Slider]:
    with gr.Accordion("Decoding", open=False, elem_id="decoding"):
        max_new_tokens = gr.Slider(1, max_tokens, value=min(128, max_tokens), step=1, label="Max new tokens")
        temperature = gr.Slider(0, 2, value=0, step=0.05, label="Temperature", info="0 = greedy")
        top_k = gr.Slider(0, 100, value=0, step=1, label="Top-k", info="0 = off")
        top_p = gr.Slider(0.01, 1, value=1, step=0.01, label="Top-p", info="1 = off")
        # Gradio 6 shows None as 0, but an empty string as an empty field.
        seed = gr.Number(value="", label="Seed", placeholder="random")  # type: ignore[arg-type]
        top_n = gr.Slider(1, 50, value=10, step=1, label="Candidates per token")
    return max_new_tokens, temperature, top_k, top_p, seed, top_n


def _examples_column(example_list: Sequence[examples.Example]) -> gr.HTML:
    with gr.Column(elem_id="examples", min_width=300, visible=bool(example_list)), gr.Column(elem_classes="card"):
        part("heading", text="Examples", tag="h2")
        return part("chips", examples.example_chips(example_list), name="Examples", elem_id="example-chips")


def _answer_column() -> dict[str, Any]:
    """Build the token strip and the panels. Returns the components by field of `Parts`."""
    with gr.Column(elem_id="answer", min_width=300):
        with gr.Column(elem_classes="card"):
            token_strip = part("token_strip", elem_id="token-strip")
        with gr.Column(elem_classes="card"):
            part("tabs", panels=PANELS)
            panels = _panels()
            # Not visible
            shares, download = part("relay", topic="image shares"), part("download")
            page_update = part("page_update")
    return {"token_strip": token_strip, "shares": shares, "download": download, "page_update": page_update, **panels}


def _panels() -> dict[str, Any]:
    columns = [gr.Column(elem_id=name, min_width=0) for name, _ in PANELS]
    with columns[0]:
        candidates = part("candidates", columns=CANDIDATE_COLUMNS, elem_id="candidates")
    with columns[1]:
        object_table = part("objects", elem_id="objects")
    with columns[2]:
        attention = part("attention", columns=LENS_COLUMNS, elem_id="attention")
    with columns[3]:
        run_list = part("runs", max_runs=runs.MAX_RUNS, elem_id="runs")
        with gr.Row(elem_id="run-files"):
            export_button = gr.Button("Export run", size="sm", elem_id="export")
            import_button = gr.UploadButton("Import run", file_types=[".json"], size="sm", elem_id="import")
    return {
        "candidates": candidates,
        "objects": object_table,
        "attention": attention,
        "runs": run_list,
        "export_button": export_button,
        "import_button": import_button,
    }


# Events


def _connect_runs(session: gr.State, form: Form, buttons: Buttons, parts: Parts) -> None:
    """Connect the events of runs: a handler submits a request immediately, then the queue executes it."""
    outputs = [session, parts.status]
    # Gradio writes the position in the queue next to the status, whose script shows it.
    queued = {**PRIVATE, **MODEL_QUEUE, "show_progress": "minimal", "show_progress_on": parts.status}
    submitted = [
        gr.on(
            [form.prompt.submit, buttons.run.click], _keep_alive(submit_run), [session, *form], outputs, **UNQUEUED_RAW
        ),
        buttons.step.click(_keep_alive(submit_step), [session, *form], outputs, **UNQUEUED_RAW),
        parts.candidates.branch(_keep_alive(submit_branch), session, outputs, **UNQUEUED),
        parts.examples.select(
            _keep_alive(submit_example),
            [session, form.image, *form.decoding],
            [session, parts.image_view, form.prompt, parts.status],
            **UNQUEUED_RAW,
        ),
    ]
    for event in submitted:
        execution = event.then(run_pending, session, parts.page_update, trigger_mode="multiple", **queued)
        # `run_pending` reports errors of a run itself, so a failure means that the queue is full.
        execution.failure(report_queue_full, session, parts.status, **UNQUEUED)
    # Gradio's `cancels` ignores Run until the running step ends, and then reports an error.
    buttons.stop.click(stop_run, session, parts.status, **UNQUEUED)


def _keep_alive(handler: Callable[..., Any]) -> Callable[..., Any]:
    """Add the session as the first output: Gradio measures a session's age from the last time it was an output."""

    @wraps(handler)
    def handle(session: Session, *arguments: Any, **event: Any) -> tuple[Any, ...]:
        outputs = handler(session, *arguments, **event)
        return (session, *outputs) if isinstance(outputs, tuple) else (session, outputs)

    return handle


def _connect_form(session: gr.State, form: Form, parts: Parts) -> None:
    form.image.change(show_image, [session, form.image], [parts.status, parts.image_view], **UNQUEUED_RAW)
    parts.image_view.clear(clear_image, session, form.image, **UNQUEUED)
    parts.tasks.select(apply_task, [session, form.prompt], form.prompt, **UNQUEUED).then(
        None, js="() => document.querySelector('#prompt textarea').focus()", **PRIVATE
    )


def _connect_answer(session: gr.State, form: Form, parts: Parts) -> None:
    """Connect the parts that show an answer. Selecting a token needs no event, because the token strip has its data."""
    parts.page_update.resync(resend_page, session, parts.page_update, **UNQUEUED)
    parts.token_strip.shares(image_shares, session, [parts.status, parts.shares], **MODEL_QUEUE, **PRIVATE)
    parts.attention.inspect(inspect_token, session, [parts.status, parts.attention], **MODEL_QUEUE, **PRIVATE)
    parts.objects.download(download_objects, session, parts.download, **UNQUEUED)
    parts.runs.open(show_run, session, parts.page_update, **UNQUEUED)
    parts.runs.compare(compare_runs, session, parts.runs, **UNQUEUED)
    parts.export_button.click(export_run, session, [parts.status, parts.download], **UNQUEUED)
    inputs = [session, parts.import_button, form.image, form.prompt]
    parts.import_button.upload(import_run, inputs, parts.page_update, **UNQUEUED_RAW)


def _connect_model(app: gr.Blocks, session: gr.State, parts: Parts) -> None:
    timer = gr.Timer(1.0)
    outputs = [parts.badge, parts.tasks, timer]
    gr.on([app.load, timer.tick], show_model, session, outputs, **UNQUEUED)
    parts.models.input(choose_model, [session, parts.models], outputs, **UNQUEUED)
