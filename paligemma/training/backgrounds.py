"""Procedural backgrounds: two similar colors blended by a simple pattern."""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from PIL import Image

PATTERNS = ("plain", "gradient", "horizon", "stripes", "blobs", "checks")


@dataclass(frozen=True, eq=False)
class Background:
    """Parameters of a background.

    Attributes:
        pattern: one of PATTERNS.
        colors: (2, 3), float32 RGB in [0, 1].
        angle: radians, of gradients, stripes and checks.
        period: fraction of the image side, of stripes and checks; also places the horizon.
        grid: (n, n) in [0, 1], interpolated to blobs.
    """

    pattern: str
    colors: np.ndarray
    angle: float
    period: float
    grid: np.ndarray


def sample_background(rng: np.random.Generator) -> Background:
    """Sample a low-contrast background: pale with probability 0.85, otherwise dark."""
    dark = rng.random() < 0.15
    value = rng.uniform(0.08, 0.35) if dark else rng.uniform(0.6, 1.0)
    hue, saturation = rng.random(), rng.uniform(0, 0.5) * rng.random()
    second_hue = hue + rng.normal(0, 0.12)
    second_value = np.clip(value + rng.uniform(0.04, 0.14) * rng.choice([-1, 1]), 0.03, 1)
    colors = [_hsv_to_rgb(hue, saturation, value), _hsv_to_rgb(second_hue, saturation * 1.2, second_value)]
    cells = int(rng.integers(3, 12))
    return Background(
        pattern=PATTERNS[rng.integers(len(PATTERNS))],
        colors=np.array(colors, np.float32),
        angle=rng.uniform(0, 2 * math.pi),
        period=rng.uniform(0.1, 0.4),
        grid=rng.random((cells, cells), np.float32),
    )


def paint_background(background: Background, size: int) -> np.ndarray:
    """Render a background as float32 RGB in [0, 255], (size, size, 3)."""
    first, second = 255 * background.colors
    fractions = np.linspace(0, 1, 256, dtype=np.float32)[:, None]
    levels = (255 * _blend(background, size)).astype(np.uint8)
    return (first + fractions * (second - first))[levels]


def _blend(background: Background, size: int) -> np.ndarray:
    """Compute the fraction of the second color: float32 (size, size) in [0, 1]."""
    x, y = _unit_grid(size)
    along = x * math.cos(background.angle) + y * math.sin(background.angle)
    across = y * math.cos(background.angle) - x * math.sin(background.angle)
    if background.pattern == "gradient":
        return np.clip(0.5 + 0.7 * (along - along.mean()), 0, 1)
    if background.pattern == "horizon":
        edge = np.clip((y - 0.3 - background.period) * 60, 0, 1)
        return np.broadcast_to(edge, (size, size))
    frequency = 2 * math.pi / background.period
    if background.pattern == "stripes":
        return np.clip(0.5 + 2.5 * np.sin(along * frequency), 0, 1)
    if background.pattern == "checks":
        return np.clip(0.5 + 3 * np.sin(along * frequency) * np.sin(across * frequency), 0, 1)
    if background.pattern == "blobs":
        blobs = Image.fromarray(background.grid).resize((size, size), Image.Resampling.BICUBIC)
        return np.clip(np.asarray(blobs), 0, 1)
    return np.zeros((size, size), np.float32)


@lru_cache(maxsize=8)
def _unit_grid(size: int) -> tuple[np.ndarray, np.ndarray]:
    axis = (np.arange(size, dtype=np.float32) + 0.5) / size
    return axis[None, :], axis[:, None]


def _hsv_to_rgb(hue: float, saturation: float, value: float) -> np.ndarray:
    """Convert hue (1 is a full turn, any real number), saturation and value to RGB."""
    rgb = np.abs((hue * 6 + np.array([0, 4, 2])) % 6 - 3) - 1
    return value * (1 - saturation + saturation * np.clip(rgb, 0, 1))
