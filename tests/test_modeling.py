from __future__ import annotations

import pytest
import torch
from reference_models import (
    FAST_CASES,
    LONG_PROMPT,
    SHORT_PROMPT,
    config_of,
    new_model,
    our_model,
    pixels_of,
    prompt_ids,
    random_ids,
    reference_logits,
    reference_model,
)
from torch import Tensor

from paligemma.benchmarks.random_checkpoints import CASES, GEMMA2, Case
from paligemma.config import PaliGemmaConfig, SiglipVisionConfig
from paligemma.kv_cache import KVCache
from paligemma.modeling import PaliGemmaForConditionalGeneration

LIMIT = 1e-4


def new_cache(case: str, length: int, batch: int = 1, dtype: torch.dtype = torch.float32) -> KVCache:
    return KVCache(config_of(case), batch, length, dtype, "cpu")


def types_of(prefix: Tensor, suffix: Tensor) -> Tensor:
    return torch.cat((torch.zeros_like(prefix), torch.ones_like(suffix)), dim=1)


def one_by_one(case: str, prefix: Tensor, answer: Tensor, **inputs: Tensor) -> Tensor:
    """Logits after the prefix and after each answer token, decoded token by token with a cache."""
    model = our_model(case)
    cache = new_cache(case, prefix.shape[1] + answer.shape[1], len(prefix))
    mask = inputs.pop("attention_mask", None)
    logits = [model(prefix, pixels_of(case, len(prefix)), mask, kv_cache=cache, **inputs)["logits"][:, -1:]]
    for index in range(answer.shape[1]):
        if mask is not None:
            mask = torch.cat((mask, mask.new_ones(len(mask), 1)), dim=1)
        logits.append(model(answer[:, index : index + 1], attention_mask=mask, kv_cache=cache)["logits"])
    return torch.cat(logits, dim=1)


def whole(case: str, prefix: Tensor, answer: Tensor) -> Tensor:
    """The same logits from one forward pass without a cache."""
    ids = torch.cat((prefix, answer), dim=1)
    output = our_model(case)(ids, pixels_of(case, len(ids)), token_type_ids=types_of(prefix, answer))
    return output["logits"][:, prefix.shape[1] - 1 :]


# Parity with transformers


@pytest.mark.parametrize("prompt", ["", SHORT_PROMPT, LONG_PROMPT])
@pytest.mark.parametrize("case", [name for name in CASES if name != "paligemma1-224"])
@torch.inference_mode()
def test_prefix_logits_equal_transformers(case: str, prompt: str) -> None:
    ids = prompt_ids(case, prompt)
    ours = our_model(case)(ids, pixels_of(case))["logits"]
    torch.testing.assert_close(ours, reference_logits(case, ids), atol=LIMIT, rtol=0)


@pytest.mark.parametrize("case", FAST_CASES)
@torch.inference_mode()
def test_suffix_logits_and_loss_equal_transformers(case: str) -> None:
    prefix, suffix = prompt_ids(case), random_ids(7)
    ids, types = torch.cat((prefix, suffix), dim=1), types_of(prefix, suffix)
    labels = ids.masked_fill(types == 0, -100)
    pixels = pixels_of(case)
    ours = our_model(case)(ids, pixels, token_type_ids=types, labels=labels)
    reference = reference_model(case)(input_ids=ids, pixel_values=pixels, token_type_ids=types, labels=labels)
    torch.testing.assert_close(ours["logits"], reference.logits, atol=LIMIT, rtol=0)
    torch.testing.assert_close(ours["loss"], reference.loss, atol=1e-5, rtol=0)


@pytest.mark.parametrize("characters", range(9))
@torch.inference_mode()
def test_sliding_window_equals_transformers_around_its_length(characters: int) -> None:
    """Prefixes of 6 to 14 tokens, with answers, against a window of 8."""
    prefix, answer = prompt_ids("sliding", "z" * characters), random_ids(6)
    assert prefix.shape[1] == 6 + characters
    ids, types = torch.cat((prefix, answer), dim=1), types_of(prefix, answer)
    reference = reference_logits("sliding", ids, token_type_ids=types)[:, prefix.shape[1] - 1 :]
    torch.testing.assert_close(one_by_one("sliding", prefix, answer), reference, atol=LIMIT, rtol=0)
    torch.testing.assert_close(whole("sliding", prefix, answer), reference, atol=LIMIT, rtol=0)


@torch.inference_mode()
def test_sliding_window_affects_answers_but_not_prefixes() -> None:
    """Otherwise the test above could not fail."""
    prefix, answer = prompt_ids("sliding", LONG_PROMPT), random_ids(6)
    windowed = one_by_one("sliding", prefix, answer)
    unlimited = new_model(Case({**CASES["sliding"].text, "sliding_window": 4096}, image_size=28))
    ids, types = torch.cat((prefix, answer), dim=1), types_of(prefix, answer)
    logits = unlimited(ids, pixels_of("sliding"), token_type_ids=types)["logits"][:, prefix.shape[1] - 1 :]
    torch.testing.assert_close(windowed[:, 0], logits[:, 0], atol=LIMIT, rtol=0)
    assert (windowed[:, 1:] - logits[:, 1:]).abs().amax(dim=-1).min() > 0.1


