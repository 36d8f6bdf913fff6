"""Pictures, prompts, requests and imported runs of strangers: each is answered, and what is wrong is said in words."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gradio as gr
import hostile_files as files
import pytest
from fake_model import PROCESSOR, FakeModel
from gradio_client import Client, handle_file
from PIL import Image
from test_webapp import VERSIONS, change, make_run
from webapp_helpers import answer, decoded, import_file, make_session, ready_served_model, run_page, submit_run

from paligemma.webapp import handlers, images, run_file, ui
from paligemma.webapp import server as server_module
from paligemma.webapp.images import MAX_SIDE, decode_image, make_input_image, open_image
from paligemma.webapp.requests import (
    MAX_FILE_BYTES,
    MAX_PROMPT_CHARACTERS,
    MAX_PROMPT_TOKENS,
    check_prompt_length,
    read_prompt,
    read_request,
)

OPTIONS = {"max_new_tokens": 16, "temperature": 0, "top_k": 0, "top_p": 1, "seed": None, "top_n": 10}
CLEAR_REFERENCES, STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")


# Pictures


ODD_PICTURES: dict[str, Callable[[], bytes]] = {
    "black and white": lambda: files.saved(files.RGB.convert("1"), "PNG"),
    "gray": lambda: files.saved(files.RGB.convert("L"), "PNG"),
    "gray with alpha": lambda: files.saved(files.RGB.convert("LA"), "PNG"),
    "palette": lambda: files.saved(files.RGB.quantize(8), "GIF"),
    "palette with transparency": files.with_palette_transparency,
    "alpha": lambda: files.saved(files.RGB.convert("RGBA"), "WEBP"),
    "CMYK": lambda: files.saved(files.RGB.convert("CMYK"), "JPEG"),
    "CIE Lab": lambda: files.saved(files.RGB.convert("LAB"), "TIFF"),
    "16 bit": lambda: files.saved(files.RGB.convert("I;16"), "PNG"),
    "32 bit": lambda: files.saved(files.RGB.convert("I"), "TIFF"),
    "float": lambda: files.saved(files.RGB.convert("F"), "TIFF"),
    "several pictures of a camera": lambda: files.saved(files.RGB, "MPO", save_all=True, append_images=[files.RGB]),
    "broken color profile": lambda: files.saved(files.RGB, "JPEG", icc_profile=b"no profile" * 100),
    "broken EXIF": lambda: files.saved(files.RGB, "JPEG", exif=b"Exif\0\0II*\0\xff\xff\xff\xff"),
    "long comment": lambda: files.with_text(3_000_000),
    "one row": lambda: files.saved(Image.new("RGB", (MAX_SIDE, 1)), "PNG"),
    "one column": lambda: files.saved(Image.new("RGB", (1, 5000)), "BMP"),
    "one pixel": lambda: files.saved(Image.new("RGB", (1, 1)), "GIF"),
}


@pytest.mark.parametrize("name", ODD_PICTURES)
def test_an_odd_picture_is_read_shown_and_seen(name, tmp_path):
    (tmp_path / "picture.png").write_bytes(ODD_PICTURES[name]())
    kept = make_input_image(open_image(tmp_path / "picture.png"), PROCESSOR)
    assert kept.model_input.size == (56, 56) and kept.model_input.mode == "RGB"
    assert decode_image(kept.preview).mode == "RGB"


@pytest.mark.parametrize("format_name", ["GIF", "WEBP", "PNG"])
def test_of_an_animation_the_first_frame_is_read(format_name):
    assert decode_image(files.animation(format_name)).getextrema() == ((255, 255),) * 3


@pytest.mark.parametrize("orientation", range(1, 9))
def test_size_and_pixels_of_a_turned_picture_agree(orientation):
    kept = make_input_image(decode_image(files.turned(orientation)), PROCESSOR)
    assert kept.size == decode_image(kept.preview).size == ((30, 40) if orientation > 4 else (40, 30))


def test_a_picture_is_turned_although_its_exif_data_are_damaged():
    kept = make_input_image(decode_image(files.with_damaged_exif()), PROCESSOR)
    assert kept.size == decode_image(kept.preview).size == (30, 40)


def test_what_is_transparent_is_white():
    clear = Image.new("RGBA", (8, 8), (255, 0, 0, 0))
    assert decode_image(files.saved(clear, "PNG")).getextrema() == ((255, 255),) * 3


OTHER_FILES = {
    "nothing": b"",
    "text": b"not a picture",
    "SVG": b"<svg xmlns='http://www.w3.org/2000/svg'><script>alert(1)</script></svg>",
    "HTML": b"<!doctype html><img src=x onerror=alert(1)>",
    "PDF": b"%PDF-1.7\n1 0 obj\n<<>>\nendobj\n",
    "EPS": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
    "HEIC": b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(64),
    "AVIF": files.saved(files.RGB, "AVIF"),
    "ICO": files.saved(files.RGB.resize((16, 16)), "ICO"),
    "JPEG 2000": b"\0\0\0\x0cjP  \r\n\x87\n" + bytes(64),
    "PSD": b"8BPS\0\1" + bytes(64),
    "FITS": b"SIMPLE  =                    T" + bytes(64),
    "TGA": files.saved(files.RGB, "TGA"),
    "PPM": files.saved(files.RGB, "PPM"),
    "zip": b"PK\3\4" + bytes(64),
}


@pytest.mark.parametrize("name", OTHER_FILES)
def test_another_file_named_png_is_refused_by_its_content(name, tmp_path):
    (tmp_path / "file.png").write_bytes(OTHER_FILES[name])
    with pytest.raises(ValueError, match="none of the pictures that can be read"):
        open_image(tmp_path / "file.png")


BOMBS: dict[str, tuple[Callable[[], bytes], str]] = {
    "declared width": (lambda: files.png_header(2**31 - 1, 2**31 - 1), "far too many pixels"),
    "declared size": (lambda: files.png_header(13_000, 13_000), "13000 × 13000 pixels; at most 40 million"),
    "white square": (lambda: files.saved(Image.new("1", (13_000, 13_000)), "PNG"), "13000 × 13000"),
    "one column": (lambda: files.saved(Image.new("1", (1, 100_000)), "PNG"), f"100000 pixels.*{MAX_SIDE} a side"),
    "canvas of an animation": (lambda: files.webp_with_canvas(12_000), "12000 × 12000"),
    "packed comment": (lambda: files.png_with_compressed_text(100), "damaged"),
    "scans": (lambda: files.jpeg_with_scans(20_000), "damaged"),
    "skipped rows": (lambda: files.bmp_that_skips(40_000_000), f"{MAX_SIDE} a side"),
    "skipped shorter rows": (lambda: files.bmp_that_skips(MAX_SIDE), ""),
    "tile": (lambda: files.tiff_with_tile(12_288), "tiles"),
}


def peak_bytes(work: Callable[[], Any]) -> int:
    """By how much memory grew at most while the work was done; only Linux says so."""
    CLEAR_REFERENCES.write_text("5")  # the peak is counted from now on
    before = resident_bytes("VmRSS")
    work()
    return resident_bytes("VmHWM") - before


def resident_bytes(field: str) -> int:
    (line,) = [line for line in STATUS.read_text().splitlines() if line.startswith(field)]
    return int(line.split()[1]) << 10


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused_before_it_goes_off(name):
    build, message = BOMBS[name]
    file = build()
    assert len(file) < MAX_FILE_BYTES

    def open_it() -> None:
        if message:
            with pytest.raises(ValueError, match=message):
                decode_image(file)
        else:
            decode_image(file)

    if os.access(CLEAR_REFERENCES, os.W_OK):
        assert peak_bytes(open_it) < 100_000_000
    else:
        open_it()


@pytest.mark.parametrize("format_name", images.FORMATS)
@pytest.mark.parametrize("share", [0.02, 0.3, 0.6, 0.9])
def test_a_truncated_file_is_refused_in_words(format_name, share):
    whole = files.saved(Image.effect_noise((64, 64), 50).convert("RGB"), format_name)
    with pytest.raises(ValueError, match="damaged"):
        decode_image(whole[: int(share * len(whole))])


def fifo(folder: Path) -> Path:
    os.mkfifo(folder / "pipe.png")
    return folder / "pipe.png"


def link(folder: Path, target: str) -> Path:
    (folder / "link.png").symlink_to(target)
    return folder / "link.png"


PATHS: dict[str, Callable[[Path], Any]] = {
    "a folder": lambda folder: folder,
    "nothing there": lambda folder: folder / "none.png",
    "a long name": lambda folder: folder / ("x" * 5000),
    "a zero character": lambda folder: str(folder / "a\0b.png"),
    "a pipe": fifo,
    "a device": lambda folder: "/dev/zero",
    "a link to a device": lambda folder: link(folder, "/dev/zero"),
    "a link to itself": lambda folder: link(folder, "link.png"),
}


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no pipes and devices among its files")
@pytest.mark.parametrize("name", PATHS)
def test_what_is_no_ordinary_file_is_refused_and_never_waited_for(name, tmp_path):
    with pytest.raises(ValueError, match="Choose it again") as caught:
        open_image(PATHS[name](tmp_path))
    assert str(tmp_path) not in str(caught.value)


def test_a_link_to_a_picture_is_a_picture(tmp_path, image_file):
    assert open_image(link(tmp_path, str(image_file))).size == (64, 48)


def test_a_file_beyond_the_limit_is_not_read(tmp_path):
    path = tmp_path / "large.png"
    with path.open("wb") as file:
        file.truncate(MAX_FILE_BYTES + 1)
    with pytest.raises(ValueError, match="more than 10 MB"):
        open_image(path)


def test_few_pictures_are_decoded_at_a_time(tmp_path, image_file, monkeypatch):
    running, most = [], []

    def count(path):
        running.append(path)
        most.append(len(running))
        threading.Event().wait(0.02)
        running.pop()
        return Image.open(path)

    monkeypatch.setattr(images, "open_image", count)
    threads = [threading.Thread(target=images.read_input_image, args=(image_file, PROCESSOR)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(most) == 8 and max(most) <= 2


# Prompts


PROMPTS = {
    "white space": " \t\n\u3000\u200b ",
    "controls": "".join(map(chr, range(32))) + "\x7f\x80\x9f",
    "terminal codes": "\x1b[31mred\x1b[0m\x1b]0;title\x07",
    "half pairs": "\ud800 a \udfff",
    "right to left": "\u202edetect \u2066cat\u2069\u202c",
    "special tokens": "<bos><eos><pad><image></s><unk><loc0001><seg001>",
    "template": "${alert(1)} {{constructor}} </script><img src=x onerror=alert(1)>",
    "log lines": "caption\n2026-01-01 ERROR root: nothing",
    "one long word": "x" * 500,
    "stacked accents": "e" + "\u0301" * 400,
    "braces": "{} {0} {number} %s",
    "nothing": "",
}


@pytest.mark.parametrize("name", PROMPTS)
def test_any_text_is_a_prompt_and_can_be_sent_back(name, image_file):
    session = make_session()
    submit_run(session, image_file, PROMPTS[name])
    page_update = list(handlers.run_pending(session))
    assert all(one.encode() for one in page_update if isinstance(one, str))
    assert decoded(page_update[-1]).status["kind"] == "done"
    (request,) = session.served_model.model.requests
    assert request["prompt"] == PROMPTS[name].replace("\ud800", "\ufffd").replace("\udfff", "\ufffd")
    assert json.loads(handlers.export_run(session)[1]["text"])["request"]["prompt"] == request["prompt"]


@pytest.mark.parametrize("prompt", [3, 1.5, True, ["caption"], {"text": "caption"}, b"caption"])
def test_a_prompt_that_is_no_text_is_refused(prompt):
    with pytest.raises(ValueError, match="prompt must be text, got"):
        read_prompt(prompt)


def test_a_long_prompt_is_refused_with_both_numbers(image_file):
    with pytest.raises(ValueError, match=f"{MAX_PROMPT_CHARACTERS + 1} characters; at most {MAX_PROMPT_CHARACTERS}"):
        read_prompt("x" * (MAX_PROMPT_CHARACTERS + 1))
    with pytest.raises(ValueError, match=f"{MAX_PROMPT_TOKENS + 1} tokens; at most {MAX_PROMPT_TOKENS}"):
        check_prompt_length(PROCESSOR, "x" * (MAX_PROMPT_TOKENS + 1))
    last = run_page(make_session(), image_file, "猫" * MAX_PROMPT_CHARACTERS)[-1]
    assert "2000 tokens; at most 512" in last.status["text"]


# Requests


WRONG_VALUES = [
    float("nan"), float("inf"), -float("inf"), 1e308, 10**400, -(10**5000), True, "5", "", [1], {"a": 1}, (), b"1",
    0.5, None,
]  # fmt: skip


@pytest.mark.parametrize("name", ["max_new_tokens", "top_k", "top_n"])
@pytest.mark.parametrize("value", WRONG_VALUES, ids=lambda value: type(value).__name__)
def test_a_wrong_whole_number_is_refused_by_its_name_in_few_words(name, value):
    with pytest.raises(ValueError, match=f"^{name} ") as caught:
        read_request("caption en", **{**OPTIONS, name: value})
    assert len(str(caught.value)) < 120


@pytest.mark.parametrize("name", ["temperature", "top_p", "time_limit"])
@pytest.mark.parametrize("value", [*WRONG_VALUES[:-3], "hot"], ids=lambda value: type(value).__name__)
def test_a_wrong_number_is_refused_by_its_name_in_few_words(name, value):
    with pytest.raises(ValueError, match=f"^{name} ") as caught:
        read_request("caption en", **{**OPTIONS, name: value})
    assert len(str(caught.value)) < 120


def nested(depth: int) -> list:
    value: list = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize("value", ["12", {"a": 1}, 5, [10**400], [1.5], [None], [[1]], [True], nested(10_000)])
def test_wrong_ids_are_refused(value):
    with pytest.raises(ValueError, match=r"^forced_ids "):
        read_request("caption en", **OPTIONS, forced_ids=value)


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    blocks = ui.build_app(ready_served_model(FakeModel(("▁a", "▁cat"), seconds_per_token=0.01)))
    server_module.launch(blocks, prevent_thread_lock=True, quiet=True)
    yield blocks.local_url.rstrip("/")
    blocks.close()


def post(url: str, body: bytes, media_type: str = "application/json") -> tuple[int, str]:
    """(status, text) of the answer."""
    request = urllib.request.Request(url, body, {"Content-Type": media_type})
    try:
        with urllib.request.urlopen(request, timeout=30) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def store(server: str, content: bytes) -> tuple[int, str]:
    """Upload a file as the page does."""
    head = b'--limit\r\nContent-Disposition: form-data; name="files"; filename="picture.png"\r\n\r\n'
    body = head + content + b"\r\n--limit--\r\n"
    return post(f"{server}/gradio_api/upload", body, "multipart/form-data; boundary=limit")


@pytest.fixture(scope="module")
def inputs(server, image_file) -> list[Any]:
    """What a right call of /generate sends."""
    (path,) = json.loads(store(server, image_file.read_bytes())[1])
    stored = {"path": path, "meta": {"_type": "gradio.FileData"}}
    return [stored, "caption en", 5, 0, 0, 1, None, 3, None, None, None]


def call(server: str, data: Any, name: str = "generate") -> str:
    """Everything that the server sends for a call."""
    url = f"{server}/gradio_api/call/{name}"
    status, text = post(url, json.dumps({"data": data}).encode())
    assert status == 200, text
    with urllib.request.urlopen(f"{url}/{json.loads(text)['event_id']}", timeout=30) as reply:
        return reply.read().decode()


def error_of(events: str) -> str:
    """The words of the error with which a call ended."""
    last = events.split("event: error\ndata: ")[1]
    return json.loads(last.split("\n")[0])["error"]


FILE = {"meta": {"_type": "gradio.FileData"}}
WRONG_CALLS: dict[str, tuple[int, Any, str]] = {
    "a path as text": (0, "/etc/passwd", "inputs are not those"),
    "a number as picture": (0, 5, "inputs are not those"),
    "a list as picture": (0, [1], "inputs are not those"),
    "a picture that was not uploaded": (0, {"path": "/etc/passwd", **FILE}, "inputs are not those"),
    "a picture of another server": (0, {"path": "http://127.0.0.1:9/x.png", **FILE}, "inputs are not those"),
    "no picture": (0, None, "Choose a picture"),
    "a list as prompt": (1, ["caption"], "prompt must be text, got list"),
    "a long prompt": (1, "x" * 100_000, "100000 characters; at most 2000"),
    "text as number": (2, "5", "max_new_tokens must be a whole number"),
    "NaN": (3, float("nan"), "temperature is nan"),
    "infinity": (5, float("inf"), "top_p is inf"),
    "a number of 400 digits": (4, 10**400, "top_k is a number of many digits"),
    "a truth as number": (7, True, "top_n must be a whole number, got True"),
    "ids in depth": (8, nested(80), "forced_ids must be"),
    "an object as limit": (9, {"a": 1}, "time_limit must be a number, got dict"),
    "another model": (10, "x" * 1000, "allowed are scripted"),
}


@pytest.mark.parametrize("name", WRONG_CALLS)
def test_a_wrong_input_of_a_call_is_answered_in_words(server, inputs, name):
    place, value, message = WRONG_CALLS[name]
    events = call(server, [*inputs[:place], value, *inputs[place + 1 :]])
    assert message in error_of(events) and "passwd" not in events


def test_the_log_says_that_a_call_was_refused_and_nothing_that_it_held(server, inputs, caplog):
    caplog.set_level(logging.INFO)
    call(server, ["/etc/passwd", *inputs[1:]])
    assert re.search(r"call refused: \w+ at \w+\.py:\d+ ", caplog.text) and "passwd" not in caplog.text


def test_of_an_upload_only_the_stored_file_counts(server, inputs):
    events = call(server, [{**inputs[0], "url": "data:text/html;base64,AAAA"}, *inputs[1:]])
    assert '"finish_reason": "eos"' in events


@pytest.mark.parametrize("count", [0, 3])
@pytest.mark.parametrize("name", ["generate", "inspect"])
def test_missing_inputs_are_answered_in_words(server, inputs, name, count):
    assert "/gradio_api/info" in error_of(call(server, inputs[:count], name))


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[1]", b'{"data": null}', b'{"data": 5}', b"{}", b'{"data": ["\xff\xfe"]}',
        b'{"data": [' + b"9" * 5000 + b"]}", b'{"data": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
    ids=range(9),
)  # fmt: skip
def test_a_body_of_another_shape_is_refused_as_such(server, body):
    status, text = post(f"{server}/gradio_api/call/generate", body)
    assert status in (400, 422) and json.loads(text)["detail"]


def test_a_file_beyond_the_limit_is_not_taken(server):
    status, text = store(server, bytes(MAX_FILE_BYTES + 2_000_000))
    assert status == 413 and text


def test_every_event_of_the_page_bears_values_of_any_kind(server):
    """What no page sends: nothing, wrong types, and events without what they are about."""
    blocks = json.loads(urllib.request.urlopen(f"{server}/config", timeout=30).read())
    for event in blocks["dependencies"]:
        for value in (None, [{}], {"path": "/dev/zero"}):
            for data in (None, [1], {"run": [], "index": {}, "token_id": "x", "runs": [None], "kind": 5}):
                body = {"data": [value] * len(event["inputs"]), "fn_index": event["id"], "session_hash": "stranger"}
                status, text = post(
                    f"{server}/gradio_api/run/predict", json.dumps({**body, "event_data": data}).encode()
                )
                assert status == 200 or json.loads(text)["error"], (event["api_name"], value, data, text)


def test_strangers_calls_do_not_disturb_another_visitor(server, inputs, image_file):
    events: list[list[dict]] = []

    def session() -> None:
        client = Client(server, verbose=False)
        for _ in range(5):
            job = client.submit(image=handle_file(image_file), prompt="caption en", top_n=3, api_name="/generate")
            events.append([event["step"]["piece"] for event in job if event["step"]])

    visitor = threading.Thread(target=session)
    visitor.start()
    while visitor.is_alive():
        for place, value, _ in WRONG_CALLS.values():
            call(server, [*inputs[:place], value, *inputs[place + 1 :]])
    visitor.join()
    assert events == [["▁a", "▁cat", "<eos>"]] * 5


# Imported runs


def document() -> dict[str, Any]:
    return json.loads(run_file.write_run(make_run(1, "▁a", "▁b"), VERSIONS))


def read(changed: Any) -> None:
    run_file.read_run(
        (changed if isinstance(changed, str) else json.dumps(changed)).encode("utf-8", "surrogatepass"), 1
    )


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("format", "paligemma-run/2", "its format is 'paligemma-run/2', not 'paligemma-run/1'"),
        ("format", None, "its format is nothing"),
        ("picture/width", 40_000_001, "width"),
        ("picture/height", 600_000, "at most 40000000 pixels, got 80 x 600000"),
        ("picture/shown", "not base64", "shown"),
        ("picture/shown", "A" * 4_000_000, "shown"),
        ("picture/seen", 5, "seen"),
        ("request/prompt", "\ud800", "UTF-8"),
        ("request/seed", 10**30, "seed"),
        ("request/forced_ids", [7], "do not begin with the request's forced_ids"),
        ("request/forced_ids", nested(50), "forced_ids"),
        ("tokens", {}, "tokens must be a list"),
        ("tokens", [None], "must be an object"),
        ("tokens/0/token_id", -1, "token_id"),
        ("tokens/0/token_id", 10**9, "token_id"),
        ("tokens/0/piece", "\udfff", "UTF-8"),
        ("tokens/0/logit", 1e300, "logit"),
        ("tokens/0/logprob", -3.0, "logprob of 0 is not its logit less logsumexp"),
        ("tokens/0/prob", 0.5, "prob of 0 is not that of its logprob"),
        ("tokens/0/rank", 2, "rank is 2"),
        ("tokens/0/top", [], "top must be a list of 1 to"),
        ("tokens/0/top/1/token_id", 0, "two candidates have the same id"),
        ("tokens/0/seconds", 1000, "backwards"),
        ("branched_at", 3, "branched_at"),
        ("finish_reason", "why not", "finish_reason"),
    ],
)
def test_a_run_that_contradicts_itself_or_its_limits_is_refused_by_name(path, value, message):
    run = document()
    change(run, path, value)
    with pytest.raises(ValueError, match=message) as caught:
        read(run)
    assert len(str(caught.value)) < 300


def test_candidates_out_of_order_are_refused():
    run = document()
    run["tokens"][0]["top"].reverse()
    with pytest.raises(ValueError, match="not in the order"):
        read(run)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no JSON"),
        ("null", "no run"),
        ('"text"', "no run"),
        ("[" * 100_000 + "]" * 100_000, "no JSON"),
        ('{"a":' * 100_000, "no JSON"),
        ("9" * 5000, "5000 digits"),
        ('{"format": 1, "format": 2}', "'format' twice"),
        ('{"format": "paligemma-run/1", "x": 1}', "lacks"),
        ('{"format": "paligemma-run/1", "' + "x" * 100_000 + '": 1}', "lacks"),
        ("{" + ", ".join(f'"{number}": 1' for number in range(300_000)) + ', "1": 2}', "'1' twice"),
        ('{"a": Infinity}', "Infinity"),
        ('{"a": 1e999}', "no run"),
        ("\ud800", "no JSON"),
    ],
    ids=range(13),
)
def test_a_file_that_is_no_run_is_refused_in_few_words(text, message):
    with pytest.raises(ValueError, match=message) as caught:
        read(text)
    assert len(str(caught.value)) < 400


def test_a_huge_file_is_refused_unread():
    with pytest.raises(ValueError, match=f"at most {MAX_FILE_BYTES}"):
        run_file.read_run(bytes(MAX_FILE_BYTES + 1), 1)


def test_a_file_with_a_byte_order_mark_is_read():
    assert run_file.read_run(b"\xef\xbb\xbf" + json.dumps(document()).encode(), 3).number == 3


def test_a_refused_import_leaves_the_page_as_it_was(image_file, tmp_path):
    session = make_session()
    run_page(session, image_file)
    preview = session.history.current
    refused = decoded(import_file(session, tmp_path, "{}"))
    assert refused.status["kind"] == "error" and session.history.current is preview
    assert handlers.import_run(session, {"path": "/dev/zero"}, None, "") == gr.skip()  # not marked as uploaded
    assert answer(session) and len(list(session.history)) == 1
