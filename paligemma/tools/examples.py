"""Draw the page's example pictures: `python -m paligemma.tools.examples`.

A dozen scenes in the Noto style, chosen by eye among numbered scenes that neither training nor evaluation meets, each
with a prompt and its true answer. They go to `assets/examples/` with `examples.json`; the same versions of Pillow and
resvg write the same bytes again.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from PIL import Image

from paligemma.training.icons import fetch_icons, load_sprites
from paligemma.training.scenes import EVALUATION, Scene, SceneMaker
from paligemma.training.tasks import Question, ask

STYLE, SEED = "noto", 7
OPTIONS = replace(EVALUATION, counts=(1, 2, 2.2, 0.8))
SIZE, SPRITE_SIZE = 512, 384
CREDIT = "composed of Noto Emoji, © Google, Apache-2.0"
DRAWS = 500  # of a task's random questions until the wanted one has come up


@dataclass(frozen=True)
class Example:
    """A picture's name, the number of its scene, a task (a field of TaskMix) and one of its prompts."""

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


def true_question(scene: Scene, task: str, prompt: str) -> Question:
    """The question of that prompt about the scene. Raises ValueError where the task never asks it."""
    for seed in range(DRAWS):
        question = ask(task, scene, np.random.default_rng(seed))
        if question is not None and question.prompt == prompt:
            return question
    raise ValueError(f"prompt is {prompt!r}, expected one that the task {task!r} asks about this scene")


def make_examples(icons: Path, output: Path) -> None:
    """Write the pictures and `examples.json`, a list of objects with `file`, `prompt`, `answer` and `credit`.

    A segmentation's answer stands there without the codes of its masks.
    """
    output.mkdir(parents=True, exist_ok=True)
    maker = SceneMaker(load_sprites(icons, SPRITE_SIZE, [STYLE]), [STYLE], OPTIONS, SEED, "evaluation")
    entries = []
    for example in EXAMPLES:
        scene = maker.scene(example.index, SIZE)
        question = true_question(scene, example.task, example.prompt)
        answer = question.answer_with([""] * len(question.targets))
        file = f"{example.name}.png"
        Image.fromarray(scene.image).save(output / file, optimize=True)
        entries.append({"file": file, "prompt": example.prompt, "answer": answer, "credit": CREDIT})
    lines = ",\n".join(json.dumps(entry, ensure_ascii=False) for entry in entries)
    (output / "examples.json").write_text(f"[\n{lines}\n]\n", encoding="utf-8")


def main() -> None:
    """Draw the examples where --output says."""
    parser = argparse.ArgumentParser(prog="python -m paligemma.tools.examples", description=__doc__.split("\n")[0])
    parser.add_argument("--icons", type=Path, default=Path("runs/icons"), help="where the drawings are fetched to")
    parser.add_argument("--output", type=Path, default=Path("assets/examples"))
    options = parser.parse_args()
    if not (options.icons / "node_modules").exists():
        fetch_icons(options.icons)
    make_examples(options.icons, options.output)
    print(f"wrote {len(EXAMPLES)} pictures to {options.output}")


if __name__ == "__main__":
    main()