@torch.inference_mode()
def test_left_padded_batch_equals_transformers() -> None:
    ids, mask = padded_batch("paligemma2")
    ours = our_model("paligemma2")(ids, pixels_of("paligemma2", 2), mask)["logits"]
    reference = reference_logits("paligemma2", ids, attention_mask=mask)
    torch.testing.assert_close(ours[mask.bool()], reference[mask.bool()], atol=LIMIT, rtol=0)


# KV cache


@pytest.mark.parametrize("length", [1, 2, 17])
@pytest.mark.parametrize("case", FAST_CASES)
@torch.inference_mode()
def test_cached_decoding_equals_uncached(case: str, length: int) -> None:
    prefix, answer = prompt_ids(case), random_ids(length)
    torch.testing.assert_close(one_by_one(case, prefix, answer), whole(case, prefix, answer), atol=LIMIT, rtol=0)


@pytest.mark.parametrize("split", [1, 3, 9])
@pytest.mark.parametrize("case", FAST_CASES)
@torch.inference_mode()
def test_several_tokens_at_once_equal_token_by_token(case: str, split: int) -> None:
    prefix, answer = prompt_ids(case), random_ids(10)
    model, cache = our_model(case), new_cache(case, prefix.shape[1] + 10)
    model(prefix, pixels_of(case), kv_cache=cache)
    parts = [model(part, kv_cache=cache)["logits"] for part in (answer[:, :split], answer[:, split:])]
    expected = one_by_one(case, prefix, answer)[:, 1:]
    torch.testing.assert_close(torch.cat(parts, dim=1), expected, atol=LIMIT, rtol=0)


@torch.inference_mode()
def test_given_cache_is_extended_and_returned() -> None:
    prefix, pixels = prompt_ids("paligemma1"), pixels_of("paligemma1")
    model, cache = our_model("paligemma1"), new_cache("paligemma1", 40)
    output = model(prefix, pixels, kv_cache=cache)
    assert output["kv_cache"] is cache and cache.num_items() == prefix.shape[1]
    again = model(prefix, pixels)
    assert "kv_cache" not in again
    torch.testing.assert_close(again["logits"], output["logits"])


@torch.inference_mode()
def test_full_cache_is_an_error() -> None:
    prefix = prompt_ids("paligemma1")
    with pytest.raises(ValueError, match="max_length is 5"):
        our_model("paligemma1")(prefix, pixels_of("paligemma1"), kv_cache=new_cache("paligemma1", 5))


# Batches and masks


def padded_batch(case: str) -> tuple[Tensor, Tensor]:
    """A long and a left-padded short prompt: ids and attention mask."""
    long, short = prompt_ids(case, LONG_PROMPT), prompt_ids(case, SHORT_PROMPT)
    padding = torch.zeros(1, long.shape[1] - short.shape[1], dtype=torch.long)
    ids = torch.cat((long, torch.cat((padding, short), dim=1)))
    mask = torch.ones_like(ids)
    mask[1, : padding.shape[1]] = 0
    return ids, mask


@pytest.mark.parametrize("case", FAST_CASES)
@torch.inference_mode()
def test_padded_batch_equals_single_sequences(case: str) -> None:
    ids, mask = padded_batch(case)
    answer = random_ids(9, batch=2)
    batch = one_by_one(case, ids, answer, attention_mask=mask)
    for index in range(2):
        own = slice(index, index + 1)
        alone_ids = ids[own, mask[index].bool()]
        cache = new_cache(case, alone_ids.shape[1] + 9)
        pixels = pixels_of(case, 2)[own]
        logits = [our_model(case)(alone_ids, pixels, kv_cache=cache)["logits"][:, -1:]]
        logits += [our_model(case)(token, kv_cache=cache)["logits"] for token in answer[own].split(1, dim=1)]
        alone = torch.cat(logits, dim=1)
        largest_error = (batch[own] - alone).abs().max()
        assert largest_error < 1e-5 * alone.abs().max()


@pytest.mark.parametrize("case", FAST_CASES)
@torch.inference_mode()
def test_padding_ids_do_not_change_logits(case: str) -> None:
    ids, mask = padded_batch(case)
    other = ids.masked_fill(mask == 0, 77)
    pixels = pixels_of(case, 2)
    logits, other_logits = (our_model(case)(tokens, pixels, mask)["logits"] for tokens in (ids, other))
    torch.testing.assert_close(logits[mask.bool()], other_logits[mask.bool()], atol=1e-6, rtol=0)


