"""Updates of the page: what a run, an earlier run or an import changes on it."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from paligemma.webapp import messages
from paligemma.webapp.images import InputImage
from paligemma.webapp.render import objects, token_strip
from paligemma.webapp.render.image_view import image_view_state
from paligemma.webapp.render.runs import run_tree
from paligemma.webapp.runs import Run
from paligemma.webapp.served_models import ServedModel
from paligemma.webapp.session import Session


class PageUpdate(NamedTuple):
    """New values of parts of the page. None leaves a part unchanged."""

    status: Any = None
    token_strip: Any = None
    objects: Any = None
    runs: Any = None
    image_view: Any = None


def encode_update(session: Session, update: PageUpdate) -> str:
    """Encode an update as JSON: the changed parts by name, and a number by which the page detects a missed update.

    It is one output of a handler, because Gradio re-renders a component for every output, even a skipped one; and a
    string, because Gradio sends JSON data as a diff to the previous value, which is longer than the new tokens.
    """
    session.num_updates += 1
    changes = {name: value for name, value in update._asdict().items() if value is not None}
    return json.dumps({"number": session.num_updates, **changes}, ensure_ascii=False, separators=(",", ":"))


def full_page_update(session: Session, run: Run) -> PageUpdate:
    """All parts for a run, with the soft cap and the mask decoder of the model that generated it."""
    served_model = session.served_model_of(run)
    return PageUpdate(
        token_strip=token_strip_update(served_model, run, 0, done=run.finish_reason is not None),
        objects=objects.object_list(run, served_model.mask_decoder if served_model else None),
        runs=run_tree(session.history),
        image_view=image_view_update(served_model, session, run.image),
    )


def show_earlier_run(session: Session, run: Run) -> PageUpdate:
    """Make a run the current one, and stop the run in progress, which would overwrite it on the page."""
    session.run_state.stop_requested = True
    session.history.current = run
    return full_page_update(session, run)._replace(status=messages.run_shown(run))


def token_strip_update(served_model: ServedModel | None, run: Run, start: int, done: bool = False) -> dict[str, Any]:
    """The tokens of a run from index `start`, and whether the model soft-caps its logits."""
    update = token_strip.token_strip_state(run.number, run.steps, start, run.sampling, run.num_forced, done)
    return {**update, "soft_capped": bool(served_model and served_model.soft_cap)}


def image_view_update(served_model: ServedModel | None, session: Session, image: InputImage) -> dict[str, Any] | None:
    """The image view, or None if it shows this image at this model's resolution."""
    shown = session.image
    if shown is not None and (shown.preview, shown.model_input.size) == (image.preview, image.model_input.size):
        return None
    session.image = image
    return image_view(served_model, image)


def image_view(served_model: ServedModel | None, image: InputImage) -> dict[str, Any] | None:
    """The image view with the model's number of patches, which is unknown without the model."""
    return image_view_state(image, served_model.loaded_model.processor.num_image_tokens if served_model else None)
