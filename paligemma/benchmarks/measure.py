"""Measure a checkpoint's speed relative to peak rates and transformers, its loading time and its memory."""

from __future__ import annotations

import gc
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

import paligemma
from paligemma import checkpoint
from paligemma.benchmarks import process_cost
from paligemma.benchmarks.costs import PeakRates, Spread, Work, combine_peaks, measure_peak, ratios
from paligemma.benchmarks.implementations import (
    Implementation,
    Ours,
    Times,
    Transformers,
    fastest,
    load_transformers,
    run_interleaved,
)
from paligemma.benchmarks.reference import Request, random_image

PROMPT, SECOND_PROMPT = "caption en", "caption es"
WARM_UP_TOKENS = 3


@dataclass(frozen=True)
class SpeedOptions:
    """Options of a speed measurement. Raises ValueError for too few rounds or tokens.

    Args:
        source: checkpoint folder, hub id, or None for the bundled model.
        quantize: quantization to measure in addition to the unquantized weights, or None.
        against_transformers: whether to measure transformers too.
        rounds: interleaved rounds over all implementations, at least 5.
        tokens: tokens per answer, at least 3.
        device, dtype: as in `paligemma.load`.
    """

    source: str | Path | None = None
    quantize: str | None = None
    against_transformers: bool = False
    rounds: int = 5
    tokens: int = 8
    device: str = "auto"
    dtype: str = "auto"

    def __post_init__(self) -> None:
        if self.rounds < 5:
            raise ValueError(f"rounds must be >= 5, got {self.rounds}.")
        if self.tokens < WARM_UP_TOKENS:
            raise ValueError(f"tokens must be >= {WARM_UP_TOKENS}, got {self.tokens}.")


@dataclass(frozen=True)
class Speed:
    """Speed of one implementation.

    Attributes:
        image_s, first_token_s, token_s: seconds for the image, to the first token, and per token after it.
        tokens_s: tokens per second after the first.
        gb_s: memory bandwidth of decoding, in GB/s. gflops_s: arithmetic rate of prefill, in GFLOP/s.
        gb_s_share, gflops_s_share: fraction of the peak rates measured in the same process.
    """

    image_s: Spread
    first_token_s: Spread
    token_s: Spread
    tokens_s: float
    gb_s: float
    gb_s_share: float
    gflops_s: float
    gflops_s_share: float


@dataclass(frozen=True)
class Ratios:
    """Speed-up over transformers: ratios of the times of the same round."""

    first_token: Spread
    token: Spread


@dataclass(frozen=True)
class SecondPrompt:
    """Second prompt on each image: runs of the vision tower for both prompts, time to first token, and time saved."""

    tower_runs_before: int
    tower_runs: int
    first_token_s: Spread
    saved_s: Spread


@dataclass(frozen=True)
class Loading:
    """Loading time and peak memory of a separate process.

    Attributes:
        load_s: seconds to load the model.
        reload_s: seconds to load it from the quantization cache; None without one.
        stored_bytes: bytes of the weights and the KV cache.
        loading_memory, generation_memory: peak resident memory minus that of a process that only imports, relative
            to stored_bytes; None where the system does not report it.
    """

    load_s: float
    reload_s: float | None
    stored_bytes: int
    loading_memory: float | None
    generation_memory: float | None


@dataclass(frozen=True)
class SpeedReport:
    """Results of a run. Dictionaries are keyed by implementation; `loading` is empty if it was not measured.

    Attributes:
        model, parameters, dtype, device, threads, torch: model and environment.
        kernels: description of dtype and kernels.
        prefix_tokens: image and prompt tokens.
    """

    model: str
    parameters: int
    dtype: str
    device: str
    threads: int
    torch: str
    prefix_tokens: int
    kernels: dict[str, str]
    peak: PeakRates
    speed: dict[str, Speed]
    ratios: dict[str, Ratios]
    second_prompt: dict[str, SecondPrompt]
    loading: dict[str, Loading]


# Summaries


