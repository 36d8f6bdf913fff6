"""The drawings of the bundled model's world: forty classes of emoji in seven drawing styles.

Each style is an npm package `@iconify-json/<style>`: one `icons.json` of SVG bodies under common names. Five
styles are for training; two are never trained on and test whether the model learned things or drawings. The
packages are fetched with npm, rendered with resvg and not redistributed.
"""

import hashlib
import io
import json
import re
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from PIL import Image

PACKAGES = {
    "noto": "1.2.9",  # Apache-2.0
    "noto-v1": "1.2.5",  # Apache-2.0
    "twemoji": "1.2.5",  # CC-BY 4.0
    "fluent-emoji-flat": "1.2.6",  # MIT
    "fxemoji": "1.2.2",  # Apache-2.0
    "emojione": "1.2.3",  # CC-BY 4.0
    "openmoji": "1.2.29",  # CC-BY-SA 4.0
}
STYLES_TRAINED = ("noto", "noto-v1", "twemoji", "fluent-emoji-flat", "fxemoji")
STYLES_HELD_OUT = ("emojione", "openmoji")
STYLES = STYLES_TRAINED + STYLES_HELD_OUT

# A gray drawing of a class with color words is left out: repainting its few colored pixels would not name
# it.
SMALLEST_PAINTED_SHARE = 0.25


@dataclass(frozen=True)
class Noun:
    """What a class is called. `name`, its key everywhere, is the English singular."""

    name: str
    plural: str
    spanish: str
    spanish_plural: str
    gender: str  # "m" or "f"
    chinese: str
    measure: str  # the Chinese measure word: 一只狗


@dataclass(frozen=True)
class IconClass:
    """One thing that can stand in a picture.

    `icons` are the names of its drawings, the usual one first; a style draws those that it has.
    `firefox_icons` are their names in `fxemoji`, which has its own. `recolor` says which pixels a color
    word repaints: "main" those near the drawing's main hue (a car's body, not its windows), "all" every
    saturated one, None none. Recolored are only classes that a person would call by that color in every
    style.
    """

    noun: Noun
    icons: tuple[str, ...]
    firefox_icons: tuple[str, ...] = ()
    recolor: str | None = None

    @property
    def name(self) -> str:
        """The English singular."""
        return self.noun.name


@dataclass(frozen=True, eq=False)
class Sprite:
    """One drawing, trimmed to its visible pixels.

    `pixels` is uint8 RGBA of shape (height, width, 4), alpha not premultiplied; `drawing` is 0 for the
    class's usual drawing and larger for its others; `color` is a key of COLORS, or None for the drawing's
    own colors.
    """

    class_name: str
    style: str
    drawing: int
    color: str | None
    pixels: np.ndarray = field(repr=False)


@dataclass(frozen=True)
class Color:
    """A named color: the red, green and blue (0 to 255) of a repainted drawing's middle shade, its words.

    `spanish` holds masculine, feminine, masculine plural and feminine plural.
    """

    rgb: tuple[int, int, int]
    spanish: tuple[str, str, str, str]
    chinese: str


COLORS = {
    "red": Color((214, 38, 38), ("rojo", "roja", "rojos", "rojas"), "红色"),
    "orange": Color((245, 132, 22), ("naranja",) * 4, "橙色"),
    "yellow": Color((252, 214, 46), ("amarillo", "amarilla", "amarillos", "amarillas"), "黄色"),
    "green": Color((62, 164, 68), ("verde", "verde", "verdes", "verdes"), "绿色"),
    "blue": Color((44, 108, 214), ("azul", "azul", "azules", "azules"), "蓝色"),
    "purple": Color((134, 64, 186), ("morado", "morada", "morados", "moradas"), "紫色"),
    "pink": Color((246, 134, 186), ("rosa",) * 4, "粉色"),
}


def _icon_class(words: str, icons: str, firefox_icons: str = "", recolor: str | None = None) -> IconClass:
    noun = Noun(*words.split())
    return IconClass(noun, tuple(icons.split()), tuple(firefox_icons.split()), recolor)


