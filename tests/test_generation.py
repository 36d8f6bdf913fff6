"""Sampling at its edges, and the loop: what a Step says, when the loop ends, how much it computes."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_models import FILLER_ROWS, KINDS, tiny_config, tiny_model, tiny_processor
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from paligemma import generation
from paligemma.generation import (
    GenerationOptions,
    GenerationResult,
    NonFiniteLogitsError,
    Sampling,
    draw,
    keep_top_k,
    keep_top_p,
    rank_of,
    sample,
    sampling_probabilities,
    stream,
    top_k_indices,
)
from paligemma.kv_cache import KVCache

PROMPT = "detect cat"
EOS = tiny_processor().eos_token_id


def random_logits(seed: int, rows: int = 500) -> torch.Tensor:
    return 3 * torch.randn(rows, generator=torch.Generator().manual_seed(seed))


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def tiny_inputs(prompt: str = PROMPT) -> dict[str, torch.Tensor]:
    image = gradient_picture()
    return tiny_processor()([image], [prompt])


def gradient_picture() -> Image.Image:
    red, green = Image.linear_gradient("L"), Image.radial_gradient("L")
    return Image.merge("RGB", (red, green, red.rotate(90)))


def allowed_tokens_of(model) -> torch.Tensor:
    return tiny_processor().allowed_tokens(model.config.text_config.vocab_size)


def start(model, inputs=None, **options):
    """stream() with the tiny processor; `sampling` may be left out (greedy)."""
    inputs = tiny_inputs() if inputs is None else inputs
    return stream(model, tiny_processor(), inputs, allowed_tokens_of(model), GenerationOptions(**options))


def ids_of(steps) -> list[int]:
    return [step.token_id for step in steps]


def change_logits(model, change) -> None:
    """Let `change(logits)` rewrite the head's output, (1, positions, vocabulary), in place."""
    model.language_model.lm_head.register_forward_hook(lambda module, arguments, output: change(output))


def count_calls(module) -> Counter:
    calls = Counter()
    module.register_forward_hook(lambda *_: calls.update(["forward"]))
    return calls


def set_end_tokens(model, *token_ids: int) -> None:
    model.config = dataclasses.replace(model.config, eos_token_ids=token_ids)


# Sampling -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize(
    ("top_k", "top_p"), [(0, 1.0), (7, 1.0), (0, 0.8), (0, 0.05), (40, 0.9), (1, 1.0), (10**6, 0.5)]
)
def test_probabilities_equal_those_of_transformers(seed, temperature, top_k, top_p):
    logits = random_logits(seed)
    expected = TemperatureLogitsWarper(temperature)(None, logits[None].double())
    if top_k:
        expected = TopKLogitsWarper(top_k)(None, expected)
    if top_p < 1:
        expected = TopPLogitsWarper(top_p)(None, expected)
    probabilities = sampling_probabilities(logits, Sampling(temperature, top_k, top_p))
    torch.testing.assert_close(probabilities, expected[0].softmax(dim=-1), rtol=1e-9, atol=1e-15)
    assert float(probabilities.sum()) == pytest.approx(1, abs=1e-12)


def test_top_k_keeps_rows_that_equal_the_kth():
    kept = keep_top_k(torch.tensor([5.0, 3.0, 4.0, 3.0, 2.0]), 3)
    assert kept.tolist() == [5.0, 3.0, 4.0, 3.0, -math.inf]
    assert torch.equal(kept, TopKLogitsWarper(3)(None, torch.tensor([[5.0, 3.0, 4.0, 3.0, 2.0]]))[0])


@pytest.mark.parametrize("top_k", [0, 3, 4])
def test_top_k_of_nothing_or_everything_changes_nothing(top_k):
    assert keep_top_k(torch.tensor([1.0, 2.0, 0.0]), top_k).tolist() == [1.0, 2.0, 0.0]


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [(1e-300, [0]), (0.49, [0]), (0.5, [0]), (0.51, [0, 1]), (0.75, [0, 1]), (0.76, [0, 1, 2]), (1.0, [0, 1, 2, 3])],
)
def test_top_p_keeps_the_row_that_crosses_the_bound_and_none_behind_an_exact_sum(top_p, kept):
    probabilities = torch.tensor([0.5, 0.25, 0.125, 0.125], dtype=torch.float64)
    nucleus = keep_top_p(probabilities, top_p)
    assert nucleus.nonzero().flatten().tolist() == kept
    assert float(nucleus.sum()) == pytest.approx(1, abs=1e-15)


