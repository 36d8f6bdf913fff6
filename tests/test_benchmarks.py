"""The bench: its arithmetic on known numbers, and the script from end to end on small models. No clock is judged."""

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
from paligemma.benchmarks.accuracy import CAPTIONS, count_agreeing, divergence, is_close, things
from paligemma.benchmarks.contenders import Times, faster
from paligemma.benchmarks.costs import Limits, Spread, Work, higher, ratios
from paligemma.benchmarks.full_size import SIZES, write_checkpoint
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
LIMITS = Limits(20.0, {"bfloat16": 300.0, "float16": 200.0, "float32": 100.0})


@pytest.fixture
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "MATRIX_SIDES", {"cpu": 32})
    monkeypatch.setattr(costs, "READ_BYTES", 1_000_000)


def times(first_token_s: float, token_s: float = 0.1, tower_runs: int = 1) -> Times:
    return Times(0.5, first_token_s, token_s, tower_runs)


# Arithmetic -------------------------------------------------------------------------------------------------------


def test_a_spread_is_the_median_and_the_ends():
    assert Spread.of([3.0, 1.0, 2.0, 9.0, 2.5]) == Spread(2.5, 1.0, 9.0, 5)
    assert Spread.of([0.1234, 0.2]).text(1, 1000) == "161.7 (123.4–200.0)"
    with pytest.raises(ValueError, match="at least one"):
        Spread.of([])


def test_ratios_are_taken_round_by_round():
    assert ratios([1.0, 2.0, 4.0], [2.0, 6.0, 4.0]) == Spread(2.0, 1.0, 3.0, 3)
    slow, fast = [times(9.0, 0.9)] * 3, [times(8.0, 1.2)] * 3
    found = ratios_of([times(4.0, 0.3)] * 3, [slow, fast])
    assert (found.first_token.median, found.token.median) == (2.0, pytest.approx(3.0))


def test_the_limits_are_the_higher_of_both_measurements_and_the_fastest_type_counts():
    both = higher(LIMITS, Limits(30.0, {"bfloat16": 100.0, "float16": 250.0, "float32": 90.0}))
    assert both == Limits(30.0, {"bfloat16": 300.0, "float16": 250.0, "float32": 100.0})
    assert both.best_gflops_s == 300.0


def test_the_work_counts_each_weight_key_and_value():
    config = tiny_config("paligemma2")
    model = paligemma.PaliGemmaForConditionalGeneration(config)
    work = Work.of(config, torch.bfloat16)
    assert work.weight_bytes == 2 * sum(weight.numel() for weight in model.parameters())
    assert work.decoder_bytes == 2 * sum(weight.numel() for weight in model.language_model.parameters())
    assert work.cache_bytes_a_token * 10 == KVCache(config, 1, 10, torch.bfloat16, "cpu").num_bytes
    assert work.token_bytes(10) - work.token_bytes(0) == 10 * work.cache_bytes_a_token
    wider = Work.of(config, torch.bfloat16, cache_dtype=torch.float32)
    assert wider.cache_bytes_a_token == 2 * work.cache_bytes_a_token


def test_int8_takes_a_byte_a_weight_and_a_scale_a_channel():
    config = tiny_config("paligemma1")
    decoder = paligemma.PaliGemmaForConditionalGeneration(config).language_model
    matrices = [weight for weight in decoder.parameters() if weight.dim() == 2]
    vectors = sum(weight.numel() for weight in decoder.parameters() if weight.dim() == 1)
    expected = sum(weight.numel() + 4 * weight.shape[0] for weight in matrices) + 2 * vectors
    assert Work.of(config, torch.bfloat16, "int8").decoder_bytes == expected