CLASSES = {
    icon_class.name: icon_class
    for icon_class in (
        _icon_class("dog dogs perro perros m 狗 只", "dog-face dog poodle service-dog", "dog dogside poodle"),
        _icon_class("cat cats gato gatos m 猫 只", "cat-face cat grinning-cat pouting-cat black-cat", "cat catside"),
        _icon_class("rabbit rabbits conejo conejos m 兔子 只", "rabbit-face rabbit", "bunny bunnyside"),
        _icon_class("bear bears oso osos m 熊 只", "bear polar-bear", "bear"),
        _icon_class("panda pandas panda pandas m 熊猫 只", "panda", "pandaface"),
        _icon_class("lion lions león leones m 狮子 只", "lion"),
        _icon_class("pig pigs cerdo cerdos m 猪 头", "pig-face pig", "pig pigside"),
        _icon_class("cow cows vaca vacas f 牛 头", "cow-face cow", "cowface cow"),
        _icon_class("frog frogs rana ranas f 青蛙 只", "frog", "frog"),
        _icon_class("fox foxes zorro zorros m 狐狸 只", "fox", "foxsmiling foxgrin foxpouting"),
        _icon_class("penguin penguins pingüino pingüinos m 企鹅 只", "penguin", "penguin"),
        _icon_class("owl owls búho búhos m 猫头鹰 只", "owl"),
        _icon_class("elephant elephants elefante elefantes m 大象 头", "elephant", "elephant"),
        _icon_class("turtle turtles tortuga tortugas f 乌龟 只", "turtle", "turtle"),
        _icon_class("fish fish pez peces m 鱼 条", "fish tropical-fish", "fish tropicalfish", "all"),
        _icon_class("bee bees abeja abejas f 蜜蜂 只", "honeybee", "honeybee"),
        _icon_class("butterfly butterflies mariposa mariposas f 蝴蝶 只", "butterfly", recolor="all"),
        _icon_class("octopus octopuses pulpo pulpos m 章鱼 只", "octopus", "octopus", "main"),
        _icon_class("apple apples manzana manzanas f 苹果 个", "red-apple green-apple", "redapple greenapple"),
        _icon_class("banana bananas plátano plátanos m 香蕉 根", "banana", "banana"),
        _icon_class("lemon lemons limón limones m 柠檬 个", "lemon", "lemon"),
        _icon_class("strawberry strawberries fresa fresas f 草莓 颗", "strawberry", "strawberry"),
        _icon_class("watermelon watermelons sandía sandías f 西瓜 块", "watermelon", "watermelon"),
        _icon_class("pizza pizzas pizza pizzas f 披萨 块", "pizza", "sliceofpizza"),
        _icon_class("burger burgers hamburguesa hamburguesas f 汉堡 个", "hamburger", "hamburger"),
        _icon_class("donut donuts rosquilla rosquillas f 甜甜圈 个", "doughnut", "doughnut"),
        _icon_class("cake cakes pastel pasteles m 蛋糕 块", "shortcake birthday-cake", "shortcake birthdaycake"),
        _icon_class("mushroom mushrooms seta setas f 蘑菇 个", "mushroom brown-mushroom", "mushroom"),
        _icon_class(
            "car cars coche coches m 汽车 辆",
            "automobile oncoming-automobile sport-utility-vehicle",
            "automobile oncomingautomobile",
            "main",
        ),
        _icon_class("bus buses autobús autobuses m 公交车 辆", "bus oncoming-bus", "bus trolleybus"),
        _icon_class("plane planes avión aviones m 飞机 架", "airplane small-airplane", "airplane"),
        _icon_class("boat boats barco barcos m 船 艘", "sailboat motor-boat", "sailboat speedboat"),
        _icon_class("rocket rockets cohete cohetes m 火箭 枚", "rocket", "rocket"),
        _icon_class("bicycle bicycles bicicleta bicicletas f 自行车 辆", "bicycle", "bicycle"),
        _icon_class("ball balls pelota pelotas f 足球 个", "soccer-ball", "soccerball"),
        _icon_class("guitar guitars guitarra guitarras f 吉他 把", "guitar", "guitar", "all"),
        _icon_class("balloon balloons globo globos m 气球 个", "balloon", "balloon", "main"),
        _icon_class("house houses casa casas f 房子 座", "house", "housebuilding"),
        _icon_class("tree trees árbol árboles m 树 棵", "deciduous-tree evergreen-tree", "deciduoustree evergreen"),
        _icon_class("sunflower sunflowers girasol girasoles m 向日葵 朵", "sunflower", "sunflower"),
    )
}


