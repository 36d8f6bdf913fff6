"""Parse answers to `detect` and `segment` prompts into bounding boxes, mask codes and labels.

An object is four location tokens (y_min, x_min, y_max, x_max), for `segment` 16 mask tokens, and a label. Objects are
separated by " ; ":

    <loc0051><loc0309><loc0708><loc0646> shoe ; <loc0100><loc0200><loc0300><loc0400><seg012>...<seg127> cat

Model output can be any text, so `parse` accepts every string: malformed objects are returned as
`Problem`, and other text is ignored. This module does not depend on torch.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

# <locK> is at K / 1024 of the height or width, as in Google's demos. (big_vision's evaluation divides by 1023, which
# moves a box by at most 0.1% of the height or width.)
LOCATION_BINS = 1024
LOCATIONS_PER_BOX = 4
MASK_CODEBOOK_SIZE = 128
CODES_PER_MASK = 16

Box = tuple[float, float, float, float]
ProblemKind = Literal["locations", "codes", "range", "order"]

# [0-9] instead of \d, which matches digits of all scripts.
_LOCATION = re.compile(r"<loc([0-9]{4})>")
_CODE = re.compile(r"<seg([0-9]{3})>")
_TOKEN = re.compile(rf"{_LOCATION.pattern}|{_CODE.pattern}")
_OBJECT = re.compile(
    r"(?P<locations>(?:<loc[0-9]{4}>)*)\s*(?P<codes>(?:<seg[0-9]{3}>)*)"
    r"(?P<label>[^;]*?)(?P<end>;|(?=<loc[0-9]{4}>|<seg[0-9]{3}>)|\Z)"
)


@dataclass(frozen=True)
class Detection:
    """A detected or segmented object.

    Attributes:
        label: the text after the tokens, stripped; may be empty.
        box: (x_min, y_min, x_max, y_max) in pixels of the upright image; may have zero area.
        locations: (y_min, x_min, y_max, x_max) as generated, each 0..1023.
        seg: the 16 mask codes, each 0..127; None for a box without a mask.
        span: start and end of the object in the text, from its first token to the end of its label.
        first_location: number of location tokens in the text before this object.
        growing: True while the label may still be extended by later tokens.
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
    """A malformed object.

    Attributes:
        text: the object as generated.
        span: its start and end in the answer.
        kind: "locations" (not 4 location tokens), "codes" (neither 0 nor 16 mask tokens), "range" (a number out
            of range) or "order" (a minimum above the maximum).
        reason: description in English, with the numbers.
    """

    text: str
    span: tuple[int, int]
    kind: ProblemKind
    reason: str


@dataclass(frozen=True)
class Parsed:
    """All objects and problems of an answer, each in text order."""

    detections: tuple[Detection, ...]
    problems: tuple[Problem, ...]


def parse(text: str, width: int, height: int, ended: bool = True) -> Parsed:
    """Parse an answer about an image of width x height pixels.

    With `ended=False`, `text` is the beginning of an answer that is still streaming. Its last object may be
    incomplete: it is returned once its label has begun, with `growing=True`, and is never reported as a problem.

    Raises:
        ValueError: if width or height is not positive; never because of the text.
    """
    if width <= 0 or height <= 0:
        raise ValueError(f"width and height must be positive, got {width} x {height}.")
    detections: list[Detection] = []
    problems: list[Problem] = []
    position = num_locations = 0
    while start := _TOKEN.search(text, position):
        match = _OBJECT.match(text, start.start())
        assert match is not None  # every group may be empty
        position = match.end()
        is_open = not ended and match.end("label") == len(text)
        if problem := _find_problem(match):
            if not is_open:
                problems.append(problem)
        elif not is_open or _label_has_begun(match):
            detections.append(_to_detection(match, width, height, num_locations, is_open))
        num_locations += len(_numbers(_LOCATION, match["locations"]))
    return Parsed(tuple(detections), tuple(problems))


def location_token_indices(detection: Detection, pieces: Sequence[str]) -> tuple[int, ...]:
    """Return the indices of the four location tokens of `detection` among the answer's tokens.

    Args:
        detection: from `parse` of the same answer.
        pieces: all tokens of the answer so far as strings, special tokens included.

    Returns:
        Four indices into `pieces`; empty if the locations are not location tokens (a model can also generate
        "<loc0001>" as plain text).
    """
    indices = [index for index, piece in enumerate(pieces) if _LOCATION.fullmatch(piece)]
    candidates = tuple(indices[detection.first_location : detection.first_location + LOCATIONS_PER_BOX])
    locations = _numbers(_LOCATION, "".join(pieces[index] for index in candidates))
    return candidates if locations == detection.locations else ()


def _numbers(token: re.Pattern[str], text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in token.findall(text))


def _span(match: re.Match[str]) -> tuple[int, int]:
    """Return the span from the object's first token to the last non-space character of its label."""
    return match.start(), match.start() + len(match[0][: match.end("label") - match.start()].rstrip())


def _label_has_begun(match: re.Match[str]) -> bool:
    """Return whether the label is non-empty and is not the beginning of another token ("<")."""
    label = match["label"].lstrip()
    return bool(label) and not label.startswith("<")


def _find_problem(match: re.Match[str]) -> Problem | None:
    """Return the first problem of an object, or None."""
    locations, codes = _numbers(_LOCATION, match["locations"]), _numbers(_CODE, match["codes"])
    kind: ProblemKind
    if len(locations) != LOCATIONS_PER_BOX:
        kind, reason = "locations", f"{len(locations)} location tokens instead of {LOCATIONS_PER_BOX}"
    elif len(codes) not in (0, CODES_PER_MASK):
        kind, reason = "codes", f"{len(codes)} mask tokens instead of {CODES_PER_MASK} or none"
    elif max(locations) >= LOCATION_BINS or max(codes, default=0) >= MASK_CODEBOOK_SIZE:
        kind, reason = "range", f"a number above <loc{LOCATION_BINS - 1}> or <seg{MASK_CODEBOOK_SIZE - 1}>"
    elif locations[2] < locations[0]:
        kind, reason = "order", f"y_max ({locations[2]}) is less than y_min ({locations[0]})"
    elif locations[3] < locations[1]:
        kind, reason = "order", f"x_max ({locations[3]}) is less than x_min ({locations[1]})"
    else:
        return None
    start, end = _span(match)
    return Problem(match.string[start:end], (start, end), kind, reason)


def _to_detection(match: re.Match[str], width: int, height: int, first_location: int, growing: bool) -> Detection:
    y_min, x_min, y_max, x_max = _numbers(_LOCATION, match["locations"])
    return Detection(
        label=match["label"].strip(),
        box=(
            x_min / LOCATION_BINS * width,
            y_min / LOCATION_BINS * height,
            x_max / LOCATION_BINS * width,
            y_max / LOCATION_BINS * height,
        ),
        locations=(y_min, x_min, y_max, x_max),
        seg=_numbers(_CODE, match["codes"]) or None,
        span=_span(match),
        first_location=first_location,
        growing=growing,
    )
