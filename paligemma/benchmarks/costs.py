"""bench: what a token and a first token cost by their shapes, what the machine can do at most, and medians.

GB and GFLOP count in powers of ten; a multiplication with its addition is two operations.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor, nn

from paligemma.checkpoint import build_empty_model
from paligemma.config import PaliGemmaConfig

READ_BYTES = 1_000_000_000  # far more than any cache holds
MATRIX_SIDES = {"cpu": 2048}  # of the products that measure arithmetic; an accelerator needs larger ones to be busy
MATRIX_SIDE = 8192
MULTIPLIED_TYPES = (torch.bfloat16, torch.float16, torch.float32)
PASSES = 5
INT8_SCALE_BYTES = 4  # a float32 an output channel


# Measurements -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spread:
    """Some measurements of one thing: their median, the lowest and the highest, and how many there are."""

    median: float
    lowest: float
    highest: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Raises ValueError where there are none."""
        if not values:
            raise ValueError("there are no values; a median needs at least one")
        return cls(statistics.median(values), min(values), max(values), len(values))

    def text(self, digits: int = 2, factor: float = 1.0) -> str:
        """Such as "0.61 (0.60–0.64)", each multiplied by `factor`."""
        median, lowest, highest = (f"{value * factor:.{digits}f}" for value in (self.median, self.lowest, self.highest))
        return f"{median} ({lowest}–{highest})"


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> Spread:
    """How many times faster ours is, round by round: both lists hold the seconds of the same rounds."""
    return Spread.of([their / our for our, their in zip(ours, theirs, strict=True)])


# The machine ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Limits:
    """The most that was measured here.

    Attributes:
        gb_s: memory read, in GB a second: a matrix of 1 GB times a vector.
        gflops_s: by type, products of two square matrices, in GFLOP a second.
    """

    gb_s: float
    gflops_s: dict[str, float]

    @property
    def best_gflops_s(self) -> float:
        """Of the fastest type: that one is the limit, whichever type the model computes in."""
        return max(self.gflops_s.values())


def measure_limits(device: torch.device) -> Limits:
    """Measure what the device can do, in about three seconds."""
    types = {str(dtype).removeprefix("torch."): measured_gflops(device, dtype) for dtype in MULTIPLIED_TYPES}
    return Limits(measured_gb_s(device), types)


def higher(first: Limits, second: Limits) -> Limits:
    """Of two measurements of one machine, the higher of each figure."""
    types = {name: max(value, second.gflops_s[name]) for name, value in first.gflops_s.items()}
    return Limits(max(first.gb_s, second.gb_s), types)


def measured_gb_s(device: torch.device, num_bytes: int = READ_BYTES) -> float:
    """GB a second that a matrix-vector product in float32, which reads each number once, takes from memory."""
    matrix = torch.ones((num_bytes // 4 // 4096, 4096), device=device)
    vector = torch.ones(4096, device=device)
    return matrix.nbytes / _shortest(lambda: matrix @ vector, device) / 1e9


def measured_gflops(device: torch.device, dtype: torch.dtype, side: int | None = None) -> float:
    """GFLOP a second of a product of two square matrices."""
    side = side or MATRIX_SIDES.get(device.type, MATRIX_SIDE)
    matrix = torch.ones((side, side), dtype=dtype, device=device)
    return 2 * side**3 / _shortest(lambda: matrix @ matrix, device) / 1e9


def _shortest(work: Callable[[], Tensor], device: torch.device) -> float:
    """The shortest of PASSES runs, in seconds, behind one that does not count."""
    seconds = []
    for _ in range(PASSES + 1):
        synchronize(device)
        began = perf_counter()
        work()
        synchronize(device)
        seconds.append(perf_counter() - began)
    return min(seconds[1:])


def synchronize(device: torch.device) -> None:
    """Wait until an accelerator has done what it was given; a CPU has."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


# The model --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """What a checkpoint of one configuration asks of a machine.

    Attributes:
        weight_bytes: all weights, the head and the embedding being one.
        decoder_bytes: weights that each token reads: the decoder's layers, its last norm, and the head.
        cache_bytes_a_token: keys and values of one token, which every later token reads.
        config: the sizes.
    """

    weight_bytes: int
    decoder_bytes: int
    cache_bytes_a_token: int
    config: PaliGemmaConfig

    @classmethod
    def of(
        cls,
        config: PaliGemmaConfig,
        dtype: torch.dtype,
        quantize: str | None = None,
        cache_dtype: torch.dtype | None = None,
    ) -> Work:
        """The work by shapes alone. With "int8" the decoder's and the head's matrices take a byte a weight.

        `cache_dtype` is that of keys and values; None: that of the weights.
        """
        model, text = build_empty_model(config), config.text_config
        decoder = sum(_stored_bytes(weight, dtype, quantize) for weight in model.language_model.parameters())
        others = sum(
            _stored_bytes(weight, dtype, None)
            for part in (model.vision_tower, model.multi_modal_projector)
            for weight in part.parameters()
        )
        cache = 2 * text.num_hidden_layers * text.num_key_value_heads * text.head_dim * (cache_dtype or dtype).itemsize
        return cls(decoder + others, decoder, cache, config)

    def token_bytes(self, context: int) -> int:
        """What is read to write one token behind `context` others: weights, keys and values."""
        return self.decoder_bytes + context * self.cache_bytes_a_token

    def picture_operations(self) -> int:
        """Of the vision tower and the projector: every weight once a patch, and attention between all patches."""
        vision, model = self.config.vision_config, build_empty_model(self.config)
        patches = vision.num_image_tokens
        weights = _multiplied_weights(model.vision_tower) + _multiplied_weights(model.multi_modal_projector)
        return 2 * patches * weights + 4 * patches**2 * vision.hidden_size * vision.num_hidden_layers

    def first_token_operations(self, num_tokens: int) -> int:
        """Of the picture and of a prefix of `num_tokens`, picture included, with logits for its last position."""
        text, decoder = self.config.text_config, build_empty_model(self.config).language_model
        layers = 2 * num_tokens * _multiplied_weights(decoder.model.layers)
        attention = 4 * num_tokens**2 * text.num_attention_heads * text.head_dim * text.num_hidden_layers
        return self.picture_operations() + layers + attention + 2 * text.hidden_size * text.vocab_size


def _stored_bytes(weight: Tensor, dtype: torch.dtype, quantize: str | None) -> int:
    if quantize == "int8" and weight.dim() == 2:
        return weight.numel() + weight.shape[0] * INT8_SCALE_BYTES
    return weight.numel() * dtype.itemsize


def _multiplied_weights(module: nn.Module) -> int:
    return sum(part.weight.numel() for part in module.modules() if isinstance(part, nn.Linear | nn.Conv2d))
