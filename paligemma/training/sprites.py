"""Image pyramids of sprites: sharp rendering at any size, exact bounding boxes, outlined variants."""

import math
from dataclasses import replace
from functools import cached_property

import numpy as np
from PIL import Image, ImageFilter

from paligemma.training.icons import Sprite

MARGIN = 2  # transparent pixels on each side, for interpolation at the edge
LEVEL_RATIO = 2**0.5
MIN_LEVEL_SIZE = 20


class SpritePyramid:
    """A sprite at decreasing sizes, each smaller by `LEVEL_RATIO`, with its outline."""

    def __init__(self, sprite: Sprite) -> None:
        self.sprite = sprite

    @cached_property
    def outline(self) -> np.ndarray:
        """Corners of the first and last opaque pixel of each row, (points, 2) as x, y in pixels from the center.

        Their bounding box under any affine map is that of the opaque pixels.
        """
        opaque = self.sprite.pixels[..., 3] >= 128
        height, width = opaque.shape
        rows = np.flatnonzero(opaque.any(1))
        left, right = opaque.argmax(1)[rows], width - opaque[:, ::-1].argmax(1)[rows]
        corners = [(x, y) for x in (left, right) for y in (rows, rows + 1)]
        points = np.concatenate([np.stack(corner, 1) for corner in corners]).astype(np.float64)
        return points - (width / 2, height / 2)

    @cached_property
    def levels(self) -> list[tuple[float, Image.Image]]:
        """Pairs of scale and premultiplied RGBA image with a transparent margin, largest first."""
        height, width = self.sprite.pixels.shape[:2]
        largest = Image.fromarray(self.sprite.pixels)
        levels: list[tuple[float, Image.Image]] = []
        scale = 1.0
        while not levels or max(height, width) * scale >= MIN_LEVEL_SIZE:
            size = (max(1, round(width * scale)), max(1, round(height * scale)))
            smaller = largest if scale == 1 else largest.resize(size, Image.Resampling.BICUBIC)
            levels.append((scale, _premultiply_and_pad(np.asarray(smaller))))
            scale /= LEVEL_RATIO
        return levels

    @cached_property
    def outlined(self) -> "SpritePyramid":
        """The sprite with black lines along its outline and between its colors, as in line-art emoji styles."""
        return SpritePyramid(replace(self.sprite, pixels=_add_outlines(self.sprite.pixels)))

    def level_for(self, scale: float) -> tuple[float, Image.Image]:
        """Return the level whose scale is closest to `scale`, by ratio."""
        index = round(-math.log(scale) / math.log(LEVEL_RATIO))
        return self.levels[min(max(index, 0), len(self.levels) - 1)]


def _premultiply_and_pad(pixels: np.ndarray) -> Image.Image:
    alpha = pixels[..., 3:].astype(np.uint16)
    premultiplied = np.concatenate([(pixels[..., :3] * alpha + 127) // 255, alpha], -1).astype(np.uint8)
    padded = np.pad(premultiplied, ((MARGIN, MARGIN), (MARGIN, MARGIN), (0, 0)))
    height, width = padded.shape[:2]
    # RGBX, because Pillow converts RGBA to premultiplied alpha and back for every transform.
    return Image.frombuffer("RGBX", (width, height), padded, "raw", "RGBX", 0, 1)


def _add_outlines(pixels: np.ndarray) -> np.ndarray:
    """Draw dark lines, about 1/40 of the sprite wide, where alpha ends and where colors change."""
    radius = max(1, round(max(pixels.shape[:2]) / 40))
    padded = np.pad(pixels, ((radius, radius), (radius, radius), (0, 0)))
    outer, inner = 2 * radius + 1, 2 * ((radius + 1) // 2) + 1  # filter sizes
    alpha = Image.fromarray(np.ascontiguousarray(padded[..., 3]))
    colors = Image.fromarray(np.ascontiguousarray(padded[..., :3]))
    largest = np.asarray(colors.filter(ImageFilter.MaxFilter(inner)), np.int16)
    spread = (largest - np.asarray(colors.filter(ImageFilter.MinFilter(inner)))).max(-1)
    rim = 1 - np.asarray(alpha.filter(ImageFilter.MinFilter(inner)), np.float32) / 255
    lines = np.maximum(np.clip((spread - 70) / 60, 0, 1), rim)[..., None]
    outlined = np.round(padded[..., :3] * (1 - lines) + 20 * lines).astype(np.uint8)
    return np.dstack([outlined, np.asarray(alpha.filter(ImageFilter.MaxFilter(outer)))])
