"""int8 weights: quantization, accuracy of a model, and the disk cache."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import time
from pathlib import Path

import platformdirs
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import paligemma
from paligemma import checkpoint, kernels
from paligemma.benchmarks.accuracy import MAX_ERROR_RATIO, forced, logit_errors
from paligemma.benchmarks.random_checkpoints import make_model, save_layout
from paligemma.benchmarks.reference import Request
from paligemma.checkpoint import memory
from paligemma.kernels import int8, store
from paligemma.kernels.int8 import INT8_KERNELS, quantize_weight, quantize_weight_with_residual
from paligemma.kernels.linear import Float32MatmulLinear, is_accurate
from paligemma.kernels.store import QuantizedStore, cache_folder, content_key

IMAGE = Image.merge("RGB", [Image.linear_gradient("L"), Image.radial_gradient("L"), Image.linear_gradient("L")])


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    """A cache folder of its own for each test."""
    folder = tmp_path / "cache" / "paligemma"
    monkeypatch.setattr(store, "user_cache_path", lambda *_, **__: folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_layout(make_model("paligemma2"), tmp_path_factory.mktemp("checkpoints") / "tiny", sharded=True)


def logits_of(folder: Path, **options: object) -> tuple[float, ...]:
    """The logits of a greedy answer's tokens."""
    vlm = paligemma.load(folder, device="cpu", **options)
    return tuple(step.logit for step in vlm.generate(IMAGE, "caption en", max_new_tokens=4).steps)


# Quantization -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_are_rounded_to_the_nearest_step_of_their_channel(dtype, monkeypatch):
    monkeypatch.setattr(int8, "WEIGHTS_PER_BLOCK", 100)  # several blocks
    weight = (torch.randn(9, 40, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 1, 9)[:, None]).to(
        dtype
    )
    weight[4] = 0
    values, scales = quantize_weight(weight)
    assert values.dtype == torch.int8 and scales.dtype == torch.float32
    assert bool(((values * scales[:, None] - weight.float()).abs() <= 0.501 * scales[:, None]).all())
    assert values.abs().amax(dim=1).tolist() == [127] * 4 + [0] + [127] * 4


def test_residual_leaves_a_hundredth_of_the_error():
    weight = torch.randn(9, 40, generator=torch.Generator().manual_seed(0))
    values, scales = quantize_weight_with_residual(weight)
    main, residual = (values * scales[:, None]).chunk(2)
    assert float((main + residual - weight).norm()) < 0.01 * float((main - weight).norm())


def test_unknown_quantization_is_rejected_before_anything_is_read():
    with pytest.raises(ValueError, match="quantize must be None or one of int8, got 'int4'") as caught:
        paligemma.load("absent", quantize="int4")
    assert caught.value.code == "quantize.unknown"


# Models -----------------------------------------------------------------------------------------------------------


def test_decoder_and_head_are_int8_and_other_weights_unchanged(folder):
    vlm = paligemma.load(folder, device="cpu", dtype="bfloat16", quantize="int8")
    assert vlm.quantize == "int8" and vlm.backend.startswith("int8 (")
    decoder = vlm.model.language_model
    assert not any(isinstance(module, torch.nn.Linear) for module in decoder.modules())
    plain = checkpoint.load_model(folder, device="cpu", dtype="bfloat16")
    assert vlm.num_parameters == sum(weight.numel() for weight in plain.parameters())
    loaded = dict(plain.named_parameters())
    assert all(torch.equal(weight, loaded[name]) for name, weight in vlm.model.named_parameters())


def test_quantized_model_cannot_be_saved(folder, tmp_path):
    vlm = paligemma.load(folder, device="cpu", quantize="int8")
    with pytest.raises(paligemma.CheckpointError, match="cannot be saved"):
        checkpoint.save_model(vlm.model, tmp_path / "copy")


