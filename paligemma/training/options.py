"""Options of the training run, with its stages and learning-rate schedule."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import torch

from paligemma.training.batches import BatchOptions

PRECISIONS = ("bfloat16", "float32")


@dataclass(frozen=True)
class TrainOptions:
    """Options of the command line, and the batch sizes."""

    output: Annotated[Path, "folder for the trained model"] = Path("assets/demo")
    work: Annotated[Path, "folder for resume files and the log"] = Path("runs/demo")
    icons: Annotated[Path, "folder of the icon packages"] = Path("runs/icons")
    mask_encoder: Annotated[Path, "file from paligemma.training.masks"] = Path("runs/masks/encoder.safetensors")
    start_from: Annotated[str, "checkpoint folder with initial weights, if there is no resume file"] = ""
    vision_steps: Annotated[int, "steps of the vision stage"] = 1300
    steps: Annotated[int, "steps after the vision stage"] = 8900
    cooldown_steps: Annotated[int, "final steps, in which the learning rate decays to zero"] = 2900
    warmup_steps: Annotated[int, "warmup steps, at the start of the vision stage and after it"] = 150
    matrix_rate: Annotated[float, "peak learning rate of Muon, for matrices, scaled to match AdamW's updates"] = 1.2e-3
    rate: Annotated[float, "peak learning rate of AdamW, for all other parameters"] = 5e-4
    weight_decay: Annotated[float, "weight decay of the matrices"] = 0.05
    seed: Annotated[int, "random seed of weights and data"] = 0
    device: Annotated[str, "device"] = "cuda" if torch.cuda.is_available() else "cpu"
    precision: Annotated[str, "dtype of matrix products: bfloat16 or float32"] = "bfloat16"
    compile: Annotated[bool, "compile the vision tower and the decoder; needs a C++ compiler"] = True
    evaluate_every: Annotated[int, "steps between evaluations"] = 500
    save_minutes: Annotated[float, "minutes between resume files"] = 3.0
    batch: BatchOptions = field(default_factory=BatchOptions)

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise ValueError(f"precision must be {' or '.join(PRECISIONS)}, got {self.precision!r}.")

    @property
    def total_steps(self) -> int:
        """Steps of all stages."""
        return self.vision_steps + self.steps

    def stage(self, step: int) -> str:
        """Return the stage of a step, counted from 0 over the whole run."""
        if step < self.vision_steps:
            return "vision"
        remaining = self._remaining_cooldown(step)
        if remaining <= 1 / 3:
            return "single"
        period = 3 if remaining > 1 else 2
        return "single" if step % period == period - 1 else "packed"

    def learning_rate_factor(self, step: int) -> float:
        """Return the multiplier of the peak learning rates: linear warmup, constant, linear cooldown to zero."""
        step_in_stage = step if step < self.vision_steps else step - self.vision_steps
        warmup = min(1.0, (step_in_stage + 1) / self.warmup_steps)
        return warmup * min(1.0, self._remaining_cooldown(step))

    def progress(self, step: int) -> float:
        """Return the completed fraction of the steps after the vision stage, 0 to 1."""
        return min(1.0, max(0.0, (step - self.vision_steps) / max(1, self.steps)))

    def _remaining_cooldown(self, step: int) -> float:
        """Remaining steps in units of `cooldown_steps`: above 1 before the cooldown, then down to 0."""
        return (self.total_steps - step) / self.cooldown_steps
