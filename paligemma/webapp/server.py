"""The web server: settings, /healthz, private upload folder, start and shutdown."""

from __future__ import annotations

import json
import logging
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gradio as gr
from fastapi import Request, Response
from fastapi.responses import PlainTextResponse
from fastapi.routing import APIRoute

from paligemma.paths import ASSETS
from paligemma.webapp import messages
from paligemma.webapp.handlers import _explain
from paligemma.webapp.requests import (
    MAX_FILE_BYTES,
)
from paligemma.webapp.served_models import ServedModels
from paligemma.webapp.ui import build_app


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
            css_paths=[ASSETS / "page" / "page.css"],
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
    words_text = json.dumps(
        json.loads((ASSETS / "page" / "messages.json").read_text(encoding="utf-8")), ensure_ascii=False
    )
    words_text = words_text.replace("<", "\\u003c")  # no word may end the script
    script = (ASSETS / "page" / "page.js").read_text(encoding="utf-8")
    return f"<script>window.paligemmaWords = {words_text};\n{script}</script>"


def server_settings(served_models: ServedModels) -> dict[str, Any]:
    """What Gradio's server gets beside the page: /healthz, and words for a disk that is full.

    /healthz says whether the first model is ready to answer (200) or not (503), the state of each, and which model
    answers for it.
    """

    def health(response: Response) -> dict[str, Any]:
        response.status_code = 200 if served_models[0].state == "ready" else 503
        names = ("name", "state", "answered_by")
        models = [{name: served_model.describe()[name] for name in names} for served_model in served_models]
        return {"state": served_models[0].state, "models": models}

    def say_what_failed(request: Request, error: OSError) -> PlainTextResponse:
        return PlainTextResponse(_explain(error), 507 if messages.is_disk_full(error) else 500)

    return {"routes": [APIRoute("/healthz", health)], "exception_handlers": {OSError: say_what_failed}}


def serve(served_models: ServedModels, **settings: Any) -> None:
    """Serve the page until the process is told to end, and leave nothing behind."""
    with private_folder():
        app = build_app(*served_models)
        launch(app, prevent_thread_lock=True, app_kwargs=server_settings(served_models), **settings)
        try:
            while True:
                time.sleep(0.5)
        finally:
            # Open pages never hang up by themselves; that they are hung up on is no news.
            logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
            app.server.force_exit = True
            app.close(verbose=False)
