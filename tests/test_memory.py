"""How much memory is free, read from files like those of Linux."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paligemma.checkpoint import memory
from paligemma.checkpoint.memory import Memory, available_memory

CPU = torch.device("cpu")
GIB = 2**30


@pytest.fixture
def linux(tmp_path, monkeypatch) -> Path:
    """16 GiB with 8 free, and no control groups."""
    monkeypatch.setattr(memory, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "OWN_CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(memory, "CGROUP_ROOT", tmp_path / "groups")
    lines = (
        f"MemTotal: {16 * 2**20} kB",
        f"MemFree: {2**20} kB",
        f"MemAvailable: {8 * 2**20} kB",
        "HugePages_Total: 0",
    )
    (tmp_path / "meminfo").write_text("\n".join(lines))
    return tmp_path


def write(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(f"{content}\n")


def test_without_limits_the_machine_counts(linux):
    assert available_memory(CPU) == Memory(16 * GIB, 8 * GIB)
    (linux / "cgroup").write_text("0::/user\n")
    write(linux / "groups/user", memory__max="max", memory__current=GIB, memory__stat="active_file 0")
    assert available_memory(CPU) == Memory(16 * GIB, 8 * GIB)


@pytest.mark.parametrize("limited", ["", "a", "a/b"])
def test_the_limit_of_a_container_counts_and_what_it_cached_is_free(linux, limited):
    (linux / "cgroup").write_text("0::/a/b\n")
    stat = f"anon {GIB}\nactive_file {GIB // 2}\ninactive_file {GIB // 2}\nfile {GIB}"
    write(linux / "groups" / limited, memory__max=4 * GIB, memory__current=3 * GIB, memory__stat=stat)
    assert available_memory(CPU) == Memory(4 * GIB, 2 * GIB)


def test_groups_of_the_first_version_count_too(linux):
    (linux / "cgroup").write_text("5:cpu,cpuacct:/x\n4:memory:/docker/x\n1:name=systemd:/\n")
    limits = {"memory__limit_in_bytes": 2 * GIB, "memory__usage_in_bytes": GIB, "memory__stat": "total_inactive_file 5"}
    write(linux / "groups/memory", **limits)  # a container sees its own group as the root
    assert available_memory(CPU) == Memory(2 * GIB, GIB + 5)


def test_elsewhere_all_memory_counts_as_free_or_nothing_is_known(linux, monkeypatch):
    (linux / "meminfo").unlink()
    monkeypatch.setattr(memory.os, "sysconf_names", {"SC_PHYS_PAGES": 1, "SC_PAGE_SIZE": 2}, raising=False)
    monkeypatch.setattr(memory.os, "sysconf", {"SC_PHYS_PAGES": 1000, "SC_PAGE_SIZE": 4096}.get, raising=False)
    assert available_memory(CPU) == Memory(4096000, 4096000)
    monkeypatch.setattr(memory.os, "sysconf_names", {}, raising=False)
    assert available_memory(CPU) is None


def test_a_gpu_has_its_own_memory(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3 * GIB, 24 * GIB))
    assert available_memory(torch.device("cuda")) == Memory(24 * GIB, 3 * GIB)
