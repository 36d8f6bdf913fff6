"""Disk cache of quantized weights: one safetensors file per weight, in the user's cache folder."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

import torch
from platformdirs import user_cache_path
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

FORMAT_VERSION = 2  # of the cached files; part of the folder name, so other versions are ignored
MIN_FREE_BYTES = 1_000_000_000  # disk space that must remain free
STALE_SECONDS = 3600  # temporary files older than this are left over from a killed process

QuantizedWeight = tuple[Tensor, Tensor]  # int8 values, (out_features, in_features), and float32 scales, (out_features,)

log = logging.getLogger(__name__)


def cache_folder() -> Path:
    """Folder of all cached weights: `paligemma` in the user's cache folder (on Linux, $XDG_CACHE_HOME or ~/.cache)."""
    return user_cache_path("paligemma", appauthor=False)


def content_key(files: Iterable[Path]) -> str:
    """Hash the headers, sizes and modification times of weight files.

    Hashing their data would take as long as quantizing it.
    """
    digest = hashlib.sha256(f"format {FORMAT_VERSION}".encode())
    for file in files:
        status = file.stat()
        digest.update(f"{status.st_size} {status.st_mtime_ns}".encode())
        with file.open("rb") as opened:
            digest.update(opened.read(int.from_bytes(opened.read(8), "little")))
    return digest.hexdigest()[:24]


class QuantizedStore:
    """Cached quantized weights of one checkpoint.

    Missing and corrupt files are cache misses. A failed write is logged and disables further writes.

    Args:
        folder: of one checkpoint; created by the first write.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._writable = True

    @classmethod
    def for_files(cls, files: Iterable[Path]) -> QuantizedStore:
        """Return the store for a checkpoint's weight files, in the user's cache folder."""
        return cls(cache_folder() / f"int8-{content_key(files)}")

    def read(self, name: str) -> QuantizedWeight | None:
        """Return the cached weight of a module; None if it is absent or corrupt."""
        file = self._file(name)
        try:
            with safe_open(file, framework="pt") as opened:
                stored = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118 - not a dict
                checksum = (opened.metadata() or {}).get("checksum")
        except FileNotFoundError:
            return None
        except (OSError, SafetensorError):
            stored, checksum = {}, None
        if checksum is None or checksum != _checksum(stored):
            log.warning("Cached weights %s are corrupt and will be quantized again.", file)
            return None
        # Kernels keep the scales but copy the values; a view of the scales would keep the whole file mapped.
        return stored["values"], stored["scales"].clone()

    def write(self, name: str, weight: QuantizedWeight) -> None:
        """Cache the weight of a module, atomically."""
        if not self._writable:
            return
        tensors = {"values": weight[0], "scales": weight[1]}
        file = self._file(name)
        temporary = file.with_name(f"{file.name}.{os.getpid()}.tmp")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            _remove_stale_files(self.folder)
            _require_space(self.folder, sum(tensor.nbytes for tensor in tensors.values()))
            save_file(tensors, temporary, metadata={"checksum": _checksum(tensors)})
            os.replace(temporary, file)
        except (OSError, SafetensorError) as error:
            self._writable = False
            with suppress(OSError):
                temporary.unlink()
            log.warning("int8 weights are not cached and will be quantized again on the next load: %s", error)

    def _file(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"


def _remove_stale_files(folder: Path) -> None:
    """Remove temporary files of processes that were killed while writing."""
    for file in folder.glob("*.tmp"):
        with suppress(OSError):
            if file.stat().st_mtime < time.time() - STALE_SECONDS:
                file.unlink()


def _require_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if needed + MIN_FREE_BYTES > free:
        raise OSError(f"only {free / 1e9:.1f} GB free on the disk of {folder}")


def _checksum(tensors: Mapping[str, Tensor]) -> str:
    """Sum each tensor's bytes as 64-bit integers; detects lost pages and flipped bits at memory speed."""
    sums = {}
    for name, tensor in tensors.items():
        raw = tensor.flatten().view(torch.uint8)
        whole = raw.numel() // 8 * 8
        sums[name] = int(raw[:whole].view(torch.int64).sum()) + int(raw[whole:].sum())
    return json.dumps(sums, sort_keys=True)
