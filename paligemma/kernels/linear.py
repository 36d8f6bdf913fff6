"""Linear maps for the machine at hand: their weights laid out for one kernel, or multiplied in another type.

To write a token is to multiply one row with every weight of the decoder and its head, so it takes as long as reading
them does. PyTorch's plain product in bfloat16 reads them at little more than half of a CPU's memory speed; the kernels
here have the weights in their own order, or half as large, and come close to it. What a kernel keeps is opaque: it has
no parameters, it cannot be trained, saved or moved.

To read a picture and a prompt is to multiply hundreds of rows, so it takes as long as the arithmetic does. Many laptops
have none for 16-bit numbers; PyTorch does without, at a fifth of float32's speed. There, `WideLinear` multiplies in
float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

INT8_LEVELS = 127  # symmetric: -127 to 127
WIDE_FROM_ROWS = 8
WEIGHTS_AT_ONCE = 2**22  # that are float32 for a moment: memory that is taken again is the faster, the smaller it is
NUMBERS_AT_ONCE = 2**18  # of the rows, while they are rounded: what stays in a processor's own memory
MAX_ROW_ERROR = 0.01  # of a kernel's answer to the check, whose int8 weights are exact


class PreparedLinear(nn.Module):
    """y = W x for rows (..., in_features), without bias; a subclass says how W is kept."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"


class PackedLinear(PreparedLinear):
    """The weight's own bfloat16 values in oneDNN's order; sums are in float32, as in the plain product.

    Args:
        weight: bfloat16, (out_features, in_features), on the CPU.
    """

    def __init__(self, weight: Tensor) -> None:
        super().__init__(weight.shape[1], weight.shape[0])
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, None, "none", [], "")


