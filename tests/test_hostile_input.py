"""Hostile images, prompts, requests and run files: each is answered or rejected with an error, at bounded cost."""

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
from run_helpers import DECODING, VERSIONS, make_run, set_value
from webapp_helpers import (
    answer,
    decoded,
    import_file,
    make_session,
    ready_served_model,
    run_page,
    status_text,
    submit_run,
)

from paligemma.webapp import handlers, images, run_file, ui
from paligemma.webapp import server as server_module
from paligemma.webapp.images import make_input_image
from paligemma.webapp.requests import (
    MAX_PROMPT_CHARACTERS,
    MAX_PROMPT_TOKENS,
    check_prompt_length,
    read_prompt,
    read_request,
)
from paligemma.webapp.uploads import FORMATS, MAX_FILE_BYTES, MAX_SIDE, decode_image, open_image

CLEAR_REFERENCES, STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")


# Images


UNUSUAL_IMAGES: dict[str, Callable[[], bytes]] = {
    "black and white": lambda: files.encode(files.RGB.convert("1"), "PNG"),
    "gray": lambda: files.encode(files.RGB.convert("L"), "PNG"),
    "gray with alpha": lambda: files.encode(files.RGB.convert("LA"), "PNG"),
    "palette": lambda: files.encode(files.RGB.quantize(8), "GIF"),
    "palette with transparency": files.with_palette_transparency,
    "alpha": lambda: files.encode(files.RGB.convert("RGBA"), "WEBP"),
    "CMYK": lambda: files.encode(files.RGB.convert("CMYK"), "JPEG"),
    "CIE Lab": lambda: files.encode(files.RGB.convert("LAB"), "TIFF"),
    "16 bit": lambda: files.encode(files.RGB.convert("I;16"), "PNG"),
    "32 bit": lambda: files.encode(files.RGB.convert("I"), "TIFF"),
    "float": lambda: files.encode(files.RGB.convert("F"), "TIFF"),
    "multi-picture object": lambda: files.encode(files.RGB, "MPO", save_all=True, append_images=[files.RGB]),
    "broken color profile": lambda: files.encode(files.RGB, "JPEG", icc_profile=b"no profile" * 100),
    "broken EXIF": lambda: files.encode(files.RGB, "JPEG", exif=b"Exif\0\0II*\0\xff\xff\xff\xff"),
    "long comment": lambda: files.with_text(3_000_000),
    "one row": lambda: files.encode(Image.new("RGB", (MAX_SIDE, 1)), "PNG"),
    "one column": lambda: files.encode(Image.new("RGB", (1, 5000)), "BMP"),
    "one pixel": lambda: files.encode(Image.new("RGB", (1, 1)), "GIF"),
}


@pytest.mark.parametrize("name", UNUSUAL_IMAGES)
def test_unusual_images_are_decoded(name, tmp_path):
    (tmp_path / "image.png").write_bytes(UNUSUAL_IMAGES[name]())
    image = make_input_image(open_image(tmp_path / "image.png"), PROCESSOR)
    assert image.model_input.size == (56, 56) and image.model_input.mode == "RGB"
    assert decode_image(image.preview).mode == "RGB"


@pytest.mark.parametrize("format_name", ["GIF", "WEBP", "PNG"])
def test_the_first_frame_of_an_animation_is_used(format_name):
    assert decode_image(files.animation(format_name)).getextrema() == ((255, 255),) * 3


@pytest.mark.parametrize("orientation", range(1, 9))
def test_size_and_pixels_have_the_same_orientation(orientation):
    image = make_input_image(decode_image(files.with_orientation(orientation)), PROCESSOR)
    assert image.size == decode_image(image.preview).size == ((30, 40) if orientation > 4 else (40, 30))


def test_orientation_is_applied_despite_corrupt_exif_data():
    image = make_input_image(decode_image(files.with_corrupt_exif()), PROCESSOR)
    assert image.size == decode_image(image.preview).size == (30, 40)


def test_transparent_pixels_become_white():
    clear = Image.new("RGBA", (8, 8), (255, 0, 0, 0))
    assert decode_image(files.encode(clear, "PNG")).getextrema() == ((255, 255),) * 3


