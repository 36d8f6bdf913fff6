"""Schema of an exported run, format "paligemma-run/1"."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, FailFast, Field
from pydantic_core import PydanticKnownError

from paligemma.generation import MAX_TOP_N
from paligemma.processing import replace_lone_surrogates
from paligemma.sampling import MAX_SEED
from paligemma.webapp.requests import MAX_PROMPT_CHARACTERS
from paligemma.webapp.uploads import MAX_PIXELS

FORMAT = "paligemma-run/1"
MAX_TOKENS = 4096
MAX_MODEL_INPUT_SIDE = 1024
# Lengths in base64. Noise of 1024 x 1024 pixels takes about 1 MB as JPEG, and three bytes per pixel as PNG.
MAX_PREVIEW_CHARACTERS = 3_000_000
MAX_MODEL_INPUT_CHARACTERS = 4_300_000


def _check_unicode(text: str) -> str:
    """Reject lone surrogates, which cannot be encoded as UTF-8."""
    if replace_lone_surrogates(text) != text:
        raise PydanticKnownError("string_unicode")
    return text


Text = Annotated[str, Field(max_length=200), AfterValidator(_check_unicode)]
Prompt = Annotated[str, Field(max_length=MAX_PROMPT_CHARACTERS), AfterValidator(_check_unicode)]
TokenId = Annotated[int, Field(ge=0, le=10_000_000)]
Probability = Annotated[float, Field(ge=0, le=1)]
Logit = Annotated[float, Field(ge=-1e30, le=1e30)]
Seconds = Annotated[float, Field(ge=0, le=1e9)]


class _Schema(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class CandidateFields(_Schema):
    """`paligemma.Candidate`."""

    token_id: TokenId
    piece: Text
    logit: Logit
    logprob: Annotated[float, Field(ge=-1e30, le=0)]
    prob: Probability
    sampled_prob: Probability


class StepFields(CandidateFields):
    """`paligemma.Step` without `index`, `text` and `finish_reason`."""

    text_delta: Text
    rank: Annotated[int, Field(ge=1, le=10_000_000)]
    entropy: Annotated[float, Field(ge=0, le=100)]
    logsumexp: Logit
    seconds: Seconds
    top: Annotated[list[CandidateFields], FailFast(), Field(min_length=1, max_length=MAX_TOP_N)]


class PictureFields(_Schema):
    """The image of the run.

    Attributes:
        width, height: size of the upright image in pixels.
        shown: JPEG file of at most PREVIEW_SIDE pixels per side, in base64.
        seen: PNG file of the model input, in base64.
        seen_sha256: SHA-256 of the model input's RGB pixels in row-major order.
    """

    width: Annotated[int, Field(ge=1, le=MAX_PIXELS)]
    height: Annotated[int, Field(ge=1, le=MAX_PIXELS)]
    shown: Annotated[str, Field(max_length=MAX_PREVIEW_CHARACTERS)]
    seen: Annotated[str, Field(max_length=MAX_MODEL_INPUT_CHARACTERS)]
    seen_sha256: Text


class RequestFields(_Schema):
    """Arguments of `PaliGemma.stream` that reproduce the tokens, with `PictureFields.seen` as the image."""

    prompt: Prompt
    max_new_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)]
    temperature: Annotated[float, Field(ge=0, le=1e6)]
    top_k: Annotated[int, Field(ge=0, le=10_000_000)]
    top_p: Annotated[float, Field(ge=1e-9, le=1)]
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)]
    top_n: Annotated[int, Field(ge=1, le=MAX_TOP_N)]
    forced_ids: Annotated[list[TokenId], FailFast(), Field(max_length=MAX_TOKENS)]


class ModelFields(_Schema):
    """Metadata of the model."""

    name: Text
    revision: Text | None
    dtype: Text
    device: Text
    parameters: Annotated[int, Field(ge=0, le=10**15)]


class TimingFields(_Schema):
    """`paligemma.Timing`."""

    image_s: Seconds
    first_token_s: Seconds
    total_s: Seconds
    tokens_per_s: Annotated[float, Field(ge=0, le=1e9)] | None


class RunFields(_Schema):
    """A run.

    Attributes:
        versions: of Python and libraries, by name; for information only.
        branched_at: index of the token that differs from the parent run, the last of `forced_ids`; None: no branch.
        timing: None for a stopped run.
    """

    format: Literal["paligemma-run/1"]
    model: ModelFields
    versions: Annotated[dict[Text, Text], Field(max_length=20)]
    picture: PictureFields
    request: RequestFields
    branched_at: Annotated[int, Field(ge=0, le=MAX_TOKENS)] | None
    finish_reason: Literal["eos", "length", "time", "stopped"]
    timing: TimingFields | None
    tokens: Annotated[list[StepFields], FailFast(), Field(max_length=MAX_TOKENS)]
