"""Bytes and operations of decoding and prefill, measured peak rates of the hardware, and medians.

GB and GFLOP are powers of ten; a multiply-add counts as two operations.
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

READ_BYTES = 1_000_000_000  # larger than any CPU cache
MATRIX_SIDES = {"cpu": 2048}  # other devices need larger matrices for full utilization
MATRIX_SIDE = 8192
MULTIPLIED_TYPES = (torch.bfloat16, torch.float16, torch.float32)
PASSES = 5
INT8_SCALE_BYTES = 4  # one float32 per output channel


# Measurements


@dataclass(frozen=True)
class Spread:
    """Median, minimum, maximum and number of measurements."""

    median: float
    lowest: float
    highest: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Summarize at least one value; ValueError for none."""
        if not values:
            raise ValueError("values must contain at least one measurement, got none.")
        return cls(statistics.median(values), min(values), max(values), len(values))

    def text(self, digits: int = 2, factor: float = 1.0) -> str:
        """Format as "0.61 (0.60–0.64)", with values multiplied by `factor`."""
        median, lowest, highest = (f"{value * factor:.{digits}f}" for value in (self.median, self.lowest, self.highest))
        return f"{median} ({lowest}–{highest})"


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> Spread:
    """Return the speed-up of each round: reference seconds divided by our seconds."""
    return Spread.of([their / our for our, their in zip(ours, theirs, strict=True)])


# Hardware


@dataclass(frozen=True)
class PeakRates:
    """Measured peak rates of a device.

    Attributes:
        gb_s: memory bandwidth in GB/s, from the product of a 1 GB matrix and a vector.
        gflops_s: GFLOP/s of the product of two square matrices, by dtype.
    """

    gb_s: float
    gflops_s: dict[str, float]

    @property
    def peak_gflops_s(self) -> float:
        """GFLOP/s of the fastest dtype, which is the limit for every dtype."""
        return max(self.gflops_s.values())


def measure_peak(device: torch.device) -> PeakRates:
    """Measure the device's peak rates, in about three seconds."""
    types = {str(dtype).removeprefix("torch."): measure_gflops(device, dtype) for dtype in MULTIPLIED_TYPES}
    return PeakRates(measure_gb_s(device), types)


def combine_peaks(first: PeakRates, second: PeakRates) -> PeakRates:
    """Return the maximum of each rate of two measurements."""
    types = {name: max(value, second.gflops_s[name]) for name, value in first.gflops_s.items()}
    return PeakRates(max(first.gb_s, second.gb_s), types)


def measure_gb_s(device: torch.device, num_bytes: int = READ_BYTES) -> float:
    """Return the GB/s of a float32 matrix-vector product, which reads each element once."""
    matrix = torch.ones((num_bytes // 4 // 4096, 4096), device=device)
    vector = torch.ones(4096, device=device)
    return matrix.nbytes / _shortest_run(lambda: matrix @ vector, device) / 1e9


def measure_gflops(device: torch.device, dtype: torch.dtype, side: int | None = None) -> float:
    """Return the GFLOP/s of a product of two square matrices."""
    side = side or MATRIX_SIDES.get(device.type, MATRIX_SIDE)
    matrix = torch.ones((side, side), dtype=dtype, device=device)
    return 2 * side**3 / _shortest_run(lambda: matrix @ matrix, device) / 1e9


def _shortest_run(work: Callable[[], Tensor], device: torch.device) -> float:
    """Return the shortest time of PASSES runs after a warm-up, in seconds."""
    seconds = []
    for _ in range(PASSES + 1):
        synchronize(device)
        started = perf_counter()
        work()
        synchronize(device)
        seconds.append(perf_counter() - started)
    return min(seconds[1:])


def synchronize(device: torch.device) -> None:
    """Wait for an accelerator to finish queued work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


# Model


@dataclass(frozen=True)
class Work:
    """Bytes and operations of a model configuration.

    Attributes:
        weight_bytes: bytes of all weights, with tied embedding and head counted once.
        decoder_bytes: bytes of the weights read per token: decoder layers, final norm and head.
        cache_bytes_per_token: bytes of one token's keys and values.
        config: the configuration.
    """

    weight_bytes: int
    decoder_bytes: int
    cache_bytes_per_token: int
    config: PaliGemmaConfig

    @classmethod
    def of(
        cls,
        config: PaliGemmaConfig,
        dtype: torch.dtype,
        quantize: str | None = None,
        cache_dtype: torch.dtype | None = None,
    ) -> Work:
        """Compute the work from tensor shapes. With "int8", decoder and head matrices take one byte per weight.

        `cache_dtype` is the dtype of keys and values (default: `dtype`).
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

    def bytes_per_token(self, context: int) -> int:
        """Bytes read to decode one token after `context` tokens: weights, keys and values."""
        return self.decoder_bytes + context * self.cache_bytes_per_token

    def image_flops(self) -> int:
        """Operations of vision tower and projector: all weights for each patch, and attention between patches."""
        vision, model = self.config.vision_config, build_empty_model(self.config)
        patches = vision.num_image_tokens
        weights = _multiplied_weights(model.vision_tower) + _multiplied_weights(model.multi_modal_projector)
        return 2 * patches * weights + 4 * patches**2 * vision.hidden_size * vision.num_hidden_layers

    def prefill_flops(self, num_tokens: int) -> int:
        """Operations of prefill: the image, `num_tokens` image and text tokens, and the last position's logits."""
        text, decoder = self.config.text_config, build_empty_model(self.config).language_model
        layers = 2 * num_tokens * _multiplied_weights(decoder.model.layers)
        attention = 4 * num_tokens**2 * text.num_attention_heads * text.head_dim * text.num_hidden_layers
        return self.image_flops() + layers + attention + 2 * text.hidden_size * text.vocab_size


def _stored_bytes(weight: Tensor, dtype: torch.dtype, quantize: str | None) -> int:
    if quantize == "int8" and weight.dim() == 2:
        return weight.numel() + weight.shape[0] * INT8_SCALE_BYTES
    return weight.numel() * dtype.itemsize


def _multiplied_weights(module: nn.Module) -> int:
    return sum(part.weight.numel() for part in module.modules() if isinstance(part, nn.Linear | nn.Conv2d))
