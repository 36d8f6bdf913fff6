"""Render the page's example images: `python -m paligemma.tools.examples`.

Twelve hand-picked scenes in the Noto style, disjoint from the training and evaluation scenes, each with a prompt and
the true answer, are written to `assets/examples`. The output is reproducible with the same versions of Pillow and
resvg.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from PIL import Image

from paligemma.training.icons import fetch_icons, load_sprites
from paligemma.training.layout import EVALUATION
from paligemma.training.scenes import Scene, SceneGenerator
from paligemma.training.tasks import Question, make_question

STYLE, SEED = "noto", 7  # the evaluation uses another seed
OPTIONS = replace(EVALUATION, count_weights=(1, 2, 2.2, 0.8))
SIZE, SPRITE_SIZE = 512, 384  # pixels
CREDIT = "composed of Noto Emoji, © Google, Apache-2.0"
MAX_ATTEMPTS = 500  # random questions per example


@dataclass(frozen=True)
class Example:
    """An example image.

    Attributes:
        name: file name without extension.
        index: index of the scene.
        task: a field of `TaskMix`.
        prompt: a prompt of the task.
    """

    name: str
    index: int
    task: str
    prompt: str


EXAMPLES = (
    Example("garden", 4, "caption_en", "caption en"),
    Example("dogs", 3263, "detect", "detect dog"),
    Example("frogs", 42, "count", "answer en how many frogs are there?"),
    Example("turtle", 106, "segment", "segment turtle"),
    Example("butterfly", 25, "color", "answer en what color is the butterfly?"),
    Example("planes", 338, "multi_detect", "detect apple ; plane"),
    Example("balloons", 58, "caption_es", "caption es"),
    Example("rabbit", 112, "relation", "answer en what is left of the rabbit?"),
    Example("panda", 113, "caption_zh", "caption zh"),
    Example("cats", 66, "present", "answer en is there a cat?"),
    Example("night", 117, "where", "answer en where is the balloon?"),
    Example("meadow", 34, "caption_en", "caption en"),
)


def find_question(scene: Scene, task: str, prompt: str) -> Question:
    """Return the question with this prompt, including its true answer.

    Raises:
        ValueError: if the task does not produce the prompt for this scene.
    """
    for seed in range(MAX_ATTEMPTS):
        question = make_question(task, scene, np.random.default_rng(seed))
        if question is not None and question.prompt == prompt:
            return question
    raise ValueError(f"prompt must be one of the task {task!r} for this scene, got {prompt!r}.")


def render_examples(icons: Path, output: Path) -> None:
    """Write the images and `examples.json`, a list of objects with `file`, `prompt`, `answer` and `credit`.

    Answers to `segment` prompts do not include mask tokens.
    """
    output.mkdir(parents=True, exist_ok=True)
    scenes = SceneGenerator(load_sprites(icons, SPRITE_SIZE, [STYLE]), [STYLE], OPTIONS, SEED, "evaluation")
    entries = []
    for example in EXAMPLES:
        scene = scenes.scene(example.index, SIZE)
        question = find_question(scene, example.task, example.prompt)
        answer = question.answer_with([""] * len(question.targets))
        file = f"{example.name}.png"
        Image.fromarray(scene.image).save(output / file, optimize=True)
        entries.append({"file": file, "prompt": example.prompt, "answer": answer, "credit": CREDIT})
    lines = ",\n".join(json.dumps(entry, ensure_ascii=False) for entry in entries)
    (output / "examples.json").write_text(f"[\n{lines}\n]\n", encoding="utf-8")


def main() -> None:
    """Render the examples to --output."""
    parser = argparse.ArgumentParser(
        prog="python -m paligemma.tools.examples", description="Render the page's example images."
    )
    parser.add_argument("--icons", type=Path, default=Path("runs/icons"), help="folder of the icon packages")
    parser.add_argument("--output", type=Path, default=Path("assets/examples"), help="folder for the images")
    options = parser.parse_args()
    fetch_icons(options.icons)
    render_examples(options.icons, options.output)
    print(f"Wrote {len(EXAMPLES)} images to {options.output}.")


if __name__ == "__main__":
    main()
