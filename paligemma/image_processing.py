"""Image preprocessing: any Pillow image -> RGB -> resized square -> `pixel_values`.

On RGB input the result equals that of transformers' `SiglipImageProcessorPil` bit for bit.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import ExifTags, Image, ImageOps

from paligemma.errors import InputError

_SIXTEEN_BIT_MODES = ("I;16", "I;16L", "I;16B", "I;16N")
_REQUIRED_STEPS = {
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "do_center_crop": False,
    "do_pad": False,
}


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert any Pillow image to an upright, opaque RGB copy without metadata.

    * Animations: the first frame.
    * EXIF orientation is applied.
    * Transparency is composited onto white, as in transformers.
    * 16-bit grayscale (`I;16...`) is scaled from 0..65535 to 0..255. The range of `I` and `F` is inferred; see
      `_value_range`. Values are scaled, never clipped.
    * Color profiles are ignored; CMYK is converted by Pillow.

    Raises:
        InputError: if `image` is not a Pillow image, has no pixels, or cannot be decoded.
    """
    if not isinstance(image, Image.Image):
        raise InputError("image.type", "image must be a PIL image, got {type}.", type=type(image).__name__)
    if 0 in image.size:
        raise InputError(
            "image.empty",
            "image must have at least one pixel, got {width} x {height}.",
            width=image.width,
            height=image.height,
        )
    try:
        frame = _first_frame(image)
        orientation = _exif_orientation(frame)
        rgb = _frame_to_rgb(frame)
    except MemoryError:
        raise
    except Exception as error:  # Pillow raises many types of exceptions for corrupt files
        raise InputError("image.decode", "image cannot be decoded: {reason}.", reason=str(error)) from error
    rgb.info = {}  # without the original EXIF data, a second call does not rotate again
    rgb.getexif()[ExifTags.Base.Orientation] = orientation
    ImageOps.exif_transpose(rgb, in_place=True)
    return rgb


def resize(image: Image.Image, size: int, resample: int = Image.Resampling.BICUBIC) -> Image.Image:
    """Convert any Pillow image to RGB and resize it to size x size pixels.

    The aspect ratio is not preserved and nothing is cropped, as in PaliGemma's training.
    """
    return to_rgb(image).resize((size, size), resample=Image.Resampling(resample))


def normalize(
    square: Image.Image,
    mean: Sequence[float] = (0.5, 0.5, 0.5),
    std: Sequence[float] = (0.5, 0.5, 0.5),
) -> torch.Tensor:
    """Convert an RGB image to `pixel_values`: (pixel / 255 - mean) / std.

    Returns (3, height, width), float32, in [-1, 1] with the default mean and std.
    """
    # Same order of operations as in transformers: rescale in float64, round to float32, normalize in float32.
    scaled = (np.asarray(square).astype(np.float64) * (1 / 255)).astype(np.float32)
    normalized = (scaled - np.array(mean, dtype=np.float32)) / np.array(std, dtype=np.float32)
    return torch.from_numpy(normalized).permute(2, 0, 1).contiguous()


def _first_frame(image: Image.Image) -> Image.Image:
    """Decode the first frame; the caller's image keeps its current frame."""
    current = image.tell()
    if current == 0:
        image.load()
        return image
    image.seek(0)
    frame = image.copy()
    image.seek(current)
    return frame


def _exif_orientation(image: Image.Image) -> int:
    """Return the EXIF orientation, 1 to 8; 1 (upright) if it is absent or the EXIF block is corrupt."""
    try:
        return image.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception:  # Pillow raises many types of exceptions for corrupt files
        return 1


def _frame_to_rgb(image: Image.Image) -> Image.Image:
    if image.mode in (*_SIXTEEN_BIT_MODES, "I", "F"):
        return _high_depth_to_rgb(image)
    if image.mode == "La":  # Pillow converts premultiplied grayscale only to LA
        image = image.convert("LA")
    if not image.has_transparency_data:
        return image.convert("RGB")
    white = Image.new("RGBA", image.size, (255, 255, 255, 255))
    return Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")


def _high_depth_to_rgb(image: Image.Image) -> Image.Image:
    """Scale a grayscale image with more than 8 bits to 0..255. A PNG's transparent value becomes white."""
    sixteen_bit = image.mode in _SIXTEEN_BIT_MODES
    dtype: type[np.floating] = np.float32 if sixteen_bit else np.float64
    values = np.array(image, dtype=dtype)
    transparent = values == image.info.get("transparency", math.nan)
    black, white = (0.0, 65535.0) if sixteen_bit else _value_range(values, image.mode)
    np.nan_to_num(values, copy=False, nan=black, posinf=white, neginf=black)
    values -= black
    values /= (white - black) or 1.0
    levels = np.rint(values * 255).astype(np.uint8)
    levels[transparent] = 255
    return Image.fromarray(levels).convert("RGB")


