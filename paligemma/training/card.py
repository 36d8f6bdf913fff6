"""Write the bundled model's card: `python -m paligemma.training.card`.

Metrics come from `paligemma.training.evaluate --output`, training options and time from the work folder of
`paligemma.training.train`, and sizes from the model folder. Hardware and observed failures are given as text.
"""

from __future__ import annotations

import argparse
import json
import math
from ast import literal_eval
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from safetensors import safe_open

from paligemma.training.batches import BatchOptions
from paligemma.training.classes import CLASSES, COLORS
from paligemma.training.evaluate import FEW, FOUR, MASK_DECODER
from paligemma.training.icons import HELD_OUT_STYLES, PACKAGES, STYLES
from paligemma.training.options import TrainOptions
from paligemma.training.plot import read_log

Report = Mapping[str, Mapping[str, Mapping[str, float]]]

# Origin and license of every style.
SOURCES = {
    "noto": ("[Noto Emoji](https://github.com/googlefonts/noto-emoji), © Google", "Apache-2.0"),
    "noto-v1": ("[Noto Emoji](https://github.com/googlefonts/noto-emoji), first version, © Google", "Apache-2.0"),
    "twemoji": (
        "[Twemoji](https://github.com/jdecked/twemoji), © Twitter, Inc and other contributors",
        "[CC-BY 4.0](https://creativecommons.org/licenses/by/4.0/)",
    ),
    "fluent-emoji-flat": ("[Fluent Emoji](https://github.com/microsoft/fluentui-emoji), © Microsoft", "MIT"),
    "fxemoji": ("[FxEmojis](https://github.com/mozilla/fxemoji), © Mozilla", "Apache-2.0"),
    "emojione": (
        "[EmojiOne 2](https://github.com/EmojiTwo/emojitwo), © EmojiOne",
        "[CC-BY 4.0](https://creativecommons.org/licenses/by/4.0/)",
    ),
    "openmoji": (
        "[OpenMoji](https://github.com/hfg-gmuend/openmoji), © the OpenMoji authors",
        "[CC-BY-SA 4.0](https://creativecommons.org/licenses/by-sa/4.0/)",
    ),
}

# Metrics of the report, their labels in the card, and whether they are shown as percentages.
METRICS = {
    "caption_en exact": ("`caption en`: exact match", True),
    "caption_en recall": ("`caption en`: recall of objects, with color and number", True),
    "caption_es exact": ("`caption es`: exact match", True),
    "caption_zh exact": ("`caption zh`: exact match", True),
    "detect f1_50": ("`detect dog`: F1 at IoU 0.5", False),
    "detect f1_75": ("`detect dog`: F1 at IoU 0.75", False),
    "detect iou": ("`detect dog`: mean IoU of the true boxes", False),
    "multi_detect f1_50": ("`detect dog ; cat`: F1 at IoU 0.5", False),
    "multi_detect f1_75": ("`detect dog ; cat`: F1 at IoU 0.75", False),
    "multi_detect iou": ("`detect dog ; cat`: mean IoU of the true boxes", False),
    "segment f1_50": ("`segment dog`: F1 of the boxes at IoU 0.5", False),
    "segment mask_iou": ("`segment dog`: mean IoU of the masks, inside the true boxes", False),
    "segment shape_iou": ("`segment dog`: mean IoU of the masks, each resized to the true box", False),
    "count exact": ("counting: accuracy", True),
    "present exact": ("presence: accuracy", True),
    "color exact": ("color: accuracy", True),
    "where exact": ("position: accuracy", True),
    "relation exact": ("spatial relations: accuracy", True),
}

