"""Emoji icons: download, rasterization and recoloring.

Each of the seven drawing styles is an npm package `@iconify-json/<style>` with an `icons.json` of SVG bodies. Five
styles are used for training. Two are held out, to test whether the model generalizes to other drawings of its classes.
The packages are installed with npm and rasterized with resvg; they are not redistributed.
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

from paligemma.training.classes import CLASSES, COLORS, ObjectClass

PACKAGES = {
    "noto": "1.2.9",  # Apache-2.0
    "noto-v1": "1.2.5",  # Apache-2.0
    "twemoji": "1.2.5",  # CC-BY 4.0
    "fluent-emoji-flat": "1.2.6",  # MIT
    "fxemoji": "1.2.2",  # Apache-2.0
    "emojione": "1.2.3",  # CC-BY 4.0
    "openmoji": "1.2.29",  # CC-BY-SA 4.0
}
TRAINED_STYLES = ("noto", "noto-v1", "twemoji", "fluent-emoji-flat", "fxemoji")
HELD_OUT_STYLES = ("emojione", "openmoji")
STYLES = TRAINED_STYLES + HELD_OUT_STYLES

# Icons of recolored classes with a smaller recolorable share are skipped: the object would not be seen as that color.
MIN_RECOLORABLE_SHARE = 0.25


@dataclass(frozen=True, eq=False)
class Sprite:
    """A rasterized icon, cropped to its visible pixels.

    Attributes:
        variant: 0 for the default icon of the class, larger for its other icons.
        color: a key of COLORS; None for the icon's original colors.
        pixels: uint8 RGBA, (height, width, 4), straight (not premultiplied) alpha.
    """

    class_name: str
    style: str
    variant: int
    color: str | None
    pixels: np.ndarray = field(repr=False)


def fetch_icons(folder: Path) -> None:
    """Install the icon packages into `folder/node_modules`, if it does not exist. Requires npm."""
    if (folder / "node_modules").exists():
        return
    packages = [f"@iconify-json/{style}@{version}" for style, version in PACKAGES.items()]
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["npm", "install", "--no-audit", "--no-fund", "--prefix", str(folder), *packages], check=True)


def load_sprites(folder: Path, size: int, styles: Iterable[str] = STYLES) -> dict[str, dict[str, list[Sprite]]]:
    """Load the sprites of all classes as `sprites[style][class name]`, default icon first.

    Recolored classes have one sprite per icon and color; the original colors are not included. Rasterized icons are
    cached in `folder/rendered`.

    Args:
        folder: folder passed to `fetch_icons`.
        size: side in pixels of the square that each icon is rasterized to, before cropping.

    Raises:
        FileNotFoundError: if the icons are not installed.
        ValueError: for an unknown style.
    """
    sprites = {}
    for style in styles:
        if style not in PACKAGES:
            raise ValueError(f"style must be one of {', '.join(STYLES)}, got {style!r}.")
        cache = folder / "rendered" / f"{style}-{size}-{_fingerprint(style)}.npz"
        if not cache.exists():
            _save_sprites(cache, _render_style(folder, style, size))
        sprites[style] = _group_by_class(_read_sprites(cache, style))
    return sprites


def rgb_to_hsv(rgb: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Convert float RGB in [0, 1], (..., 3), to hue in degrees [0, 360), saturation and value in [0, 1]."""
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


def recolor(pixels: np.ndarray, color: str, mode: str) -> np.ndarray:
    """Return a copy of an RGBA uint8 icon with its saturated pixels in a named color.

    The median shade of the recolored pixels becomes the color itself. Darker pixels darken it and lighter ones move it
    towards white, which preserves the shading. The result does not depend on the original color.

    Args:
        mode: "main" or "all", see `ObjectClass.recolor`.
    """
    rgb = pixels[..., :3].astype(np.float32) / 255
    weight = _recolor_weight(pixels, mode)
    recolored = weight > 0.5
    if not recolored.any():
        return pixels.copy()
    target = np.array(COLORS[color].rgb, np.float32) / 255
    luminance = rgb @ np.array([0.3, 0.59, 0.11], np.float32)
    shade = np.clip(luminance / np.median(luminance[recolored]), 0.45, 1.6)[..., None]
    new = np.where(shade < 1, target * shade, target + (1 - target) * (shade - 1) * 0.9)
    mixed = rgb + weight[..., None] * (new - rgb)
    return np.dstack([np.round(mixed * 255).clip(0, 255).astype(np.uint8), pixels[..., 3]])


