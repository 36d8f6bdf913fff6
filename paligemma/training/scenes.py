"""Pictures for the bundled model: scenes of one to four emoji on varied backgrounds, with exact boxes and masks.

A scene is first laid out in unit coordinates (x to the right, y down, the picture's side is 1) and then
rendered at any size, so that the same scene can be trained on at 112 pixels and shown at 448.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np
from PIL import Image, ImageFilter

from paligemma.training.icons import CLASSES, Sprite

BACKGROUNDS = ("plain", "gradient", "horizon", "stripes", "blobs", "checks")
# Seeds of the two splits never meet: the split is part of every scene's seed, beside the run's seed and the
# index.
SPLITS = {"training": 0, "evaluation": 1}
MARGIN = 2  # transparent pixels around a drawing, so that its edge is interpolated and not cut
LEVEL_STEP = 2**0.5  # from one stored size of a drawing to the next
SMALLEST_LEVEL = 20
PLACING_TRIES = 32


@dataclass(frozen=True)
class SceneOptions:
    """How scenes are drawn at random.

    `counts` weighs 1, 2, 3 and 4 objects. `longest` is the range of an object's longer side as a share of
    the picture; pictures with many objects use its lower part. `overlap` is the largest share of the
    smaller box that two boxes may have in common, `apart` the least horizontal distance of two centres, so
    that left to right is never a guess. `all_same`, `repeat`, `other_drawings`, `mixed_styles` and
    `supersampled` are chances: that all objects share a class, that an object takes an earlier one's class,
    that a drawing is not its class's usual one, that each object has its own style, that the picture is
    drawn at twice its size and then shrunk, as pictures of a user are. `augment` varies tints, proportions,
    light, contrast, noise and sharpness.
    """

    counts: tuple[float, ...] = (0.22, 0.28, 0.28, 0.22)
    longest: tuple[float, float] = (26 / 112, 64 / 112)
    tilt_degrees: float = 15.0
    overlap: float = 0.08
    apart: float = 0.045
    all_same: float = 0.15
    repeat: float = 0.25
    painted: float = 2.0
    other_drawings: float = 0.4
    mixed_styles: float = 0.15
    supersampled: float = 0.15
    augment: bool = True

    def __post_init__(self) -> None:
        if not 1 <= len(self.counts) <= 4 or min(self.counts) < 0 or sum(self.counts) <= 0:
            raise ValueError(f"counts is {self.counts}, expected one to four weights of at least 0, not all 0")
        if not 0 < self.longest[0] <= self.longest[1] < 1:
            raise ValueError(f"longest is {self.longest}, expected 0 < low <= high < 1")
        if not 0 <= self.overlap <= 0.5:
            raise ValueError(f"overlap is {self.overlap}, expected 0 to 0.5")


TRAINING = SceneOptions()
EVALUATION = SceneOptions(other_drawings=0.0, mixed_styles=0.0, supersampled=0.0, augment=False)


class Drawing:
    """A sprite made ready for placing: its outline for exact boxes, and smaller copies for sharp scaling."""

    def __init__(self, sprite: Sprite) -> None:
        self.sprite = sprite

    @cached_property
    def outline(self) -> np.ndarray:
        """Corner points of the solid pixels' row ends, relative to the centre, in pixels: (points, 2) as x, y."""
        solid = self.sprite.pixels[..., 3] >= 128
        height, width = solid.shape
        rows = np.flatnonzero(solid.any(1))
        left, right = solid.argmax(1)[rows], width - solid[:, ::-1].argmax(1)[rows]
        corners = [(x, y) for x in (left, right) for y in (rows, rows + 1)]
        points = np.concatenate([np.stack(corner, 1) for corner in corners]).astype(np.float64)
        return points - (width / 2, height / 2)

    @cached_property
    def levels(self) -> list[tuple[float, Image.Image]]:
        """Pairs of scale and picture, largest first: premultiplied RGBA with a transparent margin."""
        height, width = self.sprite.pixels.shape[:2]
        largest = Image.fromarray(self.sprite.pixels)
        levels, scale = [], 1.0
        while not levels or max(height, width) * scale >= SMALLEST_LEVEL:
            size = (max(1, round(width * scale)), max(1, round(height * scale)))
            smaller = largest if scale == 1 else largest.resize(size, Image.Resampling.BICUBIC)
            levels.append((scale, _premultiplied_with_margin(np.asarray(smaller))))
            scale /= LEVEL_STEP
        return levels

    @cached_property
    def inked(self) -> "Drawing":
        """The same with black lines at its outer edge and between its colors, as in outlined styles."""
        return Drawing(replace(self.sprite, pixels=_inked(self.sprite.pixels)))

    def level_for(self, scale: float) -> tuple[float, Image.Image]:
        """The stored size that is nearest to `scale` of the sprite, by ratio."""
        number = round(-math.log(scale) / math.log(LEVEL_STEP))
        return self.levels[min(max(number, 0), len(self.levels) - 1)]


