from __future__ import annotations

import pytest
import torch

from paligemma.config import GemmaConfig
from paligemma.kv_cache import KVCache

CONFIG = GemmaConfig(
    vocab_size=10, hidden_size=8, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=6
)


def make_cache(batch_size: int = 1, max_length: int = 5, dtype: torch.dtype = torch.float32) -> KVCache:
    return KVCache(CONFIG, batch_size, max_length, dtype, "cpu")


def states(count: int, seed: int) -> torch.Tensor:
    """Random keys or values of `count` tokens."""
    return torch.randn((1, 2, count, 6), generator=torch.Generator().manual_seed(seed))


def test_update_returns_cached_and_new_keys() -> None:
    cache = make_cache()
    first, second = states(3, 0), states(2, 1)
    for layer in range(2):
        keys, values = cache.update(first, -first, layer)
        assert torch.equal(keys, first) and torch.equal(values, -first)
    cache.advance(3)
    keys, values = cache.update(second, -second, 0)
    assert torch.equal(keys, torch.cat((first, second), dim=2))
    assert torch.equal(values, -keys)


def test_layers_and_caches_do_not_share_memory() -> None:
    one, other = make_cache(), make_cache()
    keys, _ = one.update(states(1, 0), states(1, 0), 0)
    before = keys.clone()
    one.update(states(1, 1), states(1, 1), 1)
    other.update(states(1, 2), states(1, 2), 0)
    assert torch.equal(keys, before)


def test_num_items_changes_on_advance_only() -> None:
    cache = make_cache()
    cache.update(states(3, 0), states(3, 0), 0)
    assert cache.num_items() == 0
    cache.advance(3)
    assert cache.num_items() == 3


def test_num_bytes_counts_the_preallocated_memory() -> None:
    cache = make_cache(batch_size=3, dtype=torch.bfloat16)
    layers, batch, heads, tokens, head_dim, bytes_per_value = 2, 3, 2, 5, 6, 2
    assert cache.num_bytes == 2 * layers * batch * heads * tokens * head_dim * bytes_per_value
    assert cache.dtype == torch.bfloat16


def test_full_cache_rejects_more_tokens() -> None:
    cache = make_cache()
    cache.update(states(4, 0), states(4, 0), 0)
    cache.advance(4)
    with pytest.raises(ValueError, match="max_length is 5, got 6 tokens"):
        cache.update(states(2, 1), states(2, 1), 0)


@pytest.mark.parametrize(
    ("batch_size", "dtype", "heads"), [(2, torch.float32, 2), (1, torch.bfloat16, 2), (1, torch.float32, 1)]
)
def test_other_batch_size_dtype_or_heads_are_rejected(batch_size: int, dtype: torch.dtype, heads: int) -> None:
    with pytest.raises(ValueError, match=rf"keys must be \({batch_size}, 2, tokens, 6\) in {dtype}"):
        make_cache(batch_size, dtype=dtype).update(states(1, 0)[:, :heads], states(1, 0)[:, :heads], 0)


@pytest.mark.parametrize(("batch_size", "max_length"), [(0, 5), (1, 0)])
def test_sizes_below_one_are_rejected(batch_size: int, max_length: int) -> None:
    with pytest.raises(ValueError, match="must be >= 1"):
        make_cache(batch_size, max_length)
