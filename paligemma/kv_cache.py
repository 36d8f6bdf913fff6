"""The keys and values of one generation."""

from __future__ import annotations

import torch
from torch import Tensor

from paligemma.config import GemmaConfig, PaliGemmaConfig


class KVCache:
    """Room for the keys and values of every layer, taken once; owned by one generation, passed as an argument.

    A decoder that sees token t needs the keys and values of tokens 0..t-1 again and nothing else of them, so they
    are kept here instead of being computed anew. One forward pass is: each layer calls `update`, then the
    model calls `advance` once.

    Args:
        config: the decoder's sizes (a PaliGemmaConfig is accepted for its `text_config`).
        batch_size: sequences decoded side by side.
        max_length: most tokens (prefix and generated) that will ever be stored.
        dtype, device: of the keys and values, those of the model.
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
            raise ValueError(f"batch_size {batch_size} and max_length {max_length} must both be at least 1")
        text = config.text_config if isinstance(config, PaliGemmaConfig) else config
        shape = (batch_size, text.num_key_value_heads, max_length, text.head_dim)
        self.max_length = max_length
        self.length = 0
        self._keys = [torch.empty(shape, dtype=dtype, device=device) for _ in range(text.num_hidden_layers)]
        self._values = [torch.empty(shape, dtype=dtype, device=device) for _ in range(text.num_hidden_layers)]

    def num_items(self) -> int:
        """Tokens stored so far."""
        return self.length

    @property
    def num_bytes(self) -> int:
        """Memory taken by all keys and values."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._keys + self._values)

    @property
    def device(self) -> torch.device:
        return self._keys[0].device

    @property
    def dtype(self) -> torch.dtype:
        return self._keys[0].dtype

    def update(self, keys: Tensor, values: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Store one layer's new keys and values behind the `length` tokens that all layers have.

        Args:
            keys, values: (batch, key-value heads, new tokens, head_dim).

        Returns:
            The layer's keys and values so far, views of (batch, key-value heads, length + new tokens, head_dim).

        Raises ValueError where there is no room, and for another batch size, head or type than the cache's.
        """
        end = self.length + keys.shape[2]
        if end > self.max_length:
            raise ValueError(f"the cache has room for {self.max_length} tokens and {end} are needed")
        stored_keys, stored_values = self._keys[layer_idx], self._values[layer_idx]
        batch_size, num_heads, _, head_dim = stored_keys.shape
        if keys.shape != (batch_size, num_heads, keys.shape[2], head_dim) or keys.dtype != self.dtype:
            # One sequence would be stretched over the whole batch, and another type rounded, without a word.
            raise ValueError(
                f"the cache is for {batch_size} sequences of {num_heads} heads of {head_dim} in {self.dtype}, the keys "
                f"are {tuple(keys.shape)} in {keys.dtype}"
            )
        stored_keys[:, :, self.length : end] = keys
        stored_values[:, :, self.length : end] = values
        return stored_keys[:, :, :end], stored_values[:, :, :end]

    def advance(self, num_tokens: int) -> None:
        """Count `num_tokens` as stored, once every layer has stored them."""
        self.length += num_tokens

    def crop(self, length: int) -> None:
        """Forget all but the first `length` tokens."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot crop to {length} tokens; the cache holds {self.length}")
        self.length = length
