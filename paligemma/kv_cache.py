"""Preallocated key/value cache."""

from __future__ import annotations

import torch
from torch import Tensor

from paligemma.config import GemmaConfig, PaliGemmaConfig


class KVCache:
    """Keys and values of all layers for one request, passed to the model as an argument.

    During a forward pass, each layer calls `update`; the model calls `advance` once at the end.

    Args:
        config: the decoder's configuration, or the whole model's.
        batch_size: number of sequences.
        max_length: maximum number of tokens, prefix and generated.
        dtype, device: those of the model's hidden states.
    """

    def __init__(
        self,
        config: GemmaConfig | PaliGemmaConfig,
        batch_size: int,
        max_length: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        if batch_size < 1 or max_length < 1:
            raise ValueError(f"batch_size and max_length must be >= 1, got {batch_size} and {max_length}.")
        text = config.text_config if isinstance(config, PaliGemmaConfig) else config
        shape = (batch_size, text.num_key_value_heads, max_length, text.head_dim)
        self.dtype = dtype
        self.max_length = max_length
        self._length = 0
        self._keys = [torch.empty(shape, dtype=dtype, device=device) for _ in range(text.num_hidden_layers)]
        self._values = [torch.empty(shape, dtype=dtype, device=device) for _ in range(text.num_hidden_layers)]

    def num_items(self) -> int:
        """Number of cached tokens."""
        return self._length

    @property
    def num_bytes(self) -> int:
        """Allocated memory in bytes."""
        return sum(tensor.nbytes for tensor in self._keys + self._values)

    def update(self, keys: Tensor, values: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Append one layer's new keys and values to the cached ones.

        Args:
            keys, values: (batch, key/value heads, new tokens, head_dim).

        Returns:
            The layer's cached and new keys and values: views, (batch, key/value heads, cached + new tokens, head_dim).

        Raises:
            ValueError: if the cache is full, or if batch size, heads or dtype differ from the cache's.
        """
        end = self._length + keys.shape[2]
        if end > self.max_length:
            raise ValueError(f"The KV cache is full: max_length is {self.max_length}, got {end} tokens.")
        stored_keys, stored_values = self._keys[layer_idx], self._values[layer_idx]
        batch_size, num_heads, _, head_dim = stored_keys.shape
        if keys.shape != (batch_size, num_heads, keys.shape[2], head_dim) or keys.dtype != self.dtype:
            # The assignment below would broadcast and convert silently.
            raise ValueError(
                f"keys must be ({batch_size}, {num_heads}, tokens, {head_dim}) in {self.dtype}, "
                f"got {tuple(keys.shape)} in {keys.dtype}."
            )
        stored_keys[:, :, self._length : end] = keys
        stored_values[:, :, self._length : end] = values
        return stored_keys[:, :, :end], stored_values[:, :, :end]

    def advance(self, num_tokens: int) -> None:
        """Mark `num_tokens` new tokens as cached, once every layer has stored them."""
        self._length += num_tokens
