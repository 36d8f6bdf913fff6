"""Shared fixtures: an image file, a tiny random checkpoint, random mask decoder weights, a browser and the page."""

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
# Gradio names uploads by their content and deletes them on exit, so concurrent test runs need separate folders.
_uploads = tempfile.TemporaryDirectory(prefix="paligemma-tests-")
os.environ["GRADIO_TEMP_DIR"] = _uploads.name
torch.set_num_threads(1)  # more threads only add overhead for tiny models

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in the hub's layout with a random PaliGemma 2 whose answers vary."""
    folder = tmp_path_factory.mktemp("checkpoint") / "tiny-random"
    checkpoint.save_model(tiny_model("paligemma2"), folder)
    build_tiny_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="session")
def image_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A PNG image of 64 x 48 pixels."""
    path = tmp_path_factory.mktemp("images") / "image.png"
    Image.linear_gradient("L").resize((64, 48)).convert("RGB").save(path)
    return path


@pytest.fixture
def update_for_every_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a run yield a page update for every token."""
    monkeypatch.setattr("paligemma.webapp.execution.UPDATE_INTERVAL_S", 0)


@pytest.fixture(scope="session")
def vae_oid_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A vae-oid.npz with random parameters."""
    path = tmp_path_factory.mktemp("masks") / "vae-oid.npz"
    torch.manual_seed(0)
    np.savez(path, **{name: value.detach().numpy() for name, value in MaskDecoder().named_parameters()})
    return path


@pytest.fixture(scope="session")
def browser() -> Iterator:
    """An installed Chromium or Chrome; required in CI, otherwise tests are skipped without it."""
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(f"none of {', '.join(BROWSERS)} is installed")
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def model():
    """A scripted model that takes 100 ms per token, for the tests of the page."""
    from browser_helpers import PIECES
    from fake_model import FakeModel

    return FakeModel(PIECES, seconds_per_token=0.1)


@pytest.fixture(scope="module")
def url(model) -> Iterator[str]:
    """The address of a server with the scripted model."""
    from browser_helpers import serve

    with serve(model) as address:
        yield address


@pytest.fixture
def page(browser, url, image_file) -> Iterator:
    """The page with an image. No dialog and no script error may appear."""
    from browser_helpers import open_page

    page = open_page(browser, url, color_scheme="light")
    problems: list[str] = []
    page.on("dialog", lambda dialog: (problems.append(dialog.message), dialog.dismiss()))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.set_input_files("#image input[type=file]", str(image_file))
    page.wait_for_selector("#image-view .figure img")
    yield page
    page.close()
    assert not problems
