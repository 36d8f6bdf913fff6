"""The examples that come with the app: pictures with a prompt and a credit."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paligemma.webapp.images import data_url, open_image, png_file

THUMBNAIL_SIDE = 96


@dataclass(frozen=True)
class Example:
    """A picture's file, what is asked about it, and whose it is."""

    path: Path
    prompt: str
    credit: str


def load_examples(folder: Path) -> tuple[Example, ...]:
    """Those that `examples.json` of the folder lists; none without that file.

    The file is a list of {"file", "prompt", "answer", "credit"}; an entry without its picture raises ValueError.
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
            raise ValueError(f"{index} names {example.path.name}, which is not there")
    return tuple(examples)


def example_chips(examples: Sequence[Example]) -> dict[str, list[dict[str, Any]]]:
    """The value of the chips: the prompt, with a small picture."""
    return {
        "chips": [
            {"label": example.prompt, "note": "", "hint": example.credit, "image": _thumbnail(example.path)}
            for example in examples
        ]
    }


def _thumbnail(path: Path) -> str:
    image = open_image(path).convert("RGB")
    image.thumbnail((THUMBNAIL_SIDE, THUMBNAIL_SIDE))
    return data_url(png_file(image), "image/png")