def _value_range(values: np.ndarray, mode: str) -> tuple[float, float]:
    """Infer the values of black and white in an `I` or `F` image.

    The first common range that contains every finite value: 0..1 (`F` only), 0..255, 0..65535; otherwise the minimum
    and maximum of the image.
    """
    finite = values[np.isfinite(values)]
    if finite.size == 0:
        return 0.0, 1.0
    low, high = float(finite.min()), float(finite.max())
    common_whites = (1.0, 255.0, 65535.0) if mode == "F" else (255.0, 65535.0)
    for white in common_whites:
        if low >= 0 and high <= white:
            return 0.0, white
    return low, high


@dataclass(frozen=True)
class ImageSettings:
    """The configurable part of preprocessor_config.json: mean and std per channel, and Pillow's resampling filter."""

    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    resample: int = int(Image.Resampling.BICUBIC)

    def __post_init__(self) -> None:
        if len(self.mean) != 3 or len(self.std) != 3 or not all(0 < value < math.inf for value in self.std):
            raise InputError(
                "image_settings.mean_std",
                "image_mean and image_std must have 3 values, each std finite and > 0, got {mean} and {std}.",
                mean=self.mean,
                std=self.std,
            )
        if self.resample not in list(Image.Resampling):
            raise InputError(
                "image_settings.resample",
                "resample must be a Pillow filter, 0 to 5, got {value!r}.",
                value=self.resample,
            )

    @classmethod
    def from_folder(cls, folder: Path, image_size: int) -> ImageSettings:
        """Read preprocessor_config.json, or processor_config.json (transformers 5); defaults if neither exists.

        Raises:
            InputError: if the file is invalid or requires an unsupported preprocessing step.
        """
        stored = _read_image_processor_config(folder)
        _check_supported(stored, image_size)
        defaults = cls()
        return cls(
            mean=_per_channel("image_mean", stored.get("image_mean"), defaults.mean),
            std=_per_channel("image_std", stored.get("image_std"), defaults.std),
            resample=_value_or_default(stored.get("resample"), defaults.resample),
        )


def _read_image_processor_config(folder: Path) -> Mapping[str, Any]:
    for name in ("preprocessor_config.json", "processor_config.json"):
        path = folder / name
        if not path.is_file():
            continue
        try:
            stored = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise InputError(
                "image_settings.json", "{path} is not valid JSON: {reason}.", path=str(path), reason=str(error)
            ) from error
        if name == "processor_config.json" and isinstance(stored, dict):
            stored = _value_or_default(stored.get("image_processor"), {})
        if not isinstance(stored, dict):
            raise InputError(
                "image_settings.object",
                "The image processor configuration in {path} must be a JSON object, got {value!r}.",
                path=str(path),
                value=stored,
            )
        return stored
    return {}


def _check_supported(stored: Mapping[str, Any], image_size: int) -> None:
    """Raise InputError if the config requires steps that `resize` and `normalize` do not perform."""
    for name, required in _REQUIRED_STEPS.items():
        _require(_value_or_default(stored.get(name), required) is required, name, stored.get(name), required)
    factor = _value_or_default(stored.get("rescale_factor"), 1 / 255)
    is_supported = isinstance(factor, int | float) and math.isclose(factor, 1 / 255, rel_tol=1e-6)
    _require(is_supported, "rescale_factor", factor, "1/255")
    square = {"height": image_size, "width": image_size}
    size = _value_or_default(stored.get("size"), image_size)
    _require(size in (image_size, square), "size", size, square)


def _require(condition: bool, name: str, value: Any, valid: Any) -> None:
    if not condition:
        raise InputError(
            "image_settings.unsupported",
            "The image processor's {name} must be {valid}, got {value!r}.",
            name=name,
            valid=valid,
            value=value,
        )


def _per_channel(name: str, value: Any, default: tuple[float, ...]) -> tuple[float, ...]:
    values = [value] * 3 if isinstance(value, int | float) else _value_or_default(value, default)
    is_valid = isinstance(values, list | tuple) and all(isinstance(each, int | float) for each in values)
    _require(is_valid, name, value, "a number or a list of 3 numbers")
    return tuple(map(float, values))


def _value_or_default(value: Any, default: Any) -> Any:
    return default if value is None else value