@dataclass(frozen=True, eq=False)
class Placement:
    """Where and how one drawing stands.

    `matrix` (2, 2) takes offsets from the drawing's centre in its pixels to offsets from `centre` in unit
    coordinates; `box` is [x0, y0, x1, y1] of the solid pixels in unit coordinates; `tint` (3, 3) or None
    changes its colors.
    """

    drawing: Drawing
    centre: np.ndarray
    matrix: np.ndarray
    box: np.ndarray
    tint: np.ndarray | None


@dataclass(frozen=True, eq=False)
class Background:
    """Two colors (RGB in [0, 1]) mixed by a field of one of the kinds in BACKGROUNDS.

    `angle` in radians and `period` as a share of the side shape gradients, stripes and checks; `grid` (n,
    n) in [0, 1] is what blobs interpolate.
    """

    kind: str
    colors: np.ndarray
    angle: float
    period: float
    grid: np.ndarray


@dataclass(frozen=True, eq=False)
class Layout:
    """A scene in unit coordinates, later placements over earlier ones; `camera_seed` is None without changes."""

    background: Background
    placements: tuple[Placement, ...]
    supersampled: bool
    camera_seed: int | None


@dataclass(frozen=True, eq=False)
class SceneObject:
    """One visible thing: `box` is [x0, y0, x1, y1] in float pixels, tight to what is seen of it.

    `alpha` is a uint8 patch of its visible part with its first pixel at `corner` (x, y) of the picture.
    """

    class_name: str
    color: str | None
    style: str
    box: np.ndarray
    alpha: np.ndarray
    corner: tuple[int, int]

    @property
    def centre(self) -> tuple[float, float]:
        """The box's centre, x and y in pixels."""
        return (self.box[0] + self.box[2]) / 2, (self.box[1] + self.box[3]) / 2

    def mask(self, side: int = 64) -> np.ndarray:
        """The visible part inside the box, stretched to (side, side) float32 in [0, 1], rows from the top."""
        x, y = self.corner
        inside = np.clip(self.box - (x, y, x, y), 0, (*self.alpha.shape[::-1], *self.alpha.shape[::-1]))
        patch = Image.fromarray(self.alpha)
        stretched = patch.resize((side, side), Image.Resampling.BILINEAR, box=tuple(inside))
        return np.asarray(stretched, np.float32) / 255


@dataclass(frozen=True, eq=False)
class Scene:
    """`image` is uint8 RGB (size, size, 3); `objects` from the back to the front."""

    image: np.ndarray
    objects: tuple[SceneObject, ...]

    @property
    def size(self) -> int:
        """The side in pixels."""
        return self.image.shape[0]