def fetch_icons(folder: Path) -> None:
    """Install the icon packages into `folder/node_modules` with npm, which must be on the path."""
    packages = [f"@iconify-json/{style}@{version}" for style, version in PACKAGES.items()]
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["npm", "install", "--no-audit", "--no-fund", "--prefix", str(folder), *packages], check=True)


def load_sprites(folder: Path, size: int, styles: Iterable[str] = STYLES) -> dict[str, dict[str, list[Sprite]]]:
    """Every drawing of every class: `sprites[style][class name]`, the usual drawing first.

    `size` is the side in pixels of the square that a drawing is rendered to before it is trimmed. A class
    with color words comes in its seven colors and not in its own. What was rendered is kept in
    `folder/rendered`. Raises FileNotFoundError where `fetch_icons` has not run, ValueError for an unknown
    style.
    """
    sprites = {}
    for style in styles:
        if style not in PACKAGES:
            raise ValueError(f"style is {style!r}, expected one of {', '.join(STYLES)}")
        cache = folder / "rendered" / f"{style}-{size}-{_fingerprint(style)}.npz"
        if not cache.exists():
            _save_sprites(cache, _render_style(folder, style, size))
        sprites[style] = _group_by_class(_read_sprites(cache, style))
    return sprites


def hue_saturation_value(rgb: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Hue in degrees [0, 360), saturation and value in [0, 1] of float RGB in [0, 1], shape (..., 3)."""
    largest, smallest = rgb.max(-1), rgb.min(-1)
    spread = largest - smallest
    safe = np.where(spread == 0, 1, spread)
    red, green, blue = np.moveaxis(rgb, -1, 0)
    sector = np.select(
        [largest == red, largest == green],
        [(green - blue) / safe, 2 + (blue - red) / safe],
        4 + (red - green) / safe,
    )
    saturation = spread / np.where(largest == 0, 1, largest)
    return np.where(spread == 0, 0, sector * 60 % 360), saturation, largest


def repaint(pixels: np.ndarray, color: str, which: str) -> np.ndarray:
    """A copy of an RGBA uint8 drawing with its saturated pixels set to a named color.

    The middle shade of the repainted pixels becomes the color itself; darker ones darken it and paler ones
    go to white, so the drawing's shading survives and the result does not depend on what color it had.
    `which` is "main" or "all", see `IconClass`.
    """
    rgb = pixels[..., :3].astype(np.float32) / 255
    weight = _paintable(pixels, which)
    painted = weight > 0.5
    if not painted.any():
        return pixels.copy()
    target = np.array(COLORS[color].rgb, np.float32) / 255
    luminance = rgb @ np.array([0.3, 0.59, 0.11], np.float32)
    shade = np.clip(luminance / np.median(luminance[painted]), 0.45, 1.6)[..., None]
    new = np.where(shade < 1, target * shade, target + (1 - target) * (shade - 1) * 0.9)
    mixed = rgb + weight[..., None] * (new - rgb)
    return np.dstack([np.round(mixed * 255).clip(0, 255).astype(np.uint8), pixels[..., 3]])


def _paintable(pixels: np.ndarray, which: str) -> np.ndarray:
    """How far each pixel may be repainted, float in [0, 1], shape (height, width)."""
    hue, saturation, value = hue_saturation_value(pixels[..., :3].astype(np.float32) / 255)
    weight = np.clip((saturation - 0.22) / 0.16, 0, 1) * np.clip((value - 0.12) / 0.16, 0, 1)
    weight *= pixels[..., 3] > 0
    if which == "main":
        distance = np.abs((hue - _main_hue(hue, weight * saturation) + 180) % 360 - 180)
        weight *= np.clip((60 - distance) / 15, 0, 1)
    return weight


def _main_hue(hue: np.ndarray, weight: np.ndarray) -> float:
    counts, edges = np.histogram(hue, bins=36, range=(0, 360), weights=weight)
    smooth = counts + np.roll(counts, 1) + np.roll(counts, -1)
    return float(edges[smooth.argmax()] + 5)


def _render_style(folder: Path, style: str, size: int) -> list[Sprite]:
    path = folder / "node_modules" / "@iconify-json" / style / "icons.json"
    package = json.loads(path.read_text(encoding="utf-8"))
    sprites = []
    for icon_class in CLASSES.values():
        names = icon_class.firefox_icons if style == "fxemoji" else icon_class.icons
        bodies = []
        for name in names:
            svg = _svg(package, name)
            if svg is None or svg in bodies:
                continue
            pixels = _trim(_rasterise(svg, size))
            sprites += _color_variants(icon_class, style, len(bodies), pixels)
            bodies.append(svg)
    return sprites


def _color_variants(icon_class: IconClass, style: str, drawing: int, pixels: np.ndarray) -> list[Sprite]:
    if icon_class.recolor is None:
        return [Sprite(icon_class.name, style, drawing, None, pixels)]
    if _paintable(pixels, icon_class.recolor).sum() < SMALLEST_PAINTED_SHARE * (pixels[..., 3] > 0).sum():
        return []
    return [
        Sprite(icon_class.name, style, drawing, color, repaint(pixels, color, icon_class.recolor)) for color in COLORS
    ]


def _svg(package: dict, name: str) -> str | None:
    while name in package.get("aliases", {}):
        name = package["aliases"][name]["parent"]
    if name not in package["icons"]:
        return None
    icon = package["icons"][name]
    width = icon.get("width", package.get("width", 16))
    height = icon.get("height", package.get("height", 16))
    left, top = icon.get("left", 0), icon.get("top", 0)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'viewBox="{left} {top} {width} {height}">{icon["body"]}</svg>'
    )


def _rasterise(svg: str, size: int) -> np.ndarray:
    from resvg_py import svg_to_bytes  # only training draws: the app must run without it

    png = svg_to_bytes(svg_string=svg, width=size, skip_system_fonts=True)
    return np.asarray(Image.open(io.BytesIO(png)).convert("RGBA"))


def _trim(pixels: np.ndarray) -> np.ndarray:
    visible = pixels[..., 3] > 8
    rows, columns = np.flatnonzero(visible.any(1)), np.flatnonzero(visible.any(0))
    return np.ascontiguousarray(pixels[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1])


def _fingerprint(style: str) -> str:
    """Changes when the table, the colors or the package do, so that nothing stale is read."""
    table = [(c.name, c.icons, c.firefox_icons, c.recolor) for c in CLASSES.values()]
    colors = [(name, color.rgb) for name, color in COLORS.items()]
    return hashlib.sha256(repr((table, colors, SMALLEST_PAINTED_SHARE, PACKAGES[style])).encode()).hexdigest()[:12]


def _save_sprites(path: Path, sprites: Sequence[Sprite]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    arrays = {f"{s.class_name}.{s.drawing}.{s.color or ''}": s.pixels for s in sprites}
    partial = path.with_suffix(".partial.npz")
    np.savez_compressed(partial, **arrays)
    partial.replace(path)


def _read_sprites(path: Path, style: str) -> list[Sprite]:
    with np.load(path) as arrays:
        keys = [re.fullmatch(r"(.+)\.(\d+)\.(.*)", key) for key in arrays.files]
        return [Sprite(k[1], style, int(k[2]), k[3] or None, arrays[k[0]]) for k in keys]


def _group_by_class(sprites: Iterable[Sprite]) -> dict[str, list[Sprite]]:
    grouped: dict[str, list[Sprite]] = {}
    for sprite in sprites:
        grouped.setdefault(sprite.class_name, []).append(sprite)
    return grouped
