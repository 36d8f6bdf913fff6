"""Faster replacements for `nn.Linear` in inference, chosen for this machine.

The model classes contain plain `nn.Linear` modules. `choose_backend` selects a weight format, and `replace_linears`
swaps modules one by one, so that only one weight at a time is in memory twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from paligemma.errors import InputError
from paligemma.kernels.int8 import Int8Backend
from paligemma.kernels.linear import (
    Float32MatmulLinear,
    InferenceLinear,
    PackedLinear,
    can_pack,
    has_fast_matmul,
)
from paligemma.kernels.store import QuantizedStore

__all__ = [
    "QUANTIZATIONS",
    "Backend",
    "InferenceLinear",
    "check_quantization",
    "choose_backend",
    "has_fast_matmul",
    "replace_linears",
    "use_float32_matmul",
]

QUANTIZATIONS = ("int8",)

WeightReader = Callable[[], Tensor]


class Backend(Protocol):
    """A weight format and its matmul kernel.

    Attributes:
        name: shown to users, such as "int8 (oneDNN)".
        weight_dtype: dtype of the converted weights, used to estimate memory.
        activation_dtype: dtype of the decoder's hidden states.
    """

    name: str
    weight_dtype: torch.dtype
    activation_dtype: torch.dtype

    def make(self, name: str, read_weight: WeightReader) -> InferenceLinear:
        """Build the replacement for module `name`; `read_weight` returns its weight, (out_features, in_features)."""
        ...


class PackedBackend:
    """bfloat16 weights in oneDNN's blocked layout."""

    name = "bfloat16 (packed for oneDNN)"
    weight_dtype = torch.bfloat16
    activation_dtype = torch.bfloat16

    def make(self, name: str, read_weight: WeightReader) -> InferenceLinear:
        return PackedLinear(read_weight().to(torch.bfloat16))


def check_quantization(quantize: str | None) -> None:
    """Raise InputError unless `quantize` is None or a supported method."""
    if quantize is not None and quantize not in QUANTIZATIONS:
        raise InputError(
            "quantize.unknown",
            "quantize must be None or one of {allowed}, got {quantize!r}.",
            allowed=", ".join(QUANTIZATIONS),
            quantize=str(quantize),
        )


def choose_backend(
    quantize: str | None, device: torch.device, dtype: torch.dtype, weight_files: Iterable[Path]
) -> Backend | None:
    """Return the backend for a model in this dtype on this device; None for plain `nn.Linear` modules.

    Args:
        quantize: None or "int8".
        weight_files: the checkpoint's safetensors files, which identify its entry in the disk cache.
    """
    check_quantization(quantize)
    if quantize is not None:
        return Int8Backend(QuantizedStore.for_files(weight_files), device)
    return PackedBackend() if can_pack(device, dtype) else None


def replace_linears(
    model: nn.Module,
    weights: Mapping[str, WeightReader],
    backend: Backend,
    on_replaced: Callable[[str], None] = lambda name: None,
) -> None:
    """Replace linear modules with those of a backend, one by one. The model then supports inference only.

    Args:
        weights: module names in `model`, each with a function that reads the weight in its stored dtype.
        on_replaced: called with each name after its replacement.
    """
    for name, read_weight in weights.items():
        model.set_submodule(name, backend.make(name, read_weight))
        on_replaced(name)


def use_float32_matmul(model: nn.Module) -> None:
    """Replace every remaining `nn.Linear` with a `Float32MatmulLinear` with the same parameters."""
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear:
            model.set_submodule(name, Float32MatmulLinear.from_linear(module))
