"""Metrics of answers: exact match, caption recall, F1 at an IoU threshold, mean IoU of boxes and masks."""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from paligemma.parsing import CODES_PER_MASK, LOCATION_BINS
from paligemma.training.captions import parse_caption
from paligemma.training.tasks import Question, Target

MaskDecode = Callable[[Sequence[int]], np.ndarray]  # 16 codes -> (64, 64) mask in [0, 1]
Prediction = tuple[str, np.ndarray, tuple[int, ...]]  # label, box, mask codes

# A coordinate is the center of its bin, and reversed boxes count as wrong predictions, both unlike `paligemma.parsing`.
_OBJECT = re.compile(
    r"<loc(\d{4})><loc(\d{4})><loc(\d{4})><loc(\d{4})>" + rf"((?:<seg\d{{3}}>){{{CODES_PER_MASK}}})?\s*([^;<]*)"
)


def score(question: Question, text: str, decode_mask: MaskDecode | None = None) -> dict[str, float]:
    """Score one answer, as sums that `summarize` turns into metrics.

    Every task has `answers` (1) and `exact`.
    Captions add `objects` and `recalled`, the numbers of true and of correctly named objects.
    Box tasks add `true`, `predicted`, `hits50` and `hits75`, the numbers of boxes and of matches at IoU 0.5 and 0.75,
    and `iou`, the sum of the IoU of the true boxes (0 if missed).
    `segment` with `decode_mask` adds `masks`, `mask_iou` (each mask in its predicted box) and `shape_iou` (each mask
    stretched over the true box), summed over the true objects (0 if missed).
    """
    text = text.strip()
    result = {"answers": 1.0, "exact": float(text == question.answer)}
    if question.task in ("detect", "multi_detect", "segment"):
        result |= _score_boxes(question, text, decode_mask)
    elif question.task.startswith("caption"):
        language = question.task[-2:]
        true, predicted = parse_caption(question.answer, language), parse_caption(text, language)
        result |= {"objects": float(true.total()), "recalled": float((true & predicted).total())}
    return result


def summarize(scores: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Aggregate the scores of one task to those metrics that apply.

    They are `exact`, `recall`, `f1_50`, `f1_75`, `iou`, `mask_iou` and `shape_iou`, next to the number of `answers`.
    """
    sums: Counter[str] = Counter()
    for one in scores:
        sums.update(one)
    metrics: dict[str, float] = {"answers": sums["answers"], "exact": sums["exact"] / max(1, sums["answers"])}
    if sums["objects"]:
        metrics["recall"] = sums["recalled"] / sums["objects"]
    if sums["true"]:
        boxes = sums["true"] + sums["predicted"]
        metrics |= {"f1_50": 2 * sums["hits50"] / boxes, "f1_75": 2 * sums["hits75"] / boxes}
        metrics["iou"] = sums["iou"] / sums["true"]
    if sums["masks"]:
        metrics |= {name: sums[name] / sums["masks"] for name in ("mask_iou", "shape_iou")}
    return metrics


def parse_boxes(text: str) -> list[Prediction]:
    """Parse an answer to label, box ([x0, y0, x1, y1] as fractions of the side) and mask codes of each object."""
    objects = []
    for match in _OBJECT.finditer(text):
        y0, x0, y1, x1 = (int(match[group]) for group in (1, 2, 3, 4))
        box = (np.array([x0, y0, x1, y1]) + 0.5) / LOCATION_BINS
        codes = tuple(int(code) for code in re.findall(r"\d{3}", match[5] or ""))
        objects.append((match[6].strip(), box, codes))
    return objects


def box_iou(first: np.ndarray, second: np.ndarray) -> float:
    """Intersection over union of two boxes [x0, y0, x1, y1]."""
    overlap = np.minimum(first[2:], second[2:]) - np.maximum(first[:2], second[:2])
    intersection = np.prod(np.clip(overlap, 0, None))
    union = np.prod(first[2:] - first[:2]) + np.prod(second[2:] - second[:2]) - intersection
    return float(intersection / union) if union > 0 else 0.0


def mask_iou(target: Target, box: np.ndarray, mask: np.ndarray) -> float:
    """IoU of a predicted mask, placed in its predicted box, with the true mask, over the pixels of the true box.

    Args:
        target: ground truth with a mask.
        box: the predicted box, [x0, y0, x1, y1] as fractions of the image side.
        mask: (height, width) in [0, 1], stretched over `box`; thresholded at 0.5.
    """
    assert target.mask is not None
    side = target.mask.shape[0]
    fractions = (np.arange(side) + 0.5) / side
    x0, y0, x1, y1 = target.box
    columns = _pixel_indices(x0 + fractions * (x1 - x0), box[0], box[2], mask.shape[1])
    rows = _pixel_indices(y0 + fractions * (y1 - y0), box[1], box[3], mask.shape[0])
    padded = np.pad(mask >= 0.5, ((0, 1), (0, 1)))  # last row and column: outside the predicted box
    predicted, true = padded[np.ix_(rows, columns)], target.mask >= 0.5
    return float((predicted & true).sum() / max(1, (predicted | true).sum()))


def _pixel_indices(coordinates: np.ndarray, low: float, high: float, side: int) -> np.ndarray:
    """Map coordinates to pixels of a mask that spans low to high; `side` for those outside."""
    indices = np.floor((coordinates - low) / max(high - low, 1e-6) * side).astype(int)
    return np.where((indices >= 0) & (indices < side), indices, side)


def _score_boxes(question: Question, text: str, decode_mask: MaskDecode | None) -> dict[str, float]:
    predictions = parse_boxes(text)
    pairs = _match(question.targets, predictions)
    ious = [box_iou(target.box, prediction[1]) for target, prediction in pairs]
    result = {
        "true": float(len(question.targets)),
        "predicted": float(len(predictions)),
        "hits50": float(sum(iou >= 0.5 for iou in ious)),
        "hits75": float(sum(iou >= 0.75 for iou in ious)),
        "iou": float(sum(ious)),
    }
    if decode_mask is not None and question.task == "segment":
        result |= {"masks": float(len(question.targets)), "mask_iou": 0.0, "shape_iou": 0.0}
        for target, (_, box, codes) in pairs:
            if len(codes) == CODES_PER_MASK:
                mask = decode_mask(codes)
                result["mask_iou"] += mask_iou(target, box, mask)
                result["shape_iou"] += mask_iou(target, target.box, mask)
    return result


def _match(targets: Sequence[Target], predictions: Sequence[Prediction]) -> list[tuple[Target, Prediction]]:
    """Match targets and predictions with the same label greedily by IoU, each at most once."""
    candidates = [
        (box_iou(target.box, box), t, p)
        for t, target in enumerate(targets)
        for p, (label, box, _) in enumerate(predictions)
        if label == target.label
    ]
    pairs: list[tuple[int, int]] = []
    for iou, t, p in sorted(candidates, reverse=True):
        if iou > 0 and all(t != matched_t and p != matched_p for matched_t, matched_p in pairs):
            pairs.append((t, p))
    return [(targets[t], predictions[p]) for t, p in pairs]
