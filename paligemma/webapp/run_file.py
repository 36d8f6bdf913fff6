"""A run as a file: everything needed to see it again and to repeat it. Format "paligemma-run/1".

The file is one JSON object, in UTF-8:

    format         "paligemma-run/1"
    model          {"name", "revision", "dtype", "device", "parameters"}
    versions       {"python", "torch", "gradio"}: texts, for the reader only
    picture        {"width", "height": of the upright picture in pixels,
                    "shown": the picture as a JPEG file of at most 1024 pixels a side, base64,
                    "seen": the square that the model saw as a PNG file, base64,
                    "seen_sha256": of that square's pixels, row by row, RGB}
    request        {"prompt", "max_new_tokens", "temperature", "top_k", "top_p", "seed", "top_n", "forced_ids"}:
                   given to `PaliGemma.stream` with "seen" as the picture, they give the tokens again
    branched_at    the token at which it left an earlier run, the last of forced_ids, or null
    finish_reason  "eos", "length", "time" or "stopped"
    timing         {"image_s", "first_token_s", "total_s", "tokens_per_s"} or null
    tokens         a list with the fields of `paligemma.Step` but "index", "text" and "finish_reason"

`read_run` takes only that: every field once, of its type and within its range, finite numbers, and steps whose numbers
agree with one another (`_check_step`).
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import itertools
import json
import math
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from PIL import Image

from paligemma.checkpoint.hub import redact_tokens
from paligemma.generation import MAX_TOP_N, Candidate, Step, Timing
from paligemma.processing import replace_lone_surrogates
from paligemma.sampling import MAX_SEED
from paligemma.webapp.images import MAX_PIXELS, PREVIEW_SIDE, InputImage, decode_image, png_file
from paligemma.webapp.requests import MAX_FILE_BYTES, MAX_PROMPT_CHARACTERS, quote
from paligemma.webapp.runs import Run

FORMAT = "paligemma-run/1"
MAX_TOKENS = 4096
MAX_TEXT = 200
# In base64. Noise of 1024 x 1024 pixels takes about one megabyte as a JPEG file, which a visit keeps as it came; as a
# PNG file it takes three bytes a pixel.
MAX_SHOWN_TEXT = 3_000_000
MAX_SEEN_SIDE = 1024
MAX_SEEN_TEXT = 4_300_000
MAX_DIGITS = 40
# Of logits and probabilities that are written in full; what differs by more is not of one distribution.
TOLERANCE = 1e-4
FINISH_REASONS = ("eos", "length", "time", "stopped")

Check = Callable[[str, Any], Any]

# While it is checked, a file of 10 MB may take half a gigabyte.
_reader = threading.Lock()


# Writing


def write_run(run: Run, versions: Mapping[str, str]) -> str:
    """The file's text."""
    request = {name: value for name, value in run.request.items() if name != "time_limit"}
    document = {
        "format": FORMAT,
        "model": run.model,
        "versions": dict(versions),
        "picture": _write_picture(run.image),
        "request": request,
        "branched_at": run.branched_at,
        "finish_reason": run.finish_reason or "stopped",
        "timing": dataclasses.asdict(run.timing) if run.timing else None,
        "tokens": [_write_step(step) for step in run.steps],
    }
    # A hub token never leaves the server, whatever it was pasted into.
    return redact_tokens(json.dumps(document, ensure_ascii=False, allow_nan=False, indent=1))


def _write_picture(image: InputImage) -> dict[str, Any]:
    return {
        "width": image.width,
        "height": image.height,
        "shown": base64.b64encode(image.preview).decode(),
        "seen": base64.b64encode(png_file(image.model_input)).decode(),
        "seen_sha256": _pixel_hash(image.model_input),
    }


def _write_step(step: Step) -> dict[str, Any]:
    fields = dataclasses.asdict(step)
    for name in ("index", "text", "finish_reason"):
        del fields[name]
    return fields


def _pixel_hash(image: Image.Image) -> str:
    return hashlib.sha256(image.tobytes()).hexdigest()


# Reading


def read_run(file: bytes, number: int) -> Run:
    """A run from a file that nobody has checked.

    Raises ValueError that says where the file is not what the module's docstring describes.
    """
    with _reader:
        parsed = _parse(file)
        _check_format(parsed)
        document = _fields("the file", parsed, _DOCUMENT)
    steps = _read_steps(document["tokens"], document["finish_reason"])
    _check_run(steps, document["request"]["forced_ids"], document["branched_at"])
    timing = document["timing"]
    return Run(
        number=number,
        image=document["picture"],
        request={**document["request"], "time_limit": None},
        model=document["model"],
        branched_at=document["branched_at"],
        steps=steps,
        finish_reason=document["finish_reason"],
        timing=Timing(**timing) if timing else None,
        imported=True,
    )