OTHER_FILES = {
    "empty": b"",
    "text": b"not an image",
    "SVG": b"<svg xmlns='http://www.w3.org/2000/svg'><script>alert(1)</script></svg>",
    "HTML": b"<!doctype html><img src=x onerror=alert(1)>",
    "PDF": b"%PDF-1.7\n1 0 obj\n<<>>\nendobj\n",
    "EPS": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
    "HEIC": b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(64),
    "AVIF": files.encode(files.RGB, "AVIF"),
    "ICO": files.encode(files.RGB.resize((16, 16)), "ICO"),
    "JPEG 2000": b"\0\0\0\x0cjP  \r\n\x87\n" + bytes(64),
    "PSD": b"8BPS\0\1" + bytes(64),
    "FITS": b"SIMPLE  =                    T" + bytes(64),
    "TGA": files.encode(files.RGB, "TGA"),
    "PPM": files.encode(files.RGB, "PPM"),
    "zip": b"PK\3\4" + bytes(64),
}


@pytest.mark.parametrize("name", OTHER_FILES)
def test_other_formats_are_rejected_by_content(name, tmp_path):
    (tmp_path / "file.png").write_bytes(OTHER_FILES[name])
    with pytest.raises(ValueError, match="Unsupported or corrupt image"):
        open_image(tmp_path / "file.png")


BOMBS: dict[str, tuple[Callable[[], bytes], str]] = {
    "declared width": (lambda: files.png_header(2**31 - 1, 2**31 - 1), "at most 40 megapixels"),
    "declared size": (lambda: files.png_header(13_000, 13_000), "at most 40 megapixels .* got 13000 × 13000"),
    "white square": (lambda: files.encode(Image.new("1", (13_000, 13_000)), "PNG"), "13000 × 13000"),
    "one column": (lambda: files.encode(Image.new("1", (1, 100_000)), "PNG"), "pixels per side, got 1 × 100000"),
    "canvas of an animation": (lambda: files.webp_with_canvas(12_000), "12000 × 12000"),
    "compressed comment": (lambda: files.png_with_compressed_text(100), "Corrupt image"),
    "scans": (lambda: files.jpeg_with_scans(20_000), "Corrupt image"),
    "skipped long rows": (lambda: files.bmp_with_delta(40_000_000), f"{MAX_SIDE} pixels per side"),
    "skipped rows": (lambda: files.bmp_with_delta(MAX_SIDE), ""),
    "tile": (lambda: files.tiff_with_tile(12_288), "Tiled TIFF"),
}


def peak_bytes(work: Callable[[], Any]) -> int:
    """Peak growth of resident memory during the call. Linux only."""
    CLEAR_REFERENCES.write_text("5")  # reset the peak
    before = resident_bytes("VmRSS")
    work()
    return resident_bytes("VmHWM") - before


def resident_bytes(field: str) -> int:
    (line,) = [line for line in STATUS.read_text().splitlines() if line.startswith(field)]
    return int(line.split()[1]) << 10


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("name", BOMBS)
def test_a_decompression_bomb_uses_little_memory(name):
    build, message = BOMBS[name]
    file = build()
    assert len(file) < MAX_FILE_BYTES

    def decode() -> None:
        if message:
            with pytest.raises(ValueError, match=message):
                decode_image(file)
        else:
            decode_image(file)

    if os.access(CLEAR_REFERENCES, os.W_OK):
        assert peak_bytes(decode) < 100_000_000
    else:
        decode()


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("share", [0.02, 0.3, 0.6, 0.9])
def test_a_truncated_file_is_rejected(format_name, share):
    whole = files.encode(Image.effect_noise((64, 64), 50).convert("RGB"), format_name)
    with pytest.raises(ValueError, match=r"[Cc]orrupt image"):
        decode_image(whole[: int(share * len(whole))])


def fifo(folder: Path) -> Path:
    os.mkfifo(folder / "pipe.png")
    return folder / "pipe.png"


def link(folder: Path, target: str) -> Path:
    (folder / "link.png").symlink_to(target)
    return folder / "link.png"


