"""Train the bundled model from scratch: `python -m paligemma.training.train`.

A PaliGemma of about five million parameters learns to caption, count, detect and segment emoji in scenes that are
rendered during training. There are three stages:

* vision: the vision tower and projector are trained with per-patch labels (class, color, box, mask). This replaces
  SigLIP's pre-training; without it, the decoder makes little progress for a long time.
* packed: several questions about an image share its image tokens in one sequence. Unlike in PaliGemma, image tokens do
  not attend to the prompt. This is several times cheaper than one sequence per question.
* single: one question per sequence, with PaliGemma's attention and the model's training forward pass. This is every
  third step after the vision stage, every second step in the cooldown, and every step in the last third of it.

An interrupted run resumes. A finished run can be extended with a larger `--steps`: it resumes from before the cooldown.
Requires npm for the icons, the output of `paligemma.training.masks`, and, for compilation, a C++ compiler
(`--no-compile` avoids it).
"""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from paligemma.checkpoint import load_model
from paligemma.training.batches import Batch, build_batch, start_worker
from paligemma.training.command_line import parse_options
from paligemma.training.evaluate import QuickEvaluation
from paligemma.training.icons import fetch_icons
from paligemma.training.model import export_model
from paligemma.training.options import TrainOptions
from paligemma.training.resume import BEFORE_COOLDOWN, LATEST, find_resume_file, load_state, save_state
from paligemma.training.trainer import Trainer

LOG_EVERY = 50  # steps
CHUNK = 24  # batches


class LogWriter:
    """Writes `log.jsonl`: mean losses every LOG_EVERY steps, and evaluations."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.losses: dict[str, list[float]] = {}
        self.started = time.monotonic()
        path.parent.mkdir(parents=True, exist_ok=True)

    def add_losses(self, step: int, stage: str, losses: dict[str, float]) -> None:
        """Collect the losses of a step."""
        for name, value in losses.items():
            self.losses.setdefault(f"{stage}_{name}", []).append(value)
        if step % LOG_EVERY == 0:
            means = {name: round(float(np.mean(values)), 4) for name, values in self.losses.items()}
            self.write({"step": step, "seconds": round(time.monotonic() - self.started), **means})
            self.losses.clear()

    def write(self, entry: dict) -> None:
        """Append an entry."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")


def generate_batches(options: TrainOptions, first_step: int) -> Iterator[Batch]:
    """Yield the batches from `first_step` on.

    All CPU cores build a chunk of batches while training waits. Doing both at the same time is slower on a CPU.
    """
    arguments = (options.icons, options.mask_encoder, options.batch, options.seed)
    with multiprocessing.get_context("spawn").Pool(multiprocessing.cpu_count(), start_worker, arguments) as pool:
        for start in range(first_step, options.total_steps, CHUNK):
            steps = range(start, min(start + CHUNK, options.total_steps))
            yield from pool.map(build_batch, [(options.stage(step), step) for step in steps], chunksize=1)


def make_trainer(options: TrainOptions) -> Trainer:
    """Create a trainer from a resume file, from `start_from`, or from scratch."""
    trainer = Trainer(options)
    path = find_resume_file(options)
    if path is not None:
        trainer.restore(load_state(path))
        print(f"Resuming from {path} at step {trainer.step} of {options.total_steps}.")
    elif options.start_from:
        initial = load_model(options.start_from, trainer.device, torch.float32)
        trainer.model.load_state_dict(initial.state_dict())
    return trainer


def train(options: TrainOptions) -> None:
    """Train, or resume training, and export the model."""
    fetch_icons(options.icons)
    trainer = make_trainer(options)
    evaluation = QuickEvaluation(options.icons, options.mask_encoder)
    log = LogWriter(options.work / "log.jsonl")
    saved = time.monotonic()
    with tqdm(total=options.total_steps, initial=trainer.step, smoothing=0.05, mininterval=5) as progress:
        for batch in generate_batches(options, trainer.step):
            if trainer.step == options.total_steps - options.cooldown_steps:
                save_state(trainer.state(), options.work / BEFORE_COOLDOWN)
            stage = options.stage(trainer.step)
            losses = trainer.train_step(batch)
            log.add_losses(trainer.step, stage, losses)
            progress.update()
            progress.set_postfix({stage: f"{losses['total']:.3f}"}, refresh=False)
            done = trainer.step == options.total_steps
            if done or time.monotonic() - saved > 60 * options.save_minutes:
                save_state(trainer.state(), options.work / LATEST)
                saved = time.monotonic()
            if done or (trainer.step > options.vision_steps and trainer.step % options.evaluate_every == 0):
                log.write({"step": trainer.step, "evaluation": evaluation(trainer.model)})
    export_model(trainer.model, options.output)
    print(f"Wrote {options.output}.")


def main() -> None:
    """Parse the options, store them in the work folder, and train."""
    options = parse_options(TrainOptions, "python -m paligemma.training.train", "Train the bundled model from scratch.")
    options.work.mkdir(parents=True, exist_ok=True)
    values = {name: str(value) for name, value in asdict(options).items()}
    (options.work / "options.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    train(options)


if __name__ == "__main__":
    main()