@pytest.mark.parametrize("case", FAST_CASES)
@torch.inference_mode()
def test_sequence_of_padding_only_is_finite(case: str) -> None:
    ids = prompt_ids(case).repeat(2, 1)
    mask = torch.ones_like(ids)
    mask[1] = 0
    assert our_model(case)(ids, pixels_of(case, 2), mask)["logits"].isfinite().all()


@pytest.mark.parametrize("case", FAST_CASES)
@torch.inference_mode()
def test_suffix_tokens_do_not_change_earlier_logits(case: str) -> None:
    prefix, suffix = prompt_ids(case), random_ids(6)
    changed = suffix.clone()
    changed[0, 3] += 1
    before, after = whole(case, prefix, suffix), whole(case, prefix, changed)
    torch.testing.assert_close(after[:, :4], before[:, :4], atol=1e-6, rtol=0)
    assert (after[:, 4:] - before[:, 4:]).abs().max() > 0.01


@torch.inference_mode()
def test_prefix_tokens_change_earlier_logits() -> None:
    ids = prompt_ids("paligemma1", LONG_PROMPT)
    changed = ids.clone()
    changed[0, -1] = 50
    before, after = (our_model("paligemma1")(tokens, pixels_of("paligemma1"))["logits"] for tokens in (ids, changed))
    assert (after[:, :-1] - before[:, :-1]).abs().amax(dim=-1).min() > 0.01


@pytest.mark.parametrize("case", FAST_CASES)
@torch.inference_mode()
def test_second_part_of_a_prefix_attends_to_the_first(case: str) -> None:
    """Beyond the sliding window too. The first part, already cached, does not attend to the second."""
    model, ids = our_model(case), prompt_ids(case, LONG_PROMPT)
    length, first = ids.shape[1], ids.shape[1] - 3
    cache = new_cache(case, length)
    model(ids[:, :first], pixels_of(case), kv_cache=cache)
    types = torch.zeros_like(ids[:, first:])
    logits = model(ids[:, first:], token_type_ids=types, kv_cache=cache)["logits"]
    mask = torch.zeros(1, 1, length, length)
    mask[:, :, :first, first:] = torch.finfo(torch.float32).min
    merged = model.merge_image_and_text(ids, model.get_image_features(pixels_of(case)))
    hidden = model.language_model.model(merged, mask)
    expected = model.language_model.compute_logits(hidden)[:, first:]
    torch.testing.assert_close(logits, expected, atol=LIMIT, rtol=0)


@torch.inference_mode()
def test_mask_must_cover_cached_and_new_tokens() -> None:
    ids = prompt_ids("paligemma1")
    model, cache = our_model("paligemma1"), new_cache("paligemma1", 40)
    model(ids, pixels_of("paligemma1"), kv_cache=cache)
    with pytest.raises(ValueError, match=r"must have shape \(1, 20\) \(19 cached and 1 new tokens\)"):
        model(random_ids(1), attention_mask=torch.ones(1, 1), kv_cache=cache)


# Images and embeddings


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", ["paligemma1", "paligemma2"])
@torch.inference_mode()
def test_image_features_enter_the_decoder_unchanged(case: str, dtype: torch.dtype) -> None:
    assert CASES["paligemma2"].top_level_hidden_size != CASES["paligemma2"].text["hidden_size"]
    model, ids = our_model(case, dtype=dtype), prompt_ids(case)
    inputs = []
    hook = model.language_model.model.layers[0].register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    model(ids, pixels_of(case))
    hook.remove()
    features = model.multi_modal_projector(model.vision_tower(pixels_of(case)))
    num_image_tokens = model.config.vision_config.num_image_tokens
    assert torch.equal(inputs[0][:, :num_image_tokens], features)
    table = model.language_model.get_input_embeddings()
    factor = torch.tensor(model.config.text_config.hidden_size**0.5, dtype=dtype)
    assert torch.equal(inputs[0][:, num_image_tokens:], table(ids[:, num_image_tokens:]) * factor)


@torch.inference_mode()
def test_image_features_can_replace_pixels() -> None:
    model, ids, pixels = our_model("paligemma1"), prompt_ids("paligemma1"), pixels_of("paligemma1")
    features = model.get_image_features(pixels)
    assert torch.equal(model(ids, image_features=features)["logits"], model(ids, pixels)["logits"])


@pytest.mark.parametrize("change", [-1, 1])
@torch.inference_mode()
def test_number_of_image_tokens_must_match_the_images(change: int) -> None:
    ids = prompt_ids("paligemma1")
    ids = ids[:, 1:] if change < 0 else torch.cat((ids[:, :1], ids), dim=1)
    with pytest.raises(ValueError, match=rf"one image token per image feature \(16\), got {16 + change}"):
        our_model("paligemma1")(ids, pixels_of("paligemma1"))