PATHS: dict[str, Callable[[Path], Any]] = {
    "folder": lambda folder: folder,
    "missing": lambda folder: folder / "none.png",
    "long name": lambda folder: folder / ("x" * 5000),
    "null character": lambda folder: str(folder / "a\0b.png"),
    "pipe": fifo,
    "device": lambda folder: "/dev/zero",
    "link to a device": lambda folder: link(folder, "/dev/zero"),
    "link to itself": lambda folder: link(folder, "link.png"),
}


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no pipes or devices in its file system")
@pytest.mark.parametrize("name", PATHS)
def test_a_file_that_is_not_regular_is_rejected_without_blocking(name, tmp_path):
    with pytest.raises(ValueError, match="Upload it again") as caught:
        open_image(PATHS[name](tmp_path))
    assert str(tmp_path) not in str(caught.value)


def test_a_link_to_an_image_is_opened(tmp_path, image_file):
    assert open_image(link(tmp_path, str(image_file))).size == (64, 48)


def test_a_file_above_the_size_limit_is_rejected(tmp_path):
    path = tmp_path / "large.png"
    with path.open("wb") as file:
        file.truncate(MAX_FILE_BYTES + 1)
    with pytest.raises(ValueError, match="at most 10 MB"):
        open_image(path)


def test_at_most_two_images_are_decoded_at_a_time(image_file, monkeypatch):
    running, counts = [], []

    def open_slowly(path):
        running.append(path)
        counts.append(len(running))
        threading.Event().wait(0.02)
        running.pop()
        return Image.open(path)

    monkeypatch.setattr(images, "open_image", open_slowly)
    threads = [threading.Thread(target=images.read_input_image, args=(image_file, PROCESSOR)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(counts) == 8 and max(counts) <= 2


# Prompts


PROMPTS = {
    "whitespace": " \t\n\u3000\u200b ",
    "control characters": "".join(map(chr, range(32))) + "\x7f\x80\x9f",
    "terminal escape codes": "\x1b[31mred\x1b[0m\x1b]0;title\x07",
    "lone surrogates": "\ud800 a \udfff",
    "right to left": "\u202edetect \u2066cat\u2069\u202c",
    "special tokens": "<bos><eos><pad><image></s><unk><loc0001><seg001>",
    "template": "${alert(1)} {{constructor}} </script><img src=x onerror=alert(1)>",
    "log lines": "caption\n2026-01-01 ERROR root: nothing",
    "long word": "x" * 500,
    "combining marks": "e" + "\u0301" * 400,
    "braces": "{} {0} {number} %s",
    "empty": "",
}


@pytest.mark.parametrize("name", PROMPTS)
def test_any_text_is_accepted_as_a_prompt(name, image_file):
    session = make_session()
    submit_run(session, image_file, PROMPTS[name])
    updates = list(handlers.run_pending(session))
    assert all(update.encode() for update in updates if isinstance(update, str))
    assert decoded(updates[-1]).status["kind"] == "done"
    (request,) = session.served_model.model.requests
    assert request["prompt"] == PROMPTS[name].replace("\ud800", "\ufffd").replace("\udfff", "\ufffd")
    assert json.loads(handlers.export_run(session)[1]["text"])["request"]["prompt"] == request["prompt"]


@pytest.mark.parametrize("prompt", [3, 1.5, True, ["caption"], {"text": "caption"}, b"caption"])
def test_a_prompt_that_is_not_a_string_is_rejected(prompt):
    with pytest.raises(ValueError, match="prompt must be a string, got"):
        read_prompt(prompt)


def test_a_long_prompt_is_rejected_with_the_limit(image_file):
    with pytest.raises(ValueError, match=f"{MAX_PROMPT_CHARACTERS} characters, got {MAX_PROMPT_CHARACTERS + 1}"):
        read_prompt("x" * (MAX_PROMPT_CHARACTERS + 1))
    with pytest.raises(ValueError, match=f"{MAX_PROMPT_TOKENS} tokens, got {MAX_PROMPT_TOKENS + 1}"):
        check_prompt_length(PROCESSOR, "x" * (MAX_PROMPT_TOKENS + 1))
    last = run_page(make_session(), image_file, "猫" * MAX_PROMPT_CHARACTERS)[-1]
    assert status_text(last) == "prompt must have at most 512 tokens, got 2000."


# Requests


WRONG_VALUES = [
    float("nan"), float("inf"), -float("inf"), 1e308, 10**400, -(10**5000), True, "5", "", [1], {"a": 1}, (), b"1",
    0.5, None,
]  # fmt: skip


@pytest.mark.parametrize("name", ["max_new_tokens", "top_k", "top_n"])
@pytest.mark.parametrize("value", WRONG_VALUES, ids=lambda value: type(value).__name__)
def test_a_value_that_is_not_an_integer_is_rejected_with_a_short_message(name, value):
    with pytest.raises(ValueError, match=f"^{name} ") as caught:
        read_request("caption en", **{**DECODING, name: value})
    assert len(str(caught.value)) < 120


@pytest.mark.parametrize("name", ["temperature", "top_p", "time_limit"])
@pytest.mark.parametrize("value", [*WRONG_VALUES[:-3], "hot"], ids=lambda value: type(value).__name__)
def test_a_value_that_is_not_a_number_is_rejected_with_a_short_message(name, value):
    with pytest.raises(ValueError, match=f"^{name} ") as caught:
        read_request("caption en", **{**DECODING, name: value})
    assert len(str(caught.value)) < 120


def nested(depth: int) -> list:
    value: list = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize("value", ["12", {"a": 1}, 5, [10**400], [1.5], [None], [[1]], [True], nested(10_000)])
def test_values_that_are_not_token_ids_are_rejected(value):
    with pytest.raises(ValueError, match=r"^forced_ids(\[0\])? must "):
        read_request("caption en", **DECODING, forced_ids=value)


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    blocks = ui.build_app(ready_served_model(FakeModel(("▁a", "▁cat"), seconds_per_token=0.01)))
    server_module.launch(blocks, prevent_thread_lock=True, quiet=True)
    yield blocks.local_url.rstrip("/")
    blocks.close()


def post(url: str, body: bytes, media_type: str = "application/json") -> tuple[int, str]:
    """(status, text) of the response."""
    request = urllib.request.Request(url, body, {"Content-Type": media_type})
    try:
        with urllib.request.urlopen(request, timeout=30) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def store(server: str, content: bytes) -> tuple[int, str]:
    """Upload a file as the page does."""
    head = b'--limit\r\nContent-Disposition: form-data; name="files"; filename="image.png"\r\n\r\n'
    body = head + content + b"\r\n--limit--\r\n"
    return post(f"{server}/gradio_api/upload", body, "multipart/form-data; boundary=limit")


@pytest.fixture(scope="module")
def inputs(server, image_file) -> list[Any]:
    """Valid inputs of /generate."""
    (path,) = json.loads(store(server, image_file.read_bytes())[1])
    stored = {"path": path, "meta": {"_type": "gradio.FileData"}}
    return [stored, "caption en", 5, 0, 0, 1, None, 3, None, None, None]


def call(server: str, data: Any, name: str = "generate") -> str:
    """All events of a call."""
    url = f"{server}/gradio_api/call/{name}"
    status, text = post(url, json.dumps({"data": data}).encode())
    assert status == 200, text
    with urllib.request.urlopen(f"{url}/{json.loads(text)['event_id']}", timeout=30) as reply:
        return reply.read().decode()


def error_of(events: str) -> str:
    """The message of a call that failed."""
    last = events.split("event: error\ndata: ")[1]
    return json.loads(last.split("\n")[0])["error"]


FILE = {"meta": {"_type": "gradio.FileData"}}
WRONG_CALLS: dict[str, tuple[int, Any, str]] = {
    "path as a string": (0, "/etc/passwd", "Invalid inputs"),
    "number as image": (0, 5, "Invalid inputs"),
    "list as image": (0, [1], "Invalid inputs"),
    "image that was not uploaded": (0, {"path": "/etc/passwd", **FILE}, "Invalid inputs"),
    "image on another server": (0, {"path": "http://127.0.0.1:9/x.png", **FILE}, "Invalid inputs"),
    "no image": (0, None, "Choose an image"),
    "list as prompt": (1, ["caption"], "prompt must be a string, got list"),
    "long prompt": (1, "x" * 100_000, "at most 2000 characters, got 100000"),
    "string as number": (2, "5", "max_new_tokens must be an integer"),
    "NaN": (3, float("nan"), "temperature must be finite, got nan"),
    "infinity": (5, float("inf"), "top_p must be finite, got inf"),
    "integer of 400 digits": (4, 10**400, "top_k must be in the range of a 64-bit integer"),
    "bool as number": (7, True, "top_n must be an integer, got True"),
    "nested ids": (8, nested(80), "forced_ids[0] must be"),
    "object as time limit": (9, {"a": 1}, "time_limit must be a number, got dict"),
    "unknown model": (10, "x" * 1000, "scripted"),
}


@pytest.mark.parametrize("name", WRONG_CALLS)
def test_an_invalid_input_of_a_call_is_reported(server, inputs, name):
    place, value, message = WRONG_CALLS[name]
    events = call(server, [*inputs[:place], value, *inputs[place + 1 :]])
    assert message in error_of(events) and "passwd" not in events


def test_a_rejected_call_is_logged_without_its_inputs(server, inputs, caplog):
    caplog.set_level(logging.INFO)
    call(server, ["/etc/passwd", *inputs[1:]])
    assert re.search(r"call rejected: \w+ at \w+\.py:\d+ ", caplog.text) and "passwd" not in caplog.text


def test_only_the_path_of_an_upload_is_used(server, inputs):
    events = call(server, [{**inputs[0], "url": "data:text/html;base64,AAAA"}, *inputs[1:]])
    assert '"finish_reason": "eos"' in events


@pytest.mark.parametrize("count", [0, 3])
@pytest.mark.parametrize("name", ["generate", "inspect"])
def test_missing_inputs_are_reported(server, inputs, name, count):
    assert "/gradio_api/info" in error_of(call(server, inputs[:count], name))


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[1]", b'{"data": null}', b'{"data": 5}', b"{}", b'{"data": ["\xff\xfe"]}',
        b'{"data": [' + b"9" * 5000 + b"]}", b'{"data": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
    ids=range(9),
)  # fmt: skip
def test_an_invalid_request_body_is_rejected(server, body):
    status, text = post(f"{server}/gradio_api/call/generate", body)
    assert status in (400, 422) and json.loads(text)["detail"]


def test_an_upload_above_the_size_limit_is_rejected(server):
    status, text = store(server, bytes(MAX_FILE_BYTES + 2_000_000))
    assert status == 413 and text


def test_every_event_of_the_page_accepts_values_of_any_type(server):
    """Missing values, wrong types, and events with invalid data."""
    blocks = json.loads(urllib.request.urlopen(f"{server}/config", timeout=30).read())
    for event in blocks["dependencies"]:
        for value in (None, [{}], {"path": "/dev/zero"}):
            for data in (None, [1], {"run": [], "index": {}, "token_id": "x", "runs": [None], "kind": 5}):
                body = {"data": [value] * len(event["inputs"]), "fn_index": event["id"], "session_hash": "hostile"}
                status, text = post(
                    f"{server}/gradio_api/run/predict", json.dumps({**body, "event_data": data}).encode()
                )
                assert status == 200 or json.loads(text)["error"], (event["api_name"], value, data, text)


def test_invalid_calls_do_not_affect_another_user(server, inputs, image_file):
    events: list[list[dict]] = []

    def generate() -> None:
        client = Client(server, verbose=False)
        for _ in range(5):
            job = client.submit(image=handle_file(image_file), prompt="caption en", top_n=3, api_name="/generate")
            events.append([event["step"]["piece"] for event in job if event["step"]])

    user = threading.Thread(target=generate)
    user.start()
    while user.is_alive():
        for place, value, _ in WRONG_CALLS.values():
            call(server, [*inputs[:place], value, *inputs[place + 1 :]])
    user.join()
    assert events == [["▁a", "▁cat", "<eos>"]] * 5


# Run files


def document() -> dict[str, Any]:
    return json.loads(run_file.write_run(make_run(1, "▁a", "▁b"), VERSIONS))


def read(document: Any) -> None:
    text = document if isinstance(document, str) else json.dumps(document)
    run_file.read_run(text.encode("utf-8", "surrogatepass"), 1)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("format", None, "format must be 'paligemma-run/1', got None"),
        ("picture/width", 40_000_001, "picture.width"),
        ("picture/height", 600_000, "at most 40000000 pixels, got 80 x 600000"),
        ("picture/shown", "not base64", "picture.shown must be a JPEG file"),
        ("picture/shown", "A" * 4_000_000, "picture.shown"),
        ("picture/seen", 5, "picture.seen"),
        ("request/prompt", "\ud800", "request.prompt: .* unicode"),
        ("request/seed", 10**30, "request.seed"),
        ("request/forced_ids", [7], "must begin with request.forced_ids"),
        ("request/forced_ids", nested(50), "request.forced_ids"),
        ("tokens", {}, "tokens: Input should be a valid list"),
        ("tokens", [None], r"tokens\[0\]: Input should be a valid dictionary"),
        ("tokens/0/token_id", -1, "token_id"),
        ("tokens/0/token_id", 10**9, "token_id"),
        ("tokens/0/piece", "\udfff", "piece: .* unicode"),
        ("tokens/0/logit", 1e300, "logit"),
        ("tokens/0/logprob", -3.0, "logprob of token 0 must be logit - logsumexp"),
        ("tokens/0/prob", 0.5, r"prob of token 0 must be exp\(logprob\)"),
        ("tokens/0/rank", 2, "rank is 2"),
        ("tokens/0/top", [], "top: List should have at least 1 item"),
        ("tokens/0/top/1/token_id", 0, "distinct ids"),
        ("tokens/0/seconds", 1000, "seconds must not decrease"),
        ("branched_at", 3, "branched_at"),
        ("finish_reason", "unknown", "finish_reason: Input should be 'eos', 'length', 'time' or 'stopped'"),
        ("versions", {str(number): "1" for number in range(21)}, "versions: .* at most 20"),
    ],
)
def test_an_invalid_or_contradictory_field_is_named(path, value, message):
    run = document()
    set_value(run, path, value)
    with pytest.raises(ValueError, match=message) as caught:
        read(run)
    assert len(str(caught.value)) < 300


