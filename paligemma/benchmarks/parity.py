"""Compare this package with transformers numerically.

    python -m paligemma.benchmarks.parity                      random checkpoints of each architecture, layout and dtype
    python -m paligemma.benchmarks.parity FOLDER_OR_HUB_ID     one checkpoint, such as google/paligemma-3b-mix-224
    python -m paligemma.benchmarks.parity --full-size          a random PaliGemma 3B, with loading time and memory

Prints a table; the exit code is 1 if a row fails.

float32 requires equal token ids, pixels and greedy answers, and every logit within 1e-4. bfloat16 and float16 require
equal token ids and pixels, and an error of at most 1.1 times that of transformers in the same dtype; errors are mean
relative errors of the logits relative to transformers in float32. The last column counts the greedy answers equal to
those of float32, for information only.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers

from paligemma import checkpoint
from paligemma.benchmarks import full_size
from paligemma.benchmarks.random_checkpoints import make_model, save_layout
from paligemma.benchmarks.reference import (
    Request,
    agreement,
    mean_relative_error,
    our_samples,
    random_image,
    reference_samples,
)

PROMPTS = ("", "caption en", "detect the cat ; blue square", "answer en the cow in 猫 🐄?")
NUM_TOKENS = 24
MAX_DIFFERENCE = 1e-4
MAX_ERROR_RATIO = 1.1
MIN_DISTINCT_TOKENS = 12  # of 24 greedy tokens; a repetitive answer would hide errors
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Checkpoint:
    """A random checkpoint: its configuration and file layout."""

    case: str
    layout: str = "hub"
    sharded: bool = False
    sparse: bool = False


CHECKPOINTS = {
    "paligemma1": Checkpoint("paligemma1"),
    "grouped": Checkpoint("grouped"),
    "paligemma2": Checkpoint("paligemma2"),
    "sliding": Checkpoint("sliding"),
    "paligemma1-112px": Checkpoint("paligemma1-112"),
    "paligemma2-112px": Checkpoint("paligemma2-112"),
    "paligemma1-sparse": Checkpoint("paligemma1-224", sparse=True),
    "paligemma2-sparse": Checkpoint("paligemma2", sparse=True),
    "sliding-sparse": Checkpoint("sliding", sparse=True),
    "paligemma1-sharded": Checkpoint("paligemma1", sharded=True),
    "paligemma1-4.52": Checkpoint("paligemma1", "transformers-4.52"),
    "paligemma1-5": Checkpoint("paligemma1", "transformers-5"),
    "paligemma1-5-plain": Checkpoint("paligemma1", "transformers-5-plain"),
    "paligemma2-sharded": Checkpoint("paligemma2", sharded=True),
    "paligemma2-4.52": Checkpoint("paligemma2", "transformers-4.52", sharded=True),
    "paligemma2-5": Checkpoint("paligemma2", "transformers-5", sharded=True),
    "paligemma2-5-plain": Checkpoint("paligemma2", "transformers-5-plain", sharded=True),
}
LOW_PRECISION_CASES = ("paligemma1", "grouped", "paligemma2", "sliding")


@dataclass(frozen=True)
class Row:
    """A row of the table: checkpoint, dtype, formatted measures, and whether it passed."""

    name: str
    dtype: str
    measures: tuple[str, ...]
    passed: bool


FLOAT32_COLUMNS = ("ids", "pixels", "max |logit difference|", "greedy ids", "distinct")
LOW_PRECISION_COLUMNS = ("ids", "pixels", "error / reference error", "ratio", "float32 ids")
COLUMN_WIDTHS = (8, 8, 26, 12, 12)


def float32_row(name: str, folder: Path, requests: Sequence[Request], is_random: bool) -> Row:
    """Compare one checkpoint folder in float32."""
    reference = reference_samples(folder, torch.float32, requests, NUM_TOKENS)
    ours = our_samples(folder, torch.float32, requests, NUM_TOKENS, [sample.greedy for sample in reference])
    found = agreement(ours, reference)
    distinct = min(len(set(sample.greedy)) for sample in reference)
    passed = found.ids_equal and found.pixels_equal and found.greedy_equal and found.max_difference < MAX_DIFFERENCE
    measures = (
        _equal(found.ids_equal),
        _equal(found.pixels_equal),
        f"{found.max_difference:.1e}",
        _equal(found.greedy_equal),
        f"{distinct} of {NUM_TOKENS}",
    )
    return Row(name, "float32", measures, passed and (distinct >= MIN_DISTINCT_TOKENS or not is_random))


def low_precision_row(name: str, dtype: str, folders: Sequence[Path], requests: Sequence[Sequence[Request]]) -> Row:
    """Compare checkpoint folders, each with its requests, in bfloat16 or float16, averaged over all of them."""
    errors, reference_errors, all_ours, all_exact = [], [], [], []
    for folder, folder_requests in zip(folders, requests, strict=True):
        exact = reference_samples(folder, torch.float32, folder_requests, NUM_TOKENS)
        answers = [sample.greedy for sample in exact]
        reference = reference_samples(folder, DTYPES[dtype], folder_requests, NUM_TOKENS, answers)
        ours = our_samples(folder, DTYPES[dtype], folder_requests, NUM_TOKENS, answers)
        errors.append(mean_relative_error(ours, exact))
        reference_errors.append(mean_relative_error(reference, exact))
        all_ours += ours
        all_exact += exact
    found = agreement(all_ours, all_exact)
    error, reference_error = sum(errors) / len(errors), sum(reference_errors) / len(reference_errors)
    same_greedy = sum(a.greedy == b.greedy for a, b in zip(all_ours, all_exact, strict=True))
    measures = (
        _equal(found.ids_equal),
        _equal(found.pixels_equal),
        f"{error:.2e} / {reference_error:.2e}",
        f"{error / reference_error:.2f}",
        f"{same_greedy} of {len(all_exact)}",
    )
    passed = found.ids_equal and found.pixels_equal and error <= MAX_ERROR_RATIO * reference_error
    return Row(name, dtype, measures, passed)


def _equal(value: bool) -> str:
    return "equal" if value else "DIFFER"


def requests_of(seed: int, prompts: Sequence[str]) -> list[Request]:
    """Combine each prompt with the random image of the seed."""
    return [Request(random_image(seed), prompt) for prompt in prompts]


def random_rows(names: Sequence[str], dtypes: Sequence[str], seeds: int, work_dir: Path) -> Iterator[Row]:
    """Yield the rows of random checkpoints, which are written to `work_dir`."""
    if "float32" in dtypes:
        for name in names:
            stored = CHECKPOINTS[name]
            folder = save_layout(make_model(stored.case), work_dir / name, stored.layout, stored.sharded, stored.sparse)
            yield float32_row(name, folder, requests_of(0, PROMPTS), is_random=True)
    for dtype in dtypes:
        for name in names:
            if dtype == "float32" or name not in LOW_PRECISION_CASES:
                continue
            folders = [save_layout(make_model(name, seed), work_dir / f"{name}-{seed}") for seed in range(seeds)]
            yield low_precision_row(name, dtype, folders, [requests_of(seed, PROMPTS) for seed in range(seeds)])


def checkpoint_rows(source: str, revision: str | None, dtypes: Sequence[str], seeds: int) -> Iterator[Row]:
    """Yield the rows of one checkpoint, with one random image per seed."""
    folder = checkpoint.find_checkpoint(source, revision, dtype=dtypes[0]).folder
    if "float32" in dtypes:
        yield float32_row(source, folder, requests_of(0, PROMPTS), is_random=False)
    for dtype in dtypes:
        if dtype != "float32":
            requests = [request for seed in range(seeds) for request in requests_of(seed, PROMPTS[1:2])]
            yield low_precision_row(source, dtype, [folder], [requests])


def print_rows(rows: Iterator[Row]) -> bool:
    """Print the rows with a heading per kind of columns; return whether all passed."""
    all_passed, heading = True, None
    for row in rows:
        columns = FLOAT32_COLUMNS if row.dtype == "float32" else LOW_PRECISION_COLUMNS
        if columns != heading:
            print("\n" + _line("checkpoint", "dtype", columns))
            heading = columns
        print(_line(row.name, row.dtype, row.measures) + ("ok" if row.passed else "FAILED"), flush=True)
        all_passed &= row.passed
    return all_passed


def _line(name: str, dtype: str, cells: Sequence[str]) -> str:
    aligned = "".join(f"{cell:<{width}}" for cell, width in zip(cells, COLUMN_WIDTHS, strict=True))
    return f"{name[-21:]:<22}{dtype:<10}{aligned}"


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m paligemma.benchmarks.parity", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("source", nargs="?", help="checkpoint folder or hub id (default: random checkpoints)")
    parser.add_argument("--revision", help="branch, tag or commit of the hub repository")
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        action="append",
        help="repeatable (default: all for random checkpoints, otherwise float32)",
    )
    parser.add_argument("--seeds", type=int, default=5, help="models or images in bfloat16 and float16 (default: 5)")
    parser.add_argument(
        "--case", choices=CHECKPOINTS, action="append", help="random checkpoint to compare; repeatable (default: all)"
    )
    parser.add_argument(
        "--full-size", action="store_true", help="compare a random PaliGemma 3B in bfloat16 (6 GB on disk)"
    )
    parser.add_argument("--work-dir", help="folder for temporary checkpoints")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    options = build_parser().parse_args(arguments)
    if options.seeds < 1:
        raise SystemExit(f"--seeds must be >= 1, got {options.seeds}.")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory(dir=options.work_dir) as work_dir:
        if options.full_size:
            passed = full_size.run(Path(work_dir))
            rows = checkpoint_rows(str(Path(work_dir) / full_size.FOLDER), None, ["bfloat16"], seeds=1)
            passed &= print_rows(rows)
        elif options.source:
            passed = print_rows(
                checkpoint_rows(options.source, options.revision, options.dtype or ["float32"], options.seeds)
            )
        else:
            names, dtypes = options.case or list(CHECKPOINTS), options.dtype or list(DTYPES)
            passed = print_rows(random_rows(names, dtypes, options.seeds, Path(work_dir)))
    print("\nall rows passed" if passed else "\nsome rows FAILED")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
