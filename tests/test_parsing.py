"""Parsing of `detect` and `segment` answers: complete, malformed and streaming."""

import itertools
import random

import pytest

from paligemma.parsing import Detection, location_token_indices, parse

BOX = "<loc0256><loc0128><loc0512><loc1023>"
CODES = "".join(f"<seg{code:03d}>" for code in range(0, 128, 8))


def detections(text: str, ended: bool = True) -> tuple[Detection, ...]:
    return parse(text, 1024, 512, ended).detections


def only_problem(text: str) -> tuple[str, str]:
    parsed = parse(text, 1024, 512)
    assert not parsed.detections
    (problem,) = parsed.problems
    assert text[slice(*problem.span)] == problem.text
    return problem.kind, problem.reason


def test_box_is_in_pixels_with_x_first() -> None:
    (found,) = detections(f"{BOX} cat")
    assert found.box == (128, 128, 1023, 256)
    assert found.locations == (256, 128, 512, 1023)
    assert (found.label, found.seg, found.growing) == ("cat", None, False)


def test_box_is_within_the_image() -> None:
    (found,) = parse("<loc0000><loc0000><loc1023><loc1023> all", 7, 3).detections
    assert found.box[0] == found.box[1] == 0
    assert found.box[2] < 7 and found.box[3] < 3


def test_several_objects_with_mask_codes() -> None:
    text = " ; ".join(f"{BOX}{CODES} thing {index}" for index in range(5))
    found = detections(text)
    assert [detection.label for detection in found] == [f"thing {index}" for index in range(5)]
    assert all(detection.seg == tuple(range(0, 128, 8)) for detection in found)
    assert [text[slice(*detection.span)] for detection in found] == text.split(" ; ")


@pytest.mark.parametrize(
    "label",
    ["", "cat", "traffic light", "T-shirt", "dog's", "a/b", "snake_case", "猫", "<img src=x>", "1 < 2"],
)
def test_label_is_returned_as_generated(label: str) -> None:
    first, second = detections(f"{BOX} {label} ; {BOX} cat")
    assert (first.label, second.label) == (label, "cat")


def test_repeated_label_gives_two_objects() -> None:
    assert [detection.label for detection in detections(f"{BOX} cat ; {BOX} cat")] == ["cat", "cat"]


def test_next_box_ends_a_label_without_semicolon() -> None:
    assert [detection.label for detection in detections(f"{BOX} cat {BOX}{CODES} dog")] == ["cat", "dog"]


def test_text_around_objects_is_ignored() -> None:
    parsed = parse(f"I see ; {BOX} cat ; and more", 10, 10)
    assert [detection.label for detection in parsed.detections] == ["cat"]
    assert not parsed.problems


@pytest.mark.parametrize("text", ["", "\n", "a cat on a mat", " ; ; ", "<loc12>", "<seg1>", "<loc٠١٢٣>"])
def test_plain_text_has_no_detections(text: str) -> None:
    parsed = parse(text, 10, 10)
    assert parsed.detections == parsed.problems == ()


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
def test_wrong_number_of_location_tokens(count: int) -> None:
    assert only_problem("<loc0001>" * count + " cat") == (
        "locations",
        f"{count} location tokens instead of 4",
    )


@pytest.mark.parametrize("count", [1, 15, 17, 32])
def test_wrong_number_of_mask_tokens(count: int) -> None:
    assert only_problem(BOX + "<seg001>" * count + " cat") == (
        "codes",
        f"{count} mask tokens instead of 16 or none",
    )


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (CODES, "locations"),
        ("<loc0500><loc0000><loc0499><loc0001> cat", "order"),
        ("<loc0000><loc0500><loc0001><loc0499> cat", "order"),
        ("<loc0000><loc0000><loc1024><loc0001> cat", "range"),
        (BOX + "<seg128>" * 16, "range"),
    ],
)
def test_malformed_objects_are_reported(text: str, kind: str) -> None:
    assert only_problem(text)[0] == kind


def test_box_with_zero_area_is_a_detection() -> None:
    (found,) = detections("<loc0100><loc0100><loc0100><loc0100> dot")
    assert found.box[0] == found.box[2]


def test_problem_does_not_affect_other_objects() -> None:
    parsed = parse(f"{BOX} cat ; <loc0001> dog ; {BOX} cow", 10, 10)
    assert [detection.label for detection in parsed.detections] == ["cat", "cow"]
    assert [problem.text for problem in parsed.problems] == ["<loc0001> dog"]


def test_streaming_returns_an_object_once_its_label_has_begun() -> None:
    text = f"{BOX}{CODES} red cat ; {BOX} dog"
    label_start, object_end = text.index("red") + 1, text.index(";") + 1
    for end in range(len(text)):
        parsed = parse(text[:end], 10, 10, ended=False)
        assert not parsed.problems
        first = parsed.detections[:1]
        assert bool(first) == (end >= label_start)
        assert all(detection.growing == (end < object_end) for detection in first)
    assert [detection.label for detection in detections(text, ended=True)] == ["red cat", "dog"]


def test_streaming_reports_a_problem_once_its_object_is_complete() -> None:
    assert not parse("<loc0001> cat", 10, 10, ended=False).problems
    assert parse("<loc0001> cat ;", 10, 10, ended=False).problems
    assert parse("<loc0001> cat", 10, 10).problems


def test_location_token_indices() -> None:
    locations = ["<loc0001>", "<loc0002>", "<loc0003>", "<loc0004>"]
    pieces = [
        "▁see",
        "<0xF0>",
        "<loc0007>",
        "▁;",
        *locations,
        "▁cat",
        "▁;",
        *locations,
        *["<seg001>"] * 16,
        "<eos>",
    ]
    text = f" see\ufffd<loc0007> ;{''.join(locations)} cat ;{''.join(locations)}{'<seg001>' * 16}"
    cat, other = detections(text)
    assert location_token_indices(cat, pieces) == (4, 5, 6, 7)
    assert location_token_indices(other, pieces) == (10, 11, 12, 13)


def test_locations_spelled_with_ordinary_tokens_have_no_indices() -> None:
    (found,) = detections(f"{BOX} cat")
    assert location_token_indices(found, list(f"{BOX} cat")) == ()


@pytest.mark.parametrize(("width", "height"), [(0, 5), (5, 0), (-1, 5)])
def test_image_size_must_be_positive(width: int, height: int) -> None:
    with pytest.raises(ValueError, match="positive"):
        parse("", width, height)


def test_random_text_never_raises() -> None:
    rng = random.Random(0)
    parts = [
        BOX,
        CODES,
        "<loc0001>",
        "<seg127>",
        "<loc9999>",
        "<seg999>",
        ";",
        " ; ",
        "<",
        ">",
        "\n",
        "cat",
        "\ud800",
    ]
    parts += ["<loc", "0", "猫", "\x00", "<loc00", "{{x}}", "</script>"]
    for _ in range(3000):
        text = "".join(rng.choices(parts, k=rng.randrange(25)))
        for ended in (True, False):
            parsed = parse(text, 640, 480, ended)
            spans = sorted(item.span for item in (*parsed.detections, *parsed.problems))
            assert all(before[1] <= after[0] for before, after in itertools.pairwise(spans))
            assert all(0 <= detection.box[0] <= detection.box[2] < 640 for detection in parsed.detections)
            assert all(0 <= detection.box[1] <= detection.box[3] < 480 for detection in parsed.detections)
