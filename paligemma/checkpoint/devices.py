"""Devices and dtypes that a model can be loaded with."""

from __future__ import annotations

from typing import Any

import torch

from paligemma.errors import InputError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_device(device: str | torch.device = "auto") -> torch.device:
    """Return the device to load to; "auto" is CUDA, else MPS, else the CPU.

    Raises InputError for a device that is unknown or not available.
    """
    if device == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        resolved = torch.device(device)
    except (RuntimeError, TypeError):
        raise InputError(
            "device.unknown", "device must be auto, cpu, cuda, cuda:N or mps, got {device!r}.", device=str(device)
        ) from None
    try:
        torch.empty(0, device=resolved)
    except Exception:  # backends raise different errors if they are not compiled in or the device does not exist
        raise InputError(
            "device.unavailable",
            "device {device!r} is not available on this machine. Use auto or cpu.",
            device=str(device),
        ) from None
    return resolved


def resolve_dtype(dtype: str | torch.dtype = "auto") -> torch.dtype | None:
    """Return the dtype of a name; None for "auto", which depends on the checkpoint. Raises InputError for others."""
    if dtype == "auto":
        return None
    if isinstance(dtype, torch.dtype) and dtype in DTYPES.values():
        return dtype
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise InputError(
            "dtype.unsupported",
            "dtype must be one of {allowed}, got {dtype!r}.",
            allowed=", ".join(("auto", *DTYPES)),
            dtype=str(dtype),
        )
    return DTYPES[dtype]


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name without the module, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def is_fast_in_bfloat16(device: torch.device) -> bool:
    """Whether the device has native bfloat16 matmuls (on a CPU: AVX-512 BF16 or AMX)."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type == "mps":
        return True
    # Older PyTorch versions have no get_capabilities; there, float32 is the safe choice.
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))
