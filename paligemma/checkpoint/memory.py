"""How much memory a model may take: what the machine has free, within the limits of the containers around it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

MEMINFO = Path("/proc/meminfo")
OWN_CGROUPS = Path("/proc/self/cgroup")
CGROUP_ROOT = Path("/sys/fs/cgroup")
# Version 2, then version 1: folder of the controller, its limit, its use, and what of the use can be taken back.
CGROUP_FILES = (
    ("", "memory.max", "memory.current", ("active_file", "inactive_file")),
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file")),
)


@dataclass(frozen=True)
class Memory:
    """Bytes in all, and those that a program may still take; file pages that the system can drop count as free."""

    total: int
    available: int


def available_memory(device: torch.device) -> Memory | None:
    """The memory that weights on this device take; None where the system does not say."""
    if device.type == "cuda":
        available, total = torch.cuda.mem_get_info(device)
        return Memory(total, available)
    limits = [memory for memory in (_of_machine(), *_of_cgroups()) if memory]
    if not limits:
        return None
    return Memory(min(limit.total for limit in limits), min(limit.available for limit in limits))


def _of_machine() -> Memory | None:
    if MEMINFO.exists():
        rows = (line.split() for line in MEMINFO.read_text(encoding="ascii").splitlines())
        kilobytes = {row[0]: int(row[1]) for row in rows if len(row) > 1}
        return Memory(kilobytes["MemTotal:"] * 1024, kilobytes["MemAvailable:"] * 1024)
    if "SC_PHYS_PAGES" in getattr(os, "sysconf_names", {}):  # macOS says how much there is, not how much is free
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return Memory(total, total)
    return None


def _of_cgroups() -> Iterator[Memory]:
    """The limits of this process's control groups and of all groups around them, on Linux."""
    if not OWN_CGROUPS.exists():
        return
    for line in OWN_CGROUPS.read_text(encoding="utf-8").splitlines():
        controllers, path = line.split(":", 2)[1:]
        if controllers not in ("", "memory") and "memory" not in controllers.split(","):
            continue
        folder, *names = CGROUP_FILES[1 if controllers else 0]
        root = CGROUP_ROOT / folder
        group = root / path.lstrip("/")
        for place in (group, *group.parents):
            if place == root or root in place.parents:
                memory = _of_cgroup(place, *names)
                if memory:
                    yield memory


def _of_cgroup(folder: Path, limit: str, use: str, reclaimable: tuple[str, ...]) -> Memory | None:
    """None for a group without a limit, or whose files cannot be read."""
    try:
        total, used = int((folder / limit).read_text()), int((folder / use).read_text())
        rows = (line.split() for line in (folder / "memory.stat").read_text().splitlines())
        cached = sum(int(count) for name, count in rows if name in reclaimable)
    except (OSError, ValueError):  # "max" is no number
        return None
    return Memory(total, max(0, total - used + cached))