@torch.inference_mode()
def test_image_tokens_without_an_image_are_rejected() -> None:
    with pytest.raises(ValueError, match=r"one image token per image feature \(0\), got 16"):
        our_model("paligemma1")(prompt_ids("paligemma1"))


@torch.inference_mode()
def test_logits_to_keep_computes_only_the_last_logits() -> None:
    model, ids, pixels = our_model("paligemma2"), prompt_ids("paligemma2"), pixels_of("paligemma2")
    full = model(ids, pixels)["logits"]
    last = model(ids, pixels, logits_to_keep=2)["logits"]
    assert last.shape == (1, 2, model.config.text_config.vocab_size)
    torch.testing.assert_close(last, full[:, -2:], atol=1e-5, rtol=0)
    with pytest.raises(ValueError, match="logits_to_keep must be 0 with labels, got 1"):
        model(ids, pixels, labels=ids, logits_to_keep=1)


@torch.inference_mode()
def test_gemma2_logits_are_soft_capped() -> None:
    model = new_model("paligemma2")
    model.language_model.get_input_embeddings().weight.mul_(40)
    logits = model(prompt_ids("paligemma2"), pixels_of("paligemma2"))["logits"]
    assert 29 < logits.abs().max() <= 30


@torch.inference_mode()
def test_score_soft_cap_and_query_scale_change_the_logits() -> None:
    ids, pixels = prompt_ids("paligemma2"), pixels_of("paligemma2")
    logits = our_model("paligemma2")(ids, pixels)["logits"]
    for change in ({"attn_logit_softcapping": None}, {"query_pre_attn_scalar": 256}):
        other = new_model(Case({**GEMMA2, **change}))
        assert (other(ids, pixels)["logits"] - logits).abs().max() > 100 * LIMIT


# Training


@pytest.mark.parametrize("case", FAST_CASES)
@torch.inference_mode()
def test_suffix_starts_at_the_first_label_by_default(case: str) -> None:
    prefix, suffix = prompt_ids(case).repeat(2, 1), random_ids(5, batch=2)
    ids, types = torch.cat((prefix, suffix), dim=1), types_of(prefix, suffix)
    types[1, prefix.shape[1]] = 0  # the second sequence's suffix starts one token later
    labels = ids.masked_fill(types == 0, -100)
    labels[:, -2] = -100  # an ignored label within the suffix does not end it
    pixels = pixels_of(case, 2)
    given = our_model(case)(ids, pixels, token_type_ids=types, labels=labels)
    default = our_model(case)(ids, pixels, labels=labels)
    assert torch.equal(default["logits"], given["logits"])
    assert torch.equal(default["loss"], given["loss"])


def test_every_weight_receives_a_gradient() -> None:
    model = new_model("paligemma2").train()
    prefix, suffix = prompt_ids("paligemma2"), random_ids(4)
    ids, types = torch.cat((prefix, suffix), dim=1), types_of(prefix, suffix)
    labels = ids.masked_fill(types == 0, -100)
    model(ids, pixels_of("paligemma2"), token_type_ids=types, labels=labels)["loss"].backward()
    without = [name for name, weight in model.named_parameters() if weight.grad is None or not weight.grad.any()]
    assert without == []


# Every tensor matters


@pytest.mark.parametrize("case", ["paligemma1", "paligemma2"])
@torch.inference_mode()
def test_every_tensor_changes_the_logits(case: str) -> None:
    """So a tensor that is loaded wrongly cannot go unnoticed (except k_proj.bias, see test_siglip)."""
    model, ids, pixels = new_model(case), prompt_ids(case), pixels_of(case)
    generator = torch.Generator().manual_seed(0)
    logits = model(ids, pixels)["logits"]
    unused = {}
    for name, weight in model.named_parameters():
        original = weight.clone()
        weight += 0.3 * original.std() * torch.randn(original.shape, generator=generator)
        change = (model(ids, pixels)["logits"] - logits).abs().max().item()
        weight.copy_(original)
        if change < 100 * LIMIT and not name.endswith("self_attn.k_proj.bias"):
            unused[name] = change
    assert unused == {}


# Dtypes and devices


@torch.inference_mode()
def test_low_precision_model_accepts_float32_pixels_and_returns_float32_logits() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        logits = our_model("paligemma2", dtype=dtype)(prompt_ids("paligemma2"), pixels_of("paligemma2"))["logits"]
        assert logits.dtype == torch.float32 and logits.isfinite().all()


def test_model_can_be_built_on_the_meta_device() -> None:
    config = PaliGemmaConfig(SiglipVisionConfig(), config_of("paligemma1").text_config)
    with torch.device("meta"):
        model = PaliGemmaForConditionalGeneration(config)
    assert all(weight.is_meta for weight in model.parameters())
