"""Resume files of the training script."""

from __future__ import annotations

from pathlib import Path

import torch

from paligemma.training.options import TrainOptions

LATEST, BEFORE_COOLDOWN = "state.pt", "plateau.pt"


def save_state(state: dict, path: Path) -> None:
    """Write a resume file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    partial.replace(path)


def load_state(path: Path) -> dict:
    """Load a resume file, restricted to tensors and plain values."""
    return torch.load(path, weights_only=True, map_location="cpu")


def find_resume_file(options: TrainOptions) -> Path | None:
    """Return the resume file to continue from, or None for a new run.

    It is the latest one, or, if the number of steps has changed since, the one from before the cooldown.
    """
    latest, before_cooldown = options.work / LATEST, options.work / BEFORE_COOLDOWN
    if not latest.exists():
        return None
    same_schedule = load_state(latest)["total_steps"] == options.total_steps
    return latest if same_schedule or not before_cooldown.exists() else before_cooldown
