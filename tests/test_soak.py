"""The soak script: its arithmetic, and a small soak of an app with a scripted model."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_model import FakeModel
from webapp_helpers import ready_served_model

from paligemma.benchmarks import soak
from paligemma.benchmarks.soak import Outcome, Plan, Server, main, slope
from paligemma.webapp import server, ui

FEW = ["--cancels", "2", "--clients", "3", "--flood", "30", "--runs", "4", "--warm-up", "2", "--limit-kb", "1e6"]


def test_the_slope_is_that_of_the_line_of_least_squares():
    assert slope([5.0, 7.0, 9.0]) == pytest.approx(2.0)
    assert slope([4.0] * 9) == 0.0
    assert slope([0.0, 1.0, 0.0, 1.0]) == pytest.approx(0.2)


@pytest.mark.parametrize("wrong", [{"runs": 51}, {"cancels": 0}, {"limit_kb": -1.0}])
def test_a_plan_that_shows_nothing_is_refused(wrong):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} is"):
        Plan(**wrong)


def test_growing_memory_fails(monkeypatch):
    monkeypatch.setattr(Server, "__init__", lambda self: setattr(self, "pid", 1))
    monkeypatch.setattr(Server, "ask", lambda self, number, **changes: [])
    sizes = iter([0, 10**9, *range(10**9, 2 * 10**9, 25_000)])
    monkeypatch.setattr(Server, "resident_bytes", lambda self: next(sizes))
    outcome = soak.run_many(Server(), Plan(runs=20, warm_up=2))
    assert not outcome.passed and outcome.figures["kb_a_run"] == pytest.approx(25.0)


def test_without_a_process_memory_counts_as_not_shown(monkeypatch):
    monkeypatch.setattr(Server, "__init__", lambda self: setattr(self, "pid", None))
    assert not soak.run_many(Server(), Plan()).passed


def test_one_failure_is_the_exit_code(monkeypatch, capsys):
    monkeypatch.setattr(Server, "__init__", lambda self, url, pid: None)
    outcomes = {name: Outcome(name, name != "full", "a sentence", {"x": 1}) for name in soak.STAGES}
    monkeypatch.setattr(soak, "STAGES", {name: lambda server, plan, one=one: one for name, one in outcomes.items()})
    assert main(["--url", "http://none", "--only", "crowd"]) == 0
    assert main(["--url", "http://none"]) == 1
    printed = capsys.readouterr().out.splitlines()
    assert json.loads(printed[-1])["full"] == {"passed": False, "x": 1}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """An app whose scripted model takes a while, so that a line forms."""
    blocks = ui.build_app(ready_served_model(FakeModel(("▁a",) * 4, seconds_per_token=0.03)))
    server.launch(blocks, prevent_thread_lock=True, quiet=True)
    yield blocks.local_url
    blocks.close()


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from Linux's /proc")
def test_a_small_soak_of_a_running_app_holds(url, capsys):
    assert main(["--url", url, "--pid", str(os.getpid()), *FEW]) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert figures["cancels"]["most_tokens"] < 5 and figures["crowd"]["same"] == 3 and figures["memory"]["runs"] == 4
    assert 0 < figures["full"]["taken"] == figures["full"]["right"] and figures["full"]["words"]
