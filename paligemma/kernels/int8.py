"""int8 weights with one scale per output channel, and matmul kernels for them.

W[i, j] is approximately scale[i] * values[i, j], with integer values in [-127, 127]. Weights take half the memory of
bfloat16, and decoding reads half as many bytes per token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from paligemma.kernels.linear import InferenceLinear, is_accurate
from paligemma.kernels.store import QuantizedStore, QuantizedWeight

QUANT_MAX = 127  # symmetric: -127 to 127
# Attention projections, 9% of the weights of PaliGemma 3B's decoder layers, get a second int8 term. In randomly
# initialized models, their rounding error dominates without it; with it, the total error is below that of bfloat16.
RESIDUAL_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj")
WEIGHTS_PER_BLOCK = 2**20  # quantized at a time in float32, to fit the CPU cache
ACTIVATIONS_PER_BLOCK = 2**18


def quantize_weight(weight: Tensor) -> QuantizedWeight:
    """Quantize symmetrically, with one scale per output channel.

    Args:
        weight: (out_features, in_features), any float dtype, finite.

    Returns:
        int8 values, (out_features, in_features), and float32 scales, (out_features,).
    """
    values = torch.empty(weight.shape, dtype=torch.int8)
    scales = torch.empty(weight.shape[0])
    for block in _row_blocks(weight, WEIGHTS_PER_BLOCK):
        exact = weight[block].float()
        largest = exact.abs().amax(dim=1).clamp(min=torch.finfo(torch.float32).tiny * QUANT_MAX)
        scales[block] = largest / QUANT_MAX
        values[block] = (exact / scales[block, None]).round_().to(torch.int8)
    return values, scales


def quantize_weight_with_residual(weight: Tensor) -> QuantizedWeight:
    """Quantize a weight, then its rounding error with scales that are 254 times smaller.

    Args:
        weight: as in `quantize_weight`.

    Returns:
        int8 values, (2 * out_features, in_features), the residual below the main term, and float32 scales,
        (2 * out_features,). The weight is approximately the sum of the two halves.
    """
    values, scales = quantize_weight(weight)
    residual = torch.empty_like(values)
    for block in _row_blocks(weight, WEIGHTS_PER_BLOCK):
        steps = scales[block, None]
        error = weight[block].float() - values[block] * steps
        residual[block] = (error / steps * (2 * QUANT_MAX)).round_().to(torch.int8)
    return torch.cat((values, residual)), torch.cat((scales, scales / (2 * QUANT_MAX)))


def quantize_activations(x: Tensor, quant_max: int) -> tuple[Tensor, Tensor]:
    """Quantize each activation vector, then its rounding error with a scale that is 2 * quant_max times smaller.

    Scales are per vector, so that a small vector next to a large one keeps its precision. The residual doubles the
    arithmetic but not the memory traffic, and makes the activations' rounding error negligible next to the weights'.

    Args:
        x: (tokens, features), any float dtype.
        quant_max: largest quantized value, at most 127.

    Returns:
        uint8, (2 * tokens, features), the residuals below the main terms, with zero point `quant_max + 1`; and float32
        scales, (tokens, 1).
    """
    quantized = torch.empty((2, *x.shape), dtype=torch.uint8)
    scales = torch.empty((x.shape[0], 1))
    for block in _row_blocks(x, ACTIVATIONS_PER_BLOCK):
        largest = x[block].abs().amax(dim=-1, keepdim=True).float()
        scales[block] = largest.clamp_(min=torch.finfo(torch.float32).tiny * quant_max).div_(quant_max)
        scaled = x[block] / scales[block]
        main = scaled.round()
        quantized[1, block] = scaled.sub_(main).mul_(2 * quant_max).round_().add_(quant_max + 1)
        quantized[0, block] = main.add_(quant_max + 1)
    return quantized.flatten(0, 1), scales


def _row_blocks(matrix: Tensor, max_elements: int) -> Iterator[slice]:
    """Slices of rows with at most `max_elements` elements each."""
    num_rows = max(1, max_elements // matrix.shape[1])
    return (slice(start, start + num_rows) for start in range(0, matrix.shape[0], num_rows))


# Kernels


class OneDnnInt8Linear(InferenceLinear):
    """Integer matmul of int8 weights and activations from `quantize_activations`.

    Args:
        values: int8, (out_features, in_features). scales: float32, (out_features,).
        quant_max: largest quantized activation. x86 CPUs without VNNI add pairs of products in 16 bits, which
            saturates unless activations have 7 bits.
    """

    def __init__(self, values: Tensor, scales: Tensor, quant_max: int = QUANT_MAX) -> None:
        super().__init__(values.shape[1], values.shape[0])
        self.quant_max = quant_max
        self.packed = torch.ops.onednn.qlinear_prepack(values.contiguous(), None)
        self.scales = scales
        self.zero_points = torch.zeros(len(scales), dtype=torch.int64)
        # The activations' zero point adds a constant to each output; the bias subtracts it.
        zero_point = torch.full((1, self.in_features), quant_max + 1, dtype=torch.uint8)
        self.bias = -self._multiply(zero_point, bias=None)[0]

    def forward(self, x: Tensor) -> Tensor:
        quantized, scales = quantize_activations(x.flatten(0, -2), self.quant_max)
        main, residual = self._multiply(quantized, self.bias).chunk(2)
        products = main.add_(residual, alpha=0.5 / self.quant_max).mul_(scales)
        return products.to(x.dtype).unflatten(0, x.shape[:-1])

    def _multiply(self, quantized: Tensor, bias: Tensor | None) -> Tensor:
        """uint8 (tokens, in_features) to float32 (tokens, out_features), without the activations' scales."""
        return torch.ops.onednn.qlinear_pointwise(
            *(quantized, 1.0, 0, self.packed, self.scales, self.zero_points, bias),
            *(1.0, 0, torch.float32, "none", [], ""),
        )