def test_unquantized_bfloat16_computes_with_the_loaded_weights(folder, monkeypatch):
    fastest = logits_of(folder, dtype="bfloat16")
    monkeypatch.setattr(kernels, "can_pack", lambda *_: False)
    monkeypatch.setattr(kernels, "has_fast_matmul", lambda *_: True)
    plain = logits_of(folder, dtype="bfloat16")
    assert fastest == pytest.approx(plain, rel=0.02, abs=0.02)
    assert paligemma.load(folder, device="cpu", dtype="bfloat16").backend == "bfloat16"
    assert paligemma.load(folder, device="cpu").backend == "float32"


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_matmuls_are_float32_where_16_bit_ones_are_slow(folder, monkeypatch, quantize):
    exact = logits_of(folder, dtype="float32", quantize=quantize)
    monkeypatch.setattr(kernels, "has_fast_matmul", lambda *_: False)
    monkeypatch.setattr(kernels, "can_pack", lambda *_: False)
    assert logits_of(folder, dtype="bfloat16", quantize=quantize) == pytest.approx(exact, rel=0.02, abs=0.02)
    vlm = paligemma.load(folder, device="cpu", dtype="bfloat16", quantize=quantize)
    assert vlm.backend.endswith(", vision tower in float32" if quantize else "bfloat16, prefill in float32")
    plain = [module for module in vlm.model.modules() if isinstance(module, torch.nn.Linear)]
    assert plain and all(isinstance(module, Float32MatmulLinear) for module in plain)


def test_progress_counts_every_byte_once(folder):
    for options in ({"quantize": "int8"}, {"dtype": "bfloat16"}, {}):
        reports: list[tuple[str, int, int]] = []
        paligemma.load(folder, device="cpu", progress=lambda *report: reports.append(report), **options)  # noqa: B023
        assert reports == sorted(reports) and len({(stage, total) for stage, _, total in reports}) == 1
        assert reports[-1][1] == reports[-1][2] > 0


def test_weights_are_not_packed_if_memory_is_too_small(tmp_path, monkeypatch, caplog):
    class UnusedBackend(kernels.PackedBackend):
        def make(self, *_: object) -> kernels.InferenceLinear:
            pytest.fail("a weight was packed")

    folder = save_layout(make_model("paligemma1").bfloat16(), tmp_path / "stored")
    monkeypatch.setattr(kernels, "can_pack", lambda *_: True)
    monkeypatch.setattr(kernels, "PackedBackend", UnusedBackend)
    monkeypatch.setattr(memory, "available_memory", lambda _: memory.Memory(10**12, 1000))
    with caplog.at_level(logging.WARNING):
        assert paligemma.load(folder, device="cpu").backend.startswith("bfloat16")
    assert "used unpacked" in caplog.text
    with pytest.raises(paligemma.CheckpointError, match="as int8 on cpu"):
        paligemma.load(folder, device="cpu", quantize="int8")


@pytest.mark.parametrize("kernel", INT8_KERNELS["cpu"], ids=lambda kernel: kernel.name)
def test_int8_kernels_give_the_float32_logits(folder, kernel, monkeypatch):
    if not is_accurate(kernel.make, torch.device("cpu"), torch.float32):
        pytest.skip("the self-check rejects this kernel on this CPU")
    exact = logits_of(folder, dtype="float32")
    monkeypatch.setattr(int8, "INT8_KERNELS", {"cpu": (kernel,)})
    assert logits_of(folder, dtype="float32", quantize="int8")[0] == pytest.approx(exact[0], abs=0.5)


# Accuracy ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["paligemma1", "paligemma2"])
def test_int8_error_of_random_models_is_close_to_bfloat16_s(case, tmp_path):
    errors = logit_errors(case, tmp_path, "int8", seeds=2)
    assert errors.ratio <= MAX_ERROR_RATIO, errors


def test_bundled_model_in_int8_agrees_with_float32():
    exact = paligemma.load(device="cpu", dtype="float32")
    other = paligemma.load(device="cpu", quantize="int8")
    image = Image.open(checkpoint.BUNDLED_FOLDER.parent / "examples" / "rabbit.png")
    found = forced(exact, other, [Request(image, "caption en"), Request(image, "detect rabbit")])
    assert found.agreement >= 0.95 and found.divergence <= 0.01, found


# Disk cache -------------------------------------------------------------------------------------------------------


