"""int8 weights: the decoder's and the head's matrices as whole numbers, a scale an output row; and where they are kept.

W[row] is stored as scale[row] * values[row], with values from -127 to 127 and the row's largest weight at the end of
that range. That halves what bfloat16 needs, and what a token's step has to read.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from paligemma.kernels.linear import INT8_LEVELS, PreparedLinear, TwoPartLinear, choose_int8_kernel

FORMAT_VERSION = 1  # of the stored files; older ones are not read
QUANTIZATIONS = ("int8",)
# Attention takes two int8 numbers a weight, 9 % of a PaliGemma 3B's: what is rounded there moves where the model looks.
# In random models it made most of int8's error; without it that is less than bfloat16's.
FINE_MAPS = ("qkv_proj", "o_proj")
NUMBERS_AT_ONCE = 2**20  # of a matrix, in float32: what a processor's own memory holds
SPARE_BYTES = 1_000_000_000  # left free on the disk

QuantizedWeight = tuple[Tensor, Tensor]

log = logging.getLogger(__name__)


def checked_quantization(quantize: str | None) -> str | None:
    """Raise ValueError for what is not a way to quantize."""
    if quantize is not None and quantize not in QUANTIZATIONS:
        allowed = ", ".join(repr(name) for name in QUANTIZATIONS)
        raise ValueError(f"quantize is {quantize!r}; allowed are None (the weights as they are) and {allowed}")
    return quantize


def quantize_in_two(weight: Tensor) -> QuantizedWeight:
    """A matrix as two: `quantize_weight`'s, and below it what that leaves, in steps 254 times finer.

    Arguments and results as of `quantize_weight`, with twice as many rows; weight is about the sum of the halves.
    """
    values, scales = quantize_weight(weight)
    fine = torch.empty_like(values)
    for rows in _parts(weight):
        steps = scales[rows, None]
        left = weight[rows].float() - values[rows] * steps
        fine[rows] = (left / steps * (2 * INT8_LEVELS)).round_().to(torch.int8)
    return torch.cat((values, fine)), torch.cat((scales, scales / (2 * INT8_LEVELS)))


def quantize_weight(weight: Tensor) -> QuantizedWeight:
    """Round each output row to 255 evenly spaced values, symmetric about 0.

    Args:
        weight: (out_features, in_features), of any float type, finite.

    Returns:
        int8 values, of the same shape, and float32 scales, (out_features,); weight is about scales * values.
    """
    values = torch.empty(weight.shape, dtype=torch.int8)
    scales = torch.empty(weight.shape[0])
    for rows in _parts(weight):
        wide = weight[rows].float()
        largest = wide.abs().amax(dim=1).clamp(min=torch.finfo(torch.float32).tiny * INT8_LEVELS)
        scales[rows] = largest / INT8_LEVELS
        values[rows] = (wide / scales[rows, None]).round_().to(torch.int8)
    return values, scales


def _parts(weight: Tensor) -> Iterator[slice]:
    """Its rows, some at a time."""
    num_rows = max(1, NUMBERS_AT_ONCE // weight.shape[1])
    return (slice(start, start + num_rows) for start in range(0, weight.shape[0], num_rows))


# Kept values ------------------------------------------------------------------------------------------------------


def cache_folder() -> Path:
    """Where quantized weights are kept: `paligemma` in XDG_CACHE_HOME, by default in ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "paligemma"


def content_key(files: Iterable[Path]) -> str:
    """A name for what the files hold, from their headers, sizes and times of change: other weights get another name.

    Reading the values themselves would take as long as quantizing them.
    """
    digest = hashlib.sha256(f"format {FORMAT_VERSION}".encode())
    for file in files:
        status = file.stat()
        digest.update(f"{status.st_size} {status.st_mtime_ns}".encode())
        with file.open("rb") as opened:
            digest.update(opened.read(int.from_bytes(opened.read(8), "little")))
    return digest.hexdigest()[:24]