def test_top_p_prefers_the_lower_id_among_equals():
    uniform = torch.full((10,), 0.1, dtype=torch.float64)
    assert keep_top_p(uniform, 0.35).nonzero().flatten().tolist() == [0, 1, 2, 3]
    assert keep_top_p(uniform, 1e-12).nonzero().flatten().tolist() == [0]


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-8, 1e-3])
def test_a_tiny_temperature_takes_the_largest_logit(temperature):
    logits = random_logits(1) * 1000
    chosen, probabilities = sample(logits, Sampling(temperature, seed=1), seeded())
    assert chosen == int(logits.argmax())
    assert probabilities[chosen] == 1
    assert probabilities.isfinite().all()


def test_a_high_temperature_levels_the_probabilities():
    probabilities = sampling_probabilities(random_logits(2), Sampling(100.0))
    assert float(probabilities.max()) < 1.5 / len(probabilities)
    level = sampling_probabilities(random_logits(2), Sampling(1e308))
    torch.testing.assert_close(level, torch.full_like(level, 1 / len(level)))


def test_greedy_takes_the_lowest_id_among_equals_and_no_random_number():
    generator, untouched = seeded(), seeded()
    chosen, probabilities = sample(torch.tensor([1.0, 3.0, 3.0, 2.0]), Sampling(), generator)
    assert chosen == 1
    assert probabilities.tolist() == [0, 1, 0, 0]
    assert torch.equal(generator.get_state(), untouched.get_state())


def test_draws_follow_the_probabilities_and_never_meet_a_zero():
    probabilities = torch.tensor([0.0, 0.2, 0.0, 0.5, 0.3, 0.0], dtype=torch.float64)
    generator = seeded(3)
    counts = Counter(draw(probabilities, generator) for _ in range(4000))
    assert set(counts) == {1, 3, 4}
    for row, probability in ((1, 0.2), (3, 0.5), (4, 0.3)):
        assert counts[row] / 4000 == pytest.approx(probability, abs=0.03)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("temperature", [math.inf, math.nan, -1, -1e-9, "1", None, True, 10**400]),
        ("top_k", [-1, 1.5, None, "5", True]),
        ("top_p", [0, -0.1, 1.0001, math.nan, math.inf, None, True]),
        ("seed", [-1, 2**63, 1.0, "1", True]),
    ],
)
def test_bad_sampling_values_are_named(name, values):
    for value in values:
        with pytest.raises(ValueError, match=name) as caught:
            Sampling(**{name: value})
        assert repr(value) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("max_new_tokens", [0, -1, 1.5, None, True]),
        ("top_n", [0, 51, 2.0, None]),
        ("forced_ids", ["12", [1.5], 7.5, None, np.array(1.5), np.array(5), [[1]]]),
        ("time_limit", [0, -1, math.nan, math.inf, "1"]),
    ],
)
def test_bad_options_are_named(name, values):
    for value in values:
        with pytest.raises(ValueError, match=name):
            GenerationOptions(**{name: value})


def test_numbers_of_any_kind_become_pythons_own():
    sampling = Sampling(np.float32(0.5), np.int64(3), Fraction(1, 2), np.uint8(7))
    assert sampling == Sampling(0.5, 3, 0.5, 7)
    values = (sampling.temperature, sampling.top_k, sampling.top_p, sampling.seed)
    assert [type(value) for value in values] == [float, int, float, int]
    for forced_ids in ([5], 5, np.array([5]), np.int64(5), range(5, 6), iter([5])):
        (token_id,) = GenerationOptions(forced_ids=forced_ids).forced_ids
        assert (token_id, type(token_id)) == (5, int)


