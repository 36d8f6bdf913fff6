"""The history of runs, branches and steps, and the list of runs."""

from __future__ import annotations

import dataclasses

from run_helpers import make_run, make_stopped_branch

from paligemma.webapp.render.runs import run_tree
from paligemma.webapp.requests import read_request
from paligemma.webapp.runs import MAX_RUNS, History


def test_a_branch_replaces_a_token_by_id():
    history = History()
    history.add(make_run(1, "▁a", "▁b"))
    request = history.branch_request(1, 1, 12)
    assert request.parent == 1 and request.branched_at == 1
    assert read_request(*request.arguments)["forced_ids"] == (0, 12)


def test_a_branch_needs_an_existing_run_and_token():
    history = History()
    history.add(make_run(1, "▁a", "▁b"))
    for unknown in ((2, 0, 1), (1, 9, 1), (1, -1, 1), (1, "0", 1), (None, 0, 1)):
        assert history.branch_request(*unknown) is None


def test_a_step_continues_an_incomplete_run():
    history = History()
    run = history.add(make_run(1, "▁a", "▁b"))
    assert history.step_request() is None  # complete
    run.steps, run.finish_reason = run.steps[:2], "stopped"
    request = history.step_request()
    assert (request.continues, request.stop_after) == (1, 3)
    assert read_request(*request.arguments)["forced_ids"] == run.token_ids


def test_a_branch_beyond_max_new_tokens_extends_it():
    history = History()
    history.add(make_run(1, *["▁a"] * 20))
    request = read_request(*history.branch_request(1, 18, 182).arguments)
    assert request["max_new_tokens"] == len(request["forced_ids"]) == 19


def test_a_step_after_a_stopped_branch_keeps_its_forced_tokens():
    history = History()
    run = history.add(make_stopped_branch())
    (item,) = run_tree(history)["runs"]
    assert (item["count"], item["branched_at"], item["piece"]) == (1, 3, "")
    request = history.step_request()
    assert request.stop_after == 2
    assert read_request(*request.arguments)["forced_ids"] == run.request["forced_ids"]


def test_branches_are_listed_below_their_parent_run():
    history = History()
    for run in (make_run(1, "▁a"), make_run(2, "▁a"), make_run(3, "▁a", parent=1, branched_at=0)):
        history.add(run)
    items = run_tree(history)["runs"]
    assert [(item["number"], item["depth"]) for item in items] == [(1, 0), (3, 1), (2, 0)]
    assert [item["current"] for item in items] == [False, True, False]


def test_the_list_shows_whole_tokens_of_a_long_text():
    history = History()
    run = history.add(make_run(1, *["<loc0001>"] * 30))
    (item,) = run_tree(history)["runs"]
    assert run.text.startswith(item["text"]) and item["text"].endswith("<loc0001>") and len(item["text"]) == 198


def test_the_oldest_run_is_removed_and_its_branches_are_kept():
    history = History()
    for number in range(1, MAX_RUNS + 2):
        history.add(make_run(number, "▁a", parent=1 if number > 1 else None))
    items = run_tree(history)["runs"]
    assert len(items) == MAX_RUNS and all(item["depth"] == 0 for item in items)


def test_a_comparison_marks_equal_tokens():
    left, right = make_run(1, "▁a", "▁b"), make_run(2, "▁a", "▁b", "▁c")
    right.steps[1] = dataclasses.replace(right.steps[1], token_id=99)
    compared = run_tree(History(), (left, right))["compared"]
    same = [[token["same"] for token in run["tokens"]] for run in compared]
    assert same == [[True, False, True], [True, False, True, False]]
