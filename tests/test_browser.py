"""What a person does on the page, in headless Chromium, with a scripted model of 100 ms a token."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from fake_model import FakeModel, fake_image_shares, fake_inspection
from gradio_client import Client, handle_file

from paligemma import lens, paths
from paligemma.webapp import server, ui
from paligemma.webapp.served_models import ServedModel

pytestmark = pytest.mark.browser
# Generous, for machines that have other things to do.
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
# A box from a quarter to three quarters, both ways, with a hostile label, and one that lacks a location.
BOXES = ("<loc0256>", "<loc0256>", "<loc0768>", "<loc0768>", *HOSTILE[:1], "▁;", "<loc0001>", "▁dog", *["▁and"] * 8)


@pytest.fixture(scope="module")
def model() -> FakeModel:
    return FakeModel(PIECES, seconds_per_token=0.1)


@pytest.fixture(scope="module")
def url(model) -> Iterator[str]:
    decoder = paths.ASSETS / "demo" / "mask_decoder.safetensors"
    served_model = ServedModel("scripted <b>model</b>", lambda progress: model, [decoder])
    served_model.start()
    looking = (lens.inspect, lens.image_shares)
    lens.inspect, lens.image_shares = fake_inspection, fake_image_shares
    blocks = ui.build_app(served_model)
    server.launch(blocks, prevent_thread_lock=True, quiet=True)
    yield blocks.local_url
    blocks.close()
    lens.inspect, lens.image_shares = looking


def open_page(browser, url, width: int = 1280, **settings):
    page = browser.new_page(viewport={"width": width, "height": 900}, **{"locale": "en-US", **settings})
    page.set_default_timeout(TIMEOUT_MS)
    page.goto(url)
    page.wait_for_selector("#badge .status.done")
    page.wait_for_selector("#tasks .chip")
    return page


@pytest.fixture
def page(browser, url, picture_file) -> Iterator:
    """The page with a picture in it. No dialog and no script error may appear on it."""
    page = open_page(browser, url, color_scheme="light")
    alarms: list[str] = []
    page.on("dialog", lambda dialog: (alarms.append(dialog.message), dialog.dismiss()))
    page.on("pageerror", lambda error: alarms.append(str(error)))
    page.set_input_files("#image input[type=file]", str(picture_file))
    page.wait_for_selector("#image-view .figure img")
    yield page
    page.close()
    assert not alarms


def run(page, prompt: str = "detect cat") -> None:
    page.fill("#prompt textarea", prompt)
    page.evaluate(
        """() => {  // noticed by the page itself: it may be over before anybody asks
          window.wasBusy = false;
          const observer = new MutationObserver((changes) => {
            window.wasBusy ||= changes.some((change) => /busy/.test(change.oldValue + change.target.className));
          });
          const line = document.querySelector("#status .status");
          observer.observe(line, { attributeFilter: ["class"], attributeOldValue: true });
        }"""
    )
    page.press("#prompt textarea", "Enter")
    page.wait_for_function("window.wasBusy")


def wait_until_done(page) -> None:
    page.wait_for_selector("#status .status.done")


def run_to_the_end(page, prompt: str = "detect cat") -> None:
    run(page, prompt)
    wait_until_done(page)


def pieces(page) -> list[str]:
    return page.locator("#token-strip .token").all_text_contents()


def chosen(page) -> str:
    return page.inner_text("#candidates .header strong")


def wait_for_tokens(page, count: int) -> None:
    page.wait_for_function(f"document.querySelectorAll('#token-strip .token').length >= {count}")


def test_enter_runs_and_chips_and_candidates_appear_one_by_one(page, model):
    page.evaluate(
        """() => {
          window.heads = [];
          const seen = () => window.heads.push(document.querySelector("#candidates .header strong")?.textContent);
          new MutationObserver(seen).observe(document.querySelector("#candidates"), { childList: true, subtree: true });
        }"""
    )
    run(page)
    for count in (1, 4, 8):
        wait_for_tokens(page, count)
    assert page.locator("#status .status.busy").count() == 1
    wait_until_done(page)
    assert model.requests[-1]["prompt"] == "detect cat"
    assert pieces(page) == SHOWN
    assert page.inner_text("#token-strip .text").endswith("&lt;")
    numbers = [int(head.split()[1]) for head in page.evaluate("heads") if head]
    assert numbers == sorted(numbers) and len(set(numbers)) > 3
    assert chosen(page).startswith(f"Token {len(SHOWN)} of {len(SHOWN)}: <eos>")


def test_nothing_jumps_while_the_answer_grows(page):
    run(page)
    wait_for_tokens(page, 1)
    tops = "['#token-strip .curves', '#candidates table'].map((part) => document.querySelector(part).getBoundingClientRect().top)"
    before = page.evaluate(tops)
    wait_until_done(page)
    assert page.evaluate(tops) == before


def test_text_of_a_model_or_a_person_stays_text(page):
    run_to_the_end(page, "${alert(1)} <img src=x onerror=alert(1)> {{constructor}}")
    for index, text in enumerate(SHOWN):
        page.click(f"#token-strip .token[data-index='{index}']")
        assert chosen(page).startswith(f"Token {index + 1} of {len(SHOWN)}: {text}")
        assert page.locator("#candidates tbody td.text").first.text_content() == text
    page.click("#tab-panel-runs")
    assert "<img src=x onerror=alert(1)>" in page.inner_text("#runs")
    assert page.locator("#answer img, #badge b").count() == 0
    assert "scripted <b>model</b>" in page.inner_text("#badge")


def test_tokens_are_chosen_with_the_keyboard_and_on_the_line(page):
    run_to_the_end(page)
    page.click("#token-strip .token[data-index='1']")
    last = len(SHOWN)
    for key, number in (("ArrowRight", 3), ("End", last), ("ArrowLeft", last - 1), ("Home", 1)):
        page.keyboard.press(key)
        assert chosen(page).startswith(f"Token {number} ")
        assert page.locator("#token-strip [aria-selected=true]").get_attribute("tabindex") == "0"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.className").endswith("branch")
    line = page.locator("#token-strip .curves")
    line.click(position={"x": line.bounding_box()["width"] - 12, "y": 20})
    assert chosen(page).startswith(f"Token {last} ")
    for way in ("entropy", "rank", "probability"):
        page.select_option("#token-strip .header select", way)
        assert page.input_value("#token-strip .header select") == way


def test_the_focus_stays_in_its_place_when_a_part_is_drawn_anew(page):
    run_to_the_end(page)
    page.click("#token-strip .token[data-index='1']")
    page.focus("#candidates .pager button:last-child")
    for number in (3, 4):
        page.keyboard.press("Enter")
        assert chosen(page).startswith(f"Token {number} ")
    page.click("#tab-panel-attention")
    page.focus("#attention .inspect")
    page.keyboard.press("Enter")
    page.wait_for_selector("#attention .patches")
    for layer in ("0", "1"):
        page.keyboard.press("ArrowDown")
        assert page.input_value("#attention select >> nth=0") == layer
    page.click("#tab-panel-runs")
    for key, part in (("Space", "#runs input"), ("Enter", "#runs .run"), ("Enter", "#preferences [lang=zh]")):
        page.focus(part)
        page.keyboard.press(key)
        page.wait_for_timeout(200)
        assert page.evaluate("(part) => document.querySelector(part) === document.activeElement", part)


def test_the_chosen_row_and_its_numbers_are_the_step_s(page, url):
    run_to_the_end(page)
    image = str(Path(paths.ASSETS / "examples" / "garden.png"))
    job = Client(url, verbose=False).submit(image=handle_file(image), prompt="detect cat", api_name="/generate")
    steps = [event["step"] for event in job if event["step"]]
    for index in (0, 4):
        page.click(f"#token-strip .token[data-index='{index}']")
        grounds = page.locator("#candidates tr.chosen td").evaluate_all(
            "cells => cells.map((cell) => getComputedStyle(cell).backgroundColor)"
        )
        assert len(set(grounds)) == 1
        cells = page.locator("#candidates tr.chosen td").all_text_contents()
        assert cells[2:4] == [str(steps[index]["token_id"]), f"{steps[index]['logit']:.2f}"]
        ids = page.locator("#candidates tbody td:nth-child(3)").all_text_contents()
        assert ids == [str(candidate["token_id"]) for candidate in steps[index]["top"]]


def test_a_branch_is_answered_anew_and_both_runs_stay(page, model):
    run_to_the_end(page)
    page.click("#token-strip .token[data-index='1']")
    page.click("#candidates tbody tr:nth-child(3) .branch")
    page.wait_for_selector("#status .status.busy")
    wait_until_done(page)
    assert model.requests[-1]["forced_ids"] == (0, 12)
    assert pieces(page) == [SHOWN[0], "␣else", *SHOWN[2:]]
    page.click("#token-strip .token[data-index='0']")
    assert "taken over" in page.inner_text("#candidates .header")
    page.click("#token-strip .token[data-index='1']")
    assert "chosen by hand" in page.inner_text("#candidates .header")
    assert page.locator("#candidates tr.chosen td").nth(2).inner_text() == "12"
    page.click("#tab-panel-runs")
    for tick in page.locator("#runs input[type=checkbox]").all():
        tick.check()
    page.wait_for_selector("#runs .comparison")
    assert page.locator("#runs .different").all_text_contents() == ["␣cat", "␣else"]
    page.click("#runs .tree li:first-child .run")
    page.wait_for_function("document.querySelectorAll('#token-strip .token')[1].textContent === '␣cat'")
    page.wait_for_selector("#runs .comparison")  # side by side they stay
    page.evaluate("document.querySelector('#runs .comparison').dataset.old = ''")
    page.click("#runs .tree li:first-child .run")  # which is there already
    page.wait_for_selector("#runs .comparison:not([data-old])")


def test_one_step_at_a_time(page):
    page.fill("#prompt textarea", "caption en")
    for count in (1, 2, 3):
        page.click("#step")
        wait_for_tokens(page, count)
        page.wait_for_selector("#status .status.idle")
        assert pieces(page) == SHOWN[:count]


@pytest.mark.parametrize("width", [1280, 800, 390])
def test_a_box_is_drawn_in_its_place_at_every_width(browser, url, picture_file, model, monkeypatch, width):
    monkeypatch.setattr(model, "pieces", (*BOXES, "<eos>"))
    page = open_page(browser, url, width)
    page.set_input_files("#image input[type=file]", str(picture_file))  # 64 x 48: not square
    page.wait_for_selector("#image-view .figure img")
    run(page)
    page.wait_for_selector("#image-view .box")
    assert page.locator("#status .status.busy").count() == 1  # as soon as it is complete
    wait_until_done(page)
    image, box = (page.locator(part).bounding_box() for part in ("#image-view .figure img", "#image-view .box"))
    assert image["width"] / image["height"] == pytest.approx(64 / 48, rel=0.02)
    assert (box["x"] - image["x"]) / image["width"] == pytest.approx(0.25, abs=0.01)
    assert (box["y"] - image["y"]) / image["height"] == pytest.approx(0.25, abs=0.01)
    assert box["width"] / image["width"] == pytest.approx(0.5, abs=0.01)
    assert page.inner_text("#image-view .box b").startswith(HOSTILE[0])
    page.click("#tab-panel-objects")
    assert HOSTILE[0] in page.inner_text("#objects tbody")
    assert "1 location tokens instead of 4" in page.inner_text("#objects .problem")
    page.click("#objects tbody tr")
    assert page.locator("#token-strip .token.highlighted").count() == 5
    assert page.locator("#image-view .box.highlighted").count() == 1
    with page.expect_download() as download:
        page.click("#objects .actions button:nth-child(2)")
    assert json.loads(Path(download.value.path()).read_text(encoding="utf-8"))["annotations"]
    page.close()


def test_sixteen_codes_are_drawn_as_a_mask_in_their_box(page, model, monkeypatch):
    monkeypatch.setattr(model, "pieces", (*BOXES[:4], *["<seg010>"] * 16, "▁cat", "<eos>"))
    monkeypatch.setattr(model, "seconds_per_token", 0.0)
    run_to_the_end(page, "segment cat")
    mask = page.locator("#image-view .box .mask")
    assert mask.evaluate("node => getComputedStyle(node).maskImage").startswith('url("data:image/png')
    box, drawn = (page.locator(part).bounding_box() for part in ("#image-view .box", "#image-view .box .mask"))
    assert drawn["width"] == pytest.approx(box["width"], abs=5) and drawn["x"] == pytest.approx(box["x"], abs=5)


def test_attention_is_drawn_over_the_right_patch(page):
    run_to_the_end(page)
    page.click("#token-strip .token[data-index='6']")
    page.click("#tab-panel-attention")
    page.click("#attention .inspect")
    page.wait_for_selector("#attention .patches")
    opacities = page.locator("#attention .patches i").evaluate_all(
        "cells => cells.map((cell) => Number(cell.style.opacity))"
    )
    assert [index for index, opacity in enumerate(opacities) if opacity > 0.5] == [6]
    image, patch = (
        page.locator("#attention .figure").bounding_box(),
        page.locator("#attention i[data-patch='6']").bounding_box(),
    )
    assert (patch["x"] - image["x"]) / image["width"] == pytest.approx(2 / 4, abs=0.01)
    assert (patch["y"] - image["y"]) / image["height"] == pytest.approx(1 / 4, abs=0.01)
    assert image["width"] / image["height"] == pytest.approx(64 / 48, rel=0.02)
    assert "50.0 %" in page.inner_text("#attention") and "not an explanation" in page.inner_text("#attention")
    assert page.locator("#attention tbody tr").count() == 3
    page.select_option("#token-strip .header select", "image attention")
    page.wait_for_selector("#token-strip .token.cool2")
    page.evaluate("document.querySelectorAll('#token-strip .token').forEach((token) => (token.dataset.old = ''))")
    page.click("#tab-panel-runs")
    page.click("#runs .current .run")  # shown again, it is colored again
    page.wait_for_selector("#token-strip .token.cool2:not([data-old])")
    run(page, "detect dog")  # the next answer is colored so too
    wait_for_tokens(page, len(SHOWN))
    page.wait_for_function(f"document.querySelectorAll('#token-strip .token.cool2').length === {len(SHOWN)}")


def test_a_layer_that_another_model_lacks_is_chosen_no_more(page, model, monkeypatch):
    monkeypatch.setattr(model, "seconds_per_token", 0.0)
    run_to_the_end(page)
    page.click("#tab-panel-attention")
    page.click("#attention .inspect")
    for place in (0, 1):
        page.select_option(f"#attention select >> nth={place}", "1")

    def look_into_a_smaller_model(*arguments):
        found = fake_inspection(*arguments)
        return replace(found, attention=found.attention[:1, :1], image_share=found.image_share[:1, :1])

    monkeypatch.setattr(lens, "inspect", look_into_a_smaller_model)
    page.click("#token-strip .token[data-index='2']")
    page.click("#attention .inspect")
    page.wait_for_selector("#attention .patches")
    assert [page.input_value(f"#attention select >> nth={place}") for place in (0, 1)] == ["-1", "-1"]


def test_a_newly_chosen_picture_gets_no_boxes_of_the_answer_about_another(page, model, monkeypatch):
    monkeypatch.setattr(model, "pieces", (*BOXES, "<eos>"))
    monkeypatch.setattr(model, "seconds_per_token", 0.0)
    run_to_the_end(page)
    page.wait_for_selector("#image-view .box")
    requested_image = page.get_attribute("#image-view .figure img", "src")
    page.click("#image-view .change")
    page.wait_for_function("!document.body.classList.contains('has-image')")
    page.set_input_files("#image input[type=file]", str(paths.ASSETS / "examples" / "garden.png"))
    page.wait_for_selector("#image-view .figure img")
    assert page.locator("#image-view .box").count() == 0
    page.click("#tab-panel-attention")
    page.click("#attention .inspect")  # the answer is still the one about the other picture
    page.wait_for_selector("#attention .patches")
    assert page.get_attribute("#attention .figure img", "src") == requested_image
    page.click("#tab-panel-runs")
    page.click("#runs .run")
    page.wait_for_selector("#image-view .box")
    assert page.get_attribute("#image-view .figure img", "src") == requested_image


def test_what_was_shown_before_is_shown_again(browser, url, model, monkeypatch):
    monkeypatch.setattr(model, "seconds_per_token", 0.0)
    page = open_page(browser, url)
    page.click("#tab-panel-runs")
    assert page.inner_text("#runs").startswith("The last 20 runs stay here")
    sources = []
    for count in (1, 2):
        run_example(page, count, count)
        sources.append(page.get_attribute("#image-view .figure img", "src"))
    page.click("#runs .tree li:first-child .run")
    wait_for_picture(page, sources[0])
    page.evaluate(
        """() => {
          window.said = [];
          const note = () => window.said.push(document.querySelector("#status .message").textContent);
          new MutationObserver(note).observe(document.querySelector("#status .message"), { childList: true });
        }"""
    )
    run_example(page, 2, 3)
    wait_for_picture(page, sources[1])
    assert any(text.startswith("Waiting for its turn") for text in page.evaluate("said"))
    page.click("#image-view .change")
    page.wait_for_function("!document.body.classList.contains('has-image')")
    run_example(page, 2, 4)
    wait_for_picture(page, sources[1])
    page.close()


def run_example(page, place: int, count_after: int) -> None:
    page.click(f"#example-chips .chip >> nth={place}")
    page.wait_for_function(f"document.querySelectorAll('#runs .tree li').length === {count_after}")
    wait_until_done(page)


def wait_for_picture(page, source: str) -> None:
    page.wait_for_function("(src) => document.querySelector('#image-view .figure img')?.src === src", arg=source)


def test_an_answer_is_copied_also_where_there_is_no_clipboard(page, model, monkeypatch):
    monkeypatch.setattr(model, "seconds_per_token", 0.0)
    run_to_the_end(page)
    page.evaluate("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
    page.click("#token-strip .copy")
    page.wait_for_function("document.querySelector('#token-strip .copy').textContent === 'Copied'")
    page.fill("#prompt textarea", "")
    page.press("#prompt textarea", "Control+v")
    assert page.input_value("#prompt textarea") == page.get_attribute("#token-strip .part", "data-text")
    page.wait_for_function("document.querySelector('#token-strip .copy').textContent === 'Copy'")


def set_temperature(page, value: str) -> None:
    """Write it until the slider beside it shows it: the part builds itself as it opens, and may overwrite it."""
    slider = page.locator("#decoding input[type=range]").nth(1)
    for _ in range(50):
        page.fill("#decoding input[type=number] >> nth=1", value)
        page.keyboard.press("Tab")
        page.wait_for_timeout(100)
        if slider.input_value() == value:
            return
    pytest.fail(f"the temperature stays {slider.input_value()}")


def test_without_a_seed_every_run_gets_a_fresh_one(page, model):
    page.click("#decoding button")
    set_temperature(page, "0.7")
    assert page.get_by_label("Seed").input_value() == ""
    for seed in ("", "", "7"):
        page.get_by_label("Seed").fill(seed)
        run_to_the_end(page)
    first, second, third = (request["seed"] for request in model.requests[-3:])
    assert first != second and third == 7 and model.requests[-1]["temperature"] == 0.7


def test_stop_ends_the_run_and_keeps_what_was_written(page):
    run(page)
    wait_for_tokens(page, 3)
    composing = "new KeyboardEvent('keydown', { key: 'Escape', isComposing: true, bubbles: true })"
    page.evaluate(f"document.querySelector('#prompt textarea').dispatchEvent({composing})")
    wait_for_tokens(page, 5)
    page.keyboard.press("Escape")
    page.wait_for_function("document.querySelector('#status .message').textContent.startsWith('Stopped')")
    assert 3 <= len(pieces(page)) < len(SHOWN)


def test_run_begins_anew_at_once_while_a_run_is_under_way(page, model, monkeypatch):
    monkeypatch.setattr(model, "seconds_per_token", 1.0)
    run(page, "detect one")
    wait_for_tokens(page, 2)
    page.click("#stop")
    run(page, "detect two")
    run(page, "detect three")
    monkeypatch.setattr(model, "seconds_per_token", 0.0)
    wait_until_done(page)
    assert model.requests[-1]["prompt"] == "detect three"
    assert pieces(page) == SHOWN


def test_a_bad_request_is_a_line_of_the_page(page):
    run_to_the_end(page)
    page.click("#image-view .change")
    page.wait_for_selector("#image input[type=file]", state="attached")
    page.wait_for_function("!document.body.classList.contains('has-image')")
    page.click("#run")
    page.wait_for_selector("#status .status.error")
    assert page.inner_text("#status") == "Choose an image first."
    assert pieces(page) == SHOWN  # the last answer stays


def test_a_run_is_exported_and_imported(page, browser, url, tmp_path):
    run_to_the_end(page)
    page.click("#tab-panel-runs")
    with page.expect_download() as download:
        page.click("#export")
    download.value.save_as(tmp_path / "run.json")
    other = open_page(browser, url)
    other.click("#tab-panel-runs")
    other.set_input_files("input[type=file][accept*=json]", str(tmp_path / "run.json"))
    wait_for_tokens(other, len(SHOWN))
    assert pieces(other) == SHOWN and "from a file" in other.inner_text("#runs")
    other.wait_for_selector("#image-view .figure img")
    (tmp_path / "bad.json").write_text('{"format": "<img src=x onerror=alert(1)>"}')
    other.set_input_files("input[type=file][accept*=json]", str(tmp_path / "bad.json"))
    other.wait_for_selector("#status .status.error")
    assert pieces(other) == SHOWN
    other.close()


def test_an_example_and_a_task_chip_fill_the_form_in(browser, url, model):
    page = open_page(browser, url)
    page.click("#example-chips .chip >> nth=1")
    page.wait_for_selector("#image-view .figure img")
    wait_until_done(page)
    assert model.requests[-1]["prompt"] == page.input_value("#prompt textarea") == "detect dog"
    submitted = len(model.requests)
    page.click("#tasks .chip:has-text('segment')")
    page.wait_for_function("document.querySelector('#prompt textarea').value === 'segment dog'")
    assert len(model.requests) == submitted
    page.close()


@pytest.mark.parametrize("locale", ["zh-CN", "zh"])
def test_a_chinese_browser_gets_chinese_and_can_choose(browser, url, locale):
    page = open_page(browser, url, locale=locale)
    assert page.inner_text("#run") == "运行" and page.inner_text("#token-strip h2") == "回答"
    assert page.evaluate("document.documentElement.lang") == "zh-CN"
    names = page.locator("#image button").evaluate_all("all => all.map((one) => one.getAttribute('aria-label'))")
    assert names and all(re.search("[一-龥]", name) for name in names)
    text_file = {"name": "a.png", "mimeType": "image/png", "buffer": b"no picture"}
    page.set_input_files("#image input[type=file]", text_file)
    page.wait_for_selector("#status .status.error")
    assert page.inner_text("#status").startswith("这个文件不是可以读取的图片（JPEG")
    page.click("#tab-panel-runs")
    endless = {"name": "a.json", "mimeType": "", "buffer": b'{"a": Infinity}'}
    page.set_input_files("input[type=file][accept*=json]", endless)
    page.wait_for_function("document.querySelector('#status .message').textContent.startsWith('服务器的说明（英文）')")
    page.click("#preferences [lang=en]")
    assert page.inner_text("#run") == "Run" and page.inner_text("#tab-panel-runs") == "Runs"
    page.reload()
    page.wait_for_selector("#badge .status.done")
    assert page.inner_text("#run") == "Run"  # the choice is kept
    page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_fits_a_phone_and_follows_the_scheme(browser, url, picture_file, scheme):
    page = open_page(browser, url, 390, color_scheme=scheme)
    page.set_input_files("#image input[type=file]", str(picture_file))
    page.wait_for_selector("#image-view .figure img")
    run_to_the_end(page)
    for panel in ("objects", "attention", "runs", "candidates"):
        page.click(f"#tab-panel-{panel}")
        assert page.evaluate("document.documentElement.scrollWidth") == 390
    assert is_dark(page) == (scheme == "dark")
    page.click("#preferences .theme")
    assert is_dark(page) == (scheme == "light")
    page.close()


def test_long_words_do_not_widen_the_page(browser, url, picture_file, model, monkeypatch):
    at_the_right_edge = ("<loc0256>", "<loc0900>", "<loc0768>", "<loc1000>")
    monkeypatch.setattr(model, "pieces", (*at_the_right_edge, "▁" + "w" * 80, "<eos>"))
    page = open_page(browser, url, 390)
    page.set_input_files("#image input[type=file]", str(picture_file))
    page.wait_for_selector("#image-view .figure img")
    for letter in "ab":
        run_to_the_end(page, "detect " + letter * 200)
    page.click("#tab-panel-objects")
    page.wait_for_selector("#objects tbody")
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    page.click("#tab-panel-runs")
    for tick in page.locator("#runs input[type=checkbox]").all():
        tick.check()
    page.wait_for_selector("#runs .comparison")
    assert page.locator("#image-view .box b").count() == 1
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    page.close()


def is_dark(page) -> bool:
    colors = page.evaluate(
        "() => ['color', 'backgroundColor'].map((name) => getComputedStyle(document.querySelector('.card'))[name])"
    )
    ink, paper = (sum(map(int, color[4:-1].split(",")[:3])) for color in colors)
    return ink > paper


def test_an_update_that_is_lost_is_had_again(page):
    page.evaluate(
        """() => {
          const parse = JSON.parse;
          JSON.parse = (text) => {
            if (window.isLost || !text.includes('"start":2')) return parse(text);
            window.isLost = true;
            throw new Error("lost");
          };
        }"""
    )
    run_to_the_end(page)
    assert page.evaluate("window.isLost")
    assert pieces(page) == SHOWN
