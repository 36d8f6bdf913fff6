"""Figures of the bundled model's card: `python -m paligemma.scripts.eval_demo`.

Scenes that training never meets, at fixed seeds, in every drawing style, two of which are never trained on. The
questions are asked at 448 pixels through `paligemma.load` and `generate`, greedily, as the app asks them. Scenes of one
to three objects and scenes of four are counted apart.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from tqdm import tqdm

import paligemma
from paligemma.masks import MaskDecoder
from paligemma.modeling import PaliGemmaForConditionalGeneration
from paligemma.scripts.demo_batches import (
    IMAGE_SIZE,
    NO_LABEL,
    NUM_PATCHES,
    SPRITE_SIZE,
    TextEncoder,
    pack,
    single_inputs,
)
from paligemma.scripts.demo_icons import STYLES, STYLES_HELD_OUT, fetch_icons, load_sprites
from paligemma.scripts.demo_scenes import EVALUATION, Scene, SceneMaker
from paligemma.scripts.demo_tasks import TASKS, Question, questions, score, summarise
from paligemma.scripts.train_masks import MaskEncoder

SEED = 20260
SHOWN_SIZE = 448
FEW, FOUR = "1-3", "4"
FIGURES = ("exact", "recall", "f1_50", "f1_75", "iou", "mask_iou")


def evaluation_scenes(maker: SceneMaker, few: int, four: int, size: int) -> list[tuple[str, Scene, list[Question]]]:
    """Scenes of one to three objects and of four, each with its group's name and a question of every task."""
    found = []
    for group, count, weights in ((FEW, few, (1, 1, 1)), (FOUR, four, (0, 0, 0, 1))):
        maker.options = replace(EVALUATION, counts=weights)
        for index in range(count):
            scene = maker.scene(index, size)
            found.append((group, scene, questions(scene, np.random.default_rng([SEED, index]))))
    return found


class QuickEvaluation:
    """Figures while training: a few scenes a style, all answers at once, each token given the true ones before it.

    An answer counts as exact where every token is the likeliest, which is when greedy decoding gives that answer.
    """

    def __init__(self, icons: Path, mask_encoder: Path, few: int = 16, four: int = 5, length: int = 112) -> None:
        sprites = load_sprites(icons, SPRITE_SIZE)
        self.text = TextEncoder(MaskEncoder.load(mask_encoder))
        self.length = length
        self.styles = {
            style: evaluation_scenes(
                SceneMaker(sprites, [style], EVALUATION, SEED, "evaluation"), few, four, IMAGE_SIZE
            )
            for style in STYLES
        }

    @torch.inference_mode()
    def __call__(self, model: PaliGemmaForConditionalGeneration) -> dict[str, dict[str, float]]:
        """Figures of the trained styles together and of each held-out one, one to three objects."""
        scores: dict[str, dict[str, list]] = defaultdict(lambda: defaultdict(list))
        with torch.compiler.set_stance("force_eager"):  # each scene has another shape; none is worth compiling
            for style, scenes in self.styles.items():
                for group, scene, asked in scenes:
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
            figures = summarise(tasks[task])
            flat |= {f"{task} {name}": round(figures[name], 3) for name in FIGURES if name in figures}
    return flat


def evaluate(
    vlm: paligemma.PaliGemma, icons: Path, styles: Sequence[str], few: int, four: int
) -> dict[str, dict[str, dict[str, float]]]:
    """Figures by style and group, every answer generated greedily by the app's own code."""
    sprites = load_sprites(icons, SPRITE_SIZE * SHOWN_SIZE // IMAGE_SIZE, styles)
    decoder = MaskDecoder.load(Path(vlm.source) / "mask_decoder.safetensors")
    report = {}
    for style in styles:
        scores: dict[str, dict[str, list]] = defaultdict(lambda: defaultdict(list))
        maker = SceneMaker(sprites, [style], EVALUATION, SEED, "evaluation")
        for group, scene, asked in tqdm(evaluation_scenes(maker, few, four, SHOWN_SIZE), desc=style):
            for question in asked:
                text = vlm.generate(Image.fromarray(scene.image), question.prompt, max_new_tokens=128).text
                decode = lambda codes: decoder.decode([codes])[0]  # noqa: E731
                scores[group][question.task].append(score(question, text, decode))
        report[style] = {group: _figures(tasks) for group, tasks in scores.items()}
    return report


def print_table(report: dict[str, dict[str, dict[str, float]]], group: str) -> None:
    """One row a figure, one column a style."""
    styles = list(report)
    names = list(dict.fromkeys(name for style in styles for name in report[style].get(group, {})))
    print(f"\n{group} objects\n{'':24}" + "".join(f"{style:>18}" for style in styles))
    for name in names:
        cells = (report[style].get(group, {}).get(name) for style in styles)
        print(f"{name:24}" + "".join(f"{'' if cell is None else f'{cell:.3f}':>18}" for cell in cells))


def main() -> None:
    """Print every figure of the card, and write them where --output says."""
    parser = argparse.ArgumentParser(prog="python -m paligemma.scripts.eval_demo", description=__doc__.split("\n")[0])
    parser.add_argument("--model", default=None, help="a checkpoint's folder; default: the bundled model")
    parser.add_argument("--icons", type=Path, default=Path("runs/icons"), help="where the drawings are fetched to")
    parser.add_argument("--styles", nargs="+", default=list(STYLES), choices=STYLES)
    parser.add_argument("--scenes", type=int, default=500, help="scenes of one to three objects a style")
    parser.add_argument("--four", type=int, default=150, help="scenes of four objects a style")
    parser.add_argument("--output", type=Path, default=None, help="write the figures there as JSON")
    options = parser.parse_args()
    if not (options.icons / "node_modules").exists():
        fetch_icons(options.icons)
    started = time.monotonic()
    report = evaluate(paligemma.load(options.model), options.icons, options.styles, options.scenes, options.four)
    for group in (FEW, FOUR):
        print_table(report, group)
    print(f"\n{time.monotonic() - started:.0f} s")
    if options.output:
        options.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
