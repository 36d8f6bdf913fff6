"""One token after another: sampling, and the loop that yields a Step a token.

The loop is one generator. It does nothing between two steps, so closing it stops the work, and it leaves nothing
behind: the cache, the random numbers and the text so far all belong to one request.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from numbers import Integral, Real
from time import perf_counter
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from paligemma.errors import NonFiniteLogitsError
from paligemma.kv_cache import KVCache
from paligemma.modeling import PaliGemmaForConditionalGeneration
from paligemma.processing import PaliGemmaProcessor

FinishReason = Literal["eos", "length", "time"]

MAX_TOP_N = 50
BLOCK = 64  # rows whose maximum is taken first when the largest logits are looked for
MAX_SEED = 2**63 - 1
MAX_DRAWN_SEED = 2**32 - 1  # short enough to be read aloud, and exact as a number in JavaScript


# Options and results --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn from the logits; ValueError for values outside what is said here.

    Args:
        temperature: what the logits are divided by, finite, at least 0. 0 is greedy: the largest logit is taken, the
            lowest id among equals, and top_k, top_p and seed do nothing.
        top_k: keep the k largest logits, and any equal to the k-th. 0 keeps all.
        top_p: keep the smallest set of likeliest tokens whose probabilities reach this sum, above 0, at most 1
            (nucleus sampling, Holtzman et al., arXiv 1904.09751). 1 keeps all.
        seed: of this request's own random numbers, 0 to 2^63 - 1. None: a fresh one is drawn.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        _require(
            _is_real(self.temperature) and self.temperature >= 0 and _is_finite(self.temperature),
            "temperature",
            self.temperature,
            "a finite number of at least 0 (0 is greedy)",
        )
        _require(
            _is_integer(self.top_k) and self.top_k >= 0, "top_k", self.top_k, "a whole number of at least 0 (0 is off)"
        )
        _require(
            _is_real(self.top_p) and 0 < self.top_p <= 1,
            "top_p",
            self.top_p,
            "a number above 0, at most 1 (1 is off)",
        )
        _require(
            self.seed is None or (_is_integer(self.seed) and 0 <= self.seed <= MAX_SEED),
            "seed",
            self.seed,
            f"a whole number from 0 to {MAX_SEED}, or None for a fresh one",
        )
        # NumPy's numbers and fractions are welcome; what is reported, and what tensors meet, are Python's own.
        object.__setattr__(self, "temperature", float(self.temperature))
        object.__setattr__(self, "top_k", int(self.top_k))
        object.__setattr__(self, "top_p", float(self.top_p))
        object.__setattr__(self, "seed", None if self.seed is None else int(self.seed))

    def with_seed(self) -> Sampling:
        """Itself when it has a seed, else a copy with a fresh one, drawn from the operating system."""
        return self if self.seed is not None else replace(self, seed=secrets.randbelow(MAX_DRAWN_SEED + 1))


@dataclass(frozen=True)
class GenerationOptions:
    """What one request asks for; ValueError for values outside what is said here.

    Args:
        max_new_tokens: most tokens to generate, at least 1; forced ones and the end token count.
        sampling: how tokens are drawn.
        top_n: candidates listed in each Step, 1 to 50.
        forced_ids: taken as the first generated tokens, whatever the logits say. An end token among them ends the
            answer.
        time_limit: seconds after which no further token is begun, above 0; None: no limit. The first token always
            comes.
    """

    max_new_tokens: int = 128
    sampling: Sampling = field(default_factory=Sampling)
    top_n: int = 10
    forced_ids: tuple[int, ...] = ()
    time_limit: float | None = None

    def __post_init__(self) -> None:
        _require(
            _is_integer(self.max_new_tokens) and self.max_new_tokens >= 1,
            "max_new_tokens",
            self.max_new_tokens,
            "a whole number of at least 1",
        )
        _require(
            _is_integer(self.top_n) and 1 <= self.top_n <= MAX_TOP_N,
            "top_n",
            self.top_n,
            f"a whole number from 1 to {MAX_TOP_N}",
        )
        object.__setattr__(self, "forced_ids", _read_forced_ids(self.forced_ids))
        _require(
            self.time_limit is None or (_is_real(self.time_limit) and 0 < self.time_limit < math.inf),
            "time_limit",
            self.time_limit,
            "a finite number of seconds above 0, or None",
        )


@dataclass(frozen=True)
class Candidate:
    """A token that could stand at a position; the fields are those of Step."""

    token_id: int
    piece: str
    logit: float
    logprob: float
    prob: float
    sampled_prob: float


@dataclass(frozen=True)
class Step:
    """One generated token and what the model said at its position.

    `rank`, `logsumexp`, `entropy` and all probabilities are over the rows of the vocabulary that may be sampled: not
    the image token's, and none without a tokenizer piece.

    Attributes:
        index: 0 for the first token.
        token_id, piece: the token, and how the tokenizer writes it.
        text_delta, text: what it adds to the answer's text, and the text so far. An end token adds none. Bytes of an
            unfinished character are held back, at most until the last step.
        logit: float32, as the model gave it (Gemma 2: soft-capped).
        logprob, prob: natural logarithm of the probability, and the probability, at temperature 1.
        sampled_prob: the probability of being drawn, after temperature, top-k and top-p. With temperature 0 it is 1
            for the largest logit and 0 elsewhere. A forced token may have 0.
        rank: 1 for the largest logit; among equals the lower id comes first.
        entropy: of the distribution at temperature 1, in nats.
        logsumexp: log(sum(exp(logits))); logprob = logit - logsumexp.
        top: the candidates with the largest logits, in the order of `rank`.
        finish_reason: None until the last step; then "eos", "length" (max_new_tokens) or "time" (time_limit).
        seconds: since the request began.
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
    """Seconds of one request.

    Attributes:
        image_s: vision tower and projector, or finding what they made of this picture before.
        first_token_s: from the request's beginning to the first Step.
        total_s: from the request's beginning to the last Step.
        tokens_per_s: tokens a second behind the first one; None when there is no second token.
    """

    image_s: float
    first_token_s: float
    total_s: float
    tokens_per_s: float | None


