"""The picture that a visitor gave: a file nobody has looked at yet -> an upright Pillow image, and what is shown."""

from __future__ import annotations

import base64
import io
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from paligemma.processing import to_rgb

if TYPE_CHECKING:
    from paligemma.processing import PaliGemmaProcessor

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
MAX_PIXELS = 40_000_000
# What Pillow's readers raise on damaged files.
_DAMAGE = (OSError, EOFError, SyntaxError, ValueError, TypeError, struct.error)


def open_picture(path: str | Path | None) -> Image.Image:
    """Open, check and decode a picture; of an animation the first frame, turned as its EXIF data says.

    What a file is, its content decides, not its name. Its size is checked before anything is decoded: a file of
    20 KB can hold a picture of half a gigabyte.

    Raises ValueError, in words for the visitor, when there is no picture, for another format, for more than
    MAX_PIXELS pixels, and for a damaged file.
    """
    if not path:
        raise ValueError("Choose a picture first.")
    image = _read_header(path)
    if image.width * image.height > MAX_PIXELS:
        raise ValueError(_too_large(f"{image.width} × {image.height} pixels"))
    try:
        image.load()
    except _DAMAGE as error:
        raise ValueError("This picture is damaged and cannot be read. Try to save it again.") from error
    return _upright(image)


def _read_header(path: str | Path) -> Image.Image:
    try:
        return Image.open(path, formats=FORMATS)
    except Image.DecompressionBombError as error:
        raise ValueError(_too_large("far more")) from error
    except UnidentifiedImageError as error:
        raise ValueError(f"This file is none of the pictures that can be read: {', '.join(FORMATS)}.") from error
    except _DAMAGE as error:
        raise ValueError("This file cannot be read. Choose it again.") from error


def _too_large(size: str) -> str:
    return f"This picture has {size}; at most {MAX_PIXELS // 10**6} million pixels can be read. Make it smaller first."


def _upright(image: Image.Image) -> Image.Image:
    try:
        return ImageOps.exif_transpose(image)
    except _DAMAGE:
        return image  # a damaged EXIF block says nothing about the picture


# What is shown of a picture, and what the model sees of it

SHOWN_SIDE = 1024


@dataclass(frozen=True)
class Picture:
    """A visitor's picture as the page keeps it: small enough for every run to hold one.

    Attributes:
        width, height: of the upright picture, in pixels.
        shown: a JPEG file of it with no side above SHOWN_SIDE.
        seen: the square that the model sees: the processor makes the same pixels of it as of the picture itself.
    """

    width: int
    height: int
    shown: bytes
    seen: Image.Image

    @property
    def size(self) -> tuple[int, int]:
        return self.width, self.height


def make_picture(image: Image.Image, processor: PaliGemmaProcessor) -> Picture:
    """Keep what is needed of an upright picture; `image` itself may go."""
    return Picture(image.width, image.height, _shown_file(image), seen_picture(image, processor))


def seen_picture(image: Image.Image, processor: PaliGemmaProcessor) -> Image.Image:
    """The pixels that the model gets, turned back into a picture of `processor.image_size` pixels a side."""
    settings = processor.image_settings
    pixels = processor.image_to_pixels(image).permute(1, 2, 0).numpy()
    levels = np.rint((pixels * np.array(settings.std) + np.array(settings.mean)) * 255)
    return Image.fromarray(levels.clip(0, 255).astype(np.uint8))


def scene(picture: Picture | None, num_patches: int | None = None) -> dict[str, Any] | None:
    """The value of the picture on the page; None where there is none."""
    if picture is None:
        return None
    return {
        "src": data_url(picture.shown, "image/jpeg"),
        "width": picture.width,
        "height": picture.height,
        "seen": data_url(png_file(picture.seen), "image/png"),
        "side": picture.seen.width,
        "patches": num_patches,
    }


def png_file(image: Image.Image) -> bytes:
    """The bytes of a PNG file."""
    file = io.BytesIO()
    image.save(file, format="PNG", optimize=True)
    return file.getvalue()


def data_url(file: bytes, media_type: str) -> str:
    """A file as an address that a browser reads without asking a server."""
    return f"data:{media_type};base64,{base64.b64encode(file).decode()}"


def _shown_file(image: Image.Image) -> bytes:
    small = to_rgb(image)
    small.thumbnail((SHOWN_SIDE, SHOWN_SIDE))
    file = io.BytesIO()
    small.save(file, format="JPEG", quality=90)
    return file.getvalue()
