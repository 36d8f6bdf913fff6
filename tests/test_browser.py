"""What a person does on the page, in headless Chromium, with a scripted model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fake_model import FakeModel

import app

pytestmark = pytest.mark.browser

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
PIECES = ("<loc0100>", "▁cat", "\n", *HOSTILE)
SHOWN = ["<loc0100>", "␣cat", "↵", *(piece.replace(" ", "␣") for piece in HOSTILE), "<eos>"]


@pytest.fixture(scope="module")
def model() -> FakeModel:
    return FakeModel(PIECES, seconds_a_token=0.1)


@pytest.fixture(scope="module")
def url(model) -> Iterator[str]:
    host = app.ModelHost("scripted <b>model</b>", lambda progress: model)
    host.start()
    blocks = app.build_app(host)
    app.launch(blocks, prevent_thread_lock=True, quiet=True)
    yield blocks.local_url
    blocks.close()


@pytest.fixture
def page(browser, url, picture_file) -> Iterator:
    """The page with a picture in it. No dialog and no script error may appear on it."""
    page = browser.new_page(viewport={"width": 1280, "height": 900}, color_scheme="light")
    page.set_default_timeout(60_000)
    alarms: list[str] = []
    page.on("dialog", lambda dialog: (alarms.append(dialog.message), dialog.dismiss()))
    page.on("pageerror", lambda error: alarms.append(str(error)))
    page.goto(url)
    page.wait_for_selector("#badge .notice.done")
    page.set_input_files("#picture input[type=file]", str(picture_file))
    page.wait_for_selector("#picture img")
    yield page
    page.close()
    assert not alarms


def run(page, prompt: str = "detect cat") -> None:
    page.fill("#prompt textarea", prompt)
    page.press("#prompt textarea", "Enter")


def wait_until_done(page) -> None:
    page.wait_for_selector("#notice .notice.done")


def tokens(page) -> list[str]:
    return page.locator("#tokens tbody td.text").all_text_contents()


def test_enter_runs_and_tokens_appear_one_by_one(page, model):
    run(page)
    seen = [page.wait_for_function(f"document.querySelectorAll('#tokens tbody tr').length >= {n}") for n in (1, 4, 8)]
    assert seen and page.locator("#notice .notice.busy").count() == 1
    wait_until_done(page)
    assert model.requests[-1]["prompt"] == "detect cat"
    assert tokens(page) == SHOWN
    assert page.input_value("#answer textarea").endswith("&lt;")


def test_while_it_streams_the_newest_token_s_candidates_are_shown(page):
    page.evaluate(
        """() => {
          window.titles = [];
          const title = document.querySelector("#candidates .title");
          new MutationObserver(() => window.titles.push(title.textContent)).observe(title, { childList: true });
        }"""
    )
    run(page)
    wait_until_done(page)
    numbers = [int(title.split()[1].rstrip(":")) for title in page.evaluate("titles") if title.startswith("Token ")]
    assert numbers == sorted(numbers) and len(set(numbers)) > 3
    assert page.inner_text("#candidates .title") == f"Token {len(SHOWN)}: <eos>"


def test_text_of_a_model_or_a_person_stays_text(page):
    run(page, "${alert(1)} <img src=x onerror=alert(1)> {{constructor}}")
    wait_until_done(page)
    for number, text in enumerate(SHOWN, start=1):
        page.click(f"#tokens tbody tr:nth-child({number})")
        page.wait_for_function(
            "title => document.querySelector('#candidates .title').textContent === title", arg=f"Token {number}: {text}"
        )
        assert page.locator("#candidates tbody td.text").first.text_content() == text
    assert page.locator("#tokens img, #candidates img, #badge b").count() == 0
    assert "scripted <b>model</b>" in page.inner_text("#badge")


def test_rows_are_chosen_with_the_keyboard_too(page):
    run(page)
    wait_until_done(page)
    page.click("#tokens tbody tr:nth-child(2)")
    for key, number in (("ArrowDown", 3), ("End", len(SHOWN)), ("ArrowUp", len(SHOWN) - 1), ("Home", 1)):
        page.keyboard.press(key)
        page.wait_for_function(
            "start => document.querySelector('#candidates .title').textContent.startsWith(start)",
            arg=f"Token {number}:",
        )
        assert page.locator("#tokens tr[aria-selected=true]").get_attribute("tabindex") == "0"


def test_stop_ends_the_run_and_keeps_what_was_written(page, model, monkeypatch):
    monkeypatch.setattr(model, "seconds_a_token", 1.0)
    run(page)
    page.wait_for_function("document.querySelectorAll('#tokens tbody tr').length >= 3")
    page.click("#stop")
    page.wait_for_function("document.querySelector('#notice .words').textContent.startsWith('Stopped')")
    assert 3 <= len(tokens(page)) < len(SHOWN)


def test_run_begins_anew_at_once_while_a_run_is_stopped_or_under_way(page, model, monkeypatch):
    monkeypatch.setattr(model, "seconds_a_token", 1.0)
    run(page, "detect one")
    page.wait_for_function("document.querySelectorAll('#tokens tbody tr').length >= 2")
    page.click("#stop")
    run(page, "detect two")
    run(page, "detect three")
    monkeypatch.setattr(model, "seconds_a_token", 0.0)
    wait_until_done(page)
    assert model.requests[-1]["prompt"] == "detect three"
    assert tokens(page) == SHOWN
    assert page.inner_text("#notice").startswith("The answer is complete")


def test_a_bad_request_is_a_line_of_the_page(page):
    run(page)
    wait_until_done(page)
    page.click("#picture button[aria-label='Remove Image'], #picture button[aria-label='Clear']")
    page.click("#run")
    page.wait_for_selector("#notice .notice.error")
    assert page.inner_text("#notice") == "Choose a picture first."
    assert tokens(page) == SHOWN  # the last answer stays


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_fits_a_phone(browser, url, picture_file, scheme):
    page = browser.new_page(viewport={"width": 390, "height": 844}, color_scheme=scheme)
    page.goto(url)
    page.wait_for_selector("#badge .notice.done")
    page.set_input_files("#picture input[type=file]", str(picture_file))
    page.wait_for_selector("#picture img")
    run(page)
    wait_until_done(page)
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    colours = page.evaluate(
        "() => ['color', 'backgroundColor'].map(name => getComputedStyle(document.querySelector('#candidates'))[name])"
    )
    page.close()
    lightness = [sum(map(int, colour[4:-1].split(","))) for colour in colours]
    assert (lightness[0] < lightness[1]) == (scheme == "light")