def test_largest_rows_and_ranks_agree_and_order_equals_by_id():
    logits = torch.tensor([1.0, 4.0, 2.0, 4.0, 2.0, 2.0])
    assert top_k_indices(logits, 4) == [1, 3, 2, 4]
    assert top_k_indices(logits, 50) == [1, 3, 2, 4, 5, 0]
    assert [rank_of(logits, row) for row in top_k_indices(logits, 6)] == [1, 2, 3, 4, 5, 6]


# What a Step says -----------------------------------------------------------------------------------------------


def row_of_step(model, steps, index: int) -> torch.Tensor:
    """The logits of one step's position, computed anew without a cache: float64, -inf where no token may stand."""
    inputs = tiny_inputs()
    answer = torch.tensor([ids_of(steps[:index])], dtype=torch.long)
    input_ids = torch.cat((inputs["input_ids"], answer), dim=1)
    token_types = torch.cat((torch.zeros_like(inputs["input_ids"]), torch.ones_like(answer)), dim=1)
    logits = model(input_ids, inputs["pixel_values"], token_type_ids=token_types)["logits"][0, -1].double()
    return logits.masked_fill(~allowed_tokens_of(model), -math.inf)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.3, top_k=200, top_p=0.9, seed=5)])
def test_every_figure_of_a_step_is_that_of_its_position(kind, sampling):
    model = tiny_model(kind)
    steps = list(start(model, max_new_tokens=17, sampling=sampling, top_n=6))
    for step in steps:
        row = row_of_step(model, steps, step.index)
        logprobs = row.log_softmax(dim=0)
        probabilities = logprobs.exp()
        assert step.logit == pytest.approx(float(row[step.token_id]), abs=1e-4)
        assert step.logsumexp == pytest.approx(float(row.logsumexp(dim=0)), abs=1e-4)
        assert step.logprob == pytest.approx(float(logprobs[step.token_id]), abs=1e-4)
        assert step.prob == pytest.approx(math.exp(step.logprob))
        assert step.entropy == pytest.approx(float(torch.special.entr(probabilities).sum()), abs=1e-4)
        assert step.rank == 1 + int((row > row[step.token_id]).sum())
        assert [candidate.token_id for candidate in step.top] == row.topk(6).indices.tolist()
        assert step.piece == tiny_processor().token_str(step.token_id)
        for candidate in step.top:
            assert candidate.logit == pytest.approx(float(row[candidate.token_id]), abs=1e-4)
            assert candidate.logprob == pytest.approx(candidate.logit - step.logsumexp)
            assert candidate.prob == pytest.approx(math.exp(candidate.logprob))
    assert [step.index for step in steps] == list(range(len(steps)))
    assert len(set(ids_of(steps))) > 5, "the model repeats itself, so that this test proves little"


def test_sampled_probabilities_of_steps_are_those_of_transformers():
    model = tiny_model()
    sampling = Sampling(1.4, top_k=60, top_p=0.8, seed=2)
    steps = list(start(model, max_new_tokens=6, sampling=sampling, top_n=50))
    for step in steps:
        row = row_of_step(model, steps, step.index)[None]
        for warper in (TemperatureLogitsWarper(1.4), TopKLogitsWarper(60), TopPLogitsWarper(0.8)):
            row = warper(None, row)
        expected = row.softmax(dim=-1)[0]
        assert step.sampled_prob == pytest.approx(float(expected[step.token_id]), abs=1e-5)
        assert step.sampled_prob > 0
        for candidate in step.top:
            assert candidate.sampled_prob == pytest.approx(float(expected[candidate.token_id]), abs=1e-5)


def test_greedy_chooses_the_first_candidate_with_certainty():
    for step in start(tiny_model(), max_new_tokens=8):
        assert step.top[0].token_id == step.token_id
        assert step.rank == 1
        assert step.sampled_prob == 1
        assert [candidate.sampled_prob for candidate in step.top] == [1] + [0] * 9


