"""Measure the overhead of the page: time added to generation, bytes per update, updates per second.

    python -m paligemma.benchmarks.page_cost [--model FOLDER_OR_HUB_ID] [--tokens 60]

Runs once at 100 ms or more per token, and once at full speed. Requires Chromium or Chrome.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Generator
from contextlib import closing
from typing import TYPE_CHECKING, Any, cast

from playwright.sync_api import sync_playwright

import paligemma
from paligemma import paths
from paligemma.tools.screenshots import find_browser, open_page
from paligemma.webapp import server, ui
from paligemma.webapp.served_models import ServedModel
from paligemma.webapp.uploads import open_image

if TYPE_CHECKING:
    from playwright.sync_api import Browser

IMAGE = paths.ASSETS / "examples" / "garden.png"
PROMPT = "caption en"
# Smaller messages are heartbeats and acknowledgements.
MIN_UPDATE_BYTES = 200
# Milliseconds from the key press to the complete answer, by the browser's clock.
STOPWATCH = """() => {
  let start;
  document.addEventListener("keydown", () => (start = performance.now()), { capture: true, once: true });
  window.stopwatch = new Promise((resolve) => {
    const status = document.querySelector("#status .part");
    const check = () => start && status.classList.contains("done") && resolve(performance.now() - start);
    new MutationObserver(check).observe(status, { attributes: true });
  });
}"""


class PacedModel:
    """A model that generates exactly `num_tokens` tokens, each in at least `seconds_per_token`.

    Uses `forced_ids` to repeat its most likely first token that is not an EOS token.
    """

    def __init__(self, model: paligemma.PaliGemma, num_tokens: int, seconds_per_token: float) -> None:
        self._model = model
        self._num_tokens = num_tokens
        self._seconds_per_token = seconds_per_token

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def stream(self, image: Any, prompt: str, **options: Any) -> Generator[paligemma.Step, None, Any]:
        with closing(self._model.stream(image, prompt)) as stream:
            candidates = [candidate.token_id for candidate in next(stream).top]
        repeated = next(token_id for token_id in candidates if token_id not in self._model.config.eos_token_ids)
        changes = {"forced_ids": (repeated,) * self._num_tokens, "max_new_tokens": self._num_tokens}
        steps = self._model.stream(image, prompt, **{**options, **changes})
        while True:
            start = time.perf_counter()
            try:
                step = next(steps)
            except StopIteration as end:
                return end.value
            time.sleep(max(0.0, self._seconds_per_token - (time.perf_counter() - start)))
            yield step


def measure_generation(model: PacedModel) -> float:
    """Seconds of generation without the page."""
    image = open_image(IMAGE)
    start = time.perf_counter()
    for _ in model.stream(image, PROMPT, top_n=10):
        pass
    return time.perf_counter() - start


def measure_page(browser: Browser, model: PacedModel) -> tuple[float, list[int]]:
    """Seconds from Enter to the complete answer, and the size in bytes of each page update."""
    served_model = ServedModel("benchmark", lambda progress: cast(paligemma.PaliGemma, model))
    served_model.start()
    blocks = ui.build_app(served_model)
    server.launch(blocks, prevent_thread_lock=True, quiet=True)
    page = open_page(browser, str(blocks.local_url), 1280)
    page.set_input_files("#image input[type=file]", str(IMAGE))
    page.wait_for_selector("#image-view .figure img")
    page.fill("#prompt textarea", PROMPT)
    received: list[int] = []
    network = page.context.new_cdp_session(page)
    network.send("Network.enable")
    network.on("Network.dataReceived", lambda event: received.append(event["dataLength"]))
    page.evaluate(STOPWATCH)
    page.press("#prompt textarea", "Enter")
    seconds = page.evaluate("stopwatch") / 1000
    page.close()
    blocks.close()
    return seconds, [size for size in received if size > MIN_UPDATE_BYTES]


def report(name: str, browser: Browser, model: PacedModel, num_tokens: int) -> None:
    """Measure one model and print the results."""
    without_page = measure_generation(model)
    with_page, updates = measure_page(browser, model)
    third = max(1, len(updates) // 3)
    first, last = (statistics.median(sizes) for sizes in (updates[:third], updates[-third:]))
    print(f"{name}: {num_tokens} tokens")
    added = 100 * (with_page / without_page - 1)
    print(f"  without page {without_page:.2f} s, with page {with_page:.2f} s: {added:+.1f} %")
    print(f"  {len(updates)} updates, {len(updates) / with_page:.1f} per second")
    print(f"  median bytes per update: {first:.0f} in the first third, {last:.0f} in the last")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="checkpoint folder or hub id (default: the bundled model)")
    parser.add_argument("--tokens", type=int, default=60, help="default: %(default)s")
    arguments = parser.parse_args()
    vlm = paligemma.load(arguments.model)
    measure_generation(PacedModel(vlm, 2, 0.0))  # warm up; later runs use cached image features
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_browser(), args=["--no-sandbox"])
        for name, seconds in (("100 ms per token", 0.1), ("full speed", 0.0)):
            report(name, browser, PacedModel(vlm, arguments.tokens, seconds), arguments.tokens)
        browser.close()


if __name__ == "__main__":
    main()
