from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from reference_models import our_model, prompt_ids, random_ids

from paligemma import gemma
from paligemma.config import GemmaConfig
from paligemma.gemma import (
    GemmaForCausalLM,
    GemmaMLP,
    GemmaModel,
    GemmaRMSNorm,
    GemmaRotaryEmbedding,
    apply_rotary_pos_emb,
    attention,
    attention_weights,
    eager_attention,
    soft_cap,
)
from paligemma.kv_cache import KVCache

TINY = {"vocab_size": 11, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2}


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# Norm, activation, embedding scale


def test_bfloat16_rms_norm_is_within_one_ulp_of_float32() -> None:
    norm = GemmaRMSNorm(256).requires_grad_(False)
    norm.weight.copy_(random(256, seed=1))
    norm.bfloat16()
    x = random(64, 256, dtype=torch.bfloat16) * 7
    result = norm(x)
    expected = norm.float()(x.float())
    assert result.dtype == torch.bfloat16
    ulps = result.view(torch.int16).int() - expected.bfloat16().view(torch.int16).int()
    assert ulps.abs().max() <= 1


def test_rms_norm_multiplies_by_one_plus_weight() -> None:
    norm = GemmaRMSNorm(4)
    x = torch.tensor([[2.0, -2.0, 2.0, -2.0]])
    torch.testing.assert_close(norm(x), x / 2)
    with torch.no_grad():
        norm.weight.fill_(0.5)
    torch.testing.assert_close(norm(x), x / 2 * 1.5)


def test_rms_norm_does_not_overflow_in_float16() -> None:
    x = torch.full((1, 8), 6e4, dtype=torch.float16)
    torch.testing.assert_close(GemmaRMSNorm(8).half()(x), torch.ones_like(x))


def test_mlp_uses_tanh_gelu() -> None:
    mlp = GemmaMLP(GemmaConfig(**{**TINY, "hidden_size": 1, "intermediate_size": 1}))
    with torch.no_grad():
        for layer in (mlp.gate_proj, mlp.up_proj, mlp.down_proj):
            layer.weight.fill_(1.0)
        output = mlp(torch.tensor([[-1.0]])).item()
    assert output == pytest.approx(0.15881, abs=5e-6)  # gelu(-1) * -1; with erf: 0.15866


@pytest.mark.parametrize(
    ("hidden_size", "dtype", "factor"),
    [
        (2048, torch.float32, 45.254834),
        (2048, torch.bfloat16, 45.25),
        (2048, torch.float16, 45.25),
        (2304, torch.bfloat16, 48.0),
        (3584, torch.bfloat16, 59.75),
        (3584, torch.float16, 59.875),
        (4608, torch.bfloat16, 68.0),
        (4608, torch.float16, 67.875),
    ],
)
def test_embedding_scale_is_rounded_to_the_dtype(hidden_size: int, dtype: torch.dtype, factor: float) -> None:
    with torch.device("meta"):
        model = GemmaModel(GemmaConfig(**{**TINY, "hidden_size": hidden_size}))
    scaled = model.scale_embeddings(torch.ones(1, dtype=dtype))
    assert scaled.dtype == dtype
    assert scaled.item() == pytest.approx(factor, rel=1e-7)


# Rotary position embeddings


