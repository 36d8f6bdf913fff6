"""The generation loop: a generator that yields one `Step` per token.

Each request has its own KV cache, random number generator and text. Nothing runs between two steps, so closing the
generator stops generation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from time import perf_counter
from typing import Any, Literal

import torch
from torch import Tensor

from paligemma.errors import InputError, NonFiniteLogitsError
from paligemma.kv_cache import KVCache
from paligemma.modeling import PaliGemmaForConditionalGeneration
from paligemma.processing import PaliGemmaProcessor
from paligemma.sampling import Sampling, rank_of, sample, top_k_indices
from paligemma.validation import is_finite_number, is_integer

FinishReason = Literal["eos", "length", "time"]

MAX_TOP_N = 50


# Options and results


@dataclass(frozen=True)
class GenerationOptions:
    """Options of one request.

    Args:
        max_new_tokens: maximum number of generated tokens, >= 1, including forced tokens and the EOS token.
        sampling: temperature, top-k, top-p and seed.
        top_n: number of candidates in each Step, 1 to 50.
        forced_ids: token ids used as the first generated tokens, regardless of their logits. An EOS token among them
            ends generation.
        time_limit: seconds after which no further token is generated, > 0; None: no limit. At least one token is
            generated.

    Raises:
        InputError: for values outside these ranges.
    """

    max_new_tokens: int = 128
    sampling: Sampling = field(default_factory=Sampling)
    top_n: int = 10
    forced_ids: tuple[int, ...] = ()
    time_limit: float | None = None

    def __post_init__(self) -> None:
        if not (is_integer(self.max_new_tokens) and self.max_new_tokens >= 1):
            raise InputError(
                "generation.max_new_tokens",
                "max_new_tokens must be an integer >= 1, got {value!r}.",
                value=self.max_new_tokens,
            )
        if not (is_integer(self.top_n) and 1 <= self.top_n <= MAX_TOP_N):
            raise InputError(
                "generation.top_n",
                "top_n must be an integer from 1 to {maximum}, got {value!r}.",
                maximum=MAX_TOP_N,
                value=self.top_n,
            )
        object.__setattr__(self, "forced_ids", _to_token_ids(self.forced_ids))
        if self.time_limit is not None and not (is_finite_number(self.time_limit) and self.time_limit > 0):
            raise InputError(
                "generation.time_limit",
                "time_limit must be None or a finite number of seconds > 0, got {value!r}.",
                value=self.time_limit,
            )


@dataclass(frozen=True)
class Candidate:
    """A candidate token at a position. The fields are those of `Step`."""

    token_id: int
    piece: str
    logit: float
    logprob: float
    prob: float
    sampled_prob: float


@dataclass(frozen=True)
class Step:
    """One generated token and the distribution at its position.

    `rank`, `logsumexp`, `entropy` and all probabilities are over the allowed tokens: all ids in the tokenizer except
    `<image>`.

    Attributes:
        index: position in the answer, from 0.
        token_id, piece: the token's id and its string in the tokenizer's vocabulary.
        text_delta, text: the text added by this token, and the text so far. EOS adds no text. A run of
            byte-fallback tokens is buffered, and its text is added at the next text token or at the last step.
        logit: float32 output of the model (Gemma 2: after soft-capping).
        logprob, prob: log-probability (natural logarithm) and probability at temperature 1.
        sampled_prob: probability of being drawn, after temperature, top-k and top-p. With temperature 0 it is 1 for
            the largest logit and 0 for all others. It can be 0 for a forced token.
        rank: 1 for the largest logit; among equal logits the lower id ranks first.
        entropy: of the distribution at temperature 1, in nats.
        logsumexp: log(sum(exp(logits))); logprob = logit - logsumexp.
        top: the `top_n` candidates with the largest logits, in order of `rank`.
        finish_reason: None before the last step; then "eos", "length" (max_new_tokens) or "time" (time_limit).
        seconds: time since the start of the request.
    """

    index: int
    token_id: int
    piece: str
    text_delta: str
    text: str
    logit: float
    logprob: float
    prob: float
    sampled_prob: float
    rank: int
    entropy: float
    logsumexp: float
    top: tuple[Candidate, ...]
    finish_reason: FinishReason | None
    seconds: float


@dataclass(frozen=True)
class Timing:
    """Durations of one request, in seconds.

    Attributes:
        image_s: vision tower and projector, or the lookup of cached image features.
        first_token_s: from the start of the request to the first Step.
        total_s: from the start of the request to the last Step.
        tokens_per_s: decoding rate after the first token; None for a single token.
    """

    image_s: float
    first_token_s: float
    total_s: float
    tokens_per_s: float | None


@dataclass(frozen=True)
class GenerationResult:
    """A complete answer. `seed` is the seed that was used, given or random, which reproduces the answer."""

    text: str
    token_ids: tuple[int, ...]
    steps: tuple[Step, ...]
    finish_reason: FinishReason
    timing: Timing
    seed: int


class StepCollector(Iterator[Step]):
    """Iterate over a stream of steps and keep the steps and the stream's return value.

    Attributes:
        steps: the steps so far.
        result: the GenerationResult once the stream is exhausted, else None.
    """

    def __init__(self, stream: Generator[Step, None, GenerationResult]) -> None:
        self.steps: list[Step] = []
        self.result: GenerationResult | None = None
        self._stream = stream

    def __next__(self) -> Step:
        try:
            step = next(self._stream)
        except StopIteration as stop:
            self.result = self.result or stop.value
            raise
        self.steps.append(step)
        return step

    def close(self) -> None:
        """Close the stream, which stops generation."""
        self._stream.close()


# The loop


def stream(
    model: PaliGemmaForConditionalGeneration,
    processor: PaliGemmaProcessor,
    inputs: Mapping[str, Tensor],
    allowed_tokens: Tensor,
    options: GenerationOptions,
    started: float | None = None,
    encode_image: Callable[[Tensor], Tensor] | None = None,
) -> Generator[Step, None, GenerationResult]:
    """Generate an answer to one prompt about one image, token by token.

    Arguments are validated immediately. The first step of the generator runs the vision tower and the prefill of
    image and prompt; every further step decodes one token. The generator returns the GenerationResult; see
    `StepCollector`.

    Forced tokens are decoded one at a time, like generated ones, because a batched forward pass sums in a different
    order, which can change later tokens in bfloat16. They also consume random numbers, so forcing the first tokens of
    an answer, with its seed, reproduces the answer.

    Args:
        inputs: output of the processor for one image and one prompt.
        allowed_tokens: (vocab_size,), bool, from `processor.allowed_tokens`. Other tokens are never generated and are
            excluded from all statistics.
        started: `time.perf_counter()` at the start of the request; None: now.
        encode_image: maps pixel_values on the model's device to image features; None: `model.get_image_features`.

    Raises:
        InputError: immediately, for a batch, too many tokens for the model, or forced ids that are not allowed.
        NonFiniteLogitsError: during iteration, if the logits contain NaN or infinity.
    """
    started = perf_counter() if started is None else started
    _check_request(model, inputs["input_ids"], allowed_tokens, options)
    builder = _StepBuilder(processor, options, model.config.eos_token_ids, allowed_tokens, started)
    return _generate(model, inputs, options.max_new_tokens, builder, encode_image or model.get_image_features)


@torch.inference_mode()  # re-entered at every step, because steps may run in different threads
def _generate(
    model: PaliGemmaForConditionalGeneration,
    inputs: Mapping[str, Tensor],
    max_new_tokens: int,
    builder: _StepBuilder,
    encode_image: Callable[[Tensor], Tensor],
) -> Generator[Step, None, GenerationResult]:
    token_ids = inputs["input_ids"].to(model.device)
    cache = KVCache(model.config, 1, token_ids.shape[1] + max_new_tokens, model.activation_dtype, model.device)
    image_features: Tensor | None
    image_features, image_seconds = _timed(lambda: encode_image(inputs["pixel_values"].to(model.device)), model.device)
    while True:
        output = model(token_ids, kv_cache=cache, image_features=image_features, logits_to_keep=1)
        step = builder.add(output["logits"][0, -1])
        yield step
        if step.finish_reason is not None:
            return builder.result(image_seconds)
        token_ids, image_features = token_ids.new_tensor([[step.token_id]]), None


class _StepBuilder:
    """Convert the logits of each position to a Step. Holds the state of one request."""

    def __init__(
        self,
        processor: PaliGemmaProcessor,
        options: GenerationOptions,
        eos_token_ids: tuple[int, ...],
        allowed_tokens: Tensor,
        started: float,
    ) -> None:
        self._processor = processor
        self._options = options
        self._eos_token_ids = eos_token_ids
        self._sampling = options.sampling.with_seed()
        assert self._sampling.seed is not None
        self._seed = self._sampling.seed
        self._generator = torch.Generator().manual_seed(self._seed)
        self._allowed_ids = allowed_tokens.nonzero().flatten()
        self._is_contiguous = int(self._allowed_ids[-1]) == len(self._allowed_ids) - 1
        # Allocated once per request: for 257,000 tokens, allocation takes longer than the arithmetic.
        self._logits, self._shifted, self._exp = torch.empty((3, len(self._allowed_ids)), dtype=torch.float64)
        self._decoder = processor.stream_decoder()
        self._started = started
        self._steps: list[Step] = []

    def add(self, logits: Tensor) -> Step:
        """Choose the next token from logits (vocab_size,), on any device, and return its Step."""
        index = len(self._steps)
        # Below, logits are float64 and over the allowed tokens only; `chosen` and `top` index into them.
        logits = self._logits.copy_(self._select_allowed(logits.cpu()))
        logsumexp, entropy = self._logsumexp_and_entropy(logits, index)
        chosen, sampled_probs = sample(logits, self._sampling, self._generator)
        if index < len(self._options.forced_ids):
            chosen = int(torch.searchsorted(self._allowed_ids, self._options.forced_ids[index]))
        top = top_k_indices(logits, self._options.top_n)
        token, *candidates = (self._candidate(i, logits, logsumexp, sampled_probs) for i in (chosen, *top))
        seconds = perf_counter() - self._started
        finish_reason = self._finish_reason(token.token_id, index + 1, seconds)
        text_delta = self._text_delta(token.token_id, is_last=finish_reason is not None)
        step = Step(
            **asdict(token),
            index=index,
            text_delta=text_delta,
            text=self._steps[-1].text + text_delta if self._steps else text_delta,
            rank=top.index(chosen) + 1 if chosen in top else rank_of(logits, chosen),
            entropy=entropy,
            logsumexp=logsumexp,
            top=tuple(candidates),
            finish_reason=finish_reason,
            seconds=seconds,
        )
        self._steps.append(step)
        return step

    def result(self, image_seconds: float) -> GenerationResult:
        """Return the complete answer, after the last step."""
        first, last = self._steps[0], self._steps[-1]
        assert last.finish_reason is not None
        decoding_seconds = last.seconds - first.seconds
        return GenerationResult(
            text=last.text,
            token_ids=tuple(step.token_id for step in self._steps),
            steps=tuple(self._steps),
            finish_reason=last.finish_reason,
            timing=Timing(
                image_s=image_seconds,
                first_token_s=first.seconds,
                total_s=last.seconds,
                tokens_per_s=last.index / decoding_seconds if decoding_seconds > 0 else None,
            ),
            seed=self._seed,
        )

    def _logsumexp_and_entropy(self, logits: Tensor, index: int) -> tuple[float, float]:
        """Return log(sum(exp(logits))) and the entropy -sum(p log p) in nats, from one pass of exponentials.

        With x = logits - max(logits) and Z = sum(exp(x)): log p = x - log Z, so -sum(p log p) = log Z - sum(p x).
        """
        largest = logits.max()
        shifted = torch.sub(logits, largest, out=self._shifted)
        exp = torch.exp(shifted, out=self._exp)
        total = float(exp.sum())
        # NaN and +inf make the sum NaN; -inf does not.
        if not (math.isfinite(total) and math.isfinite(shifted.min())):
            raise NonFiniteLogitsError(
                "generation.non_finite",
                "The logits of token {index} contain NaN or infinity. Gemma overflows in float16: load the model with "
                "dtype='bfloat16' or 'float32'. If it happens in those dtypes, the checkpoint may be corrupt.",
                index=index,
            )
        return float(largest) + math.log(total), max(0.0, math.log(total) - float(exp @ shifted) / total)

    def _select_allowed(self, logits: Tensor) -> Tensor:
        """Return the logits of the allowed tokens; a view if they are the first ids, as in Google's checkpoints."""
        return logits[: len(self._allowed_ids)] if self._is_contiguous else logits.index_select(0, self._allowed_ids)

    def _candidate(self, index: int, logits: Tensor, logsumexp: float, sampled_probs: Tensor) -> Candidate:
        token_id, logit = int(self._allowed_ids[index]), float(logits[index])
        logprob = logit - logsumexp
        piece = self._processor.token_str(token_id)
        return Candidate(token_id, piece, logit, logprob, math.exp(logprob), float(sampled_probs[index]))

    def _text_delta(self, token_id: int, is_last: bool) -> str:
        text = self._decoder.push(token_id)
        return text + self._decoder.finish() if is_last else text

    def _finish_reason(self, token_id: int, num_tokens: int, seconds: float) -> FinishReason | None:
        if token_id in self._eos_token_ids:
            return "eos"
        if num_tokens == self._options.max_new_tokens:
            return "length"
        time_limit = self._options.time_limit
        return "time" if time_limit is not None and seconds >= time_limit else None


