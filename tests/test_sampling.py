"""Sampling against transformers' logits processors, and the fast implementations against the plain ones."""

from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from paligemma.errors import InputError
from paligemma.sampling import (
    BLOCK_SIZE,
    Sampling,
    draw,
    fast_top_p_filter,
    rank_of,
    sample,
    sampling_probabilities,
    sorted_top_k_indices,
    top_k_filter,
    top_k_indices,
    top_p_filter,
)


def random_logits(seed: int, num_tokens: int = 500) -> torch.Tensor:
    return 3 * torch.randn(num_tokens, generator=torch.Generator().manual_seed(seed))


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# Settings


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("temperature", [math.inf, math.nan, -1, -1e-9, "1", None, True, 10**400]),
        ("top_k", [-1, 1.5, None, "5", True]),
        ("top_p", [0, -0.1, 1.0001, math.nan, math.inf, None, True]),
        ("seed", [-1, 2**63, 1.0, "1", True]),
    ],
)
def test_invalid_value_is_named_in_the_error(name, values):
    for value in values:
        with pytest.raises(InputError, match=f"^{name} must be") as caught:
            Sampling(**{name: value})
        assert caught.value.code == f"sampling.{name}"
        assert str(caught.value).endswith(f"got {value!r}.")


def test_numpy_numbers_and_fractions_become_python_numbers():
    sampling = Sampling(np.float32(0.5), np.int64(3), Fraction(1, 2), np.uint8(7))
    assert sampling == Sampling(0.5, 3, 0.5, 7)
    values = (sampling.temperature, sampling.top_k, sampling.top_p, sampling.seed)
    assert [type(value) for value in values] == [float, int, float, int]


def test_with_seed_keeps_a_given_seed_and_draws_a_missing_one():
    assert Sampling(seed=7).with_seed() == Sampling(seed=7)
    seeds = {Sampling().with_seed().seed for _ in range(10)}
    assert len(seeds) == 10
    assert all(0 <= seed < 2**32 for seed in seeds)


# Plain implementations


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize(
    ("top_k", "top_p"), [(0, 1.0), (7, 1.0), (0, 0.8), (0, 0.05), (40, 0.9), (1, 1.0), (10**6, 0.5)]
)
@pytest.mark.parametrize("filter_top_p", [top_p_filter, fast_top_p_filter])
def test_probabilities_match_transformers(seed, temperature, top_k, top_p, filter_top_p):
    logits = random_logits(seed)
    expected = TemperatureLogitsWarper(temperature)(None, logits[None].double())
    if top_k:
        expected = TopKLogitsWarper(top_k)(None, expected)
    if top_p < 1:
        expected = TopPLogitsWarper(top_p)(None, expected)
    probabilities = sampling_probabilities(logits, Sampling(temperature, top_k, top_p), filter_top_p)
    torch.testing.assert_close(probabilities, expected[0].softmax(dim=-1), rtol=1e-9, atol=1e-15)
    assert float(probabilities.sum()) == pytest.approx(1, abs=1e-12)


def test_top_k_keeps_logits_equal_to_the_kth():
    kept = top_k_filter(torch.tensor([5.0, 3.0, 4.0, 3.0, 2.0]), 3)
    assert kept.tolist() == [5.0, 3.0, 4.0, 3.0, -math.inf]
    assert torch.equal(kept, TopKLogitsWarper(3)(None, torch.tensor([[5.0, 3.0, 4.0, 3.0, 2.0]]))[0])


@pytest.mark.parametrize("top_k", [0, 3, 4])
def test_top_k_of_zero_or_the_whole_vocabulary_is_off(top_k):
    assert top_k_filter(torch.tensor([1.0, 2.0, 0.0]), top_k).tolist() == [1.0, 2.0, 0.0]


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [(1e-300, [0]), (0.49, [0]), (0.5, [0]), (0.51, [0, 1]), (0.75, [0, 1]), (0.76, [0, 1, 2]), (1.0, [0, 1, 2, 3])],
)
@pytest.mark.parametrize("filter_top_p", [top_p_filter, fast_top_p_filter])
def test_top_p_is_the_smallest_set_that_reaches_the_cumulative_probability(top_p, kept, filter_top_p):
    probabilities = torch.tensor([0.5, 0.25, 0.125, 0.125], dtype=torch.float64)
    nucleus = filter_top_p(probabilities, top_p)
    assert nucleus.nonzero().flatten().tolist() == kept
    assert float(nucleus.sum()) == pytest.approx(1, abs=1e-15)


