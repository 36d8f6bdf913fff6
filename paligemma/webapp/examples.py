"""The examples on the page: images with a prompt and a credit."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paligemma.webapp.images import data_url, encode_png
from paligemma.webapp.uploads import open_image

THUMBNAIL_SIDE = 96


@dataclass(frozen=True)
class Example:
    """An example.

    Attributes:
        path: path of the image file.
        prompt: the prompt.
        credit: author and license of the image.
    """

    path: Path
    prompt: str
    credit: str


def load_examples(folder: Path) -> tuple[Example, ...]:
    """Load the examples listed in `examples.json`, a list of {"file", "prompt", "answer", "credit"}.

    Returns no examples if there is no such file.

    Raises:
        FileNotFoundError: if an image is missing.
    """
    index = folder / "examples.json"
    if not index.is_file():
        return ()
    examples = [
        Example(folder / entry["file"], entry["prompt"], entry.get("credit", ""))
        for entry in json.loads(index.read_text(encoding="utf-8"))
    ]
    for example in examples:
        if not example.path.is_file():
            raise FileNotFoundError(f"{index} lists {example.path.name}, which does not exist.")
    return tuple(examples)


def example_chips(examples: Sequence[Example]) -> dict[str, list[dict[str, Any]]]:
    """Return the value of the example chips: prompts with thumbnails."""
    return {
        "chips": [
            {"label": example.prompt, "note": "", "hint": example.credit, "image": _thumbnail(example.path)}
            for example in examples
        ]
    }


def _thumbnail(path: Path) -> str:
    image = open_image(path)
    image.thumbnail((THUMBNAIL_SIDE, THUMBNAIL_SIDE))
    return data_url(encode_png(image), "image/png")
