"""The picture that a visitor gave: a file nobody has looked at yet -> an upright Pillow image, and what is shown."""

from __future__ import annotations

import base64
import io
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image, UnidentifiedImageError

from paligemma.image_processing import to_rgb
from paligemma.webapp.requests import read_upload

if TYPE_CHECKING:
    from paligemma.processing import PaliGemmaProcessor

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
MAX_PIXELS = 40_000_000
# JPEG's own limit. In a run-length encoded BMP two bytes skip 255 rows, which must not be gigabytes.
MAX_SIDE = 65_535
# Cameras and tools write about ten. Each costs a pass over all pixels and only a few bytes of file.
MAX_JPEG_SCANS = 100
START_OF_SCAN = b"\xff\xda"
# A tile may be far larger than its picture, and is decoded whole (TIFF 6.0, section 15).
TIFF_TILE_TAGS = {322, 323, 324, 325}
DAMAGED = "This picture is damaged and cannot be read. Try to save it again."

# Of the pictures that are decoded beside the queue; each may take half a gigabyte for a moment.
_decoders = threading.BoundedSemaphore(2)


def open_image(path: str | Path | None) -> Image.Image:
    """Read and decode the picture in an uploaded file, see `decode_picture`.

    Raises ValueError, in words for the visitor, also when there is no file, or one of more than MAX_FILE_BYTES.
    """
    if not path:
        raise ValueError("Choose a picture first.")
    return decode_image(read_upload(path))


def decode_image(file: bytes, formats: Sequence[str] = FORMATS, longest_side: int = MAX_SIDE) -> Image.Image:
    """Check and decode a picture: upright, opaque, RGB, without metadata; of an animation the first frame.

    What a file is, its content decides. Its sizes are checked before anything is decoded: a file of 20 KB can hold a
    picture of half a gigabyte. Conversions are those of `image_processing.to_rgb`.

    Raises ValueError, in words for the visitor, for another format, more pixels or a longer side than allowed, what
    costs far more than its pixels, and a damaged file.
    """
    image = _read_header(file, formats)
    width, height = image.size
    if width * height > MAX_PIXELS or max(width, height) > longest_side:
        raise ValueError(
            f"This picture has {width} × {height} pixels; at most {MAX_PIXELS // 10**6} million pixels, and "
            f"{longest_side} a side, can be read. Make it smaller first."
        )
    if image.format in ("JPEG", "MPO") and file.count(START_OF_SCAN) > MAX_JPEG_SCANS:
        raise ValueError(DAMAGED)
    if image.format == "TIFF" and not TIFF_TILE_TAGS.isdisjoint(image.tag_v2):
        raise ValueError("This TIFF is stored in tiles, which are not read. Save it in strips, or as PNG.")
    try:
        return to_rgb(image)
    except ValueError as error:
        raise ValueError(DAMAGED) from error


def _read_header(file: bytes, formats: Sequence[str]) -> Image.Image:
    try:
        return Image.open(io.BytesIO(file), formats=formats)
    except MemoryError:
        raise
    except Image.DecompressionBombError as error:
        raise ValueError("This picture has far too many pixels. Make it smaller first.") from error
    except UnidentifiedImageError as error:
        names = ", ".join(formats)
        raise ValueError(f"This file is none of the pictures that can be read ({names}), or is damaged.") from error
    except Exception as error:  # Pillow's readers raise nearly everything on a damaged file
        raise ValueError(DAMAGED) from error


# What is shown of a picture, and what the model sees of it

PREVIEW_SIDE = 1024


@dataclass(frozen=True)
class InputImage:
    """A visitor's picture as the page keeps it: small enough for every run to hold one.

    Attributes:
        width, height: of the upright picture, in pixels.
        shown: a JPEG file of it with no side above SHOWN_SIDE.
        seen: the square that the model sees: the processor makes the same pixels of it as of the picture itself.
        file: where the picture was read; None: it came with a run.
    """

    width: int
    height: int
    preview: bytes
    model_input: Image.Image
    file: str | Path | None = None

    @property
    def size(self) -> tuple[int, int]:
        return self.width, self.height


def make_input_image(image: Image.Image, processor: PaliGemmaProcessor, file: str | Path | None = None) -> InputImage:
    """Keep what is needed of an upright picture, which was read from `file`; `image` itself may go."""
    return InputImage(image.width, image.height, _shown_file(image), model_input_image(image, processor), file)


def read_input_image(path: str | Path | None, processor: PaliGemmaProcessor) -> InputImage:
    """`open_picture` and `make_picture`, for handlers that wait in no queue: a few at a time."""
    with _decoders:
        return make_input_image(open_image(path), processor, path)


def fit_to_model(image: InputImage, processor: PaliGemmaProcessor) -> InputImage:
    """The picture for a model that may see another square than the one it was kept for.

    Its file is read again; what is shown, which is a little coarser, stands in for one that is not there.
    """
    if image.model_input.width == processor.image_size:
        return image
    try:
        source = open_image(image.file)
    except ValueError:
        source = preview_image(image)
    return replace(image, model_input=model_input_image(source, processor))


def preview_image(image: InputImage) -> Image.Image:
    """What is shown of a picture, decoded."""
    return Image.open(io.BytesIO(image.preview), formats=("JPEG",)).convert("RGB")


def model_input_image(image: Image.Image, processor: PaliGemmaProcessor) -> Image.Image:
    """The resized image that the model receives: RGB, image_size x image_size pixels."""
    return processor.resize(image)


def image_view_state(image: InputImage | None, num_patches: int | None = None) -> dict[str, Any] | None:
    """The value of the picture on the page; None where there is none."""
    if image is None:
        return None
    return {
        "src": data_url(image.preview, "image/jpeg"),
        "width": image.width,
        "height": image.height,
        "model_input": data_url(png_file(image.model_input), "image/png"),
        "side": image.model_input.width,
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
    small.thumbnail((PREVIEW_SIDE, PREVIEW_SIDE))
    file = io.BytesIO()
    small.save(file, format="JPEG", quality=90)
    return file.getvalue()
