"""Open and validate uploaded files, which are untrusted."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image, UnidentifiedImageError

from paligemma.errors import InputError
from paligemma.image_processing import to_rgb

MAX_FILE_BYTES = 10 * 2**20
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
MAX_PIXELS = 40_000_000
# The limit of JPEG. Run-length encoded BMP needs it: two bytes skip 255 rows, which can be gigabytes of pixels.
MAX_SIDE = 65_535
# Cameras and editors write about ten. Each scan is a pass over all pixels, and can be a few bytes long.
MAX_JPEG_SCANS = 100
START_OF_SCAN = b"\xff\xda"
# A tile is decoded whole, and can be far larger than the image (TIFF 6.0, section 15).
TIFF_TILE_TAGS = {322, 323, 324, 325}


def uploaded_path(upload: Any) -> str | None:
    """Return the path of an uploaded file, or None without an upload.

    Gradio verifies that a file was uploaded only if the client marks it as a file. Without that mark, the path can be
    any file on the server, so it is ignored.
    """
    meta = upload.get("meta") if isinstance(upload, Mapping) else None
    if not isinstance(meta, Mapping) or meta.get("_type") != "gradio.FileData":
        return None
    path = upload.get("path")
    return path if isinstance(path, str) else None


def read_upload(path: str | Path) -> bytes:
    """Return the content of an uploaded file.

    Raises:
        InputError: for a file that is not regular (reading a pipe can block, a device can be endless), cannot be read,
            or is larger than MAX_FILE_BYTES.
    """
    try:
        if not Path(path).is_file():
            raise InputError(
                "upload.not_a_file", "The uploaded file is missing or is not a regular file. Upload it again."
            )
        with open(path, "rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise InputError("upload.unreadable", "The uploaded file cannot be read. Upload it again.") from error
    check_size(content)
    return content


def check_size(content: bytes) -> None:
    """Raise InputError for a file larger than MAX_FILE_BYTES."""
    if len(content) > MAX_FILE_BYTES:
        raise InputError("upload.size", "The file must be at most {maximum} MB.", maximum=MAX_FILE_BYTES // 2**20)


def open_image(path: str | Path | None) -> Image.Image:
    """Read and decode an uploaded image, see `decode_image`.

    Raises:
        InputError: also without a file (None or ""), or for a file larger than MAX_FILE_BYTES.
    """
    if not path:
        raise InputError("upload.no_image", "Choose an image first.")
    return decode_image(read_upload(path))


def decode_image(file: bytes, formats: Sequence[str] = FORMATS, max_side: int = MAX_SIDE) -> Image.Image:
    """Decode an image file to upright, opaque RGB without metadata; of an animation, the first frame.

    The content determines the format. The size is checked before decoding, because a file of 20 KB can contain an image
    of half a gigabyte. `image_processing.to_rgb` converts the image.

    Raises:
        InputError: for another format, more than MAX_PIXELS, a side above `max_side`, content that is far more
            expensive to decode than its pixel count suggests, or a corrupt file.
    """
    image = _read_header(file, formats)
    width, height = image.size
    if width * height > MAX_PIXELS or max(width, height) > max_side:
        raise InputError(
            "image.size",
            "The image must have at most {megapixels} megapixels and {max_side} pixels per side, "
            "got {width} × {height}.",
            megapixels=MAX_PIXELS // 10**6,
            max_side=max_side,
            width=width,
            height=height,
        )
    if image.format in ("JPEG", "MPO") and file.count(START_OF_SCAN) > MAX_JPEG_SCANS:
        raise _corrupt_image()
    if image.format == "TIFF" and not TIFF_TILE_TAGS.isdisjoint(image.tag_v2):  # type: ignore[attr-defined]
        raise InputError("image.tiled_tiff", "Tiled TIFF images are not supported. Save the image as PNG.")
    try:
        return to_rgb(image)
    except ValueError as error:
        raise _corrupt_image() from error


def _read_header(file: bytes, formats: Sequence[str]) -> Image.Image:
    try:
        return Image.open(io.BytesIO(file), formats=tuple(formats))
    except MemoryError:
        raise
    except Image.DecompressionBombError as error:
        raise InputError(
            "image.pixels", "The image must have at most {megapixels} megapixels.", megapixels=MAX_PIXELS // 10**6
        ) from error
    except UnidentifiedImageError as error:
        raise InputError(
            "image.format",
            "Unsupported or corrupt image. Supported formats: {formats}.",
            formats=", ".join(formats),
        ) from error
    except Exception as error:  # Pillow's readers raise many types of exceptions for corrupt files
        raise _corrupt_image() from error


def _corrupt_image() -> InputError:
    return InputError("image.corrupt", "Corrupt image. Save it again, for example as PNG.")
