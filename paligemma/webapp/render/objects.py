"""Data for the object table and the boxes in the image view."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image

from paligemma.masks import MaskDecoder
from paligemma.parsing import Detection, Problem, parse
from paligemma.webapp import events
from paligemma.webapp.images import data_url, encode_png
from paligemma.webapp.render.formatting import format_percentage
from paligemma.webapp.runs import Run

# A mask has 64 x 64 values; interpolated to this size, its outline is smooth on the page.
MASK_IMAGE_SIDE = 256


def object_list(run: Run | None, decoder: MaskDecoder | None = None) -> dict[str, Any]:
    """Return the value of the object table, from which the image view draws the boxes too.

    Returns:
        "run": number of the run, or None.
        "objects": [{"label", "box": [left, top, width, height] as fractions of the image, "pixels": (x_min, y_min) and
            (x_max, y_max) as text, "score": formatted mean probability of the location tokens or None, "tokens":
            indices of the object's tokens, "mask": data URL of a PNG that is opaque on the object or None,
            "incomplete": `growing` of `parsing.Detection`}]
        "problems": [{"text", "kind", "reason", "tokens"}], see `parsing.Problem`.
        "masks_unavailable": True if there are mask tokens but no mask decoder.
    """
    if run is None or not run.steps:
        return {"run": run.number if run else None, "objects": [], "problems": [], "masks_unavailable": False}
    parsed = parse(run.text, *run.image.size, ended=run.finish_reason is not None)
    starts = [0, *(len(step.text) for step in run.steps)]
    return {
        "run": run.number,
        "objects": [_object_state(detection, run, starts, decoder) for detection in parsed.detections],
        "problems": [_problem_state(problem, starts) for problem in parsed.problems],
        "masks_unavailable": decoder is None and any(detection.seg for detection in parsed.detections),
    }


def mask_image(mask: np.ndarray) -> Image.Image:
    """Convert a mask, (64, 64) in [0, 1], to an image of MASK_IMAGE_SIDE pixels per side, opaque where mask >= 0.5."""
    size = (MASK_IMAGE_SIDE, MASK_IMAGE_SIDE)
    resized = Image.fromarray(mask.astype(np.float32)).resize(size, Image.Resampling.BILINEAR)
    alpha = Image.fromarray(np.where(np.asarray(resized) >= 0.5, 255, 0).astype(np.uint8))
    return Image.merge("LA", (alpha, alpha))


def _object_state(detection: Detection, run: Run, starts: Sequence[int], decoder: MaskDecoder | None) -> dict[str, Any]:
    (x_min, y_min, x_max, y_max), (width, height) = detection.box, run.image.size
    score = events.location_score(detection, run.steps)
    return {
        "label": detection.label,
        "box": [x_min / width, y_min / height, (x_max - x_min) / width, (y_max - y_min) / height],
        "pixels": f"{x_min:.0f}, {y_min:.0f} – {x_max:.0f}, {y_max:.0f}",
        "score": None if score is None else format_percentage(score),
        "tokens": _tokens_in_span(detection.span, starts),
        "mask": _mask_url(detection, run, decoder),
        "incomplete": detection.growing,
    }


def _problem_state(problem: Problem, starts: Sequence[int]) -> dict[str, Any]:
    return {
        "text": problem.text,
        "kind": problem.kind,
        "reason": problem.reason,
        "tokens": _tokens_in_span(problem.span, starts),
    }


def _tokens_in_span(span: tuple[int, int], starts: Sequence[int]) -> list[int]:
    """Indices of the tokens that overlap a span of the text. `starts`: each token's start, then the text's length."""
    return [index for index, (start, end) in enumerate(itertools.pairwise(starts)) if start < span[1] and end > span[0]]


def _mask_url(detection: Detection, run: Run, decoder: MaskDecoder | None) -> str | None:
    if decoder is None or detection.seg is None:
        return None
    if detection.seg not in run.masks:
        mask = decoder.decode([detection.seg])[0]
        run.masks[detection.seg] = data_url(encode_png(mask_image(mask)), "image/png")
    return run.masks[detection.seg]
