from __future__ import annotations

import pytest
import torch
from reference_models import new_model, our_model, pixels_of, reference_model

from paligemma.config import SiglipVisionConfig
from paligemma.siglip import SiglipMLP, SiglipVisionModel


@pytest.mark.parametrize("case", ["paligemma1", "sliding", "paligemma1-112"])
def test_features_equal_transformers(case: str) -> None:
    pixels = pixels_of(case, batch=2)
    with torch.inference_mode():
        ours = our_model(case).vision_tower(pixels)
        reference = reference_model(case).model.vision_tower(pixels).last_hidden_state
    torch.testing.assert_close(ours, reference, atol=1e-5, rtol=0)


def test_patches_are_in_raster_order() -> None:
    embeddings = our_model("paligemma1").vision_tower.vision_model.embeddings
    pixels = pixels_of("paligemma1")
    changed = pixels.clone()
    changed[:, :, 14:28, 42:56] = 0  # the patch at row 1, column 3 of 4 x 4
    with torch.inference_mode():
        moved = (embeddings(pixels) - embeddings(changed)).abs().amax(dim=-1)[0] > 1e-5
    assert moved.nonzero().flatten().tolist() == [1 * 4 + 3]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_tower_accepts_float32_pixels(dtype: torch.dtype) -> None:
    features = our_model("paligemma1", dtype=dtype).vision_tower(pixels_of("paligemma1"))
    assert features.dtype == dtype
    assert features.isfinite().all()


def test_other_image_sizes_are_rejected() -> None:
    with pytest.raises(ValueError, match=r"must be 56 x 56 pixels for this checkpoint, got shape \(1, 3, 28, 28\)"):
        our_model("paligemma1").vision_tower(pixels_of("sliding"))


def test_mlp_uses_tanh_gelu() -> None:
    mlp = SiglipMLP(SiglipVisionConfig(hidden_size=1, intermediate_size=1, num_attention_heads=1))
    with torch.no_grad():
        for layer in (mlp.fc1, mlp.fc2):
            layer.weight.fill_(1.0)
            layer.bias.zero_()
        output = mlp(torch.tensor([[-1.0]])).item()
    assert output == pytest.approx(-0.15881, abs=5e-6)  # with erf: -0.15866


def test_key_bias_cancels_in_softmax() -> None:
    """The reason why k_proj.bias is exempt from the tests that change a tensor and expect other logits."""
    model = new_model("paligemma1").vision_tower
    pixels = pixels_of("paligemma1")
    with torch.inference_mode():
        before = model(pixels)
        model.vision_model.encoder.layers[0].self_attn.k_proj.bias += 1.0
        after = model(pixels)
    torch.testing.assert_close(after, before, atol=1e-4, rtol=0)


@pytest.mark.parametrize(("image_size", "tokens"), [(224, 256), (448, 1024), (896, 4096)])
def test_official_image_sizes_give_the_expected_number_of_patches(image_size: int, tokens: int) -> None:
    config = SiglipVisionConfig(image_size=image_size)
    with torch.device("meta"):
        model = SiglipVisionModel(config)
    assert config.num_image_tokens == tokens
    assert model.vision_model.embeddings.position_embedding.weight.shape == (tokens, 1152)