def _timed(compute: Callable[[], Tensor], device: torch.device) -> tuple[Tensor, float]:
    """Return the result of `compute` and its duration in seconds, with the accelerator synchronized."""
    began = perf_counter()
    result = compute()
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return result, perf_counter() - began


# Checks


def _check_request(
    model: PaliGemmaForConditionalGeneration, input_ids: Tensor, allowed_tokens: Tensor, options: GenerationOptions
) -> None:
    batch, prefix_length = input_ids.shape
    if batch != 1:
        raise InputError("generation.batch", "A request must have exactly one prompt, got {count}.", count=batch)
    positions = model.config.text_config.max_position_embeddings
    check_prefix_length(prefix_length, positions)
    if prefix_length + options.max_new_tokens > positions:
        raise InputError(
            "generation.positions",
            "max_new_tokens must be <= {maximum}, got {value}. Image and prompt take {prefix_length} of the model's "
            "{positions} positions.",
            maximum=positions - prefix_length,
            value=options.max_new_tokens,
            prefix_length=prefix_length,
            positions=positions,
        )
    for token_id in options.forced_ids:
        if not (0 <= token_id < allowed_tokens.numel() and allowed_tokens[token_id]):
            raise InputError(
                "generation.forced_ids_allowed",
                "forced_ids must contain only tokenizer ids other than <image>, got {token_id}.",
                token_id=token_id,
            )


def check_prefix_length(prefix_length: int, positions: int) -> None:
    """Raise InputError if image and prompt leave no position for a generated token."""
    if prefix_length >= positions:
        raise InputError(
            "generation.prompt_too_long",
            "The prompt is too long: image and prompt take {prefix_length} of the model's {positions} positions.",
            prefix_length=prefix_length,
            positions=positions,
        )


def _to_token_ids(forced_ids: Any) -> tuple[int, ...]:
    """Convert a sequence of ids, or one id, to Python integers."""
    try:
        token_ids = tuple(forced_ids)
    except TypeError:  # a single number
        token_ids = (forced_ids,)
    if not all(map(is_integer, token_ids)):
        raise InputError(
            "generation.forced_ids", "forced_ids must be a sequence of token ids, got {value!r}.", value=forced_ids
        )
    return tuple(map(int, token_ids))
