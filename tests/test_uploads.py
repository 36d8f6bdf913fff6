"""Uploaded files and the images made from them. tests/test_hostile_input.py has unusual and corrupt files."""

from __future__ import annotations

import io

import pytest
from fake_model import PROCESSOR
from PIL import Image

from paligemma.errors import InputError
from paligemma.webapp.images import PREVIEW_SIDE, fit_to_model, make_input_image
from paligemma.webapp.render.image_view import image_view_state
from paligemma.webapp.uploads import FORMATS, MAX_PIXELS, open_image, uploaded_path


def test_only_paths_marked_by_gradio_are_uploads():
    marked = {"meta": {"_type": "gradio.FileData"}}
    assert uploaded_path({"path": "a.png", **marked}) == "a.png"
    unmarked = {"path": "/etc/passwd"}
    for upload in (
        None,
        "/etc/passwd",
        unmarked,
        {**unmarked, "meta": None},
        {**unmarked, "meta": {}},
        {"path": 1, **marked},
    ):
        assert uploaded_path(upload) is None


# Decoding


@pytest.mark.parametrize("name", FORMATS)
def test_the_content_determines_the_format(tmp_path, name):
    path = tmp_path / "image.anything"
    Image.new("RGB", (6, 4)).save(path, format=name)
    assert open_image(path).size == (6, 4)


def test_exif_orientation_is_applied(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (6, 4)).save(tmp_path / "rotated.jpg", exif=exif)
    assert open_image(tmp_path / "rotated.jpg").size == (4, 6)


def test_a_small_file_with_too_many_pixels_is_rejected(tmp_path):
    Image.new("1", (13_000, 13_000)).save(tmp_path / "bomb.png")
    assert (tmp_path / "bomb.png").stat().st_size < 50_000
    with pytest.raises(InputError, match=f"at most {MAX_PIXELS // 10**6} megapixels .* got 13000 × 13000"):
        open_image(tmp_path / "bomb.png")


@pytest.mark.parametrize("content", [b"", b"not an image", b"<svg xmlns='http://www.w3.org/2000/svg'/>"])
def test_other_files_are_rejected(tmp_path, content):
    (tmp_path / "file.png").write_bytes(content)
    with pytest.raises(InputError, match="Unsupported or corrupt image"):
        open_image(tmp_path / "file.png")


def test_a_truncated_image_is_rejected(tmp_path):
    Image.effect_noise((64, 64), 50).save(tmp_path / "whole.png")
    (tmp_path / "half.png").write_bytes((tmp_path / "whole.png").read_bytes()[:1000])
    with pytest.raises(InputError, match="Corrupt image"):
        open_image(tmp_path / "half.png")


def test_a_request_without_an_image_is_rejected():
    for nothing in (None, ""):
        with pytest.raises(InputError, match="Choose an image"):
            open_image(nothing)


# Input image


def test_resizing_the_model_input_again_does_not_change_it():
    image = Image.effect_noise((90, 40), 60).convert("RGB")
    model_input = make_input_image(image, PROCESSOR).model_input
    assert PROCESSOR.resize(model_input) == PROCESSOR.resize(image)


def test_the_preview_is_small_and_keeps_the_aspect_ratio():
    image = make_input_image(Image.new("RGB", (3000, 1500)), PROCESSOR)
    assert Image.open(io.BytesIO(image.preview)).size == (PREVIEW_SIDE, PREVIEW_SIDE // 2)
    state = image_view_state(image, 16)
    assert (state["width"], state["height"], state["side"], state["patches"]) == (3000, 1500, 56, 16)
    assert image_view_state(None) is None


def test_an_image_is_resized_from_its_preview_if_the_file_is_missing():
    image = make_input_image(Image.new("RGB", (90, 40), "red"), PROCESSOR)
    other = type(PROCESSOR)(**{**vars(PROCESSOR), "image_size": 28, "resize": lambda image: image.resize((28, 28))})
    assert fit_to_model(image, PROCESSOR) is image
    assert fit_to_model(image, other).model_input.size == (28, 28)
