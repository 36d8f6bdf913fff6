"""Compare this package with transformers, number by number.

    python -m paligemma.benchmarks.parity                      random checkpoints of every kind, layout and type
    python -m paligemma.benchmarks.parity FOLDER_OR_HUB_ID     that checkpoint, such as google/paligemma-3b-mix-224
    python -m paligemma.benchmarks.parity --full-size          a random PaliGemma 3B: also load time and memory

Prints a table and ends with exit code 1 if any row fails. float32: token ids and pixels equal, every logit within 1e-4,
greedy answers equal. bfloat16 and float16: the mean relative error against transformers' float32 logits is at most
1.1 times transformers' own in that type, and ids and pixels are equal; the last column counts the greedy answers that
are float32's, which need not be all.
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
    random_picture,
    reference_samples,
)

PROMPTS = ("", "caption en", "detect the cat ; blue square", "answer en the cow in 猫 🐄?")
NUM_TOKENS = 24
MAX_DIFFERENCE = 1e-4
MAX_ERROR_RATIO = 1.1
MIN_DISTINCT_TOKENS = 12  # of 24 greedy ones; less, and a random checkpoint could not tell right from wrong
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Checkpoint:
    """A random checkpoint to compare: the model's case and how it is stored."""

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
LOWER_TYPE_CASES = ("paligemma1", "grouped", "paligemma2", "sliding")


@dataclass(frozen=True)
class Row:
    """One line of the table: what was compared, each measure as text, and whether it passed."""

    name: str
    dtype: str
    measures: tuple[str, ...]
    passed: bool


FLOAT32_COLUMNS = ("ids", "pixels", "max |logit difference|", "greedy ids", "distinct")
LOWER_COLUMNS = ("ids", "pixels", "our error / reference's", "ratio", "as float32")
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


def lower_type_row(name: str, dtype: str, folders: Sequence[Path], requests: Sequence[Sequence[Request]]) -> Row:
    """Compare checkpoint folders, each with its requests, in a lower type; errors are means over all of them."""
    errors, own_errors, ours_of_all, exact_of_all = [], [], [], []
    for folder, asked in zip(folders, requests, strict=True):
        exact = reference_samples(folder, torch.float32, asked, NUM_TOKENS)
        answers = [sample.greedy for sample in exact]
        reference = reference_samples(folder, DTYPES[dtype], asked, NUM_TOKENS, answers)
        ours = our_samples(folder, DTYPES[dtype], asked, NUM_TOKENS, answers)
        errors.append(mean_relative_error(ours, exact))
        own_errors.append(mean_relative_error(reference, exact))
        ours_of_all += ours
        exact_of_all += exact
    found = agreement(ours_of_all, exact_of_all)
    error, own_error = sum(errors) / len(errors), sum(own_errors) / len(own_errors)
    same_greedy = sum(a.greedy == b.greedy for a, b in zip(ours_of_all, exact_of_all, strict=True))
    measures = (
        _equal(found.ids_equal),
        _equal(found.pixels_equal),
        f"{error:.2e} / {own_error:.2e}",
        f"{error / own_error:.2f}",
        f"{same_greedy} of {len(exact_of_all)}",
    )
    passed = found.ids_equal and found.pixels_equal and error <= MAX_ERROR_RATIO * own_error
    return Row(name, dtype, measures, passed)


def _equal(value: bool) -> str:
    return "equal" if value else "DIFFER"


def requests_of(seed: int, prompts: Sequence[str]) -> list[Request]:
    """Each prompt about the seed's picture."""
    return [Request(random_picture(seed), prompt) for prompt in prompts]


def random_rows(names: Sequence[str], dtypes: Sequence[str], seeds: int, work_dir: Path) -> Iterator[Row]:
    """Rows for random checkpoints, each made, compared and overwritten in turn."""
    if "float32" in dtypes:
        for name in names:
            stored = CHECKPOINTS[name]
            folder = save_layout(make_model(stored.case), work_dir / name, stored.layout, stored.sharded, stored.sparse)
            yield float32_row(name, folder, requests_of(0, PROMPTS), is_random=True)
    for dtype in dtypes:
        for name in names:
            if dtype == "float32" or name not in LOWER_TYPE_CASES:
                continue
            folders = [save_layout(make_model(name, seed), work_dir / f"{name}-{seed}") for seed in range(seeds)]
            yield lower_type_row(name, dtype, folders, [requests_of(seed, PROMPTS) for seed in range(seeds)])


def checkpoint_rows(source: str, revision: str | None, dtypes: Sequence[str], seeds: int) -> Iterator[Row]:
    """Rows for one checkpoint, with a picture a seed."""
    folder = checkpoint.find_checkpoint(source, revision, dtype=dtypes[0]).folder
    if "float32" in dtypes:
        yield float32_row(source, folder, requests_of(0, PROMPTS), is_random=False)
    for dtype in dtypes:
        if dtype != "float32":
            asked = [request for seed in range(seeds) for request in requests_of(seed, PROMPTS[1:2])]
            yield lower_type_row(source, dtype, [folder], [asked])


def print_rows(rows: Iterator[Row]) -> bool:
    """Print each row as it comes, with headings where the type changes; return whether all passed."""
    all_passed, heading = True, None
    for row in rows:
        columns = FLOAT32_COLUMNS if row.dtype == "float32" else LOWER_COLUMNS
        if columns != heading:
            print("\n" + _line("checkpoint", "type", columns))
            heading = columns
        print(_line(row.name, row.dtype, row.measures) + ("ok" if row.passed else "FAILED"), flush=True)
        all_passed &= row.passed
    return all_passed


def _line(name: str, dtype: str, cells: Sequence[str]) -> str:
    aligned = "".join(f"{cell:<{width}}" for cell, width in zip(cells, COLUMN_WIDTHS, strict=True))
    return f"{name[-21:]:<22}{dtype:<10}{aligned}"


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m paligemma.benchmarks.parity", description=__doc__.split("\n")[0])
    parser.add_argument("source", nargs="?", help="a checkpoint folder or hub id; without it random ones are made")
    parser.add_argument("--revision", help="branch, tag or commit of the hub id")
    parser.add_argument(
        "--dtype", choices=DTYPES, action="append", help="may be repeated; default: all for random ones, else float32"
    )
    parser.add_argument("--seeds", type=int, default=5, help="models or pictures in the lower types (default: 5)")
    parser.add_argument("--case", choices=CHECKPOINTS, action="append", help="only this one; may be repeated")
    parser.add_argument("--full-size", action="store_true", help="a random PaliGemma 3B in bfloat16 (6 GB on disk)")
    parser.add_argument("--work-dir", help="where random checkpoints are written; they are removed afterwards")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    chosen = build_parser().parse_args(arguments)
    if chosen.seeds < 1:
        raise SystemExit(f"--seeds is {chosen.seeds}; it must be at least 1")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory(dir=chosen.work_dir) as work_dir:
        if chosen.full_size:
            passed = full_size.run(Path(work_dir))
            rows = checkpoint_rows(str(Path(work_dir) / full_size.FOLDER), None, ["bfloat16"], seeds=1)
            passed &= print_rows(rows)
        elif chosen.source:
            passed = print_rows(
                checkpoint_rows(chosen.source, chosen.revision, chosen.dtype or ["float32"], chosen.seeds)
            )
        else:
            names, dtypes = chosen.case or list(CHECKPOINTS), chosen.dtype or list(DTYPES)
            passed = print_rows(random_rows(names, dtypes, chosen.seeds, Path(work_dir)))
    print("\nall rows passed" if passed else "\nsome rows FAILED")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
