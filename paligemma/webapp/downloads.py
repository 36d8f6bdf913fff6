"""Downloads of an answer's objects: COCO JSON, and the image with boxes, labels and masks."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from paligemma.masks import MaskDecoder, decode_rle
from paligemma.webapp import events
from paligemma.webapp.images import decode_preview, encode_png
from paligemma.webapp.runs import Run

# The same colors as --hue0 to --hue5 in assets/page/page.css.
PALETTE = ("#0b7a6b", "#b4532a", "#5b4db1", "#a3366f", "#2f6db3", "#6f6a12")
MASK_OPACITY = 0.45


def coco_json(run: Run, decoder: MaskDecoder | None = None) -> str:
    """Export the detected objects in COCO format, as a dataset of one image.

    "bbox" is [left, top, width, height] in pixels. "segmentation" is an uncompressed RLE, or empty without a
    mask. "score" is the mean probability of the location tokens.
    """
    detections = events.detections(run.steps, run.image.size, decoder)
    labels = dict.fromkeys(detection["label"] for detection in detections)
    categories = {label: number for number, label in enumerate(labels, start=1)}
    document = {
        "info": {"description": "Objects detected by PaliGemma", "prompt": run.request["prompt"]},
        "images": [{"id": 1, "width": run.image.width, "height": run.image.height}],
        "annotations": [
            _annotation(number, detection, categories[detection["label"]])
            for number, detection in enumerate(detections, start=1)
        ],
        "categories": [{"id": number, "name": label} for label, number in categories.items()],
    }
    return json.dumps(document, ensure_ascii=False, indent=1)


def annotated_png(run: Run, decoder: MaskDecoder | None = None) -> bytes:
    """Draw boxes, labels and masks on the preview. Returns a PNG file of the preview's size."""
    image = decode_preview(run.image)
    scale_x, scale_y = image.width / run.image.width, image.height / run.image.height
    for number, detection in enumerate(events.detections(run.steps, run.image.size, decoder)):
        color = PALETTE[number % len(PALETTE)]
        left, top, right, bottom = detection["box"]
        box = (left * scale_x, top * scale_y, right * scale_x, bottom * scale_y)
        if detection["mask"]:
            _draw_mask(image, decode_rle(detection["mask"]), color)
        _draw_box(image, box, " ".join(detection["label"].split()), color)  # Pillow measures single lines only
    return encode_png(image)


def _annotation(number: int, detection: dict[str, Any], category: int) -> dict[str, Any]:
    left, top, right, bottom = detection["box"]
    mask = detection["mask"]
    area = int(decode_rle(mask).sum()) if mask else (right - left) * (bottom - top)
    return {
        "id": number,
        "image_id": 1,
        "category_id": category,
        "bbox": [left, top, right - left, bottom - top],
        "area": area,
        "iscrowd": 0,
        "segmentation": mask or [],
        "score": detection["score"],
    }


def _draw_mask(image: Image.Image, mask: np.ndarray, color: str) -> None:
    alpha = Image.fromarray(np.where(mask, round(255 * MASK_OPACITY), 0).astype(np.uint8))
    image.paste(Image.new("RGB", image.size, color), mask=alpha.resize(image.size))


def _draw_box(image: Image.Image, box: tuple[float, float, float, float], label: str, color: str) -> None:
    draw = ImageDraw.Draw(image)
    font = ImageFont.load_default(max(12, image.width // 50))
    draw.rectangle(box, outline=color, width=max(2, image.width // 300))
    left, top, right, bottom = draw.textbbox((0, 0), label, font=font, anchor="lb")
    # Keep the label inside the image at its right and top edges.
    x, y = max(0, min(box[0], image.width - right - 7)), max(box[1], -top)
    draw.rectangle((x + left, y + top, x + right + 6, y + bottom + 2), fill=color)
    draw.text((x + 3, y), label, fill="white", font=font, anchor="lb")
