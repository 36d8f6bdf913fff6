"""What the vision tower made of a picture is kept, and changes no answer."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from PIL import Image

import paligemma
from paligemma.image_features import ImageFeatureCache

GRADIENT = Image.merge("RGB", [Image.linear_gradient("L"), Image.radial_gradient("L"), Image.linear_gradient("L")])


class Tower:
    """Counts how often it runs."""

    def __init__(self) -> None:
        self.runs = 0

    def __call__(self, pixels: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        return pixels.flatten(1) * 2


def image(number: int) -> torch.Tensor:
    return torch.full((1, 3, 2, 2), float(number))


def test_the_same_pixels_are_computed_once():
    tower = Tower()
    features = ImageFeatureCache(tower)
    assert torch.equal(features(image(1)), features(image(1).clone()))
    assert tower.runs == 1
    assert not torch.equal(features(image(2)), features(image(1)))
    assert tower.runs == 2
    features(image(1).double())
    assert tower.runs == 3


def test_those_used_last_are_kept():
    tower = Tower()
    features = ImageFeatureCache(tower, max_pictures=2)
    for number in (1, 2, 1, 3, 1):
        features(image(number))
    assert tower.runs == 3
    features(image(2))
    assert tower.runs == 4


@pytest.mark.parametrize(("max_bytes", "runs"), [(0, 3), (47, 3), (48, 1)])
def test_no_more_bytes_are_kept_than_allowed(max_bytes, runs):
    tower = Tower()
    features = ImageFeatureCache(tower, max_bytes=max_bytes)
    for _ in range(3):
        features(image(1))
        assert features.num_bytes <= max_bytes
    assert tower.runs == runs


def test_threads_may_share_it():
    features = ImageFeatureCache(Tower(), max_pictures=3)
    with ThreadPoolExecutor(8) as pool:
        for number, found in pool.map(lambda number: (number, features(image(number % 5))), range(200)):
            assert torch.equal(found, image(number % 5).flatten(1) * 2)


def test_a_second_prompt_on_a_picture_does_not_run_the_tower_and_answers_the_same(tiny_checkpoint):
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
