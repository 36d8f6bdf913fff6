"""Parity of this package with transformers on random checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from reference_models import our_model, reference_model

from paligemma.benchmarks import full_size, parity
from paligemma.benchmarks.random_checkpoints import GEMMA1, LAYOUTS, VISION, Case, make_model, save_layout
from paligemma.benchmarks.reference import Sample, agreement, mean_relative_error
from paligemma.checkpoint import load_model

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


@pytest.mark.parametrize("name", parity.CHECKPOINTS)
def test_float32_matches_transformers(name: str, tmp_path: Path) -> None:
    stored = parity.CHECKPOINTS[name]
    model = reference_model(stored.case)
    folder = save_layout(model, tmp_path / "checkpoint", stored.layout, stored.sharded, stored.sparse)
    row = parity.float32_row(name, folder, parity.requests_of(seed=0, prompts=("caption en",)), is_random=True)
    assert row.passed, row.measures


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("case", ["paligemma1", "paligemma2"])
def test_low_precision_error_is_comparable_to_transformers(
    case: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parity, "NUM_TOKENS", 6)
    folders = [save_layout(make_model(case, seed), tmp_path / str(seed)) for seed in range(5)]
    requests = [parity.requests_of(seed, prompts=("caption en",)) for seed in range(5)]
    row = parity.low_precision_row(case, dtype, folders, requests)
    assert row.passed, row.measures


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", ["paligemma1", "paligemma2"])
def test_every_layout_loads_equal_tensors(case: str, layout: str, sharded: bool, tmp_path: Path) -> None:
    folder = save_layout(reference_model(case), tmp_path / "checkpoint", layout, sharded)
    assert (len(list(folder.glob("*.safetensors"))) > 1) == sharded
    loaded = dict(load_model(folder, device="cpu").named_parameters())
    expected = dict(our_model(case).named_parameters())
    assert loaded.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(loaded[name], expected[name])] == []
    assert any(name.endswith("k_proj.bias") for name in loaded)


def test_random_checkpoints_are_seeded_and_have_no_neutral_weights() -> None:
    model = reference_model("paligemma2")
    same, other = make_model("paligemma2").state_dict(), make_model("paligemma2", seed=1).state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, same[name])
        assert not torch.equal(tensor, other[name])
        assert (tensor != 0).all()
        if tensor.dim() == 1:
            assert tensor.std() > 0.1, name


def sample(**changes: object) -> Sample:
    values = {
        "input_ids": torch.tensor([1, 2]),
        "pixels": torch.zeros(3, 2, 2),
        "greedy": (5, 6),
        "logits": torch.tensor([[3.0, 4.0]]),
    }
    return Sample(**{**values, **changes})


def test_agreement_detects_each_difference() -> None:
    assert agreement([sample()], [sample()]).max_difference == 0
    assert not agreement([sample(input_ids=torch.tensor([1, 3]))], [sample()]).ids_equal
    assert not agreement([sample(pixels=torch.ones(3, 2, 2))], [sample()]).pixels_equal
    assert not agreement([sample(greedy=(5, 7))], [sample()]).greedy_equal
    shifted = sample(logits=torch.tensor([[3.0, 4.5]]))
    assert agreement([sample(), shifted], [sample(), sample()]).max_difference == 0.5
    assert mean_relative_error([shifted, sample()], [sample(), sample()]) == pytest.approx(0.05)  # (0.5 / 5 + 0) / 2


def test_failed_row_sets_the_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--case", "sliding", "--dtype", "float32", "--work-dir", str(tmp_path)]
    monkeypatch.setattr(parity, "PROMPTS", ("caption en",))
    assert parity.main(arguments) == 0
    assert "all rows passed" in capsys.readouterr().out
    monkeypatch.setattr(parity, "MAX_DIFFERENCE", 0.0)
    assert parity.main(arguments) == 1
    assert "FAILED" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_checkpoint_folder_is_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save_layout(reference_model("sliding"), tmp_path / "checkpoint", sparse=False)
    assert parity.main([str(folder), "--dtype", "float32", "--dtype", "float16", "--seeds", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.endswith("ok") for line in lines) == 2


def test_full_size_comparison_runs_on_a_small_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(full_size, "SHARD_BYTES", 200_000)
    folder = tmp_path / "small"
    weights = full_size.write_checkpoint(folder, Case(text=dict(GEMMA1), vision=dict(VISION), image_size=224))
    files = list(folder.glob("*.safetensors"))
    assert len(files) > 1 and sum(file.stat().st_size for file in files) >= weights
    model = load_model(folder, device="cpu")
    assert model.dtype == torch.bfloat16
    assert sum(weight.nbytes for weight in model.parameters()) == weights
    row = parity.low_precision_row("small", "bfloat16", [folder], [parity.requests_of(seed=0, prompts=("",))])
    assert row.passed, row.measures
