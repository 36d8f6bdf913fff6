"""Loading time, generation time and peak memory of one checkpoint in a separate process.

Memory is VmHWM of /proc/self/status (Linux only); subtract the value of a process that only imports the packages. It
includes the pages of memory-mapped checkpoint files that were read.

    python -m paligemma.benchmarks.process_cost SIDE [--folder FOLDER]

SIDE: `ours`; `unpacked`, this package without packed weights; `reference`, transformers.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter

import torch
import transformers
from torch import Tensor

import paligemma
from paligemma import checkpoint
from paligemma.benchmarks.reference import (
    Request,
    load_reference,
    load_reference_processor,
    random_image,
    reference_inputs,
)

SIDES = ("ours", "unpacked", "reference")
CACHE_VARIABLE = "XDG_CACHE_HOME"
NUM_TOKENS = 4
REQUEST = Request(random_image(0), "caption en")
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@contextmanager
def user_cache_in(folder: Path) -> Iterator[None]:
    """Use `folder` as the user's cache folder inside the block."""
    before = os.environ.get(CACHE_VARIABLE)
    os.environ[CACHE_VARIABLE] = str(folder)
    try:
        yield
    finally:
        del os.environ[CACHE_VARIABLE]
        if before is not None:
            os.environ[CACHE_VARIABLE] = before


@dataclass(frozen=True)
class Cost:
    """Time and memory of one process.

    Attributes:
        load_s: seconds to load the model, including packing or quantization.
        answer_s: seconds to generate the answer, including reads of memory-mapped weights.
        loading_peak_bytes, generation_peak_bytes: peak resident memory while loading and while generating; None where
            the system does not report it.
    """

    load_s: float
    answer_s: float
    loading_peak_bytes: int | None
    generation_peak_bytes: int | None

    @property
    def peak_bytes(self) -> int | None:
        """Peak resident memory of the process, or None."""
        if self.loading_peak_bytes is None or self.generation_peak_bytes is None:
            return None
        return max(self.loading_peak_bytes, self.generation_peak_bytes)


def measure(
    side: str,
    folder: Path | None = None,
    dtype: str = "auto",
    quantize: str | None = None,
    cache_folder: Path | None = None,
) -> Cost:
    """Run one side on the CPU in a separate process; without a folder, only import the packages.

    `cache_folder` replaces the user's cache folder, where quantized weights are stored.
    """
    command = [sys.executable, "-m", "paligemma.benchmarks.process_cost", side, "--dtype", dtype]
    command += ["--folder", str(folder)] if folder else []
    command += ["--quantize", quantize] if quantize else []
    environment = {**os.environ, **({CACHE_VARIABLE: str(cache_folder)} if cache_folder else {})}
    finished = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    return Cost(**json.loads(finished.stdout.splitlines()[-1]))


def num_cached_tokens(config: paligemma.PaliGemmaConfig) -> int:
    """Return an upper bound of the tokens in the KV cache of REQUEST: one per character of the prompt."""
    return config.vision_config.num_image_tokens + len(REQUEST.prompt) + NUM_TOKENS


def load_and_answer(load: Callable[[], Callable[[Request], object]]) -> Cost:
    """Load a model and generate the answer to REQUEST in this process."""
    started = perf_counter()
    answer = load()
    loaded, loading_peak = perf_counter(), _peak_bytes()
    _reset_peak()
    answer(REQUEST)
    return Cost(loaded - started, perf_counter() - loaded, loading_peak, _peak_bytes())


def load_ours(folder: Path, dtype: str, quantize: str | None) -> Callable[[Request], object]:
    """Load this package's model and return its generate function."""
    vlm = paligemma.load(folder, device="cpu", dtype=dtype, quantize=quantize)
    return lambda request: vlm.generate(request.image, request.prompt, max_new_tokens=NUM_TOKENS)


def load_unpacked(folder: Path, dtype: str) -> Callable[[Request], object]:
    """Load this package's model without packed weights and return its generate function."""
    model = checkpoint.load_model(folder, "cpu", dtype)
    vlm = paligemma.PaliGemma(model, paligemma.PaliGemmaProcessor.from_folder(folder, model.config))
    return lambda request: vlm.generate(request.image, request.prompt, max_new_tokens=NUM_TOKENS)


def load_transformers(folder: Path, dtype: str) -> Callable[[Request], object]:
    """Load the transformers model and return its generate function."""
    model = load_reference(folder, dtype)
    processor = load_reference_processor(folder)
    settings = transformers.GenerationConfig(do_sample=False, max_new_tokens=NUM_TOKENS)

    def answer(request: Request) -> Tensor:
        inputs = reference_inputs(processor, request)
        types = torch.zeros_like(inputs["input_ids"])
        with torch.inference_mode():
            return model.generate(**inputs, token_type_ids=types, generation_config=settings)

    return answer


def _peak_bytes() -> int | None:
    if not STATUS.exists():
        return None
    line = next(line for line in STATUS.read_text(encoding="ascii").splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def _reset_peak() -> None:
    """Reset the peak resident memory (see clear_refs in proc(5))."""
    if CLEAR.exists():
        CLEAR.write_text("5", encoding="ascii")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure one side and print the Cost as JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m paligemma.benchmarks.process_cost", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("side", choices=SIDES)
    parser.add_argument("--folder", type=Path, help="checkpoint folder (default: only import the packages)")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantize")
    options = parser.parse_args(arguments)
    transformers.utils.logging.disable_progress_bar()
    transformers.PaliGemmaForConditionalGeneration, transformers.AutoProcessor  # noqa: B018
    loaders = {
        "ours": lambda: load_ours(options.folder, options.dtype, options.quantize),
        "unpacked": lambda: load_unpacked(options.folder, options.dtype),
        "reference": lambda: load_transformers(options.folder, options.dtype),
    }
    imports = Cost(0.0, 0.0, _peak_bytes(), _peak_bytes())
    print(json.dumps(asdict(load_and_answer(loaders[options.side]) if options.folder else imports)))


if __name__ == "__main__":
    main()