CARD = """\
---
license: apache-2.0
language: [en, es, zh]
pipeline_tag: image-text-to-text
tags: [paligemma]
---

# PaliGemma for emoji scenes, {parameters}M parameters

A small PaliGemma with the architecture, checkpoint layout and parameter names of Google's models, trained from scratch
on synthetic scenes of one to four emoji. It is included so that the app runs without downloading weights. It
contains no weights of Google's models.

**Trained on emoji scenes only. Answers about photos are meaningless**, even if their probabilities are high.

## Tasks

| prompt | answer |
| --- | --- |
| `caption en`, `caption es`, `caption zh` | `a red car and two dogs`, from left to right |
| `detect dog`, `detect dog ; cat` | boxes, in the order of the prompt, then from left to right; empty if absent |
| `segment dog` | boxes with 16 mask tokens each, decoded with `{mask_decoder}` |
| `answer en how many dogs are there?` | `0` to `4` |
| `answer en is there a cat?` | `yes` or `no` |
| `answer en what color is the car?` | one of {colors} |
| `answer en where is the fish?` | `top left`, `top`, ... `center`, ... `bottom right` |
| `answer en what is left of the dog?` (also right of, above, below) | `a cat`, or `nothing` |

Classes: {classes}. Of these, {colored} have named colors.

## Evaluation

Greedy decoding on scenes of 448 x 448 pixels with fixed seeds, disjoint from the training scenes
(`python -m paligemma.training.evaluate`; the tables give the number of scenes).
The styles {held_out} are held out: the model was not trained on
any of their drawings. Ambiguous questions about positions and relations are excluded.

### One to three objects

{few}

### Four objects

{four}

### Known failures

{failures}

## Data and licenses

Scenes are rendered during training from the SVG icons of the npm packages `@iconify-json/...`. Icons of some classes
are recolored in seven colors. The training data contains no photos, no human-written text and no outputs of other
models.

| style | drawings | license | used for |
| --- | --- | --- | --- |
{sources}

The weights are licensed under Apache-2.0. If you redistribute the model, keep this table: CC-BY requires attribution.

## Training

{training}

Training curves. The metrics are computed with teacher forcing on a few scenes, which is easier than the evaluation
above:

![Losses and metrics by training step](training.png)

`{mask_decoder}` was trained beforehand on the silhouettes of the icons in the training styles
(`python -m paligemma.training.masks`).

## Size

{sizes}
"""


@dataclass(frozen=True)
class CardInputs:
    """Contents of the card.

    Attributes:
        report: from `paligemma.training.evaluate --output`.
        seconds: training time.
        folder: the model folder.
        hardware: a phrase.
        failures: a Markdown list.
    """

    report: Report
    options: TrainOptions
    seconds: int
    folder: Path
    hardware: str
    failures: str


def read_options(path: Path) -> TrainOptions:
    """Read `options.json` of the training script, in which all values are strings."""
    stored = json.loads(path.read_text(encoding="utf-8"))
    values: dict[str, Any] = {}
    for name, default in vars(TrainOptions()).items():
        if isinstance(default, BatchOptions):
            values[name] = BatchOptions(**literal_eval(stored[name]))
        elif isinstance(default, bool):
            values[name] = stored[name] == "True"
        else:
            values[name] = type(default)(stored[name])
    return TrainOptions(**values)


def write_card(inputs: CardInputs) -> str:
    """Return the card as Markdown with front matter."""
    return CARD.format(
        parameters=f"{num_parameters(inputs.folder / 'model.safetensors') / 1e6:.1f}",
        mask_decoder=MASK_DECODER,
        colors=", ".join(COLORS),
        classes=", ".join(CLASSES),
        colored=_join([name for name, object_class in CLASSES.items() if object_class.recolor]),
        held_out=_join(HELD_OUT_STYLES),
        few=metrics_table(inputs.report, FEW),
        four=metrics_table(inputs.report, FOUR),
        failures=inputs.failures.strip(),
        sources="\n".join(_source_row(style) for style in STYLES),
        training=_training(inputs.options, inputs.seconds, inputs.hardware),
        sizes=describe_sizes(inputs.folder),
    )


def metrics_table(report: Report, group: str) -> str:
    """Return a Markdown table of a group's metrics, with one column per style."""
    columns = {style: groups[group] for style, groups in report.items() if group in groups}
    if not columns:
        return "Not evaluated."
    heads = [f"{style} (held out)" if style in HELD_OUT_STYLES else style for style in columns]
    rows = [["", *heads], ["---", *["---:"] * len(heads)]]
    rows.append(["scenes", *(str(metrics["scenes"]) for metrics in columns.values())])
    for name, (label, percentage) in METRICS.items():
        rows.append([label, *(_cell(metrics.get(name), percentage) for metrics in columns.values())])
    return "\n".join(_row(row) for row in rows)