def test_rotary_scores_depend_only_on_distance() -> None:
    rotary = GemmaRotaryEmbedding(GemmaConfig(**TINY, head_dim=16))
    query, key = random(1, 1, 1, 16), random(1, 1, 1, 16, seed=1)

    def score(query_position: int, key_position: int) -> float:
        rotated = [
            apply_rotary_pos_emb(x, *rotary(torch.tensor([[position]])))
            for x, position in ((query, query_position), (key, key_position))
        ]
        torch.testing.assert_close(rotated[0].norm(), query.norm())
        return (rotated[0] * rotated[1]).sum().item()

    assert score(9, 4) == pytest.approx(score(105, 100), abs=1e-4)
    assert score(9, 4) != pytest.approx(score(4, 9), abs=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rotary_angles_stay_float32(dtype: torch.dtype) -> None:
    """bfloat16 cannot represent odd integers above 256, so neighboring positions would coincide."""
    rotary = GemmaRotaryEmbedding(GemmaConfig(**TINY, head_dim=16)).to(dtype)
    cos, sin = rotary(torch.tensor([[4096, 4097]]))
    assert cos.dtype == sin.dtype == torch.float32
    torch.testing.assert_close(cos[0, 0, :, 0], torch.tensor([4096.0, 4097.0]).cos())


# Attention


def qkv(
    batch: int = 2, heads: int = 6, key_heads: int = 2, queries: int = 5, keys: int = 9, dim: int = 8
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        random(batch, heads, queries, dim, seed=1) * 2,
        random(batch, key_heads, keys, dim, seed=2) * 2,
        random(batch, key_heads, keys, dim, seed=3),
    )


def random_mask(batch: int, queries: int, keys: int) -> torch.Tensor:
    visible = random(batch, 1, queries, keys, seed=4) > 0
    visible[..., 0] = True
    return torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)


@pytest.mark.parametrize("key_heads", [1, 2, 6])
@pytest.mark.parametrize("masked", [False, True])
def test_fused_attention_equals_eager_attention(key_heads: int, masked: bool) -> None:
    queries, keys, values = qkv(key_heads=key_heads)
    mask = random_mask(2, 5, 9) if masked else None
    fused = attention(queries, keys, values, mask, 0.3, None)
    torch.testing.assert_close(fused, eager_attention(queries, keys, values, mask, 0.3, None), atol=1e-5, rtol=0)


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("block", [1, 2, 3, 5])
def test_blocks_of_queries_do_not_change_attention(
    monkeypatch: pytest.MonkeyPatch, block: int, softcap: float | None
) -> None:
    queries, keys, values = qkv()
    mask = random_mask(2, 5, 9)
    whole = eager_attention(queries, keys, values, mask, 0.3, softcap)
    monkeypatch.setattr(gemma, "QUERY_BLOCK", block)
    torch.testing.assert_close(eager_attention(queries, keys, values, mask, 0.3, softcap), whole, atol=1e-6, rtol=0)


def test_neighboring_query_heads_share_a_key_head() -> None:
    queries, keys, values = qkv(heads=4, key_heads=2)
    grouped = attention(queries, keys, values, None, 0.3, None)
    for head in range(4):
        own = slice(head // 2, head // 2 + 1)
        alone = attention(queries[:, head : head + 1], keys[:, own], values[:, own], None, 0.3, None)
        torch.testing.assert_close(grouped[:, head : head + 1], alone)


def test_attention_weights_sum_to_one_and_are_zero_on_hidden_keys() -> None:
    queries, keys, _ = qkv()
    mask = random_mask(2, 5, 9)
    weights = attention_weights(queries, keys, mask, 0.3, 5.0)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 6, 5))
    assert (weights[(mask < 0).expand_as(weights)] == 0).all()


def test_soft_cap_is_applied_before_the_mask() -> None:
    """After the mask, it would raise the scores of hidden keys to minus the cap."""
    queries, keys = torch.full((1, 1, 1, 4), 100.0), torch.full((1, 1, 3, 4), -100.0)
    mask = torch.tensor([0.0, 0.0, torch.finfo(torch.float32).min]).view(1, 1, 1, 3)
    weights = attention_weights(queries, keys, mask, 1.0, 50.0)
    torch.testing.assert_close(weights.flatten(), torch.tensor([0.5, 0.5, 0.0]))


def test_soft_cap_is_monotonic_and_bounded() -> None:
    scores = torch.linspace(-1e4, 1e4, 1001)
    capped = soft_cap(scores, 50.0)
    assert capped.abs().max() <= 50.0
    torch.testing.assert_close(soft_cap(torch.tensor([0.1, -0.1]), 50.0), torch.tensor([0.1, -0.1]), atol=1e-6, rtol=0)
    assert (capped.diff() >= 0).all()


