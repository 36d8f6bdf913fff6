"""Speed and accuracy benchmarks: their arithmetic, and end-to-end runs on small models without timing assertions."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from reference_models import reference_model
from tiny_models import tiny_config
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import paligemma
from paligemma.benchmarks import accuracy, costs, curve, process_cost, speed
from paligemma.benchmarks.accuracy import CAPTIONS, count_agreeing, is_close, kl_divergence, object_names
from paligemma.benchmarks.costs import PeakRates, Spread, Work, combine_peaks, ratios
from paligemma.benchmarks.full_size import SIZES, write_checkpoint
from paligemma.benchmarks.implementations import Times, fastest
from paligemma.benchmarks.measure import (
    SpeedOptions,
    forced_ids,
    loading_of,
    ratios_of,
    second_prompt_of,
    speed_of,
)
from paligemma.benchmarks.process_cost import Cost
from paligemma.benchmarks.random_checkpoints import GEMMA1, VISION, Case, make_config, save_layout
from paligemma.benchmarks.reference import Request
from paligemma.kv_cache import KVCache

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
SMALL = Case(dict(GEMMA1), dict(VISION), image_size=224)
PEAK = PeakRates(20.0, {"bfloat16": 300.0, "float16": 200.0, "float32": 100.0})


@pytest.fixture
def small_peak_workload(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "MATRIX_SIDES", {"cpu": 32})
    monkeypatch.setattr(costs, "READ_BYTES", 1_000_000)


def times(first_token_s: float, token_s: float = 0.1, tower_runs: int = 1) -> Times:
    return Times(0.5, first_token_s, token_s, tower_runs)


# Arithmetic -------------------------------------------------------------------------------------------------------


def test_spread_is_median_minimum_and_maximum():
    assert Spread.of([3.0, 1.0, 2.0, 9.0, 2.5]) == Spread(2.5, 1.0, 9.0, 5)
    assert Spread.of([0.1234, 0.2]).text(1, 1000) == "161.7 (123.4–200.0)"
    with pytest.raises(ValueError, match="at least one measurement"):
        Spread.of([])


def test_ratios_are_computed_per_round():
    assert ratios([1.0, 2.0, 4.0], [2.0, 6.0, 4.0]) == Spread(2.0, 1.0, 3.0, 3)
    slow, fast = [times(9.0, 0.9)] * 3, [times(8.0, 1.2)] * 3
    found = ratios_of([times(4.0, 0.3)] * 3, [slow, fast])
    assert (found.first_token.median, found.token.median) == (2.0, pytest.approx(3.0))


def test_peak_rates_are_the_maximum_of_two_measurements():
    both = combine_peaks(PEAK, PeakRates(30.0, {"bfloat16": 100.0, "float16": 250.0, "float32": 90.0}))
    assert both == PeakRates(30.0, {"bfloat16": 300.0, "float16": 250.0, "float32": 100.0})
    assert both.peak_gflops_s == 300.0


def test_work_counts_weights_keys_and_values():
    config = tiny_config("paligemma2")
    model = paligemma.PaliGemmaForConditionalGeneration(config)
    work = Work.of(config, torch.bfloat16)
    assert work.weight_bytes == 2 * sum(weight.numel() for weight in model.parameters())
    assert work.decoder_bytes == 2 * sum(weight.numel() for weight in model.language_model.parameters())
    assert work.cache_bytes_per_token * 10 == KVCache(config, 1, 10, torch.bfloat16, "cpu").num_bytes
    assert work.bytes_per_token(10) - work.bytes_per_token(0) == 10 * work.cache_bytes_per_token
    wider = Work.of(config, torch.bfloat16, cache_dtype=torch.float32)
    assert wider.cache_bytes_per_token == 2 * work.cache_bytes_per_token


def test_int8_work_is_one_byte_per_weight_and_one_scale_per_channel():
    config = tiny_config("paligemma1")
    decoder = paligemma.PaliGemmaForConditionalGeneration(config).language_model
    matrices = [weight for weight in decoder.parameters() if weight.dim() == 2]
    vectors = sum(weight.numel() for weight in decoder.parameters() if weight.dim() == 1)
    expected = sum(weight.numel() + 4 * weight.shape[0] for weight in matrices) + 2 * vectors
    assert Work.of(config, torch.bfloat16, "int8").decoder_bytes == expected


def test_prefill_flops_match_torch_flop_counter():
    config = tiny_config("paligemma1")
    model = paligemma.PaliGemmaForConditionalGeneration(config)
    num_image = config.vision_config.num_image_tokens
    input_ids = torch.tensor([[config.image_token_index] * num_image + [2, 7, 8]])
    pixels = torch.zeros(1, 3, config.vision_config.image_size, config.vision_config.image_size)
    # FlopCounterMode does not count fused CPU attention.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.inference_mode():
        model(input_ids, pixels, logits_to_keep=1)
    assert Work.of(config, torch.float32).prefill_flops(input_ids.shape[1]) == counter.get_total_flops()


def test_speed_divides_work_by_median_times():
    work = Work.of(tiny_config("paligemma1"), torch.float32)
    speed = speed_of([times(2.0, 0.1), times(1.0, 0.4), times(3.0, 0.2)], work, PEAK, 20, 8)
    assert speed.token_s == Spread(0.2, 0.1, 0.4, 3)
    assert speed.tokens_s == 5.0
    assert speed.gb_s == pytest.approx(work.bytes_per_token(24) / 0.2 / 1e9)
    assert speed.gb_s_share == pytest.approx(speed.gb_s / 20)
    assert speed.gflops_s == pytest.approx(work.prefill_flops(20) / 2.0 / 1e9)
    assert speed.gflops_s_share == pytest.approx(speed.gflops_s / 300)


def test_memory_is_relative_to_stored_bytes_and_excludes_imports():
    imports, cost = Cost(0, 0, 300, 300), Cost(2.0, 1.0, 1300, 900)
    loading = loading_of(imports, cost, replace(cost, load_s=0.5), stored_bytes=500)
    assert (loading.load_s, loading.reload_s) == (2.0, 0.5)
    assert (loading.loading_memory, loading.generation_memory) == (2.0, 1.2)
    unknown = Cost(2.0, 1.0, None, None)
    assert loading_of(unknown, unknown, None, stored_bytes=500).loading_memory is None


def test_second_prompt_is_compared_with_the_first_on_the_same_image():
    first = [times(3.0), times(4.0), times(5.0)]
    found = second_prompt_of(first, [times(2.0, tower_runs=0), times(3.5, tower_runs=0), times(2.0, tower_runs=0)])
    assert (found.tower_runs_before, found.tower_runs) == (3, 0)
    assert (found.first_token_s.median, found.saved_s) == (2.0, Spread(1.0, 0.5, 3.0, 3))


class FixedTimes:
    """An implementation with given times."""

    quantize = None

    def __init__(self, first_token_s: float, token_s: float) -> None:
        self.times = times(first_token_s, token_s)

    def generate(self, request: object, token_ids: object) -> Times:
        return self.times


def test_fastest_selects_by_first_token_and_by_token():
    one, other, slow = FixedTimes(1.0, 0.4), FixedTimes(2.0, 0.2), FixedTimes(3.0, 0.5)
    assert fastest([slow, one, other], None, ()) == [one, other]
    assert fastest([slow, FixedTimes(3.0, 0.6)], None, ()) == [slow]


@pytest.mark.parametrize("changes", [{"rounds": 4}, {"tokens": 2}])
def test_too_few_rounds_or_tokens_are_rejected(changes):
    with pytest.raises(ValueError, match=f"{next(iter(changes))} must be"):
        SpeedOptions(**changes)


def test_user_cache_is_redirected_and_restored(tmp_path, monkeypatch):
    for before in ("elsewhere", None):
        monkeypatch.setenv("XDG_CACHE_HOME", "elsewhere")
        if before is None:
            monkeypatch.delenv("XDG_CACHE_HOME")
        with process_cost.user_cache_in(tmp_path):
            assert os.environ["XDG_CACHE_HOME"] == str(tmp_path)
        assert os.environ.get("XDG_CACHE_HOME") == before


# Accuracy ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("token", "other", "expected"),
    [
        ("cat", "cat", True),
        ("cat", "dog", False),
        ("<loc0100>", "<loc0104>", True),
        ("<loc0100>", "<loc0105>", False),
        ("<seg003>", "<seg000>", True),
        ("<seg003>", "<loc0003>", False),
        ("<loc0100>", "cat", False),
    ],
)
def test_tokens_agree_if_equal_or_within_four_bins(token, other, expected):
    assert is_close(token, other) is expected


def test_kl_divergence_in_nats():
    p, q = torch.tensor([[0.5, 0.5], [0.9, 0.1]]).double(), torch.tensor([[0.25, 0.75], [0.9, 0.1]]).double()
    expected = 0.5 * torch.tensor(2.0).log() + 0.5 * torch.tensor(2 / 3).log()
    assert kl_divergence(p.log() + 3, q.log()).tolist() == pytest.approx([expected.item(), 0.0], abs=1e-7)


def test_agreement_is_counted_per_position():
    vlm = paligemma.load(device="cpu", dtype="float32")
    token_ids = vlm.allowed_tokens.nonzero().flatten().tolist()
    names = [vlm.processor.token_str(token_id) for token_id in token_ids]
    logits, other = torch.zeros(3, len(names)), torch.zeros(3, len(names))
    for position, (first, second) in enumerate([("<loc0010>", "<loc0013>"), ("\n", "\n"), ("<loc0010>", "<seg010>")]):
        logits[position, names.index(first)] = 1
        other[position, names.index(second)] = 1
    assert count_agreeing(logits, other, vlm) == 2


def test_object_names_are_singular_nouns_of_the_caption():
    assert object_names("a cat, two dogs and an owl") == ["cat", "owl"]
    assert object_names("a teddy bear") == ["teddy bear"]
    assert object_names("three cats") == []


def test_bfloat16_is_compared_along_float32_answers():
    exact = paligemma.load(device="cpu", dtype="float32")
    requests = [Request(Image.open(accuracy.EXAMPLES / "garden.png"), prompt) for prompt in CAPTIONS]
    same = accuracy.forced(exact, exact, requests)
    assert (same.answers, same.agreement, same.divergence) == (3, 1.0, 0.0) and same.positions > 3
    lower = accuracy.forced(exact, paligemma.load(device="cpu", dtype="bfloat16"), requests)
    assert lower.positions == same.positions and lower.agreement > 0.9 and 0 < lower.divergence < 0.1


# From end to end --------------------------------------------------------------------------------------------------


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure loading in this process instead of a separate one."""

    def measure(
        side: str, folder: Path | None = None, dtype: str = "auto", quantize: str | None = None, *cache_folder: Path
    ) -> Cost:
        if folder is None:
            return Cost(0.0, 0.0, 0, 0)
        loaders = {
            "ours": lambda: process_cost.load_ours(folder, dtype, quantize),
            "unpacked": lambda: process_cost.load_unpacked(folder, dtype),
            "reference": lambda: process_cost.load_transformers(folder, dtype),
        }
        return process_cost.load_and_answer(loaders[side])

    monkeypatch.setattr(process_cost, "measure", measure)


