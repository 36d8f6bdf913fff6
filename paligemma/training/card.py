"""Write the bundled model's card: `python -m paligemma.training.card`.

The figures come from `eval_demo --output`, the plan and the time from what `train_demo` left in its work folder, the
sizes from the model's own folder. What no file knows is given as text: the hardware, and the failures that were seen.
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

from safetensors import safe_open

from paligemma.training.batches import BatchOptions
from paligemma.training.evaluate import FEW, FOUR, MASK_DECODER
from paligemma.training.icons import CLASSES, COLORS, PACKAGES, STYLES, STYLES_HELD_OUT
from paligemma.training.plot import read_log
from paligemma.training.train import TrainOptions

Report = Mapping[str, Mapping[str, Mapping[str, float]]]

# What each style is, who drew it, its license and where that stands.
SOURCES = {
    "noto": ("[Noto Emoji](https://github.com/googlefonts/noto-emoji), © Google", "Apache-2.0"),
    "noto-v1": ("[Noto Emoji](https://github.com/googlefonts/noto-emoji), its first drawings, © Google", "Apache-2.0"),
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
        "[OpenMoji](https://github.com/hfg-gmuend/openmoji), © OpenMoji's authors",
        "[CC-BY-SA 4.0](https://creativecommons.org/licenses/by-sa/4.0/)",
    ),
}

# Figures of the report, how the card calls them, and whether they are shares of answers, shown in per cent.
FIGURES = {
    "caption_en exact": ("`caption en`: exactly right", True),
    "caption_en recall": ("`caption en`: things named, with color and number", True),
    "caption_es exact": ("`caption es`: exactly right", True),
    "caption_zh exact": ("`caption zh`: exactly right", True),
    "detect f1_50": ("`detect dog`: F1 at IoU 0.5", False),
    "detect f1_75": ("`detect dog`: F1 at IoU 0.75", False),
    "detect iou": ("`detect dog`: mean IoU of the true boxes", False),
    "multi_detect f1_50": ("`detect dog ; cat`: F1 at IoU 0.5", False),
    "multi_detect f1_75": ("`detect dog ; cat`: F1 at IoU 0.75", False),
    "multi_detect iou": ("`detect dog ; cat`: mean IoU of the true boxes", False),
    "segment f1_50": ("`segment dog`: F1 of the boxes at IoU 0.5", False),
    "segment mask_iou": ("`segment dog`: mean IoU of the masks as they are drawn, inside the true boxes", False),
    "segment shape_iou": ("`segment dog`: the same, each mask stretched over the true box", False),
    "count exact": ("how many", True),
    "present exact": ("is there a ...", True),
    "color exact": ("what color", True),
    "where exact": ("where", True),
    "relation exact": ("what is left of, right of, above, below", True),
}

CARD = """\
---
license: apache-2.0
language: [en, es, zh]
pipeline_tag: image-text-to-text
tags: [paligemma]
---

# A small PaliGemma that knows forty kinds of emoji

A PaliGemma of {parameters} million parameters with the architecture, layout and names of Google's, trained from nothing
by this project on pictures that the project composes: one to four emoji on simple backgrounds. It is here so that the
app answers out of the box. It shares no weights with Google's models.

**It knows nothing else.** It has seen no photo and no other kind of thing. Asked about one, it will still answer, in
its own words, often with high probability, and the answer means nothing.

## What it can do

| prompt | answer |
| --- | --- |
| `caption en`, `caption es`, `caption zh` | `a red car and two dogs`, from left to right |
| `detect dog`, `detect dog ; cat` | boxes, in the order asked, then left to right; nothing for what is not there |
| `segment dog` | boxes with the sixteen codes of a mask, which `{mask_decoder}` draws |
| `answer en how many dogs are there?` | `0` to `4` |
| `answer en is there a cat?` | `yes` or `no` |
| `answer en what color is the car?` | one of {colors} |
| `answer en where is the fish?` | `top left`, `top`, ... `center`, ... `bottom right` |
| `answer en what is left of the dog?` (also right of, above, below) | `a cat`, or `nothing` |

The things: {classes}. Color words belong to {painted}.

## Figures

Scenes that were not trained on, at fixed seeds, shown at 448 pixels and answered greedily by the app's own code
(`python -m paligemma.training.evaluate`). The drawings of the first five styles were trained on, in other scenes; those
of {held_out} were not. Where, left of and the like are asked only where people would agree.

### One to three things

{few}

### Four things

{four}

### Failures seen

{failures}

## Data and licenses

Pictures are composed while training, from SVG drawings in the npm packages `@iconify-json/...`, and not kept. Seven
colors are painted onto some of them. No photo, no text of people and no output of another model was used.

| style | drawings | license | used for |
| --- | --- | --- | --- |
{sources}

The weights are under Apache-2.0. Where you share the model, keep this table: it credits those who drew, as CC-BY asks.

## Training

{training}

The curve, with figures of a few scenes that are easier than the tables above (each token of an answer is given the true
ones before it):

![losses and figures over the steps](training.png)

`{mask_decoder}` was trained before, by `python -m paligemma.training.masks`, on the drawings' outlines.

## Size

