"""Figures of the bundled model's card: `python -m paligemma.training.evaluate`.

Scenes that training never meets, at fixed seeds, in every drawing style, two of which are never trained on. The
questions are asked at 448 pixels through `paligemma.load` and `generate`, greedily, as the app asks them. Scenes of one
to three objects and scenes of four are counted apart.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from tqdm import tqdm

import paligemma
from paligemma.checkpoint import BUNDLED_FOLDER
from paligemma.masks import MaskDecoder
from paligemma.modeling import PaliGemmaForConditionalGeneration
from paligemma.training.batches import (
    IMAGE_SIZE,
    NO_LABEL,
    NUM_PATCHES,
    SPRITE_SIZE,
    TextEncoder,
    pack,
    single_inputs,
)
from paligemma.training.icons import STYLES, STYLES_HELD_OUT, fetch_icons, load_sprites
from paligemma.training.masks import MaskEncoder
from paligemma.training.scenes import EVALUATION, Scene, SceneMaker
from paligemma.training.tasks import TASKS, Question, questions, score, summarize

SEED = 20260
SHOWN_SIZE = 448
SHOWN_SPRITE_SIZE = SPRITE_SIZE * SHOWN_SIZE // IMAGE_SIZE
SCENES_A_PART = 25
FEW, FOUR = "1-3", "4"
GROUPS = {FEW: (1, 1, 1), FOUR: (0, 0, 0, 1)}  # weights of 1, 2, 3 and 4 objects
# Tokens after which an answer is cut off: more than any true answer of the task has.
LONGEST_ANSWER = {
    "caption_en": 48,
    "caption_es": 48,
    "caption_zh": 48,
    "detect": 64,
    "multi_detect": 64,
    "segment": 128,
}
SHORT_ANSWER = 16
MASK_DECODER = "mask_decoder.safetensors"
FIGURES = ("exact", "recall", "f1_50", "f1_75", "iou", "mask_iou", "shape_iou")


def evaluation_scenes(
    maker: SceneMaker, group: str, indices: Iterable[int], size: int
) -> Iterator[tuple[Scene, list[Question]]]:
    """Scenes of a group (a key of GROUPS), each with a question of every task."""
    maker.options = replace(EVALUATION, counts=GROUPS[group])
    for index in indices:
        scene = maker.scene(index, size)
        yield scene, questions(scene, np.random.default_rng([SEED, index]))


class QuickEvaluation:
    """Figures while training: a few scenes a style, all answers at once, each token given the true ones before it.

    An answer counts as exact where every token is the likeliest, which is when greedy decoding gives that answer.
    """

    def __init__(self, icons: Path, mask_encoder: Path, few: int = 16, four: int = 5, length: int = 112) -> None:
        sprites = load_sprites(icons, SPRITE_SIZE)
        self.text = TextEncoder(MaskEncoder.load(mask_encoder))
        self.length = length
        self.scenes = [
            (style, group, scene, asked)
            for style in STYLES
            for maker in [SceneMaker(sprites, [style], EVALUATION, SEED, "evaluation")]
            for group, count in ((FEW, few), (FOUR, four))
            for scene, asked in evaluation_scenes(maker, group, range(count), IMAGE_SIZE)
        ]

    @torch.inference_mode()
    def __call__(self, model: PaliGemmaForConditionalGeneration) -> dict[str, dict[str, float]]:
        """Figures of the trained styles together and of each held-out one, one to three objects."""
        scores: dict[str, dict[str, list]] = defaultdict(lambda: defaultdict(list))
        with torch.compiler.set_stance("force_eager"):  # each scene has another shape; none is worth compiling
            for style, group, scene, asked in self.scenes:
                name = style if style in STYLES_HELD_OUT else "trained"
                for question, answer in zip(asked, self._answers(model, scene, asked), strict=True):
                    scores[f"{name} {group}"][question.task].append(score(question, answer))
        return {name: _figures(tasks) for name, tasks in scores.items()}

    def _answers(self, model: PaliGemmaForConditionalGeneration, scene: Scene, asked: Sequence[Question]) -> list[str]:
        rows = [pack([self.text.prefix_and_suffix(question)], self.length) for question in asked]
        text = {name: torch.from_numpy(np.stack([row[name] for row in rows])).to(model.device) for name in rows[0]}
        pixels = torch.from_numpy(scene.image).to(model.device).permute(2, 0, 1)[None].float() / 127.5 - 1
        features = model.get_image_features(pixels).expand(len(rows), -1, -1)
        inputs = single_inputs(text, model.config.image_token_index)
        logits = model(**inputs, image_features=features)["logits"]
        likeliest = logits[:, NUM_PATCHES:].argmax(-1)
        return [
            self._spelt(ids[targets != NO_LABEL].tolist())
            for ids, targets in zip(likeliest, text["targets"], strict=True)
        ]

    def _spelt(self, ids: list[int]) -> str:
        """The text up to a final end token; misplaced special pieces stay visible, and so count as wrong."""
        text = self.text.tokenizer.decode(ids, skip_special_tokens=False)
        return text.removesuffix("<eos>").replace("\n", "<newline>")


def _figures(tasks: dict[str, list]) -> dict[str, float]:
    """One flat map of every task's figures, rounded, in the order of TASKS."""
    flat = {}
    for task in TASKS:
        if task in tasks:
            figures = summarize(tasks[task])
            flat |= {f"{task} {name}": round(figures[name], 3) for name in FIGURES if name in figures}
    return flat


@dataclass(frozen=True)
class Part:
    """Some scenes of one style and group, which one process asks about."""

    style: str
    group: str
    indices: range


