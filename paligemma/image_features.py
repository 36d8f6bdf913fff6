"""What the vision tower made of the last pictures, kept for the next prompt on the same one.

Only what does not depend on the prompt: keys and values do, since the prefix reads picture and prompt together.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable

import torch
from torch import Tensor

MAX_IMAGES = 8
MAX_BYTES = 64 * 1024 * 1024  # 896 pixels make 19 to 38 MB


class ImageFeatureCache:
    """A function from pixels to features that remembers its last answers, those used last longest.

    It may be called from several threads at once.

    Args:
        compute: pixels (1, 3, S, S) to features, from the same weights each time.
        max_pictures, max_bytes: most that is kept; a picture larger than that is computed each time.
    """

    def __init__(
        self, compute: Callable[[Tensor], Tensor], max_pictures: int = MAX_IMAGES, max_bytes: int = MAX_BYTES
    ) -> None:
        self._compute = compute
        self._max_pictures = max_pictures
        self._max_bytes = max_bytes
        self._kept: OrderedDict[str, Tensor] = OrderedDict()
        self._lock = threading.Lock()

    @torch.inference_mode()
    def __call__(self, pixel_values: Tensor) -> Tensor:
        """The features of these very pixels; not to be written into."""
        key = _content_key(pixel_values)
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        features = self._compute(pixel_values)  # outside the lock: another picture's visitor need not wait
        with self._lock:
            self._kept[key] = features
            while len(self._kept) > self._max_pictures or self.num_bytes > self._max_bytes:
                self._kept.popitem(last=False)
        return features

    @property
    def num_bytes(self) -> int:
        """Memory taken by what is kept."""
        return sum(features.nbytes for features in self._kept.values())


def _content_key(pixel_values: Tensor) -> str:
    digest = hashlib.sha256(f"{tuple(pixel_values.shape)} {pixel_values.dtype} {pixel_values.device}".encode())
    digest.update(pixel_values.cpu().contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()
