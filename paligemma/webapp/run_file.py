"""Export and import of a run. Format "paligemma-run/1".

The file is a JSON object in UTF-8 with the fields of `run_schema.RunFields`.

`read_run` rejects unexpected, missing and duplicate fields, wrong types, values out of range, and inconsistent
steps.
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
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from PIL import Image
from pydantic import ValidationError

from paligemma.checkpoint.hub import redact_tokens
from paligemma.errors import InputError
from paligemma.generation import Candidate, Step, Timing
from paligemma.webapp.images import PREVIEW_SIDE, InputImage, encode_png
from paligemma.webapp.requests import format_location, quote
from paligemma.webapp.run_schema import FORMAT, MAX_MODEL_INPUT_SIDE, PictureFields, RunFields
from paligemma.webapp.runs import Run
from paligemma.webapp.uploads import MAX_PIXELS, check_size, decode_image

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

# Limits of the JSON parser. The largest object of the format has 12 fields.
MAX_DIGITS = 40
MAX_FIELDS = 50
# Tolerance for the consistency of logits and probabilities, which are exported with all digits.
TOLERANCE = 1e-4

# Validating a file of 10 MB takes up to half a gigabyte, so one file is validated at a time.
_reader_lock = threading.Lock()


# Export


def write_run(run: Run, versions: Mapping[str, str]) -> str:
    """Serialize a run to the content of a run file."""
    document = {
        "format": FORMAT,
        "model": run.model,
        "versions": dict(versions),
        "picture": _picture_fields(run.image),
        "request": {name: value for name, value in run.request.items() if name != "time_limit"},
        "branched_at": run.branched_at,
        "finish_reason": run.finish_reason or "stopped",
        "timing": dataclasses.asdict(run.timing) if run.timing else None,
        "tokens": [_step_fields(step) for step in run.steps],
    }
    # A prompt or a path can contain an access token of the hub.
    return redact_tokens(json.dumps(document, ensure_ascii=False, allow_nan=False, indent=1))


def _picture_fields(image: InputImage) -> dict[str, Any]:
    return {
        "width": image.width,
        "height": image.height,
        "shown": base64.b64encode(image.preview).decode(),
        "seen": base64.b64encode(encode_png(image.model_input)).decode(),
        "seen_sha256": _pixel_hash(image.model_input),
    }


def _step_fields(step: Step) -> dict[str, Any]:
    fields = dataclasses.asdict(step)
    for name in ("index", "text", "finish_reason"):
        del fields[name]
    return fields


def _pixel_hash(image: Image.Image) -> str:
    return hashlib.sha256(image.tobytes()).hexdigest()


# Import


def read_run(file: bytes, number: int) -> Run:
    """Validate a run file and return its run, numbered `number`.

    Raises:
        InputError: if the file is not valid, with the location of the first error.
    """
    with _reader_lock:
        document = _validate(_parse_json(file))
        forced_ids = tuple(document.request.forced_ids)
        steps = _read_steps(document)
        _check_run(steps, forced_ids, document.branched_at)
        image = _read_image(document.picture)
    return Run(
        number=number,
        image=image,
        request={**vars(document.request), "forced_ids": forced_ids, "time_limit": None},
        model=vars(document.model),
        branched_at=document.branched_at,
        steps=steps,
        finish_reason=document.finish_reason,
        timing=Timing(**vars(document.timing)) if document.timing else None,
        imported=True,
    )


def _parse_json(file: bytes) -> Any:
    check_size(file)
    try:
        return json.loads(
            file.decode("utf-8-sig"),
            parse_constant=_reject_constant,
            parse_int=_parse_integer,
            object_pairs_hook=_parse_object,
        )
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise InputError("run_file.json", "The file is not valid JSON.") from error


def _reject_constant(name: str) -> None:
    raise InputError("run_file.finite", "Numbers in a run file must be finite, got {name}.", name=name)


def _parse_integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise InputError(
            "run_file.digits",
            "Numbers in a run file must have at most {maximum} digits, got {count}.",
            maximum=MAX_DIGITS,
            count=len(digits),
        )
    return int(digits)


def _parse_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > MAX_FIELDS:
        raise InputError(
            "run_file.num_fields",
            "Objects in a run file must have at most {maximum} fields, got {count}.",
            maximum=MAX_FIELDS,
            count=len(pairs),
        )
    fields = dict(pairs)
    if len(fields) < len(pairs):
        ((name, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise InputError("run_file.duplicate", "Duplicate field {name} in the run file.", name=quote(name))
    return fields


def _validate(parsed: Any) -> RunFields:
    found = parsed.get("format") if isinstance(parsed, dict) else None
    if found != FORMAT:
        raise InputError(
            "run_file.format",
            "The file is not a valid run file: format must be {expected!r}, got {found}.",
            expected=FORMAT,
            found=quote(found),
        )
    try:
        return RunFields.model_validate(parsed)
    except ValidationError as error:
        raise _to_input_error(error.errors(include_url=False)) from error


def _to_input_error(errors: Sequence[ErrorDetails]) -> InputError:
    """Convert the first error that pydantic reports, with all missing and unexpected fields of the same object."""
    first = errors[0]
    if first["type"] not in ("missing", "extra_forbidden"):
        return InputError(
            "run_file.value",
            "The file is not a valid run file. {place}: {reason}, got {value}.",
            place=format_location(first["loc"]),
            reason=first["msg"],
            value=quote(first["input"]),
        )
    parent = first["loc"][:-1]
    siblings = [error for error in errors if error["loc"][:-1] == parent]
    return InputError(
        "run_file.fields",
        "The file is not a valid run file. {place}: missing fields: {missing}; unexpected fields: {unexpected}.",
        place=format_location(parent) or "run",
        missing=_field_names(siblings, "missing"),
        unexpected=_field_names(siblings, "extra_forbidden"),
    )


def _field_names(errors: Sequence[ErrorDetails], error_type: str) -> str:
    names = [quote(str(error["loc"][-1])) for error in errors if error["type"] == error_type]
    return ", ".join(names[:5]) or "none"


def _read_image(fields: PictureFields) -> InputImage:
    preview, _ = _decode_base64_image("picture.shown", fields.shown, "JPEG", PREVIEW_SIDE)
    _, model_input = _decode_base64_image("picture.seen", fields.seen, "PNG", MAX_MODEL_INPUT_SIDE)
    if fields.width * fields.height > MAX_PIXELS:
        raise InputError(
            "run_file.pixels",
            "picture must have at most {maximum} pixels, got {width} x {height}.",
            maximum=MAX_PIXELS,
            width=fields.width,
            height=fields.height,
        )
    if model_input.width != model_input.height:
        raise InputError(
            "run_file.square",
            "picture.seen must be square, got {width} x {height} pixels.",
            width=model_input.width,
            height=model_input.height,
        )
    if _pixel_hash(model_input) != fields.seen_sha256:
        raise InputError("run_file.hash", "picture.seen_sha256 must be the SHA-256 of the pixels of picture.seen.")
    return InputImage(fields.width, fields.height, preview, model_input)


def _decode_base64_image(place: str, text: str, format_name: str, max_side: int) -> tuple[bytes, Image.Image]:
    """Return the file and the image."""
    try:
        file = base64.b64decode(text, validate=True)
        return file, decode_image(file, (format_name,), max_side)
    except ValueError as error:
        raise InputError(
            "run_file.image",
            "{place} must be a {format} file of at most {max_side} pixels per side, in base64.",
            place=place,
            format=format_name,
            max_side=max_side,
        ) from error


def _read_steps(document: RunFields) -> list[Step]:
    """Build the steps of a run. Raises InputError for a step with inconsistent numbers."""
    steps: list[Step] = []
    text = ""
    for index, token in enumerate(document.tokens):
        text += token.text_delta
        is_last = index == len(document.tokens) - 1
        finish_reason: Any = document.finish_reason if is_last and document.finish_reason != "stopped" else None
        fields = {**vars(token), "top": tuple(Candidate(**vars(candidate)) for candidate in token.top)}
        step = Step(**fields, index=index, text=text, finish_reason=finish_reason)
        _check_probabilities(step)
        _check_candidates(step)
        steps.append(step)
    return steps


def _check_run(steps: Sequence[Step], forced_ids: tuple[int, ...], branched_at: int | None) -> None:
    """Raise InputError unless the steps are consistent with each other, the forced tokens and the branch."""
    token_ids = tuple(step.token_id for step in steps)
    if token_ids[: len(forced_ids)] != forced_ids[: len(token_ids)]:
        raise InputError("run_file.forced_ids", "The tokens must begin with request.forced_ids.")
    # The run may have ended before the branch.
    if branched_at is not None and branched_at >= len(forced_ids):
        raise InputError(
            "run_file.branched_at",
            "branched_at must be less than the number of forced_ids, {count}, got {index}.",
            count=len(forced_ids),
            index=branched_at,
        )
    if any(later.seconds < earlier.seconds for earlier, later in itertools.pairwise(steps)):
        raise InputError("run_file.seconds", "The tokens' seconds must not decrease.")


def _check_probabilities(step: Step) -> None:
    """Raise InputError unless logit, logprob, prob and logsumexp are consistent, for the token and its candidates."""
    tokens: tuple[Step | Candidate, ...] = (step, *step.top)
    for token in tokens:
        logprob = token.logit - step.logsumexp
        if abs(token.logprob - logprob) > TOLERANCE * max(1.0, abs(logprob)):
            raise InputError(
                "run_file.logprob",
                "tokens[{index}]: logprob of token {token_id} must be logit - logsumexp.",
                index=step.index,
                token_id=token.token_id,
            )
        if abs(token.prob - math.exp(token.logprob)) > TOLERANCE:
            raise InputError(
                "run_file.prob",
                "tokens[{index}]: prob of token {token_id} must be exp(logprob).",
                index=step.index,
                token_id=token.token_id,
            )


def _check_candidates(step: Step) -> None:
    """Raise InputError unless the candidates are distinct, in order of their logits, and agree with the rank."""
    if any(first.logit < second.logit for first, second in itertools.pairwise(step.top)):
        raise InputError(
            "run_file.order", "tokens[{index}]: candidates must be in descending order of logits.", index=step.index
        )
    ids = [candidate.token_id for candidate in step.top]
    if len(set(ids)) < len(ids):
        raise InputError(
            "run_file.duplicate_candidate", "tokens[{index}]: candidates must have distinct ids.", index=step.index
        )
    if step.rank <= len(ids) and ids[step.rank - 1] != step.token_id:
        raise InputError(
            "run_file.rank",
            "tokens[{index}]: rank is {rank}, but the candidate of that rank is another token.",
            index=step.index,
            rank=step.rank,
        )