class Evaluator:
    """Asks about scenes as the app does; one lives in each process.

    `model` is a checkpoint's folder or None for the bundled one; `icons` is where the drawings are.
    """

    def __init__(self, model: str | None, icons: Path) -> None:
        self.vlm = paligemma.load(model)
        self.masks = MaskDecoder.load(mask_decoder_file(model))
        self.icons = icons
        self.maker: SceneMaker | None = None
        self.style = ""

    def __call__(self, part: Part) -> list[tuple[str, dict[str, float]]]:
        """The task and the scores of every answer."""
        return [
            (question.task, score(question, self._answer(image, question), self._mask))
            for scene, asked in evaluation_scenes(self._maker(part.style), part.group, part.indices, SHOWN_SIZE)
            for image in [Image.fromarray(scene.image)]
            for question in asked
        ]

    def _answer(self, image: Image.Image, question: Question) -> str:
        longest = LONGEST_ANSWER.get(question.task, SHORT_ANSWER)
        return self.vlm.generate(image, question.prompt, max_new_tokens=longest, top_n=1).text

    def _mask(self, codes: Sequence[int]) -> np.ndarray:
        return self.masks.decode([codes])[0]

    def _maker(self, style: str) -> SceneMaker:
        if style != self.style:
            sprites = load_sprites(self.icons, SHOWN_SPRITE_SIZE, [style])
            self.maker, self.style = SceneMaker(sprites, [style], EVALUATION, SEED, "evaluation"), style
        return self.maker


def mask_decoder_file(model: str | None) -> Path:
    """The decoder beside a model, or the bundled one, with which all of this project's models are trained."""
    beside = Path(model or BUNDLED_FOLDER) / MASK_DECODER
    return beside if beside.exists() else BUNDLED_FOLDER / MASK_DECODER


_evaluator: Evaluator | None = None


def start_worker(model: str | None, icons: Path) -> None:
    """Initialize a process of the pool."""
    global _evaluator
    torch.set_num_threads(1)
    _evaluator = Evaluator(model, icons)


def evaluate_part(part: Part) -> tuple[Part, list[tuple[str, dict[str, float]]]]:
    """`Evaluator` in a process of the pool."""
    return part, _evaluator(part)


def scored_parts(
    model: str | None, icons: Path, parts: Sequence[Part], workers: int
) -> Iterator[tuple[Part, list[tuple[str, dict[str, float]]]]]:
    """Each part with its scores, as they are done: by this process, or by several of one thread each."""
    if workers == 1:
        evaluator = Evaluator(model, icons)
        yield from ((part, evaluator(part)) for part in parts)
        return
    with multiprocessing.get_context("spawn").Pool(workers, start_worker, (model, icons)) as pool:
        yield from pool.imap_unordered(evaluate_part, parts)


def evaluate(
    model: str | None, icons: Path, styles: Sequence[str], few: int, four: int, workers: int
) -> dict[str, dict[str, dict[str, float]]]:
    """Figures by style and group, every answer generated greedily by the app's own code; `scenes` is their number.

    `few` and `four` are scenes a style; see `scored_parts` for `workers`.
    """
    load_sprites(icons, SHOWN_SPRITE_SIZE, styles)  # rendered here once, so that the processes only read them
    parts = [
        Part(style, group, range(first, min(first + SCENES_A_PART, count)))
        for style in styles
        for group, count in ((FEW, few), (FOUR, four))
        for first in range(0, count, SCENES_A_PART)
    ]
    scores: dict[str, dict[str, dict[str, list]]] = {
        style: {group: defaultdict(list) for group in GROUPS} for style in styles
    }
    for part, found in tqdm(scored_parts(model, icons, parts, workers), total=len(parts), unit="part"):
        for task, one in found:
            scores[part.style][part.group][task].append(one)
    return {
        style: {
            group: {"scenes": count, **_figures(scores[style][group])}
            for group, count in ((FEW, few), (FOUR, four))
            if count
        }
        for style in styles
    }


def print_table(report: dict[str, dict[str, dict[str, float]]], group: str) -> None:
    """One row a figure, one column a style."""
    styles = list(report)
    names = list(dict.fromkeys(name for style in styles for name in report[style].get(group, {})))
    print(f"\n{group} objects\n{'':24}" + "".join(f"{style:>18}" for style in styles))
    for name in names:
        cells = (report[style].get(group, {}).get(name, "") for style in styles)
        shown = (f"{cell:.3f}" if isinstance(cell, float) else cell for cell in cells)
        print(f"{name:24}" + "".join(f"{cell:>18}" for cell in shown))


def main() -> None:
    """Print every figure of the card, and write them where --output says."""
    parser = argparse.ArgumentParser(prog="python -m paligemma.training.evaluate", description=__doc__.split("\n")[0])
    parser.add_argument("--model", default=None, help="a checkpoint's folder; default: the bundled model")
    parser.add_argument("--icons", type=Path, default=Path("runs/icons"), help="where the drawings are fetched to")
    parser.add_argument("--styles", nargs="+", default=list(STYLES), choices=STYLES)
    parser.add_argument("--scenes", type=int, default=500, help="scenes of one to three objects a style")
    parser.add_argument("--four", type=int, default=150, help="scenes of four objects a style")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes; default: one a core")
    parser.add_argument("--output", type=Path, default=None, help="write the figures there as JSON")
    options = parser.parse_args()
    if not (options.icons / "node_modules").exists():
        fetch_icons(options.icons)
    started = time.monotonic()
    report = evaluate(options.model, options.icons, options.styles, options.scenes, options.four, options.workers)
    for group in GROUPS:
        print_table(report, group)
    print(f"\n{time.monotonic() - started:.0f} s")
    if options.output:
        options.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
