"""Image features are cached, and the cache does not change answers."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from PIL import Image

import paligemma
from paligemma.image_features import ImageFeatureCache

GRADIENT = Image.merge("RGB", [Image.linear_gradient("L"), Image.radial_gradient("L"), Image.linear_gradient("L")])


class Tower:
    """A fake image encoder that counts its calls."""

    def __init__(self) -> None:
        self.runs = 0

    def __call__(self, pixel_values: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        return pixel_values.flatten(1) * 2


def pixels(number: int) -> torch.Tensor:
    return torch.full((1, 3, 2, 2), float(number))


def test_same_pixels_are_encoded_once():
    tower = Tower()
    features = ImageFeatureCache(tower)
    assert torch.equal(features(pixels(1)), features(pixels(1).clone()))
    assert tower.runs == 1
    assert not torch.equal(features(pixels(2)), features(pixels(1)))
    assert tower.runs == 2
    features(pixels(1).double())
    assert tower.runs == 3


def test_least_recently_used_features_are_evicted():
    tower = Tower()
    features = ImageFeatureCache(tower, max_images=2)
    for number in (1, 2, 1, 3, 1):
        features(pixels(number))
    assert tower.runs == 3
    features(pixels(2))
    assert tower.runs == 4


@pytest.mark.parametrize(("max_bytes", "runs"), [(0, 3), (47, 3), (48, 1)])
def test_max_bytes_limits_the_cache(max_bytes, runs):
    tower = Tower()
    features = ImageFeatureCache(tower, max_bytes=max_bytes)
    for _ in range(3):
        features(pixels(1))
        assert features.num_bytes <= max_bytes
    assert tower.runs == runs


def test_cache_is_thread_safe():
    features = ImageFeatureCache(Tower(), max_images=3)
    with ThreadPoolExecutor(8) as pool:
        for number, found in pool.map(lambda number: (number, features(pixels(number % 5))), range(200)):
            assert torch.equal(found, pixels(number % 5).flatten(1) * 2)


def test_second_prompt_on_an_image_skips_the_vision_tower(tiny_checkpoint):
    warm, cold = (paligemma.load(tiny_checkpoint, device="cpu") for _ in range(2))
    runs: list[object] = []
    warm.model.vision_tower.register_forward_hook(lambda *_: runs.append(None))
    warm.generate(GRADIENT, "caption en", max_new_tokens=2)
    again = warm.generate(GRADIENT, "detect cat", max_new_tokens=3)
    assert len(runs) == 1
    expected = cold.generate(GRADIENT, "detect cat", max_new_tokens=3)
    assert [(step.token_id, step.logit) for step in again.steps] == [
        (step.token_id, step.logit) for step in expected.steps
    ]
    assert again.timing.image_s >= 0
    warm.generate(GRADIENT.rotate(90), "detect cat", max_new_tokens=1)
    assert len(runs) == 2
