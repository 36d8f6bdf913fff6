"""Image preprocessing against transformers' SigLIP image processor, and its config files."""

from __future__ import annotations

import json
import math
import struct
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from paligemma.errors import InputError
from paligemma.image_processing import ImageSettings, normalize, resize, to_rgb

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

IMAGE_SIZE = 56
REFERENCE = SiglipImageProcessorPil(size={"height": IMAGE_SIZE, "width": IMAGE_SIZE})


def pixel_values(image: Image.Image) -> torch.Tensor:
    return normalize(resize(image, IMAGE_SIZE))


def noise(width: int, height: int, mode: str = "RGB") -> Image.Image:
    channels = len(Image.new(mode, (1, 1)).getbands())
    values = np.random.default_rng(0).integers(0, 256, (height, width, channels), dtype=np.uint8)
    return Image.frombytes(mode, (width, height), values.tobytes())


def constant(value: int, size: tuple[int, int] = (30, 20)) -> Image.Image:
    return Image.new("RGB", size, (value,) * 3)


def reopened(image: Image.Image, file_format: str, **options) -> Image.Image:
    file = BytesIO()
    image.save(file, file_format, **options)
    return Image.open(BytesIO(file.getvalue()))


# Pixel values


@pytest.mark.parametrize("size", [(1, 1), (1, 500), (500, 1), (3, 3), (5000, 10), (56, 56), (57, 55), (640, 480)])
@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "LA", "CMYK", "YCbCr"])
def test_pixel_values_equal_the_reference_bit_for_bit(size, mode):
    image = noise(*size, mode)
    ours = pixel_values(image)
    theirs = REFERENCE(images=[image], return_tensors="pt")["pixel_values"][0]
    assert ours.dtype == torch.float32 and ours.shape == (3, IMAGE_SIZE, IMAGE_SIZE)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize(("level", "value"), [(0, -1.0), (127, 127 / 127.5 - 1), (255, 1.0)])
def test_levels_are_scaled_to_minus_one_to_one(level, value):
    assert torch.allclose(normalize(resize(constant(level), 14)), torch.full((3, 14, 14), value), atol=1e-6)


def test_mean_std_and_filter():
    image = noise(9, 9)
    mean, std, bilinear = (0.4, 0.5, 0.6), (0.2, 0.3, 0.4), Image.Resampling.BILINEAR
    reference = SiglipImageProcessorPil(
        size={"height": 28, "width": 28}, image_mean=mean, image_std=std, resample=int(bilinear)
    )
    theirs = reference(images=[image], return_tensors="pt")["pixel_values"][0]
    assert torch.equal(normalize(resize(image, 28, bilinear), mean, std), theirs)


def test_resizing_a_resized_image_changes_nothing():
    square = resize(noise(90, 40), IMAGE_SIZE)
    assert resize(square, IMAGE_SIZE) == square


# Conversion to RGB


def every_mode() -> dict[str, Image.Image]:
    color = noise(64, 64)
    gray = color.convert("L")
    palette = color.quantize(16)
    transparent_palette = palette.copy()
    transparent_palette.info["transparency"] = 3
    transparent_bytes = palette.copy()
    transparent_bytes.info["transparency"] = bytes(range(16))
    sixteen = np.arange(64 * 64, dtype=np.uint16).reshape(64, 64) * 16
    images = {mode: color.convert(mode) for mode in ("1", "L", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "LAB", "HSV")}
    images |= {"LA": noise(64, 64, "LA"), "La": noise(64, 64, "LA").convert("La"), "RGBa": noise(64, 64, "RGBa")}
    images |= {"P": palette, "P+index": transparent_palette, "P+bytes": transparent_bytes, "PA": palette.convert("PA")}
    images |= {"I": gray.convert("I"), "F": gray.convert("F")}
    for mode, order in (("I;16", "<u2"), ("I;16L", "<u2"), ("I;16B", ">u2"), ("I;16N", "=u2")):
        images[mode] = Image.frombytes(mode, (64, 64), sixteen.astype(order).tobytes())
    return images


@pytest.mark.parametrize("name", every_mode())
def test_every_image_mode_is_converted(name):
    image = every_mode()[name]
    rgb = to_rgb(image)
    assert (rgb.mode, rgb.size) == ("RGB", image.size)
    pixels = pixel_values(image)
    assert torch.isfinite(pixels).all() and pixels.abs().max() <= 1
    assert pixels.std() > 0.01, "the content of the image is lost"


