"""Data for attention on the image and the logit lens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paligemma.webapp import events
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


def attention_state(run: int, inspection: Inspection) -> dict[str, Any]:
    """Return the value of the attention panel: the event with "lens" replaced by table rows, and the run's number."""
    event = events.inspection_event(inspection)
    del event["lens"]
    return {"run": run, **event, "rows": [_lens_row(row) for row in inspection.lens]}


def mean_image_shares(image_shares: Tensor) -> list[float]:
    """Average `lens.image_shares`, shape (tokens, layers, heads), over layers and heads."""
    return [round(share, events.NUM_DECIMALS) for share in image_shares.mean(dim=(1, 2)).tolist()]


def _lens_row(row: LensRow) -> dict[str, Any]:
    cells = [
        str(row.layer),
        visible_text(row.piece),
        format_percentage(row.prob),
        str(row.rank_of_final),
        f"{row.entropy:.2f}",
    ]
    return {"cells": cells, "share": row.prob, "dropped": False}
