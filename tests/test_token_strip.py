"""The token strip and the candidate table."""

from __future__ import annotations

import json

import pytest
from fake_model import make_candidate, make_step
from run_helpers import generate

from paligemma.sampling import Sampling
from paligemma.webapp.render.candidates import CANDIDATE_COLUMNS, NOT_APPLICABLE, candidate_table, filter_stage
from paligemma.webapp.render.formatting import format_percentage, visible_text
from paligemma.webapp.render.token_strip import token_state, token_strip_state

GREEDY = Sampling()


# Formatting


@pytest.mark.parametrize(
    ("token_str", "text"),
    [
        ("▁cat", "␣cat"),
        ("\n\n", "↵↵"),
        ("\t", "⇥"),
        ("<0xE4>", "<0xE4>"),
        ("猫", "猫"),
        ("${alert(1)}", "${alert(1)}"),
        ("\u200b", "\\u200b"),
        ("\u202e", "\\u202e"),
        ("\u0301", "\\u0301"),
        ("\U000e0041", "\\U000e0041"),
        ("", ""),
    ],
)
def test_every_character_of_a_token_is_visible(token_str, text):
    assert visible_text(token_str) == text


@pytest.mark.parametrize(
    ("share", "text"),
    [(0, "0 %"), (1, "100 %"), (0.5, "50.0 %"), (0.0004, "< 0.1 %"), (0.9996, "> 99.9 %"), (0.001, "0.1 %")],
)
def test_only_exact_percentages_are_0_or_100(share, text):
    assert format_percentage(share) == text


# Token strip


def test_an_update_has_only_new_tokens():
    steps = generate("▁a", "<loc0001>", "\n").steps
    update = token_strip_state(3, steps, 1, GREEDY)
    assert (update["run"], update["start"], update["count"], update["done"]) == (3, 1, 4, False)
    assert [(token["index"], token["piece"], token["kind"]) for token in update["tokens"]] == [
        (1, "<loc0001>", "loc"), (2, "↵", "space"), (3, "<eos>", "special"),
    ]  # fmt: skip


def test_the_size_of_an_update_does_not_depend_on_the_length_of_the_answer():
    steps = generate(*["▁a"] * 300).steps
    sizes = [len(json.dumps(token_strip_state(1, steps[: end + 1], end, GREEDY))) for end in (100, 200, 299)]
    assert max(sizes) - min(sizes) < 10


def test_location_tokens_are_labeled_with_their_edge():
    steps = generate("<loc0001>", "<loc0002>", "<loc0003>", "<loc0004>", "▁cat", "<loc0005>").steps
    roles = [token_state(steps, index, GREEDY)["role"] for index in range(6)]
    assert roles == ["y_min", "x_min", "y_max", "x_max", "", "y_min"]


def test_tokens_of_a_branch_are_marked_as_forced():
    steps = generate("▁a", "▁b", "▁c").steps
    tokens = token_strip_state(1, steps, 0, GREEDY, num_forced=2)["tokens"]
    assert [token["forced"] for token in tokens] == [True, True, False, False]
    assert [token["selected_manually"] for token in tokens] == [False, True, False, False]


# Candidate table


def test_each_token_has_the_candidates_of_its_own_step():
    steps = generate("▁a", "▁b", "▁c").steps
    for index, step in enumerate(steps):
        token = token_state(steps, index, GREEDY)
        assert [row["id"] for row in token["rows"]] == [candidate.token_id for candidate in step.top]
        assert token["rows"][token["chosen"]]["id"] == token["id"] == step.token_id


def test_a_row_shows_each_stage_of_sampling():
    top = (make_candidate(7, "▁a", 5.0, 0.75), make_candidate(9, "▁b", 4.0, 0.25), make_candidate(8, "▁c", 1.0, 0.0))
    table = candidate_table(make_step(top), Sampling(temperature=0.5, top_k=2))
    assert [row["cells"] for row in table["rows"]] == [
        ["1", "␣a", "7", "5.00", "10.00", "-0.50", "60.7 %", "60.7 %", "kept", "75.0 %"],
        ["2", "␣b", "9", "4.00", "8.00", "-1.50", "22.3 %", "83.0 %", "kept", "25.0 %"],
        ["3", "␣c", "8", "1.00", "2.00", "-4.50", "1.1 %", "84.1 %", "top-k", "0 %"],
    ]
    assert all(len(row["cells"]) == len(CANDIDATE_COLUMNS) for row in table["rows"])
    assert [row["dropped"] for row in table["rows"]] == [False, False, True]


def test_metrics_describe_the_distribution():
    top = (make_candidate(7, "▁a", 5.0), make_candidate(9, "▁b", 4.0))
    assert candidate_table(make_step(top), GREEDY)["metrics"] == [
        ("entropy (nats)", "1.25"), ("top-2 logit margin", "1.00"), ("top-k mass", "83.0 %"), ("log-sum-exp", "5.50"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("sampling", "rank", "logit", "stage"),
    [
        (Sampling(), 2, 4.0, "greedy"),
        (Sampling(1.0, top_k=1), 2, 4.0, "top-k"),
        (Sampling(1.0, top_k=1, top_p=0.5), 2, 5.0, "top-p"),  # top-k keeps logits equal to the k-th
        (Sampling(1.0, top_p=0.5), 2, 4.0, "top-p"),
        (Sampling(1.0), 2, -900.0, "kept"),  # the probability underflows to 0
    ],
)
def test_the_filter_that_removed_a_candidate_is_named(sampling, rank, logit, stage):
    top = (make_candidate(7, "▁a", 5.0, 1.0), make_candidate(9, "▁b", logit, 0.0))
    assert filter_stage(rank, top[1], make_step(top), sampling) == stage


def test_a_chosen_token_outside_the_candidates_is_the_last_row():
    top = (make_candidate(7, "▁a", 5.0), make_candidate(9, "▁b", 4.0))
    table = candidate_table(make_step(top, chosen=make_candidate(3, "▁rare", 0.5, 0.1), rank=41), GREEDY)
    cells = table["rows"][table["chosen"]]["cells"]
    assert len(table["rows"]) == 3 and cells[:3] == ["41", "␣rare", "3"] and cells[7] == NOT_APPLICABLE


def test_the_chosen_row_is_found_by_token_id():
    top = (make_candidate(7, "▁a", 4.0), make_candidate(9, "▁a", 4.0))
    assert candidate_table(make_step(top, chosen=top[1]), GREEDY)["chosen"] == 1