class SceneMaker:
    """An endless numbered stream of scenes: the same seed, split and index give the same picture.

    `sprites` is what `load_sprites` returned; `styles` chooses among its styles. Scenes of the split
    "evaluation" are never met in "training", whatever the seeds.
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
            raise ValueError(f"split is {split!r}, expected one of {', '.join(SPLITS)}")
        self.options, self.seed, self.split = options, seed, split
        self.drawings = {
            style: {name: [Drawing(sprite) for sprite in found] for name, found in sprites[style].items()}
            for style in styles
        }

    def generator(self, index: int) -> np.random.Generator:
        """The source of chance that belongs to scene `index`."""
        return np.random.default_rng([SPLITS[self.split], self.seed, index])

    def layout(self, index: int) -> Layout:
        """Scene `index` in unit coordinates."""
        return lay_out(self.generator(index), self.drawings, self.options)

    def scene(self, index: int, size: int = 112) -> Scene:
        """Scene `index` at `size` pixels."""
        return render(self.layout(index), size)


def lay_out(
    generator: np.random.Generator,
    drawings: Mapping[str, Mapping[str, Sequence[Drawing]]],
    options: SceneOptions = TRAINING,
    n_objects: int | None = None,
) -> Layout:
    """Draw a scene at random; `drawings[style][class name]` are the choices, `n_objects` None follows `options`."""
    if n_objects is None:
        weights = np.array(options.counts) / sum(options.counts)
        n_objects = 1 + int(generator.choice(len(weights), p=weights))
    chosen = choose_drawings(generator, drawings, options, n_objects)
    placements = None
    shrink = 1.0
    while placements is None:
        placements = _place_all(generator, chosen, options, shrink)
        shrink *= 0.93
    return Layout(
        background=choose_background(generator),
        placements=tuple(placements),
        supersampled=generator.random() < options.supersampled,
        camera_seed=int(generator.integers(2**32)) if options.augment else None,
    )


def choose_drawings(
    generator: np.random.Generator,
    drawings: Mapping[str, Mapping[str, Sequence[Drawing]]],
    options: SceneOptions,
    n_objects: int,
) -> list[Drawing]:
    """Classes, styles and colors of a scene's objects; repeated classes often share drawing and color."""
    styles = list(drawings)
    style = styles[generator.integers(len(styles))]
    mixed = generator.random() < options.mixed_styles
    repeat = 1.0 if generator.random() < options.all_same else options.repeat
    chosen: list[Drawing] = []
    for _ in range(n_objects):
        if mixed:
            style = styles[generator.integers(len(styles))]
        name = _choose_class(generator, list(drawings[style]), options.painted)
        model = None
        if chosen and generator.random() < repeat:
            model = chosen[generator.integers(len(chosen))]
            if model.sprite.class_name in drawings[style]:
                name = model.sprite.class_name
        chosen.append(_choose_drawing(generator, drawings[style][name], options, model))
    return chosen


def choose_background(generator: np.random.Generator) -> Background:
    """A soft background: mostly pale, now and then dark, its two colors close to each other."""
    dark = generator.random() < 0.15
    value = generator.uniform(0.08, 0.35) if dark else generator.uniform(0.6, 1.0)
    hue, saturation = generator.random(), generator.uniform(0, 0.5) * generator.random()
    other_hue = hue + generator.normal(0, 0.12)
    other_value = np.clip(value + generator.uniform(0.04, 0.14) * generator.choice([-1, 1]), 0.03, 1)
    colors = [_from_hue(hue, saturation, value), _from_hue(other_hue, saturation * 1.2, other_value)]
    cells = int(generator.integers(3, 12))
    return Background(
        kind=BACKGROUNDS[generator.integers(len(BACKGROUNDS))],
        colors=np.array(colors, np.float32),
        angle=generator.uniform(0, 2 * math.pi),
        period=generator.uniform(0.1, 0.4),
        grid=generator.random((cells, cells), np.float32),
    )


def render(layout: Layout, size: int) -> Scene:
    """Draw a layout at `size` x `size` pixels."""
    if layout.supersampled:
        return _shrink(_render_plainly(layout, 2 * size), layout.camera_seed)
    return _seen_by_camera(_render_plainly(layout, size), layout.camera_seed)


def _choose_class(generator: np.random.Generator, names: Sequence[str], painted: float) -> str:
    heights = np.cumsum([painted if CLASSES[name].recolor else 1.0 for name in names])
    return names[int(np.searchsorted(heights, generator.random() * heights[-1], side="right"))]


def _choose_drawing(
    generator: np.random.Generator, found: Sequence[Drawing], options: SceneOptions, model: Drawing | None
) -> Drawing:
    others = sorted({drawing.sprite.drawing for drawing in found} - {0})
    number = found[0].sprite.drawing
    if others and generator.random() < options.other_drawings:
        number = others[generator.integers(len(others))]
    colors = [drawing.sprite.color for drawing in found]
    color = colors[generator.integers(len(colors))]
    if model is not None and generator.random() < 0.65:
        alike = [drawing for drawing in found if _same_look(drawing.sprite, model.sprite)]
        number, color = (model.sprite.drawing, model.sprite.color) if alike else (number, color)
    matching = [d for d in found if d.sprite.drawing == number and d.sprite.color == color] or found
    drawing = matching[0]
    return drawing.inked if options.augment and generator.random() < 0.12 else drawing


def _same_look(sprite: Sprite, other: Sprite) -> bool:
    return (sprite.class_name, sprite.drawing, sprite.color) == (
        other.class_name,
        other.drawing,
        other.color,
    )


