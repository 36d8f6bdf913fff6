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


def rows(count: int, seed: int) -> torch.Tensor:
    return torch.randn((1, 2, count, 6), generator=torch.Generator().manual_seed(seed))


def test_update_returns_what_was_stored_before_and_now() -> None:
    cache = make_cache()
    first, second = rows(3, 0), rows(2, 1)
    for layer in range(2):
        keys, values = cache.update(first, -first, layer)
        assert torch.equal(keys, first) and torch.equal(values, -first)
    cache.advance(3)
    keys, values = cache.update(second, -second, 0)
    assert torch.equal(keys, torch.cat((first, second), dim=2))
    assert torch.equal(values, -keys)


def test_layers_and_caches_do_not_share_memory() -> None:
    one, other = make_cache(), make_cache()
    kept, _ = one.update(rows(1, 0), rows(1, 0), 0)
    before = kept.clone()
    one.update(rows(1, 1), rows(1, 1), 1)
    other.update(rows(1, 2), rows(1, 2), 0)
    assert torch.equal(kept, before)


def test_num_items_counts_only_what_was_advanced() -> None:
    cache = make_cache()
    cache.update(rows(3, 0), rows(3, 0), 0)
    assert cache.num_items() == 0
    cache.advance(3)
    assert cache.num_items() == 3


def test_memory_is_taken_once() -> None:
    cache = make_cache(batch_size=3, dtype=torch.bfloat16)
    assert (
        cache.num_bytes == 2 * 2 * 3 * 2 * 5 * 6 * 2
    )  # keys and values, layers, batch, heads, tokens, features, bytes
    assert cache.dtype == torch.bfloat16
    assert cache.device.type == "cpu"


def test_a_full_cache_refuses_more() -> None:
    cache = make_cache()
    cache.update(rows(4, 0), rows(4, 0), 0)
    cache.advance(4)
    with pytest.raises(ValueError, match="room for 5 tokens and 6 are needed"):
        cache.update(rows(2, 1), rows(2, 1), 0)


@pytest.mark.parametrize(
    ("batch_size", "dtype", "heads"), [(2, torch.float32, 2), (1, torch.bfloat16, 2), (1, torch.float32, 1)]
)
def test_another_batch_size_type_or_head_is_refused(batch_size: int, dtype: torch.dtype, heads: int) -> None:
    with pytest.raises(ValueError, match=rf"the cache is for {batch_size} sequences of 2 heads of 6 in {dtype}"):
        make_cache(batch_size, dtype=dtype).update(rows(1, 0)[:, :heads], rows(1, 0)[:, :heads], 0)


def test_crop_forgets_the_end() -> None:
    cache = make_cache()
    first = rows(4, 0)
    cache.update(first, first, 0)
    cache.advance(4)
    cache.crop(2)
    keys, _ = cache.update(rows(1, 1), rows(1, 1), 0)
    assert torch.equal(keys, torch.cat((first[:, :, :2], rows(1, 1)), dim=2))


@pytest.mark.parametrize("length", [-1, 1])
def test_crop_refuses_a_length_that_is_not_there(length: int) -> None:
    with pytest.raises(ValueError, match=f"cannot crop to {length} tokens; the cache holds 0"):
        make_cache().crop(length)


@pytest.mark.parametrize(("batch_size", "max_length"), [(0, 5), (1, 0)])
def test_sizes_must_be_positive(batch_size: int, max_length: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        make_cache(batch_size, max_length)
