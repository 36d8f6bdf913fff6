"""Configurations from the hub's files: old and new key names, complete and sparse."""

from __future__ import annotations

import json
import math
import re

import pytest
import transformers

from paligemma.config import GemmaConfig, PaliGemmaConfig, SiglipVisionConfig

VISION = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "model_type": "siglip_vision_model",
    "num_attention_heads": 16,
    "num_hidden_layers": 27,
    "patch_size": 14,
    "projection_dim": 2048,
    "vision_use_head": False,
}
# The keys of Google's config.json files.
PALIGEMMA1 = {
    "bos_token_id": 2,
    "eos_token_id": 1,
    "hidden_size": 2048,
    "ignore_index": -100,
    "image_token_index": 257152,
    "model_type": "paligemma",
    "pad_token_id": 0,
    "projection_dim": 2048,
    "text_config": {
        "hidden_size": 2048,
        "intermediate_size": 16384,
        "model_type": "gemma",
        "num_attention_heads": 8,
        "num_hidden_layers": 18,
        "num_image_tokens": 256,
        "num_key_value_heads": 1,
        "torch_dtype": "float32",
        "vocab_size": 257216,
    },
    "torch_dtype": "float32",
    "vision_config": VISION,
}
PALIGEMMA2 = {
    "_vocab_size": 257152,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "hidden_size": 2048,
    "image_token_index": 257152,
    "model_type": "paligemma",
    "pad_token_id": 0,
    "projection_dim": 2304,
    "text_config": {
        "cache_implementation": "hybrid",
        "eos_token_id": [1, 107],
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "model_type": "gemma2",
        "num_hidden_layers": 26,
        "num_key_value_heads": 4,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "torch_dtype": "bfloat16",
        "vocab_size": 257216,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {**VISION, "num_positions": 256, "projection_dim": 2304},
}


def with_text(**changes: object) -> dict:
    return {**PALIGEMMA1, "text_config": {**PALIGEMMA1["text_config"], **changes}}


def test_paligemma_1_config():
    config = PaliGemmaConfig.from_dict(PALIGEMMA1)
    text = config.text_config
    assert (text.head_dim, text.rope_theta, text.rms_norm_eps, text.max_position_embeddings) == (256, 1e4, 1e-6, 8192)
    assert text.attention_scale == 256**-0.5
    assert (text.sliding_window, text.attn_logit_softcapping, text.final_logit_softcapping) == (None, None, None)
    assert (text.vocab_size, config.image_token_index, config.eos_token_ids) == (257216, 257152, (1,))
    assert (config.vision_config.image_size, config.vision_config.num_image_tokens) == (224, 256)
    assert config.dtype == "float32"


def test_paligemma_2_config():
    config = PaliGemmaConfig.from_dict(PALIGEMMA2)
    text = config.text_config
    assert (text.num_attention_heads, text.num_key_value_heads, text.head_dim) == (8, 4, 256)
    assert (text.attn_logit_softcapping, text.final_logit_softcapping, text.sliding_window) == (50.0, 30.0, 4096)
    assert [text.window_of_layer(index) for index in range(4)] == [4096, None, 4096, None]
    assert config.eos_token_ids == (1, 107)


def test_paligemma_2_28b_scales_queries_by_144():
    changes = {"head_dim": 128, "query_pre_attn_scalar": 144, "num_attention_heads": 32, "num_key_value_heads": 16}
    data = {**PALIGEMMA2, "text_config": {**PALIGEMMA2["text_config"], **changes}}
    assert PaliGemmaConfig.from_dict(data).text_config.attention_scale == pytest.approx(1 / 12)


def test_number_of_image_tokens_follows_from_the_image_size():
    data = {**PALIGEMMA2, "vision_config": {**VISION, "image_size": 448, "num_positions": 256}}
    assert PaliGemmaConfig.from_dict(data).vision_config.num_image_tokens == 1024


@pytest.mark.parametrize("model_type", ["gemma", "gemma2"])
def test_missing_keys_take_the_defaults_of_transformers(model_type: str):
    data = {"model_type": "paligemma", "text_config": {"model_type": model_type}, "vision_config": {}}
    ours = PaliGemmaConfig.from_dict(data)
    theirs = transformers.PaliGemmaConfig(
        text_config={"model_type": model_type}, vision_config={"model_type": "siglip_vision_model"}
    )
    for name in SiglipVisionConfig.__dataclass_fields__:
        assert getattr(ours.vision_config, name) == getattr(theirs.vision_config, name), name
    for name in GemmaConfig.__dataclass_fields__:
        if name not in ("rope_theta", "layer_types") and hasattr(theirs.text_config, name):
            assert getattr(ours.text_config, name) == getattr(theirs.text_config, name), name
    if model_type == "gemma2":
        assert list(ours.text_config.layer_types) == theirs.text_config.layer_types


def test_new_key_names_are_accepted():
    data = {key: value for key, value in with_text().items() if key not in ("torch_dtype", "image_token_index")}
    rope = {"rope_theta": 5e5, "rope_type": "default"}
    data = {**data, "dtype": "bfloat16", "image_token_id": 5, "text_config": {**data["text_config"]}}
    data["text_config"] |= {"rope_parameters": rope, "dtype": "float16"}
    config = PaliGemmaConfig.from_dict(data)
    assert (config.dtype, config.image_token_index, config.text_config.rope_theta) == ("bfloat16", 5, 5e5)


def test_old_key_names_are_accepted():
    config = PaliGemmaConfig.from_dict(with_text(rope_theta=5e5, rope_scaling=None, hidden_act="gelu"))
    assert (config.text_config.rope_theta, config.dtype) == (5e5, "float32")


def test_end_tokens_are_collected_from_all_files():
    config = PaliGemmaConfig.from_dict(PALIGEMMA2, generation={"eos_token_id": [1, 9]})
    assert config.eos_token_ids == (1, 9, 107)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({**PALIGEMMA1, "model_type": "llava"}, "'llava'"),
        ({key: value for key, value in PALIGEMMA1.items() if key != "text_config"}, "must contain text_config"),
        (with_text(model_type="llama"), "'llama'"),
        (with_text(attention_bias=True), "attention_bias must be False, got True"),
        (with_text(hidden_act="relu"), "'relu'"),
        (with_text(rope_scaling={"type": "linear", "factor": 2}), "'linear'"),
        (with_text(num_attention_heads=8, num_key_value_heads=3), "multiple of num_key_value_heads, got 8 and 3"),
        (with_text(head_dim=7), "head_dim must be even, got 7"),
        (with_text(num_hidden_layers=0), "num_hidden_layers must be an integer > 0, got 0"),
        (
            {**PALIGEMMA1, "vision_config": {**VISION, "num_attention_heads": 5}},
            "multiple of num_attention_heads, got 1152 and 5",
        ),
        ({**PALIGEMMA1, "vision_config": {**VISION, "patch_size": 500}}, "patch_size must be <= image_size, got 500"),
        ({**PALIGEMMA1, "vision_config": {**VISION, "num_channels": 1}}, "num_channels must be 3, got 1"),
        (with_text(rope_parameters={"full_attention": {"rope_theta": 1e4}}), "a single object shared by all layers"),
    ],
)
def test_unsupported_model_is_rejected(data: dict, message: str):
    with pytest.raises(ValueError, match=message):
        PaliGemmaConfig.from_dict(data)


