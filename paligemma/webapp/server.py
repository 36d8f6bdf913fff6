"""The web server: Gradio's settings, /healthz, the upload folder, start and shutdown."""

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

from paligemma.errors import InputError
from paligemma.paths import ASSETS
from paligemma.webapp.errors import is_disk_full, report_error
from paligemma.webapp.served_models import ServedModels
from paligemma.webapp.ui import build_app
from paligemma.webapp.uploads import MAX_FILE_BYTES


def serve(served_models: ServedModels, **settings: Any) -> None:
    """Serve the page until SIGINT or SIGTERM, then delete all uploaded files."""
    with private_folder():
        app = build_app(*served_models)
        launch(app, prevent_thread_lock=True, app_kwargs=server_settings(served_models), **settings)
        try:
            while True:
                time.sleep(0.5)
        finally:
            # Open pages keep their connections, which uvicorn reports as errors.
            logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
            app.server.force_exit = True
            app.close(verbose=False)


@contextmanager
def private_folder() -> Iterator[Path]:
    """Create a folder for uploads in GRADIO_TEMP_DIR, readable by this user only, and delete it on exit."""
    parent = os.environ.get("GRADIO_TEMP_DIR")
    if parent:
        Path(parent).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="paligemma-", dir=parent, ignore_cleanup_errors=True) as folder:
        os.environ["GRADIO_TEMP_DIR"] = folder
        yield Path(folder)


def launch(app: gr.Blocks, **settings: Any) -> None:
    """Launch the page without sharing, analytics or run history.

    Raises:
        InputError: the address or the port is not available.
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
        port = settings.get("server_port") or os.environ.get("GRADIO_SERVER_PORT", "7860-7959")
        raise InputError(
            "server.port",
            "Cannot bind port {port}: it is in use or not in 1-65535, or the host is not an address of this machine. "
            "Choose another port with --port.",
            port=port,
        ) from None


def _head() -> str:
    """The script shared by all parts of the page, with the translated messages."""
    page = ASSETS / "page"
    messages_text = json.dumps(json.loads((page / "messages.json").read_text(encoding="utf-8")), ensure_ascii=False)
    messages_text = messages_text.replace("<", "\\u003c")  # a message must not close the script element
    script = (page / "page.js").read_text(encoding="utf-8")
    return f"<script>window.paligemmaMessages = {messages_text};\n{script}</script>"


def server_settings(served_models: ServedModels) -> dict[str, Any]:
    """Settings of Gradio's FastAPI app: /healthz, and a message when the disk is full.

    /healthz returns 200 if the first model is ready, else 503, and for each model its state and the model that answers.
    """

    def health(response: Response) -> dict[str, Any]:
        response.status_code = 200 if served_models[0].state == "ready" else 503
        names = ("name", "state", "answered_by")
        models = [{name: served_model.describe()[name] for name in names} for served_model in served_models]
        return {"state": served_models[0].state, "models": models}

    def report_os_error(request: Request, error: OSError) -> PlainTextResponse:
        return PlainTextResponse(str(report_error(error)), 507 if is_disk_full(error) else 500)

    return {"routes": [APIRoute("/healthz", health)], "exception_handlers": {OSError: report_os_error}}
