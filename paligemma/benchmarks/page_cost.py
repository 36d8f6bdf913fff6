"""What the page costs: time beside the same generation without it, bytes a page event, updates a second.

    python -m paligemma.benchmarks.page_cost [--model FOLDER_OR_HUB_ID] [--tokens 60]

Once as fast as the model is, and once with a model that takes 100 ms a token. Drives an installed Chromium or Chrome.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Generator
from contextlib import closing
from typing import TYPE_CHECKING, Any

from playwright.sync_api import sync_playwright

import paligemma
from paligemma import paths
from paligemma.tools.screenshots import find_browser, open_page
from paligemma.webapp import server, ui
from paligemma.webapp.images import open_image
from paligemma.webapp.served_models import ServedModel

if TYPE_CHECKING:
    from playwright.sync_api import Browser

PICTURE = paths.ASSETS / "examples" / "garden.png"
PROMPT = "caption en"
# From the key press to the finished answer, in milliseconds, by the browser's own clock.
STOPWATCH = """() => {
  let began;
  document.addEventListener("keydown", () => (began = performance.now()), { capture: true, once: true });
  window.stopwatch = new Promise((stop) => {
    const notice = document.querySelector("#status .part");
    const look = () => began && notice.classList.contains("done") && stop(performance.now() - began);
    new MutationObserver(look).observe(notice, { attributes: true });
  });
}"""


class PacedModel:
    """A model that writes exactly `num_tokens` tokens, each after at least `seconds_a_token`.

    Its likeliest first token is repeated by force, so that no end token ends the measurement.
    """

    def __init__(self, model: paligemma.PaliGemma, num_tokens: int, seconds_a_token: float) -> None:
        self._model = model
        self._num_tokens = num_tokens
        self._seconds_a_token = seconds_a_token

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def stream(self, image: Any, prompt: str, **options: Any) -> Generator[paligemma.Step, None, Any]:
        with closing(self._model.stream(image, prompt)) as stream:
            likely = [candidate.token_id for candidate in next(stream).top]
        repeated = next(token_id for token_id in likely if token_id not in self._model.config.eos_token_ids)
        changes = {"forced_ids": (repeated,) * self._num_tokens, "max_new_tokens": self._num_tokens}
        steps = self._model.stream(image, prompt, **{**options, **changes})
        while True:
            began = time.perf_counter()
            try:
                step = next(steps)
            except StopIteration as end:
                return end.value
            time.sleep(max(0.0, self._seconds_a_token - (time.perf_counter() - began)))
            yield step


def seconds_alone(model: PacedModel) -> float:
    """Seconds of the same generation without a page."""
    image = open_image(PICTURE)
    began = time.perf_counter()
    for _ in model.stream(image, PROMPT, top_n=10):
        pass
    return time.perf_counter() - began


def measure_page(browser: Browser, model: PacedModel) -> tuple[float, list[tuple[float, int]]]:
    """Seconds from Enter to the finished answer, and (time, bytes) of everything that came over the wire."""
    served_model = ServedModel("bench", lambda progress: model)
    served_model.start()
    blocks = ui.build_app(served_model)
    server.launch(blocks, prevent_thread_lock=True, quiet=True)
    page = open_page(browser, blocks.local_url, 1280)
    page.set_input_files("#image input[type=file]", str(PICTURE))
    page.wait_for_selector("#image-view .picture img")
    page.fill("#prompt textarea", PROMPT)
    received: list[tuple[float, int]] = []
    network = page.context.new_cdp_session(page)
    network.send("Network.enable")
    network.on("Network.dataReceived", lambda event: received.append((event["timestamp"], event["dataLength"])))
    page.evaluate(STOPWATCH)
    page.press("#prompt textarea", "Enter")
    seconds = page.evaluate("stopwatch") / 1000
    page.close()
    blocks.close()
    return seconds, received


def report(name: str, browser: Browser, model: PacedModel, num_tokens: int) -> None:
    alone = seconds_alone(model)
    with_page, received = measure_page(browser, model)
    streamed = [size for _, size in received if size > 200]  # heartbeats and acknowledgements are smaller
    third = max(1, len(streamed) // 3)
    early, late = (statistics.median(part) for part in (streamed[:third], streamed[-third:]))
    print(f"{name}: {num_tokens} tokens")
    print(f"  alone {alone:.2f} s, with the page {with_page:.2f} s: {100 * (with_page / alone - 1):+.1f} %")
    print(f"  {len(streamed)} events, {len(streamed) / with_page:.1f} a second")
    print(f"  bytes an event: {early:.0f} in the first third, {late:.0f} in the last")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a folder or a hub id (default: the bundled model)")
    parser.add_argument("--tokens", type=int, default=60, help="default: %(default)s")
    arguments = parser.parse_args()
    vlm = paligemma.load(arguments.model)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_browser(), args=["--no-sandbox"])
        for name, seconds in (("at 100 ms a token", 0.1), ("as fast as it is", 0.0)):
            report(name, browser, PacedModel(vlm, arguments.tokens, seconds), arguments.tokens)
        browser.close()


if __name__ == "__main__":
    main()
