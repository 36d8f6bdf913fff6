"""The page: give PaliGemma a picture and a prompt, and watch it answer token by token.

From top to bottom: the model that the server holds, the handlers (generators that run the model and yield what
the page shows), the components, the wiring, and `main()`. What is shown is computed in `paligemma/view/`.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import gradio as gr
from PIL.Image import Image

import paligemma
from paligemma.masks import MaskDecoder
from paligemma.view import events, tokens, words
from paligemma.view.picture import open_picture
from paligemma.view.requests import MAX_PROMPT_CHARACTERS, picture_path, read_request

ASSETS = Path(__file__).parent / "assets"
# At most 20 page updates a second: a browser that gets more falls behind the model.
UPDATE_INTERVAL_S = 0.05
WAIT_INTERVAL_S = 0.5
MASK_DECODER_FILE = "mask_decoder.safetensors"
# Every event that runs the model shares one queue, and one at a time of it runs.
MODEL_QUEUE = {"concurrency_id": "model", "concurrency_limit": 1}
PRIVATE = {"api_visibility": "private"}

log = logging.getLogger("paligemma.app")


# The model


class ModelHost:
    """The one model of this server. It is loaded in a thread of its own, so that the page is there at once."""

    def __init__(
        self, name: str, load: Callable[..., paligemma.PaliGemma] | None, mask_decoder_file: Path | None = None
    ) -> None:
        """`load` is called once, with `progress` as `paligemma.load` takes it; None: there is no model to load.

        `mask_decoder_file` is read where it exists; without one, masks stay codes.
        """
        self.name = name
        self.model: paligemma.PaliGemma | None = None
        self.mask_decoder: MaskDecoder | None = None
        self.notice = words.notice("busy", f"Loading {name}") if load else words.notice("error", words.NO_MODEL)
        self._load = load
        self._mask_decoder_file = mask_decoder_file
        self._finished = threading.Event()
        if load is None:
            self._finished.set()

    def start(self) -> None:
        """Begin to load; returns at once."""
        if self._load:
            threading.Thread(target=self._run, name="load model", daemon=True).start()

    @property
    def loading(self) -> bool:
        return not self._finished.is_set()

    def wait(self) -> Iterator[dict[str, str]]:
        """Yield the state now and then while the model loads. Raises ValueError with what to do if it failed."""
        while not self._finished.wait(WAIT_INTERVAL_S):
            yield self.notice
        if self.model is None:
            raise ValueError(self.notice["text"])

    def describe(self) -> list[dict[str, Any]]:
        """The models of this server, for the API: at present one."""
        model = self.model
        return [
            {
                "name": self.name,
                "revision": model.revision if model else None,
                "state": "loading" if self.loading else "ready" if model else "error",
                "message": self.notice["text"],
                "device": str(model.device) if model else None,
                "dtype": _dtype_name(model) if model else None,
            }
        ]

    def _run(self) -> None:
        try:
            model = self._load(progress=self._show_progress)
            if self._mask_decoder_file and self._mask_decoder_file.exists():
                self.mask_decoder = MaskDecoder.load(self._mask_decoder_file)
            self.notice = words.notice("done", self._badge(model))
            self.model = model
        except Exception as error:
            log.exception("the model could not be loaded")
            self.notice = words.notice("error", f"{self.name} could not be loaded. {words.explain(error)}")
        finally:
            self._finished.set()

    def _badge(self, model: paligemma.PaliGemma) -> str:
        name = f"{self.name}@{model.revision}" if model.revision else self.name
        num_parameters = sum(parameter.numel() for parameter in model.model.parameters())
        soft_cap = model.config.text_config.final_logit_softcapping
        return words.model_line(name, num_parameters, _dtype_name(model), str(model.device), soft_cap)

    def _show_progress(self, done: int, total: int) -> None:
        self.notice = words.notice("busy", f"Loading {self.name}: {done / total:.0%}")


def _dtype_name(model: paligemma.PaliGemma) -> str:
    return str(model.dtype).removeprefix("torch.")


# Handlers


class Run:
    """One answer under way: its steps so far, and what its stream returns at the end."""

    def __init__(self, stream: Iterator[paligemma.Step]) -> None:
        self.steps: list[paligemma.Step] = []
        self.result: paligemma.GenerationResult | None = None
        self._stream = stream

    def __iter__(self) -> Iterator[paligemma.Step]:
        while True:
            try:
                step = next(self._stream)
            except StopIteration as end:
                self.result = end.value
                return
            self.steps.append(step)
            yield step


class RunControl:
    """What Stop and a run under way say to each other."""

    def __init__(self) -> None:
        self.stop_asked = False
        self.finished = False


class PageUpdate(NamedTuple):
    """What an event of the page changes; `gr.skip()` leaves a part as it is."""

    notice: Any
    answer: Any = gr.skip()
    tokens: Any = gr.skip()
    candidates: Any = gr.skip()
    steps: Any = gr.skip()


def begin_run(previous: RunControl | None) -> tuple[RunControl, dict[str, str]]:
    """Run was asked for: end what this visitor still has running, and line up."""
    if previous:
        previous.stop_asked = True
    return RunControl(), words.notice("busy", "Waiting for its turn")


def answer_on_page(
    host: ModelHost, control: RunControl, picture: Any, prompt: Any, *decoding: Any
) -> Iterator[PageUpdate]:
    """Run the model for the page. Whatever goes wrong becomes a line of the page; what was written stays."""
    # Gradio closes an abandoned generator only once it has yielded: so yield before any work.
    yield PageUpdate(words.notice("busy", "Preparing"))
    try:
        image, request = open_picture(picture_path(picture)), read_request(prompt, *decoding)
        for state in host.wait():
            yield PageUpdate(state)
            if control.stop_asked:
                break
        if control.stop_asked:
            yield PageUpdate(words.notice("idle", "Stopped"))
        else:
            yield from _write_answer(host.model, image, request, control)
    except Exception as error:
        yield PageUpdate(words.notice("error", _explain(error)))
    finally:
        control.finished = True


def _write_answer(
    model: paligemma.PaliGemma, image: Image, request: dict[str, Any], control: RunControl
) -> Iterator[PageUpdate]:
    yield _show_steps(words.notice("busy", "Looking at the picture"), [])
    shown_at = 0.0
    with closing(model.stream(image, **request)) as stream:
        run = Run(stream)
        for _ in run:
            if control.stop_asked:
                break
            if time.monotonic() - shown_at >= UPDATE_INTERVAL_S:
                shown_at = time.monotonic()
                yield _show_steps(words.notice("busy", f"Token {len(run.steps)}"), run.steps)
    if run.result is None:
        yield _show_steps(words.notice("idle", f"Stopped after {words.count_tokens(run.steps)}"), run.steps)
    else:
        yield _show_steps(words.summary(run.result, with_seed=request["temperature"] > 0), run.steps)


def answer_over_api(
    host: ModelHost,
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
) -> Iterator[events.Event]:
    """Answer a prompt about a picture: an event a token, in order.

    Every event is {"text", "step", "finish_reason"}; while the model is not ready or prepares, "step" is null. The
    last event adds "detections" and "timing".
    """
    yield events.WAITING_EVENT
    try:
        picture = open_picture(picture_path(image))
        request = read_request(prompt, max_new_tokens, temperature, top_k, top_p, seed, top_n, forced_ids, time_limit)
        for _ in host.wait():
            yield events.WAITING_EVENT
        with closing(host.model.stream(picture, **request)) as stream:
            run = Run(stream)
            for step in run:
                if step.finish_reason is None:
                    yield events.step_event(step)
        yield events.last_event(run.result, picture.size, host.mask_decoder)
    except Exception as error:
        raise gr.Error(_explain(error), print_exception=False) from error


def show_candidates(steps: Sequence[paligemma.Step], event: gr.EventData) -> Any:
    """The candidates of the row that was chosen in the token list."""
    index = event.index
    known = isinstance(index, int) and 0 <= index < len(steps)
    return tokens.candidate_table(steps[index]) if known else gr.skip()


def ask_to_stop(control: RunControl | None) -> Any:
    """Stop was asked for: the run ends behind the token that it is at."""
    if control is None or control.finished:
        return gr.skip()
    control.stop_asked = True
    return words.notice("busy", "Stopping after this token")


def show_model(host: ModelHost) -> tuple[dict[str, str], gr.Timer]:
    """The badge, and whether to ask again."""
    return host.notice, gr.Timer(active=host.loading)


def _show_steps(notice: dict[str, str], steps: list[paligemma.Step]) -> PageUpdate:
    """The whole right side: the answer, its tokens, and the candidates of the newest."""
    last = steps[-1] if steps else None
    return PageUpdate(notice, last.text if last else "", tokens.token_list(steps), tokens.candidate_table(last), steps)


def _explain(error: Exception) -> str:
    if not isinstance(error, ValueError):
        log.error("a request failed", exc_info=error)
    return words.explain(error)


# Components


class Request(NamedTuple):
    """The components of a request, in the order in which the handlers take them."""

    picture: gr.Image
    prompt: gr.Textbox
    max_new_tokens: gr.Slider
    temperature: gr.Slider
    top_k: gr.Slider
    top_p: gr.Slider
    seed: gr.Number
    top_n: gr.Slider


def _notice(value: dict[str, str], **settings: Any) -> gr.HTML:
    return gr.HTML(
        value,
        html_template='<p class="notice" role="status"><span class="dot"></span><span class="words"></span></p>',
        js_on_load=(ASSETS / "notice.js").read_text(encoding="utf-8"),
        apply_default_css=False,
        **settings,
    )


def _table(
    columns: Sequence[tuple[str, str]], label: str, empty: str, value: dict[str, Any], **settings: Any
) -> gr.HTML:
    """A table that `assets/table.js` draws from data. The template is static: never put data into it."""
    return gr.HTML(
        value,
        label=label,
        html_template=(
            '<h2 class="title"></h2><div class="scroller"><table><thead><tr></tr></thead><tbody></tbody></table>'
            '<p class="empty"></p></div><p class="facts"></p>'
        ),
        js_on_load=(ASSETS / "table.js").read_text(encoding="utf-8"),
        apply_default_css=False,
        columns=list(columns),
        empty=empty,
        **settings,
    )


def _request_column() -> tuple[Request, gr.Button, gr.Button, gr.HTML]:
    """The left side: (request, run, stop, notice)."""
    picture = gr.Image(
        label="Picture",
        type="filepath",
        image_mode=None,
        sources=["upload", "clipboard", "webcam"],
        height=320,
        buttons=["fullscreen"],
        elem_id="picture",
    )
    prompt = gr.Textbox(
        label="Prompt",
        value="caption en",
        placeholder="caption en · detect dog · answer en what is this?",
        max_length=MAX_PROMPT_CHARACTERS,
        max_lines=4,
        elem_id="prompt",
    )
    with gr.Row():
        run = gr.Button("Run", variant="primary", elem_id="run", min_width=80)
        stop = gr.Button("Stop", variant="secondary", elem_id="stop", min_width=80)
    notice = _notice(words.notice("idle", "Choose a picture, write a prompt, press Enter."), elem_id="notice")
    return Request(picture, prompt, *_decoding_controls()), run, stop, notice


def _decoding_controls() -> tuple[gr.Slider, gr.Slider, gr.Slider, gr.Slider, gr.Number, gr.Slider]:
    with gr.Accordion("Decoding", open=False):
        max_new_tokens = gr.Slider(1, 512, value=128, step=1, label="Largest number of new tokens")
        temperature = gr.Slider(0, 2, value=0, step=0.05, label="Temperature", info="0 takes the likeliest token")
        top_k = gr.Slider(0, 100, value=0, step=1, label="Top-k", info="0 keeps all")
        top_p = gr.Slider(0.01, 1, value=1, step=0.01, label="Top-p", info="1 keeps all")
        seed = gr.Number(value=None, precision=0, minimum=0, label="Seed", info="empty: a fresh one for every run")
        top_n = gr.Slider(1, 50, value=10, step=1, label="Candidates shown")
    return max_new_tokens, temperature, top_k, top_p, seed, top_n


def _answer_column() -> tuple[gr.Textbox, gr.HTML, gr.HTML]:
    """The right side: (answer, token list, candidate table)."""
    answer = gr.Textbox(
        label="Answer",
        interactive=False,
        lines=3,
        max_lines=3,
        buttons=["copy"],
        elem_id="answer",
        placeholder="The answer appears here, token by token.",
    )
    with gr.Row(equal_height=True):
        with gr.Column(scale=3, min_width=290):
            token_list = _table(
                tokens.TOKEN_COLUMNS,
                "Tokens",
                "One row a token. Choose one to see what else was likely.",
                tokens.token_list([]),
                pick=True,
                elem_id="tokens",
            )
        with gr.Column(scale=4, min_width=290):
            candidates = _table(
                tokens.CANDIDATE_COLUMNS,
                "Candidates",
                "What the model could have written in this place.",
                tokens.candidate_table(None),
                pick=False,
                elem_id="candidates",
            )
    return answer, token_list, candidates


# Wiring


def build_app(host: ModelHost) -> gr.Blocks:
    """The page and the HTTP API for one model. Nothing is launched or loaded here."""
    with gr.Blocks(
        title="PaliGemma, token by token", analytics_enabled=False, delete_cache=(600, 3600), fill_width=True
    ) as app:
        with gr.Row(elem_id="header"):
            gr.HTML("<h1>PaliGemma, token by token</h1>")
            badge = _notice(host.notice, elem_id="badge")
        with gr.Row(elem_id="main"):
            with gr.Column(scale=5, min_width=300):
                request, run, stop, notice = _request_column()
            with gr.Column(scale=9, min_width=300):
                answer, token_list, candidates = _answer_column()
        update = PageUpdate(notice, answer, token_list, candidates, gr.State([]))
        _wire_page(host, request, run, stop, update)
        _wire_model_state(app, host, badge)
        _wire_api(host, request)
    return app.queue(default_concurrency_limit=1, max_size=16)


def _wire_page(host: ModelHost, request: Request, run: gr.Button, stop: gr.Button, update: PageUpdate) -> None:
    control = gr.State(None)
    asked = gr.on(
        [request.prompt.submit, run.click],
        begin_run,
        control,
        [control, update.notice],
        queue=False,
        show_progress="hidden",
        **PRIVATE,
    )
    # Without preprocessing the upload arrives as a checked path, unopened: opening it is up to open_picture.
    asked.then(
        partial(answer_on_page, host),
        [control, *request],
        list(update),
        preprocess=False,
        show_progress="hidden",
        trigger_mode="multiple",
        **MODEL_QUEUE,
        **PRIVATE,
    )
    # Gradio's own `cancels` ignores Run until the running step is over, and then reports an error.
    stop.click(ask_to_stop, control, update.notice, queue=False, show_progress="hidden", **PRIVATE)
    update.tokens.select(
        show_candidates, update.steps, update.candidates, queue=False, show_progress="hidden", **PRIVATE
    )


def _wire_model_state(app: gr.Blocks, host: ModelHost, badge: gr.HTML) -> None:
    timer = gr.Timer(1.0)
    gr.on(
        [app.load, timer.tick],
        partial(show_model, host),
        None,
        [badge, timer],
        queue=False,
        show_progress="hidden",
        **PRIVATE,
    )


def _wire_api(host: ModelHost, request: Request) -> None:
    """The endpoints hang on components that the page does not show, so that Gradio checks files for them too."""
    forced_ids = gr.JSON(visible=False, label="token ids to begin the answer with")
    time_limit = gr.Number(visible=False, label="seconds")
    gr.Button(visible=False).click(
        partial(answer_over_api, host),
        [*request, forced_ids, time_limit],
        gr.JSON(visible=False, label="event"),
        api_name="generate",
        api_description=answer_over_api.__doc__,
        preprocess=False,
        **MODEL_QUEUE,
    )
    gr.api(host.describe, api_name="models", api_description="The models of this server.", queue=False)


# The process


def build_parser() -> argparse.ArgumentParser:
    """The command line; `--model` falls back to the environment variable MODEL_ID."""
    parser = argparse.ArgumentParser(
        description="A page on which PaliGemma answers prompts about pictures, with the candidates behind every token."
    )
    parser.add_argument(
        "--model",
        default=os.environ.get("MODEL_ID") or None,
        help="a folder in the hub's layout, or a hub id (default: MODEL_ID from the environment, else the bundled one)",
    )
    parser.add_argument("--revision", help="the hub's branch, tag or commit")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N or mps (default: %(default)s)")
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16 (default: %(default)s)")
    parser.add_argument("--host", help="the address to listen on (default: GRADIO_SERVER_NAME, else 127.0.0.1)")
    parser.add_argument("--port", type=int, help="the port to listen on (default: the first free one from 7860)")
    return parser


def make_host(arguments: argparse.Namespace) -> ModelHost:
    """The host for what the command line names; nothing is loaded yet."""
    folder = Path(arguments.model or ASSETS / "demo").expanduser()
    if arguments.model is None and not (folder / "config.json").is_file():
        return ModelHost("no model", None)
    name = folder.resolve().name if arguments.model and folder.is_dir() else arguments.model or "bundled demo"
    load = partial(paligemma.load, arguments.model, arguments.revision, arguments.device, arguments.dtype)
    return ModelHost(name, load, folder / MASK_DECODER_FILE)


def launch(app: gr.Blocks, **settings: Any) -> None:
    """Serve the page. Nothing is shared, reported or kept beyond the visit."""
    app.launch(
        theme=gr.themes.Base(font=("system-ui", "sans-serif"), font_mono=("ui-monospace", "monospace")),
        css_paths=[ASSETS / "page.css"],
        footer_links=["api", "settings"],
        allowed_paths=[],
        max_file_size="10mb",
        show_error=False,
        enable_monitoring=False,
        run_history=False,
        state_session_capacity=200,
        ssr_mode=False,
        **settings,
    )


def _stop_like_ctrl_c(*_: Any) -> None:
    raise KeyboardInterrupt


def main() -> None:
    arguments = build_parser().parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    signal.signal(signal.SIGTERM, _stop_like_ctrl_c)
    host = make_host(arguments)
    host.start()
    with suppress(KeyboardInterrupt):
        launch(build_app(host), server_name=arguments.host, server_port=arguments.port)


if __name__ == "__main__":
    main()