def test_soft_cap_bounds_the_ratio_of_attention_weights() -> None:
    queries, keys = torch.tensor([[[[100.0]]]]), torch.tensor([[[[1.0], [-1.0]]]])
    weights = attention_weights(queries, keys, None, 1.0, 2.0).flatten()
    assert (weights[0] / weights[1]).item() == pytest.approx(math.exp(4.0), rel=1e-3)


@pytest.mark.parametrize("softcap", [None, 50.0])
def test_attention_without_visible_keys_is_finite(softcap: float | None) -> None:
    queries, keys, values = qkv()
    mask = torch.full((1, 1, 5, 9), torch.finfo(torch.float32).min)
    assert attention(queries, keys, values, mask, 0.3, softcap).isfinite().all()


@pytest.mark.parametrize(
    ("fields", "scale"),
    [
        ({"head_dim": 256}, 256**-0.5),
        ({"head_dim": 128, "query_pre_attn_scalar": 144}, 1 / 12),
    ],
)
def test_query_scale(fields: dict[str, int], scale: float) -> None:
    config = GemmaConfig(**TINY, **fields)
    layer = GemmaModel(config).layers[0].self_attn
    assert layer.scale == pytest.approx(scale)


# Whole decoder


def test_head_and_embedding_share_a_weight() -> None:
    model = GemmaForCausalLM(GemmaConfig(**TINY))
    assert model.lm_head.weight is model.get_input_embeddings().weight
    assert model.lm_head.bias is None


@pytest.mark.parametrize("case", ["paligemma1", "paligemma2"])
def test_forward_scales_embeddings_and_computes_only_the_last_logits(case: str) -> None:
    model = our_model(case).language_model
    ids = prompt_ids("paligemma1")[:, -3:]
    with torch.inference_mode():
        embeddings = model.get_input_embeddings()(ids)
        logits = model(inputs_embeds=embeddings)["logits"]
        hidden = model.model(embeddings * model.config.hidden_size**0.5)
        last = model(inputs_embeds=embeddings, logits_to_keep=1)["logits"]
        expected = model.compute_logits(hidden)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(last, logits[:, -1:], atol=1e-5, rtol=0)
    assert logits.dtype == torch.float32
    if case == "paligemma2":
        assert logits.abs().max() < 30


@pytest.mark.parametrize("case", ["paligemma1", "sliding"])
@torch.inference_mode()
def test_language_model_alone_decodes_text_with_a_cache(case: str) -> None:
    model, prefix, answer = our_model(case), random_ids(6), random_ids(6, seed=1)  # together exceed the sliding window
    types = torch.cat((torch.zeros_like(prefix), torch.ones_like(answer)), dim=1)
    whole = model(torch.cat((prefix, answer), dim=1), token_type_ids=types)["logits"]
    decoder, cache = model.language_model, KVCache(model.config, 1, 12, torch.float32, "cpu")
    logits = []
    for ids in (prefix, *answer.split(1, dim=1)):
        output = decoder(inputs_embeds=decoder.get_input_embeddings()(ids), kv_cache=cache)
        assert output["kv_cache"] is cache
        logits.append(output["logits"])
    torch.testing.assert_close(torch.cat(logits, dim=1), whole, atol=1e-4, rtol=0)


