"""What several test files share: a picture, a tiny random checkpoint, and a browser."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_models import tiny_model

from paligemma import checkpoint
from paligemma.benchmarks.tiny_tokenizer import build_tiny_tokenizer
from paligemma.masks import MaskDecoder

os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")
# Uploads are named by their content, and an app that ends deletes its own: so no two test runs may share a folder.
_uploads = tempfile.TemporaryDirectory(prefix="paligemma-tests-")
os.environ["GRADIO_TEMP_DIR"] = _uploads.name
torch.set_num_threads(1)  # the models are tiny: more threads only wait for one another

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in the hub's layout with a random PaliGemma 2 that answers with varied nonsense."""
    folder = tmp_path_factory.mktemp("checkpoint") / "tiny-random"
    checkpoint.save_model(tiny_model("paligemma2"), folder)
    build_tiny_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="session")
def picture_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A PNG of 64 x 48 pixels."""
    path = tmp_path_factory.mktemp("pictures") / "picture.png"
    Image.linear_gradient("L").resize((64, 48)).convert("RGB").save(path)
    return path


@pytest.fixture(scope="session")
def vae_oid_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A vae-oid.npz of random numbers, of the right names and shapes."""
    path = tmp_path_factory.mktemp("masks") / "vae-oid.npz"
    torch.manual_seed(0)
    np.savez(path, **{name: value.detach().numpy() for name, value in MaskDecoder().named_parameters()})
    return path


@pytest.fixture(scope="session")
def browser() -> Iterator:
    """Debian's Chromium or another that is installed; none is downloaded. CI has to have one."""
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(f"none of {', '.join(BROWSERS)} is installed")
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield chromium
        chromium.close()