@dataclass(frozen=True)
class GenerationResult:
    """A whole answer. `seed` is the one that was used, drawn or given; with it the answer can be had again."""

    text: str
    token_ids: tuple[int, ...]
    steps: tuple[Step, ...]
    finish_reason: FinishReason
    timing: Timing
    seed: int


class StepCollector(Iterator[Step]):
    """Iterate over a stream of steps, and keep the steps and the stream's return value.

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
        except StopIteration as end:
            self.result = self.result or end.value
            raise
        self.steps.append(step)
        return step

    def close(self) -> None:
        """Close the stream, which stops generation."""
        self._stream.close()


# Sampling: pure functions ---------------------------------------------------------------------------------------


def sample(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> tuple[int, Tensor]:
    """Draw one row.

    Args:
        logits: (rows,), finite.
        sampling: its seed is not used here; the generator has been seeded.
        generator: on the CPU. One number is taken from it, none when greedy.

    Returns:
        The row drawn, and the probabilities it was drawn from, float64 (rows,), which sum to 1.
    """
    if sampling.temperature == 0:
        best = top_k_indices(logits, 1)[0]
        certain = torch.zeros_like(logits, dtype=torch.float64)
        certain[best] = 1.0
        return best, certain
    probabilities = sampling_probabilities(logits, sampling)
    return draw(probabilities, generator), probabilities


def sampling_probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """Temperature, then top-k, then top-p, renormalized each time, in the order of transformers' generate().

    Args:
        logits: (rows,), finite.
        sampling: with a temperature above 0.

    Returns:
        float64, (rows,), summing to 1; 0 where top-k or top-p removed a row.
    """
    wide = logits.double()
    # Softmax does not see the shift, and with it the smallest temperature cannot overflow to inf - inf.
    scaled = (wide - wide.max()) / sampling.temperature
    probabilities = keep_top_k(scaled, sampling.top_k).softmax(dim=0)
    return keep_top_p(probabilities, sampling.top_p)


def keep_top_k(logits: Tensor, top_k: int) -> Tensor:
    """Set all but the k largest of (rows,) to -inf. Rows equal to the k-th stay, as in transformers. 0 keeps all."""
    if top_k == 0 or top_k >= logits.numel():
        return logits
    smallest_kept = logits.topk(top_k).values[-1]
    return logits.masked_fill(logits < smallest_kept, -math.inf)


def keep_top_p(probabilities: Tensor, top_p: float) -> Tensor:
    """Keep the nucleus and renormalize.

    A row stays while the rows before it, likelier or equal with a lower id, sum to less than `top_p`. So the row
    whose probability crosses the bound stays, the first row always does, and where a sum is exactly `top_p` no
    further row is kept.

    Args:
        probabilities: float64, (rows,), summing to 1.
        top_p: above 0, at most 1; 1 keeps all.
    """
    if top_p == 1:
        return probabilities
    # Rows below (1 - top_p) / rows sum to less than 1 - top_p, so they lie outside: without them the sort is short.
    # The half keeps this clear of rounding.
    contenders = (probabilities >= 0.5 * (1 - top_p) / probabilities.numel()).nonzero().flatten()
    ordered, order = probabilities[contenders].sort(descending=True, stable=True)
    mass_before = ordered.cumsum(dim=0) - ordered
    mass_before[0] = 0.0
    kept = order[mass_before < top_p]
    nucleus = torch.zeros_like(probabilities)
    nucleus[contenders[kept]] = probabilities[contenders[kept]]
    return nucleus / nucleus.sum()


def draw(probabilities: Tensor, generator: torch.Generator) -> int:
    """A row with the given probabilities, by inverting their running sum; takes one number from the generator.

    A row with probability 0 is never drawn: the number lies in [0, 1) and the row is the first whose running sum
    exceeds it.
    """
    running_sum = probabilities.cumsum(dim=0)
    point = torch.rand((), dtype=torch.float64, generator=generator) * running_sum[-1]
    return int(torch.searchsorted(running_sum, point, right=True))


def top_k_indices(logits: Tensor, count: int) -> list[int]:
    """The `count` rows (or all) of (rows,) with the largest logits, largest first, the lower id among equals.

    They lie in the blocks with the `count` largest maxima, so that only those are sorted.
    """
    blocks = F.pad(logits, (0, -logits.numel() % BLOCK), value=-math.inf).view(-1, BLOCK)
    maxima = blocks.amax(dim=1)
    smallest = maxima.topk(min(count, maxima.numel())).values[-1]
    places = (maxima >= smallest).nonzero()
    contenders = blocks[places[:, 0]].flatten()
    order = contenders.argsort(descending=True, stable=True)[: min(count, logits.numel())]
    return (places * BLOCK + torch.arange(BLOCK, device=places.device)).flatten()[order].tolist()


def rank_of(logits: Tensor, row: int) -> int:
    """The place of a row of (rows,): 1 for the largest logit, the lower id first among equals."""
    larger = int((logits > logits[row]).sum())
    equal_before = int((logits[:row] == logits[row]).sum())
    return 1 + larger + equal_before


# The loop -------------------------------------------------------------------------------------------------------


def stream(
    model: PaliGemmaForConditionalGeneration,
    processor: PaliGemmaProcessor,
    inputs: Mapping[str, Tensor],
    allowed_tokens: Tensor,
    options: GenerationOptions,
    started: float | None = None,
    encode_image: Callable[[Tensor], Tensor] | None = None,
) -> Generator[Step, None, GenerationResult]:
    """Answer one prompt about one picture, a Step a token.

    Everything is checked here, before any work. The generator's first step runs the vision tower and the whole
    prefix, each further one a single token; after the last token nothing runs. Closing the generator ends the work.
    Drained with `yield from`, it gives the GenerationResult.

    Forced tokens are fed one by one, as generated ones are, though one pass for all would be faster: several rows
    at once are summed in another order, and in bfloat16 that is enough to change what follows. They take
    their random numbers too, so that a forced beginning changes nothing but the beginning.

    Args:
        inputs: the processor's dict for one picture and one prompt.
        sampleable: (vocab_size,), bool, from `processor.sampleable`; other rows are left out of everything.
        started: `time.perf_counter()` when the request began; None: now.
        encode_image: what gives the picture's features, on the model's device; None: the model.

    Raises:
        ValueError: at the call, for a batch, for more tokens than the model has positions for, and for forced ids
            that may not be sampled.
        NonFiniteLogitsError: from a step, when the logits are not numbers.
    """
    started = perf_counter() if started is None else started
    _check_request(model, inputs["input_ids"], allowed_tokens, options)
    answer = _Answer(processor, options, model.config.eos_token_ids, allowed_tokens, started)
    return _generate(model, inputs, options.max_new_tokens, answer, encode_image or model.get_image_features)


@torch.inference_mode()  # as a decorator it is entered anew at each step, which may run in another thread
def _generate(
    model: PaliGemmaForConditionalGeneration,
    inputs: Mapping[str, Tensor],
    max_new_tokens: int,
    answer: _Answer,
    encode_image: Callable[[Tensor], Tensor],
) -> Generator[Step, None, GenerationResult]:
    token_ids = inputs["input_ids"].to(model.device)
    cache = KVCache(model.config, 1, token_ids.shape[1] + max_new_tokens, model.activation_dtype, model.device)
    image_features, image_seconds = _timed(lambda: encode_image(inputs["pixel_values"].to(model.device)), model.device)
    while True:
        output = model(token_ids, kv_cache=cache, image_features=image_features, logits_to_keep=1)
        step = answer.add(output["logits"][0, -1])
        yield step
        if step.finish_reason is not None:
            return answer.result(image_seconds)
        token_ids, image_features = token_ids.new_tensor([[step.token_id]]), None


class _Answer:
    """The tokens of one request so far. Turns each position's logits into a Step."""

    def __init__(
        self,
        processor: PaliGemmaProcessor,
        options: GenerationOptions,
        end_token_ids: tuple[int, ...],
        allowed_tokens: Tensor,
        started: float,
    ) -> None:
        self._processor = processor
        self._options = options
        self._end_token_ids = end_token_ids
        self._sampling = options.sampling.with_seed()
        self._generator = torch.Generator().manual_seed(self._sampling.seed)
        self._row_ids = allowed_tokens.nonzero().flatten()
        self._are_first = int(self._row_ids[-1]) == len(self._row_ids) - 1
        # Taken once: for 250,000 rows, asking the system for this memory anew takes longer than filling it.
        self._rows, self._shifted, self._weights = torch.empty((3, len(self._row_ids)), dtype=torch.float64)
        self._decoder = processor.stream_decoder()
        self._started = started
        self._steps: list[Step] = []

    def add(self, logits: Tensor) -> Step:
        """Choose the next token from (vocab_size,) logits, on any device; forced ids come first."""
        index, top_n = len(self._steps), self._options.top_n
        # From here on a "row" counts sampleable rows only; float64, so that 250,000 probabilities sum to 1.
        rows = self._rows.copy_(self._allowed_logits(logits.cpu()))
        logsumexp, entropy = self._logsumexp_and_entropy(rows, index)
        chosen, sampled = sample(rows, self._sampling, self._generator)
        if index < len(self._options.forced_ids):
            chosen = int(torch.searchsorted(self._row_ids, self._options.forced_ids[index]))
        token = self._candidate(chosen, rows, logsumexp, sampled)
        top = top_k_indices(rows, top_n)
        seconds = perf_counter() - self._started
        finish_reason = self._finish_reason(token.token_id, index + 1, seconds)
        text_delta = self._next_text(token.token_id, is_last=finish_reason is not None)
        step = Step(
            **asdict(token),
            index=index,
            text_delta=text_delta,
            text=self._steps[-1].text + text_delta if self._steps else text_delta,
            rank=top.index(chosen) + 1 if chosen in top else rank_of(rows, chosen),
            entropy=entropy,
            logsumexp=logsumexp,
            top=tuple(self._candidate(row, rows, logsumexp, sampled) for row in top),
            finish_reason=finish_reason,
            seconds=seconds,
        )
        self._steps.append(step)
        return step

    def result(self, image_seconds: float) -> GenerationResult:
        first, last = self._steps[0], self._steps[-1]
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
            seed=self._sampling.seed,
        )

    def _logsumexp_and_entropy(self, rows: Tensor, index: int) -> tuple[float, float]:
        """log(sum(exp(logits))), and -sum(p log p) in nats (Shannon 1948), from one pass through the exponentials.

        With x the logits less the largest and Z = sum(exp(x)): log p = x - log Z, so -sum(p log p) = log Z - sum(p x).
        """
        largest = rows.max()
        shifted = torch.sub(rows, largest, out=self._shifted)
        weights = torch.exp(shifted, out=self._weights)
        total = float(weights.sum())
        # NaN or inf in one row is NaN in the sum; -inf is not.
        if not (math.isfinite(total) and math.isfinite(shifted.min())):
            raise NonFiniteLogitsError(
                "generation.non_finite",
                "The logits of token {index} contain NaN or infinity. Gemma overflows in float16: load the model with "
                "dtype='bfloat16' or 'float32'; if it already is, the weights are corrupt.",
                index=index,
            )
        return float(largest) + math.log(total), max(0.0, math.log(total) - float(weights @ shifted) / total)

    def _allowed_logits(self, logits: Tensor) -> Tensor:
        """A view where the others lie behind them, as in Google's checkpoints."""
        return logits[: len(self._row_ids)] if self._are_first else logits.index_select(0, self._row_ids)

    def _candidate(self, row: int, rows: Tensor, logsumexp: float, sampled: Tensor) -> Candidate:
        token_id, logit = int(self._row_ids[row]), float(rows[row])
        logprob = logit - logsumexp
        return Candidate(
            token_id, self._processor.token_str(token_id), logit, logprob, math.exp(logprob), float(sampled[row])
        )

    def _next_text(self, token_id: int, is_last: bool) -> str:
        text = self._decoder.push(token_id)
        return text + self._decoder.finish() if is_last else text

    def _finish_reason(self, token_id: int, num_tokens: int, seconds: float) -> FinishReason | None:
        if token_id in self._end_token_ids:
            return "eos"
        if num_tokens == self._options.max_new_tokens:
            return "length"
        time_limit = self._options.time_limit
        return "time" if time_limit is not None and seconds >= time_limit else None


