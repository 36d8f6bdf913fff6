"""Cache of image features, so that further prompts about the same image skip the vision tower.

The KV cache cannot be reused this way: the prefix is bidirectional, so its keys and values depend on the prompt.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable

import torch
from torch import Tensor

MAX_IMAGES = 8
MAX_BYTES = 64 * 1024 * 1024  # features of one 896-pixel image take 17 to 38 MB in bfloat16


class ImageFeatureCache:
    """A least-recently-used cache in front of the image encoder, keyed by pixel content. Thread-safe.

    Args:
        encode: maps pixels (1, 3, S, S) to image features; its weights must not change.
        max_images, max_bytes: limits of the cache. Features larger than `max_bytes` are not cached.
    """

    def __init__(
        self, encode: Callable[[Tensor], Tensor], max_images: int = MAX_IMAGES, max_bytes: int = MAX_BYTES
    ) -> None:
        self._encode = encode
        self._max_images = max_images
        self._max_bytes = max_bytes
        self._features: OrderedDict[str, Tensor] = OrderedDict()
        self._lock = threading.Lock()

    @torch.inference_mode()
    def __call__(self, pixel_values: Tensor) -> Tensor:
        """Return the features of these pixels, shared with the cache: do not modify them."""
        key = _content_key(pixel_values)
        with self._lock:
            if key in self._features:
                self._features.move_to_end(key)
                return self._features[key]
        features = self._encode(pixel_values)  # outside the lock, so that other images are not blocked
        with self._lock:
            self._features[key] = features
            while len(self._features) > self._max_images or self.num_bytes > self._max_bytes:
                self._features.popitem(last=False)
        return features

    @property
    def num_bytes(self) -> int:
        """Total size of the cached features, in bytes."""
        return sum(features.nbytes for features in self._features.values())


def _content_key(pixel_values: Tensor) -> str:
    digest = hashlib.sha256(f"{tuple(pixel_values.shape)} {pixel_values.dtype} {pixel_values.device}".encode())
    digest.update(pixel_values.cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()