def last_line(capsys: pytest.CaptureFixture[str]) -> tuple[str, dict]:
    text = capsys.readouterr().out
    return text, json.loads(text.splitlines()[-1])


@pytest.mark.parametrize("side", ["ours", "unpacked"])
def test_process_cost_is_printed_as_json(side, tiny_checkpoint, capsys):
    process_cost.main([side])
    imports = Cost(**json.loads(capsys.readouterr().out))
    process_cost.main([side, "--folder", str(tiny_checkpoint), "--dtype", "bfloat16"])
    cost = Cost(**json.loads(capsys.readouterr().out))
    assert imports.load_s == imports.answer_s == 0 < cost.answer_s
    assert (cost.peak_bytes is None) == (not process_cost.STATUS.exists())


def test_speed_of_the_bundled_model(small_peak_workload, in_this_process, capsys):
    speed.main(["--device", "cpu", "--tokens", "3"])
    text, report = last_line(capsys)
    measured = report["speed"]
    assert text.startswith("Prefill")
    assert set(measured["speed"]) == set(measured["kernels"]) == {"ours"}
    assert measured["ratios"] == {}
    figures = measured["speed"]["ours"]
    assert figures["token_s"]["count"] == figures["first_token_s"]["count"] == figures["image_s"]["count"] == 5
    work = Work.of(paligemma.load(device="cpu").config, torch.bfloat16)
    read = work.bytes_per_token(measured["prefix_tokens"] + 1)
    assert figures["gb_s"] == pytest.approx(read / figures["token_s"]["median"] / 1e9)
    assert figures["tokens_s"] == pytest.approx(1 / figures["token_s"]["median"])
    assert measured["second_prompt"]["ours"]["tower_runs_before"] == 5
    assert measured["loading"]["ours"]["stored_bytes"] > work.weight_bytes
    for label in ("image s", "first token s", "tokens/s", "GB/s", "% of peak", "second prompt", "while loading"):
        assert label in text


