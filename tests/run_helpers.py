"""Runs with a scripted model for the tests of what the web app makes of them."""

from __future__ import annotations

from typing import Any

from fake_model import PROCESSOR, FakeModel
from PIL import Image

from paligemma.generation import GenerationResult, StepCollector
from paligemma.webapp.images import make_input_image
from paligemma.webapp.runs import Run

DECODING = {"max_new_tokens": 16, "temperature": 0, "top_k": 0, "top_p": 1, "seed": None, "top_n": 10}
VERSIONS = {"python": "3", "torch": "2", "gradio": "6"}
# Tokens of a box: y_min, x_min, y_max, x_max.
BOX = ("<loc0256>", "<loc0512>", "<loc0768>", "<loc1023>")
MASK_CODES = tuple(f"<seg{code:03d}>" for code in range(16))


def generate(*tokens: str) -> GenerationResult:
    """The result of a model that generates these tokens and then <eos>, with three candidates each."""
    steps = StepCollector(FakeModel(tokens).stream(None, "", top_n=3))
    list(steps)
    return steps.result


def make_run(number: int, *tokens: str, parent: int | None = None, branched_at: int | None = None) -> Run:
    """A complete run on an image of 80 x 40 pixels."""
    image = make_input_image(Image.linear_gradient("L").resize((80, 40)).convert("RGB"), PROCESSOR)
    request = {**DECODING, "prompt": "detect cat", "seed": 7, "forced_ids": (), "time_limit": None}
    model = {"name": "m", "revision": None, "dtype": "float32", "device": "cpu", "parameters": 8}
    run = Run(number, image, request, model, parent, branched_at)
    result = generate(*tokens)
    run.steps = list(result.steps)
    run.finish(result)
    return run


def make_stopped_branch() -> Run:
    """A branch with three forced tokens that was stopped after the first one."""
    run = make_run(2, "▁a", "▁b", "▁c", parent=1, branched_at=2)
    run.request["forced_ids"] = (0, 10, 22)
    run.steps = run.steps[:1]
    run.finish(None)
    return run


def set_value(document: Any, path: str, value: object) -> None:
    """Set a value of a JSON document. The path is `tokens/0/prob`."""
    *parents, name = path.split("/")
    for parent in parents:
        document = document[int(parent)] if isinstance(document, list) else document[parent]
    document[name] = value