def test_unsorted_candidates_are_rejected():
    run = document()
    run["tokens"][0]["top"].reverse()
    with pytest.raises(ValueError, match="descending order"):
        read(run)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not valid JSON"),
        ("null", "not a valid run file"),
        ('"text"', "not a valid run file"),
        ("[" * 100_000 + "]" * 100_000, "not valid JSON"),
        ('{"a":' * 100_000, "not valid JSON"),
        ("9" * 5000, "at most 40 digits, got 5000"),
        ('{"format": 1, "format": 2}', "Duplicate field 'format'"),
        ('{"format": "paligemma-run/1", "x": 1}', "missing fields: 'model'.*unexpected fields: 'x'"),
        ('{"format": "paligemma-run/1", "' + "x" * 100_000 + '": 1}', "unexpected fields: 'xxx"),
        ("{" + ", ".join(f'"{number}": 1' for number in range(300_000)) + "}", "at most 50 fields, got 300000"),
        ('{"a": Infinity}', "Infinity"),
        ('{"a": 1e999}', "not a valid run file"),
        ("\ud800", "not valid JSON"),
    ],
    ids=range(13),
)
def test_other_files_are_rejected_with_a_short_message(text, message):
    with pytest.raises(ValueError, match=message) as caught:
        read(text)
    assert len(str(caught.value)) < 400


def test_a_huge_file_is_rejected():
    with pytest.raises(ValueError, match="at most 10 MB"):
        run_file.read_run(bytes(MAX_FILE_BYTES + 1), 1)


def test_a_file_with_a_byte_order_mark_is_valid():
    assert run_file.read_run(b"\xef\xbb\xbf" + json.dumps(document()).encode(), 3).number == 3


def test_a_failed_import_does_not_change_the_current_run(image_file, tmp_path):
    session = make_session()
    run_page(session, image_file)
    current = session.history.current
    update = decoded(import_file(session, tmp_path, "{}"))
    assert update.status["kind"] == "error" and session.history.current is current
    assert handlers.import_run(session, {"path": "/dev/zero"}, None, "") == gr.skip()  # not marked as uploaded
    assert answer(session) and len(list(session.history)) == 1
