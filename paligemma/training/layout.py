"""Random scene layouts: which objects, where, and on which background.

A layout uses unit coordinates (x to the right, y down, image side 1), so that the same scene can be rendered at 112
pixels for training and at 448 pixels for evaluation.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from paligemma.training.backgrounds import Background, sample_background
from paligemma.training.classes import CLASSES
from paligemma.training.icons import Sprite
from paligemma.training.sprites import SpritePyramid

MAX_OBJECTS = 4
PLACEMENT_ATTEMPTS = 32
BORDER = 0.008  # distance of every box to the image border

Pyramids = Mapping[str, Mapping[str, Sequence[SpritePyramid]]]  # by style and class name


@dataclass(frozen=True)
class SceneOptions:
    """Distribution of the scenes.

    Attributes:
        count_weights: relative frequencies of 1, 2, 3 and 4 objects.
        size_range: longer side of an object as a fraction of the image side; scenes with more objects use the lower
            part of the range.
        max_rotation: degrees, in both directions.
        max_overlap: largest intersection of two boxes as a fraction of the smaller one.
        min_center_distance: smallest horizontal distance of two box centers, which makes the order from left to right
            unambiguous.
        p_same_class: probability that all objects have the same class.
        p_repeat_class: probability that an object takes the class of an earlier one.
        colored_weight: relative frequency of classes with named colors; 1 for the others.
        p_variant: probability of an icon other than the default one of its class.
        p_mixed_styles: probability that every object has its own style.
        p_supersample: probability of rendering at twice the size and downsampling, like the processor does with large
            images.
        augment: vary tint, aspect ratio, brightness, contrast, noise and sharpness.
    """

    count_weights: tuple[float, ...] = (0.22, 0.28, 0.28, 0.22)
    size_range: tuple[float, float] = (26 / 112, 64 / 112)
    max_rotation: float = 15.0
    max_overlap: float = 0.08
    min_center_distance: float = 0.045
    p_same_class: float = 0.15
    p_repeat_class: float = 0.25
    colored_weight: float = 2.0
    p_variant: float = 0.4
    p_mixed_styles: float = 0.15
    p_supersample: float = 0.15
    augment: bool = True

    def __post_init__(self) -> None:
        weights = self.count_weights
        if not 1 <= len(weights) <= MAX_OBJECTS or min(weights) < 0 or sum(weights) <= 0:
            raise ValueError(f"count_weights must be 1 to {MAX_OBJECTS} weights >= 0, not all 0, got {weights}.")
        if not 0 < self.size_range[0] <= self.size_range[1] < 1:
            raise ValueError(f"size_range must be 0 < low <= high < 1, got {self.size_range}.")
        if not 0 <= self.max_overlap <= 0.5:
            raise ValueError(f"max_overlap must be 0 to 0.5, got {self.max_overlap}.")


TRAINING = SceneOptions()
EVALUATION = SceneOptions(p_variant=0.0, p_mixed_styles=0.0, p_supersample=0.0, augment=False)


@dataclass(frozen=True, eq=False)
class Placement:
    """Position and appearance of one sprite.

    Attributes:
        center: (2,), x and y in unit coordinates.
        matrix: (2, 2), maps offsets from the sprite's center, in its pixels, to offsets from `center`.
        box: [x0, y0, x1, y1] of the opaque pixels in unit coordinates.
        tint: RGB matrix (3, 3), or None.
    """

    pyramid: SpritePyramid
    center: np.ndarray
    matrix: np.ndarray
    box: np.ndarray
    tint: np.ndarray | None


@dataclass(frozen=True, eq=False)
class Layout:
    """A scene in unit coordinates.

    Attributes:
        placements: from back to front.
        photometric_seed: seed of the photometric augmentation; None for none.
    """

    background: Background
    placements: tuple[Placement, ...]
    supersample: bool
    photometric_seed: int | None


def sample_layout(rng: np.random.Generator, pyramids: Pyramids, options: SceneOptions = TRAINING) -> Layout:
    """Sample a layout from the sprites `pyramids[style][class name]`."""
    weights = np.array(options.count_weights) / sum(options.count_weights)
    num_objects = 1 + int(rng.choice(len(weights), p=weights))
    chosen = _sample_sprites(rng, pyramids, options, num_objects)
    placements = None
    shrink = 1.0
    while placements is None:
        placements = _place_all(rng, chosen, options, shrink)
        shrink *= 0.93
    return Layout(
        background=sample_background(rng),
        placements=tuple(placements),
        supersample=rng.random() < options.p_supersample,
        photometric_seed=int(rng.integers(2**32)) if options.augment else None,
    )


def _sample_sprites(
    rng: np.random.Generator, pyramids: Pyramids, options: SceneOptions, num_objects: int
) -> list[SpritePyramid]:
    """Sample classes, styles, icons and colors; objects of a repeated class often share icon and color."""
    styles = list(pyramids)
    style = styles[rng.integers(len(styles))]
    mixed = rng.random() < options.p_mixed_styles
    p_repeat = 1.0 if rng.random() < options.p_same_class else options.p_repeat_class
    chosen: list[SpritePyramid] = []
    for _ in range(num_objects):
        if mixed:
            style = styles[rng.integers(len(styles))]
        name = _sample_class(rng, list(pyramids[style]), options.colored_weight)
        template = None
        if chosen and rng.random() < p_repeat:
            template = chosen[rng.integers(len(chosen))]
            if template.sprite.class_name in pyramids[style]:
                name = template.sprite.class_name
        chosen.append(_sample_sprite(rng, pyramids[style][name], options, template))
    return chosen


def _sample_class(rng: np.random.Generator, names: Sequence[str], colored_weight: float) -> str:
    cumulative = np.cumsum([colored_weight if CLASSES[name].recolor else 1.0 for name in names])
    return names[int(np.searchsorted(cumulative, rng.random() * cumulative[-1], side="right"))]


def _sample_sprite(
    rng: np.random.Generator,
    choices: Sequence[SpritePyramid],
    options: SceneOptions,
    template: SpritePyramid | None,
) -> SpritePyramid:
    """Sample icon and color among the sprites of one class and style."""
    variant = choices[0].sprite.variant
    others = sorted({choice.sprite.variant for choice in choices} - {0})
    if others and rng.random() < options.p_variant:
        variant = others[rng.integers(len(others))]
    colors = [choice.sprite.color for choice in choices]
    color = colors[rng.integers(len(colors))]
    if template is not None and rng.random() < 0.65 and any(_same_icon(c.sprite, template.sprite) for c in choices):
        variant, color = template.sprite.variant, template.sprite.color
    matching = [c for c in choices if c.sprite.variant == variant and c.sprite.color == color] or choices
    pyramid = matching[0]
    return pyramid.outlined if options.augment and rng.random() < 0.12 else pyramid


def _same_icon(sprite: Sprite, other: Sprite) -> bool:
    return (sprite.class_name, sprite.variant, sprite.color) == (other.class_name, other.variant, other.color)


def _place_all(
    rng: np.random.Generator, pyramids: Sequence[SpritePyramid], options: SceneOptions, shrink: float
) -> list[Placement] | None:
    """Sample placements of all sprites; None if there is no space for one of them."""
    low, high = options.size_range
    high = low + (high - low) * (1 - 0.13 * (len(pyramids) - 1))
    placements: list[Placement] = []
    for pyramid in pyramids:
        longest = max(low, rng.uniform(low, high) * shrink)
        matrix, extent = _sample_pose(rng, pyramid, longest, options)
        center = _sample_center(rng, extent, placements, options)
        if center is None:
            return None
        box = extent + np.tile(center, 2)
        tint = _sample_tint(rng, pyramid.sprite) if options.augment else None
        placements.append(Placement(pyramid, center, matrix, box, tint))
    return placements


def _sample_pose(
    rng: np.random.Generator, pyramid: SpritePyramid, longest: float, options: SceneOptions
) -> tuple[np.ndarray, np.ndarray]:
    """Sample rotation, flip and aspect ratio; returns the matrix and the box around a center at 0."""
    angle = math.radians(rng.uniform(-options.max_rotation, options.max_rotation))
    rotation = np.array([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
    stretch = rng.uniform(0.88, 1.12) if options.augment else 1.0
    matrix = rotation @ np.diag([rng.choice([-1.0, 1.0]) * stretch, 1.0])
    points = pyramid.outline @ matrix.T
    low, high = points.min(0), points.max(0)
    scale = longest / max(high - low)
    return matrix * scale, np.concatenate([low, high]) * scale


def _sample_center(
    rng: np.random.Generator, extent: np.ndarray, placements: Sequence[Placement], options: SceneOptions
) -> np.ndarray | None:
    """Sample a center that satisfies `max_overlap` and `min_center_distance`; None if no attempt does."""
    centers = rng.uniform(BORDER - extent[:2], 1 - BORDER - extent[2:], (PLACEMENT_ATTEMPTS, 2))
    valid = np.ones(PLACEMENT_ATTEMPTS, bool)
    boxes = centers[:, [0, 1, 0, 1]] + extent
    doubled_x = boxes[:, 0] + boxes[:, 2]
    area = np.prod(extent[2:] - extent[:2])
    for other in placements:
        overlap = np.minimum(boxes[:, 2:], other.box[2:]) - np.maximum(boxes[:, :2], other.box[:2])
        smaller = min(area, np.prod(other.box[2:] - other.box[:2]))
        valid &= np.prod(np.clip(overlap, 0, None), 1) <= options.max_overlap * smaller
        valid &= np.abs(doubled_x - other.box[0] - other.box[2]) / 2 >= options.min_center_distance
    return centers[valid.argmax()] if valid.any() else None


def _sample_tint(rng: np.random.Generator, sprite: Sprite) -> np.ndarray | None:
    """Sample a change of hue, saturation and brightness, small enough to preserve a named color if there is one."""
    if CLASSES[sprite.class_name].recolor is not None:
        return _tint_matrix(math.radians(rng.uniform(-6, 6)), rng.uniform(0.85, 1.1), rng.uniform(0.9, 1.1))
    brightness = rng.uniform(0.75, 1.15)
    kind = rng.random()
    if kind < 0.5:
        return None
    if kind < 0.6:
        return _tint_matrix(0, rng.uniform(0, 0.35), brightness)
    max_angle = 30 if kind < 0.78 else 180
    return _tint_matrix(math.radians(rng.uniform(-max_angle, max_angle)), rng.uniform(0.6, 1.2), brightness)


def _tint_matrix(angle: float, saturation: float, brightness: float) -> np.ndarray:
    """Return the RGB matrix that rotates the hue about the gray axis and scales saturation and brightness."""
    gray = np.full((3, 3), 1 / 3)
    cross = np.array([[0, -1, 1], [1, 0, -1], [-1, 1, 0]]) / math.sqrt(3)
    rotation = math.cos(angle) * np.eye(3) + (1 - math.cos(angle)) * gray + math.sin(angle) * cross
    return (brightness * (gray + saturation * (rotation - gray))).astype(np.float32)