WRONG_TYPES = ["64", 64.5, True, [64], {}, math.inf]


@pytest.mark.parametrize("value", [*WRONG_TYPES, 64.0, -1, 0])
@pytest.mark.parametrize("section", ["text_config", "vision_config"])
@pytest.mark.parametrize("name", ["hidden_size", "num_hidden_layers"])
def test_size_must_be_a_positive_integer(section: str, name: str, value: object):
    data = {**PALIGEMMA2, section: {**PALIGEMMA2[section], name: value}}
    with pytest.raises(ValueError, match=rf"{name} must be an integer > 0, got {re.escape(repr(value))}"):
        PaliGemmaConfig.from_dict(data)


@pytest.mark.parametrize(
    ("section", "changes", "message"),
    [
        ("text_config", {"num_hidden_layers": 10**9}, r"num_hidden_layers must be <= 1000, got 1000000000"),
        ("vision_config", {"num_hidden_layers": 1001}, "must be <= 1000"),
        ("text_config", {"vocab_size": 10**12}, r"vocab_size must be <= .* got 1000000000000"),
        ("text_config", {"max_position_embeddings": 10**400}, "max_position_embeddings must be <="),
        (
            "text_config",
            {"hidden_size": 10**6, "intermediate_size": 10**6},
            r"at most 1e\+11 parameters, got about \d.*e\+1\d",
        ),
        ("vision_config", {"image_size": 10**7}, r"at most 1e\+11 parameters"),
    ],
)
def test_absurd_sizes_are_rejected(section: str, changes: dict, message: str):
    with pytest.raises(ValueError, match=message):
        PaliGemmaConfig.from_dict({**PALIGEMMA2, section: {**PALIGEMMA2[section], **changes}})


@pytest.mark.parametrize(("data", "millions"), [(PALIGEMMA1, 2923), (PALIGEMMA2, 3032)])
def test_approximate_parameters_is_within_one_percent(data: dict, millions: int):
    assert PaliGemmaConfig.from_dict(data).approximate_parameters / 1e6 == pytest.approx(millions, rel=0.01)