def speed_of(times: Sequence[Times], work: Work, peak: PeakRates, prefix_tokens: int, num_tokens: int) -> Speed:
    """Summarize the rounds of one implementation; each generates `num_tokens` after `prefix_tokens`."""
    token_s = Spread.of([time.token_s for time in times])
    first_token_s = Spread.of([time.first_token_s for time in times])
    gb_s = work.bytes_per_token(prefix_tokens + num_tokens // 2) / token_s.median / 1e9
    gflops_s = work.prefill_flops(prefix_tokens) / first_token_s.median / 1e9
    return Speed(
        image_s=Spread.of([time.image_s for time in times]),
        first_token_s=first_token_s,
        token_s=token_s,
        tokens_s=1 / token_s.median,
        gb_s=gb_s,
        gb_s_share=gb_s / peak.gb_s,
        gflops_s=gflops_s,
        gflops_s_share=gflops_s / peak.peak_gflops_s,
    )


def ratios_of(ours: Sequence[Times], references: Sequence[Sequence[Times]]) -> Ratios:
    """Compare with the reference of the lowest median, separately for first token and later tokens."""

    def ratio_to_fastest(measure: str) -> Spread:
        values = [[getattr(time, measure) for time in times] for times in references]
        best = min(values, key=lambda seconds: Spread.of(seconds).median)
        return ratios([getattr(time, measure) for time in ours], best)

    return Ratios(ratio_to_fastest("first_token_s"), ratio_to_fastest("token_s"))


def second_prompt_of(first: Sequence[Times], second: Sequence[Times]) -> SecondPrompt:
    """Compare first and second prompts on the same images."""
    return SecondPrompt(
        sum(time.tower_runs for time in first),
        sum(time.tower_runs for time in second),
        Spread.of([time.first_token_s for time in second]),
        Spread.of([old.first_token_s - new.first_token_s for old, new in zip(first, second, strict=True)]),
    )


def loading_of(
    imports: process_cost.Cost, cost: process_cost.Cost, reload: process_cost.Cost | None, stored_bytes: int
) -> Loading:
    """Compare a process that loads and generates, and optionally a second one, with one that only imports."""

    def memory(peak: int | None) -> float | None:
        return None if peak is None or imports.peak_bytes is None else (peak - imports.peak_bytes) / stored_bytes

    return Loading(
        load_s=cost.load_s,
        reload_s=None if reload is None else reload.load_s,
        stored_bytes=stored_bytes,
        loading_memory=memory(cost.loading_peak_bytes),
        generation_memory=memory(cost.generation_peak_bytes),
    )


def kernel_name(vlm: paligemma.PaliGemma) -> str:
    """Return dtype and kernels of the decoder, such as "int8 (oneDNN)"."""
    return vlm.backend


def work_of(vlm: paligemma.PaliGemma, quantize: str | None) -> Work:
    """Return the work per token; the KV cache has the dtype of the activations."""
    return Work.of(vlm.config, vlm.dtype, quantize, vlm.model.activation_dtype)


def forced_ids(vlm: paligemma.PaliGemma, count: int) -> list[int]:
    """Return `count` token ids spread over the vocabulary, without EOS tokens."""
    allowed = vlm.allowed_tokens.clone()
    allowed[list(vlm.config.eos_token_ids)] = False
    token_ids = allowed.nonzero().flatten()
    return token_ids[torch.linspace(0, len(token_ids) - 1, count).long()].tolist()


# Measurement


def measure_speed(options: SpeedOptions) -> SpeedReport:
    """Measure all implementations interleaved, then, on a CPU, the loading of each in a separate process."""
    found = checkpoint.find_checkpoint(options.source, device=options.device, dtype=options.dtype)
    report, works = _measure_interleaved(found, options)
    if report.device != "cpu":
        return report
    gc.collect()  # free the models before other processes load them
    return replace(report, loading=_measure_loading(found.folder, options, report.dtype, works))


def _measure_interleaved(
    found: checkpoint.CheckpointSource, options: SpeedOptions
) -> tuple[SpeedReport, dict[str, Work]]:
    """Measure everything except loading; also return the work of each implementation."""
    ours = [_load(found.folder, options, quantize) for quantize in _choices(options)]
    vlm = ours[0].vlm
    token_ids = forced_ids(vlm, options.tokens)
    requests = [Request(random_image(number), PROMPT) for number in range(options.rounds + 1)]
    references = load_transformers(found.folder, vlm.dtype, vlm.device) if options.against_transformers else []
    references = _warm_up(ours, references, requests[0], token_ids[:WARM_UP_TOKENS])
    peak = measure_peak(vlm.device)
    rounds = run_interleaved([*ours, *references], requests[1:], token_ids, SECOND_PROMPT)
    peak = combine_peaks(peak, measure_peak(vlm.device))
    works = {one.name: work_of(one.vlm, one.quantize) for one in ours}
    works |= {reference.name: Work.of(vlm.config, vlm.dtype) for reference in references}
    reference_times = [rounds.times[reference.name] for reference in references]
    report = SpeedReport(
        **_environment(vlm, found.name),
        kernels={one.name: kernel_name(one.vlm) for one in ours},
        peak=peak,
        speed={
            name: speed_of(times, works[name], peak, prefix_length(vlm), options.tokens)
            for name, times in rounds.times.items()
        },
        ratios={one.name: ratios_of(rounds.times[one.name], reference_times) for one in ours if reference_times},
        second_prompt={
            one.name: second_prompt_of(rounds.times[one.name], rounds.second_prompt[one.name]) for one in ours
        },
        loading={},
    )
    return report, works


def prefix_length(vlm: paligemma.PaliGemma) -> int:
    """Return the number of tokens of an image and PROMPT."""
    return vlm.processor([random_image(0)], [PROMPT])["input_ids"].shape[1]


def _environment(vlm: paligemma.PaliGemma, name: str) -> dict[str, Any]:
    """Describe model and environment."""
    return {
        "model": name,
        "parameters": sum(weight.numel() for weight in checkpoint.build_empty_model(vlm.config).parameters()),
        "dtype": checkpoint.dtype_name(vlm.dtype),
        "device": torch.cuda.get_device_name(vlm.device) if vlm.device.type == "cuda" else vlm.device.type,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "prefix_tokens": prefix_length(vlm),
    }


def _load(folder: Path, options: SpeedOptions, quantize: str | None) -> Ours:
    vlm = paligemma.load(folder, device=options.device, dtype=options.dtype, quantize=quantize)
    return Ours(_implementation_name(quantize), vlm, quantize)


def _warm_up(
    ours: Sequence[Ours], references: Sequence[Transformers], request: Request, token_ids: Sequence[int]
) -> list[Transformers]:
    """Run each implementation once; return the fastest references."""
    warmed_up: list[Implementation] = [*ours, *references[:1]]
    for implementation in warmed_up:  # the references share one model
        implementation.generate(request, token_ids)
    return fastest(references, request, token_ids) if references else []


def _measure_loading(folder: Path, options: SpeedOptions, dtype: str, works: dict[str, Work]) -> dict[str, Loading]:
    """Load each in a separate process; quantized weights twice, the second time from the quantization cache."""
    imports = process_cost.measure("ours")

    def loading(side: str, quantize: str | None = None) -> Loading:
        with TemporaryDirectory(dir=os.environ.get(process_cost.CACHE_VARIABLE)) as empty:
            arguments = (side, folder, dtype, quantize, Path(empty))
            cost = process_cost.measure(*arguments)
            reload = process_cost.measure(*arguments) if quantize else None
        work = works[_implementation_name(quantize)]
        num_tokens = process_cost.num_cached_tokens(work.config)
        return loading_of(imports, cost, reload, work.weight_bytes + num_tokens * work.cache_bytes_per_token)

    found = {_implementation_name(quantize): loading("ours", quantize) for quantize in _choices(options)}
    found["ours, not packed"] = loading("unpacked")
    return found | ({"transformers": loading("reference")} if options.against_transformers else {})


def _choices(options: SpeedOptions) -> list[str | None]:
    """Return the weight quantizations to measure."""
    return list(dict.fromkeys((None, options.quantize)))


def _implementation_name(quantize: str | None) -> str:
    return f"ours {quantize}" if quantize else "ours"