class WideLinear(nn.Linear):
    """A linear map with weights of 16 bits whose products with many rows are in float32.

    A part of the weights at a time is brought to float32, which is exact, and the results are rounded to the rows'
    type, as those of 16-bit kernels are. For few rows that would take longer than it saves.
    """

    def forward(self, x: Tensor) -> Tensor:
        if x.numel() < WIDE_FROM_ROWS * self.in_features:
            return super().forward(x)
        rows, num_outputs = x.float(), max(1, WEIGHTS_AT_ONCE // self.in_features)
        parts = []
        for start in range(0, self.out_features, num_outputs):
            some = slice(start, start + num_outputs)
            bias = None if self.bias is None else self.bias[some].float()
            parts.append(F.linear(rows, self.weight[some].float(), bias).to(x.dtype))
        return torch.cat(parts, dim=-1)


def widen(model: nn.Module) -> None:
    """Make every plain linear map of a model a `WideLinear`, with the same parameters."""
    for parent in list(model.modules()):
        for name, linear in list(parent.named_children()):
            if type(linear) is nn.Linear:
                wide = WideLinear(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
                wide.weight, wide.bias = linear.weight, linear.bias
                setattr(parent, name, wide)


# Eight bits -------------------------------------------------------------------------------------------------------


def quantize_rows(x: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """Each row as whole numbers from -levels to levels and its step size, and what that leaves as whole numbers again.

    A row has a step of its own, so that a small row beside a large one keeps its detail. The second numbers count steps
    that are 2 * levels times finer. As a second row they cost a product that waits for the weights next to nothing, and
    with them the rounding of the rows is as nothing beside that of the weights.

    Args:
        x: (rows, features), of any float type. levels: at most 127.

    Returns:
        uint8, (2 * rows, features), the finer ones below, all with `levels + 1` added; and float32 steps, (rows, 1).
    """
    numbers = torch.empty((2, *x.shape), dtype=torch.uint8)
    steps = torch.empty((x.shape[0], 1))
    num_rows = max(1, NUMBERS_AT_ONCE // x.shape[1])
    for start in range(0, x.shape[0], num_rows):
        rows = slice(start, start + num_rows)
        largest = x[rows].abs().amax(dim=-1, keepdim=True).float()
        steps[rows] = largest.clamp_(min=torch.finfo(torch.float32).tiny * levels).div_(levels)
        scaled = x[rows] / steps[rows]
        coarse = scaled.round()
        numbers[1, rows] = scaled.sub_(coarse).mul_(2 * levels).round_().add_(levels + 1)
        numbers[0, rows] = coarse.add_(levels + 1)
    return numbers.flatten(0, 1), steps


class OneDnnInt8Linear(PreparedLinear):
    """Whole-number products of int8 weights and of rows brought to two int8 numbers each (`quantize_rows`).

    Args:
        values: int8, (out_features, in_features). scales: float32, (out_features,). W = scales * values.
        levels: of the rows' numbers. Without VNNI, x86 adds two products in 16 bits, which only rows of 7 bits fit.
    """

    def __init__(self, values: Tensor, scales: Tensor, levels: int = INT8_LEVELS) -> None:
        super().__init__(values.shape[1], values.shape[0])
        self.levels = levels
        self.packed = torch.ops.onednn.qlinear_prepack(values.contiguous(), None)
        self.scales = scales
        self.zero_points = torch.zeros(len(scales), dtype=torch.int64)
        # What is added to the rows' numbers adds a constant to each sum; taken off here, it costs no time later.
        added = torch.full((1, self.in_features), levels + 1, dtype=torch.uint8)
        self.bias = -self._products(added, bias=None)[0]

    def forward(self, x: Tensor) -> Tensor:
        numbers, steps = quantize_rows(x.flatten(0, -2), self.levels)
        coarse, fine = self._products(numbers, self.bias).chunk(2)
        products = coarse.add_(fine, alpha=0.5 / self.levels).mul_(steps)
        return products.to(x.dtype).unflatten(0, x.shape[:-1])

    def _products(self, numbers: Tensor, bias: Tensor | None) -> Tensor:
        """uint8 (rows, in_features) to float32 (rows, out_features), in units of the rows' steps."""
        return torch.ops.onednn.qlinear_pointwise(
            *(numbers, 1.0, 0, self.packed, self.scales, self.zero_points, bias),
            *(1.0, 0, torch.float32, "none", [], ""),
        )


class SevenBitRowsInt8Linear(OneDnnInt8Linear):
    """The same for processors without VNNI."""

    def __init__(self, values: Tensor, scales: Tensor) -> None:
        super().__init__(values, scales, levels=INT8_LEVELS // 2)


class WeightOnlyInt8Linear(PreparedLinear):
    """int8 weights against rows as they are. Arguments as in `OneDnnInt8Linear`."""

    def __init__(self, values: Tensor, scales: Tensor) -> None:
        super().__init__(values.shape[1], values.shape[0])
        self.values = values.contiguous()
        self.scales = scales

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        return torch._weight_int8pack_mm(rows, self.values, self.scales.to(x.dtype)).unflatten(0, x.shape[:-1])


class UnpackedInt8Linear(WeightOnlyInt8Linear):
    """The specification of the others, and what remains where none of them computes: slow, right, on any device."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.values.to(x.dtype) * self.scales[:, None].to(x.dtype))


class TwoPartLinear(PreparedLinear):
    """The sum of two maps of the same rows, which `linear` computes as one, the second below the first."""

    def __init__(self, linear: PreparedLinear) -> None:
        super().__init__(linear.in_features, linear.out_features // 2)
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.linear(x).chunk(2, dim=-1)
        return first + second


# Choosing a kernel ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Int8Kernel:
    """A way to compute with int8 weights, and what it is called in the badge."""

    name: str
    make: Callable[[Tensor, Tensor], PreparedLinear]


# Which kernel on which kind of device: the first that computes there what it should.
INT8_KERNELS = {
    "cpu": (
        Int8Kernel("oneDNN", OneDnnInt8Linear),
        Int8Kernel("oneDNN, 7-bit rows", SevenBitRowsInt8Linear),
        Int8Kernel("weights only", WeightOnlyInt8Linear),
        Int8Kernel("unpacked", UnpackedInt8Linear),
    )
}
INT8_KERNELS_ELSEWHERE = (Int8Kernel("unpacked", UnpackedInt8Linear),)


def choose_int8_kernel(device: torch.device) -> Int8Kernel:
    """The machine's kernel, found by trying: one may be missing, or overflow."""
    kernels = INT8_KERNELS.get(device.type, INT8_KERNELS_ELSEWHERE)
    return next((kernel for kernel in kernels if _computes(kernel.make, device, torch.float32)), kernels[-1])


def multiplies_fast(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether PyTorch has kernels here for products of many rows in this type, or only makes do."""
    if device.type != "cpu" or dtype == torch.float32:
        return True
    name = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}[dtype]
    try:
        return getattr(torch.ops.mkldnn, name)()
    except AttributeError:  # built without oneDNN
        return False


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether `PackedLinear` computes here: bfloat16 on a CPU for which oneDNN has kernels."""
    return device.type == "cpu" and dtype == torch.bfloat16 and _computes(_packed_from_int8, device, dtype)


def _packed_from_int8(values: Tensor, scales: Tensor) -> PreparedLinear:
    return PackedLinear((values * scales[:, None]).bfloat16())


@torch.inference_mode()
def _computes(make: Callable[[Tensor, Tensor], PreparedLinear], device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a kernel answers rightly, also for one row, rows of very different size, and the largest sums."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(-127, 128, (48, 96), generator=generator, dtype=torch.int8)
    values[0] = 127
    scales = torch.linspace(0.001, 0.002, 48)
    rows = torch.randn(6, 96, generator=generator) * torch.tensor([1e-3, 1.0, 1.0, 50.0, 1.0, 1.0])[:, None]
    rows[1], rows[2] = 1.0, -1.0
    expected = F.linear(rows.to(dtype).float(), values * scales[:, None])
    try:
        linear = make(values.to(device), scales.to(device))
        found = [linear(rows[some].to(device, dtype)).cpu().float() for some in (slice(0, 1), slice(1, 6))]
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
    errors = (torch.cat(found) - expected).norm(dim=1) / expected.norm(dim=1)
    return bool((errors < MAX_ROW_ERROR).all())


# The decoder ------------------------------------------------------------------------------------------------------


class ExactPreparation:
    """Makes a checkpoint's maps of its own bfloat16 values.

    Attributes:
        backend: what computes, for the badge.
        hidden_dtype: of the decoder's rows.
    """

    backend = "bfloat16 (packed for oneDNN)"
    activation_dtype = torch.bfloat16

    def make(self, group: str, weights: Mapping[str, Callable[[], Tensor]]) -> dict[str, PreparedLinear]:
        """A group's maps by name; `weights` read the matrices, in their stored type."""
        return {name: PackedLinear(read().to(torch.bfloat16)) for name, read in weights.items()}


# What a layer's prepared maps are made of. Maps of the same rows are one: it is read in one go, and rows that are
# brought to int8 are so once.
LAYER_MAPS = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attn.o_proj": ("self_attn.o_proj",),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down_proj": ("mlp.down_proj",),
}


def decoder_maps(num_layers: int) -> dict[str, dict[str, tuple[str, ...]]]:
    """The language model's prepared maps by name, and what each is made of: a group a layer, then the head."""
    groups = {
        f"layer-{index:02}": {
            f"model.layers.{index}.{name}": tuple(f"model.layers.{index}.{part}" for part in parts)
            for name, parts in LAYER_MAPS.items()
        }
        for index in range(num_layers)
    }
    return {**groups, "head": {"lm_head": ("lm_head",)}}


def put_in_place(language_model: nn.Module, name: str, linear: PreparedLinear, parts: tuple[str, ...]) -> None:
    """Let a prepared map compute instead of its parts, which leave the model."""
    for part in parts:
        parent, _, child = part.rpartition(".")
        delattr(language_model.get_submodule(parent), child)
    parent, _, child = name.rpartition(".")
    setattr(language_model.get_submodule(parent), child, linear)