def test_quantized_checkpoint_is_rejected():
    with pytest.raises(ValueError, match=r"quantized checkpoint \(gptq\)"):
        PaliGemmaConfig.from_dict({**PALIGEMMA1, "quantization_config": {"quant_method": "gptq"}})


@pytest.mark.parametrize("value", ["64", True, [64], math.inf, math.nan, 0.0])
@pytest.mark.parametrize("name", ["rope_theta", "rms_norm_eps", "attn_logit_softcapping", "query_pre_attn_scalar"])
def test_factor_must_be_a_finite_number(name: str, value: object):
    data = {**PALIGEMMA2, "text_config": {**PALIGEMMA2["text_config"], name: value}}
    with pytest.raises(ValueError, match=f"{name} must be a number > 0"):
        PaliGemmaConfig.from_dict(data)


@pytest.mark.parametrize("value", ["1", 1.0, True, [[1]], {}, -1])
@pytest.mark.parametrize("name", ["image_token_index", "bos_token_id", "pad_token_id", "eos_token_id"])
def test_token_id_must_be_an_integer(name: str, value: object):
    with pytest.raises(ValueError, match=f"{name} must be an integer >= 0"):
        PaliGemmaConfig.from_dict({**PALIGEMMA1, name: value})


@pytest.mark.parametrize("value", ["sliding_attention", [None] * 26, [["full_attention"]] * 26, ["full_attention"], 5])
def test_layer_types_must_have_one_value_per_layer(value: object):
    with pytest.raises(ValueError, match="layer_types must have 26 entries"):
        PaliGemmaConfig.from_dict({**PALIGEMMA2, "text_config": {**PALIGEMMA2["text_config"], "layer_types": value}})


def test_null_means_missing():
    rope = {"rope_type": None, "rope_theta": None}
    names = ("hidden_activation", "head_dim", "rms_norm_eps", "rope_theta", "rope_scaling", "layer_types")
    text = {**PALIGEMMA2["text_config"], **dict.fromkeys(names), "rope_parameters": rope}
    data = {**PALIGEMMA2, "text_config": text, "image_token_id": None, "eos_token_id": [None], "dtype": None}
    assert PaliGemmaConfig.from_dict(data) == PaliGemmaConfig.from_dict({**PALIGEMMA2, "eos_token_id": [1, 107]})


def test_gemma_1_ignores_gemma_2_fields():
    changes = {"query_pre_attn_scalar": 144, "sliding_window": 8, "final_logit_softcapping": 30.0, "layer_types": []}
    assert PaliGemmaConfig.from_dict(with_text(**changes)) == PaliGemmaConfig.from_dict(PALIGEMMA1)


@pytest.mark.parametrize("data", [PALIGEMMA1, PALIGEMMA2])
def test_to_dict_round_trips(data: dict, tmp_path):
    config = PaliGemmaConfig.from_dict(data)
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    assert PaliGemmaConfig.from_folder(tmp_path) == config


@pytest.mark.parametrize("model_type", ["gemma", "gemma2"])
@pytest.mark.parametrize("name", ["attn_logit_softcapping", "final_logit_softcapping", "sliding_window", "layer_types"])
def test_null_fields_round_trip_through_transformers(model_type: str, name: str):
    data = {"gemma": PALIGEMMA1, "gemma2": PALIGEMMA2}[model_type]
    config = PaliGemmaConfig.from_dict({**data, "text_config": {**data["text_config"], name: None}})
    written = json.loads(json.dumps(config.to_dict()))
    assert PaliGemmaConfig.from_dict(written) == config
    theirs = transformers.PaliGemmaConfig(**written).text_config
    for field in GemmaConfig.__dataclass_fields__:
        if field not in ("rope_theta", "layer_types") and hasattr(theirs, field):
            assert getattr(theirs, field) == getattr(config.text_config, field), field
    if model_type == "gemma2":
        assert tuple(theirs.layer_types) == config.text_config.layer_types


def test_missing_query_pre_attn_scalar_is_written_as_head_dim():
    text = GemmaConfig(model_type="gemma2", head_dim=128)
    written = PaliGemmaConfig(SiglipVisionConfig(), text).to_dict()
    assert PaliGemmaConfig.from_dict(written).text_config.attention_scale == text.attention_scale
    assert transformers.PaliGemmaConfig(**written).text_config.query_pre_attn_scalar == 128


@pytest.mark.parametrize(("content", "message"), [("{", "not valid JSON"), ("[]", "must contain a JSON object")])
def test_broken_config_json_is_rejected(content: str, message: str, tmp_path):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        PaliGemmaConfig.from_folder(tmp_path)
