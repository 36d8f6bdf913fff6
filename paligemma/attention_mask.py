"""Attention masks: bool masks (True: the query attends to the key) and additive masks built from them.

Axes: B batch, T queries (new tokens), S keys (cached and new tokens). The queries are the last T of the S tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

PREFIX, SUFFIX = 0, 1  # token types


def prefix_lm_visible(query_types: Tensor, key_types: Tensor, window: int | None = None) -> Tensor:
    """Bidirectional attention within the prefix, causal attention in the suffix (arXiv 2407.07726, fig. 2).

    Three prefix tokens and two suffix tokens (1: attended to):

        [[1 1 1 0 0]
         [1 1 1 0 0]
         [1 1 1 0 0]
         [1 1 1 1 0]
         [1 1 1 1 1]]

    Args:
        query_types: (B, T), `PREFIX` or `SUFFIX`. key_types: (B, S), likewise.
        window: number of tokens that a suffix token attends to, including itself; None: all. Ignored within the prefix.

    Returns:
        bool, (B, 1, T, S).
    """
    num_queries, num_keys = query_types.shape[1], key_types.shape[1]
    positions = torch.arange(num_keys, device=key_types.device)
    causal = positions <= positions[num_keys - num_queries :, None]
    if window is not None:
        causal = causal & within_window(num_queries, num_keys, window, key_types.device)
    within_prefix = (query_types[:, :, None] == PREFIX) & (key_types[:, None, :] == PREFIX)
    return (causal | within_prefix)[:, None]


def within_window(num_queries: int, num_keys: int, window: int, device: torch.device) -> Tensor:
    """Return a bool mask (T, S): True for keys fewer than `window` positions before the query, or after it."""
    positions = torch.arange(num_keys, device=device)
    return positions > positions[num_keys - num_queries :, None] - window


def additive_mask(visible: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Convert a bool mask to one that is added to attention scores: 0 where True, else the minimum of `dtype`.

    The minimum is used instead of -inf because softmax over a fully masked row (padding) would be NaN.

    Returns:
        The shape of `visible`, in `dtype`; None if nothing is masked, since attention without a mask is faster.
    """
    if bool(visible.all()):
        return None
    return torch.zeros_like(visible, dtype=dtype).masked_fill(~visible, torch.finfo(dtype).min)


def check_additive_mask(mask: Tensor, num_keys: int, inputs_embeds: Tensor) -> Tensor:
    """Validate an additive mask, and convert it to the dtype of the embeddings (B, T, hidden) with finite values.

    Raises:
        ValueError: if the mask is not floating-point, since a bool mask would be added as 0 and 1, or its shape is not
            (B or 1, 1, T, num_keys), since other shapes could broadcast unintentionally.
    """
    batch, num_queries = inputs_embeds.shape[:2]
    shapes = [(size, 1, num_queries, num_keys) for size in (batch, 1)]
    if not mask.is_floating_point() or tuple(mask.shape) not in shapes:
        raise ValueError(
            f"attention_mask must be floating-point (0 = attend, large negative = masked) with shape {shapes[0]}, "
            f"got {mask.dtype} with shape {tuple(mask.shape)}."
        )
    return mask.to(inputs_embeds.dtype).clamp(min=torch.finfo(inputs_embeds.dtype).min)


def limit_to_window(mask: Tensor | None, num_queries: int, num_keys: int, window: int, like: Tensor) -> Tensor | None:
    """Mask keys that are `window` or more positions before their query.

    Two queries, six keys, window 3 (x: masked):

        [[x x 0 0 0 0]
         [x x x 0 0 0]]

    Args:
        mask: additive, (B or 1, 1, T, S), or None.
        like: a tensor with the dtype and device of the result.
    """
    if num_keys <= window:
        return mask
    visible = within_window(num_queries, num_keys, window, like.device)[None, None]
    if mask is None:
        return additive_mask(visible, like.dtype)
    return mask.masked_fill(~visible, torch.finfo(like.dtype).min)