def test_operations_are_those_that_torch_counts():
    config = tiny_config("paligemma1")
    model = paligemma.PaliGemmaForConditionalGeneration(config)
    num_image = config.vision_config.num_image_tokens
    input_ids = torch.tensor([[config.image_token_index] * num_image + [2, 7, 8]])
    pixels = torch.zeros(1, 3, config.vision_config.image_size, config.vision_config.image_size)
    # The counter does not see into the fused attention of a CPU.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.inference_mode():
        model(input_ids, pixels, logits_to_keep=1)
    assert Work.of(config, torch.float32).first_token_operations(input_ids.shape[1]) == counter.get_total_flops()


def test_a_speed_is_bytes_and_operations_over_the_median_times():
    work = Work.of(tiny_config("paligemma1"), torch.float32)
    speed = speed_of([times(2.0, 0.1), times(1.0, 0.4), times(3.0, 0.2)], work, LIMITS, 20, 8)
    assert speed.token_s == Spread(0.2, 0.1, 0.4, 3)
    assert speed.tokens_s == 5.0
    assert speed.gb_s == pytest.approx(work.token_bytes(24) / 0.2 / 1e9)
    assert speed.share_of_gb_s == pytest.approx(speed.gb_s / 20)
    assert speed.gflops_s == pytest.approx(work.first_token_operations(20) / 2.0 / 1e9)
    assert speed.share_of_gflops_s == pytest.approx(speed.gflops_s / 300)


def test_memory_is_what_goes_beyond_the_imports_in_units_of_what_is_kept():
    imports, cost = Cost(0, 0, 300, 300), Cost(2.0, 1.0, 1300, 900)
    loading = loading_of(imports, cost, replace(cost, load_s=0.5), kept_bytes=500)
    assert (loading.load_s, loading.again_s) == (2.0, 0.5)
    assert (loading.loading_memory, loading.answering_memory) == (2.0, 1.2)
    unknown = Cost(2.0, 1.0, None, None)
    assert loading_of(unknown, unknown, None, kept_bytes=500).loading_memory is None


def test_a_second_prompt_is_compared_with_the_first_on_the_same_picture():
    before = [times(3.0), times(4.0), times(5.0)]
    found = second_prompt_of(before, [times(2.0, tower_runs=0), times(3.5, tower_runs=0), times(2.0, tower_runs=0)])
    assert (found.tower_runs_before, found.tower_runs) == (3, 0)
    assert (found.first_token_s.median, found.saved_s) == (2.0, Spread(1.0, 0.5, 3.0, 3))


class Paced:
    """A contender whose times are given."""

    quantize = None

    def __init__(self, first_token_s: float, token_s: float) -> None:
        self.times = times(first_token_s, token_s)

    def answer(self, request: object, token_ids: object) -> Times:
        return self.times


def test_an_opponent_stays_if_it_is_the_fastest_in_something():
    one, other, slow = Paced(1.0, 0.4), Paced(2.0, 0.2), Paced(3.0, 0.5)
    assert faster([slow, one, other], None, ()) == [one, other]
    assert faster([slow, Paced(3.0, 0.6)], None, ()) == [slow]


@pytest.mark.parametrize("changes", [{"rounds": 4}, {"tokens": 2}])
def test_too_few_rounds_or_tokens_are_refused(changes):
    with pytest.raises(ValueError, match=f"{next(iter(changes))} is"):
        SpeedOptions(**changes)


def test_what_is_kept_goes_to_another_folder_for_a_while(tmp_path, monkeypatch):
    for before in ("elsewhere", None):
        monkeypatch.setenv("XDG_CACHE_HOME", "elsewhere")
        if before is None:
            monkeypatch.delenv("XDG_CACHE_HOME")
        with process_cost.kept_in(tmp_path):
            assert os.environ["XDG_CACHE_HOME"] == str(tmp_path)
        assert os.environ.get("XDG_CACHE_HOME") == before


# Accuracy ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("piece", "other", "expected"),
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
def test_pieces_agree_when_equal_or_few_bins_apart(piece, other, expected):
    assert is_close(piece, other) is expected