def _place_all(
    generator: np.random.Generator, drawings: Sequence[Drawing], options: SceneOptions, shrink: float
) -> list[Placement] | None:
    """Placements of all drawings, or None where one found no room."""
    low, high = options.longest
    high = low + (high - low) * (1 - 0.13 * (len(drawings) - 1))
    placements: list[Placement] = []
    for drawing in drawings:
        longest = max(low, generator.uniform(low, high) * shrink)
        matrix, reach = _pose(generator, drawing, longest, options)
        centre = _find_room(generator, reach, placements, options)
        if centre is None:
            return None
        box = reach + np.tile(centre, 2)
        tint = _choose_tint(generator, drawing.sprite) if options.augment else None
        placements.append(Placement(drawing, centre, matrix, box, tint))
    return placements


def _pose(
    generator: np.random.Generator, drawing: Drawing, longest: float, options: SceneOptions
) -> tuple[np.ndarray, np.ndarray]:
    """A random tilt, flip and (augmented) proportion: the matrix, and the box it gives around a centre at 0."""
    angle = math.radians(generator.uniform(-options.tilt_degrees, options.tilt_degrees))
    turn = np.array([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
    stretch = generator.uniform(0.88, 1.12) if options.augment else 1.0
    matrix = turn @ np.diag([generator.choice([-1.0, 1.0]) * stretch, 1.0])
    points = drawing.outline @ matrix.T
    low, high = points.min(0), points.max(0)
    scale = longest / max(high - low)
    return matrix * scale, np.concatenate([low, high]) * scale


def _find_room(
    generator: np.random.Generator, reach: np.ndarray, placements: Sequence[Placement], options: SceneOptions
) -> np.ndarray | None:
    edge = 0.008
    centres = generator.uniform(edge - reach[:2], 1 - edge - reach[2:], (PLACING_TRIES, 2))
    free = np.ones(PLACING_TRIES, bool)
    boxes = centres[:, [0, 1, 0, 1]] + reach
    middle = boxes[:, 0] + boxes[:, 2]
    area = np.prod(reach[2:] - reach[:2])
    for other in placements:
        corner = np.minimum(boxes[:, 2:], other.box[2:]) - np.maximum(boxes[:, :2], other.box[:2])
        smaller = min(area, np.prod(other.box[2:] - other.box[:2]))
        free &= np.prod(np.clip(corner, 0, None), 1) <= options.overlap * smaller
        free &= np.abs(middle - other.box[0] - other.box[2]) / 2 >= options.apart
    return centres[free.argmax()] if free.any() else None


def _choose_tint(generator: np.random.Generator, sprite: Sprite) -> np.ndarray | None:
    """A change of hue, saturation and light: strong where no color word is at stake, slight where one is."""
    if CLASSES[sprite.class_name].recolor is not None:
        return _tint(math.radians(generator.uniform(-6, 6)), generator.uniform(0.85, 1.1), generator.uniform(0.9, 1.1))
    strength = generator.uniform(0.75, 1.15)
    kind = generator.random()
    if kind < 0.5:
        return None
    if kind < 0.6:
        return _tint(0, generator.uniform(0, 0.35), strength)
    widest = 30 if kind < 0.78 else 180
    return _tint(math.radians(generator.uniform(-widest, widest)), generator.uniform(0.6, 1.2), strength)


def _tint(angle: float, saturation: float, strength: float) -> np.ndarray:
    """The RGB matrix that turns the hue about the gray axis and scales saturation and light."""
    gray = np.full((3, 3), 1 / 3)
    cross = np.array([[0, -1, 1], [1, 0, -1], [-1, 1, 0]]) / math.sqrt(3)
    turn = math.cos(angle) * np.eye(3) + (1 - math.cos(angle)) * gray + math.sin(angle) * cross
    return (strength * (gray + saturation * (turn - gray))).astype(np.float32)


def _from_hue(hue: float, saturation: float, value: float) -> np.ndarray:
    wheel = np.abs((hue * 6 + np.array([0, 4, 2])) % 6 - 3) - 1
    return value * (1 - saturation + saturation * np.clip(wheel, 0, 1))


@lru_cache(maxsize=8)
def _unit_grid(size: int) -> tuple[np.ndarray, np.ndarray]:
    axis = (np.arange(size, dtype=np.float32) + 0.5) / size
    return axis[None, :], axis[:, None]


def _field(background: Background, size: int) -> np.ndarray:
    """The share of the second color, float32 (size, size) in [0, 1]."""
    x, y = _unit_grid(size)
    along = x * math.cos(background.angle) + y * math.sin(background.angle)
    across = y * math.cos(background.angle) - x * math.sin(background.angle)
    if background.kind == "gradient":
        return np.clip(0.5 + 0.7 * (along - along.mean()), 0, 1)
    if background.kind == "horizon":
        edge = np.clip((y - 0.3 - background.period) * 60, 0, 1)
        return np.broadcast_to(edge, (size, size))
    wave = 2 * math.pi / background.period
    if background.kind == "stripes":
        return np.clip(0.5 + 2.5 * np.sin(along * wave), 0, 1)
    if background.kind == "checks":
        return np.clip(0.5 + 3 * np.sin(along * wave) * np.sin(across * wave), 0, 1)
    if background.kind == "blobs":
        blobs = Image.fromarray(background.grid).resize((size, size), Image.Resampling.BICUBIC)
        return np.clip(np.asarray(blobs), 0, 1)
    return np.zeros((size, size), np.float32)


def _paint(background: Background, size: int) -> np.ndarray:
    """The background as float32 RGB in [0, 255], shape (size, size, 3)."""
    first, second = 255 * background.colors
    shares = np.linspace(0, 1, 256, dtype=np.float32)[:, None]
    steps = (255 * _field(background, size)).astype(np.uint8)
    return (first + shares * (second - first))[steps]


def _render_plainly(layout: Layout, size: int) -> Scene:
    canvas = _paint(layout.background, size)
    objects: list[SceneObject] = []
    for placement in layout.placements:
        patch, corner = _draw(placement, size)
        x, y = corner
        height, width = patch.shape[:2]
        colors = patch[..., :3].astype(np.float32)
        alpha = patch[..., 3:].astype(np.float32)
        if placement.tint is not None:
            colors = np.clip(colors @ placement.tint.T, 0, alpha)
        region = canvas[y : y + height, x : x + width]
        region *= 1 - alpha / 255
        region += colors
        objects = [_hidden_behind(other, patch[..., 3], corner) for other in objects]
        objects.append(_object(placement, size, patch[..., 3], corner))
    return Scene(_to_bytes(canvas), tuple(objects))


def _object(placement: Placement, size: int, alpha: np.ndarray, corner: tuple[int, int]) -> SceneObject:
    sprite = placement.drawing.sprite
    return SceneObject(sprite.class_name, sprite.color, sprite.style, placement.box * size, alpha, corner)


def _draw(placement: Placement, size: int) -> tuple[np.ndarray, tuple[int, int]]:
    """The placed drawing's premultiplied RGBA patch, and the picture's pixel (x, y) where it begins."""
    (a, b), (c, d) = (placement.matrix * size).tolist()
    determinant = a * d - b * c
    scale, image = placement.drawing.level_for(math.sqrt(abs(determinant)))
    left, top = np.maximum(np.floor(placement.box[:2] * size).astype(int) - 2, 0)
    right, bottom = np.minimum(np.ceil(placement.box[2:] * size).astype(int) + 2, size)
    inverse = scale / determinant * np.array([[d, -b], [-c, a]])
    origin = np.array(image.size) / 2 + inverse @ (np.array([left, top]) - placement.centre * size)
    data = (*inverse[0], origin[0], *inverse[1], origin[1])
    patch = image.transform(
        (int(right - left), int(bottom - top)), Image.Transform.AFFINE, data, Image.Resampling.BICUBIC
    )
    return np.asarray(patch), (int(left), int(top))


def _hidden_behind(hidden: SceneObject, alpha: np.ndarray, corner: tuple[int, int]) -> SceneObject:
    """`hidden` without what a newer patch covers; its box moves in where its own edge is covered."""
    left, top = max(hidden.corner[0], corner[0]), max(hidden.corner[1], corner[1])
    right = min(hidden.corner[0] + hidden.alpha.shape[1], corner[0] + alpha.shape[1])
    bottom = min(hidden.corner[1] + hidden.alpha.shape[0], corner[1] + alpha.shape[0])
    if right <= left or bottom <= top:
        return hidden
    visible = hidden.alpha.copy()
    mine = visible[top - hidden.corner[1] : bottom - hidden.corner[1], left - hidden.corner[0] :]
    cover = alpha[top - corner[1] : bottom - corner[1], left - corner[0] : right - corner[0]]
    mine[:, : right - left] = np.minimum(mine[:, : right - left], 255 - cover)
    box = hidden.box + _solid_bounds(visible) - _solid_bounds(hidden.alpha)
    return replace(hidden, box=box, alpha=visible)


def _solid_bounds(alpha: np.ndarray) -> np.ndarray:
    solid = alpha >= 128
    columns, rows = np.flatnonzero(solid.any(0)), np.flatnonzero(solid.any(1))
    return np.array([columns[0], rows[0], columns[-1] + 1, rows[-1] + 1])


def _shrink(scene: Scene, camera_seed: int | None) -> Scene:
    """The scene at half its size, resized as the processor resizes a picture (bicubic)."""
    half = (scene.size // 2, scene.size // 2)
    image = np.asarray(Image.fromarray(scene.image).resize(half, Image.Resampling.BICUBIC))
    objects = []
    for thing in scene.objects:
        x, y = thing.corner
        padded = np.pad(thing.alpha, ((y % 2, 0), (x % 2, 0)))
        height, width = padded.shape
        alpha = np.pad(padded, ((0, height % 2), (0, width % 2))).astype(np.uint16)
        alpha = (alpha[::2, ::2] + alpha[1::2, ::2] + alpha[::2, 1::2] + alpha[1::2, 1::2] + 2) // 4
        corner = (x // 2, y // 2)
        objects.append(
            SceneObject(thing.class_name, thing.color, thing.style, thing.box / 2, alpha.astype(np.uint8), corner)
        )
    return _seen_by_camera(Scene(image, tuple(objects)), camera_seed)


def _seen_by_camera(scene: Scene, seed: int | None) -> Scene:
    """Light, contrast, a slight cast, noise and softness, as `seed` decides; objects stay where they are."""
    if seed is None:
        return scene
    generator = np.random.default_rng(seed)
    gain = generator.uniform(0.8, 1.2) * generator.uniform(0.95, 1.05, 3)
    contrast = generator.uniform(0.75, 1.15)
    blurred, noisy = generator.random() < 0.2, generator.random() < 0.35
    image = scene.image
    if blurred:
        image = np.asarray(Image.fromarray(image).filter(ImageFilter.GaussianBlur(generator.uniform(0.3, 0.7))))
    values = image * (gain * contrast).astype(np.float32)
    values += np.float32(128 * (1 - contrast))
    if noisy:
        values += np.float32(generator.uniform(1, 7)) * generator.standard_normal(values.shape, np.float32)
    return replace(scene, image=_to_bytes(values))


def _to_bytes(values: np.ndarray) -> np.ndarray:
    return np.clip(values + 0.5, 0, 255).astype(np.uint8)


def _premultiplied_with_margin(pixels: np.ndarray) -> Image.Image:
    alpha = pixels[..., 3:].astype(np.uint16)
    premultiplied = np.concatenate([(pixels[..., :3] * alpha + 127) // 255, alpha], -1).astype(np.uint8)
    padded = np.pad(premultiplied, ((MARGIN, MARGIN), (MARGIN, MARGIN), (0, 0)))
    height, width = padded.shape[:2]
    # Four plain channels: PIL would undo the multiplication around every transform of mode RGBA.
    return Image.frombuffer("RGBX", (width, height), padded, "raw", "RGBX", 0, 1)


def _inked(pixels: np.ndarray) -> np.ndarray:
    """Black lines where alpha ends and where colors meet, about a fortieth of the drawing's side wide."""
    reach = max(1, round(max(pixels.shape[:2]) / 40))
    grown = np.pad(pixels, ((reach, reach), (reach, reach), (0, 0)))
    outside, inside = ImageFilter.MaxFilter(2 * reach + 1), 2 * ((reach + 1) // 2) + 1
    alpha = Image.fromarray(np.ascontiguousarray(grown[..., 3]))
    colors = Image.fromarray(np.ascontiguousarray(grown[..., :3]))
    largest = np.asarray(colors.filter(ImageFilter.MaxFilter(inside)), np.int16)
    spread = (largest - np.asarray(colors.filter(ImageFilter.MinFilter(inside)))).max(-1)
    rim = 1 - np.asarray(alpha.filter(ImageFilter.MinFilter(inside)), np.float32) / 255
    lines = np.maximum(np.clip((spread - 70) / 60, 0, 1), rim)[..., None]
    inked = np.round(grown[..., :3] * (1 - lines) + 20 * lines).astype(np.uint8)
    return np.dstack([inked, np.asarray(alpha.filter(outside))])
