"""Steps -> the events of the HTTP API."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from paligemma.masks import MaskDecoder, encode_rle, paste_mask
from paligemma.parsing import Detection, location_token_indices, parse

if TYPE_CHECKING:
    from paligemma.generation import GenerationResult, Step

Event = dict[str, Any]

WAITING_EVENT: Event = {"text": "", "step": None, "finish_reason": None}


def step_event(step: Step) -> Event:
    """One token as JSON: {"text": the answer so far, "step": the Step's other fields, "finish_reason"}."""
    fields = dataclasses.asdict(step)
    text = fields.pop("text")
    return {"text": text, "step": fields, "finish_reason": step.finish_reason}


def last_event(result: GenerationResult, size: tuple[int, int], mask_decoder: MaskDecoder | None = None) -> Event:
    """The last token's event, with the objects of the answer and the times.

    `size` is (width, height) of the upright picture in pixels.
    """
    return {
        **step_event(result.steps[-1]),
        "detections": detections(result.steps, size, mask_decoder),
        "timing": dataclasses.asdict(result.timing),
    }


def detections(
    steps: Sequence[Step], size: tuple[int, int], mask_decoder: MaskDecoder | None = None
) -> list[dict[str, Any]]:
    """The objects of an answer, in its order.

    Each is {"label", "box": [x_min, y_min, x_max, y_max] in pixels of the upright picture, "score": mean
    probability of its four location tokens, None where the model spelled them in letters, "mask": COCO's
    uncompressed run lengths, None without codes, without a decoder, or where the box has no pixel}.
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
    """The mean probability of an object's four location tokens; None where the model spelled them in letters."""
    indices = location_token_indices(detection, [step.piece for step in steps])
    return sum(steps[index].prob for index in indices) / len(indices) if indices else None


def _mask(detection: Detection, size: tuple[int, int], decoder: MaskDecoder | None) -> dict[str, Any] | None:
    if decoder is None or detection.seg is None:
        return None
    mask = paste_mask(decoder.decode([detection.seg])[0], detection.box, *size)
    return None if mask is None else encode_rle(mask)
