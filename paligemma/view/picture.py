"""The picture that a visitor gave: a file nobody has looked at yet -> an upright Pillow image, or words."""

from __future__ import annotations

import struct
from pathlib import Path

from PIL import Image, ImageOps, UnidentifiedImageError

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