@pytest.mark.parametrize("mode", ["I;16", "I;16L", "I;16B", "I;16N"])
def test_16_bit_grayscale_is_scaled_not_clipped(mode):
    values = np.array([[0, 257, 300, 32896, 65278, 65535]], dtype=">u2" if mode == "I;16B" else "<u2")
    image = Image.frombytes(mode, (6, 1), values.tobytes())
    assert [pixel[0] for pixel in pixels_of(to_rgb(image))] == [0, 1, 1, 128, 254, 255]


def test_16_bit_png_keeps_levels_and_transparency():
    ramp = Image.fromarray(np.linspace(0, 65535, 256, dtype=np.uint16).reshape(1, 256))
    assert np.array_equal(np.asarray(to_rgb(reopened(ramp, "PNG")))[0, :, 1], np.arange(256))
    marked = to_rgb(reopened(ramp, "PNG", transparency=0))
    assert pixels_of(marked)[:2] == [(255, 255, 255), (1, 1, 1)]


@pytest.mark.parametrize(
    ("mode", "values", "levels"),
    [
        ("I", [0, 128, 255], [0, 128, 255]),
        ("I", [0, 32896, 65535], [0, 128, 255]),
        ("I", [-100, 0, 100], [0, 128, 255]),
        ("I", [0, 0, 2**31 - 1], [0, 0, 255]),
        ("I", [-5, -5, -5], [0, 0, 0]),
        ("F", [0.0, 0.5, 1.0], [0, 128, 255]),
        ("F", [0.0, 128.0, 255.0], [0, 128, 255]),
        ("F", [-3e38, 0.0, 3e38], [0, 128, 255]),
        ("F", [float("nan"), 1.0, float("inf")], [0, 255, 255]),
        ("F", [float("nan"), float("-inf"), float("nan")], [0, 0, 0]),
    ],
)
def test_integer_and_float_grayscale_is_scaled_by_its_range(mode, values, levels):
    image = Image.fromarray(np.array([values], dtype=np.int32 if mode == "I" else np.float32))
    assert image.mode == mode
    assert [pixel[0] for pixel in pixels_of(to_rgb(image))] == levels


@pytest.mark.parametrize("mode", ["RGBA", "LA", "La", "RGBa", "PA"])
def test_transparent_image_becomes_white(mode):
    invisible = Image.new(mode, (8, 8))
    assert torch.equal(pixel_values(invisible), torch.ones(3, IMAGE_SIZE, IMAGE_SIZE))


def test_transparent_color_of_a_file_becomes_white():
    palette = Image.new("P", (2, 1), 0)
    palette.putpalette([255, 0, 0, 0, 0, 255])
    palette.putpixel((1, 0), 1)
    assert pixels_of(to_rgb(reopened(palette, "PNG", transparency=0))) == [(255, 255, 255), (0, 0, 255)]
    red = reopened(Image.new("RGB", (1, 1), (255, 0, 0)), "PNG", transparency=(255, 0, 0))
    assert pixels_of(to_rgb(red)) == [(255, 255, 255)]


def test_half_transparent_pixel_is_blended_with_white():
    assert pixels_of(to_rgb(Image.new("RGBA", (1, 1), (0, 0, 0, 128)))) == [(127, 127, 127)]