class OneDnn7BitLinear(OneDnnInt8Linear):
    """`OneDnnInt8Linear` with 7-bit activations, for CPUs without VNNI."""

    def __init__(self, values: Tensor, scales: Tensor) -> None:
        super().__init__(values, scales, quant_max=QUANT_MAX // 2)


class WeightOnlyInt8Linear(InferenceLinear):
    """int8 weights with float activations. Arguments as in `OneDnnInt8Linear`."""

    def __init__(self, values: Tensor, scales: Tensor) -> None:
        super().__init__(values.shape[1], values.shape[0])
        self.values = values.contiguous()
        self.scales = scales

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
        return torch._weight_int8pack_mm(flat, self.values, self.scales.to(x.dtype)).unflatten(0, x.shape[:-1])


class DequantizeInt8Linear(WeightOnlyInt8Linear):
    """Dequantize the whole weight in every call. Slow, but works on every device; the reference for other kernels."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.values.to(x.dtype) * self.scales[:, None].to(x.dtype))


class ResidualInt8Linear(InferenceLinear):
    """A weight from `quantize_weight_with_residual`: the sum of the two halves of `linear`'s outputs."""

    def __init__(self, linear: InferenceLinear) -> None:
        super().__init__(linear.in_features, linear.out_features // 2)
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        main, residual = self.linear(x).chunk(2, dim=-1)
        return main + residual


# Backend


@dataclass(frozen=True)
class Int8Kernel:
    """An int8 kernel and its display name; `make` takes int8 values and float32 scales."""

    name: str
    make: Callable[[Tensor, Tensor], InferenceLinear]


# By device type, fastest first; the first kernel that passes the self-check is used.
INT8_KERNELS = {
    "cpu": (
        Int8Kernel("oneDNN", OneDnnInt8Linear),
        Int8Kernel("oneDNN, 7-bit activations", OneDnn7BitLinear),
        Int8Kernel("weight-only", WeightOnlyInt8Linear),
        Int8Kernel("dequantize", DequantizeInt8Linear),
    )
}
DEFAULT_INT8_KERNELS = (Int8Kernel("dequantize", DequantizeInt8Linear),)


def choose_int8_kernel(device: torch.device) -> Int8Kernel:
    """Return the fastest int8 kernel that is accurate on this machine."""
    kernels = INT8_KERNELS.get(device.type, DEFAULT_INT8_KERNELS)
    return next((kernel for kernel in kernels if is_accurate(kernel.make, device, torch.float32)), kernels[-1])


class Int8Backend:
    """Build int8 layers, from cached quantized weights if there are any. Implements `kernels.Backend`."""

    weight_dtype = torch.int8
    # bfloat16 activations would add their own rounding error and exceed the accuracy bound.
    activation_dtype = torch.float32

    def __init__(self, store: QuantizedStore, device: torch.device) -> None:
        self._store, self._device = store, device
        self._kernel = choose_int8_kernel(device)
        self.name = f"int8 ({self._kernel.name})"

    def make(self, name: str, read_weight: Callable[[], Tensor]) -> InferenceLinear:
        """Build the int8 replacement for module `name`; the weight is read only if the cache does not have it."""
        has_residual = name.endswith(RESIDUAL_LINEARS)
        cached = self._store.read(name)
        if cached is not None:
            return self._make_linear(cached, has_residual)
        quantized = (quantize_weight_with_residual if has_residual else quantize_weight)(read_weight())
        with ThreadPoolExecutor(1) as pool:  # write to disk while the kernel packs the weight
            written = pool.submit(self._store.write, name, quantized)
            linear = self._make_linear(quantized, has_residual)
            written.result()
        return linear

    def _make_linear(self, weight: QuantizedWeight, has_residual: bool) -> InferenceLinear:
        values, scales = weight
        linear = self._kernel.make(values.to(self._device), scales.to(self._device))
        return ResidualInt8Linear(linear) if has_residual else linear
