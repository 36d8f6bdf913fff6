"""PaliGemma's answers to `detect` and `segment`, read: "<loc0123>..." -> Detection. No model, no torch.

One object is written as four location tokens (y_min, x_min, y_max, x_max), for `segment` sixteen codes of its
mask, and its label; objects are separated by " ; ":

    <loc0051><loc0309><loc0708><loc0646> shoe ; <loc0100><loc0200><loc0300><loc0400><seg012>...<seg127> cat

A model may write anything, so that nothing here raises on a text: what is not an object as above is either
plain text, which is left alone, or a `Problem`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

# A location k is k/1024 of the side, as in Google's own demos and in what users compare with. big_vision's
# evaluation divides by 1023; the two differ by at most a thousandth of the side.
LOCATION_BINS = 1024
CODEBOOK_SIZE = 128
LOCATIONS_PER_BOX = 4
CODES_PER_MASK = 16

Box = tuple[float, float, float, float]
ProblemKind = Literal["locations", "codes", "range", "order"]

# [0-9], since \d would take digits of every script.
_LOCATION = re.compile(r"<loc([0-9]{4})>")
_CODE = re.compile(r"<seg([0-9]{3})>")
_TOKEN = re.compile(rf"{_LOCATION.pattern}|{_CODE.pattern}")
_OBJECT = re.compile(
    r"(?P<locations>(?:<loc[0-9]{4}>)*)\s*(?P<codes>(?:<seg[0-9]{3}>)*)"
    r"(?P<label>[^;]*?)(?P<end>;|(?=<loc[0-9]{4}>|<seg[0-9]{3}>)|\Z)"
)


@dataclass(frozen=True)
class Detection:
    """One object of an answer.

    `box` is (x_min, y_min, x_max, y_max) in pixels of the upright picture; it may be without area. `locations`
    are the four numbers as written (y_min, x_min, y_max, x_max; 0..1023) and `seg` the 16 codes (0..127) of the
    mask, if there is one. `span` is where the object stands in the text (from its first token to the end of its
    label), and `first_location` how many location tokens stand before it. `growing` is True while more of the
    label may come.
    """

    label: str
    box: Box
    locations: tuple[int, int, int, int]
    seg: tuple[int, ...] | None
    span: tuple[int, int]
    first_location: int
    growing: bool = False


@dataclass(frozen=True)
class Problem:
    """What looks like an object and is none: its text, its place in the answer, and what is wrong with it.

    `kind` is "locations" (not four of them), "codes" (neither none nor sixteen), "range" (a number that no
    token has) or "order" (a box that ends before it begins); `reason` says the same in English words.
    """

    text: str
    span: tuple[int, int]
    kind: ProblemKind
    reason: str


@dataclass(frozen=True)
class Parsed:
    """All objects and all problems of an answer, each in the order of the text."""

    detections: tuple[Detection, ...]
    problems: tuple[Problem, ...]


def parse(text: str, width: int, height: int, ended: bool = True) -> Parsed:
    """Read an answer for a picture of `width` x `height` pixels. No text makes it raise.

    While an answer streams, call it with the text so far and `ended=False`: the last object, which no ";" and no
    next object has closed yet, is then returned once its label has begun (with `growing=True`), and is never a
    problem.

    Raises ValueError for a size that is not positive.
    """
    if width <= 0 or height <= 0:
        raise ValueError(f"the picture is {width} x {height} pixels; both must be positive")
    detections: list[Detection] = []
    problems: list[Problem] = []
    position = locations_so_far = 0
    while start := _TOKEN.search(text, position):
        match = _OBJECT.match(text, start.start())
        position = match.end()
        is_open = not ended and match.end("label") == len(text)
        if problem := _find_problem(match):
            if not is_open:
                problems.append(problem)
        elif not is_open or _label_has_begun(match):
            detections.append(_to_detection(match, width, height, locations_so_far, is_open))
        locations_so_far += len(_numbers(_LOCATION, match["locations"]))
    return Parsed(tuple(detections), tuple(problems))


def location_token_indices(detection: Detection, pieces: Sequence[str]) -> tuple[int, ...]:
    """Which of the answer's tokens are the four location tokens of `detection`.

    `pieces` are the tokenizer's pieces of the whole answer so far, special ones included. The result has four
    indices into it, or none where the pieces do not hold these locations (a model can spell "<loc0001>" in
    letters).
    """
    places = [index for index, piece in enumerate(pieces) if _LOCATION.fullmatch(piece)]
    chosen = places[detection.first_location : detection.first_location + LOCATIONS_PER_BOX]
    written = tuple(int(_LOCATION.fullmatch(pieces[index])[1]) for index in chosen)
    return tuple(chosen) if written == detection.locations else ()


def _numbers(token: re.Pattern[str], text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in token.findall(text))


def _span(match: re.Match[str]) -> tuple[int, int]:
    """From the object's first token to the last character of its label, spaces around it left out."""
    return match.start(), match.start() + len(match[0][: match.end("label") - match.start()].rstrip())


def _label_has_begun(match: re.Match[str]) -> bool:
    """Whether the text has moved on from the tokens; a "<" may still become one of them."""
    label = match["label"].lstrip()
    return bool(label) and not label.startswith("<")


def _find_problem(match: re.Match[str]) -> Problem | None:
    """What is wrong with an object: the first thing found, or None."""
    locations, codes = _numbers(_LOCATION, match["locations"]), _numbers(_CODE, match["codes"])
    kind: ProblemKind
    if len(locations) != LOCATIONS_PER_BOX:
        kind, reason = "locations", f"{len(locations)} location tokens instead of {LOCATIONS_PER_BOX}"
    elif len(codes) not in (0, CODES_PER_MASK):
        kind, reason = "codes", f"{len(codes)} mask tokens instead of {CODES_PER_MASK} or none"
    elif max(locations) >= LOCATION_BINS or max(codes, default=0) >= CODEBOOK_SIZE:
        kind, reason = "range", f"a number above <loc{LOCATION_BINS - 1}> or <seg{CODEBOOK_SIZE - 1}>"
    elif locations[2] < locations[0]:
        kind, reason = "order", f"its lower edge ({locations[2]}) lies above its upper edge ({locations[0]})"
    elif locations[3] < locations[1]:
        kind, reason = "order", f"its right edge ({locations[3]}) lies left of its left edge ({locations[1]})"
    else:
        return None
    start, end = _span(match)
    return Problem(match.string[start:end], (start, end), kind, reason)


def _to_detection(match: re.Match[str], width: int, height: int, first_location: int, growing: bool) -> Detection:
    y_min, x_min, y_max, x_max = locations = _numbers(_LOCATION, match["locations"])
    return Detection(
        label=match["label"].strip(),
        box=(
            x_min / LOCATION_BINS * width,
            y_min / LOCATION_BINS * height,
            x_max / LOCATION_BINS * width,
            y_max / LOCATION_BINS * height,
        ),
        locations=locations,
        seg=_numbers(_CODE, match["codes"]) or None,
        span=_span(match),
        first_location=first_location,
        growing=growing,
    )
