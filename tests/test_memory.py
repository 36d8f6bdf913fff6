"""Available memory, with simulated machines and control groups."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from paligemma.checkpoint import memory
from paligemma.checkpoint.memory import Memory, available_memory

CPU = torch.device("cpu")
GIB = 2**30


@pytest.fixture
def machine(tmp_path, monkeypatch) -> Path:
    """A machine with 16 GiB, of which 8 are available, without control groups; the folder of its cgroup files."""
    monkeypatch.setattr(memory, "OWN_CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(memory, "CGROUP_ROOT", tmp_path / "groups")
    monkeypatch.setattr(
        memory.psutil, "virtual_memory", lambda: SimpleNamespace(total=16 * GIB, available=8 * GIB, free=GIB)
    )
    return tmp_path


def write(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(f"{content}\n")


def test_this_machine_has_memory():
    found = available_memory(CPU)
    assert 0 < found.available <= found.total


def test_without_limits_all_memory_of_the_machine_counts(machine):
    assert available_memory(CPU) == Memory(16 * GIB, 8 * GIB)
    (machine / "cgroup").write_text("0::/user\n")
    write(machine / "groups/user", memory__max="max", memory__current=GIB, memory__stat="active_file 0")
    assert available_memory(CPU) == Memory(16 * GIB, 8 * GIB)


@pytest.mark.parametrize("limited", ["", "a", "a/b"])
def test_cgroup_limit_applies_and_cached_pages_are_available(machine, limited):
    (machine / "cgroup").write_text("0::/a/b\n")
    stat = f"anon {GIB}\nactive_file {GIB // 2}\ninactive_file {GIB // 2}\nfile {GIB}"
    write(machine / "groups" / limited, memory__max=4 * GIB, memory__current=3 * GIB, memory__stat=stat)
    assert available_memory(CPU) == Memory(4 * GIB, 2 * GIB)


def test_cgroup_v1_limit_applies(machine):
    (machine / "cgroup").write_text("5:cpu,cpuacct:/x\n4:memory:/docker/x\n1:name=systemd:/\n")
    limits = {"memory__limit_in_bytes": 2 * GIB, "memory__usage_in_bytes": GIB, "memory__stat": "total_inactive_file 5"}
    write(machine / "groups/memory", **limits)  # in a container, its own group is the root
    assert available_memory(CPU) == Memory(2 * GIB, GIB + 5)


def test_gpu_memory_is_the_device_s(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3 * GIB, 24 * GIB))
    assert available_memory(torch.device("cuda")) == Memory(24 * GIB, 3 * GIB)
