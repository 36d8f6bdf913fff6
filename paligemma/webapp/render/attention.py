"""Data for attention on the image and the logit lens."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from paligemma.webapp.render.formatting import format_percentage, visible_text

if TYPE_CHECKING:
    from torch import Tensor

    from paligemma.lens import Inspection, LensRow

# (title, kind), as in candidates.CANDIDATE_COLUMNS.
LENS_COLUMNS = (
    ("layer", "number"),
    ("top token", "text"),
    ("p", "share"),
    ("rank of final token", "number"),
    ("entropy", "number"),
)
# Decimals of attention weights, to keep the JSON small.
NUM_DECIMALS = 6


def inspection_event(inspection: Inspection, index: int) -> dict[str, Any]:
    """Return the inspection of token `index` as JSON data.

    Returns:
        {"index", "grid": [rows, columns] of patches, "attention": weights of the patches in row-major order, per layer
        and head, "picture_share": their sum per layer and head, "lens": [{"layer", "token_id", "piece", "prob",
        "rank_of_final", "entropy"}]}. Weights are rounded to NUM_DECIMALS decimals.
    """
    return {
        "index": index,
        "grid": list(inspection.grid),
        "attention": _round(inspection.attention.tolist()),
        "picture_share": _round(inspection.image_share.tolist()),
        "lens": [dataclasses.asdict(row) for row in inspection.lens],
    }


def attention_state(run: int, inspection: Inspection, index: int) -> dict[str, Any]:
    """Return the value of the attention panel: the event with "lens" replaced by table rows, and the run's number."""
    event = inspection_event(inspection, index)
    del event["lens"]
    return {"run": run, **event, "rows": [_lens_row(row) for row in inspection.lens]}


def mean_image_shares(image_shares: Tensor) -> list[float]:
    """Average `lens.image_shares`, shape (tokens, layers, heads), over layers and heads."""
    return _round(image_shares.mean(dim=(1, 2)).tolist())


def _lens_row(row: LensRow) -> dict[str, Any]:
    cells = [
        str(row.layer),
        visible_text(row.piece),
        format_percentage(row.prob),
        str(row.rank_of_final),
        f"{row.entropy:.2f}",
    ]
    return {"cells": cells, "share": row.prob, "dropped": False}


def _round(values: Any) -> Any:
    """Round a number or nested lists of numbers."""
    return [_round(value) for value in values] if isinstance(values, list) else round(values, NUM_DECIMALS)