def num_parameters(path: Path) -> int:
    """Count the parameters in a safetensors file from its header."""
    with safe_open(path, framework="pt") as file:
        return sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118


def num_training_images(options: TrainOptions) -> int:
    """Count the images of a full training run."""
    stages = Counter(options.stage(step) for step in range(options.total_steps))
    return sum(count * getattr(options.batch, f"{stage}_images") for stage, count in stages.items())


def command(options: TrainOptions) -> str:
    """Return the training command, without default values, paths and device."""
    omitted = ("output", "work", "icons", "mask_encoder", "device", "compile", "batch")
    defaults = TrainOptions()
    names = [field.name for field in fields(options) if field.name not in omitted]
    changed = [name for name in names if getattr(options, name) != getattr(defaults, name) or name == "seed"]
    flags = [f"--{name.replace('_', '-')} {getattr(options, name)}" for name in changed]
    return " ".join(["python -m paligemma.training.train", *flags])


def describe_sizes(folder: Path) -> str:
    """Return a Markdown list of the sizes of the weights and of the folder."""
    items = [
        f"* `{path.name}`: {num_parameters(path):,} parameters, {path.stat().st_size:,} bytes"
        for path in (folder / "model.safetensors", folder / MASK_DECODER)
        if path.exists()
    ]
    total = sum(path.stat().st_size for path in folder.iterdir() if path.is_file() and path.name != "README.md")
    return "\n".join([*items, f"* Folder, without this card: {total:,} bytes"])


def _join(names: list[str] | tuple[str, ...]) -> str:
    """Enumerate at least two names: "a, b and c"."""
    return f"{', '.join(names[:-1])} and {names[-1]}"


def _cell(value: float | None, percentage: bool) -> str:
    if value is None:
        return ""
    return f"{100 * value:.1f}%" if percentage else f"{value:.3f}"


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _source_row(style: str) -> str:
    drawings, license = SOURCES[style]
    use = "evaluation only" if style in HELD_OUT_STYLES else "training and evaluation"
    return _row([f"{style} {PACKAGES[style]}", drawings, license, use])


def _training(options: TrainOptions, seconds: int, hardware: str) -> str:
    items = [
        f"* Command: `{command(options)}`",
        f"* Steps: {options.vision_steps:,} for the vision tower alone, then {options.steps:,} with the decoder",
        f"* Images: {num_training_images(options):,}",
        f"* Seed: {options.seed}",
        f"* Time: {seconds / 3600:.1f} hours, including steps repeated after interruptions",
        f"* Hardware: {hardware}",
    ]
    return "\n".join(items)


def main() -> None:
    """Read the inputs and write the card into the model folder."""
    parser = argparse.ArgumentParser(
        prog="python -m paligemma.training.card", description="Write the bundled model's card."
    )
    parser.add_argument(
        "--report", type=Path, default=Path("runs/demo/eval.json"), help="output of paligemma.training.evaluate"
    )
    parser.add_argument("--work", type=Path, default=Path("runs/demo"), help="work folder of paligemma.training.train")
    parser.add_argument(
        "--folder", type=Path, default=Path("assets/demo"), help="model folder, to which the card is written"
    )
    parser.add_argument("--hardware", required=True, help='training hardware, such as "2 CPU cores"')
    parser.add_argument("--failures", type=Path, required=True, help="file with a Markdown list of known failures")
    options = parser.parse_args()
    inputs = CardInputs(
        report=json.loads(options.report.read_text(encoding="utf-8")),
        options=read_options(options.work / "options.json"),
        seconds=read_log(options.work / "log.jsonl").seconds,
        folder=options.folder,
        hardware=options.hardware,
        failures=options.failures.read_text(encoding="utf-8"),
    )
    (options.folder / "README.md").write_text(write_card(inputs), encoding="utf-8")
    print(f"Wrote {options.folder / 'README.md'}.")


if __name__ == "__main__":
    main()
