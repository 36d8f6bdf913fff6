"""Hugging Face's ZeroGPU: a GPU is leased per request."""

from __future__ import annotations

import os
from collections.abc import Callable

try:
    import spaces  # only on Spaces; must be imported before CUDA is initialized
except ImportError:
    spaces = None


def is_zerogpu() -> bool:
    """Whether this is a Space whose GPU is lent for one request at a time."""
    return spaces is not None and os.environ.get("SPACES_ZERO_GPU", "").lower() in ("1", "t", "true")


def with_gpu_lease(function: Callable, seconds: Callable[..., int]) -> Callable:
    """The function in a process that has the GPU, for as many seconds as `seconds` says of the same arguments."""
    return spaces.GPU(duration=seconds)(function)
