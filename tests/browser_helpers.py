"""Helpers of the browser tests: open the page, run a prompt and read what the page shows.

conftest.py has the fixtures: `model`, a scripted model that takes 100 ms per token; `url` of its server; and `page`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from fake_model import FakeModel, fake_image_shares, fake_inspection
from webapp_helpers import BUNDLED_MASK_DECODER

from paligemma import lens
from paligemma.webapp import server, ui
from paligemma.webapp.served_models import ServedModel

# Long, for machines under load.
TIMEOUT_MS = int(os.environ.get("BROWSER_TIMEOUT_S", "60")) * 1000

HOSTILE = (
    "${alert(1)}",
    "`+alert(1)+`",
    "\\u",
    "</script>",
    "<img src=x onerror=alert(1)>",
    "{{constructor}}",
    "<b onmouseover=alert(1)>",
    "&lt;",
)
PIECES = ("▁a", "▁cat", "\n", *HOSTILE)
SHOWN = ["␣a", "␣cat", "↵", *(piece.replace(" ", "␣") for piece in HOSTILE), "<eos>"]
# A box from 1/4 to 3/4 of both sides with a hostile label, and an object with one location token.
BOXES = ("<loc0256>", "<loc0256>", "<loc0768>", "<loc0768>", *HOSTILE[:1], "▁;", "<loc0001>", "▁dog", *["▁and"] * 8)


@contextmanager
def serve(model: FakeModel) -> Iterator[str]:
    """Serve the page for a scripted model. Yields its address."""
    served_model = ServedModel("scripted <b>model</b>", lambda progress: model, [BUNDLED_MASK_DECODER])
    served_model.start()
    originals = (lens.inspect, lens.image_shares)
    lens.inspect, lens.image_shares = fake_inspection, fake_image_shares
    blocks = ui.build_app(served_model)
    server.launch(blocks, prevent_thread_lock=True, quiet=True)
    yield blocks.local_url
    blocks.close()
    lens.inspect, lens.image_shares = originals


def open_page(browser, url, width: int = 1280, **settings):
    page = browser.new_page(viewport={"width": width, "height": 900}, **{"locale": "en-US", **settings})
    page.set_default_timeout(TIMEOUT_MS)
    page.goto(url)
    page.wait_for_selector("#badge .status.done")
    page.wait_for_selector("#tasks .chip")
    return page


def run(page, prompt: str = "detect cat") -> None:
    page.fill("#prompt textarea", prompt)
    page.evaluate(
        """() => {  // observed by the page itself, because the run may end before the test checks
          window.wasBusy = false;
          const observer = new MutationObserver((changes) => {
            window.wasBusy ||= changes.some((change) => /busy/.test(change.oldValue + change.target.className));
          });
          const status = document.querySelector("#status .status");
          observer.observe(status, { attributeFilter: ["class"], attributeOldValue: true });
        }"""
    )
    page.press("#prompt textarea", "Enter")
    page.wait_for_function("window.wasBusy")


def wait_until_done(page) -> None:
    page.wait_for_selector("#status .status.done")


def run_until_done(page, prompt: str = "detect cat") -> None:
    run(page, prompt)
    wait_until_done(page)


def shown_tokens(page) -> list[str]:
    return page.locator("#token-strip .token").all_text_contents()


def selected_token(page) -> str:
    return page.inner_text("#candidates .header strong")


def wait_for_tokens(page, count: int) -> None:
    page.wait_for_function(f"document.querySelectorAll('#token-strip .token').length >= {count}")
