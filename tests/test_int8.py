"""int8 weights: rounding, what is kept of them on the disk, and what they do to the answers."""

from __future__ import annotations

import logging
import os
import shutil
import time
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import paligemma
from paligemma import checkpoint
from paligemma.benchmarks.accuracy import MAX_ERROR_RATIO, forced, logit_errors
from paligemma.benchmarks.random_checkpoints import make_model, save_layout
from paligemma.benchmarks.reference import Request
from paligemma.checkpoint import memory
from paligemma.kernels import int8, linear
from paligemma.kernels.int8 import QuantizedStore, cache_folder, content_key, quantize_in_two, quantize_weight

PICTURE = Image.merge("RGB", [Image.linear_gradient("L"), Image.radial_gradient("L"), Image.linear_gradient("L")])


@pytest.fixture(autouse=True)
def kept(tmp_path, monkeypatch) -> Path:
    """The cache folder of this test alone."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "paligemma"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_layout(make_model("paligemma2"), tmp_path_factory.mktemp("checkpoints") / "tiny", sharded=True)


def answer(folder: Path, **options: object) -> tuple[float, ...]:
    vlm = paligemma.load(folder, device="cpu", **options)
    return tuple(step.logit for step in vlm.generate(PICTURE, "caption en", max_new_tokens=4).steps)


# Rounding -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_are_rounded_to_the_nearest_of_a_rows_steps(dtype, monkeypatch):
    monkeypatch.setattr(int8, "NUMBERS_AT_ONCE", 100)  # several parts
    weight = (torch.randn(9, 40, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 1, 9)[:, None]).to(
        dtype
    )
    weight[4] = 0
    values, scales = quantize_weight(weight)
    assert values.dtype == torch.int8 and scales.dtype == torch.float32
    assert bool(((values * scales[:, None] - weight.float()).abs() <= 0.501 * scales[:, None]).all())
    assert values.abs().amax(dim=1).tolist() == [127] * 4 + [0] + [127] * 4


def test_two_numbers_a_weight_leave_a_hundredth_of_the_error():
    weight = torch.randn(9, 40, generator=torch.Generator().manual_seed(0))
    values, scales = quantize_in_two(weight)
    first, second = (values * scales[:, None]).chunk(2)
    assert float((first + second - weight).norm()) < 0.01 * float((first - weight).norm())


def test_other_values_are_refused_before_anything_is_read():
    with pytest.raises(ValueError, match=r"quantize is 'int4'; allowed are None .* and 'int8'"):
        paligemma.load("absent", quantize="int4")


# The model ------------------------------------------------------------------------------------------------------


def test_decoder_and_head_are_int8_and_the_rest_is_as_it_was(folder):
    vlm = paligemma.load(folder, device="cpu", dtype="bfloat16", quantize="int8")
    assert vlm.quantize == "int8" and vlm.backend.startswith("int8 (")
    decoder = vlm.model.language_model
    assert not any(isinstance(module, torch.nn.Linear) for module in decoder.modules())
    plain = checkpoint.load_model(folder, device="cpu", dtype="bfloat16")
    assert vlm.num_parameters == sum(weight.numel() for weight in plain.parameters())
    kept = dict(plain.named_parameters())
    assert all(torch.equal(weight, kept[name]) for name, weight in vlm.model.named_parameters())
    with pytest.raises(ValueError, match="no weights to save"):
        checkpoint.save(vlm.model, folder / "copy")


def test_unquantised_bfloat16_computes_with_the_loaded_values(folder, monkeypatch):
    packed = answer(folder, dtype="bfloat16")
    monkeypatch.setattr(checkpoint, "can_pack", lambda *_: False)
    plain = answer(folder, dtype="bfloat16")
    assert packed == pytest.approx(plain, rel=0.02, abs=0.02)
    assert paligemma.load(folder, device="cpu", dtype="bfloat16").backend == "bfloat16"
    assert paligemma.load(folder, device="cpu").backend == "float32"


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_where_16_bit_products_are_slow_they_are_float32_s(folder, monkeypatch, quantization):
    exact = answer(folder, dtype="float32", quantize=quantization)
    monkeypatch.setattr(checkpoint, "multiplies_fast", lambda *_: False)
    monkeypatch.setattr(checkpoint, "can_pack", lambda *_: False)
    assert answer(folder, dtype="bfloat16", quantize=quantization) == pytest.approx(exact, rel=0.02, abs=0.02)
    vlm = paligemma.load(folder, device="cpu", dtype="bfloat16", quantize=quantization)
    assert vlm.backend.endswith(", picture in float32" if quantization else "bfloat16, picture and prompt in float32")
    plain = [module for module in vlm.model.modules() if isinstance(module, torch.nn.Linear)]
    assert plain and all(isinstance(module, linear.WideLinear) for module in plain)


def test_progress_counts_every_byte_once(folder):
    for options in ({"quantize": "int8"}, {"dtype": "bfloat16"}, {}):
        reports: list[tuple[str, int, int]] = []
        paligemma.load(folder, device="cpu", progress=lambda *report: reports.append(report), **options)  # noqa: B023
        assert reports == sorted(reports) and len({(stage, total) for stage, _, total in reports}) == 1
        assert reports[-1][1] == reports[-1][2] > 0


def test_without_room_to_pack_them_the_weights_are_used_as_they_are(tmp_path, monkeypatch, caplog):
    folder = save_layout(make_model("paligemma1").bfloat16(), tmp_path / "stored")
    monkeypatch.setattr(memory, "available_memory", lambda _: memory.Memory(10**12, 1000))
    with caplog.at_level(logging.WARNING):
        assert paligemma.load(folder, device="cpu").backend == "bfloat16"
    with pytest.raises(paligemma.CheckpointError, match="as int8 on cpu"):
        paligemma.load(folder, device="cpu", quantize="int8")


@pytest.mark.parametrize("kernel", linear.INT8_KERNELS["cpu"], ids=lambda kernel: kernel.name)
def test_every_kernel_answers_alike(folder, kernel, monkeypatch):
    exact = answer(folder, dtype="float32")
    monkeypatch.setattr(linear, "INT8_KERNELS", {"cpu": (kernel,)})
    assert answer(folder, dtype="float32", quantize="int8")[0] == pytest.approx(exact[0], abs=0.5)


# Accuracy -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["paligemma1", "paligemma2"])
def test_random_models_err_little_more_than_in_bfloat16(case, tmp_path):
    errors = logit_errors(case, tmp_path, "int8", seeds=2)
    assert errors.ratio <= MAX_ERROR_RATIO, errors


def test_the_bundled_model_agrees_with_float32():
    exact = paligemma.load(device="cpu", dtype="float32")
    other = paligemma.load(device="cpu", quantize="int8")
    image = Image.open(checkpoint.BUNDLED_FOLDER.parent / "examples" / "rabbit.png")
    found = forced(exact, other, [Request(image, "caption en"), Request(image, "detect rabbit")])
    assert found.agreement >= 0.95 and found.divergence <= 0.01, found


# What is kept ---------------------------------------------------------------------------------------------------


def test_the_next_start_takes_the_kept_values(folder, kept, monkeypatch):
    first = answer(folder, quantize="int8")
    (store,) = kept.iterdir()
    layers = [f"layer-{index:02}.safetensors" for index in range(4)]
    assert sorted(file.name for file in store.iterdir()) == ["head.safetensors", *layers]
    monkeypatch.setattr(int8, "quantize_weight", lambda weight: pytest.fail("it is quantized again"))
    assert answer(folder, quantize="int8") == first


@pytest.mark.parametrize("damage", ["cut", "flipped", "foreign", "empty"])
def test_a_damaged_file_is_made_anew(folder, kept, damage, caplog):
    first = answer(folder, quantize="int8")
    (store,) = kept.iterdir()
    file = store / "layer-01.safetensors"
    whole = file.read_bytes()
    if damage == "cut":
        file.write_bytes(whole[:-100])
    elif damage == "flipped":
        file.write_bytes(whole[:-100] + bytes(byte ^ 1 for byte in whole[-100:-99]) + whole[-99:])
    elif damage == "foreign":
        shutil.copy(folder / next(iter(folder.glob("*.safetensors"))).name, file)
    else:
        file.write_bytes(b"")
    with caplog.at_level(logging.WARNING):
        assert answer(folder, quantize="int8") == first
    assert "layer-01.safetensors is damaged" in caplog.text
    assert file.read_bytes() == whole
    assert not list(store.glob("*.unfinished"))


def test_other_weights_have_another_key(folder, tmp_path):
    files = checkpoint.weight_files(folder)
    copies = [Path(shutil.copy2(file, tmp_path)) for file in files]
    assert content_key(copies) == content_key(files)
    os.utime(copies[0], ns=(0, 1))
    assert content_key(copies) != content_key(files)
    assert content_key(files[:1]) != content_key(files)


def test_a_folder_that_cannot_be_written_only_costs_time(folder, kept, monkeypatch, caplog):
    kept.parent.mkdir(parents=True)
    kept.write_text("a file where the folder would be")
    with caplog.at_level(logging.WARNING):
        assert len(answer(folder, quantize="int8")) == 4
    assert caplog.text.count("are not kept") == 1


def test_a_full_disk_only_costs_time(folder, kept, monkeypatch, caplog):
    monkeypatch.setattr(int8, "SPARE_BYTES", 10**18)
    with caplog.at_level(logging.WARNING):
        assert len(answer(folder, quantize="int8")) == 4
    assert "GB free" in caplog.text
    assert not [file for file in kept.rglob("*") if file.is_file()]


def test_what_an_ended_process_left_half_written_is_removed(tmp_path):
    old, new = tmp_path / "a.1.unfinished", tmp_path / "b.2.unfinished"
    for file, age in ((old, 7200), (new, 0)):
        file.touch()
        os.utime(file, (time.time() - age,) * 2)
    weights = {"lm_head": quantize_weight(torch.ones(6, 5))}
    QuantizedStore(tmp_path).write("head", weights)
    assert not old.exists() and new.exists()


def test_kept_values_are_plain_safetensors(tmp_path):
    store = QuantizedStore(tmp_path / "store")
    weights = {"lm_head": quantize_weight(torch.randn(6, 5, generator=torch.Generator().manual_seed(0)))}
    store.write("head", weights)
    assert set(load_file(tmp_path / "store" / "head.safetensors")) == {"lm_head.values", "lm_head.scales"}
    found = store.read("head", ["lm_head"])
    assert all(torch.equal(a, b) for a, b in zip(found["lm_head"], weights["lm_head"], strict=True))
    assert store.read("layer-00", ["lm_head"]) is None


def test_the_cache_lies_where_the_user_says(monkeypatch, tmp_path):
    assert cache_folder() == tmp_path / "cache" / "paligemma"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "paligemma"
