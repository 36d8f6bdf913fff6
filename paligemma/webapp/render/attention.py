"""What the model did inside for one token: attention over the picture, and the logit lens, as the page draws them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paligemma.webapp.render.token_strip import format_share, visible_piece

if TYPE_CHECKING:
    from torch import Tensor

    from paligemma.lens import Inspection, LensRow

LENS_COLUMNS = (
    ("layer", "number"),
    ("top token", "text"),
    ("p", "share"),
    ("rank of final token", "number"),
    ("entropy", "number"),
)
# Enough digits for a picture, and a seventh of the bytes.
DIGITS = 6


def inspection_event(inspection: Inspection, index: int) -> dict[str, Any]:
    """One inspected token as JSON.

    Returns {"index", "grid": [rows, columns] of patches, "attention": per layer and head the weights on the patches,
    row by row, "picture_share": per layer and head, "lens": [{"layer", "token_id", "piece", "prob",
    "rank_of_final", "entropy"}]}. Weights are rounded to DIGITS digits.
    """
    return {
        "index": index,
        "grid": list(inspection.grid),
        "attention": _rounded(inspection.attention.tolist()),
        "picture_share": _rounded(inspection.image_share.tolist()),
        "lens": [_lens_fields(row) for row in inspection.lens],
    }


def inspect(run: int, inspection: Inspection, index: int) -> dict[str, Any]:
    """The value of the page's look inside: the event, and its lens as rows of a table."""
    event = inspection_event(inspection, index)
    del event["lens"]
    return {"run": run, **event, "rows": [_lens_row(row) for row in inspection.lens]}


def mean_shares(image_shares: Tensor) -> list[float]:
    """`lens.picture_shares`, (tokens, layers, heads), averaged over layers and heads: one share a token."""
    return _rounded(image_shares.mean(dim=(1, 2)).tolist())


def _lens_fields(row: LensRow) -> dict[str, Any]:
    return {
        "layer": row.layer,
        "token_id": row.token_id,
        "piece": row.piece,
        "prob": row.prob,
        "rank_of_final": row.rank_of_final,
        "entropy": row.entropy,
    }


def _lens_row(row: LensRow) -> dict[str, Any]:
    cells = [
        str(row.layer),
        visible_piece(row.piece),
        format_share(row.prob),
        str(row.rank_of_final),
        f"{row.entropy:.2f}",
    ]
    return {"cells": cells, "share": row.prob, "dropped": False}


def _rounded(values: Any) -> Any:
    return [_rounded(value) for value in values] if isinstance(values, list) else round(values, DIGITS)
