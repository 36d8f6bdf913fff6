"""bench: a checkpoint's speed beside the machine's limits and beside transformers, its loading and its memory."""

from __future__ import annotations

import gc
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

import paligemma
from paligemma import checkpoint
from paligemma.benchmarks import process_cost
from paligemma.benchmarks.contenders import Ours, Times, Transformers, faster, load_transformers, take_turns
from paligemma.benchmarks.costs import Limits, Spread, Work, higher, measure_limits, ratios
from paligemma.benchmarks.reference import Request, random_picture

PROMPT, SECOND_PROMPT = "caption en", "caption es"
WARM_UP_TOKENS = 3


@dataclass(frozen=True)
class SpeedOptions:
    """What to measure; ValueError for fewer rounds or tokens than make a figure.

    Args:
        source: a folder, a hub id, or None for the bundled model.
        quantize: measured as well, beside the unquantized weights; None: not.
        against_transformers: whether it takes turns with transformers.
        rounds: of all contenders in turn, at least 5.
        tokens: of each answer, at least 3.
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
            raise ValueError(f"rounds is {self.rounds}; a median needs at least 5")
        if self.tokens < WARM_UP_TOKENS:
            raise ValueError(f"tokens is {self.tokens}; allowed is at least {WARM_UP_TOKENS}")


@dataclass(frozen=True)
class Speed:
    """One contender's figures.

    Attributes:
        picture_s, first_token_s, token_s: seconds, over the rounds.
        tokens_s: tokens a second behind the first.
        gb_s, gflops_s: read while decoding; computed up to the first token.
        share_of_gb_s, share_of_gflops_s: of the limits measured in the same process.
    """

    picture_s: Spread
    first_token_s: Spread
    token_s: Spread
    tokens_s: float
    gb_s: float
    share_of_gb_s: float
    gflops_s: float
    share_of_gflops_s: float


@dataclass(frozen=True)
class Ratios:
    """How many times faster one of ours is than transformers, round by round."""

    first_token: Spread
    token: Spread


@dataclass(frozen=True)
class SecondPrompt:
    """Another prompt on each picture: runs of the tower for the first and for the second one, and seconds."""

    tower_runs_before: int
    tower_runs: int
    first_token_s: Spread
    saved_s: Spread


@dataclass(frozen=True)
class Loading:
    """What loading and answering cost a process of its own.

    Attributes:
        load_s: until the model was there. again_s: the same once more, when what was prepared is found again; None
            where nothing is kept.
        kept_bytes: the weights as they are kept, and the cache.
        loading_memory, answering_memory: the highest resident size, less that of a process that only imports, in
            units of kept_bytes; None where the system does not tell.
    """

    load_s: float
    again_s: float | None
    kept_bytes: int
    loading_memory: float | None
    answering_memory: float | None


@dataclass(frozen=True)
class SpeedReport:
    """All figures of a run; the dictionaries are by contender, `loading` is empty where it was not measured.

    Attributes:
        model, parameters, dtype, device, threads, torch: what was run, and where.
        kernels: type and kernels of each of ours, in words.
        prefix_tokens: of picture and prompt.
    """

    model: str
    parameters: int
    dtype: str
    device: str
    threads: int
    torch: str
    prefix_tokens: int
    kernels: dict[str, str]
    limits: Limits
    speed: dict[str, Speed]
    ratios: dict[str, Ratios]
    second_prompt: dict[str, SecondPrompt]
    loading: dict[str, Loading]


# From times to figures --------------------------------------------------------------------------------------------


def speed_of(times: Sequence[Times], work: Work, limits: Limits, prefix_tokens: int, num_tokens: int) -> Speed:
    """The figures of one contender's rounds, of answers with `num_tokens` behind `prefix_tokens`."""
    token_s = Spread.of([time.token_s for time in times])
    first_token_s = Spread.of([time.first_token_s for time in times])
    gb_s = work.token_bytes(prefix_tokens + num_tokens // 2) / token_s.median / 1e9
    gflops_s = work.first_token_operations(prefix_tokens) / first_token_s.median / 1e9
    return Speed(
        picture_s=Spread.of([time.picture_s for time in times]),
        first_token_s=first_token_s,
        token_s=token_s,
        tokens_s=1 / token_s.median,
        gb_s=gb_s,
        share_of_gb_s=gb_s / limits.gb_s,
        gflops_s=gflops_s,
        share_of_gflops_s=gflops_s / limits.best_gflops_s,
    )


def ratios_of(ours: Sequence[Times], opponents: Sequence[Sequence[Times]]) -> Ratios:
    """Against whichever opponent has the lower median, for the first token and for a token each."""

    def against_the_faster(measure: str) -> Spread:
        theirs = [[getattr(time, measure) for time in times] for times in opponents]
        fastest = min(theirs, key=lambda values: Spread.of(values).median)
        return ratios([getattr(time, measure) for time in ours], fastest)

    return Ratios(against_the_faster("first_token_s"), against_the_faster("token_s"))


def second_prompt_of(before: Sequence[Times], again: Sequence[Times]) -> SecondPrompt:
    """What a second prompt on the same pictures, round by round, saves."""
    return SecondPrompt(
        sum(time.tower_runs for time in before),
        sum(time.tower_runs for time in again),
        Spread.of([time.first_token_s for time in again]),
        Spread.of([old.first_token_s - new.first_token_s for old, new in zip(before, again, strict=True)]),
    )


def loading_of(
    imports: process_cost.Cost, cost: process_cost.Cost, again: process_cost.Cost | None, kept_bytes: int
) -> Loading:
    """From a process that only imported, one that loaded and answered, and a second one of these."""

    def memory(peak: int | None) -> float | None:
        return None if peak is None or imports.peak_bytes is None else (peak - imports.peak_bytes) / kept_bytes

    return Loading(
        load_s=cost.load_s,
        again_s=None if again is None else again.load_s,
        kept_bytes=kept_bytes,
        loading_memory=memory(cost.loading_peak_bytes),
        answering_memory=memory(cost.answering_peak_bytes),
    )


def kernels_of(vlm: paligemma.PaliGemma) -> str:
    """What computes the decoder, such as "int8 (oneDNN)"."""
    return getattr(vlm, "backend", None) or _name(vlm.dtype)


def work_of(vlm: paligemma.PaliGemma, quantize: str | None) -> Work:
    """The work of one of ours, whose keys and values may be kept in another type than the weights."""
    return Work.of(vlm.config, vlm.dtype, quantize, getattr(vlm.model, "activation_dtype", None))


def forced_ids(vlm: paligemma.PaliGemma, count: int) -> list[int]:
    """Ids spread over the vocabulary, none of which ends an answer."""
    allowed = vlm.allowed_tokens.clone()
    allowed[list(vlm.config.eos_token_ids)] = False
    token_ids = allowed.nonzero().flatten()
    return token_ids[torch.linspace(0, len(token_ids) - 1, count).long()].tolist()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# The run ----------------------------------------------------------------------------------------------------------


def measure_speed(options: SpeedOptions) -> SpeedReport:
    """Let all contenders take turns, then load each in a process of its own, when these here are gone."""
    found = checkpoint.find_checkpoint(options.source, device=options.device, dtype=options.dtype)
    report, works = _measure_in_turns(found, options)
    if report.device != "cpu":
        return report
    gc.collect()
    return replace(report, loading=_measure_loading(found.folder, options, report.dtype, works))


def _measure_in_turns(found: checkpoint.CheckpointSource, options: SpeedOptions) -> tuple[SpeedReport, dict[str, Work]]:
    """All but loading; and the work of each contender by its name."""
    ours = [_load(found.folder, options, quantize) for quantize in _choices(options)]
    vlm = ours[0].vlm
    token_ids = forced_ids(vlm, options.tokens)
    requests = [Request(random_picture(number), PROMPT) for number in range(options.rounds + 1)]
    opponents = load_transformers(found.folder, vlm.dtype, vlm.device) if options.against_transformers else []
    opponents = _warm_up(ours, opponents, requests[0], token_ids[:WARM_UP_TOKENS])
    limits = measure_limits(vlm.device)
    rounds = take_turns([*ours, *opponents], requests[1:], token_ids, SECOND_PROMPT)
    limits = higher(limits, measure_limits(vlm.device))
    works = {one.name: work_of(one.vlm, one.quantize) for one in ours}
    works |= {one.name: Work.of(vlm.config, vlm.dtype) for one in opponents}
    theirs = [rounds.times[one.name] for one in opponents]
    report = SpeedReport(
        **_setting(vlm, found.name),
        kernels={one.name: kernels_of(one.vlm) for one in ours},
        limits=limits,
        speed={
            name: speed_of(times, works[name], limits, prefix_length(vlm), options.tokens)
            for name, times in rounds.times.items()
        },
        ratios={one.name: ratios_of(rounds.times[one.name], theirs) for one in ours if theirs},
        second_prompt={
            one.name: second_prompt_of(rounds.times[one.name], rounds.second_prompt[one.name]) for one in ours
        },
        loading={},
    )
    return report, works


def prefix_length(vlm: paligemma.PaliGemma) -> int:
    """Tokens of a picture and PROMPT."""
    return vlm.processor([random_picture(0)], [PROMPT])["input_ids"].shape[1]


def _setting(vlm: paligemma.PaliGemma, name: str) -> dict[str, str | int]:
    """What runs, and where."""
    return {
        "model": name,
        "parameters": sum(weight.numel() for weight in checkpoint.build_empty_model(vlm.config).parameters()),
        "dtype": _name(vlm.dtype),
        "device": torch.cuda.get_device_name(vlm.device) if vlm.device.type == "cuda" else vlm.device.type,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "prefix_tokens": prefix_length(vlm),
    }


def _load(folder: Path, options: SpeedOptions, quantize: str | None) -> Ours:
    vlm = paligemma.load(folder, device=options.device, dtype=options.dtype, quantize=quantize)
    return Ours(_contender_name(quantize), vlm, quantize)


def _warm_up(
    ours: Sequence[Ours], opponents: Sequence[Transformers], request: Request, token_ids: Sequence[int]
) -> list[Transformers]:
    """Let everyone answer once, uncounted; return the opponents that are the fastest in something."""
    for contender in [*ours, *opponents[:1]]:  # the opponents share one model
        contender.answer(request, token_ids)
    return faster(opponents, request, token_ids) if opponents else []


def _measure_loading(folder: Path, options: SpeedOptions, dtype: str, works: dict[str, Work]) -> dict[str, Loading]:
    """Each in a fresh process; quantized weights twice, since the first time keeps them for the next."""
    imports = process_cost.measure("ours")

    def loading(side: str, quantize: str | None = None) -> Loading:
        with TemporaryDirectory(dir=os.environ.get(process_cost.CACHE_VARIABLE)) as empty:
            arguments = (side, folder, dtype, quantize, Path(empty))
            cost = process_cost.measure(*arguments)
            again = process_cost.measure(*arguments) if quantize else None
        work = works[_contender_name(quantize)]
        num_tokens = process_cost.num_cached_tokens(work.config)
        return loading_of(imports, cost, again, work.weight_bytes + num_tokens * work.cache_bytes_a_token)

    found = {_contender_name(quantize): loading("ours", quantize) for quantize in _choices(options)}
    found["ours, nothing prepared"] = loading("unprepared")
    return found | ({"transformers": loading("reference")} if options.against_transformers else {})


def _choices(options: SpeedOptions) -> list[str | None]:
    """How the weights of each of ours are kept."""
    return list(dict.fromkeys((None, options.quantize)))


def _contender_name(quantize: str | None) -> str:
    return f"ours {quantize}" if quantize else "ours"