@pytest.mark.parametrize("filter_top_p", [top_p_filter, fast_top_p_filter])
def test_top_p_prefers_the_lower_id_among_equal_probabilities(filter_top_p):
    uniform = torch.full((10,), 0.1, dtype=torch.float64)
    assert filter_top_p(uniform, 0.35).nonzero().flatten().tolist() == [0, 1, 2, 3]
    assert filter_top_p(uniform, 1e-12).nonzero().flatten().tolist() == [0]


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-8, 1e-3])
def test_tiny_temperature_chooses_the_largest_logit(temperature):
    logits = random_logits(1) * 1000
    chosen, probabilities = sample(logits, Sampling(temperature, seed=1), seeded())
    assert chosen == int(logits.argmax())
    assert probabilities[chosen] == 1
    assert probabilities.isfinite().all()


def test_high_temperature_approaches_the_uniform_distribution():
    probabilities = sampling_probabilities(random_logits(2), Sampling(100.0))
    assert float(probabilities.max()) < 1.5 / len(probabilities)
    uniform = sampling_probabilities(random_logits(2), Sampling(1e308))
    torch.testing.assert_close(uniform, torch.full_like(uniform, 1 / len(uniform)))


def test_greedy_chooses_the_lowest_id_among_equal_logits_without_random_numbers():
    generator, unused = seeded(), seeded()
    chosen, probabilities = sample(torch.tensor([1.0, 3.0, 3.0, 2.0]), Sampling(), generator)
    assert chosen == 1
    assert probabilities.tolist() == [0, 1, 0, 0]
    assert torch.equal(generator.get_state(), unused.get_state())


def test_draw_follows_the_probabilities_and_never_returns_an_impossible_token():
    probabilities = torch.tensor([0.0, 0.2, 0.0, 0.5, 0.3, 0.0], dtype=torch.float64)
    generator = seeded(3)
    counts = Counter(draw(probabilities, generator) for _ in range(4000))
    assert set(counts) == {1, 3, 4}
    for index, probability in ((1, 0.2), (3, 0.5), (4, 0.3)):
        assert counts[index] / 4000 == pytest.approx(probability, abs=0.03)


def test_top_k_indices_and_ranks_order_equal_logits_by_id():
    logits = torch.tensor([1.0, 4.0, 2.0, 4.0, 2.0, 2.0])
    for function in (sorted_top_k_indices, top_k_indices):
        assert function(logits, 4) == [1, 3, 2, 4]
        assert function(logits, 50) == [1, 3, 2, 4, 5, 0]
    assert [rank_of(logits, index) for index in top_k_indices(logits, 6)] == [1, 2, 3, 4, 5, 6]


# Fast implementations against the plain ones. Few distinct values make ties frequent.

tied_logits = st.lists(st.sampled_from([-1e30, -2.5, 0.0, 0.5, 3.0, 1e30]), min_size=1, max_size=4 * BLOCK_SIZE)
distinct_logits = st.lists(st.floats(-50, 50, width=32), min_size=1, max_size=4 * BLOCK_SIZE)


@given(values=st.one_of(tied_logits, distinct_logits), k=st.integers(1, 60))
@example(values=[0.0] * (3 * BLOCK_SIZE), k=50)
@example(values=[0.0] * (BLOCK_SIZE + 1), k=BLOCK_SIZE + 1)
def test_top_k_indices_match_a_full_sort(values, k):
    logits = torch.tensor(values, dtype=torch.float64)
    assert top_k_indices(logits, k) == sorted_top_k_indices(logits, k)


@given(
    values=st.one_of(tied_logits, distinct_logits),
    top_p=st.one_of(st.floats(0, 1 - 1e-9, exclude_min=True), st.sampled_from([0.25, 0.5, 0.75, 1.0])),
    top_k=st.sampled_from([0, 1, 3, 50]),
)
@example(values=[0.0] * 256, top_p=1 - 1e-9, top_k=0)
@example(values=[0.0] * 256, top_p=5e-324, top_k=0)
def test_fast_top_p_filter_matches_the_full_sort(values, top_p, top_k):
    probabilities = sampling_probabilities(torch.tensor(values, dtype=torch.float64), Sampling(1.0, top_k=top_k))
    assert torch.equal(fast_top_p_filter(probabilities, top_p), top_p_filter(probabilities, top_p))


@given(values=st.one_of(tied_logits, distinct_logits))
def test_fast_top_p_filter_differs_by_rounding_only_for_top_p_just_below_1(values):
    probabilities = sampling_probabilities(torch.tensor(values, dtype=torch.float64), Sampling(1.0))
    fast, plain = (function(probabilities, 1 - 2**-53) for function in (fast_top_p_filter, top_p_filter))
    torch.testing.assert_close(fast, plain, rtol=0, atol=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_fast_implementations_match_the_plain_ones_at_full_vocabulary_size(seed):
    logits = random_logits(seed, 257_152)
    assert top_k_indices(logits, 50) == sorted_top_k_indices(logits, 50)
    for top_p in (0.1, 0.9, 0.999):
        sampling = Sampling(1.5, top_p=top_p)
        fast = sampling_probabilities(logits, sampling, fast_top_p_filter)
        assert torch.equal(fast, sampling_probabilities(logits, sampling))
