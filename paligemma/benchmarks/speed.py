"""How fast it is, beside the machine's limits and beside transformers.

    python -m paligemma.benchmarks.speed                        the bundled model
    python -m paligemma.benchmarks.speed FOLDER_OR_HUB_ID --quantize int8
    python -m paligemma.benchmarks.speed --size paligemma-3b --against transformers --quantize int8
    python -m paligemma.benchmarks.speed --accuracy             what int8 costs in accuracy
    python -m paligemma.benchmarks.speed --curve FILE.png       over context length and resolution

All contenders take turns in one process; only loading and memory are measured in processes of their own. The last line
says all of it as JSON.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import transformers

from paligemma.benchmarks.accuracy import accuracy_lines, measure_accuracy
from paligemma.benchmarks.curve import curve_lines, draw, measure_curve
from paligemma.benchmarks.full_size import SIZES, write_checkpoint
from paligemma.benchmarks.measure import Loading, SpeedOptions, SpeedReport, measure_speed
from paligemma.benchmarks.process_cost import kept_in

REGIMES = """\
Two regimes. Up to the first token, the picture and the whole prompt go through the model at once: each weight that is
read serves hundreds of rows, so that the limit is arithmetic (GFLOP/s). From then on, each token reads all weights of
the decoder, and the keys and values of what came before, for a single row: the limit is the memory's bandwidth (GB/s).
Figures are medians, with the lowest and the highest in brackets.
"""
CURVE_SIZE = "ninth"
CURVE_NAMES = {CURVE_SIZE: "a ninth of PaliGemma 1 3B (2 of 18 and 3 of 27 layers), random weights"}
QUANTIZED = ("int8",)
COLUMNS = ("picture s", "first token s", "a token ms", "tokens/s", "GB/s", "of limit", "GFLOP/s", "of limit")
WIDTHS = (21, 21, 21, 10, 7, 10, 10, 10)
UNMEASURED = "unmeasured"


def speed_lines(report: SpeedReport) -> Iterator[str]:
    """The whole report as text."""
    yield f"{report.model}: {report.parameters / 1e6:,.1f} million weights, {report.prefix_tokens} tokens of prefix"
    yield f"on {report.device}, {report.threads} threads, torch {report.torch}"
    yield from (f"{name}: {kernels}" for name, kernels in report.kernels.items())
    products = ", ".join(f"{value:.0f} in {name}" for name, value in report.limits.gflops_s.items())
    yield f"limits measured here: reads {report.limits.gb_s:.1f} GB/s; GFLOP/s {products}"
    yield ""
    yield from _table(report)
    for name, found in report.ratios.items():
        first, token = found.first_token.text(2), found.token.text(2)
        yield f"{name}: {first} x as fast as transformers to the first token, {token} x a token"
    for name, found in report.second_prompt.items():
        yield (
            f"{name}, second prompt on each picture: the tower ran {found.tower_runs} times (first prompt: "
            f"{found.tower_runs_before}), first token {found.first_token_s.text(3)} s, {found.saved_s.text(3)} s saved"
        )
    yield from _loading_lines(report.loading)


def _table(report: SpeedReport) -> Iterator[str]:
    yield f"{'':<20}" + "".join(f"{column:>{width}}" for column, width in zip(COLUMNS, WIDTHS, strict=True))
    for name, speed in report.speed.items():
        cells = (
            speed.picture_s.text(3),
            speed.first_token_s.text(3),
            speed.token_s.text(1, 1000),
            f"{speed.tokens_s:.2f}",
            f"{speed.gb_s:.1f}",
            f"{speed.share_of_gb_s:.0%}",
            f"{speed.gflops_s:.0f}",
            f"{speed.share_of_gflops_s:.0%}",
        )
        yield f"{name:<20}" + "".join(f"{cell:>{width}}" for cell, width in zip(cells, WIDTHS, strict=True))


def _loading_lines(loading: dict[str, Loading]) -> Iterator[str]:
    if not loading:
        yield f"loading and memory: {UNMEASURED} on this device"
    for name, found in loading.items():
        again = "" if found.again_s is None else f", again {found.again_s:.1f} s"
        yield (
            f"{name}: loaded in {found.load_s:.1f} s{again}; highest memory less imports, by weights kept and cache "
            f"({found.kept_bytes / 1e9:.2f} GB): {_times(found.loading_memory)} while loading, "
            f"{_times(found.answering_memory)} while answering"
        )


def _times(ratio: float | None) -> str:
    return UNMEASURED if ratio is None else f"{ratio:.2f} x"


# The command ------------------------------------------------------------------------------------------------------


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m paligemma.benchmarks.speed", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("source", nargs="?", help="a checkpoint's folder or hub id; by default the bundled model")
    parser.add_argument("--size", choices=SIZES, help="random weights of this size instead (3b: 6 GB on disk)")
    parser.add_argument("--quantize", choices=QUANTIZED, help="measure it as well; with --curve, instead")
    parser.add_argument("--against", choices=("transformers",), help="let it take turns with the model")
    parser.add_argument("--accuracy", action="store_true", help="measure what int8 costs in accuracy, on the CPU")
    parser.add_argument(
        "--curve", type=Path, metavar="FILE", help=f"draw the curves of --size (by default {CURVE_SIZE})"
    )
    parser.add_argument("--rounds", type=int, default=5, help="at least 5, which is the default")
    parser.add_argument("--tokens", type=int, default=8, help="of each answer (default: %(default)s)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N or mps")
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    parser.add_argument("--work-dir", help="where random checkpoints and int8 weights are written; they are removed")
    return parser


def run(chosen: argparse.Namespace, work_dir: Path) -> dict[str, Any]:
    """Do what is asked for, print it, and return it."""
    report: dict[str, Any] = {}
    if chosen.accuracy:
        accuracy = measure_accuracy(work_dir, chosen.quantize or QUANTIZED[0])
        print("\n".join(accuracy_lines(accuracy)))
        report["accuracy"] = {**asdict(accuracy), "passed": accuracy.passed}
    if chosen.curve:
        size = chosen.size or CURVE_SIZE
        curve = measure_curve(CURVE_NAMES.get(size, size), SIZES[size], work_dir, chosen.quantize, chosen.device)
        draw(curve).savefig(chosen.curve, dpi=100)
        print("\n".join([*curve_lines(curve), f"wrote {chosen.curve}"]))
        report["curve"] = asdict(curve)
    if not report:
        speed = measure_speed(speed_options(chosen, work_dir))
        if chosen.size:
            speed = replace(speed, model=f"{chosen.size}, random weights")
        print("\n".join(speed_lines(speed)))
        report["speed"] = asdict(speed)
    return report


def speed_options(chosen: argparse.Namespace, work_dir: Path) -> SpeedOptions:
    """The flags as options; a random checkpoint is written where a size is chosen."""
    source = chosen.source
    if chosen.size:
        source = work_dir / f"{chosen.size}-random"
        write_checkpoint(source, SIZES[chosen.size])
    return SpeedOptions(
        source, chosen.quantize, bool(chosen.against), chosen.rounds, chosen.tokens, chosen.device, chosen.dtype
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = build_parser()
    chosen = parser.parse_args(arguments)
    if chosen.source and chosen.size:
        parser.error("a checkpoint and --size exclude each other")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    print(REGIMES)
    with TemporaryDirectory(dir=chosen.work_dir) as work_dir, kept_in(Path(work_dir)):
        try:
            report = run(chosen, Path(work_dir))
        except ValueError as error:
            parser.error(str(error))
    print(json.dumps(report))


if __name__ == "__main__":
    main()
