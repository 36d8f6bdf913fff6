"""The generation loop: the contents of a Step, forced tokens, stopping, amount of computation, seeds, dtypes."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_models import KINDS, UNUSED_IDS, tiny_config, tiny_model, tiny_processor
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from paligemma import generation
from paligemma.errors import InputError, NonFiniteLogitsError
from paligemma.generation import GenerationOptions, GenerationResult, StepCollector, stream
from paligemma.kv_cache import KVCache
from paligemma.sampling import Sampling

PROMPT = "detect cat"
EOS = tiny_processor().eos_token_id


def tiny_inputs(prompt: str = PROMPT) -> dict[str, torch.Tensor]:
    return tiny_processor()([gradient_image()], [prompt])


def gradient_image() -> Image.Image:
    red, green = Image.linear_gradient("L"), Image.radial_gradient("L")
    return Image.merge("RGB", (red, green, red.rotate(90)))


def allowed_tokens_of(model) -> torch.Tensor:
    return tiny_processor().allowed_tokens(model.config.text_config.vocab_size)


def start(model, inputs=None, **options):
    """Call `stream` with the tiny processor."""
    inputs = tiny_inputs() if inputs is None else inputs
    return stream(model, tiny_processor(), inputs, allowed_tokens_of(model), GenerationOptions(**options))


def result_of(stream) -> GenerationResult:
    """Exhaust a stream and return its result."""
    collector = StepCollector(stream)
    assert list(collector) == collector.steps
    return collector.result


def ids_of(steps) -> list[int]:
    return [step.token_id for step in steps]


def change_logits(model, change) -> None:
    """Call `change(logits)` on the output of the head, (1, positions, vocab), to modify it in place."""
    model.language_model.lm_head.register_forward_hook(lambda module, arguments, output: change(output))


def count_calls(module) -> Counter:
    calls = Counter()
    module.register_forward_hook(lambda *_: calls.update(["forward"]))
    return calls


def set_end_tokens(model, *token_ids: int) -> None:
    model.config = dataclasses.replace(model.config, eos_token_ids=token_ids)


# Options


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("max_new_tokens", [0, -1, 1.5, None, True]),
        ("top_n", [0, 51, 2.0, None]),
        ("forced_ids", ["12", [1.5], 7.5, None, np.array(1.5), np.array(5), [[1]]]),
        ("time_limit", [0, -1, math.nan, math.inf, "1"]),
    ],
)
def test_invalid_option_is_named_in_the_error(name, values):
    for value in values:
        with pytest.raises(InputError, match=f"^{name} must be") as caught:
            GenerationOptions(**{name: value})
        assert caught.value.code == f"generation.{name}"


def test_forced_ids_become_python_integers():
    for forced_ids in ([5], 5, np.array([5]), np.int64(5), range(5, 6), iter([5])):
        (token_id,) = GenerationOptions(forced_ids=forced_ids).forced_ids
        assert (token_id, type(token_id)) == (5, int)


# Contents of a Step


def logits_of_step(model, steps, index: int) -> torch.Tensor:
    """Recompute the logits of a step without a KV cache: (vocab,), float64, -inf for tokens that are not allowed."""
    inputs = tiny_inputs()
    answer = torch.tensor([ids_of(steps[:index])], dtype=torch.long)
    input_ids = torch.cat((inputs["input_ids"], answer), dim=1)
    token_types = torch.cat((torch.zeros_like(inputs["input_ids"]), torch.ones_like(answer)), dim=1)
    logits = model(input_ids, inputs["pixel_values"], token_type_ids=token_types)["logits"][0, -1].double()
    return logits.masked_fill(~allowed_tokens_of(model), -math.inf)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.3, top_k=200, top_p=0.9, seed=5)])
def test_step_matches_the_logits_of_its_position(kind, sampling):
    model = tiny_model(kind)
    steps = list(start(model, max_new_tokens=17, sampling=sampling, top_n=6))
    for step in steps:
        logits = logits_of_step(model, steps, step.index)
        logprobs = logits.log_softmax(dim=0)
        probabilities = logprobs.exp()
        assert step.logit == pytest.approx(float(logits[step.token_id]), abs=1e-4)
        assert step.logsumexp == pytest.approx(float(logits.logsumexp(dim=0)), abs=1e-4)
        assert step.logprob == pytest.approx(float(logprobs[step.token_id]), abs=1e-4)
        assert step.prob == pytest.approx(math.exp(step.logprob))
        assert step.entropy == pytest.approx(float(torch.special.entr(probabilities).sum()), abs=1e-4)
        assert step.rank == 1 + int((logits > logits[step.token_id]).sum())
        assert [candidate.token_id for candidate in step.top] == logits.topk(6).indices.tolist()
        assert step.piece == tiny_processor().token_str(step.token_id)
        for candidate in step.top:
            assert candidate.logit == pytest.approx(float(logits[candidate.token_id]), abs=1e-4)
            assert candidate.logprob == pytest.approx(candidate.logit - step.logsumexp)
            assert candidate.prob == pytest.approx(math.exp(candidate.logprob))
    assert [step.index for step in steps] == list(range(len(steps)))
    assert len(set(ids_of(steps))) > 5, "the test needs a varied answer"


def test_sampled_prob_matches_transformers():
    model = tiny_model()
    sampling = Sampling(1.4, top_k=60, top_p=0.8, seed=2)
    steps = list(start(model, max_new_tokens=6, sampling=sampling, top_n=50))
    for step in steps:
        logits = logits_of_step(model, steps, step.index)[None]
        for warper in (TemperatureLogitsWarper(1.4), TopKLogitsWarper(60), TopPLogitsWarper(0.8)):
            logits = warper(None, logits)
        expected = logits.softmax(dim=-1)[0]
        assert step.sampled_prob == pytest.approx(float(expected[step.token_id]), abs=1e-5)
        assert step.sampled_prob > 0
        for candidate in step.top:
            assert candidate.sampled_prob == pytest.approx(float(expected[candidate.token_id]), abs=1e-5)


def test_greedy_step_has_rank_1_and_sampled_prob_1():
    for step in start(tiny_model(), max_new_tokens=8):
        assert step.top[0].token_id == step.token_id
        assert step.rank == 1
        assert step.sampled_prob == 1
        assert [candidate.sampled_prob for candidate in step.top] == [1] + [0] * 9


def test_top_n_is_the_number_of_candidates():
    for top_n in (1, 50):
        (step,) = start(tiny_model(), max_new_tokens=1, top_n=top_n)
        assert len(step.top) == top_n


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(100.0, seed=0)])
def test_tokens_that_are_not_allowed_have_no_effect(sampling):
    model = tiny_model()
    expected_steps = list(start(model, max_new_tokens=5, sampling=sampling, top_n=50))
    not_allowed = ~allowed_tokens_of(model)
    assert int(not_allowed.sum()) == UNUSED_IDS + 1

    def give_them_the_largest_logits(logits):
        logits[..., not_allowed] = torch.tensor([1e6] * UNUSED_IDS + [math.inf])

    change_logits(model, give_them_the_largest_logits)
    steps = list(start(model, max_new_tokens=5, sampling=sampling, top_n=50))
    for step, expected in zip(steps, expected_steps, strict=True):
        assert dataclasses.replace(step, seconds=0) == dataclasses.replace(expected, seconds=0)


def test_text_deltas_join_and_byte_fallback_runs_are_buffered():
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


# StepCollector


def test_step_collector_keeps_the_steps_and_the_result():
    collector = StepCollector(start(tiny_model(), max_new_tokens=3))
    first = next(collector)
    assert (collector.steps, collector.result) == ([first], None)
    rest = list(collector)
    assert collector.steps == [first, *rest]
    assert collector.result.steps == tuple(collector.steps)
    assert next(collector, None) is None
    assert collector.result is not None


def test_closing_a_step_collector_closes_the_stream():
    generator = start(tiny_model(), max_new_tokens=3)
    collector = StepCollector(generator)
    next(collector)
    collector.close()
    assert list(generator) == []
    assert (len(collector.steps), collector.result) == (1, None)


# Cache and forced tokens


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [1, 2, 17])
def test_decoding_with_cache_equals_decoding_without(kind, length):
    model = tiny_model(kind)
    steps = list(start(model, max_new_tokens=length))
    assert len(steps) == length
    for step in steps:
        logits = logits_of_step(model, steps, step.index)
        assert step.token_id == int(logits.argmax())
        assert step.logit == pytest.approx(float(logits.max()), abs=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_chunked_decoding_equals_single_tokens(kind):
    model, inputs = tiny_model(kind), tiny_inputs()
    answer = torch.tensor([ids_of(start(model, max_new_tokens=12))])
    prefix_length = inputs["input_ids"].shape[1]

    def decode(chunks):
        cache = KVCache(model.config, 1, prefix_length + answer.shape[1], model.dtype, model.device)
        logits = [model(inputs["input_ids"], inputs["pixel_values"], kv_cache=cache)["logits"][0, -1:]]
        logits += [model(chunk, kv_cache=cache)["logits"][0] for chunk in answer.split(chunks, dim=1)]
        return torch.cat(logits)

    one_by_one = decode([1] * 12)
    torch.testing.assert_close(decode([12]), one_by_one, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(decode([3, 1, 8]), one_by_one, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.5, top_p=0.95, seed=11)])
def test_forcing_the_first_tokens_of_an_answer_reproduces_it(dtype, sampling):
    model = tiny_model(dtype=dtype)
    generated = list(start(model, max_new_tokens=10, sampling=sampling))
    for length in (1, 4, 10):
        forced = list(start(model, max_new_tokens=10, sampling=sampling, forced_ids=ids_of(generated)[:length]))
        for step, expected in zip(forced, generated, strict=True):
            assert dataclasses.replace(step, seconds=0) == dataclasses.replace(expected, seconds=0)


def test_forcing_another_candidate_changes_the_answer():
    model = tiny_model()
    greedy = list(start(model, max_new_tokens=6))
    branch_id = greedy[2].top[3].token_id
    branch = list(start(model, max_new_tokens=6, forced_ids=[*ids_of(greedy)[:2], branch_id]))
    assert branch[2].token_id == branch_id
    assert branch[2].rank == 4
    assert branch[2].sampled_prob == 0
    assert branch[2].top == greedy[2].top
    assert ids_of(branch)[3:] != ids_of(greedy)[3:]
    assert branch[3].logit == pytest.approx(float(logits_of_step(model, branch, 3).max()), abs=1e-5)


def test_forced_tokens_count_and_a_forced_end_token_stops():
    model = tiny_model()
    cut = list(start(model, max_new_tokens=2, forced_ids=[300, 301, 302]))
    assert ids_of(cut) == [300, 301]
    assert cut[-1].finish_reason == "length"
    ended = list(start(model, max_new_tokens=9, forced_ids=[300, EOS, 302]))
    assert ids_of(ended) == [300, EOS]
    assert ended[-1].finish_reason == "eos"
    assert ended[-1].text_delta == ""


def test_forced_ids_that_are_not_allowed_are_rejected():
    model = tiny_model()
    vocab_size = model.config.text_config.vocab_size
    for token_id in (-1, vocab_size, vocab_size - 1, tiny_processor().image_token_id):
        with pytest.raises(ValueError, match=f"forced_ids must .* got {token_id}"):
            start(model, forced_ids=[5, token_id])


# Stopping and amount of computation


def test_every_end_token_of_the_config_stops():
    model = tiny_model()
    ids = ids_of(start(model, max_new_tokens=12))
    for end in (ids[4], ids[7]):
        set_end_tokens(model, EOS, end)
        steps = list(start(model, max_new_tokens=12))
        assert ids_of(steps) == ids[: ids.index(end) + 1]
        assert [step.finish_reason for step in steps] == [None] * (len(steps) - 1) + ["eos"]


def test_max_new_tokens_and_time_limit_stop():
    model = tiny_model()
    assert [step.finish_reason for step in start(model, max_new_tokens=3)] == [None, None, "length"]
    assert [step.finish_reason for step in start(model, max_new_tokens=3, time_limit=1e-9)] == ["time"]
    assert [step.finish_reason for step in start(model, max_new_tokens=1, time_limit=1e-9)] == ["length"]


def test_times_start_with_the_request(monkeypatch):
    clock = itertools.count(10.0)  # every reading of the clock is one second later
    monkeypatch.setattr(generation, "perf_counter", lambda: next(clock))
    result = result_of(start(tiny_model(), max_new_tokens=3))
    timing = result.timing
    assert [step.seconds for step in result.steps] == [3, 4, 5]
    assert (timing.image_s, timing.first_token_s, timing.total_s, timing.tokens_per_s) == (1, 3, 5, 1)


def test_more_tokens_than_positions_are_rejected_before_any_computation():
    inputs = tiny_inputs()
    prefix_length = inputs["input_ids"].shape[1]
    model = tiny_model(config=tiny_config("paligemma1", max_position_embeddings=prefix_length + 4))
    calls = count_calls(model)
    with pytest.raises(ValueError, match=f"max_new_tokens must be <= 4, got 5. .* {prefix_length} of the model's"):
        start(model, inputs, max_new_tokens=5)
    assert not calls
    assert len(list(start(model, inputs, max_new_tokens=4))) == 4


@pytest.mark.parametrize("positions_left", [0, -1])
def test_prompt_that_fills_all_positions_is_rejected(positions_left):
    inputs = tiny_inputs()
    prefix_length = inputs["input_ids"].shape[1]
    positions = prefix_length + positions_left
    model = tiny_model(config=tiny_config("paligemma1", max_position_embeddings=positions))
    message = f"^The prompt is too long: image and prompt take {prefix_length} of the model's {positions} positions\\.$"
    with pytest.raises(InputError, match=message):
        start(model, inputs, max_new_tokens=1)


def test_batch_is_rejected():
    image = gradient_image()
    with pytest.raises(ValueError, match="exactly one prompt, got 2"):
        start(tiny_model(), tiny_processor()([image] * 2, ["a", "b"]))


@pytest.mark.parametrize("kind", KINDS)
def test_one_forward_pass_per_token_and_one_vision_tower_pass_per_request(kind):
    model = tiny_model(kind)
    forwards, towers = count_calls(model), count_calls(model.vision_tower)
    positions = []
    model.register_forward_hook(lambda module, arguments, output: positions.append(output["logits"].shape[1]))
    assert len(list(start(model, max_new_tokens=5, forced_ids=[300, 301]))) == 5
    assert forwards["forward"] == 5
    assert towers["forward"] == 1
    assert positions == [1] * 5


def test_closing_the_generator_stops_generation():
    model = tiny_model()
    forwards = count_calls(model)
    generator = start(model, max_new_tokens=50)
    assert not forwards, "nothing runs before the first step is requested"
    next(generator)
    next(generator)
    generator.close()
    assert forwards["forward"] == 2
    assert list(generator) == []
    assert len(list(start(model, max_new_tokens=3))) == 3


def test_interleaved_requests_are_independent():
    model = tiny_model()
    separate = [ids_of(start(model, max_new_tokens=6, sampling=Sampling(1.5, seed=seed))) for seed in (1, 2)]
    first, second = (start(model, max_new_tokens=6, sampling=Sampling(1.5, seed=seed)) for seed in (1, 2))
    mixed = [(one.token_id, other.token_id) for one, other in zip(first, second, strict=True)]
    assert [list(column) for column in zip(*mixed, strict=True)] == separate


def test_inference_mode_does_not_leak_to_the_caller():
    generator = start(tiny_model().requires_grad_(True), max_new_tokens=2)
    next(generator)
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()


def test_steps_can_run_in_different_threads():
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


# Seeds


def answer_of(model, sampling: Sampling) -> tuple[list[int], int]:
    """Return the token ids and the seed of the result."""
    result = result_of(start(model, max_new_tokens=12, sampling=sampling))
    return list(result.token_ids), result.seed


def test_seed_reproduces_the_answer_independently_of_global_state():
    model = tiny_model()
    first, _ = answer_of(model, Sampling(1.5, seed=7))
    torch.manual_seed(99)
    state = torch.get_rng_state()
    answer_of(model, Sampling(1.5, seed=8))
    again, seed = answer_of(model, Sampling(1.5, seed=7))
    assert again == first
    assert seed == 7
    assert torch.equal(torch.get_rng_state(), state), "the global random state changed"
    assert answer_of(model, Sampling(1.5, seed=8))[0] != first


def test_without_a_seed_a_random_one_is_drawn_and_returned():
    model = tiny_model()
    torch.manual_seed(0)
    first, first_seed = answer_of(model, Sampling(1.5))
    torch.manual_seed(0)
    _, second_seed = answer_of(model, Sampling(1.5))
    assert first_seed != second_seed
    assert answer_of(model, Sampling(1.5, seed=first_seed))[0] == first


def test_result_matches_the_stream():
    steps = list(start(tiny_model(), max_new_tokens=4))
    result = result_of(start(tiny_model(), max_new_tokens=4))
    assert result.token_ids == tuple(ids_of(steps)) == tuple(ids_of(result.steps))
    assert result.text == steps[-1].text
    assert result.finish_reason == "length"
    assert result.timing.total_s == result.steps[-1].seconds >= result.timing.first_token_s >= result.timing.image_s


# Non-finite logits and other dtypes


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, seed=0)])
def test_non_finite_logits_raise_an_error_with_advice(value, sampling):
    model = tiny_model()
    positions = itertools.count()

    def corrupt_the_third(logits):
        if next(positions) == 2:
            logits[..., 17] = value

    change_logits(model, corrupt_the_third)
    generator = start(model, sampling=sampling)
    next(generator), next(generator)
    with pytest.raises(NonFiniteLogitsError, match=r"token 2 .*bfloat16"):
        next(generator)


def test_float16_overflow_raises_and_bfloat16_does_not():
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