def test_the_number_of_candidates():
    for top_n in (1, 50):
        (step,) = start(tiny_model(), max_new_tokens=1, top_n=top_n)
        assert len(step.top) == top_n


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(100.0, seed=0)])
def test_image_token_and_rows_without_a_piece_do_not_exist(sampling):
    model = tiny_model()
    plain = list(start(model, max_new_tokens=5, sampling=sampling, top_n=50))
    hidden_rows = ~allowed_tokens_of(model)
    assert int(hidden_rows.sum()) == FILLER_ROWS + 1

    def make_them_the_largest(logits):
        logits[..., hidden_rows] = torch.tensor([1e6] * FILLER_ROWS + [math.inf])

    change_logits(model, make_them_the_largest)
    steps = list(start(model, max_new_tokens=5, sampling=sampling, top_n=50))
    for step, expected in zip(steps, plain, strict=True):
        assert dataclasses.replace(step, seconds=0) == dataclasses.replace(expected, seconds=0)


def test_texts_join_and_bytes_are_held_until_they_end():
    processor = tiny_processor()
    pieces = ["▁cat", "<0xE2>", "<0x82>", "<0xAC>", "<loc0012>", "<eos>", "<0xE2>", "<0x82>"]
    token_ids = [processor.tokenizer.token_to_id(piece) for piece in pieces]
    model = tiny_model()
    set_end_tokens(model, 10**6)
    steps = list(start(model, max_new_tokens=len(pieces), forced_ids=token_ids))
    assert [step.piece for step in steps] == pieces
    assert [step.text_delta for step in steps] == [" cat", "", "", "", "€<loc0012>", "", "", "\ufffd\ufffd"]
    for step, deltas in zip(steps, itertools.accumulate(step.text_delta for step in steps), strict=True):
        assert step.text == deltas
    assert steps[-1].text == processor.decode(token_ids)


# Cache and forced tokens ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [1, 2, 17])
def test_cached_decoding_equals_decoding_without_a_cache(kind, length):
    model = tiny_model(kind)
    steps = list(start(model, max_new_tokens=length))
    assert len(steps) == length
    for step in steps:
        row = row_of_step(model, steps, step.index)
        assert step.token_id == int(row.argmax())
        assert step.logit == pytest.approx(float(row.max()), abs=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_several_tokens_fed_at_once_into_a_warm_cache_equal_single_ones(kind):
    model, inputs = tiny_model(kind), tiny_inputs()
    answer = torch.tensor([ids_of(start(model, max_new_tokens=12))])
    prefix_length = inputs["input_ids"].shape[1]

    def decode(chunks):
        cache = KVCache(model.config, 1, prefix_length + answer.shape[1], model.dtype, model.device)
        rows = [model(inputs["input_ids"], inputs["pixel_values"], kv_cache=cache)["logits"][0, -1:]]
        rows += [model(chunk, kv_cache=cache)["logits"][0] for chunk in answer.split(chunks, dim=1)]
        return torch.cat(rows)

    one_by_one = decode([1] * 12)
    torch.testing.assert_close(decode([12]), one_by_one, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(decode([3, 1, 8]), one_by_one, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.5, top_p=0.95, seed=11)])
def test_a_forced_beginning_goes_on_as_a_generated_one(dtype, sampling):
    model = tiny_model(dtype=dtype)
    generated = list(start(model, max_new_tokens=10, sampling=sampling))
    for length in (1, 4, 10):
        forced = list(start(model, max_new_tokens=10, sampling=sampling, forced_ids=ids_of(generated)[:length]))
        for step, expected in zip(forced, generated, strict=True):
            assert dataclasses.replace(step, seconds=0) == dataclasses.replace(expected, seconds=0)


def test_a_forced_token_that_would_not_have_come_leads_elsewhere():
    model = tiny_model()
    greedy = list(start(model, max_new_tokens=6))
    branch_id = greedy[2].top[3].token_id
    branch = list(start(model, max_new_tokens=6, forced_ids=[*ids_of(greedy)[:2], branch_id]))
    assert branch[2].token_id == branch_id
    assert branch[2].rank == 4
    assert branch[2].sampled_prob == 0
    assert branch[2].top == greedy[2].top
    assert ids_of(branch)[3:] != ids_of(greedy)[3:]
    assert branch[3].logit == pytest.approx(float(row_of_step(model, branch, 3).max()), abs=1e-5)


def test_forced_tokens_count_and_a_forced_end_token_ends():
    model = tiny_model()
    cut = list(start(model, max_new_tokens=2, forced_ids=[300, 301, 302]))
    assert ids_of(cut) == [300, 301]
    assert cut[-1].finish_reason == "length"
    ended = list(start(model, max_new_tokens=9, forced_ids=[300, EOS, 302]))
    assert ids_of(ended) == [300, EOS]
    assert ended[-1].finish_reason == "eos"
    assert ended[-1].text_delta == ""


