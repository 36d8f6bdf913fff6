"""Take the README's screenshots: an example's answer at 1280 and 390 pixels, in the light and the dark theme.

    python -m paligemma.tools.screenshots [--model FOLDER_OR_HUB_ID] [--to FOLDER] [--example 11] [--locale en-US]

The token with the highest entropy is selected. Requires Chromium or Chrome.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import gradio as gr
from playwright.sync_api import sync_playwright

from paligemma import paths
from paligemma.webapp import cli, server, ui

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# Width of the window -> its height, in pixels.
SIZES = {1280: 1000, 390: 844}
Theme = Literal["light", "dark"]
THEMES: tuple[Theme, ...] = ("light", "dark")
TIMEOUT_MS = 300_000


def find_browser() -> str:
    """Path of an installed browser; SystemExit if there is none."""
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        raise SystemExit(f"No browser found. Install one of {', '.join(BROWSERS)}.")
    return path


def open_page(browser: Browser, url: str, width: int, theme: Theme = "light", locale: str = "en-US") -> Page:
    """Open the page and wait until its model is loaded."""
    height = SIZES.get(width, 1000)
    page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=theme, locale=locale)
    page.set_default_timeout(TIMEOUT_MS)
    page.goto(url)
    page.wait_for_selector("#badge .status.done")
    return page


def run_example(page: Page, index: int) -> None:
    """Run an example and wait for its answer."""
    page.click(f"#example-chips button >> nth={index}")
    page.wait_for_selector("#image-view .figure img")
    page.wait_for_selector("#status .status.done")


def warm_up(browser: Browser, url: str, index: int) -> None:
    """Run an example once, because the first run is slower than later ones."""
    page = open_page(browser, url, 1280)
    run_example(page, index)
    page.close()


def select_uncertain_token(page: Page) -> None:
    """Select the token with the highest entropy, to show its candidates."""
    entropies = page.locator("#token-strip .token").evaluate_all(
        """(tokens) => tokens.map((token) => {
          token.click();
          return Number(document.querySelector("#candidates .metrics b").textContent);
        })"""
    )
    page.click(f"#token-strip .token >> nth={entropies.index(max(entropies))}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="checkpoint folder or hub id (default: the bundled model)")
    parser.add_argument("--to", type=Path, default=paths.ASSETS / "screenshots", help="default: %(default)s")
    parser.add_argument("--example", type=int, default=11, help="index of the example (default: %(default)s)")
    parser.add_argument("--locale", default="en-US", help="language of the browser (default: %(default)s)")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    blocks = serve(arguments.model)
    arguments.to.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_browser(), args=["--no-sandbox"])
        warm_up(browser, str(blocks.local_url), arguments.example)
        for width in SIZES:
            for theme in THEMES:
                page = open_page(browser, str(blocks.local_url), width, theme, arguments.locale)
                run_example(page, arguments.example)
                select_uncertain_token(page)
                page.mouse.move(0, 0)
                page.wait_for_timeout(500)  # until animations have ended
                path = arguments.to / f"page-{width}-{theme}.png"
                page.screenshot(path=path, full_page=True, animations="disabled", timeout=TIMEOUT_MS)
                print(path)
                page.close()
        browser.close()
    blocks.close()


def serve(model: str | None) -> gr.Blocks:
    """Serve the page for one model on a free port."""
    served_models = cli.build_served_models(cli.build_parser().parse_args(["--model", model] if model else []))
    served_models[0].start()
    blocks = ui.build_app(*served_models)
    server.launch(blocks, prevent_thread_lock=True, quiet=True)
    return blocks


if __name__ == "__main__":
    main()
