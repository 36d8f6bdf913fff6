"""Evaluate a checkpoint on held-out scenes: `python -m paligemma.training.evaluate`.

Scenes have fixed seeds, are disjoint from the training scenes, and cover all drawing styles, including the two held-out
ones. Images have 448 pixels, and answers are generated greedily with `paligemma.load` and `generate`, as in the app.
Results are reported separately for one to three objects and for four objects.
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
from paligemma.masks import MaskDecoder
from paligemma.modeling import PaliGemmaForConditionalGeneration
from paligemma.paths import BUNDLED_MODEL
from paligemma.training.batches import (
    IGNORED,
    IMAGE_SIZE,
    NUM_PATCHES,
    SPRITE_SIZE,
    QuestionEncoder,
    pack,
    single_inputs,
    stack_sequences,
)
from paligemma.training.icons import HELD_OUT_STYLES, STYLES, fetch_icons, load_sprites
from paligemma.training.layout import EVALUATION
from paligemma.training.masks import MaskEncoder
from paligemma.training.scenes import Scene, SceneGenerator
from paligemma.training.scoring import score, summarize
from paligemma.training.tasks import TASKS, Question, all_questions

SEED = 20260
EVALUATION_SIZE = 448  # pixels
EVALUATION_SPRITE_SIZE = SPRITE_SIZE * EVALUATION_SIZE // IMAGE_SIZE
SCENES_PER_CHUNK = 25
FEW, FOUR = "1-3", "4"
COUNT_WEIGHTS = {FEW: (1, 1, 1), FOUR: (0, 0, 0, 1)}  # relative frequencies of 1, 2, 3 and 4 objects
# Limits above the length of every true answer.
MAX_NEW_TOKENS = {
    "caption_en": 48,
    "caption_es": 48,
    "caption_zh": 48,
    "detect": 64,
    "multi_detect": 64,
    "segment": 128,
}
MAX_NEW_TOKENS_SHORT = 16
MASK_DECODER = "mask_decoder.safetensors"
METRICS = ("exact", "recall", "f1_50", "f1_75", "iou", "mask_iou", "shape_iou")

Scores = list[tuple[str, dict[str, float]]]  # task and score of every answer
Report = dict[str, dict[str, dict[str, float]]]  # metrics by style and group


def evaluation_scenes(
    scenes: SceneGenerator, group: str, indices: Iterable[int], size: int
) -> Iterator[tuple[Scene, list[Question]]]:
    """Yield scenes of a group (FEW or FOUR), each with one question per task."""
    scenes.options = replace(EVALUATION, count_weights=COUNT_WEIGHTS[group])
    for index in indices:
        scene = scenes.scene(index, size)
        yield scene, all_questions(scene, np.random.default_rng([SEED, index]))


def summarize_tasks(scores: dict[str, list[dict[str, float]]]) -> dict[str, float]:
    """Summarize scores by task to a flat dict with keys such as "detect iou", rounded to three digits."""
    flat: dict[str, float] = {}
    for task in TASKS:
        if task in scores:
            metrics = summarize(scores[task])
            flat |= {f"{task} {name}": round(metrics[name], 3) for name in METRICS if name in metrics}
    return flat


class QuickEvaluation:
    """Evaluation during training: a few scenes per style, with teacher forcing instead of generation.

    An answer is exact if every token is the argmax, which holds if and only if greedy decoding generates it.
    """

    def __init__(self, icons: Path, mask_encoder: Path, few: int = 16, four: int = 5, length: int = 112) -> None:
        sprites = load_sprites(icons, SPRITE_SIZE)
        self.encoder = QuestionEncoder(MaskEncoder.load(mask_encoder))
        self.length = length
        self.scenes = [
            (style, group, scene, questions)
            for style in STYLES
            for generator in [SceneGenerator(sprites, [style], EVALUATION, SEED, "evaluation")]
            for group, count in ((FEW, few), (FOUR, four))
            for scene, questions in evaluation_scenes(generator, group, range(count), IMAGE_SIZE)
        ]

    @torch.inference_mode()
    def __call__(self, model: PaliGemmaForConditionalGeneration) -> dict[str, dict[str, float]]:
        """Return metrics by group, for all trained styles together and for each held-out style."""
        scores: dict[str, dict[str, list[dict[str, float]]]] = defaultdict(lambda: defaultdict(list))
        with torch.compiler.set_stance("force_eager"):  # every scene has another shape
            for style, group, scene, questions in self.scenes:
                name = style if style in HELD_OUT_STYLES else "trained"
                for question, answer in zip(questions, self._answers(model, scene, questions), strict=True):
                    scores[f"{name} {group}"][question.task].append(score(question, answer))
        return {name: summarize_tasks(tasks) for name, tasks in scores.items()}

    def _answers(
        self, model: PaliGemmaForConditionalGeneration, scene: Scene, questions: Sequence[Question]
    ) -> list[str]:
        sequences = stack_sequences([pack([self.encoder.prefix_and_suffix(q)], self.length) for q in questions])
        text = {name: torch.from_numpy(values).to(model.device) for name, values in sequences.items()}
        pixels = torch.from_numpy(scene.image).to(model.device).permute(2, 0, 1)[None].float() / 127.5 - 1
        image_features = model.get_image_features(pixels).expand(len(questions), -1, -1)
        inputs = single_inputs(text, model.config.image_token_index)
        logits = model(**inputs, image_features=image_features)["logits"]
        predicted = logits[:, NUM_PATCHES:].argmax(-1)
        return [
            self._decode(ids[targets != IGNORED].tolist())
            for ids, targets in zip(predicted, text["targets"], strict=True)
        ]

    def _decode(self, ids: list[int]) -> str:
        """Decode up to a final `<eos>`; misplaced special tokens and newlines stay visible and count as wrong."""
        text = self.encoder.tokenizer.decode(ids, skip_special_tokens=False)
        return text.removesuffix("<eos>").replace("\n", "<newline>")


@dataclass(frozen=True)
class Chunk:
    """Scenes of one style and group, evaluated by one process."""

    style: str
    group: str
    indices: range


class Evaluator:
    """Generates and scores answers; one instance per process.

    Args:
        model: checkpoint folder; None for the bundled model.
        icons: folder of the icon packages.
    """

    def __init__(self, model: str | None, icons: Path) -> None:
        self.vlm = paligemma.load(model)
        self.masks = MaskDecoder.load(find_mask_decoder(model))
        self.icons = icons
        self.generators: dict[str, SceneGenerator] = {}

    def __call__(self, chunk: Chunk) -> Scores:
        """Return the task and score of every answer."""
        scores = []
        scenes = self._scene_generator(chunk.style)
        for scene, questions in evaluation_scenes(scenes, chunk.group, chunk.indices, EVALUATION_SIZE):
            image = Image.fromarray(scene.image)
            for question in questions:
                limit = MAX_NEW_TOKENS.get(question.task, MAX_NEW_TOKENS_SHORT)
                answer = self.vlm.generate(image, question.prompt, max_new_tokens=limit, top_n=1).text
                scores.append((question.task, score(question, answer, self._decode_mask)))
        return scores

    def _decode_mask(self, codes: Sequence[int]) -> np.ndarray:
        return self.masks.decode([codes])[0]

    def _scene_generator(self, style: str) -> SceneGenerator:
        """Return the scenes of a style; only the last style is kept in memory."""
        if style not in self.generators:
            sprites = load_sprites(self.icons, EVALUATION_SPRITE_SIZE, [style])
            self.generators = {style: SceneGenerator(sprites, [style], EVALUATION, SEED, "evaluation")}
        return self.generators[style]


def find_mask_decoder(model: str | None) -> Path:
    """Return the mask decoder in the checkpoint folder, or else the bundled one."""
    own = Path(model or BUNDLED_MODEL) / MASK_DECODER
    return own if own.exists() else BUNDLED_MODEL / MASK_DECODER


_evaluator: Evaluator | None = None


def start_worker(model: str | None, icons: Path) -> None:
    """Initialize a worker process for `evaluate_chunk`."""
    global _evaluator
    torch.set_num_threads(1)
    _evaluator = Evaluator(model, icons)


def evaluate_chunk(chunk: Chunk) -> tuple[Chunk, Scores]:
    """Evaluate a chunk in a worker process."""
    assert _evaluator is not None
    return chunk, _evaluator(chunk)


def evaluate_chunks(
    model: str | None, icons: Path, chunks: Sequence[Chunk], workers: int
) -> Iterator[tuple[Chunk, Scores]]:
    """Yield the chunks with their scores as they complete, from this process or from several single-threaded ones."""
    if workers == 1:
        evaluator = Evaluator(model, icons)
        yield from ((chunk, evaluator(chunk)) for chunk in chunks)
        return
    with multiprocessing.get_context("spawn").Pool(workers, start_worker, (model, icons)) as pool:
        yield from pool.imap_unordered(evaluate_chunk, chunks)


def evaluate(model: str | None, icons: Path, styles: Sequence[str], few: int, four: int, workers: int) -> Report:
    """Evaluate a checkpoint.

    Args:
        few: scenes of one to three objects per style.
        four: scenes of four objects per style.
        workers: number of processes.

    Returns:
        Metrics by style and group, including the number of `scenes`.
    """
    load_sprites(icons, EVALUATION_SPRITE_SIZE, styles)  # fills the cache, so that the workers only read it
    counts = {group: count for group, count in ((FEW, few), (FOUR, four)) if count}
    chunks = [
        Chunk(style, group, range(first, min(first + SCENES_PER_CHUNK, count)))
        for style in styles
        for group, count in counts.items()
        for first in range(0, count, SCENES_PER_CHUNK)
    ]
    scores: dict[tuple[str, str], dict[str, list[dict[str, float]]]] = defaultdict(lambda: defaultdict(list))
    for chunk, results in tqdm(evaluate_chunks(model, icons, chunks, workers), total=len(chunks), unit="chunk"):
        for task, result in results:
            scores[chunk.style, chunk.group][task].append(result)
    return {
        style: {group: {"scenes": count, **summarize_tasks(scores[style, group])} for group, count in counts.items()}
        for style in styles
    }


def print_table(report: Report, group: str) -> None:
    """Print the metrics of a group, with one column per style."""
    styles = list(report)
    names = list(dict.fromkeys(name for style in styles for name in report[style].get(group, {})))
    print(f"\n{group} objects\n{'':24}" + "".join(f"{style:>18}" for style in styles))
    for name in names:
        cells = (report[style].get(group, {}).get(name, "") for style in styles)
        texts = (f"{cell:.3f}" if isinstance(cell, float) else cell for cell in cells)
        print(f"{name:24}" + "".join(f"{text:>18}" for text in texts))


def main() -> None:
    """Evaluate, print the metrics, and optionally write them as JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m paligemma.training.evaluate", description="Evaluate a checkpoint on held-out scenes."
    )
    parser.add_argument("--model", default=None, help="checkpoint folder (default: the bundled model)")
    parser.add_argument("--icons", type=Path, default=Path("runs/icons"), help="folder of the icon packages")
    parser.add_argument("--styles", nargs="+", default=list(STYLES), choices=STYLES)
    parser.add_argument("--scenes", type=int, default=500, help="scenes of one to three objects per style")
    parser.add_argument("--four", type=int, default=150, help="scenes of four objects per style")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes (default: one per CPU core)")
    parser.add_argument("--output", type=Path, default=None, help="JSON file for the metrics")
    options = parser.parse_args()
    fetch_icons(options.icons)
    started = time.monotonic()
    report = evaluate(options.model, options.icons, options.styles, options.scenes, options.four, options.workers)
    for group in COUNT_WEIGHTS:
        print_table(report, group)
    print(f"\n{time.monotonic() - started:.0f} s")
    if options.output:
        options.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