def test_forced_ids_that_may_not_stand_in_an_answer_are_refused():
    model = tiny_model()
    rows = model.config.text_config.vocab_size
    for token_id in (-1, rows, rows - 1, tiny_processor().image_token_id):
        with pytest.raises(ValueError, match=f"forced_ids holds {token_id}"):
            start(model, forced_ids=[5, token_id])


# When the loop ends, and how much it computes -------------------------------------------------------------------


def test_every_end_token_of_the_configuration_ends():
    model = tiny_model()
    ids = ids_of(start(model, max_new_tokens=12))
    for end in (ids[4], ids[7]):
        set_end_tokens(model, EOS, end)
        steps = list(start(model, max_new_tokens=12))
        assert ids_of(steps) == ids[: ids.index(end) + 1]
        assert [step.finish_reason for step in steps] == [None] * (len(steps) - 1) + ["eos"]


def test_length_and_time_end():
    model = tiny_model()
    assert [step.finish_reason for step in start(model, max_new_tokens=3)] == [None, None, "length"]
    assert [step.finish_reason for step in start(model, max_new_tokens=3, time_limit=1e-9)] == ["time"]
    assert [step.finish_reason for step in start(model, max_new_tokens=1, time_limit=1e-9)] == ["length"]


def test_time_is_counted_from_the_beginning_of_the_request(monkeypatch):
    clock = itertools.count(10.0)  # a second passes between two looks at the clock
    monkeypatch.setattr(generation, "perf_counter", lambda: next(clock))
    result = drained(start(tiny_model(), max_new_tokens=3))
    timing = result.timing
    assert [step.seconds for step in result.steps] == [3, 4, 5]
    assert (timing.image_s, timing.first_token_s, timing.total_s, timing.tokens_per_s) == (1, 3, 5, 1)


def test_more_tokens_than_positions_are_refused_before_any_work():
    inputs = tiny_inputs()
    prefix_length = inputs["input_ids"].shape[1]
    model = tiny_model(config=tiny_config("paligemma1", max_position_embeddings=prefix_length + 4))
    calls = count_calls(model)
    with pytest.raises(ValueError, match=f"max_new_tokens is 5; .* {prefix_length} of the model's .* at most 4"):
        start(model, inputs, max_new_tokens=5)
    assert not calls
    assert len(list(start(model, inputs, max_new_tokens=4))) == 4


def test_a_batch_is_refused():
    image = gradient_picture()
    with pytest.raises(ValueError, match="2 prompts"):
        start(tiny_model(), tiny_processor()([image] * 2, ["a", "b"]))


@pytest.mark.parametrize("kind", KINDS)
def test_one_forward_a_token_one_vision_tower_a_request_one_row_of_logits(kind):
    model = tiny_model(kind)
    forwards, towers = count_calls(model), count_calls(model.vision_tower)
    rows = []
    model.register_forward_hook(lambda module, arguments, output: rows.append(output["logits"].shape[1]))
    assert len(list(start(model, max_new_tokens=5, forced_ids=[300, 301]))) == 5
    assert forwards["forward"] == 5
    assert towers["forward"] == 1
    assert rows == [1] * 5


def test_closing_stops_at_once():
    model = tiny_model()
    forwards = count_calls(model)
    generator = start(model, max_new_tokens=50)
    assert not forwards, "nothing runs before the first step is asked for"
    next(generator)
    next(generator)
    generator.close()
    assert forwards["forward"] == 2
    assert list(generator) == []
    assert len(list(start(model, max_new_tokens=3))) == 3


def test_two_requests_in_turn_do_not_disturb_each_other():
    model = tiny_model()
    alone = [ids_of(start(model, max_new_tokens=6, sampling=Sampling(1.5, seed=seed))) for seed in (1, 2)]
    first, second = (start(model, max_new_tokens=6, sampling=Sampling(1.5, seed=seed)) for seed in (1, 2))
    mixed = [(one.token_id, other.token_id) for one, other in zip(first, second, strict=True)]
    assert [list(column) for column in zip(*mixed, strict=True)] == alone


