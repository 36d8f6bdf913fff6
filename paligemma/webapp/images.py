"""The image of a run: its preview on the page and the model input."""

from __future__ import annotations

import base64
import io
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image

from paligemma.image_processing import to_rgb
from paligemma.webapp.uploads import open_image

if TYPE_CHECKING:
    from paligemma.processing import PaliGemmaProcessor

PREVIEW_SIDE = 1024

# Limits decoding outside the queue: an image of MAX_PIXELS takes up to half a gigabyte.
_decoders = threading.BoundedSemaphore(2)


@dataclass(frozen=True)
class InputImage:
    """The image of a run, reduced to what the page and the model need, so that every run can store one.

    Attributes:
        width, height: size of the upright image in pixels.
        preview: JPEG file of at most PREVIEW_SIDE pixels per side.
        model_input: the resized square that the model receives. Resizing it again gives the same pixels.
        path: path of the image file; None for an imported run.
    """

    width: int
    height: int
    preview: bytes
    model_input: Image.Image
    path: str | Path | None = None

    @property
    def size(self) -> tuple[int, int]:
        """(width, height) in pixels."""
        return self.width, self.height


def make_input_image(image: Image.Image, processor: PaliGemmaProcessor, path: str | Path | None = None) -> InputImage:
    """Build the preview and the model input of an upright RGB image. `path` is the path it was read from."""
    return InputImage(image.width, image.height, _encode_preview(image), processor.resize(image), path)


def read_input_image(path: str | Path | None, processor: PaliGemmaProcessor) -> InputImage:
    """Open an uploaded image outside the queue, at most two at a time. Raises InputError."""
    with _decoders:
        return make_input_image(open_image(path), processor, path)


def fit_to_model(image: InputImage, processor: PaliGemmaProcessor) -> InputImage:
    """Return the image with a model input of this model's resolution.

    It is resized from the file, or from the preview, which is less sharp, if the file no longer exists.
    """
    if image.model_input.width == processor.image_size:
        return image
    try:
        source = open_image(image.path)
    except ValueError:
        source = decode_preview(image)
    return replace(image, model_input=processor.resize(source))


def decode_preview(image: InputImage) -> Image.Image:
    """Decode the preview to RGB."""
    return Image.open(io.BytesIO(image.preview), formats=("JPEG",)).convert("RGB")


def encode_png(image: Image.Image) -> bytes:
    """Encode an image as a PNG file."""
    file = io.BytesIO()
    image.save(file, format="PNG", optimize=True)
    return file.getvalue()


def data_url(file: bytes, media_type: str) -> str:
    """Encode a file as a data URL."""
    return f"data:{media_type};base64,{base64.b64encode(file).decode()}"


def _encode_preview(image: Image.Image) -> bytes:
    preview = to_rgb(image)
    preview.thumbnail((PREVIEW_SIDE, PREVIEW_SIDE))
    file = io.BytesIO()
    preview.save(file, format="JPEG", quality=90)
    return file.getvalue()