@pytest.mark.parametrize("file_format", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied_once(orientation, file_format):
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {} if file_format in ("PNG", "TIFF") else {"quality": 95}
    stored = reopened(noise(40, 20), file_format, exif=exif, **options)
    upright = ImageOps.exif_transpose(reopened(noise(40, 20), file_format, exif=exif, **options)).convert("RGB")
    assert upright.size == ((20, 40) if orientation >= 5 else (40, 20))
    rgb = to_rgb(stored)
    assert np.array_equal(np.asarray(rgb), np.asarray(upright))
    assert np.array_equal(np.asarray(to_rgb(rgb)), np.asarray(upright)), "rotated twice"
    assert torch.equal(pixel_values(stored), pixel_values(Image.fromarray(np.array(upright))))


@pytest.mark.parametrize("exif", [b"garbage", b"Exif\0\0II*\0", b"Exif\0\0II*\0\x08\0\0\0\xff\xff", b""])
@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
def test_corrupt_exif_is_ignored(exif):
    image = noise(4, 2)
    image.info["exif"] = exif
    assert np.array_equal(np.asarray(to_rgb(image)), np.asarray(image))


def test_valid_orientation_of_partly_corrupt_exif_is_applied():
    orientation = struct.pack("<HHII", 0x0112, 3, 1, 6)
    offset_beyond_the_end = struct.pack("<HHII", 0x8769, 4, 1, 9999)
    image = noise(4, 2)
    image.info["exif"] = b"Exif\0\0II*\0" + struct.pack("<IH", 8, 2) + orientation + offset_beyond_the_end + bytes(4)
    assert to_rgb(image).size == (2, 4)


@pytest.mark.parametrize("file_format", ["GIF", "WEBP", "PNG", "TIFF"])
def test_first_frame_of_an_animation_is_used_at_any_position(file_format):
    frames = [constant(value) for value in (255, 0, 100)]
    options = {"lossless": True} if file_format == "WEBP" else {}
    animation = reopened(frames[0], file_format, save_all=True, append_images=frames[1:], **options)
    assert animation.n_frames == 3
    for position in (0, 2):
        animation.seek(position)
        assert pixels_of(to_rgb(animation))[0] == (255, 255, 255)
        assert animation.tell() == position


def test_to_rgb_does_not_modify_its_argument():
    image = noise(5, 3)
    before = image.tobytes()
    to_rgb(image).putpixel((0, 0), (1, 2, 3))
    assert image.tobytes() == before and image.mode == "RGB"


@pytest.mark.parametrize("size", [(0, 0), (0, 5), (5, 0)])
def test_image_without_pixels_is_rejected(size):
    with pytest.raises(InputError, match=rf"at least one pixel, got {size[0]} x {size[1]}"):
        to_rgb(Image.new("RGB", size))


@pytest.mark.parametrize("value", [None, "cat.png", np.zeros((4, 4, 3), dtype=np.uint8)])
def test_value_that_is_not_an_image_is_rejected(value):
    with pytest.raises(InputError, match="must be a PIL image"):
        to_rgb(value)


@pytest.mark.parametrize("file_format", ["JPEG", "PNG", "GIF", "BMP", "QOI"])
def test_truncated_file_is_rejected(file_format):
    file = BytesIO()
    noise(64, 64).save(file, file_format)
    truncated = Image.open(BytesIO(file.getvalue()[: len(file.getvalue()) // 2]))
    with pytest.raises(InputError, match="cannot be decoded"):
        to_rgb(truncated)


def pixels_of(image: Image.Image) -> list[tuple[int, int, int]]:
    return [tuple(map(int, pixel)) for pixel in np.asarray(image).reshape(-1, 3)]


# Config files


def write_settings(folder: Path, name: str = "preprocessor_config.json", **settings: object) -> None:
    (folder / name).write_text(json.dumps(settings), encoding="utf-8")


def test_mean_std_and_filter_of_a_folder(tmp_path):
    write_settings(tmp_path, image_mean=[0.1, 0.2, 0.3], image_std=0.25, resample=2)
    settings = ImageSettings.from_folder(tmp_path, IMAGE_SIZE)
    assert settings == ImageSettings(mean=(0.1, 0.2, 0.3), std=(0.25,) * 3, resample=2)


@pytest.mark.parametrize(
    "settings",
    [
        {"do_resize": False},
        {"do_rescale": False},
        {"do_normalize": False},
        {"do_center_crop": True},
        {"do_pad": True},
        {"rescale_factor": 1.0},
        {"size": {"height": 224, "width": 224}},
        {"size": {"shortest_edge": 56}},
        {"resample": 9},
        {"image_mean": [0.5, 0.5]},
        {"image_std": [0.5, 0.5, 0.0]},
        {"image_mean": [None, None, None]},
        {"image_mean": "0.5"},
        {"image_std": {"r": 0.5}},
        {"image_std": math.inf},
        {"rescale_factor": "1/255"},
        {"rescale_factor": [1 / 255]},
    ],
)
def test_unsupported_preprocessing_is_rejected(tmp_path, settings):
    write_settings(tmp_path, **settings)
    with pytest.raises(InputError, match=next(iter(settings))):
        ImageSettings.from_folder(tmp_path, IMAGE_SIZE)


@pytest.mark.parametrize("settings", ["none", [1], 0.5])
def test_image_processor_of_transformers_5_must_be_an_object(tmp_path, settings):
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": settings}), encoding="utf-8")
    with pytest.raises(InputError, match="must be a JSON object"):
        ImageSettings.from_folder(tmp_path, IMAGE_SIZE)


@pytest.mark.parametrize("text", ["{", "[]"])
def test_corrupt_preprocessor_config_is_named_in_the_error(tmp_path, text):
    (tmp_path / "preprocessor_config.json").write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=r"preprocessor_config\.json"):
        ImageSettings.from_folder(tmp_path, IMAGE_SIZE)
