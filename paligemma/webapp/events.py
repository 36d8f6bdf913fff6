"""Events of the HTTP API."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from paligemma.masks import MaskDecoder, encode_rle, paste_mask
from paligemma.parsing import Detection, location_token_indices, parse

if TYPE_CHECKING:
    from paligemma.generation import GenerationResult, Step
    from paligemma.lens import Inspection

Event = dict[str, Any]

NUM_DECIMALS = 6  # of attention weights, to keep the JSON small

# Sent before the first token, such as while the model loads.
WAITING_EVENT: Event = {"text": "", "step": None, "finish_reason": None}


def step_event(step: Step) -> Event:
    """Event of one token: {"text": the answer so far, "step": the other fields of the Step, "finish_reason"}."""
    fields = dataclasses.asdict(step)
    text = fields.pop("text")
    return {"text": text, "step": fields, "finish_reason": step.finish_reason}


def last_event(result: GenerationResult, size: tuple[int, int], mask_decoder: MaskDecoder | None = None) -> Event:
    """Event of the last token, with the detections and the timing.

    Args:
        size: (width, height) of the image in pixels, after EXIF rotation.
    """
    return {
        **step_event(result.steps[-1]),
        "detections": detections(result.steps, size, mask_decoder),
        "timing": dataclasses.asdict(result.timing),
    }


def inspection_event(inspection: Inspection) -> Event:
    """Event of /inspect.

    Returns:
        {"index", "grid": [rows, columns] of patches, "attention": weights of the patches in row-major order, per layer
        and head, "picture_share": their sum per layer and head, "lens": [{"layer", "token_id", "piece", "prob",
        "rank_of_final", "entropy"}]}. Weights are rounded to NUM_DECIMALS decimals.
    """
    return {
        "index": inspection.index,
        "grid": list(inspection.grid),
        "attention": _round(inspection.attention.tolist()),
        "picture_share": _round(inspection.image_share.tolist()),
        "lens": [dataclasses.asdict(row) for row in inspection.lens],
    }


def detections(
    steps: Sequence[Step], size: tuple[int, int], mask_decoder: MaskDecoder | None = None
) -> list[dict[str, Any]]:
    """Detected objects of an answer, in order of appearance.

    Returns:
        [{"label", "box": [x_min, y_min, x_max, y_max] in pixels of the image, "score": see `location_score`,
        "mask": uncompressed COCO RLE, or None without mask tokens, a mask decoder or a pixel in the box}]
    """
    if not steps:
        return []
    found = parse(steps[-1].text, *size).detections
    return [
        {
            "label": detection.label,
            "box": list(detection.box),
            "score": location_score(detection, steps),
            "mask": _mask(detection, size, mask_decoder),
        }
        for detection in found
    ]


def location_score(detection: Detection, steps: Sequence[Step]) -> float | None:
    """Mean probability of a detection's four location tokens; None if they were generated as ordinary characters."""
    indices = location_token_indices(detection, [step.piece for step in steps])
    return sum(steps[index].prob for index in indices) / len(indices) if indices else None


def _mask(detection: Detection, size: tuple[int, int], decoder: MaskDecoder | None) -> dict[str, Any] | None:
    if decoder is None or detection.seg is None:
        return None
    mask = paste_mask(decoder.decode([detection.seg])[0], detection.box, *size)
    return None if mask is None else encode_rle(mask)


def _round(values: Any) -> Any:
    """Round a number or nested lists of numbers."""
    return [_round(value) for value in values] if isinstance(values, list) else round(values, NUM_DECIMALS)
