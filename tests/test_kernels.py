"""Packed, quantized and float32 linear layers against the plain product, and their installation in a model."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tiny_models import KINDS, tiny_model
from torch import Tensor, nn

from paligemma.kernels import InferenceLinear, choose_backend, int8, linear, replace_linears, use_float32_matmul
from paligemma.kernels.int8 import (
    DEFAULT_INT8_KERNELS,
    INT8_KERNELS,
    DequantizeInt8Linear,
    Int8Kernel,
    OneDnnInt8Linear,
    choose_int8_kernel,
    quantize_activations,
    quantize_weight,
)
from paligemma.kernels.linear import Float32MatmulLinear, PackedLinear, can_pack, has_fast_matmul, is_accurate

CPU = torch.device("cpu")
KERNELS = {kernel.name: kernel for kernel in (*INT8_KERNELS["cpu"], *DEFAULT_INT8_KERNELS)}.values()


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def activations_of_different_magnitude(features: int) -> Tensor:
    magnitudes = torch.tensor([1e-4, 1.0, 300.0, 0.0, 1.0]).view(1, 5, 1)
    return torch.randn(1, 5, features, generator=torch.Generator().manual_seed(1)) * magnitudes


# Packed and float32 layers ----------------------------------------------------------------------------------------


@pytest.mark.skipif(not can_pack(CPU, torch.bfloat16), reason="oneDNN has no bfloat16 kernels for this CPU")
@pytest.mark.parametrize("shape", [(1, 1, 200), (1, 17, 200), (2, 3, 200), (5, 200)])
def test_packed_linear_equals_the_plain_product(shape):
    weight = torch.randn(72, 200, generator=torch.Generator().manual_seed(0)).bfloat16()
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    exact = F.linear(x.double(), weight.double())
    with torch.inference_mode():
        found = PackedLinear(weight)(x)
    assert found.dtype == torch.bfloat16
    # At most one rounding of the sum, as in the plain product.
    assert torch.allclose(found.double(), exact, rtol=2**-8, atol=1e-4)


@pytest.mark.parametrize("device", ["cuda", "mps", "meta"])
def test_only_bfloat16_on_a_cpu_is_packed(device):
    assert not can_pack(torch.device(device), torch.bfloat16)
    assert not can_pack(CPU, torch.float32)
    assert not can_pack(CPU, torch.float16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("has_bias", [True, False])
@torch.inference_mode()
def test_float32_matmul_linear_is_more_exact_than_the_plain_product(dtype, has_bias, monkeypatch):
    monkeypatch.setattr(linear, "WEIGHTS_PER_BLOCK", 300)  # several blocks
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 30, has_bias), nn.ReLU()).to(dtype)
    names, weight, bias = list(model.state_dict()), model[0].weight, model[0].bias
    use_float32_matmul(model)
    assert isinstance(model[0], Float32MatmulLinear) and model[0].weight is weight and list(model.state_dict()) == names
    few, many = torch.randn(1, 3, 40, dtype=dtype), torch.randn(2, 9, 40, dtype=dtype)
    for x in (few, many):
        plain = F.linear(x, weight, bias).relu()
        torch.testing.assert_close(model(x), plain, rtol=0.02, atol=0.02)
        assert model(x).dtype == dtype and model(x).shape == plain.shape
    exact = F.linear(many.float(), weight.float(), None if bias is None else bias.float())
    # The order of summation may change single roundings.
    assert (model(many) != exact.to(dtype).relu()).float().mean() < 0.01


def test_fast_matmul_depends_on_onednn_only_for_16_bit_dtypes_on_a_cpu(monkeypatch):
    assert has_fast_matmul(CPU, torch.float32) and has_fast_matmul(torch.device("cuda"), torch.bfloat16)
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        for answer in (True, False):
            monkeypatch.setattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported", lambda answer=answer: answer)
            assert has_fast_matmul(CPU, dtype) == answer


# int8 kernels -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("levels", [127, 63])
def test_activations_are_quantized_per_vector_with_a_residual(levels):
    x = activations_of_different_magnitude(64)[0]
    quantized, scales = quantize_activations(x, levels)
    assert quantized.dtype == torch.uint8 and scales.shape == (5, 1)
    assert int(quantized.min()) >= 1 and int(quantized.max()) <= 2 * levels + 1
    main, residual = (quantized.float() - (levels + 1)).chunk(2)
    assert bool(((main * scales - x).abs() <= 0.501 * scales).all())
    both = (main + residual / (2 * levels)) * scales
    assert bool(((both - x).abs() <= 0.501 * scales / (2 * levels) + 1e-7).all())
    assert torch.equal(main[3], torch.zeros(64))


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_kernels_agree(kernel, dtype):
    if not is_accurate(kernel.make, CPU, torch.float32):
        pytest.skip("the self-check rejects this kernel on this CPU")
    weight = torch.randn(80, 192, generator=torch.Generator().manual_seed(0))
    values, scales = quantize_weight(weight)
    x = activations_of_different_magnitude(192).to(dtype)
    expected = F.linear(x.float(), values.float() * scales[:, None])
    with torch.inference_mode():
        module = kernel.make(values, scales)
        found = module(x)
        single = torch.cat([module(x[:, token : token + 1]) for token in range(5)], dim=1)
    assert found.dtype == dtype and found.shape == expected.shape
    for token in (0, 1, 2, 4):
        for outputs in (found, single):
            assert relative_error(outputs[0, token], expected[0, token]) < (0.001 if dtype == torch.float32 else 0.01)
    assert bool((found[0, 3] == 0).all())


def test_chosen_int8_kernel_passes_the_self_check():
    assert is_accurate(choose_int8_kernel(CPU).make, CPU, torch.float32)


def test_missing_and_inaccurate_kernels_are_skipped(monkeypatch):
    class Missing(OneDnnInt8Linear):
        def __init__(self, *arguments: object) -> None:
            raise NotImplementedError("no such operator on this machine")

    class Overflowing(DequantizeInt8Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).clamp(-5, 5)

    accurate = Int8Kernel("accurate", DequantizeInt8Linear)
    kernels = (Int8Kernel("missing", Missing), Int8Kernel("overflowing", Overflowing), accurate)
    monkeypatch.setattr(int8, "INT8_KERNELS", {"cpu": kernels})
    assert choose_int8_kernel(CPU) is accurate


# Installation in a model ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_replaced_linears_compute_what_the_model_computed(kind, tmp_path, monkeypatch):
    monkeypatch.setattr("paligemma.kernels.store.user_cache_path", lambda *_, **__: tmp_path)
    decoder = tiny_model(kind).language_model
    x = torch.randn(1, 4, 32, generator=torch.Generator().manual_seed(0))
    expected = decoder(inputs_embeds=x)["logits"]
    weights = {
        name: module.weight.detach() for name, module in decoder.named_modules() if isinstance(module, nn.Linear)
    }
    backend = choose_backend("int8", CPU, torch.float32, [])
    replaced: list[str] = []
    replace_linears(decoder, {name: lambda w=weight: w for name, weight in weights.items()}, backend, replaced.append)
    assert replaced == list(weights)
    assert not any(isinstance(module, nn.Linear) for module in decoder.modules())
    assert all(isinstance(decoder.get_submodule(name), InferenceLinear) for name in weights)
    with torch.inference_mode():
        assert relative_error(decoder(inputs_embeds=x)["logits"], expected) < 0.05


def test_float32_on_a_cpu_has_no_backend():
    assert choose_backend(None, CPU, torch.float32, []) is None