def test_divergence_is_kullback_and_leiblers():
    p, q = torch.tensor([[0.5, 0.5], [0.9, 0.1]]).double(), torch.tensor([[0.25, 0.75], [0.9, 0.1]]).double()
    expected = 0.5 * torch.tensor(2.0).log() + 0.5 * torch.tensor(2 / 3).log()
    assert divergence(p.log() + 3, q.log()).tolist() == pytest.approx([expected.item(), 0.0], abs=1e-7)


def test_agreement_is_counted_by_position():
    vlm = paligemma.load(device="cpu", dtype="float32")
    token_ids = vlm.allowed_tokens.nonzero().flatten().tolist()
    names = [vlm.processor.token_str(token_id) for token_id in token_ids]
    rows, other = torch.zeros(3, len(names)), torch.zeros(3, len(names))
    for position, (first, second) in enumerate([("<loc0010>", "<loc0013>"), ("\n", "\n"), ("<loc0010>", "<seg010>")]):
        rows[position, names.index(first)] = 1
        other[position, names.index(second)] = 1
    assert count_agreeing(rows, other, vlm) == 2


def test_a_caption_s_things_are_asked_for():
    assert things("a cat, two dogs and an owl") == ["cat", "owl"]
    assert things("a teddy bear") == ["teddy bear"]
    assert things("three cats") == []


def test_what_float32_answers_is_forced_upon_a_lower_type():
    exact = paligemma.load(device="cpu", dtype="float32")
    requests = [Request(Image.open(accuracy.EXAMPLES / "garden.png"), prompt) for prompt in CAPTIONS]
    same = accuracy.forced(exact, exact, requests)
    assert (same.answers, same.agreement, same.divergence) == (3, 1.0, 0.0) and same.positions > 3
    lower = accuracy.forced(exact, paligemma.load(device="cpu", dtype="bfloat16"), requests)
    assert lower.positions == same.positions and lower.agreement > 0.9 and 0 < lower.divergence < 0.1


