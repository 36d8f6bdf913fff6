"""The components of the page and how they are connected to the handlers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, NamedTuple

import gradio as gr

from paligemma.paths import ASSETS
from paligemma.webapp import examples, messages, runs
from paligemma.webapp.api import MODEL_QUEUE, PRIVATE, Page, _wire_api
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
from paligemma.webapp.render.token_strip import CANDIDATE_COLUMNS
from paligemma.webapp.requests import (
    MAX_PROMPT_CHARACTERS,
)
from paligemma.webapp.served_models import ServedModel, ServedModels
from paligemma.webapp.session import Session

PANELS = (
    ("panel-candidates", "Candidates"),
    ("panel-objects", "Objects"),
    ("panel-attention", "Attention and lens"),
    ("panel-runs", "Runs"),
)
AT_ONCE = {**PRIVATE, "queue": False}
# How long an idle session is kept while its page is open; Gradio removes it an hour after the page is closed.
SESSION_SECONDS = 12 * 3600


def part(script: str, value: Any = None, **settings: Any) -> gr.HTML:
    """A part of the page that `assets/<script>.js` draws from data.

    The template is static and holds no data, because Gradio compiles templates into code; the script writes what it
    gets as text.
    """
    return gr.HTML(
        value,
        html_template='<div class="part"></div>',
        js_on_load=(ASSETS / "page" / f"{script}.js").read_text(encoding="utf-8"),
        apply_default_css=False,
        **settings,
    )


class Form(NamedTuple):
    """The components of a request, in the order in which the handlers take them."""

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
    status: gr.HTML
    examples: gr.HTML
    image_view: gr.HTML
    token_strip: gr.HTML
    candidates: gr.HTML
    objects: gr.HTML
    attention: gr.HTML
    shares: gr.HTML
    runs: gr.HTML
    export: gr.Button
    imported: gr.UploadButton
    download: gr.HTML
    page_update: gr.HTML


def _header(served_models: ServedModels) -> tuple[gr.HTML, gr.Dropdown]:
    """(badge, list of models); the list is shown where there is a choice."""
    with gr.Row(elem_id="header"):
        part("heading", text="PaliGemma, token by token", tag="h1", elem_id="title")
        badge = part("status", served_models[0].status, follows=False, elem_id="badge")
        names = [served_model.name for served_model in served_models]
        models = gr.Dropdown(
            names, value=names[0], label="Model", visible=len(served_models) > 1, elem_id="models", container=False
        )
        part("preferences", elem_id="choices")
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
            image = _picture_field()
            image_view = part("image_view", elem_id="image-view")
        with gr.Column(elem_classes="card"):
            task_chips = part("chips", name="Tasks", elem_id="tasks")
            prompt = _prompt_field()
            buttons = _buttons()
            welcome = messages.status("idle", "Choose a picture, write a prompt, press Enter.")
            status = part("status", welcome, follows=True, elem_id="status")
            decoding = _decoding_controls(most_tokens)
    return Form(image, prompt, *decoding), buttons, image_view, task_chips, status


def _examples_column(example_list: Sequence[examples.Example]) -> gr.HTML:
    with gr.Column(elem_id="examples", min_width=300, visible=bool(example_list)), gr.Column(elem_classes="card"):
        part("heading", text="Examples", tag="h2")
        return part("chips", examples.example_chips(example_list), name="Examples", elem_id="example-chips")


def _answer_column() -> dict[str, Any]:
    """The answer and everything that can be seen of it, by the names of `Parts`."""
    candidates, found, inside, history = ({"elem_id": name, "min_width": 0} for name, _ in PANELS)
    with gr.Column(elem_id="answer", min_width=300):
        with gr.Column(elem_classes="card"):
            token_strip = part("token_strip", elem_id="token-strip")
        with gr.Column(elem_classes="card"):
            part("tabs", panels=PANELS)
            with gr.Column(**candidates):
                candidates = part("candidates", columns=CANDIDATE_COLUMNS, elem_id="candidates")
            with gr.Column(**found):
                object_table = part("objects", elem_id="objects")
            with gr.Column(**inside):
                attention_view = part("attention", columns=LENS_COLUMNS, elem_id="attention")
            with gr.Column(**history):
                tree, export_button, imported = _runs_panel()
            # These draw nothing.
            shares, download, page_update = part("relay", topic="shares"), part("download"), part("page_update")
    return {
        "token_strip": token_strip,
        "candidates": candidates,
        "objects": object_table,
        "attention": attention_view,
        "runs": tree,
        "export": export_button,
        "imported": imported,
        "shares": shares,
        "download": download,
        "page_update": page_update,
    }


def _runs_panel() -> tuple[gr.HTML, gr.Button, gr.UploadButton]:
    tree = part("runs", most=runs.MAX_RUNS, elem_id="runs")
    with gr.Row(elem_id="files"):
        export_button = gr.Button("Export this run", size="sm", elem_id="export")
        imported = gr.UploadButton("Import a run", file_types=[".json"], size="sm", elem_id="import")
    return tree, export_button, imported


def build_app(*served_models: ServedModel) -> gr.Blocks:
    """The page and the HTTP API for these models, the first one first. Nothing is launched or loaded here."""
    example_list, limits = examples.load_examples(ASSETS / "examples"), served_models[0].limits
    with Page(
        title="PaliGemma, token by token", analytics_enabled=False, delete_cache=(600, 3600), fill_width=True
    ) as app:
        badge, models = _header(served_models)
        with gr.Row(elem_id="main"):
            form, buttons, image_view, task_chips, status = _ask_column(limits.max_new_tokens)
            answer = _answer_column()
            example_chips = _examples_column(example_list)
        parts = Parts(badge, models, task_chips, status, example_chips, image_view, **answer)
        session = gr.State(Session(served_models, example_list), time_to_live=SESSION_SECONDS, delete_callback=stop_run)
        _wire_runs(session, form, buttons, parts)
        _wire_form(session, form, parts)
        _wire_answer(session, form, parts)
        _wire_model_state(app, session, parts)
        _wire_api(served_models, form)
    return app.queue(default_concurrency_limit=1, max_size=limits.waiting)


def _wire_runs(session: gr.State, form: Form, buttons: Buttons, parts: Parts) -> None:
    """What starts a run: each way lines up a plan at once, and then the plan is carried out in the queue."""
    # Without preprocessing the upload arrives as a checked path, unopened, and numbers as they were sent: opening
    # the one is up to open_picture, and reading the others to read_request.
    unopened = {"preprocess": False, **AT_ONCE}
    noticed = [session, parts.status]
    # The place in the queue goes to the notice, whose script puts it in words.
    queued = {**PRIVATE, **MODEL_QUEUE, "show_progress": "minimal", "show_progress_on": parts.status}
    submitted = [
        gr.on([form.prompt.submit, buttons.run.click], _renew(submit_run), [session, *form], noticed, **unopened),
        buttons.step.click(_renew(submit_step), [session, *form], noticed, **unopened),
        parts.candidates.branch(_renew(submit_branch), session, noticed, **AT_ONCE),
        parts.examples.select(
            _renew(submit_example),
            [session, form.image, *form.decoding],
            [session, parts.image_view, form.prompt, parts.status],
            **unopened,
        ),
    ]
    for event in submitted:
        answer = event.then(run_pending, session, parts.page_update, trigger_mode="multiple", **queued)
        # Errors of a run become lines of the page, so a failure means that the queue did not take it.
        answer.failure(report_queue_full, session, parts.status, **AT_ONCE)
    # Gradio's own `cancels` ignores Run until the running step is over, and then reports an error.
    buttons.stop.click(stop_run, session, parts.status, **AT_ONCE)


def _renew(handler: Callable[..., Any]) -> Callable[..., Any]:
    """The handler with the visit before its outputs: Gradio counts a visit's age from when it was last given back."""

    @wraps(handler)
    def handle(session: Session, *arguments: Any, **event: Any) -> tuple[Any, ...]:
        outputs = handler(session, *arguments, **event)
        return (session, *outputs) if isinstance(outputs, tuple) else (session, outputs)

    return handle


