"""Data for the image view: the image and the model input."""

from __future__ import annotations

from typing import Any

from paligemma.webapp.images import InputImage, data_url, encode_png


def image_view_state(image: InputImage | None, num_patches: int | None = None) -> dict[str, Any] | None:
    """Return the value of the image view; None without an image.

    Args:
        num_patches: number of image tokens of the model; None if no model is loaded.

    Returns:
        {"src": data URL of the preview, "width", "height": size of the image in pixels, "model_input": data URL,
        "side": width of the model input in pixels, "patches": `num_patches`}
    """
    if image is None:
        return None
    return {
        "src": data_url(image.preview, "image/jpeg"),
        "width": image.width,
        "height": image.height,
        "model_input": data_url(encode_png(image.model_input), "image/png"),
        "side": image.model_input.width,
        "patches": num_patches,
    }