def test_speed_compared_with_transformers(tmp_path, small_peak_workload, in_this_process, capsys):
    folder = save_layout(reference_model("paligemma1"), tmp_path / "checkpoint")
    flags = ["--device", "cpu", "--dtype", "bfloat16", "--quantize", "int8", "--against", "transformers"]
    speed.main([str(folder), *flags, "--tokens", "3"])
    text, report = last_line(capsys)
    measured = report["speed"]
    ours, quantized, *references = measured["speed"]
    assert (
        (ours, quantized) == ("ours", "ours int8")
        and set(references) <= {"transformers eager", "transformers sdpa"}
        and references
    )
    assert set(measured["ratios"]) == {"ours", "ours int8"}
    assert set(measured["ratios"]["ours"]) == {"first_token", "token"}
    assert [found["tower_runs"] for found in measured["second_prompt"].values()] == [0, 0]
    assert measured["ratios"]["ours"]["token"]["count"] == 5
    assert set(measured["loading"]) == {"ours", "ours int8", "ours, not packed", "transformers"}
    assert "vs transformers" in text


def test_random_checkpoint_of_a_size_is_measured_and_removed(
    tmp_path, monkeypatch, small_peak_workload, in_this_process, capsys
):
    monkeypatch.setitem(SIZES, "ninth", SMALL)
    speed.main(["--size", "ninth", "--device", "cpu", "--tokens", "3", "--work-dir", str(tmp_path)])
    assert last_line(capsys)[1]["speed"]["prefix_tokens"] > 256
    assert list(tmp_path.iterdir()) == []


