"""Memory available for model weights, within the limits of containers (cgroups)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from paligemma.checkpoint.devices import DTYPES, dtype_name
from paligemma.errors import CheckpointError

OWN_CGROUPS = Path("/proc/self/cgroup")
CGROUP_ROOT = Path("/sys/fs/cgroup")
# cgroup v2, then v1: controller's folder, limit, usage, and the reclaimable part of the usage.
CGROUP_FILES = (
    ("", "memory.max", "memory.current", ("active_file", "inactive_file")),
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file")),
)


@dataclass(frozen=True)
class Memory:
    """Total and available bytes; cached file pages count as available."""

    total: int
    available: int


def available_memory(device: torch.device) -> Memory:
    """Return the memory for weights on a device: the GPU's, or the machine's within its cgroup limits."""
    if device.type == "cuda":
        available, total = torch.cuda.mem_get_info(device)
        return Memory(total, available)
    machine = psutil.virtual_memory()
    limits = [Memory(machine.total, machine.available), *_cgroup_limits()]
    return Memory(min(limit.total for limit in limits), min(limit.available for limit in limits))


def _cgroup_limits() -> Iterator[Memory]:
    """Memory limits of this process's cgroups and their parents (Linux)."""
    if not OWN_CGROUPS.exists():
        return
    for line in OWN_CGROUPS.read_text(encoding="utf-8").splitlines():
        controllers, path = line.split(":", 2)[1:]
        if controllers not in ("", "memory") and "memory" not in controllers.split(","):
            continue
        folder, limit, usage, reclaimable = CGROUP_FILES[1 if controllers else 0]
        root = CGROUP_ROOT / folder
        group = root / path.lstrip("/")
        for cgroup in (group, *group.parents):
            if cgroup == root or root in cgroup.parents:
                memory = _read_cgroup(cgroup, limit, usage, reclaimable)
                if memory:
                    yield memory


def _read_cgroup(folder: Path, limit: str, usage: str, reclaimable: tuple[str, ...]) -> Memory | None:
    """Return a cgroup's limit; None if it has none or its files are not readable."""
    try:
        total, used = int((folder / limit).read_text()), int((folder / usage).read_text())
        rows = (line.split() for line in (folder / "memory.stat").read_text().splitlines())
        cached = sum(int(count) for name, count in rows if name in reclaimable)
    except (OSError, ValueError):  # an unlimited group has "max" here
        return None
    return Memory(total, max(0, total - used + cached))


def require_memory(
    needed: int, device: torch.device, dtype: torch.dtype, checkpoint: str, stored_dtype: str | None = None
) -> None:
    """Raise CheckpointError unless `needed` bytes are available.

    Args:
        dtype: of the weights after loading.
        checkpoint: the checkpoint's name in the message.
        stored_dtype: name of the dtype in the files; on a CPU, weights in this dtype are memory-mapped instead.
    """
    memory = available_memory(device)
    if needed <= memory.available:
        return
    values = {
        "checkpoint": checkpoint,
        "needed": format_gigabytes(needed),
        "dtype": dtype_name(dtype),
        "device": str(device),
        "available": format_gigabytes(memory.available),
        "total": format_gigabytes(memory.total),
    }
    if device.type != "cpu":
        raise CheckpointError(
            "memory.insufficient_on_device",
            "{checkpoint} needs {needed} of memory as {dtype} on {device}, but only {available} of {total} is "
            "available. Use device cpu, free some memory, or use a smaller model.",
            **values,
        )
    if stored_dtype in DTYPES and stored_dtype != dtype_name(dtype):
        raise CheckpointError(
            "memory.insufficient_for_conversion",
            "{checkpoint} needs {needed} of memory as {dtype} on {device}, but only {available} of {total} is "
            "available. Use dtype {stored_dtype}, whose weights are memory-mapped, free some "
            "memory, or use a smaller model.",
            stored_dtype=stored_dtype,
            **values,
        )
    raise CheckpointError(
        "memory.insufficient",
        "{checkpoint} needs {needed} of memory as {dtype} on {device}, but only {available} of {total} is "
        "available. Free some memory, or use a smaller model.",
        **values,
    )


def format_gigabytes(num_bytes: int) -> str:
    """Format a size, such as `5.85 GB`."""
    return f"{num_bytes / 1e9:.2f} GB"
