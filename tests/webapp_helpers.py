"""Helpers of the web app's tests: sessions with a scripted model, and calls of its handlers as the page makes them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import gradio as gr
from fake_model import FakeModel
from PIL import Image

import paligemma
from paligemma.paths import BUNDLED_MODEL
from paligemma.webapp import api, handlers, messages
from paligemma.webapp.page_update import PageUpdate
from paligemma.webapp.served_models import ServedModel
from paligemma.webapp.session import Session

BUNDLED_MASK_DECODER = BUNDLED_MODEL / "mask_decoder.safetensors"
DECODING = {"max_new_tokens": 16, "temperature": 0, "top_k": 0, "top_p": 1, "seed": None, "top_n": 3}
# All arguments of `ServedModel.stream` but the image.
REQUEST = {
    "prompt": "caption en", "max_new_tokens": 16, "temperature": 0.0, "top_k": 0, "top_p": 1.0, "seed": None,
    "top_n": 3, "forced_ids": (), "time_limit": None,
}  # fmt: skip
# Tokens of one box with a mask.
SEGMENTED = (*(f"<loc{bin:04}>" for bin in (256, 512, 768, 1023)), *["<seg010>"] * 16, "▁cat")
# `decoded` returns this for an event without a pending request.
NO_UPDATE = PageUpdate(*[gr.skip()] * len(PageUpdate._fields))


def start_served_model(load: Callable | None, name: str = "scripted") -> ServedModel:
    served_model = ServedModel(name, load)
    served_model.start()
    return served_model


def ready_served_model(model: FakeModel, name: str = "scripted") -> ServedModel:
    served_model = ServedModel(name, lambda progress: model)
    served_model.load_now()
    return served_model


def load_tiny(folder: Path) -> ServedModel:
    served_model = ServedModel("tiny", lambda progress: paligemma.load(folder, device="cpu"))
    served_model.load_now()
    return served_model


def make_session(model: FakeModel | None = None, *others: ServedModel) -> Session:
    return Session((ready_served_model(model or FakeModel()), *others))


def make_image() -> Image.Image:
    return Image.linear_gradient("L").resize((64, 48)).convert("RGB")


def upload(image: Path | None) -> dict | None:
    """An uploaded file as Gradio passes it to a handler."""
    return {"path": str(image), "meta": {"_type": "gradio.FileData"}} if image else None


def event(**fields: object) -> gr.EventData:
    return gr.EventData(None, fields)


def submit_run(session: Session, image: Path | None, prompt: str = "caption en", **changes: object) -> dict:
    return handlers.submit_run(session, upload(image), prompt, *{**DECODING, **changes}.values())


def step_once(session: Session, image: Path | None, prompt: str = "caption en") -> list[PageUpdate]:
    handlers.submit_step(session, upload(image), prompt, *DECODING.values())
    return answer(session)


def decoded(page_update: str | dict) -> PageUpdate:
    """An encoded update, with `gr.skip()` for unchanged parts."""
    changes = {} if page_update == gr.skip() else json.loads(page_update)
    return PageUpdate(*(changes.get(name, gr.skip()) for name in PageUpdate._fields))


def answer(session: Session) -> list[PageUpdate]:
    """Execute the pending request."""
    return list(map(decoded, handlers.run_pending(session)))


def run_page(session: Session, image: Path | None, prompt: str = "caption en", **changes: object) -> list[PageUpdate]:
    submit_run(session, image, prompt, **changes)
    return answer(session)


def run_api(served_model: ServedModel, image: Path | None, prompt: str = "caption en", **changes: object) -> list[dict]:
    return list(api.answer_over_api((served_model,), upload(image), prompt, **{**DECODING, **changes}))


def shown_pieces(updates: list[PageUpdate]) -> list[str]:
    """The tokens on the page after all updates."""
    pieces: list[str] = []
    for update in updates:
        if update.token_strip != gr.skip():
            assert update.token_strip["start"] <= len(pieces)
            pieces[update.token_strip["start"] :] = [token["piece"] for token in update.token_strip["tokens"]]
    return pieces


def import_file(session: Session, folder: Path, text: str) -> dict | str:
    (folder / "run.json").write_text(text, encoding="utf-8")
    return handlers.import_run(session, upload(folder / "run.json"), None, "caption en")


def status_text(update: PageUpdate) -> str:
    """The status of an update in English."""
    return messages.format_message(update.status)
