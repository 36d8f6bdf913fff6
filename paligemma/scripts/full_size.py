"""A random PaliGemma 1 of full size, and what loading it costs beside transformers.

The checkpoint is written shard by shard, so that no more than one shard is in memory. Each side then loads it and
answers one request in a process of its own. Memory is the process's highest resident size (VmHWM in
/proc/self/status, Linux only) less that of a process that only imported the same packages. Pages of a file that is
mapped into memory count as resident once they are read, so that a mapped checkpoint is not counted as free.

    python -m paligemma.scripts.full_size SIDE [FOLDER]     SIDE: ours or reference; without FOLDER only imports
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

import paligemma
from paligemma.kv_cache import KVCache
from paligemma.scripts.compare import (
    Request,
    load_reference,
    load_reference_processor,
    random_picture,
    reference_inputs,
)
from paligemma.scripts.random_checkpoints import Case, hub_name, make_config, random_weight, save_config_files

FOLDER = "full-size"
SHARD_BYTES = 1_000_000_000
MAX_MEMORY_RATIO = 1.15
NUM_PROMPT_TOKENS, NUM_TOKENS = 4, 4
SIDES = ("ours", "reference")
CASE = Case(
    text={
        "model_type": "gemma",
        "hidden_size": 2048,
        "intermediate_size": 16384,
        "num_hidden_layers": 18,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "head_dim": 256,
    },
    vision={
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "patch_size": 14,
    },
    image_size=224,
    vocab_size=257216,
)


@dataclass(frozen=True)
class Cost:
    """What one process needed.

    Attributes:
        load_s: until the model was there.
        answer_s: from then until the answer's last token; a mapped file is read here.
        peak_bytes: the highest resident size of the process.
    """

    load_s: float
    answer_s: float
    peak_bytes: int


def write_checkpoint(folder: Path, case: Case = CASE, dtype: torch.dtype = torch.bfloat16) -> int:
    """Write a random checkpoint in the hub's layout with its sparse config.json; return the weights' bytes."""
    folder.mkdir(parents=True)
    config = make_config(case)
    config.dtype = dtype
    config.architectures = ["PaliGemmaForConditionalGeneration"]
    save_config_files(config, folder, sparse=True)
    weight_map: dict[str, str] = {}
    total_bytes = 0
    for number, shard in enumerate(_shards(config, dtype), start=1):
        name = f"model-{number:05}.safetensors"
        save_file(shard, folder / name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, name))
        total_bytes += sum(tensor.nbytes for tensor in shard.values())
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return total_bytes


def _shards(config: transformers.PaliGemmaConfig, dtype: torch.dtype) -> Iterator[dict[str, Tensor]]:
    with torch.device("meta"):
        model = transformers.PaliGemmaForConditionalGeneration(config)
    generator = torch.Generator().manual_seed(0)
    shard: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if name == "lm_head.weight":
            continue
        shard[hub_name(name)] = random_weight(name, parameter.shape, generator).to(dtype)
        if sum(tensor.nbytes for tensor in shard.values()) >= SHARD_BYTES:
            yield shard
            shard = {}
    if shard:
        yield shard


def run(work_dir: Path, case: Case = CASE) -> bool:
    """Write, measure both sides, print; return whether our memory stays within its bound."""
    folder = work_dir / FOLDER
    started = perf_counter()
    weights = write_checkpoint(folder, case)
    print(f"random checkpoint of {weights / 1e9:.2f} GB written in {perf_counter() - started:.0f} s")
    cache = _cache_bytes(folder)
    ratios = {}
    for side in SIDES:
        base, cost = measure(side), measure(side, folder)
        used = cost.peak_bytes - base.peak_bytes
        ratios[side] = used / (weights + cache)
        print(
            f"{side:<10} load {cost.load_s:6.1f} s, {NUM_TOKENS} tokens {cost.answer_s:6.1f} s, peak memory "
            f"{cost.peak_bytes / 1e9:.2f} GB, less imports ({base.peak_bytes / 1e9:.2f} GB) {used / 1e9:.2f} GB, "
            f"{ratios[side]:.2f} x (weights + cache)"
        )
    passed = ratios["ours"] <= MAX_MEMORY_RATIO
    print(f"bound {MAX_MEMORY_RATIO} x: {'ok' if passed else 'FAILED'}")
    return passed


def measure(side: str, folder: Path | None = None) -> Cost:
    """Run one side in a process of its own; without a folder it only imports."""
    command = [sys.executable, "-m", "paligemma.scripts.full_size", side, *([str(folder)] if folder else [])]
    finished = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return Cost(**json.loads(finished.stdout.splitlines()[-1]))


def _cache_bytes(folder: Path) -> int:
    config = paligemma.PaliGemmaConfig.from_folder(folder)
    num_tokens = config.vision_config.num_image_tokens + NUM_PROMPT_TOKENS + NUM_TOKENS
    return KVCache(config, 1, num_tokens, torch.bfloat16, "cpu").num_bytes


def _peak_bytes() -> int:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def load_and_answer(side: str, folder: Path) -> Cost:
    """Load and answer one request, in this process."""
    request = Request(random_picture(0), "caption en")
    started = perf_counter()
    answer = _our_side(folder) if side == "ours" else _reference_side(folder)
    loaded = perf_counter()
    answer(request)
    return Cost(loaded - started, perf_counter() - loaded, _peak_bytes())


def _our_side(folder: Path) -> Callable[[Request], object]:
    vlm = paligemma.load(folder, device="cpu")
    return lambda request: vlm.generate(request.image, request.prompt, max_new_tokens=NUM_TOKENS)


def _reference_side(folder: Path) -> Callable[[Request], object]:
    model = load_reference(folder, torch.bfloat16)
    processor = load_reference_processor(folder)
    settings = transformers.GenerationConfig(do_sample=False, max_new_tokens=NUM_TOKENS)

    def answer(request: Request) -> Tensor:
        inputs = reference_inputs(processor, request)
        types = torch.zeros_like(inputs["input_ids"])
        with torch.inference_mode():
            return model.generate(**inputs, token_type_ids=types, generation_config=settings)

    return answer


def main(arguments: Sequence[str]) -> None:
    side, *folder = arguments
    transformers.PaliGemmaForConditionalGeneration, transformers.AutoProcessor  # noqa: B018
    cost = load_and_answer(side, Path(folder[0])) if folder else Cost(0.0, 0.0, _peak_bytes())
    print(json.dumps(asdict(cost)))


if __name__ == "__main__":
    main(sys.argv[1:])
