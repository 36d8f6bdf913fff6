"""User actions on the page, in headless Chromium, with a scripted model that takes 100 ms per token."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from browser_helpers import (
    BOXES,
    HOSTILE,
    SHOWN,
    open_page,
    run,
    run_until_done,
    selected_token,
    shown_tokens,
    wait_for_tokens,
    wait_until_done,
)
from fake_model import fake_inspection
from gradio_client import Client, handle_file

from paligemma import lens, paths
from paligemma.errors import InputError
from paligemma.webapp.errors import coded_status

pytestmark = pytest.mark.browser


def test_enter_starts_a_run_that_streams_tokens_and_candidates(page, model):
    page.evaluate(
        """() => {
          window.titles = [];
          const table = document.querySelector("#candidates");
          const record = () => window.titles.push(table.querySelector(".header strong")?.textContent);
          new MutationObserver(record).observe(table, { childList: true, subtree: true });
        }"""
    )
    run(page)
    for count in (1, 4, 8):
        wait_for_tokens(page, count)
    assert page.locator("#status .status.busy").count() == 1
    wait_until_done(page)
    assert model.requests[-1]["prompt"] == "detect cat"
    assert shown_tokens(page) == SHOWN
    assert page.inner_text("#token-strip .text").endswith("&lt;")
    numbers = [int(title.split()[1]) for title in page.evaluate("titles") if title]
    assert numbers == sorted(numbers) and len(set(numbers)) > 3
    assert selected_token(page).startswith(f"Token {len(SHOWN)} of {len(SHOWN)}: <eos>")


def test_layout_is_stable_while_the_answer_grows(page):
    run(page)
    wait_for_tokens(page, 1)
    tops = """['#token-strip .curves', '#candidates table'].map(
        (selector) => document.querySelector(selector).getBoundingClientRect().top
    )"""
    before = page.evaluate(tops)
    wait_until_done(page)
    assert page.evaluate(tops) == before


def test_model_output_and_prompts_are_never_rendered_as_html(page):
    run_until_done(page, "${alert(1)} <img src=x onerror=alert(1)> {{constructor}}")
    for index, text in enumerate(SHOWN):
        page.click(f"#token-strip .token[data-index='{index}']")
        assert selected_token(page).startswith(f"Token {index + 1} of {len(SHOWN)}: {text}")
        assert page.locator("#candidates tbody td.text").first.text_content() == text
    page.click("#tab-panel-runs")
    assert "<img src=x onerror=alert(1)>" in page.inner_text("#runs")
    assert page.locator("#answer img, #badge b").count() == 0
    assert "scripted <b>model</b>" in page.inner_text("#badge")


def test_tokens_are_selected_with_the_keyboard_and_on_the_curves(page):
    run_until_done(page)
    page.click("#token-strip .token[data-index='1']")
    last = len(SHOWN)
    for key, number in (("ArrowRight", 3), ("End", last), ("ArrowLeft", last - 1), ("Home", 1)):
        page.keyboard.press(key)
        assert selected_token(page).startswith(f"Token {number} ")
        assert page.locator("#token-strip [aria-selected=true]").get_attribute("tabindex") == "0"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.className").endswith("branch")
    curves = page.locator("#token-strip .curves")
    curves.click(position={"x": curves.bounding_box()["width"] - 12, "y": 20})
    assert selected_token(page).startswith(f"Token {last} ")
    for coloring in ("entropy", "rank", "probability"):
        page.select_option("#token-strip .header select", coloring)
        assert page.input_value("#token-strip .header select") == coloring


def test_focus_is_kept_when_a_part_is_redrawn(page):
    run_until_done(page)
    page.click("#token-strip .token[data-index='1']")
    page.focus("#candidates .pager button:last-child")
    for number in (3, 4):
        page.keyboard.press("Enter")
        assert selected_token(page).startswith(f"Token {number} ")
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


def test_candidate_table_shows_the_numbers_of_the_step(page, url):
    run_until_done(page)
    image = str(Path(paths.ASSETS / "examples" / "garden.png"))
    job = Client(url, verbose=False).submit(image=handle_file(image), prompt="detect cat", api_name="/generate")
    steps = [event["step"] for event in job if event["step"]]
    for index in (0, 4):
        page.click(f"#token-strip .token[data-index='{index}']")
        backgrounds = page.locator("#candidates tr.chosen td").evaluate_all(
            "cells => cells.map((cell) => getComputedStyle(cell).backgroundColor)"
        )
        assert len(set(backgrounds)) == 1
        cells = page.locator("#candidates tr.chosen td").all_text_contents()
        assert cells[2:4] == [str(steps[index]["token_id"]), f"{steps[index]['logit']:.2f}"]
        ids = page.locator("#candidates tbody td:nth-child(3)").all_text_contents()
        assert ids == [str(candidate["token_id"]) for candidate in steps[index]["top"]]


def test_branch_regenerates_the_answer_and_keeps_both_runs(page, model):
    run_until_done(page)
    page.click("#token-strip .token[data-index='1']")
    page.click("#candidates tbody tr:nth-child(3) .branch")
    page.wait_for_selector("#status .status.busy")
    wait_until_done(page)
    assert model.requests[-1]["forced_ids"] == (0, 12)
    assert shown_tokens(page) == [SHOWN[0], "␣else", *SHOWN[2:]]
    page.click("#token-strip .token[data-index='0']")
    assert "copied from the parent run" in page.inner_text("#candidates .header")
    page.click("#token-strip .token[data-index='1']")
    assert "selected manually" in page.inner_text("#candidates .header")
    assert page.locator("#candidates tr.chosen td").nth(2).inner_text() == "12"
    page.click("#tab-panel-runs")
    for checkbox in page.locator("#runs input[type=checkbox]").all():
        checkbox.check()
    page.wait_for_selector("#runs .comparison")
    assert page.locator("#runs .different").all_text_contents() == ["␣cat", "␣else"]
    page.click("#runs .tree li:first-child .run")
    page.wait_for_function("document.querySelectorAll('#token-strip .token')[1].textContent === '␣cat'")
    page.wait_for_selector("#runs .comparison")  # the comparison is kept
    page.evaluate("document.querySelector('#runs .comparison').dataset.old = ''")
    page.click("#runs .tree li:first-child .run")  # already shown
    page.wait_for_selector("#runs .comparison:not([data-old])")


def test_step_generates_one_token(page):
    page.fill("#prompt textarea", "caption en")
    for count in (1, 2, 3):
        page.click("#step")
        wait_for_tokens(page, count)
        page.wait_for_selector("#status .status.idle")
        assert shown_tokens(page) == SHOWN[:count]


@pytest.mark.parametrize("width", [1280, 800, 390])
def test_box_position_at_every_width(browser, url, image_file, model, monkeypatch, width):
    monkeypatch.setattr(model, "pieces", (*BOXES, "<eos>"))
    page = open_page(browser, url, width)
    page.set_input_files("#image input[type=file]", str(image_file))  # 64 x 48: not square
    page.wait_for_selector("#image-view .figure img")
    page.evaluate(
        """() => new MutationObserver(() => {
          const has = (selector) => Boolean(document.querySelector(selector));
          window.drawnEarly ||= has("#image-view .box") && has("#status .status.busy");
        }).observe(document.body, { childList: true, subtree: true, attributes: true })"""
    )
    run_until_done(page)
    assert page.evaluate("window.drawnEarly")  # before the answer is complete
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


def test_mask_tokens_are_drawn_as_a_mask_in_their_box(page, model, monkeypatch):
    monkeypatch.setattr(model, "pieces", (*BOXES[:4], *["<seg010>"] * 16, "▁cat", "<eos>"))
    monkeypatch.setattr(model, "seconds_per_token", 0.0)
    run_until_done(page, "segment cat")
    mask = page.locator("#image-view .box .mask")
    assert mask.evaluate("node => getComputedStyle(node).maskImage").startswith('url("data:image/png')
    box, drawn = (page.locator(part).bounding_box() for part in ("#image-view .box", "#image-view .box .mask"))
    assert drawn["width"] == pytest.approx(box["width"], abs=5) and drawn["x"] == pytest.approx(box["x"], abs=5)


def test_attention_is_drawn_on_the_right_patch(page):
    run_until_done(page)
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
    page.click("#runs .current .run")  # shown again, with the same coloring
    page.wait_for_selector("#token-strip .token.cool2:not([data-old])")
    run(page, "detect dog")  # the next answer has the same coloring
    wait_for_tokens(page, len(SHOWN))
    page.wait_for_function(f"document.querySelectorAll('#token-strip .token.cool2').length === {len(SHOWN)}")


def test_layer_selection_is_reset_for_a_smaller_model(page, model, monkeypatch):
    monkeypatch.setattr(model, "seconds_per_token", 0.0)
    run_until_done(page)
    page.click("#tab-panel-attention")
    page.click("#attention .inspect")
    for place in (0, 1):
        page.select_option(f"#attention select >> nth={place}", "1")

    def inspect_smaller_model(*arguments):
        found = fake_inspection(*arguments)
        return replace(found, attention=found.attention[:1, :1], image_share=found.image_share[:1, :1])

    monkeypatch.setattr(lens, "inspect", inspect_smaller_model)
    page.click("#token-strip .token[data-index='2']")
    page.click("#attention .inspect")
    page.wait_for_selector("#attention .patches")
    assert [page.input_value(f"#attention select >> nth={place}") for place in (0, 1)] == ["-1", "-1"]


def test_new_image_does_not_show_boxes_of_the_previous_answer(page, model, monkeypatch):
    monkeypatch.setattr(model, "pieces", (*BOXES, "<eos>"))
    monkeypatch.setattr(model, "seconds_per_token", 0.0)
    run_until_done(page)
    page.wait_for_selector("#image-view .box")
    requested_image = page.get_attribute("#image-view .figure img", "src")
    page.click("#image-view .change")
    page.wait_for_function("!document.body.classList.contains('has-image')")
    page.set_input_files("#image input[type=file]", str(paths.ASSETS / "examples" / "garden.png"))
    page.wait_for_selector("#image-view .figure img")
    assert page.locator("#image-view .box").count() == 0
    page.click("#tab-panel-attention")
    page.click("#attention .inspect")  # the answer is still about the first image
    page.wait_for_selector("#attention .patches")
    assert page.get_attribute("#attention .figure img", "src") == requested_image
    page.click("#tab-panel-runs")
    page.click("#runs .run")
    page.wait_for_selector("#image-view .box")
    assert page.get_attribute("#image-view .figure img", "src") == requested_image


def test_earlier_runs_and_examples_are_shown_again(browser, url, model, monkeypatch):
    monkeypatch.setattr(model, "seconds_per_token", 0.0)
    page = open_page(browser, url)
    page.click("#tab-panel-runs")
    assert page.inner_text("#runs").startswith("Your last 20 runs are listed here")
    sources = []
    for count in (1, 2):
        run_example(page, count, count)
        sources.append(page.get_attribute("#image-view .figure img", "src"))
    page.click("#runs .tree li:first-child .run")
    wait_for_image(page, sources[0])
    page.evaluate(
        """() => {
          window.statuses = [];
          const record = () => window.statuses.push(document.querySelector("#status .message").textContent);
          new MutationObserver(record).observe(document.querySelector("#status .message"), { childList: true });
        }"""
    )
    run_example(page, 2, 3)
    wait_for_image(page, sources[1])
    assert any(text.startswith("Queued") for text in page.evaluate("statuses"))
    page.click("#image-view .change")
    page.wait_for_function("!document.body.classList.contains('has-image')")
    run_example(page, 2, 4)
    wait_for_image(page, sources[1])
    page.close()


def run_example(page, index: int, num_runs: int) -> None:
    page.click(f"#example-chips .chip >> nth={index}")
    page.wait_for_function(f"document.querySelectorAll('#runs .tree li').length === {num_runs}")
    wait_until_done(page)


def wait_for_image(page, source: str) -> None:
    page.wait_for_function("(src) => document.querySelector('#image-view .figure img')?.src === src", arg=source)


def test_answer_is_copied_without_the_clipboard_api(page, model, monkeypatch):
    monkeypatch.setattr(model, "seconds_per_token", 0.0)
    run_until_done(page)
    page.evaluate("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
    page.click("#token-strip .copy")
    page.wait_for_function("document.querySelector('#token-strip .copy').textContent === 'Copied'")
    page.fill("#prompt textarea", "")
    page.press("#prompt textarea", "Control+v")
    assert page.input_value("#prompt textarea") == page.get_attribute("#token-strip .part", "data-text")
    page.wait_for_function("document.querySelector('#token-strip .copy').textContent === 'Copy'")


def set_temperature(page, value: str) -> None:
    """Fill in the field until its slider has the value, because Gradio may overwrite a field that has just opened."""
    slider = page.locator("#decoding input[type=range]").nth(1)
    for _ in range(50):
        page.fill("#decoding input[type=number] >> nth=1", value)
        page.keyboard.press("Tab")
        page.wait_for_timeout(100)
        if slider.input_value() == value:
            return
    pytest.fail(f"the temperature is {slider.input_value()}")


def test_empty_seed_is_random_for_each_run(page, model):
    page.click("#decoding button")
    set_temperature(page, "0.7")
    assert page.get_by_label("Seed").input_value() == ""
    for seed in ("", "", "7"):
        page.get_by_label("Seed").fill(seed)
        run_until_done(page)
    first, second, third = (request["seed"] for request in model.requests[-3:])
    assert first != second and third == 7 and model.requests[-1]["temperature"] == 0.7


def test_stop_ends_the_run_and_keeps_its_tokens(page):
    run(page)
    wait_for_tokens(page, 3)
    composing = "new KeyboardEvent('keydown', { key: 'Escape', isComposing: true, bubbles: true })"
    page.evaluate(f"document.querySelector('#prompt textarea').dispatchEvent({composing})")
    wait_for_tokens(page, 5)
    page.keyboard.press("Escape")
    page.wait_for_function("document.querySelector('#status .message').textContent.startsWith('Stopped')")
    assert 3 <= len(shown_tokens(page)) < len(SHOWN)


def test_run_replaces_a_run_in_progress(page, model, monkeypatch):
    monkeypatch.setattr(model, "seconds_per_token", 1.0)
    run(page, "detect one")
    wait_for_tokens(page, 2)
    page.click("#stop")
    run(page, "detect two")
    run(page, "detect three")
    monkeypatch.setattr(model, "seconds_per_token", 0.0)
    wait_until_done(page)
    assert model.requests[-1]["prompt"] == "detect three"
    assert shown_tokens(page) == SHOWN


def test_bad_request_is_shown_as_status(page):
    run_until_done(page)
    page.click("#image-view .change")
    page.wait_for_selector("#image input[type=file]", state="attached")
    page.wait_for_function("!document.body.classList.contains('has-image')")
    page.click("#run")
    page.wait_for_selector("#status .status.error")
    assert page.inner_text("#status") == "Choose an image first."
    assert shown_tokens(page) == SHOWN  # the last answer is kept


def test_run_is_exported_and_imported(page, browser, url, tmp_path):
    run_until_done(page)
    page.click("#tab-panel-runs")
    with page.expect_download() as download:
        page.click("#export")
    download.value.save_as(tmp_path / "run.json")
    other = open_page(browser, url)
    other.click("#tab-panel-runs")
    other.set_input_files("input[type=file][accept*=json]", str(tmp_path / "run.json"))
    wait_for_tokens(other, len(SHOWN))
    assert shown_tokens(other) == SHOWN and "imported" in other.inner_text("#runs")
    other.wait_for_selector("#image-view .figure img")
    (tmp_path / "bad.json").write_text('{"format": "<img src=x onerror=alert(1)>"}')
    other.set_input_files("input[type=file][accept*=json]", str(tmp_path / "bad.json"))
    other.wait_for_selector("#status .status.error")
    assert shown_tokens(other) == SHOWN
    other.close()


def test_example_and_task_chip_fill_in_the_form(browser, url, model):
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
def test_chinese_browser_gets_chinese_and_can_switch(browser, url, locale):
    page = open_page(browser, url, locale=locale)
    assert page.inner_text("#run") == "运行" and page.inner_text("#token-strip h2") == "回答"
    assert page.evaluate("document.documentElement.lang") == "zh-CN"
    names = page.locator("#image button").evaluate_all(
        "buttons => buttons.map((button) => button.getAttribute('aria-label'))"
    )
    assert names and all(re.search("[一-龥]", name) for name in names)
    text_file = {"name": "a.png", "mimeType": "image/png", "buffer": b"no image"}
    page.set_input_files("#image input[type=file]", text_file)
    page.wait_for_selector("#status .status.error")
    image_error = page.inner_text("#status")
    assert image_error.startswith("图片格式不受支持") and "JPEG" in image_error
    page.click("#tab-panel-runs")
    infinite = {"name": "a.json", "mimeType": "", "buffer": b'{"a": Infinity}'}
    page.set_input_files("input[type=file][accept*=json]", infinite)
    page.wait_for_function("(text) => document.querySelector('#status .message').textContent !== text", arg=image_error)
    assert re.search("[一-龥]", page.inner_text("#status"))
    page.click("#preferences [lang=en]")
    assert page.inner_text("#run") == "Run" and page.inner_text("#tab-panel-runs") == "Runs"
    assert not re.search("[一-龥]", page.inner_text("#status"))
    page.reload()
    page.wait_for_selector("#badge .status.done")
    assert page.inner_text("#run") == "Run"  # the choice is stored
    page.close()


def test_error_with_an_error_as_its_reason_is_translated(browser, url):
    page = open_page(browser, url, locale="zh-CN")
    reason = InputError("checkpoint.no_config", "{checkpoint} has no config.json.", checkpoint="folder")
    error = InputError("model.load_failed", "{name} could not be loaded. {reason}", name="<b>m</b>", reason=reason)
    text = page.evaluate("(status) => paligemma.formatMessage(status)", coded_status(error))
    assert text == "<b>m</b> 加载失败。folder 中没有 config.json。请重新复制或下载该 checkpoint。"
    page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_fits_a_phone_in_both_color_schemes(browser, url, image_file, scheme):
    page = open_page(browser, url, 390, color_scheme=scheme)
    page.set_input_files("#image input[type=file]", str(image_file))
    page.wait_for_selector("#image-view .figure img")
    run_until_done(page)
    for panel in ("objects", "attention", "runs", "candidates"):
        page.click(f"#tab-panel-{panel}")
        assert page.evaluate("document.documentElement.scrollWidth") == 390
    assert is_dark(page) == (scheme == "dark")
    page.click("#preferences .theme")
    assert is_dark(page) == (scheme == "light")
    page.close()


def test_long_words_do_not_stretch_the_page(browser, url, image_file, model, monkeypatch):
    right_edge = ("<loc0256>", "<loc0900>", "<loc0768>", "<loc1000>")
    monkeypatch.setattr(model, "pieces", (*right_edge, "▁" + "w" * 80, "<eos>"))
    page = open_page(browser, url, 390)
    page.set_input_files("#image input[type=file]", str(image_file))
    page.wait_for_selector("#image-view .figure img")
    for letter in "ab":
        run_until_done(page, "detect " + letter * 200)
    page.click("#tab-panel-objects")
    page.wait_for_selector("#objects tbody")
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    page.click("#tab-panel-runs")
    for checkbox in page.locator("#runs input[type=checkbox]").all():
        checkbox.check()
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


def test_lost_update_is_requested_again(page):
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
    run_until_done(page)
    assert page.evaluate("window.isLost")
    assert shown_tokens(page) == SHOWN