def bounding_box(mask: np.ndarray) -> tuple[int, int, int, int]:
    """Return left, top, right and bottom (exclusive) of the True pixels; all 0 if there are none."""
    columns, rows = np.flatnonzero(mask.any(0)), np.flatnonzero(mask.any(1))
    if not rows.size:
        return 0, 0, 0, 0
    return int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1


def _recolor_weight(pixels: np.ndarray, mode: str) -> np.ndarray:
    """Compute how strongly each pixel is recolored: float in [0, 1], (height, width)."""
    hue, saturation, value = rgb_to_hsv(pixels[..., :3].astype(np.float32) / 255)
    weight = np.clip((saturation - 0.22) / 0.16, 0, 1) * np.clip((value - 0.12) / 0.16, 0, 1)
    weight *= pixels[..., 3] > 0
    if mode == "main":
        distance = np.abs((hue - _dominant_hue(hue, weight * saturation) + 180) % 360 - 180)
        weight *= np.clip((60 - distance) / 15, 0, 1)
    return weight


def _dominant_hue(hue: np.ndarray, weight: np.ndarray) -> float:
    counts, edges = np.histogram(hue, bins=36, range=(0, 360), weights=weight)
    smoothed = counts + np.roll(counts, 1) + np.roll(counts, -1)
    return float(edges[smoothed.argmax()] + 5)


def _render_style(folder: Path, style: str, size: int) -> list[Sprite]:
    path = folder / "node_modules" / "@iconify-json" / style / "icons.json"
    package = json.loads(path.read_text(encoding="utf-8"))
    sprites = []
    for object_class in CLASSES.values():
        names = object_class.fxemoji_icons if style == "fxemoji" else object_class.icons
        rendered: list[str] = []
        for name in names:
            svg = _svg(package, name)
            if svg is None or svg in rendered:
                continue
            pixels = _crop(_rasterize(svg, size))
            sprites += _color_variants(object_class, style, len(rendered), pixels)
            rendered.append(svg)
    return sprites


def _color_variants(object_class: ObjectClass, style: str, variant: int, pixels: np.ndarray) -> list[Sprite]:
    name, mode = object_class.name, object_class.recolor
    if mode is None:
        return [Sprite(name, style, variant, None, pixels)]
    if _recolor_weight(pixels, mode).sum() < MIN_RECOLORABLE_SHARE * (pixels[..., 3] > 0).sum():
        return []
    return [Sprite(name, style, variant, color, recolor(pixels, color, mode)) for color in COLORS]


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


def _rasterize(svg: str, size: int) -> np.ndarray:
    from resvg_py import svg_to_bytes  # optional dependency, needed only when the cache is empty

    png = svg_to_bytes(svg_string=svg, width=size, skip_system_fonts=True)
    return np.asarray(Image.open(io.BytesIO(png)).convert("RGBA"))


def _crop(pixels: np.ndarray) -> np.ndarray:
    left, top, right, bottom = bounding_box(pixels[..., 3] > 8)
    return np.ascontiguousarray(pixels[top:bottom, left:right])


def _fingerprint(style: str) -> str:
    """Hash everything that sprites depend on, to invalidate cached ones."""
    classes = [(c.name, c.icons, c.fxemoji_icons, c.recolor) for c in CLASSES.values()]
    colors = [(name, color.rgb) for name, color in COLORS.items()]
    return hashlib.sha256(repr((classes, colors, MIN_RECOLORABLE_SHARE, PACKAGES[style])).encode()).hexdigest()[:12]


def _save_sprites(path: Path, sprites: Sequence[Sprite]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    arrays = {f"{s.class_name}.{s.variant}.{s.color or ''}": s.pixels for s in sprites}
    partial = path.with_suffix(".partial.npz")
    np.savez_compressed(partial, **arrays)  # type: ignore[arg-type]  # numpy's stub mistakes arrays for allow_pickle
    partial.replace(path)


def _read_sprites(path: Path, style: str) -> list[Sprite]:
    with np.load(path) as arrays:
        keys = [match for key in arrays.files if (match := re.fullmatch(r"(.+)\.(\d+)\.(.*)", key))]
        return [Sprite(k[1], style, int(k[2]), k[3] or None, arrays[k[0]]) for k in keys]


def _group_by_class(sprites: Iterable[Sprite]) -> dict[str, list[Sprite]]:
    grouped: dict[str, list[Sprite]] = {}
    for sprite in sprites:
        grouped.setdefault(sprite.class_name, []).append(sprite)
    return grouped