def _wire_form(session: gr.State, form: Form, parts: Parts) -> None:
    form.image.change(
        show_image,
        [session, form.image],
        [parts.status, parts.image_view],
        preprocess=False,
        **AT_ONCE,
    )
    parts.image_view.clear(clear_image, session, form.image, **AT_ONCE)
    parts.tasks.select(apply_task, [session, form.prompt], form.prompt, **AT_ONCE).then(
        None, js="() => document.querySelector('#prompt textarea').focus()", **PRIVATE
    )


def _wire_answer(session: gr.State, form: Form, parts: Parts) -> None:
    """What can be done with an answer. Tokens and candidates need no event: the strip has their numbers."""
    parts.page_update.resync(resend_page, session, parts.page_update, **AT_ONCE)
    parts.token_strip.shares(image_shares, session, [parts.status, parts.shares], **MODEL_QUEUE, **PRIVATE)
    parts.attention.inspect(inspect_token, session, [parts.status, parts.attention], **MODEL_QUEUE, **PRIVATE)
    parts.objects.download(download_objects, session, parts.download, **AT_ONCE)
    parts.runs.open(show_run, session, parts.page_update, **AT_ONCE)
    parts.runs.compare(compare_runs, session, parts.runs, **AT_ONCE)
    parts.export.click(export_run, session, [parts.status, parts.download], **AT_ONCE)
    imported = [session, parts.imported, form.image, form.prompt]
    parts.imported.upload(import_run, imported, parts.page_update, preprocess=False, **AT_ONCE)


def _wire_model_state(app: gr.Blocks, session: gr.State, parts: Parts) -> None:
    timer = gr.Timer(1.0)
    preview = [parts.badge, parts.tasks, timer]
    gr.on([app.load, timer.tick], show_model, session, preview, **AT_ONCE)
    parts.models.input(choose_model, [session, parts.models], preview, **AT_ONCE)