def _parse(file: bytes) -> Any:
    if len(file) > MAX_FILE_BYTES:
        raise ValueError(f"the file has {len(file)} bytes; at most {MAX_FILE_BYTES} are read")
    try:
        return json.loads(
            file.decode("utf-8-sig"),
            parse_constant=_refuse_constant,
            parse_int=_read_integer,
            object_pairs_hook=_read_object,
        )
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError("the file is no JSON text") from error


def _check_format(parsed: Any) -> None:
    """Say so at once when this is another file, or one of another version."""
    found = parsed.get("format") if isinstance(parsed, dict) else None
    if found != FORMAT:
        raise ValueError(f"the file is no run that can be read: its format is {quote(found)}, not {FORMAT!r}")


def _refuse_constant(name: str) -> None:
    raise ValueError(f"the file holds {name}; numbers must be finite")


def _read_integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"the file holds a number of {len(digits)} digits; at most {MAX_DIGITS} are read")
    return int(digits)


def _read_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        ((twice, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"the file names {quote(twice)} twice in one object")
    return fields


def _read_steps(tokens: list[dict[str, Any]], finish_reason: str) -> list[Step]:
    steps: list[Step] = []
    text = ""
    for index, fields in enumerate(tokens):
        text += fields["text_delta"]
        is_last = index == len(tokens) - 1
        reason = finish_reason if is_last and finish_reason != "stopped" else None
        steps.append(Step(**fields, index=index, text=text, finish_reason=reason))
    return steps


def _check_run(steps: Sequence[Step], forced_ids: tuple[int, ...], branched_at: int | None) -> None:
    """Raise ValueError where steps contradict each other, or what the run says of itself."""
    for step in steps:
        _check_step(step)
    token_ids = tuple(step.token_id for step in steps)
    if token_ids[: len(forced_ids)] != forced_ids[: len(token_ids)]:
        raise ValueError("the tokens do not begin with the request's forced_ids")
    # The run may have ended before it got there.
    if branched_at is not None and branched_at >= len(forced_ids):
        raise ValueError(f"branched_at is {branched_at}, and there are {len(forced_ids)} forced_ids")
    if any(later.seconds < earlier.seconds for earlier, later in itertools.pairwise(steps)):
        raise ValueError("the tokens' seconds run backwards")


def _check_step(step: Step) -> None:
    """Raise ValueError unless all numbers of a step can be of one distribution, and its candidates in its order."""
    place = f"tokens[{step.index}]"
    for token in (step, *step.top):
        logprob = token.logit - step.logsumexp
        if abs(token.logprob - logprob) > TOLERANCE * max(1.0, abs(logprob)):
            raise ValueError(f"{place}: the logprob of {token.token_id} is not its logit less logsumexp")
        if abs(token.prob - math.exp(token.logprob)) > TOLERANCE:
            raise ValueError(f"{place}: the prob of {token.token_id} is not that of its logprob")
    if any(first.logit < second.logit for first, second in itertools.pairwise(step.top)):
        raise ValueError(f"{place}: the candidates are not in the order of their logits")
    ids = [candidate.token_id for candidate in step.top]
    if len(set(ids)) < len(ids):
        raise ValueError(f"{place}: two candidates have the same id")
    if step.rank <= len(ids) and ids[step.rank - 1] != step.token_id:
        raise ValueError(f"{place}: its rank is {step.rank}, where the candidates have another token")


# What a field may be. A check takes the field's place in the file and its value, and returns the value.


def _fields(place: str, value: Any, checks: Mapping[str, Check]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{place} must be an object")
    missing, unknown = sorted(checks.keys() - value.keys()), sorted(value.keys() - checks.keys())
    if missing or unknown:
        preview = [name[:40] for name in unknown[:5]]
        raise ValueError(f"{place} lacks {missing or 'nothing'} and has the unknown {preview or 'nothing'}")
    return {name: check(f"{place}, {name}", value[name]) for name, check in checks.items()}


def _object(checks: Mapping[str, Check]) -> Check:
    return lambda place, value: _fields(place, value, checks)


def _list(check: Check, most: int, least: int = 0) -> Check:
    def read(place: str, value: Any) -> list[Any]:
        if not isinstance(value, list) or not least <= len(value) <= most:
            raise ValueError(f"{place} must be a list of {least} to {most}")
        return [check(f"{place}[{index}]", item) for index, item in enumerate(value)]

    return read


def _or_none(check: Check) -> Check:
    return lambda place, value: None if value is None else check(place, value)


def _text(most: int) -> Check:
    def read(place: str, value: Any) -> str:
        if not isinstance(value, str) or len(value) > most:
            raise ValueError(f"{place} must be a text of at most {most} characters")
        if replace_lone_surrogates(value) != value:
            raise ValueError(f"{place} must be a text that has a UTF-8 form")
        return value

    return read


def _one_of(*allowed: str) -> Check:
    def read(place: str, value: Any) -> str:
        if not isinstance(value, str) or value not in allowed:
            raise ValueError(f"{place} must be one of {', '.join(allowed)}")
        return value

    return read


def _whole(low: int, high: int) -> Check:
    def read(place: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ValueError(f"{place} must be a whole number from {low} to {high}")
        return value

    return read


def _real(low: float, high: float) -> Check:
    def read(place: str, value: Any) -> float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not low <= value <= high:  # NaN is not either
            raise ValueError(f"{place} must be a number from {low:g} to {high:g}")
        return float(value)

    return read


def _versions(place: str, value: Any) -> dict[str, str]:
    if not isinstance(value, dict) or len(value) > 20:
        raise ValueError(f"{place} must be an object of at most 20 texts")
    return {_text(MAX_TEXT)(place, name): _text(MAX_TEXT)(place, version) for name, version in value.items()}


def _image_file(format_name: str, longest_side: int, longest_text: int) -> Check:
    def read(place: str, value: Any) -> tuple[bytes, Image.Image]:
        text = _text(longest_text)(place, value)
        try:
            file = base64.b64decode(text, validate=True)
            return file, decode_image(file, (format_name,), longest_side)
        except ValueError as error:
            raise ValueError(f"{place} must be a {format_name} file in base64: {error}") from error

    return read


def _picture(place: str, value: Any) -> InputImage:
    fields = _fields(place, value, _PICTURE)
    (preview, _), (_, model_input) = fields["shown"], fields["seen"]
    if fields["width"] * fields["height"] > MAX_PIXELS:
        raise ValueError(f"{place} must have at most {MAX_PIXELS} pixels, got {fields['width']} x {fields['height']}")
    if model_input.width != model_input.height:
        raise ValueError(f"{place}, seen must be a square")
    if _pixel_hash(model_input) != fields["seen_sha256"]:
        raise ValueError(f"{place}, seen_sha256 is not that of seen")
    return InputImage(fields["width"], fields["height"], preview, model_input)


_ID = _whole(0, 10_000_000)
_PROBABILITY = _real(0, 1)
_LOGIT = _real(-1e30, 1e30)
_LOGPROB = _real(-1e30, 0)
_SECONDS = _real(0, 1e9)
_CANDIDATE = {
    "token_id": _ID,
    "piece": _text(MAX_TEXT),
    "logit": _LOGIT,
    "logprob": _LOGPROB,
    "prob": _PROBABILITY,
    "sampled_prob": _PROBABILITY,
}
_STEP = {
    **_CANDIDATE,
    "text_delta": _text(MAX_TEXT),
    "rank": _whole(1, 10_000_000),
    "entropy": _real(0, 100),
    "logsumexp": _LOGIT,
    "seconds": _SECONDS,
    "top": lambda place, value: tuple(
        Candidate(**fields) for fields in _list(_object(_CANDIDATE), MAX_TOP_N, least=1)(place, value)
    ),
}
_PICTURE = {
    "width": _whole(1, MAX_PIXELS),
    "height": _whole(1, MAX_PIXELS),
    "shown": _image_file("JPEG", PREVIEW_SIDE, MAX_SHOWN_TEXT),
    "seen": _image_file("PNG", MAX_SEEN_SIDE, MAX_SEEN_TEXT),
    "seen_sha256": _text(64),
}
_REQUEST = {
    "prompt": _text(MAX_PROMPT_CHARACTERS),
    "max_new_tokens": _whole(1, MAX_TOKENS),
    "temperature": _real(0, 1e6),
    "top_k": _whole(0, 10_000_000),
    "top_p": _real(1e-9, 1),
    "seed": _whole(0, MAX_SEED),
    "top_n": _whole(1, MAX_TOP_N),
    "forced_ids": lambda place, value: tuple(_list(_ID, MAX_TOKENS)(place, value)),
}
_MODEL = {
    "name": _text(MAX_TEXT),
    "revision": _or_none(_text(MAX_TEXT)),
    "dtype": _text(MAX_TEXT),
    "device": _text(MAX_TEXT),
    "parameters": _whole(0, 10**15),
}
_TIMING = {
    "image_s": _SECONDS,
    "first_token_s": _SECONDS,
    "total_s": _SECONDS,
    "tokens_per_s": _or_none(_real(0, 1e9)),
}
_DOCUMENT = {
    "format": _text(MAX_TEXT),
    "model": _object(_MODEL),
    "versions": _versions,
    "picture": _picture,
    "request": _object(_REQUEST),
    "branched_at": _or_none(_whole(0, MAX_TOKENS)),
    "finish_reason": _one_of(*FINISH_REASONS),
    "timing": _or_none(_object(_TIMING)),
    "tokens": _list(_object(_STEP), MAX_TOKENS),
}
