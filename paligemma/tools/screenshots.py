"""Take the README's pictures of the page: 1280 and 390 pixels wide, light and dark, with an example that has run.

    python -m paligemma.tools.screenshots [--model FOLDER_OR_HUB_ID] [--to FOLDER] [--example 5]

Drives an installed Chromium or Chrome.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import gradio as gr
from playwright.sync_api import sync_playwright

from paligemma import paths
from paligemma.webapp import cli, server, ui

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
WIDTHS = {1280: 1000, 390: 844}
SCHEMES = ("light", "dark")
TIMEOUT_MS = 300_000


def find_browser() -> str:
    """The path of an installed browser; SystemExit where there is none."""
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        raise SystemExit(f"none of {', '.join(BROWSERS)} is installed")
    return path


def open_page(browser: Browser, url: str, width: int, scheme: str = "light") -> Page:
    """The page in English, once its model is ready."""
    height = WIDTHS.get(width, 1000)
    page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme, locale="en-US")
    page.set_default_timeout(TIMEOUT_MS)
    page.goto(url)
    page.wait_for_selector("#badge .status.done")
    return page


def run_example(page: Page, number: int) -> None:
    """Press an example, counted from 0, and wait for its answer."""
    page.click(f"#example-chips button >> nth={number}")
    page.wait_for_selector("#image-view .picture img")
    page.wait_for_selector("#status .status.done")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a folder or a hub id (default: the bundled model)")
    parser.add_argument("--to", type=Path, default=paths.ASSETS / "screenshots", help="default: %(default)s")
    parser.add_argument("--example", type=int, default=5, help="counted from 0 (default: %(default)s)")
    arguments = parser.parse_args()
    blocks = serve(arguments.model)
    arguments.to.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_browser(), args=["--no-sandbox"])
        for width in WIDTHS:
            for scheme in SCHEMES:
                page = open_page(browser, blocks.local_url, width, scheme)
                run_example(page, arguments.example)
                page.mouse.move(0, 0)
                page.wait_for_timeout(500)  # until what moves has come to rest
                path = arguments.to / f"page-{width}-{scheme}.png"
                page.screenshot(path=path, full_page=True, animations="disabled", timeout=TIMEOUT_MS)
                print(path)
                page.close()
        browser.close()
    blocks.close()


def serve(model: str | None) -> gr.Blocks:
    """The page of one model, on a free port."""
    served_models = cli.build_served_models(cli.build_parser().parse_args(["--model", model] if model else []))
    served_models[0].start()
    blocks = ui.build_app(*served_models)
    server.launch(blocks, prevent_thread_lock=True, quiet=True)
    return blocks


if __name__ == "__main__":
    main()