# From end to end --------------------------------------------------------------------------------------------------


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading is measured here instead of in processes that import everything anew."""

    def measure(
        side: str, folder: Path | None = None, dtype: str = "auto", quantize: str | None = None, *cache_folder: Path
    ) -> Cost:
        if folder is None:
            return Cost(0.0, 0.0, 0, 0)
        loaders = {
            "ours": lambda: process_cost.load_ours(folder, dtype, quantize),
            "unprepared": lambda: process_cost.load_unprepared(folder, dtype),
            "reference": lambda: process_cost.load_transformers(folder, dtype),
        }
        return process_cost.load_and_answer(loaders[side])

    monkeypatch.setattr(process_cost, "measure", measure)


def last_line(capsys: pytest.CaptureFixture[str]) -> tuple[str, dict]:
    text = capsys.readouterr().out
    return text, json.loads(text.splitlines()[-1])


@pytest.mark.parametrize("side", ["ours", "unprepared"])
def test_a_process_tells_what_it_cost(side, tiny_checkpoint, capsys):
    process_cost.main([side])
    imports = Cost(**json.loads(capsys.readouterr().out))
    process_cost.main([side, "--folder", str(tiny_checkpoint), "--dtype", "bfloat16"])
    cost = Cost(**json.loads(capsys.readouterr().out))
    assert imports.load_s == imports.answer_s == 0 < cost.answer_s
    assert (cost.peak_bytes is None) == (not process_cost.STATUS.exists())


def test_the_bundled_model_beside_the_limits(small_limits, in_this_process, capsys):
    speed.main(["--device", "cpu", "--tokens", "3"])
    text, report = last_line(capsys)
    measured = report["speed"]
    assert text.startswith("Two regimes.")
    assert set(measured["speed"]) == set(measured["kernels"]) == {"ours"}
    assert measured["ratios"] == {}
    figures = measured["speed"]["ours"]
    assert figures["token_s"]["count"] == figures["first_token_s"]["count"] == figures["picture_s"]["count"] == 5
    work = Work.of(paligemma.load(device="cpu").config, torch.bfloat16)
    read = work.token_bytes(measured["prefix_tokens"] + 1)
    assert figures["gb_s"] == pytest.approx(read / figures["token_s"]["median"] / 1e9)
    assert figures["tokens_s"] == pytest.approx(1 / figures["token_s"]["median"])
    assert measured["second_prompt"]["ours"]["tower_runs_before"] == 5
    assert measured["loading"]["ours"]["kept_bytes"] > work.weight_bytes
    for words in ("picture s", "first token s", "tokens/s", "GB/s", "of limit", "second prompt", "while loading"):
        assert words in text


def test_in_turns_with_transformers(tmp_path, small_limits, in_this_process, capsys):
    folder = save_layout(reference_model("paligemma1"), tmp_path / "checkpoint")
    flags = ["--device", "cpu", "--dtype", "bfloat16", "--quantize", "int8", "--against", "transformers"]
    speed.main([str(folder), *flags, "--tokens", "3"])
    text, report = last_line(capsys)
    measured = report["speed"]
    ours, quantized, *opponents = measured["speed"]
    assert (
        (ours, quantized) == ("ours", "ours int8")
        and set(opponents) <= {"transformers eager", "transformers sdpa"}
        and opponents
    )
    assert set(measured["ratios"]) == {"ours", "ours int8"}
    assert set(measured["ratios"]["ours"]) == {"first_token", "token"}
    assert [found["tower_runs"] for found in measured["second_prompt"].values()] == [0, 0]
    assert measured["ratios"]["ours"]["token"]["count"] == 5
    assert set(measured["loading"]) == {"ours", "ours int8", "ours, nothing prepared", "transformers"}
    assert "x as fast as transformers" in text


def test_a_size_is_written_measured_and_removed(tmp_path, monkeypatch, small_limits, in_this_process, capsys):
    monkeypatch.setitem(SIZES, "ninth", SMALL)
    speed.main(["--size", "ninth", "--device", "cpu", "--tokens", "3", "--work-dir", str(tmp_path)])
    assert last_line(capsys)[1]["speed"]["prefix_tokens"] > 256
    assert list(tmp_path.iterdir()) == []


def test_the_curves_are_measured_drawn_and_told(tmp_path, monkeypatch, capsys):
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
    growth = work.token_bytes(320) / work.token_bytes(280)
    assert tokens[1]["expected"] == pytest.approx(tokens[0]["expected"] * growth)
    assert "behind   320 tokens" in text and "at 280 pixels" in text
    with Image.open(tmp_path / "curve.png") as image:
        assert image.width == 900


def test_a_source_and_a_size_exclude_each_other(capsys):
    with pytest.raises(SystemExit):
        speed.main(["somewhere", "--size", "ninth"])
    assert "exclude" in capsys.readouterr().err


def test_forced_ids_never_end_an_answer():
    vlm = paligemma.load(device="cpu")
    token_ids = forced_ids(vlm, 50)
    assert len(set(token_ids)) == 50 and not set(token_ids) & set(vlm.config.eos_token_ids)
    assert vlm.allowed_tokens[token_ids].all()


def test_a_ninth_is_a_ninth_of_all_that_takes_time():
    whole, ninth = (
        Work.of(paligemma.PaliGemmaConfig.from_dict(make_config(SIZES[size]).to_dict()), torch.bfloat16)
        for size in ("paligemma-3b", "ninth")
    )
    assert whole.decoder_bytes / ninth.decoder_bytes == pytest.approx(9, rel=0.01)
    assert whole.first_token_operations(260) / ninth.first_token_operations(260) == pytest.approx(9, rel=0.02)


def test_a_tokenizer_as_large_as_googles_leaves_every_row_to_be_chosen(tmp_path):
    case = replace(SMALL, num_pieces=4096, vocab_size=4160)
    write_checkpoint(tmp_path / "checkpoint", case)
    vlm = paligemma.load(tmp_path / "checkpoint", device="cpu")
    assert vlm.config.image_token_index == 4096
    assert int(vlm.allowed_tokens.sum()) == 4096 and not vlm.allowed_tokens[4096:].any()