def test_gradients_are_off_inside_and_as_before_outside():
    generator = start(tiny_model().requires_grad_(True), max_new_tokens=2)
    next(generator)
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()


def test_steps_may_run_in_different_threads():
    model = tiny_model().requires_grad_(True)
    modes = []
    model.register_forward_hook(lambda *_: modes.append(torch.is_inference_mode_enabled()))
    expected = ids_of(start(model, max_new_tokens=4))
    generator = start(model, max_new_tokens=4)
    ids = []
    for _ in range(4):
        with ThreadPoolExecutor(max_workers=1) as fresh_thread:
            ids.append(fresh_thread.submit(next, generator).result().token_id)
    assert ids == expected
    assert modes == [True] * 8


# Seeds ----------------------------------------------------------------------------------------------------------


def drained(generator) -> GenerationResult:
    """What a generator returns once it has given all its steps."""
    while True:
        try:
            next(generator)
        except StopIteration as end:
            return end.value


def answer_of(model, sampling: Sampling) -> tuple[list[int], int]:
    """Ids, and the seed that the result reports."""
    result = drained(start(model, max_new_tokens=12, sampling=sampling))
    return list(result.token_ids), result.seed


def test_a_seed_gives_the_same_answer_whatever_happens_around():
    model = tiny_model()
    first, _ = answer_of(model, Sampling(1.5, seed=7))
    torch.manual_seed(99)
    state = torch.get_rng_state()
    answer_of(model, Sampling(1.5, seed=8))
    again, seed = answer_of(model, Sampling(1.5, seed=7))
    assert again == first
    assert seed == 7
    assert torch.equal(torch.get_rng_state(), state), "the global random numbers were touched"
    assert answer_of(model, Sampling(1.5, seed=8))[0] != first


def test_without_a_seed_a_fresh_one_is_drawn_and_reported():
    model = tiny_model()
    torch.manual_seed(0)
    first, first_seed = answer_of(model, Sampling(1.5))
    torch.manual_seed(0)
    _, second_seed = answer_of(model, Sampling(1.5))
    assert first_seed != second_seed
    assert answer_of(model, Sampling(1.5, seed=first_seed))[0] == first


def test_the_result_is_what_was_streamed():
    steps = list(start(tiny_model(), max_new_tokens=4))
    result = drained(start(tiny_model(), max_new_tokens=4))
    assert result.token_ids == tuple(ids_of(steps)) == tuple(ids_of(result.steps))
    assert result.text == steps[-1].text
    assert result.finish_reason == "length"
    assert result.timing.total_s == result.steps[-1].seconds >= result.timing.first_token_s >= result.timing.image_s


# Numbers that are none, and other types -------------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, seed=0)])
def test_logits_that_are_not_finite_are_an_error_with_advice(value, sampling):
    model = tiny_model()
    positions = itertools.count()

    def spoil_the_third(logits):
        if next(positions) == 2:
            logits[..., 17] = value

    change_logits(model, spoil_the_third)
    generator = start(model, sampling=sampling)
    next(generator), next(generator)
    with pytest.raises(NonFiniteLogitsError, match=r"token 2 .*bfloat16"):
        next(generator)


def test_a_residual_beyond_float16_is_an_error_there_and_none_in_bfloat16():
    def overflowing(dtype):
        model = tiny_model()
        model.language_model.model.layers[0].mlp.down_proj.weight.mul_(1e6)
        return model.to(dtype)

    with pytest.raises(NonFiniteLogitsError, match="bfloat16"):
        next(start(overflowing(torch.float16)))
    assert math.isfinite(next(start(overflowing(torch.bfloat16))).logit)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_models_take_float32_pixels(kind, dtype):
    inputs = tiny_inputs()
    assert inputs["pixel_values"].dtype == torch.float32
    steps = list(start(tiny_model(kind, dtype), inputs, max_new_tokens=4))
    reference = list(start(tiny_model(kind), inputs, max_new_tokens=1))
    assert len(steps) == 4
    assert steps[0].logsumexp == pytest.approx(reference[0].logsumexp, rel=0.05)
