"""Boxes and masks of an answer: as they are drawn on the picture, listed in the table, and downloaded."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from paligemma.masks import MaskDecoder, decode_rle
from paligemma.parsing import Detection, Problem, parse
from paligemma.webapp import events
from paligemma.webapp.images import data_url, png_file, preview_image
from paligemma.webapp.render.token_strip import format_share
from paligemma.webapp.runs import Run

if TYPE_CHECKING:
    from paligemma.generation import Step

# A mask has 64 pixels a side; drawn finer, its outline is smooth on the page.
DRAWN_MASK_SIDE = 256
PALETTE = ("#0b7a6b", "#b4532a", "#5b4db1", "#a3366f", "#2f6db3", "#6f6a12")
MASK_OPACITY = 0.45


def object_list(run: Run | None, decoder: MaskDecoder | None = None) -> dict[str, Any]:
    """The value of the table of objects, from which the boxes on the picture are drawn too.

    Returns {"run", "objects", "problems", "has_codes"}:
        objects: [{"label", "box": [left, top, width, height] as shares of the picture, "pixels": the same box as text,
            "score", "tokens": indices of its tokens, "mask": a PNG whose opaque pixels are the object, or None,
            "growing"}]
        problems: [{"text", "kind", "reason", "tokens"}], see `parsing.Problem`.
        has_codes: True where mask codes came and no decoder is there to read them.
    """
    if run is None or not run.steps:
        return {"run": run.number if run else None, "objects": [], "problems": [], "has_codes": False}
    parsed = parse(run.text, *run.image.size, ended=run.finish_reason is not None)
    starts = _token_starts(run.steps)
    return {
        "run": run.number,
        "objects": [_object(detection, run, starts, decoder) for detection in parsed.detections],
        "problems": [_problem(problem, starts) for problem in parsed.problems],
        "has_codes": decoder is None and any(detection.seg for detection in parsed.detections),
    }


def _object(detection: Detection, run: Run, starts: Sequence[int], decoder: MaskDecoder | None) -> dict[str, Any]:
    (x_min, y_min, x_max, y_max), (width, height) = detection.box, run.image.size
    score = events.location_score(detection, run.steps)
    return {
        "label": detection.label,
        "box": [x_min / width, y_min / height, (x_max - x_min) / width, (y_max - y_min) / height],
        "pixels": f"{x_min:.0f}, {y_min:.0f} – {x_max:.0f}, {y_max:.0f}",
        "score": None if score is None else format_share(score),
        "tokens": tokens_of_span(detection.span, starts),
        "mask": _drawn_mask(detection, run, decoder),
        "growing": detection.growing,
    }


def _problem(problem: Problem, starts: Sequence[int]) -> dict[str, Any]:
    return {
        "text": problem.text,
        "kind": problem.kind,
        "reason": problem.reason,
        "tokens": tokens_of_span(problem.span, starts),
    }


def tokens_of_span(span: tuple[int, int], starts: Sequence[int]) -> list[int]:
    """The tokens whose text reaches into `span`; `starts` has a token's first character, and the text's end."""
    return [index for index, (start, end) in enumerate(itertools.pairwise(starts)) if start < span[1] and end > span[0]]


def _token_starts(steps: Sequence[Step]) -> list[int]:
    return [0, *(len(step.text) for step in steps)]


def _drawn_mask(detection: Detection, run: Run, decoder: MaskDecoder | None) -> str | None:
    if decoder is None or detection.seg is None:
        return None
    if detection.seg not in run.masks:
        run.masks[detection.seg] = data_url(png_file(mask_image(decoder.decode([detection.seg])[0])), "image/png")
    return run.masks[detection.seg]


def mask_image(mask: np.ndarray) -> Image.Image:
    """A mask (64, 64) of [0, 1] as a picture of DRAWN_MASK_SIDE pixels that is opaque where the mask is 0.5 or more."""
    side = (DRAWN_MASK_SIDE, DRAWN_MASK_SIDE)
    fine = Image.fromarray(mask.astype(np.float32)).resize(side, Image.Resampling.BILINEAR)
    opaque = Image.fromarray(np.where(np.asarray(fine) >= 0.5, 255, 0).astype(np.uint8))
    return Image.merge("LA", (opaque, opaque))


# Downloads


def coco_file(run: Run, decoder: MaskDecoder | None = None) -> str:
    """The objects as COCO's JSON, with one image and ids from 1.

    "bbox" is [left, top, width, height] in pixels; "segmentation" has uncompressed run lengths, or is empty where
    there is no mask; "score" is the mean probability of the location tokens.
    """
    found = events.detections(run.steps, run.image.size, decoder)
    categories = {label: number for number, label in enumerate(dict.fromkeys(one["label"] for one in found), start=1)}
    document = {
        "info": {"description": "objects in an answer of PaliGemma", "prompt": run.request["prompt"]},
        "images": [{"id": 1, "width": run.image.width, "height": run.image.height}],
        "annotations": [
            _annotation(number, one, categories[one["label"]]) for number, one in enumerate(found, start=1)
        ],
        "categories": [{"id": number, "name": label} for label, number in categories.items()],
    }
    return json.dumps(document, ensure_ascii=False, indent=1)


def _annotation(number: int, found: dict[str, Any], category: int) -> dict[str, Any]:
    left, top, right, bottom = found["box"]
    mask = found["mask"]
    area = int(decode_rle(mask).sum()) if mask else (right - left) * (bottom - top)
    return {
        "id": number,
        "image_id": 1,
        "category_id": category,
        "bbox": [left, top, right - left, bottom - top],
        "area": area,
        "iscrowd": 0,
        "segmentation": mask or [],
        "score": found["score"],
    }


def annotated_image(run: Run, decoder: MaskDecoder | None = None) -> bytes:
    """The picture with its boxes, labels and masks, as a PNG file; no side above that of `Picture.shown`."""
    image = preview_image(run.image)
    scale_x, scale_y = image.width / run.image.width, image.height / run.image.height
    for number, found in enumerate(events.detections(run.steps, run.image.size, decoder)):
        color = PALETTE[number % len(PALETTE)]
        left, top, right, bottom = found["box"]
        box = (left * scale_x, top * scale_y, right * scale_x, bottom * scale_y)
        if found["mask"]:
            _paint_mask(image, decode_rle(found["mask"]), color)
        _draw_box(image, box, " ".join(found["label"].split()), color)  # Pillow draws single lines only
    return png_file(image)


def _paint_mask(image: Image.Image, mask: np.ndarray, color: str) -> None:
    levels = Image.fromarray(np.where(mask, round(255 * MASK_OPACITY), 0).astype(np.uint8))
    image.paste(Image.new("RGB", image.size, color), mask=levels.resize(image.size))


def _draw_box(image: Image.Image, box: tuple[float, float, float, float], label: str, color: str) -> None:
    draw = ImageDraw.Draw(image)
    font = ImageFont.load_default(max(12, image.width // 50))
    draw.rectangle(box, outline=color, width=max(2, image.width // 300))
    left, top, right, bottom = draw.textbbox((0, 0), label, font=font, anchor="lb")
    # A label that would leave the picture at its right end or at its top is moved inside.
    x, y = max(0, min(box[0], image.width - right - 7)), max(box[1], -top)
    draw.rectangle((x + left, y + top, x + right + 6, y + bottom + 2), fill=color)
    draw.text((x + 3, y), label, fill="white", font=font, anchor="lb")
