"""Data for the candidate table: the most likely tokens at one position, before and after sampling filters."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from paligemma.webapp.render.formatting import format_percentage, visible_text

if TYPE_CHECKING:
    from paligemma.generation import Candidate, Step
    from paligemma.sampling import Sampling

# (title, kind). The kind determines the style; a "share" has a bar.
CANDIDATE_COLUMNS = (
    ("rank", "number"),
    ("token", "text"),
    ("id", "minor"),
    ("logit", "number"),
    ("logit / T", "number"),
    ("log p", "number"),
    ("p at T = 1", "number"),
    ("cumulative p", "number"),
    ("filter", "label"),
    ("sampling p", "share"),
)
NOT_APPLICABLE = "–"


def candidate_table(step: Step, sampling: Sampling) -> dict[str, Any]:
    """Return the rows and metrics of one position.

    Returns:
        "rows": the candidates in order of their logits. The chosen token is added as the last row if it is not one of
            them.
        "chosen": index of the chosen token's row.
        "metrics": see `step_metrics`.
    """
    cumulative = _cumulative_probabilities(step.top)
    rows = [
        _row(rank, candidate, step, sampling, format_percentage(mass))
        for rank, (candidate, mass) in enumerate(zip(step.top, cumulative, strict=True), start=1)
    ]
    ids = [candidate.token_id for candidate in step.top]
    if step.token_id not in ids:
        rows.append(_row(step.rank, step, step, sampling, NOT_APPLICABLE))
    chosen = ids.index(step.token_id) if step.token_id in ids else len(ids)
    return {"rows": rows, "chosen": chosen, "metrics": step_metrics(step)}


def step_metrics(step: Step) -> list[tuple[str, str]]:
    """Return (name, formatted value) of the metrics of one position.

    Entropy and log-sum-exp are those of the full distribution at temperature 1; the top-k mass is the probability of
    all candidates in the table.
    """
    metrics = [("entropy (nats)", f"{step.entropy:.2f}")]
    if len(step.top) > 1:
        metrics.append(("top-2 logit margin", f"{step.top[0].logit - step.top[1].logit:.2f}"))
    metrics.append(("top-k mass", format_percentage(_cumulative_probabilities(step.top)[-1])))
    metrics.append(("log-sum-exp", f"{step.logsumexp:.2f}"))
    return metrics


def filter_stage(rank: int, candidate: Candidate | Step, step: Step, sampling: Sampling) -> str:
    """Return "kept", or what removed a candidate from the distribution: "greedy", "top-k" or "top-p".

    As in `sampling.top_k_filter`, top-k keeps all logits equal to the k-th largest.
    """
    if candidate.sampled_prob > 0:
        return "kept"
    if sampling.temperature == 0:
        return "greedy"
    if 0 < sampling.top_k < rank:
        is_listed = sampling.top_k <= len(step.top)
        if not is_listed or candidate.logit < step.top[sampling.top_k - 1].logit:
            return "top-k"
    return "top-p" if sampling.top_p < 1 else "kept"  # without top-p, the probability has underflowed to 0


def _row(rank: int, candidate: Candidate | Step, step: Step, sampling: Sampling, cumulative: str) -> dict[str, Any]:
    """The row of a candidate, or of the chosen token, whose `Step` has the same fields."""
    scaled = f"{candidate.logit / sampling.temperature:.2f}" if sampling.temperature > 0 else NOT_APPLICABLE
    stage = filter_stage(rank, candidate, step, sampling)
    return {
        "id": candidate.token_id,
        "cells": [
            str(rank),
            visible_text(candidate.piece),
            str(candidate.token_id),
            f"{candidate.logit:.2f}",
            scaled,
            f"{candidate.logprob:.2f}",
            format_percentage(candidate.prob),
            cumulative,
            stage,
            format_percentage(candidate.sampled_prob),
        ],
        "share": candidate.sampled_prob,
        "dropped": stage != "kept",
    }


def _cumulative_probabilities(candidates: Sequence[Candidate]) -> list[float]:
    """Cumulative sums, at most 1 despite rounding."""
    return [min(1.0, mass) for mass in itertools.accumulate(candidate.prob for candidate in candidates)]