def test_second_load_reads_the_cached_weights(folder, cache, monkeypatch):
    first = logits_of(folder, quantize="int8")
    (stored,) = cache.iterdir()
    decoder = checkpoint.build_empty_model(checkpoint.read_config(folder)).language_model
    linears = {name for name, module in decoder.named_modules() if isinstance(module, torch.nn.Linear)}
    assert {file.name for file in stored.iterdir()} == {f"language_model.{name}.safetensors" for name in linears}
    monkeypatch.setattr(int8, "quantize_weight", lambda weight: pytest.fail("a weight was quantized again"))
    assert logits_of(folder, quantize="int8") == first


@pytest.mark.parametrize("corruption", ["truncated", "flipped bit", "foreign", "empty"])
def test_corrupt_cache_file_is_replaced(folder, cache, corruption, caplog):
    first = logits_of(folder, quantize="int8")
    (stored,) = cache.iterdir()
    file = stored / "language_model.model.layers.1.mlp.up_proj.safetensors"
    intact = file.read_bytes()
    if corruption == "truncated":
        file.write_bytes(intact[:-100])
    elif corruption == "flipped bit":
        file.write_bytes(intact[:-100] + bytes(byte ^ 1 for byte in intact[-100:-99]) + intact[-99:])
    elif corruption == "foreign":
        shutil.copy(next(iter(folder.glob("*.safetensors"))), file)
    else:
        file.write_bytes(b"")
    with caplog.at_level(logging.WARNING):
        assert logits_of(folder, quantize="int8") == first
    assert "layers.1.mlp.up_proj.safetensors are corrupt" in caplog.text
    assert file.read_bytes() == intact
    assert not list(stored.glob("*.tmp"))


def test_content_key_depends_on_the_weight_files(folder, tmp_path):
    files = checkpoint.weight_files(folder)
    copies = [Path(shutil.copy2(file, tmp_path)) for file in files]
    assert content_key(copies) == content_key(files)
    os.utime(copies[0], ns=(0, 1))
    assert content_key(copies) != content_key(files)
    assert content_key(files[:1]) != content_key(files)


def test_unwritable_cache_is_logged_once(folder, cache, caplog):
    cache.parent.mkdir(parents=True)
    cache.write_text("a file instead of a folder")
    with caplog.at_level(logging.WARNING):
        assert len(logits_of(folder, quantize="int8")) == 4
    assert caplog.text.count("are not cached") == 1


def test_full_disk_is_logged_and_nothing_is_written(folder, cache, monkeypatch, caplog):
    monkeypatch.setattr(store, "MIN_FREE_BYTES", 10**18)
    with caplog.at_level(logging.WARNING):
        assert len(logits_of(folder, quantize="int8")) == 4
    assert "GB free" in caplog.text
    assert not [file for file in cache.rglob("*") if file.is_file()]


def test_stale_temporary_files_are_removed(tmp_path):
    old, new = tmp_path / "a.1.tmp", tmp_path / "b.2.tmp"
    for file, age in ((old, 7200), (new, 0)):
        file.touch()
        os.utime(file, (time.time() - age,) * 2)
    QuantizedStore(tmp_path).write("lm_head", quantize_weight(torch.ones(6, 5)))
    assert not old.exists() and new.exists()


def test_cached_weights_are_safetensors(tmp_path):
    quantized = QuantizedStore(tmp_path / "store")
    weight = quantize_weight(torch.randn(6, 5, generator=torch.Generator().manual_seed(0)))
    quantized.write("lm_head", weight)
    assert set(load_file(tmp_path / "store" / "lm_head.safetensors")) == {"values", "scales"}
    found = quantized.read("lm_head")
    assert all(torch.equal(a, b) for a, b in zip(found, weight, strict=True))
    assert quantized.read("absent") is None


@pytest.mark.skipif(sys.platform != "linux", reason="XDG folders are a Linux convention")
def test_cache_folder_follows_xdg_cache_home(monkeypatch, tmp_path):
    monkeypatch.setattr(store, "user_cache_path", platformdirs.user_cache_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
    assert cache_folder() == tmp_path / "elsewhere" / "paligemma"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "paligemma"
