"""Property tests with random values: each is answered, or rejected with a documented error."""

from __future__ import annotations

import itertools
import json
import math
import os
from typing import Any

import gradio as gr
import hostile_files as files
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from run_helpers import VERSIONS, make_run
from webapp_helpers import decoded, ready_served_model, submit_run, upload

import paligemma
from paligemma.generation import NonFiniteLogitsError
from paligemma.parsing import parse
from paligemma.webapp import api, events, handlers, run_file
from paligemma.webapp.page_update import encode_update, show_earlier_run
from paligemma.webapp.render import objects
from paligemma.webapp.served_models import ServedModel
from paligemma.webapp.session import Session
from paligemma.webapp.uploads import FORMATS, decode_image

# CI repeats the same examples; elsewhere they are new in each run.
settings.register_profile(
    "fuzz",
    deadline=None,
    database=None,
    derandomize=os.environ.get("CI") == "true",
    suppress_health_check=list(HealthCheck),
)
settings.load_profile("fuzz")

MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "LAB", "HSV", "I", "F", "I;16")
ANY_TEXT = st.text(st.characters(exclude_categories=()), max_size=40)
ANY_NUMBER = st.one_of(st.integers(), st.integers(-(10**400), 10**400), st.floats(), st.booleans())
ANY_VALUE = st.one_of(st.none(), ANY_NUMBER, ANY_TEXT, st.lists(ANY_NUMBER), st.dictionaries(ANY_TEXT, ANY_NUMBER))
ANY_JSON = st.recursive(
    st.one_of(st.none(), ANY_NUMBER, ANY_TEXT),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(ANY_TEXT, inner, max_size=4)),
    max_leaves=8,
)
ANY_PROMPT = st.one_of(ANY_TEXT, ANY_TEXT, ANY_TEXT, ANY_VALUE)
VALID_REQUESTS = st.fixed_dictionaries(
    {
        "max_new_tokens": st.integers(1, 3),
        "temperature": st.one_of(st.just(0), st.floats(0, 100)),
        "top_k": st.integers(0, 10),
        "top_p": st.one_of(st.just(1), st.floats(0.001, 1)),
        "seed": st.one_of(st.none(), st.integers(0, 2**63 - 1)),
        "top_n": st.integers(1, 50),
        "forced_ids": st.lists(st.integers(0, 50), max_size=3),
        "time_limit": st.one_of(st.none(), st.floats(0.1, 10)),
    }
)


@st.composite
def requests(draw: st.DrawFn) -> dict[str, Any]:
    """A valid request with at most one random value; a second one would never be reached."""
    request = draw(VALID_REQUESTS)
    field = draw(st.sampled_from((*[None] * len(request), *request)))
    return request | ({field: draw(ANY_VALUE)} if field else {})


@st.composite
def images(draw: st.DrawFn) -> Image.Image:
    """A small image of noise in any mode, with metadata as from a file."""
    image = Image.new(draw(st.sampled_from(MODES)), (draw(st.integers(1, 40)), draw(st.integers(1, 40))))
    image.frombytes(np.random.default_rng(draw(st.integers(0, 99))).bytes(len(image.tobytes())))
    values = st.one_of(st.binary(max_size=20), st.integers(-1, 300), st.tuples(st.integers(0, 255)))
    image.info = draw(st.dictionaries(st.sampled_from(("transparency", "exif", "xmp", "dpi")), values))
    return image


@st.composite
def mutated(draw: st.DrawFn, file: bytes) -> bytes:
    """A file with some bytes changed, removed or inserted."""
    changed = bytearray(file)
    for _ in range(draw(st.integers(1, 6))):
        start = draw(st.integers(0, len(changed)))
        length = draw(st.sampled_from((0, 1, 1, 1, 4, len(changed))))
        changed[start : start + length] = draw(st.binary(max_size=4))
    return bytes(changed)


# Images, prompts, numbers


@pytest.fixture(scope="module")
def served_model(tiny_checkpoint) -> ServedModel:
    return ready_served_model(paligemma.load(tiny_checkpoint), "tiny")


@settings(max_examples=150)
@given(image=images(), prompt=ANY_PROMPT, request=requests())
def test_the_library_answers_or_raises_a_documented_error(served_model, image, prompt, request):
    try:
        steps = list(itertools.islice(served_model.model.stream(image, prompt, **request), 3))
    except (ValueError, NonFiniteLogitsError) as error:
        assert str(error)
        return
    assert "".join(step.text_delta for step in steps) == steps[-1].text
    for step in steps:
        assert 0 <= step.prob <= 1 and 0 <= step.sampled_prob <= 1 and math.isfinite(step.logit) and step.rank >= 1
        assert sum(candidate.prob for candidate in step.top) <= 1 + 1e-9


