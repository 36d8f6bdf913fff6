"""Attention equals transformers, the lens equals transformers and the Step, and the model is not modified."""

from __future__ import annotations

import dataclasses
from functools import partial

import pytest
import torch
from PIL import Image
from reference_models import FAST_CASES, config_of, new_model, our_model, reference_model

from paligemma import lens
from paligemma.benchmarks.tiny_tokenizer import build_tiny_tokenizer
from paligemma.errors import InputError, NonFiniteLogitsError
from paligemma.generation import GenerationResult
from paligemma.pipeline import PaliGemma
from paligemma.processing import PaliGemmaProcessor

IMAGE = Image.merge("RGB", [Image.linear_gradient("L"), Image.radial_gradient("L"), Image.linear_gradient("L")])
PROMPT = "answer en the blue cat"  # longer than the sliding window of the case "sliding"
LENGTH = 12
WINDOW = 8
POSITIONS = [0, 1, LENGTH - 1]


def vlm_of(case: str, dtype: torch.dtype = torch.float32) -> PaliGemma:
    return PaliGemma(our_model(case, dtype=dtype), processor_of(case))


def processor_of(case: str) -> PaliGemmaProcessor:
    vision = config_of(case).vision_config
    return PaliGemmaProcessor(build_tiny_tokenizer(), vision.image_size, vision.num_image_tokens)


def sampled(vlm: PaliGemma) -> GenerationResult:
    """An answer of varied tokens, few of them of rank 1."""
    return vlm.generate(IMAGE, PROMPT, max_new_tokens=LENGTH, temperature=1.5, seed=3)


def reference_attention(case: str, token_ids: list[int]) -> torch.Tensor:
    """transformers' attention weights of the last position, (layers, heads, tokens)."""
    inputs = processor_of(case)([IMAGE], [PROMPT])
    generated = torch.tensor([token_ids], dtype=torch.long)
    types = torch.cat((torch.zeros_like(inputs["input_ids"]), torch.ones_like(generated)), dim=1)
    with torch.inference_mode():
        output = reference_model(case)(
            input_ids=torch.cat((inputs["input_ids"], generated), dim=1),
            pixel_values=inputs["pixel_values"],
            token_type_ids=types,
            output_attentions=True,
        )
    return torch.stack([layer[0, :, -1] for layer in output.attentions])


def our_attention(case: str, token_ids: list[int]) -> torch.Tensor:
    vlm = vlm_of(case)
    return lens.read_last_position(vlm, vlm.processor([IMAGE], [PROMPT]), token_ids)[0]


# Attention ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("index", POSITIONS)
@pytest.mark.parametrize("case", FAST_CASES)
def test_attention_equals_transformers_and_sums_to_one(case, index):
    token_ids = list(sampled(vlm_of(case)).token_ids[:index])
    weights = our_attention(case, token_ids)
    torch.testing.assert_close(weights, reference_attention(case, token_ids), atol=1e-5, rtol=0)
    torch.testing.assert_close(weights.sum(dim=-1), torch.ones(weights.shape[:2]), atol=1e-5, rtol=0)