def _timed(work: Callable[[], Tensor], device: torch.device) -> tuple[Tensor, float]:
    """The work's result and the seconds it took, waiting for an accelerator to finish it."""
    began = perf_counter()
    result = work()
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return result, perf_counter() - began


# Checks ---------------------------------------------------------------------------------------------------------


def _check_request(
    model: PaliGemmaForConditionalGeneration, input_ids: Tensor, allowed_tokens: Tensor, options: GenerationOptions
) -> None:
    batch, prefix_length = input_ids.shape
    if batch != 1:
        raise ValueError(f"there are {batch} prompts; one request answers one")
    positions = model.config.text_config.max_position_embeddings
    if prefix_length + options.max_new_tokens > positions:
        raise ValueError(
            f"max_new_tokens is {options.max_new_tokens}; picture and prompt take {prefix_length} of the model's "
            f"{positions} positions, so at most {max(0, positions - prefix_length)} are allowed"
        )
    for token_id in options.forced_ids:
        if not (0 <= token_id < allowed_tokens.numel() and allowed_tokens[token_id]):
            raise ValueError(
                f"forced_ids holds {token_id}; allowed are ids from 0 to {allowed_tokens.numel() - 1} that have a "
                "tokenizer piece, except the image token"
            )


def _require(holds: bool, name: str, value: Any, allowed: str) -> None:
    if not holds:
        raise ValueError(f"{name} is {value!r}; allowed is {allowed}")


def _read_forced_ids(forced_ids: Any) -> tuple[int, ...]:
    try:
        token_ids = tuple(forced_ids)
    except TypeError:  # one number
        token_ids = (forced_ids,)
    _require(all(map(_is_integer, token_ids)), "forced_ids", forced_ids, "a sequence of token ids")
    return tuple(map(int, token_ids))


def _is_real(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_finite(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond every float
        return False


def _is_integer(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)