{sizes}
"""


@dataclass(frozen=True)
class CardInputs:
    """The report of `eval_demo`, the training's options and seconds, the model's folder, and two texts."""

    report: Report
    options: TrainOptions
    seconds: int
    folder: Path
    hardware: str
    failures: str


def read_options(path: Path) -> TrainOptions:
    """`options.json` of `train_demo`, in which every value is text."""
    stored = json.loads(path.read_text(encoding="utf-8"))
    values = {}
    for name, default in vars(TrainOptions()).items():
        if isinstance(default, BatchOptions):
            values[name] = BatchOptions(**literal_eval(stored[name]))
        elif isinstance(default, bool):
            values[name] = stored[name] == "True"
        else:
            values[name] = type(default)(stored[name])
    return TrainOptions(**values)


def write_card(inputs: CardInputs) -> str:
    """The card, Markdown with front matter."""
    return CARD.format(
        parameters=f"{parameter_count(inputs.folder / 'model.safetensors') / 1e6:.1f}",
        mask_decoder=MASK_DECODER,
        colors=", ".join(COLORS),
        classes=", ".join(CLASSES),
        painted=", ".join(name for name, icon_class in CLASSES.items() if icon_class.recolor),
        held_out=" and ".join(STYLES_HELD_OUT),
        few=figure_table(inputs.report, FEW),
        four=figure_table(inputs.report, FOUR),
        failures=inputs.failures.strip(),
        sources="\n".join(_source_row(style) for style in STYLES),
        training=_training(inputs.options, inputs.seconds, inputs.hardware),
        sizes=_sizes(inputs.folder),
    )


def figure_table(report: Report, group: str) -> str:
    """A Markdown table of a group's figures, a row a figure, a column a style."""
    columns = {style: groups[group] for style, groups in report.items() if group in groups}
    if not columns:
        return "Not measured."
    heads = [f"{style} (never trained)" if style in STYLES_HELD_OUT else style for style in columns]
    rows = [["", *heads], ["---", *["---:"] * len(heads)]]
    rows.append(["scenes", *(str(figures["scenes"]) for figures in columns.values())])
    for name, (label, in_per_cent) in FIGURES.items():
        rows.append([label, *(_cell(figures.get(name), in_per_cent) for figures in columns.values())])
    return "\n".join(_row(row) for row in rows)


def parameter_count(path: Path) -> int:
    """Numbers in a safetensors file, from its header."""
    with safe_open(path, framework="pt") as file:
        return sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118


def pictures_trained_on(options: TrainOptions) -> int:
    """How many pictures the plan of the options composes."""
    stages = Counter(options.stage(step) for step in range(options.total_steps))
    return sum(count * getattr(options.batch, f"{stage}_pictures") for stage, count in stages.items())


def command(options: TrainOptions) -> str:
    """The command line that trains by these options: what it does not say is the default or concerns only places."""
    places = ("output", "work", "icons", "mask_encoder", "device", "compile", "batch")
    defaults = TrainOptions()
    names = [field.name for field in fields(options) if field.name not in places]
    changed = [name for name in names if getattr(options, name) != getattr(defaults, name) or name == "seed"]
    flags = [f"--{name.replace('_', '-')} {getattr(options, name)}" for name in changed]
    return " ".join(["python -m paligemma.training.train", *flags])


def _cell(value: float | None, in_per_cent: bool) -> str:
    if value is None:
        return ""
    return f"{100 * value:.1f} %" if in_per_cent else f"{value:.3f}"


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _source_row(style: str) -> str:
    drawings, license = SOURCES[style]
    use = "the test only" if style in STYLES_HELD_OUT else "training and test"
    return _row([f"{style} {PACKAGES[style]}", drawings, license, use])


def _training(options: TrainOptions, seconds: int, hardware: str) -> str:
    items = [
        f"* command: `{command(options)}`",
        f"* steps: {options.vision_steps:,} of the vision tower alone, then {options.steps:,} with the decoder",
        f"* pictures composed: {pictures_trained_on(options):,}",
        f"* seed: {options.seed}",
        f"* time: {seconds / 3600:.1f} hours, with every step that was done again",
        f"* hardware: {hardware}",
    ]
    return "\n".join(items)


def _sizes(folder: Path) -> str:
    model, masks = folder / "model.safetensors", folder / MASK_DECODER
    items = [
        f"* `{path.name}`: {parameter_count(path):,} parameters, {path.stat().st_size:,} bytes"
        for path in (model, masks)
        if path.exists()
    ]
    total = sum(path.stat().st_size for path in folder.iterdir() if path.is_file() and path.name != "README.md")
    return "\n".join([*items, f"* the folder, without this card: {total:,} bytes"])


def main() -> None:
    """Read what the other scripts wrote, and write the card into the model's folder."""
    parser = argparse.ArgumentParser(prog="python -m paligemma.training.card", description=__doc__.split("\n")[0])
    parser.add_argument("--report", type=Path, default=Path("runs/demo/eval.json"), help="of eval_demo --output")
    parser.add_argument("--work", type=Path, default=Path("runs/demo"), help="train_demo's: options.json, log.jsonl")
    parser.add_argument("--folder", type=Path, default=Path("assets/demo"), help="the model's; the card goes there")
    parser.add_argument("--hardware", required=True, help='what it was trained on, such as "2 CPU cores"')
    parser.add_argument("--failures", type=Path, required=True, help="a file with a Markdown list of failures seen")
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
    print(f"wrote {options.folder / 'README.md'}")


if __name__ == "__main__":
    main()