@pytest.mark.parametrize("index", POSITIONS)
@pytest.mark.parametrize("case", FAST_CASES)
def test_inspection_holds_the_attention_to_the_image(case, index):
    vlm, config = vlm_of(case), config_of(case)
    answer = sampled(vlm)
    found = lens.inspect(vlm, IMAGE, PROMPT, answer.token_ids, index)
    patches = config.vision_config.num_image_tokens
    expected = reference_attention(case, list(answer.token_ids[:index]))[..., :patches]
    torch.testing.assert_close(found.attention, expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(found.image_share, expected.sum(dim=-1), atol=1e-5, rtol=0)
    assert found.grid[0] * found.grid[1] == patches
    assert (found.index, found.token_id, found.piece) == (
        index,
        answer.steps[index].token_id,
        answer.steps[index].piece,
    )


def test_sliding_window_limits_generated_tokens_but_not_the_prefix():
    text = config_of("sliding").text_config
    windows = [text.window_of_layer(layer) for layer in range(text.num_hidden_layers)]
    assert set(windows) == {WINDOW, None}
    token_ids = list(sampled(vlm_of("sliding")).token_ids)
    assert bool((our_attention("sliding", []) > 0).all())
    later = our_attention("sliding", token_ids[:3])
    for weights, window in zip(later, windows, strict=True):
        assert bool((weights[:, -WINDOW:] > 0).all())
        assert bool((weights[:, :-WINDOW] == 0).all()) == (window is not None)


def test_later_tokens_do_not_change_the_inspection():
    vlm = vlm_of("paligemma2")
    token_ids = sampled(vlm).token_ids
    found = lens.inspect(vlm, IMAGE, PROMPT, list(token_ids), 4)
    shorter = lens.inspect(vlm, IMAGE, PROMPT, token_ids[:5], 4)
    assert torch.equal(found.attention, shorter.attention) and found.lens == shorter.lens


@pytest.mark.parametrize("case", FAST_CASES)
def test_image_shares_equal_those_of_each_inspection(case):
    vlm = vlm_of(case)
    token_ids = sampled(vlm).token_ids
    shares = lens.image_shares(vlm, IMAGE, PROMPT, token_ids)
    each = [lens.inspect(vlm, IMAGE, PROMPT, token_ids, index).image_share for index in range(LENGTH)]
    torch.testing.assert_close(shares, torch.stack(each), atol=1e-5, rtol=0)
    assert torch.equal(lens.image_shares(vlm, IMAGE, PROMPT, token_ids[:1])[0], each[0])


# Logit lens -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.5])
@pytest.mark.parametrize("case", FAST_CASES)
def test_last_lens_row_equals_the_step(case, temperature):
    vlm = vlm_of(case)
    answer = vlm.generate(IMAGE, PROMPT, max_new_tokens=LENGTH, temperature=temperature, seed=3)
    assert all(step.rank == 1 for step in answer.steps) == (temperature == 0)
    for step in answer.steps:
        rows = lens.inspect(vlm, IMAGE, PROMPT, answer.token_ids, step.index).lens
        assert [row.layer for row in rows] == list(range(config_of(case).text_config.num_hidden_layers + 1))
        assert (rows[-1].token_id, rows[-1].piece) == (step.top[0].token_id, step.top[0].piece)
        assert rows[-1].prob == pytest.approx(step.top[0].prob, abs=1e-5)
        assert rows[-1].entropy == pytest.approx(step.entropy, abs=1e-4)
        assert rows[-1].rank_of_final == step.rank


@pytest.mark.parametrize("case", FAST_CASES)
def test_lens_rows_equal_transformers(case):
    """The last of transformers' hidden states is left out: it is normalized already."""
    vlm, reference = vlm_of(case), reference_model(case)
    inputs = vlm.processor([IMAGE], [PROMPT])
    with torch.inference_mode():
        output = reference(**inputs, token_type_ids=torch.zeros_like(inputs["input_ids"]), output_hidden_states=True)
        states = [hidden_states[:, -1:] for hidden_states in output.hidden_states[:-1]]
        logits = [reference.lm_head(reference.model.language_model.norm(state))[0, 0] for state in states]
    cap = config_of(case).text_config.final_logit_softcapping
    token_ids = sampled(vlm).token_ids
    found = lens.inspect(vlm, IMAGE, PROMPT, token_ids, 0).lens
    for row, raw in zip(found, logits, strict=False):
        capped = raw if cap is None else cap * torch.tanh(raw / cap)
        probs = capped.masked_fill(~vlm.allowed_tokens, -torch.inf).softmax(dim=-1)
        assert row.token_id == int(probs.argmax())
        assert row.prob == pytest.approx(float(probs.max()), abs=1e-5)
        assert row.entropy == pytest.approx(float(torch.special.entr(probs).sum()), abs=1e-4)
        assert row.rank_of_final == 1 + int((probs > probs[token_ids[0]]).sum())
    assert len(found) == len(logits) + 1


def test_lens_rows_contain_allowed_tokens_only():
    vlm = vlm_of("paligemma1")
    vlm.allowed_tokens = torch.zeros_like(vlm.allowed_tokens)
    vlm.allowed_tokens[[30, 40]] = True
    found = lens.inspect(vlm, IMAGE, PROMPT, [40], 0)
    assert {row.token_id for row in found.lens} <= {30, 40}
    assert all(row.prob >= 0.5 and row.rank_of_final in (1, 2) for row in found.lens)


# Dtypes, errors, side effects ------------------------------------------------------------------------------------


@pytest.mark.parametrize("index", POSITIONS)
@pytest.mark.parametrize("case", ["paligemma1", "sliding"])
def test_bfloat16_differs_only_by_rounding(case, index):
    vlm = vlm_of(case, torch.bfloat16)
    answer = sampled(vlm)
    found = lens.inspect(vlm, IMAGE, PROMPT, answer.token_ids, index)
    expected = lens.inspect(vlm_of(case), IMAGE, PROMPT, answer.token_ids, index)
    assert found.attention.dtype == found.image_share.dtype == torch.float32
    assert float((found.attention - expected.attention).abs().mean()) < 0.02
    step, last = answer.steps[index], found.lens[-1]
    assert last.prob == pytest.approx(step.top[0].prob, rel=0.1)
    assert last.entropy == pytest.approx(step.entropy, rel=0.1)


@pytest.mark.parametrize("index", [-1, 3, 1.0, True, None])
def test_index_out_of_range_is_rejected(index):
    with pytest.raises(ValueError, match=rf"index must be .* = 3, got {index!r}"):
        lens.inspect(vlm_of("paligemma1"), IMAGE, PROMPT, [30, 31, 32], index)


def test_empty_answer_is_rejected():
    vlm = vlm_of("paligemma1")
    with pytest.raises(InputError, match=r"^token_ids must not be empty\.$"):
        lens.inspect(vlm, IMAGE, PROMPT, [], 0)
    with pytest.raises(InputError, match=r"^token_ids must not be empty\.$"):
        lens.image_shares(vlm, IMAGE, PROMPT, [])


@pytest.mark.parametrize("token_id", [-1, 10**9, 30.0, "cat"])
def test_invalid_token_ids_are_rejected(token_id):
    with pytest.raises(ValueError, match=f"token_ids must .* got {token_id!r}"):
        lens.inspect(vlm_of("paligemma1"), IMAGE, PROMPT, [30, token_id], 0)


def test_image_token_and_unused_ids_are_rejected():
    vlm = vlm_of("paligemma1")
    for token_id in (vlm.processor.image_token_id, vlm.config.text_config.vocab_size - 1):
        with pytest.raises(ValueError, match="other than <image>"):
            lens.inspect(vlm, IMAGE, PROMPT, [token_id], 0)


def test_index_beyond_the_positions_is_rejected():
    vlm = vlm_of("paligemma1")
    positions = vlm.config.text_config.max_position_embeddings
    with pytest.raises(ValueError, match=f"of the model's {positions} positions"):
        lens.inspect(vlm, IMAGE, PROMPT, [30] * (positions + 1), positions)


def test_prompt_that_fills_all_positions_is_rejected():
    vlm = vlm_of("paligemma1")
    positions = vlm.config.text_config.max_position_embeddings
    prompt = "cat " * positions
    prefix_length = vlm.processor([IMAGE], [prompt])["input_ids"].shape[1]
    message = f"^The prompt is too long: image and prompt take {prefix_length} of the model's {positions} positions"
    for inspect in (partial(lens.inspect, index=0), lens.image_shares):
        with pytest.raises(InputError, match=message):
            inspect(vlm, IMAGE, prompt, [30])


def test_inspection_uses_the_cached_image_features():
    vlm, runs = PaliGemma(new_model("paligemma1"), processor_of("paligemma1")), []
    answer = sampled(vlm)
    vlm.model.vision_tower.register_forward_hook(lambda *_: runs.append(None))
    lens.inspect(vlm, IMAGE, PROMPT, answer.token_ids, 1)
    lens.image_shares(vlm, IMAGE, PROMPT, answer.token_ids)
    assert runs == []


def test_non_finite_logits_are_reported():
    model = new_model("paligemma1")
    with torch.no_grad():
        model.language_model.model.layers[1].mlp.down_proj.weight.fill_(torch.nan)
    with pytest.raises(NonFiniteLogitsError, match=r"after layer 2 .*the checkpoint may be corrupt"):
        lens.inspect(PaliGemma(model, processor_of("paligemma1")), IMAGE, PROMPT, [30], 0)


def test_inspection_does_not_modify_the_model():
    model = new_model("sliding")
    vlm = PaliGemma(model, processor_of("sliding"))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    answer = sampled(vlm)
    first = lens.inspect(vlm, IMAGE, PROMPT, answer.token_ids, 5)
    second = lens.inspect(vlm, IMAGE, PROMPT, answer.token_ids, 5)
    assert torch.equal(first.attention, second.attention) and first.lens == second.lens
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert {name: set(vars(module)) for name, module in model.named_modules()} == attributes
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert not any(module.training for module in model.modules())
    assert sampled(vlm).token_ids == answer.token_ids


def test_results_are_immutable():
    vlm = vlm_of("paligemma1")
    found = lens.inspect(vlm, IMAGE, PROMPT, [30], 0)
    for result, name in ((found, "attention"), (found.lens[0], "prob")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(result, name, None)
