"""Speed benchmark: time to first token, tokens/s, loading time and memory, relative to the hardware's peak rates.

    python -m paligemma.benchmarks.speed                        the bundled model
    python -m paligemma.benchmarks.speed FOLDER_OR_HUB_ID --quantize int8
    python -m paligemma.benchmarks.speed --size paligemma-3b --against transformers --quantize int8
    python -m paligemma.benchmarks.speed --accuracy             accuracy of int8 weights
    python -m paligemma.benchmarks.speed --curve FILE.png       speed over context length and resolution

All implementations run interleaved in one process. Loading and memory are measured in separate processes. The last line
of the output is the report as JSON.
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
from paligemma.benchmarks.process_cost import user_cache_in

INTRODUCTION = """\
Prefill processes the image and the whole prompt in one forward pass: each weight read is used for hundreds of tokens,
so the limit is arithmetic (GFLOP/s). Decoding reads all decoder weights and the KV cache for every token, so the limit
is memory bandwidth (GB/s). Values are medians, with minimum and maximum in parentheses.
"""
CURVE_SIZE = "ninth"
CURVE_NAMES = {CURVE_SIZE: "1/9 of PaliGemma 1 3B (2 of 18 decoder layers, 3 of 27 vision layers), random weights"}
QUANTIZED = ("int8",)
COLUMNS = ("image s", "first token s", "ms/token", "tokens/s", "GB/s", "% of peak", "GFLOP/s", "% of peak")
WIDTHS = (21, 21, 21, 10, 7, 10, 10, 10)
NOT_MEASURED = "not measured"


def speed_lines(report: SpeedReport) -> Iterator[str]:
    """Format the report as text."""
    yield f"{report.model}: {report.parameters / 1e6:,.1f} million parameters, {report.prefix_tokens} prefix tokens"
    yield f"device {report.device}, {report.threads} threads, torch {report.torch}"
    yield from (f"{name}: {kernels}" for name, kernels in report.kernels.items())
    gflops = ", ".join(f"{value:.0f} in {name}" for name, value in report.peak.gflops_s.items())
    yield f"measured peak: memory bandwidth {report.peak.gb_s:.1f} GB/s; GFLOP/s {gflops}"
    yield ""
    yield from _table(report)
    for name, ratio in report.ratios.items():
        first, token = ratio.first_token.text(2), ratio.token.text(2)
        yield f"{name} vs transformers: {first} x as fast to the first token, {token} x per token"
    for name, second in report.second_prompt.items():
        yield (
            f"{name}, second prompt on each image: {second.tower_runs} runs of the vision tower (first prompt: "
            f"{second.tower_runs_before}), time to first token {second.first_token_s.text(3)} s, "
            f"{second.saved_s.text(3)} s less than the first prompt"
        )
    yield from _loading_lines(report.loading)


def _table(report: SpeedReport) -> Iterator[str]:
    yield f"{'':<20}" + "".join(f"{column:>{width}}" for column, width in zip(COLUMNS, WIDTHS, strict=True))
    for name, speed in report.speed.items():
        cells = (
            speed.image_s.text(3),
            speed.first_token_s.text(3),
            speed.token_s.text(1, 1000),
            f"{speed.tokens_s:.2f}",
            f"{speed.gb_s:.1f}",
            f"{speed.gb_s_share:.0%}",
            f"{speed.gflops_s:.0f}",
            f"{speed.gflops_s_share:.0%}",
        )
        yield f"{name:<20}" + "".join(f"{cell:>{width}}" for cell, width in zip(cells, WIDTHS, strict=True))


def _loading_lines(loading: dict[str, Loading]) -> Iterator[str]:
    if not loading:
        yield f"loading and memory: {NOT_MEASURED} on this device"
    for name, found in loading.items():
        reload = "" if found.reload_s is None else f", from the quantization cache in {found.reload_s:.1f} s"
        yield (
            f"{name}: loaded in {found.load_s:.1f} s{reload}; peak memory without imports, relative to weights and "
            f"KV cache ({found.stored_bytes / 1e9:.2f} GB): {_ratio(found.loading_memory)} while loading, "
            f"{_ratio(found.generation_memory)} during generation"
        )


def _ratio(value: float | None) -> str:
    return NOT_MEASURED if value is None else f"{value:.2f} x"


# Command line


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m paligemma.benchmarks.speed", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("source", nargs="?", help="checkpoint folder or hub id (default: the bundled model)")
    parser.add_argument("--size", choices=SIZES, help="use random weights of this size (3b: 6 GB on disk)")
    parser.add_argument("--quantize", choices=QUANTIZED, help="measure these weights too; with --curve, only these")
    parser.add_argument("--against", choices=("transformers",), help="measure this implementation too")
    parser.add_argument("--accuracy", action="store_true", help="measure the accuracy of int8 weights on the CPU")
    parser.add_argument(
        "--curve", type=Path, metavar="FILE", help=f"plot speed over context and resolution (default: {CURVE_SIZE})"
    )
    parser.add_argument("--rounds", type=int, default=5, help="rounds, >= 5 (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=8, help="tokens per answer (default: %(default)s)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N or mps")
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    parser.add_argument("--work-dir", help="folder for temporary checkpoints and int8 weights")
    return parser


def run(options: argparse.Namespace, work_dir: Path) -> dict[str, Any]:
    """Run the selected benchmarks, print their reports and return them."""
    report: dict[str, Any] = {}
    if options.accuracy:
        accuracy = measure_accuracy(work_dir, options.quantize or QUANTIZED[0])
        print("\n".join(accuracy_lines(accuracy)))
        report["accuracy"] = {**asdict(accuracy), "passed": accuracy.passed}
    if options.curve:
        size = options.size or CURVE_SIZE
        curve = measure_curve(CURVE_NAMES.get(size, size), SIZES[size], work_dir, options.quantize, options.device)
        draw(curve).savefig(options.curve, dpi=100)
        print("\n".join([*curve_lines(curve), f"wrote {options.curve}"]))
        report["curve"] = asdict(curve)
    if not report:
        speed = measure_speed(speed_options(options, work_dir))
        if options.size:
            speed = replace(speed, model=f"{options.size}, random weights")
        print("\n".join(speed_lines(speed)))
        report["speed"] = asdict(speed)
    return report


def speed_options(options: argparse.Namespace, work_dir: Path) -> SpeedOptions:
    """Convert the flags; with --size, write the random checkpoint first."""
    source = options.source
    if options.size:
        source = work_dir / f"{options.size}-random"
        write_checkpoint(source, SIZES[options.size])
    return SpeedOptions(
        source, options.quantize, bool(options.against), options.rounds, options.tokens, options.device, options.dtype
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = build_parser()
    options = parser.parse_args(arguments)
    if options.source and options.size:
        parser.error("a checkpoint and --size are mutually exclusive")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    print(INTRODUCTION)
    with TemporaryDirectory(dir=options.work_dir) as work_dir, user_cache_in(Path(work_dir)):
        try:
            report = run(options, Path(work_dir))
        except ValueError as error:
            parser.error(str(error))
    print(json.dumps(report))


if __name__ == "__main__":
    main()
