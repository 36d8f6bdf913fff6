"""Scenes of one to four emoji with exact boxes and masks, rendered from random layouts."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from PIL import Image, ImageFilter

from paligemma.training.backgrounds import paint_background
from paligemma.training.icons import Sprite, bounding_box
from paligemma.training.layout import TRAINING, Layout, Placement, SceneOptions, sample_layout
from paligemma.training.sprites import SpritePyramid

# The split is part of every scene's seed, which makes the splits disjoint for all run seeds.
SPLITS = {"training": 0, "evaluation": 1}


@dataclass(frozen=True, eq=False)
class SceneObject:
    """An object with its visible region.

    Attributes:
        box: [x0, y0, x1, y1] in pixels (float), tight around the visible region.
        alpha: uint8 (height, width), opacity of the visible region.
        corner: x and y of the first pixel of `alpha` in the image.
    """

    class_name: str
    color: str | None
    style: str
    box: np.ndarray
    alpha: np.ndarray
    corner: tuple[int, int]

    @property
    def center(self) -> tuple[float, float]:
        """Center of the box, x and y in pixels."""
        return (self.box[0] + self.box[2]) / 2, (self.box[1] + self.box[3]) / 2

    def mask(self, side: int = 64) -> np.ndarray:
        """Return the visible region, cropped to the box and resized to (side, side): float32 in [0, 1]."""
        x, y = self.corner
        inside = np.clip(self.box - (x, y, x, y), 0, (*self.alpha.shape[::-1], *self.alpha.shape[::-1]))
        patch = Image.fromarray(self.alpha)
        left, top, right, bottom = (float(value) for value in inside)
        resized = patch.resize((side, side), Image.Resampling.BILINEAR, box=(left, top, right, bottom))
        return np.asarray(resized, np.float32) / 255


@dataclass(frozen=True, eq=False)
class Scene:
    """A rendered scene: `image` is uint8 RGB (size, size, 3), `objects` are ordered from back to front."""

    image: np.ndarray
    objects: tuple[SceneObject, ...]

    @property
    def size(self) -> int:
        """Image side in pixels."""
        return self.image.shape[0]


class SceneGenerator:
    """An unlimited, indexed set of scenes, determined by seed, split and index.

    The splits "training" and "evaluation" share no scene, whatever the seeds.

    Args:
        sprites: from `load_sprites`.
        styles: the styles to use.
    """

    def __init__(
        self,
        sprites: Mapping[str, Mapping[str, Sequence[Sprite]]],
        styles: Sequence[str],
        options: SceneOptions = TRAINING,
        seed: int = 0,
        split: str = "training",
    ) -> None:
        if split not in SPLITS:
            raise ValueError(f"split must be one of {', '.join(SPLITS)}, got {split!r}.")
        self.options, self.seed, self.split = options, seed, split
        self.pyramids = {
            style: {name: [SpritePyramid(sprite) for sprite in choices] for name, choices in sprites[style].items()}
            for style in styles
        }

    def layout(self, index: int) -> Layout:
        """Sample the layout of scene `index`."""
        rng = np.random.default_rng([SPLITS[self.split], self.seed, index])
        return sample_layout(rng, self.pyramids, self.options)

    def scene(self, index: int, size: int = 112) -> Scene:
        """Render scene `index` at size x size pixels."""
        return render(self.layout(index), size)


def render(layout: Layout, size: int) -> Scene:
    """Render a layout at size x size pixels."""
    scene = _downsample(_composite(layout, 2 * size)) if layout.supersample else _composite(layout, size)
    if layout.photometric_seed is None:
        return scene
    return replace(scene, image=_augment(scene.image, np.random.default_rng(layout.photometric_seed)))


def _composite(layout: Layout, size: int) -> Scene:
    """Draw the sprites over the background, back to front."""
    canvas = paint_background(layout.background, size)
    objects: list[SceneObject] = []
    for placement in layout.placements:
        patch, corner = _transform_sprite(placement, size)
        x, y = corner
        height, width = patch.shape[:2]
        colors = patch[..., :3].astype(np.float32)
        alpha = patch[..., 3:].astype(np.float32)
        if placement.tint is not None:
            colors = np.clip(colors @ placement.tint.T, 0, alpha)
        region = canvas[y : y + height, x : x + width]
        region *= 1 - alpha / 255
        region += colors
        objects = [_occlude(other, patch[..., 3], corner) for other in objects]
        sprite = placement.pyramid.sprite
        box = placement.box * size
        objects.append(SceneObject(sprite.class_name, sprite.color, sprite.style, box, patch[..., 3], corner))
    return Scene(_to_uint8(canvas), tuple(objects))


def _transform_sprite(placement: Placement, size: int) -> tuple[np.ndarray, tuple[int, int]]:
    """Return the transformed sprite (premultiplied RGBA) and the pixel (x, y) of its first corner in the image."""
    (a, b), (c, d) = (placement.matrix * size).tolist()
    determinant = a * d - b * c
    scale, image = placement.pyramid.level_for(math.sqrt(abs(determinant)))
    left, top = np.maximum(np.floor(placement.box[:2] * size).astype(int) - 2, 0)
    right, bottom = np.minimum(np.ceil(placement.box[2:] * size).astype(int) + 2, size)
    inverse = scale / determinant * np.array([[d, -b], [-c, a]])
    origin = np.array(image.size) / 2 + inverse @ (np.array([left, top]) - placement.center * size)
    data = (*inverse[0], origin[0], *inverse[1], origin[1])
    patch = image.transform(
        (int(right - left), int(bottom - top)), Image.Transform.AFFINE, data, Image.Resampling.BICUBIC
    )
    return np.asarray(patch), (int(left), int(top))


def _occlude(hidden: SceneObject, alpha: np.ndarray, corner: tuple[int, int]) -> SceneObject:
    """Remove the region covered by a patch in front of the object, and shrink the box accordingly."""
    left, top = max(hidden.corner[0], corner[0]), max(hidden.corner[1], corner[1])
    right = min(hidden.corner[0] + hidden.alpha.shape[1], corner[0] + alpha.shape[1])
    bottom = min(hidden.corner[1] + hidden.alpha.shape[0], corner[1] + alpha.shape[0])
    if right <= left or bottom <= top:
        return hidden
    visible = hidden.alpha.copy()
    region = visible[top - hidden.corner[1] : bottom - hidden.corner[1], left - hidden.corner[0] :]
    cover = alpha[top - corner[1] : bottom - corner[1], left - corner[0] : right - corner[0]]
    region[:, : right - left] = np.minimum(region[:, : right - left], 255 - cover)
    box = hidden.box + bounding_box(visible >= 128) - bounding_box(hidden.alpha >= 128)
    return replace(hidden, box=box, alpha=visible)


def _downsample(scene: Scene) -> Scene:
    """Halve the size: the image with bicubic interpolation, as in the processor, the masks by averaging."""
    half = (scene.size // 2, scene.size // 2)
    image = np.asarray(Image.fromarray(scene.image).resize(half, Image.Resampling.BICUBIC))
    objects = []
    for obj in scene.objects:
        x, y = obj.corner
        padded = np.pad(obj.alpha, ((y % 2, 0), (x % 2, 0)))
        height, width = padded.shape
        alpha = np.pad(padded, ((0, height % 2), (0, width % 2))).astype(np.uint16)
        alpha = (alpha[::2, ::2] + alpha[1::2, ::2] + alpha[::2, 1::2] + alpha[1::2, 1::2] + 2) // 4
        objects.append(replace(obj, box=obj.box / 2, alpha=alpha.astype(np.uint8), corner=(x // 2, y // 2)))
    return Scene(image, tuple(objects))


def _augment(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Photometric augmentation: brightness, contrast, color cast, noise and blur."""
    gain = rng.uniform(0.8, 1.2) * rng.uniform(0.95, 1.05, 3)
    contrast = rng.uniform(0.75, 1.15)
    blurred, noisy = rng.random() < 0.2, rng.random() < 0.35
    if blurred:
        image = np.asarray(Image.fromarray(image).filter(ImageFilter.GaussianBlur(rng.uniform(0.3, 0.7))))
    values = image * (gain * contrast).astype(np.float32)
    values += np.float32(128 * (1 - contrast))
    if noisy:
        values += np.float32(rng.uniform(1, 7)) * rng.standard_normal(values.shape, np.float32)
    return _to_uint8(values)


def _to_uint8(values: np.ndarray) -> np.ndarray:
    return np.clip(values + 0.5, 0, 255).astype(np.uint8)
