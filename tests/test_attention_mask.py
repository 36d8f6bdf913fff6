from __future__ import annotations

import pytest
import torch

from paligemma.attention_mask import additive_mask, limit_to_window, prefix_lm_visible


def test_prefix_is_bidirectional_and_suffix_causal() -> None:
    types = torch.tensor([[0, 0, 0, 1, 1]])
    visible = prefix_lm_visible(types, types)[0, 0].int().tolist()
    assert visible == [[1, 1, 1, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]


def test_window_limits_the_suffix_but_not_the_prefix() -> None:
    types = torch.tensor([[0, 0, 0, 1, 1]])
    visible = prefix_lm_visible(types, types, window=2)[0, 0].int().tolist()
    assert visible == [[1, 1, 1, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 1, 1]]


def test_queries_are_the_last_tokens() -> None:
    types = torch.tensor([[0, 0, 0, 1, 1]])
    assert torch.equal(prefix_lm_visible(types[:, 3:], types, 3), prefix_lm_visible(types, types, 3)[:, :, 3:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_additive_mask_is_zero_where_visible_and_finite_elsewhere(dtype: torch.dtype) -> None:
    visible = torch.tensor([[True, False], [True, True]])
    mask = additive_mask(visible, dtype)
    assert mask is not None and mask.dtype == dtype
    assert torch.equal(mask == 0, visible) and bool(mask.isfinite().all())
    assert additive_mask(torch.ones(2, 2, dtype=torch.bool), dtype) is None


def test_limit_to_window_hides_older_keys() -> None:
    mask = limit_to_window(None, num_queries=2, num_keys=6, window=3, like=torch.zeros(1))
    assert mask is not None
    assert (mask < 0)[0, 0].int().tolist() == [[1, 1, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0]]


def test_limit_to_window_keeps_the_values_of_the_mask() -> None:
    mask = torch.zeros(1, 1, 2, 6)
    mask[..., 0, 5] = -1.0
    limited = limit_to_window(mask, 2, 6, 3, mask)
    assert limited is not None and limited[0, 0, 0, 5] == -1.0 and limited[0, 0, 0, 2] == 0.0


def test_limit_to_window_returns_shorter_masks_unchanged() -> None:
    assert limit_to_window(None, 2, 3, 3, torch.zeros(1)) is None