class QuantizedStore:
    """Quantized weights of one checkpoint on the disk, a safetensors file a group of matrices.

    It only saves time: what is missing, damaged or of another version is as if it had never been stored, and what
    cannot be stored is a warning.

    Args:
        folder: its own for each checkpoint; made when the first file is written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._writable = True

    @classmethod
    def of_files(cls, files: Iterable[Path]) -> QuantizedStore:
        """The store for these weights, in the user's cache folder."""
        return cls(cache_folder() / f"int8-{content_key(files)}")

    def read(self, group: str, names: Iterable[str]) -> dict[str, QuantizedWeight] | None:
        """The group's matrices by name; None where they have to be made anew."""
        file = self._file(group)
        try:
            with safe_open(file, framework="pt") as opened:
                stored = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118 - it is no dict
                checksum = (opened.metadata() or {}).get("checksum")
        except FileNotFoundError:
            return None
        except (OSError, SafetensorError):
            stored, checksum = {}, None
        if checksum is None or checksum != _checksum(stored):
            log.warning("%s is damaged; it is made anew", file)
            return None
        # Copied: kept scales would keep the file's pages in memory.
        return {name: (stored[f"{name}.values"], stored[f"{name}.scales"].clone()) for name in names}

    def write(self, group: str, weights: Mapping[str, QuantizedWeight]) -> None:
        """Store a group, whole or not at all. After a failure no further one is tried."""
        if not self._writable:
            return
        tensors = {f"{name}.values": values for name, (values, _) in weights.items()}
        tensors |= {f"{name}.scales": scales for name, (_, scales) in weights.items()}
        file = self._file(group)
        unfinished = file.with_name(f"{file.name}.{os.getpid()}.unfinished")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            _remove_leftovers(self.folder)
            _require_space(self.folder, sum(tensor.nbytes for tensor in tensors.values()))
            save_file(tensors, unfinished, metadata={"checksum": _checksum(tensors)})
            os.replace(unfinished, file)
        except (OSError, SafetensorError) as error:
            self._writable = False
            with suppress(OSError):
                unfinished.unlink()
            log.warning("int8 weights are not kept, so that the next start quantizes them again: %s", error)

    def _file(self, group: str) -> Path:
        return self.folder / f"{group}.safetensors"


def _remove_leftovers(folder: Path) -> None:
    """Remove what processes left that ended while they wrote; an hour is longer than a file takes."""
    for file in folder.glob("*.unfinished"):
        with suppress(OSError):
            if file.stat().st_mtime < time.time() - 3600:
                file.unlink()


def _require_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if needed + SPARE_BYTES > free:
        raise OSError(f"the disk of {folder} has {free / 1e9:.1f} GB free")


def _checksum(tensors: Mapping[str, Tensor]) -> str:
    """A sum of each tensor's bytes, eight at a time: a page that was lost or a bit that was flipped changes it."""
    sums = {}
    for name, tensor in tensors.items():
        raw = tensor.flatten().view(torch.uint8)
        whole = raw.numel() // 8 * 8
        sums[name] = int(raw[:whole].view(torch.int64).sum()) + int(raw[whole:].sum())
    return json.dumps(sums, sort_keys=True)


class Int8Preparation:
    """Makes a checkpoint's int8 maps, from the store where it has them.

    Attributes:
        backend: what computes, for the badge.
        hidden_dtype: of the decoder's rows. float32: with bfloat16's own rounding on top, int8's would no longer pass.
    """

    activation_dtype = torch.float32

    def __init__(self, store: QuantizedStore, device: torch.device) -> None:
        self._store, self._device = store, device
        self._kernel = choose_int8_kernel(device)
        self.backend = f"int8 ({self._kernel.name})"

    def make(self, group: str, weights: Mapping[str, Callable[[], Tensor]]) -> dict[str, PreparedLinear]:
        """A group's maps by name. `weights` read the matrices in their stored type, where the store has none."""
        quantized = self._store.read(group, weights)
        if quantized is not None:
            return self._linears(quantized)
        quantized = {
            name: (quantize_in_two if name.endswith(FINE_MAPS) else quantize_weight)(read())
            for name, read in weights.items()
        }
        with ThreadPoolExecutor(1) as pool:  # the disk and the processor at once
            written = pool.submit(self._store.write, group, quantized)
            linears = self._linears(quantized)
            written.result()
        return linears

    def _linears(self, quantized: Mapping[str, QuantizedWeight]) -> dict[str, PreparedLinear]:
        return {name: self._linear(name, *weight) for name, weight in quantized.items()}

    def _linear(self, name: str, values: Tensor, scales: Tensor) -> PreparedLinear:
        linear = self._kernel.make(values.to(self._device), scales.to(self._device))
        return TwoPartLinear(linear) if name.endswith(FINE_MAPS) else linear