@settings(max_examples=150)
@given(prompt=ANY_PROMPT, request=requests())
def test_the_page_and_the_api_answer_or_report_an_error(served_model, image_file, prompt, request):
    on_page = {name: value for name, value in request.items() if name not in ("forced_ids", "time_limit")}
    session = Session((served_model,))
    submit_run(session, image_file, prompt, **on_page)
    page_update = list(handlers.run_pending(session))
    assert all(one.encode() for one in page_update if isinstance(one, str))
    status = decoded(page_update[-1]).status
    assert status["kind"] in ("done", "error") and status.get("code") != "server.internal"
    try:
        assert json.dumps(
            list(api.answer_over_api((served_model,), upload(image_file), prompt, **request))[-1], allow_nan=False
        )
    except gr.Error as error:
        assert error.message and not error.message.startswith("Internal error")


FILES = [files.encode(files.RGB, format_name) for format_name in FORMATS]
FILES += [
    files.with_orientation(6),
    files.with_palette_transparency(),
    files.animation("GIF", 3),
    files.animation("WEBP", 3),
]
FILES += [files.encode(files.RGB.convert("F"), "TIFF"), files.encode(files.RGB, "TIFF", compression="tiff_lzw")]


@settings(max_examples=300)
@given(file=st.sampled_from(FILES).flatmap(mutated))
def test_a_corrupt_image_is_decoded_or_rejected(file):
    try:
        image = decode_image(file)
    except ValueError as error:
        assert str(error)
        return
    assert image.mode == "RGB" and not image.info


# Answers

LOCATION = st.integers(0, 1023).map("<loc{:04d}>".format)
PIECES = st.one_of(
    LOCATION,
    st.integers(0, 9999).map("<loc{:04d}>".format),
    st.lists(LOCATION, min_size=4, max_size=4).map(lambda box: "".join((*sorted(box), " cat"))),
    st.integers(0, 999).map("<seg{:03d}>".format),
    st.sampled_from((" ; ", ";", " cat", "<loc", "<seg", ">", "\n", "<loc0001>" * 4, "<seg001>" * 16, "</s>")),
    ANY_TEXT,
)


@settings(max_examples=300)
@given(pieces=st.lists(PIECES, max_size=30), width=st.integers(1, 10**7), height=st.integers(1, 10**7))
def test_any_answer_is_parsed_complete_or_growing(pieces, width, height):
    text = "".join(pieces)
    parsed = parse(text, width, height)
    for detection in parsed.detections:
        x_min, y_min, x_max, y_max = detection.box
        assert 0 <= x_min <= x_max < width and 0 <= y_min <= y_max < height
        assert ";" not in detection.label and not detection.growing and len(detection.seg or ()) in (0, 16)
    spans = sorted(one.span for one in (*parsed.detections, *parsed.problems))
    assert all(first[1] <= second[0] for first, second in itertools.pairwise(spans))
    assert all(text[slice(*one.span)] == one.text and one.reason for one in parsed.problems)
    complete: list = []
    for end in itertools.accumulate(map(len, pieces)):
        found = [one for one in parse(text[:end], width, height, ended=False).detections if not one.growing]
        assert found[: len(complete)] == complete  # does not change later
        complete = found


@settings(max_examples=60)
@given(pieces=st.lists(PIECES, max_size=12))
def test_the_objects_of_any_answer_are_json(pieces):
    run = make_run(1, *pieces)
    assert json.dumps(objects.object_list(run), allow_nan=False)
    assert json.dumps(events.detections(run.steps, run.image.size), allow_nan=False)


# Run files

RUN = run_file.write_run(make_run(1, "▁a", "<loc0001>"), VERSIONS)


def paths(value: Any, path: tuple = ()) -> list[tuple]:
    """The path of every value in a JSON document."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(inner for key, item in items for inner in paths(item, (*path, key)))]


@st.composite
def mutated_runs(draw: st.DrawFn) -> bytes:
    """A run file with values changed, removed or swapped."""
    document = {"root": json.loads(RUN)}
    for _ in range(draw(st.integers(1, 3))):
        *parents, name = draw(st.sampled_from(paths(document)[1:]))
        holder: Any = document
        for parent in parents:
            holder = holder[parent]
        if draw(st.booleans()) and isinstance(holder, dict) and parents:
            del holder[name]
        else:
            siblings = st.sampled_from(list(holder.values()) if isinstance(holder, dict) else holder)
            holder[name] = draw(st.one_of(ANY_JSON, siblings))
    return json.dumps(document["root"]).encode("utf-8", "surrogatepass")


@settings(max_examples=300)
@given(file=st.one_of(mutated_runs(), mutated(RUN.encode()), ANY_JSON.map(lambda value: json.dumps(value).encode())))
def test_a_run_file_is_imported_or_rejected(served_model, file):
    try:
        run = run_file.read_run(file, 1)
    except ValueError as error:
        assert len(str(error)) < 1000
        return
    session = Session((served_model,))
    assert encode_update(session, show_earlier_run(session, session.history.add(run))).encode()
    imported = run_file.read_run(run_file.write_run(run, VERSIONS).encode(), 1)
    assert imported.steps == run.steps and imported.request == run.request
