"""The soak test: its arithmetic, and a short soak of an app with a scripted model."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_model import FakeModel
from webapp_helpers import ready_served_model

from paligemma.benchmarks import soak
from paligemma.benchmarks.soak import Outcome, Server, Workload, main, slope
from paligemma.webapp import server, ui

SMALL = ["--cancels", "2", "--clients", "3", "--flood", "30", "--runs", "4", "--warm-up", "2", "--limit-kb", "1e6"]


def test_slope_is_least_squares():
    assert slope([5.0, 7.0, 9.0]) == pytest.approx(2.0)
    assert slope([4.0] * 9) == 0.0
    assert slope([0.0, 1.0, 0.0, 1.0]) == pytest.approx(0.2)


@pytest.mark.parametrize("options", [{"runs": 51}, {"cancels": 0}, {"limit_kb": -1.0}])
def test_too_small_workload_is_rejected(options):
    with pytest.raises(ValueError, match=f"{next(iter(options))} must be"):
        Workload(**options)


def test_memory_growth_fails(monkeypatch):
    monkeypatch.setattr(Server, "__init__", lambda self: setattr(self, "pid", 1))
    monkeypatch.setattr(Server, "generate", lambda self, number, **changes: [])
    sizes = iter([0, 10**9, *range(10**9, 2 * 10**9, 25_000)])
    monkeypatch.setattr(Server, "resident_bytes", lambda self: next(sizes))
    outcome = soak.measure_memory_growth(Server(), Workload(runs=20, warm_up=2))
    assert not outcome.passed and outcome.figures["kb_a_run"] == pytest.approx(25.0)


def test_memory_stage_fails_without_a_process_id(monkeypatch):
    monkeypatch.setattr(Server, "__init__", lambda self: setattr(self, "pid", None))
    assert not soak.measure_memory_growth(Server(), Workload()).passed


@pytest.mark.parametrize(
    ("seconds", "limit"),
    [(0.1, soak.LONG_TOKENS), (4.0, soak.LONG_TOKENS // 4), (100.0, soak.LONG_TOKENS // 10)],
)
def test_cancel_limit_depends_on_the_generation_speed(seconds, limit, monkeypatch):
    clock = iter([0.0, seconds])
    monkeypatch.setattr(soak.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(Server, "__init__", lambda self: None)
    monkeypatch.setattr(Server, "generate", lambda self, number, **changes: [(1, 0.0)] * soak.LONG_TOKENS)
    assert soak.max_tokens_before_cancel(Server(), {}) == limit


def test_failed_stage_sets_the_exit_code(monkeypatch, capsys):
    monkeypatch.setattr(Server, "__init__", lambda self, url, pid: None)
    outcomes = {name: Outcome(name, name != "full", "summary", {"x": 1}) for name in soak.STAGES}
    monkeypatch.setattr(soak, "STAGES", {name: lambda server, workload, one=one: one for name, one in outcomes.items()})
    assert main(["--url", "http://none", "--only", "crowd"]) == 0
    assert main(["--url", "http://none"]) == 1
    printed = capsys.readouterr().out.splitlines()
    assert json.loads(printed[-1])["full"] == {"passed": False, "x": 1}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """An app whose scripted model is slow enough for the queue to fill."""
    blocks = ui.build_app(ready_served_model(FakeModel(("▁a",) * 4, seconds_per_token=0.03)))
    server.launch(blocks, prevent_thread_lock=True, quiet=True)
    yield blocks.local_url
    blocks.close()


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from Linux's /proc")
def test_small_soak_of_a_running_app_passes(url, capsys):
    code = main(["--url", url, "--pid", str(os.getpid()), *SMALL])
    printed = capsys.readouterr().out
    assert code == 0, printed
    figures = json.loads(printed.splitlines()[-1])
    assert figures["cancels"]["most_tokens"] <= figures["cancels"]["limit"]
    assert figures["crowd"]["same"] == 3 and figures["memory"]["runs"] == 4
    assert 0 < figures["full"]["taken"] == figures["full"]["right"] and figures["full"]["words"]
