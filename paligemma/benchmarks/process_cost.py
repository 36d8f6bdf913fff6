"""What loading a checkpoint and answering once costs a process of its own: seconds, and its highest resident size.

Memory is VmHWM of /proc/self/status (Linux only), to be read less that of a process that only imported the same
packages. Pages of a file that is mapped into memory count as resident once they are read, so that a mapped checkpoint
is not counted as free.

    python -m paligemma.benchmarks.process_cost SIDE [--folder FOLDER]

SIDE: `ours`; `unprepared`, which is ours with the weights as they lie in the file; `reference`, which is transformers.
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
    random_picture,
    reference_inputs,
)

SIDES = ("ours", "unprepared", "reference")
CACHE_VARIABLE = "XDG_CACHE_HOME"
NUM_TOKENS = 4
REQUEST = Request(random_picture(0), "caption en")
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@contextmanager
def kept_in(folder: Path) -> Iterator[None]:
    """Let what is kept in the user's cache folder go to this one meanwhile."""
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
    """What one process needed.

    Attributes:
        load_s: until the model was there, prepared or packed where that is done.
        answer_s: from then until the answer's last token; a mapped file is read here.
        loading_peak_bytes, answering_peak_bytes: the highest resident size of the process until the model was there,
            and from then on; None where the system does not tell.
    """

    load_s: float
    answer_s: float
    loading_peak_bytes: int | None
    answering_peak_bytes: int | None

    @property
    def peak_bytes(self) -> int | None:
        """The larger of the two."""
        if self.loading_peak_bytes is None or self.answering_peak_bytes is None:
            return None
        return max(self.loading_peak_bytes, self.answering_peak_bytes)


def measure(
    side: str,
    folder: Path | None = None,
    dtype: str = "auto",
    quantize: str | None = None,
    cache_folder: Path | None = None,
) -> Cost:
    """Run one side on the CPU in a process of its own; without a folder it only imports.

    `cache_folder` takes the place of the user's, where quantized weights are kept.
    """
    command = [sys.executable, "-m", "paligemma.benchmarks.process_cost", side, "--dtype", dtype]
    command += ["--folder", str(folder)] if folder else []
    command += ["--quantize", quantize] if quantize else []
    environment = {**os.environ, **({CACHE_VARIABLE: str(cache_folder)} if cache_folder else {})}
    finished = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    return Cost(**json.loads(finished.stdout.splitlines()[-1]))


def num_cached_tokens(config: paligemma.PaliGemmaConfig) -> int:
    """How many tokens the cache of the request that is measured holds."""
    # Counted with a margin of a few tokens, so that the prompt need not be tokenized here.
    return config.vision_config.num_image_tokens + len(REQUEST.prompt) + NUM_TOKENS


def load_and_answer(load: Callable[[], Callable[[Request], object]]) -> Cost:
    """Load and answer one request, in this process."""
    started = perf_counter()
    answer = load()
    loaded, loading_peak = perf_counter(), _peak_bytes()
    _forget_peak()
    answer(REQUEST)
    return Cost(loaded - started, perf_counter() - loaded, loading_peak, _peak_bytes())


def load_ours(folder: Path, dtype: str, quantize: str | None) -> Callable[[Request], object]:
    """This package's side: what answers a request."""
    vlm = paligemma.load(folder, device="cpu", dtype=dtype, quantize=quantize)
    return lambda request: vlm.generate(request.image, request.prompt, max_new_tokens=NUM_TOKENS)


def load_unprepared(folder: Path, dtype: str) -> Callable[[Request], object]:
    """This package's side without anything prepared for the machine."""
    model = checkpoint.load_model(folder, "cpu", dtype)
    vlm = paligemma.PaliGemma(model, paligemma.PaliGemmaProcessor.from_folder(folder, model.config))
    return lambda request: vlm.generate(request.image, request.prompt, max_new_tokens=NUM_TOKENS)


def load_transformers(folder: Path, dtype: str) -> Callable[[Request], object]:
    """transformers' side: what answers a request."""
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


def _forget_peak() -> None:
    """Let the highest resident size count from now on (proc(5): 5 in clear_refs)."""
    if CLEAR.exists():
        CLEAR.write_text("5", encoding="ascii")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure one side and print its Cost as JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m paligemma.benchmarks.process_cost", description=__doc__.split("\n")[0]
    )
    parser.add_argument("side", choices=SIDES)
    parser.add_argument("--folder", type=Path, help="a checkpoint's folder; without it the packages are only imported")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantize")
    options = parser.parse_args(arguments)
    transformers.utils.logging.disable_progress_bar()
    transformers.PaliGemmaForConditionalGeneration, transformers.AutoProcessor  # noqa: B018
    loaders = {
        "ours": lambda: load_ours(options.folder, options.dtype, options.quantize),
        "unprepared": lambda: load_unprepared(options.folder, options.dtype),
        "reference": lambda: load_transformers(options.folder, options.dtype),
    }
    imports = Cost(0.0, 0.0, _peak_bytes(), _peak_bytes())
    print(json.dumps(asdict(load_and_answer(loaders[options.side]) if options.folder else imports)))


if __name__ == "__main__":
    main()
