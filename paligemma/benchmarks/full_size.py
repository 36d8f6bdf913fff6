"""Random checkpoints of full size and 1/9 of it, and their loading time and memory compared with transformers.

Checkpoints are written shard by shard, with one shard in memory at a time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from time import perf_counter

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

import paligemma
from paligemma.benchmarks.costs import Work
from paligemma.benchmarks.process_cost import measure, num_cached_tokens
from paligemma.benchmarks.random_checkpoints import Case, hub_name, make_config, random_weight, save_config_files

FOLDER = "full-size"
SHARD_BYTES = 1_000_000_000
MAX_MEMORY_RATIO = 1.15
TEXT1 = {
    "model_type": "gemma",
    "hidden_size": 2048,
    "intermediate_size": 16384,
    "num_hidden_layers": 18,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 256,
}
TEXT2 = {
    "model_type": "gemma2",
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "sliding_window": 4096,
    "eos_token_id": 1,
}
VISION = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "patch_size": 14,
}
CASE = Case(TEXT1, VISION, image_size=224, vocab_size=257216, image_token_id=257152)
SIZES = {
    "paligemma-3b": CASE,
    "paligemma2-3b": replace(CASE, text=TEXT2, top_level_hidden_size=2048),
    # 1/9 of the decoder layers, vision layers and vocabulary of PaliGemma 1 3B.
    "ninth": Case(
        {**TEXT1, "num_hidden_layers": 2},
        {**VISION, "num_hidden_layers": 3},
        224,
        vocab_size=28608,
        image_token_id=28544,
    ),
}


def write_checkpoint(folder: Path, case: Case = CASE, dtype: torch.dtype = torch.bfloat16) -> int:
    """Write a random checkpoint in the hub layout with a sparse config.json; return the bytes of its weights."""
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
    """Write a checkpoint, measure both implementations and print; return whether our memory is within the limit."""
    folder = work_dir / FOLDER
    started = perf_counter()
    weights = write_checkpoint(folder, case)
    print(f"random checkpoint of {weights / 1e9:.2f} GB written in {perf_counter() - started:.0f} s")
    config = paligemma.PaliGemmaConfig.from_folder(folder)
    cache = num_cached_tokens(config) * Work.of(config, torch.bfloat16).cache_bytes_per_token
    ratios = {}
    for side in ("ours", "reference"):
        base, cost = measure(side), measure(side, folder)
        if base.peak_bytes is None or cost.peak_bytes is None:
            raise SystemExit("Peak memory is not available on this system; run --full-size on Linux.")
        used = cost.peak_bytes - base.peak_bytes
        ratios[side] = used / (weights + cache)
        print(
            f"{side:<10} load {cost.load_s:6.1f} s, generate {cost.answer_s:6.1f} s, peak memory "
            f"{cost.peak_bytes / 1e9:.2f} GB, without imports ({base.peak_bytes / 1e9:.2f} GB) {used / 1e9:.2f} GB, "
            f"{ratios[side]:.2f} x (weights + KV cache)"
        )
    passed = ratios["ours"] <= MAX_MEMORY_RATIO
    print(f"limit {MAX_MEMORY_RATIO} x: {'ok' if passed else 'FAILED'}")
    return passed