def causal_mask(length: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full((1, 1, length, length), torch.finfo(dtype).min, dtype=dtype).triu(1)


@pytest.mark.parametrize("case", ["paligemma1", "paligemma2"])
@torch.inference_mode()
def test_additive_mask_may_have_any_float_dtype(case: str) -> None:
    model = our_model(case).language_model
    embeddings = model.get_input_embeddings()(random_ids(5, batch=2))
    logits = model(causal_mask(5), embeddings)["logits"]
    first = model(inputs_embeds=embeddings[:, :1])["logits"]
    torch.testing.assert_close(logits[:, :1], first, atol=1e-4, rtol=0)
    masks = [causal_mask(5, dtype) for dtype in (torch.float64, torch.bfloat16, torch.float16)]
    infinite = torch.full((5, 5), -math.inf).triu(1).expand(2, 1, 5, 5)
    for mask in (*masks, infinite):
        torch.testing.assert_close(model(mask, embeddings)["logits"], logits, atol=1e-5, rtol=0)


@pytest.mark.parametrize("case", ["paligemma1", "paligemma2"])
@torch.inference_mode()
def test_low_precision_model_without_visible_keys_is_finite(case: str) -> None:
    model = our_model(case, dtype=torch.bfloat16).language_model
    embeddings = model.get_input_embeddings()(random_ids(5))
    for hidden in (torch.finfo(torch.float32).min, -math.inf):
        assert model(torch.full((1, 1, 5, 5), hidden), embeddings)["logits"].isfinite().all()


@pytest.mark.parametrize("case", ["paligemma1", "paligemma2"])
@pytest.mark.parametrize(
    "mask",
    [
        causal_mask(5) == 0,
        (causal_mask(5) == 0).long(),
        torch.ones(2, 5),
        causal_mask(5)[0],
        causal_mask(4),
        causal_mask(5)[:, :, :1],
        causal_mask(5).expand(3, 1, 5, 5),
        causal_mask(5).expand(2, 4, 5, 5),
    ],
    ids=["bool", "integer", "padding mask", "no head axis", "too short", "one query", "other batch size", "per head"],
)
@torch.inference_mode()
def test_mask_of_wrong_dtype_or_shape_is_rejected(case: str, mask: torch.Tensor) -> None:
    model = our_model(case).language_model
    embeddings = model.get_input_embeddings()(random_ids(5, batch=2))
    with pytest.raises(ValueError, match=r"must be floating-point .* with shape \(2, 1, 5, 5\)"):
        model(mask, embeddings)


def test_negative_logits_to_keep_is_rejected() -> None:
    model = our_model("paligemma1").language_model
    with pytest.raises(ValueError, match="logits_to_keep must be >= 0"), torch.inference_mode():
        model(inputs_embeds=model.get_input_embeddings()(random_ids(3)), logits_to_keep=-1)


def test_missing_embeddings_are_rejected() -> None:
    with pytest.raises(ValueError, match="inputs_embeds is missing"):
        GemmaForCausalLM(GemmaConfig(**TINY))()


def test_gemma2_layers_have_two_more_norms_than_gemma1() -> None:
    names1 = {name for name, _ in GemmaModel(GemmaConfig(**TINY)).layers[0].named_parameters() if "norm" in name}
    names2 = {
        name
        for name, _ in GemmaModel(GemmaConfig(**TINY, model_type="gemma2")).layers[0].named_parameters()
        if "norm" in name
    }
    assert names1 == {"input_layernorm.weight", "post_attention_layernorm.weight"}
    assert names2 - names1 == {"pre_feedforward_layernorm.weight", "post_feedforward_layernorm.weight"}


def test_residual_stream_is_not_normalized() -> None:
    """With zero output projections, a layer of either generation is the identity."""
    for model_type in ("gemma", "gemma2"):
        layer = GemmaModel(GemmaConfig(**TINY, model_type=model_type)).layers[0]
        with torch.no_grad():
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        x = random(1, 3, 8) * 9
        rotary = GemmaRotaryEmbedding(GemmaConfig(**TINY))(torch.tensor([[1, 2, 3]]))
        torch.testing.assert_close(layer(x, rotary, None, None), x)


def test_eager_attention_equals_the_formula_in_float64() -> None:
    queries, keys, values = (x.double() for x in qkv(heads=2, key_heads=2))
    expected = F.softmax(queries @ keys.transpose(-1, -2) * 0.3, dim=-1) @ values
    torch.testing.assert_close(eager_attention(queries, keys, values, None, 0.3, None), expected, atol=1e-5, rtol=0)
