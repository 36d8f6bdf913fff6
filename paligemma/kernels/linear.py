"""Linear layers for inference: packed bfloat16 weights, and float32 matmuls for CPUs without native 16-bit ones.

Decoding one token multiplies a single activation vector by every weight of the decoder and the head, so it is bound by
memory bandwidth. PyTorch's plain bfloat16 matrix-vector product reaches little more than half of a CPU's bandwidth;
kernels with their own weight layout reach nearly all of it.

Prefill multiplies hundreds of activation vectors at once and is bound by arithmetic. On CPUs without native kernels
for them, PyTorch's bfloat16 and float16 matmuls run at a fifth of float32's speed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MIN_FLOAT32_TOKENS = 8  # with fewer tokens, converting the weights costs more than the float32 matmul saves
WEIGHTS_PER_BLOCK = 2**22  # converted to float32 at a time; small buffers are reused by the allocator
MAX_RELATIVE_ERROR = 0.01  # of each output row in the self-check, where int8 weights are exact


class InferenceLinear(nn.Module):
    """y = W x for x of shape (..., in_features), without bias and without parameters.

    Weights are stored in a kernel's own layout, so the module cannot be trained or saved.
    """

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"


class PackedLinear(InferenceLinear):
    """bfloat16 weights in oneDNN's blocked layout, with float32 accumulation.

    Args:
        weight: bfloat16, (out_features, in_features), on the CPU.
    """

    def __init__(self, weight: Tensor) -> None:
        super().__init__(weight.shape[1], weight.shape[0])
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, None, "none", [], "")


class Float32MatmulLinear(nn.Linear):
    """A linear layer with 16-bit parameters that multiplies many tokens in float32.

    Weights are converted block by block, which is exact, and outputs are rounded to the dtype of `x`.
    """

    @classmethod
    def from_linear(cls, linear: nn.Linear) -> Float32MatmulLinear:
        """Wrap the parameters of `linear` without copying them."""
        result = cls(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        result.weight, result.bias = linear.weight, linear.bias
        return result

    def forward(self, x: Tensor) -> Tensor:
        if x.numel() < MIN_FLOAT32_TOKENS * self.in_features:
            return super().forward(x)
        x_float32, block_size = x.float(), max(1, WEIGHTS_PER_BLOCK // self.in_features)
        outputs = []
        for start in range(0, self.out_features, block_size):
            block = slice(start, start + block_size)
            bias = None if self.bias is None else self.bias[block].float()
            outputs.append(F.linear(x_float32, self.weight[block].float(), bias).to(x.dtype))
        return torch.cat(outputs, dim=-1)


def has_fast_matmul(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether PyTorch has native matmul kernels for this dtype; on a CPU, only oneDNN has 16-bit ones."""
    if device.type != "cpu" or dtype == torch.float32:
        return True
    name = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}[dtype]
    try:
        return bool(getattr(torch.ops.mkldnn, name)())
    except AttributeError:  # PyTorch was built without oneDNN
        return False


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether `PackedLinear` works here: bfloat16 on a CPU that oneDNN has kernels for."""

    def pack(values: Tensor, scales: Tensor) -> InferenceLinear:
        return PackedLinear((values * scales[:, None]).bfloat16())

    return device.type == "cpu" and dtype == torch.bfloat16 and is_accurate(pack, device, dtype)


@torch.inference_mode()
def is_accurate(make: Callable[[Tensor, Tensor], InferenceLinear], device: torch.device, dtype: torch.dtype) -> bool:
    """Self-check: whether a kernel exists on this machine and computes correct products.

    The inputs include a single activation vector, vectors of very different magnitude, and the largest possible sums,
    which saturate in the 16-bit accumulation of x86 CPUs without VNNI.

    Args:
        make: builds a layer from int8 values, (out_features, in_features), and float32 scales, (out_features,).
        dtype: of the activations.
    """
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(-127, 128, (48, 96), generator=generator, dtype=torch.int8)
    values[0] = 127
    scales = torch.linspace(0.001, 0.002, 48)
    x = torch.randn(6, 96, generator=generator) * torch.tensor([1e-3, 1.0, 1.0, 50.0, 1.0, 1.0])[:, None]
    x[1], x[2] = 1.0, -1.0
    expected = F.linear(x.to(dtype).float(), values * scales[:, None])
    try:
        linear = make(values.to(device), scales.to(device))
        outputs = [linear(part.to(device, dtype)).cpu().float() for part in (x[:1], x[1:])]
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
    errors = (torch.cat(outputs) - expected).norm(dim=1) / expected.norm(dim=1)
    return bool((errors < MAX_RELATIVE_ERROR).all())