def test_curves_are_measured_plotted_and_printed(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(SIZES, "ninth", SMALL)
    monkeypatch.setattr(curve, "ROUNDS", 1)
    monkeypatch.setattr(curve, "CONTEXTS", (280, 320))
    monkeypatch.setattr(curve, "RESOLUTIONS", (224, 280))
    speed.main(["--curve", str(tmp_path / "curve.png")])
    text, report = last_line(capsys)
    tokens, first_tokens = report["curve"]["tokens"], report["curve"]["first_tokens"]
    assert [point["at"] for point in tokens] == [280, 320]
    assert [point["at"] for point in first_tokens] == [224, 280]
    assert tokens[0]["expected"] == pytest.approx(tokens[0]["seconds"]["median"])
    work = Work.of(paligemma.PaliGemmaConfig.from_dict(make_config(SMALL).to_dict()), torch.bfloat16)
    growth = work.bytes_per_token(320) / work.bytes_per_token(280)
    assert tokens[1]["expected"] == pytest.approx(tokens[0]["expected"] * growth)
    assert "context   320 tokens" in text and "image side 280 pixels" in text
    with Image.open(tmp_path / "curve.png") as image:
        assert image.width == 900


def test_source_and_size_are_mutually_exclusive(capsys):
    with pytest.raises(SystemExit):
        speed.main(["somewhere", "--size", "ninth"])
    assert "mutually exclusive" in capsys.readouterr().err


def test_forced_ids_contain_no_end_token():
    vlm = paligemma.load(device="cpu")
    token_ids = forced_ids(vlm, 50)
    assert len(set(token_ids)) == 50 and not set(token_ids) & set(vlm.config.eos_token_ids)
    assert vlm.allowed_tokens[token_ids].all()


def test_ninth_has_a_ninth_of_the_work():
    whole, ninth = (
        Work.of(paligemma.PaliGemmaConfig.from_dict(make_config(SIZES[size]).to_dict()), torch.bfloat16)
        for size in ("paligemma-3b", "ninth")
    )
    assert whole.decoder_bytes / ninth.decoder_bytes == pytest.approx(9, rel=0.01)
    assert whole.prefill_flops(260) / ninth.prefill_flops(260) == pytest.approx(9, rel=0.02)


def test_tokenizer_filler_extends_the_allowed_tokens(tmp_path):
    case = replace(SMALL, image_token_id=4096, vocab_size=4160)
    write_checkpoint(tmp_path / "checkpoint", case)
    vlm = paligemma.load(tmp_path / "checkpoint", device="cpu")
    assert vlm.config.image_token_index == 4096
    assert int(vlm.allowed_tokens.sum()) == 4096 and not vlm.allowed_tokens[4096:].any()
