"""Choose the next token from logits: temperature, top-k, top-p and the random draw.

The plain implementations come first; they follow transformers' logits processors. The fast ones after them return the
same values up to rounding, without sorting the full vocabulary of 257,000 tokens.

All functions operate on one position, a tensor of shape (num_tokens,); token indices are indices into it.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from paligemma.errors import InputError
from paligemma.validation import is_finite_number, is_integer

BLOCK_SIZE = 64  # logits per block in `top_k_indices`
MAX_SEED = 2**63 - 1
MAX_RANDOM_SEED = 2**32 - 1  # short, and exact as a number in JavaScript


@dataclass(frozen=True)
class Sampling:
    """Sampling settings.

    Args:
        temperature: divides the logits; finite, >= 0. 0 = greedy decoding: the largest logit, or the lowest id among
            equal ones; top_k, top_p and seed then have no effect.
        top_k: keep the k largest logits, and ties with the k-th; >= 0, 0 = off.
        top_p: keep the smallest set of most probable tokens with at least this cumulative probability; > 0, <= 1,
            1 = off (nucleus sampling, Holtzman et al., https://arxiv.org/abs/1904.09751).
        seed: seed of the request's random number generator, 0 to 2^63 - 1; None: a random seed.

    Raises:
        InputError: for values outside these ranges.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        if not (is_finite_number(self.temperature) and self.temperature >= 0):
            raise InputError(
                "sampling.temperature", "temperature must be finite and >= 0, got {value!r}.", value=self.temperature
            )
        if not (is_integer(self.top_k) and self.top_k >= 0):
            raise InputError("sampling.top_k", "top_k must be an integer >= 0, got {value!r}.", value=self.top_k)
        if not (is_finite_number(self.top_p) and 0 < self.top_p <= 1):
            raise InputError("sampling.top_p", "top_p must be > 0 and <= 1, got {value!r}.", value=self.top_p)
        if self.seed is not None and not (is_integer(self.seed) and 0 <= self.seed <= MAX_SEED):
            raise InputError(
                "sampling.seed",
                "seed must be None or an integer from 0 to {maximum}, got {value!r}.",
                maximum=MAX_SEED,
                value=self.seed,
            )
        # NumPy numbers and fractions are accepted and stored as Python numbers.
        object.__setattr__(self, "temperature", float(self.temperature))
        object.__setattr__(self, "top_k", int(self.top_k))
        object.__setattr__(self, "top_p", float(self.top_p))
        object.__setattr__(self, "seed", None if self.seed is None else int(self.seed))

    def with_seed(self) -> Sampling:
        """Return these settings with a seed: the given one, or a random one from the operating system."""
        return self if self.seed is not None else replace(self, seed=secrets.randbelow(MAX_RANDOM_SEED + 1))


# Plain implementations


def apply_temperature(logits: Tensor, temperature: float) -> Tensor:
    """Divide the logits by a temperature > 0.

    The largest logit is subtracted first: softmax is invariant to it, and small temperatures cannot overflow.
    """
    return (logits - logits.max()) / temperature


def top_k_filter(logits: Tensor, top_k: int) -> Tensor:
    """Set all logits below the k-th largest to -inf. 0 = off."""
    if top_k == 0 or top_k >= logits.numel():
        return logits
    kth_largest = logits.topk(top_k).values[-1]
    return logits.masked_fill(logits < kth_largest, -math.inf)


def top_p_filter(probabilities: Tensor, top_p: float) -> Tensor:
    """Keep the nucleus and renormalize.

    A token is in the nucleus if the cumulative probability of the tokens before it, in order of decreasing probability
    and increasing id, is less than top_p. The nucleus is never empty.

    Args:
        probabilities: (num_tokens,), float64, sum 1.
        top_p: > 0, <= 1; 1 = off.
    """
    return probabilities if top_p == 1 else _renormalize(probabilities, _nucleus(probabilities, top_p))


def sampling_probabilities(
    logits: Tensor, sampling: Sampling, filter_top_p: Callable[[Tensor, float], Tensor] = top_p_filter
) -> Tensor:
    """Apply temperature, top-k and top-p, in the order of transformers' `generate`.

    Args:
        logits: (num_tokens,), finite.
        sampling: temperature > 0.
        filter_top_p: `top_p_filter`, or the equivalent `fast_top_p_filter`.

    Returns:
        (num_tokens,), float64, sum 1; 0 for tokens that top-k or top-p removes.
    """
    scaled = apply_temperature(logits.double(), sampling.temperature)
    probabilities = top_k_filter(scaled, sampling.top_k).softmax(dim=0)
    return filter_top_p(probabilities, sampling.top_p)


def draw(probabilities: Tensor, generator: torch.Generator) -> int:
    """Draw an index by inverting the cumulative distribution; consumes one random number.

    The number is in [0, 1) and the first index whose cumulative probability exceeds it is chosen, so an index with
    probability 0 is never drawn.
    """
    cumulative = probabilities.cumsum(dim=0)
    point = torch.rand((), dtype=torch.float64, generator=generator) * cumulative[-1]
    return int(torch.searchsorted(cumulative, point, right=True))


def rank_of(logits: Tensor, index: int) -> int:
    """Return the rank of a token: 1 for the largest logit; among equal logits the lower index ranks first."""
    larger = int((logits > logits[index]).sum())
    equal_before = int((logits[:index] == logits[index]).sum())
    return 1 + larger + equal_before


def sorted_top_k_indices(logits: Tensor, k: int) -> list[int]:
    """Return the indices of the k largest logits in order of rank (all if there are fewer)."""
    return logits.argsort(descending=True, stable=True)[:k].tolist()


def _nucleus(probabilities: Tensor, top_p: float) -> Tensor:
    """Return the indices of the nucleus."""
    ordered, order = probabilities.sort(descending=True, stable=True)
    mass_before = ordered.cumsum(dim=0) - ordered
    mass_before[0] = 0.0
    return order[mass_before < top_p]


def _renormalize(probabilities: Tensor, kept: Tensor) -> Tensor:
    """Zero all probabilities except those at the indices `kept`, and rescale to sum 1."""
    filtered = torch.zeros_like(probabilities)
    filtered[kept] = probabilities[kept]
    return filtered / filtered.sum()


# Fast implementations


def sample(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> tuple[int, Tensor]:
    """Choose a token.

    Args:
        logits: (num_tokens,), finite.
        sampling: the settings; the seed is not used here.
        generator: a seeded CPU generator; one random number is consumed, or none if greedy.

    Returns:
        The index of the token, and the probabilities it was drawn from: (num_tokens,), float64, sum 1.
    """
    if sampling.temperature == 0:
        best = top_k_indices(logits, 1)[0]
        one_hot = torch.zeros_like(logits, dtype=torch.float64)
        one_hot[best] = 1.0
        return best, one_hot
    probabilities = sampling_probabilities(logits, sampling, fast_top_p_filter)
    return draw(probabilities, generator), probabilities


def fast_top_p_filter(probabilities: Tensor, top_p: float) -> Tensor:
    """Compute `top_p_filter`, but sort only tokens that can be in the nucleus.

    Tokens with a probability below (1 - top_p) / num_tokens have a total probability below 1 - top_p, so none of them
    is in the nucleus. Half of that bound is used, as a margin for rounding. Within 1e-9 of top_p = 1, where rounding
    decides which of the least probable tokens are kept, the result can differ by that rounding.
    """
    if top_p == 1:
        return probabilities
    candidates = (probabilities >= 0.5 * (1 - top_p) / probabilities.numel()).nonzero().flatten()
    return _renormalize(probabilities, candidates[_nucleus(probabilities[candidates], top_p)])


def top_k_indices(logits: Tensor, k: int) -> list[int]:
    """Compute `sorted_top_k_indices`, but sort only blocks whose maximum is among the k largest maxima."""
    blocks = F.pad(logits, (0, -logits.numel() % BLOCK_SIZE), value=-math.inf).view(-1, BLOCK_SIZE)
    maxima = blocks.amax(dim=1)
    kth_largest = maxima.topk(min(k, maxima.numel())).values[-1]
    selected = (maxima >= kth_largest).nonzero()  # (num_selected, 1)
    indices = (selected * BLOCK_SIZE + torch.arange(BLOCK_SIZE, device=selected.device)).flatten()
    order = blocks[selected[:, 0]].flatten().argsort(descending=True, stable=True)
    return indices[order[: min(k, logits.numel())]].tolist()
