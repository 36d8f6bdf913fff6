"""Prepared linear maps against the plain product."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tiny_models import KINDS, tiny_model
from torch import Tensor

from paligemma.kernels import linear
from paligemma.kernels.int8 import quantize_weight
from paligemma.kernels.linear import (
    INT8_KERNELS,
    Int8Kernel,
    OneDnnInt8Linear,
    PackedLinear,
    UnpackedInt8Linear,
    WideLinear,
    can_pack,
    choose_int8_kernel,
    decoder_maps,
    multiplies_fast,
    put_in_place,
    quantize_rows,
    widen,
)

CPU = torch.device("cpu")
CHOICES = (*INT8_KERNELS["cpu"], *linear.INT8_KERNELS_ELSEWHERE)


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def rows_of_many_sizes(features: int) -> Tensor:
    sizes = torch.tensor([1e-4, 1.0, 300.0, 0.0, 1.0]).view(1, 5, 1)
    return torch.randn(1, 5, features, generator=torch.Generator().manual_seed(1)) * sizes


@pytest.mark.skipif(not can_pack(CPU, torch.bfloat16), reason="oneDNN has no bfloat16 kernels for this processor")
@pytest.mark.parametrize("shape", [(1, 1, 200), (1, 17, 200), (2, 3, 200), (5, 200)])
def test_packed_weights_give_the_plain_product(shape):
    weight = torch.randn(72, 200, generator=torch.Generator().manual_seed(0)).bfloat16()
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    exact = F.linear(x.double(), weight.double())
    with torch.inference_mode():
        found = PackedLinear(weight)(x)
    assert found.dtype == torch.bfloat16
    # One rounding of the sum at most, as the plain product has.
    assert torch.allclose(found.double(), exact, rtol=2**-8, atol=1e-4)


@pytest.mark.parametrize("device", ["cuda", "mps", "meta"])
def test_only_bfloat16_on_a_cpu_is_packed(device):
    assert not can_pack(torch.device(device), torch.bfloat16)
    assert not can_pack(CPU, torch.float32)
    assert not can_pack(CPU, torch.float16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("has_bias", [True, False])
@torch.inference_mode()
def test_a_wide_map_is_the_plain_one_with_float32_products(dtype, has_bias, monkeypatch):
    monkeypatch.setattr(linear, "WEIGHTS_AT_ONCE", 300)  # several parts
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(40, 30, has_bias), torch.nn.ReLU()).to(dtype)
    names, weight, bias = list(model.state_dict()), model[0].weight, model[0].bias
    widen(model)
    assert isinstance(model[0], WideLinear) and model[0].weight is weight and list(model.state_dict()) == names
    few, many = torch.randn(1, 3, 40, dtype=dtype), torch.randn(2, 9, 40, dtype=dtype)
    for x in (few, many):
        plain = F.linear(x, weight, bias).relu()
        torch.testing.assert_close(model(x), plain, rtol=0.02, atol=0.02)
        assert model(x).dtype == dtype and model(x).shape == plain.shape
    exact = F.linear(many.float(), weight.float(), None if bias is None else bias.float())
    assert (model(many) != exact.to(dtype).relu()).float().mean() < 0.01  # another order of sums may round otherwise


def test_only_a_cpu_without_kernels_for_a_type_is_said_to_lack_them(monkeypatch):
    assert multiplies_fast(CPU, torch.float32) and multiplies_fast(torch.device("cuda"), torch.bfloat16)
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        for answer in (True, False):
            monkeypatch.setattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported", lambda answer=answer: answer)
            assert multiplies_fast(CPU, dtype) == answer


@pytest.mark.parametrize("levels", [127, 63])
def test_each_row_has_a_step_of_its_own_and_a_finer_one(levels):
    x = rows_of_many_sizes(64)[0]
    numbers, steps = quantize_rows(x, levels)
    assert numbers.dtype == torch.uint8 and steps.shape == (5, 1)
    assert int(numbers.min()) >= 1 and int(numbers.max()) <= 2 * levels + 1
    coarse, fine = (numbers.float() - (levels + 1)).chunk(2)
    assert bool(((coarse * steps - x).abs() <= 0.501 * steps).all())
    assert bool((((coarse + fine / (2 * levels)) * steps - x).abs() <= 0.501 * steps / (2 * levels) + 1e-7).all())
    assert torch.equal(coarse[3], torch.zeros(64))


@pytest.mark.parametrize("kernel", CHOICES, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_int8_kernels_give_one_answer(kernel, dtype):
    weight = torch.randn(80, 192, generator=torch.Generator().manual_seed(0))
    values, scales = quantize_weight(weight)
    x = rows_of_many_sizes(192).to(dtype)
    expected = F.linear(x.float(), values.float() * scales[:, None])
    with torch.inference_mode():
        linear = kernel.make(values, scales)
        found = linear(x)
    assert found.dtype == dtype and found.shape == expected.shape
    for row in (0, 1, 2, 4):
        assert relative_error(found[0, row], expected[0, row]) < (0.001 if dtype == torch.float32 else 0.01)
        assert torch.equal(linear(x[:, row : row + 1])[0, 0].isfinite(), torch.ones(80, dtype=torch.bool))
    assert bool((found[0, 3] == 0).all())


def test_a_kernel_that_is_missing_or_wrong_is_passed_over(monkeypatch):
    class Missing(OneDnnInt8Linear):
        def __init__(self, *arguments: object) -> None:
            raise NotImplementedError("no such operator on this machine")

    class Overflowing(UnpackedInt8Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).clamp(-5, 5)

    right = Int8Kernel("right", UnpackedInt8Linear)
    kernels = (Int8Kernel("missing", Missing), Int8Kernel("overflowing", Overflowing), right)
    monkeypatch.setattr(linear, "INT8_KERNELS", {"cpu": kernels})
    assert choose_int8_kernel(CPU) is right


@pytest.mark.parametrize("kind", KINDS)
def test_the_maps_cover_every_linear_map_of_the_decoder_and_replace_it(kind):
    model = tiny_model(kind)
    decoder = model.language_model
    plain = {name for name, module in decoder.named_modules() if isinstance(module, torch.nn.Linear)}
    groups = decoder_maps(model.config.text_config.num_hidden_layers)
    parts = [part for maps in groups.values() for names in maps.values() for part in names]
    assert sorted(parts) == sorted(plain)
    x = torch.randn(1, 4, 32, generator=torch.Generator().manual_seed(0))
    expected = decoder(inputs_embeds=x)["logits"]
    for maps in groups.values():
        for name, names in maps.items():
            weight = torch.cat([decoder.get_submodule(part).weight.detach() for part in names])
            values, scales = quantize_weight(weight)
            put_in_place(decoder, name, UnpackedInt8Linear(values, scales), names)
    assert not any(isinstance(module, torch.nn.Linear) for module in decoder.modules())
    with torch.inference_mode():
        assert relative_error(decoder(inputs_embeds=x)["logits"], expected) < 0.05
