"""The language model: Gemma (arXiv 2403.08295) and Gemma 2 (arXiv 2408.00118), as a decoder for PaliGemma.

Axes in comments: B sequences, T new tokens (queries), S keys (cached and new), H query heads, K key-value heads,
D features of a head.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paligemma.config import GemmaConfig
from paligemma.kv_cache import KVCache

QUERY_BLOCK = 256  # queries whose scores are held at once by the plain attention; bounds memory at 896 pixels

# Pure mathematics ---------------------------------------------------------------------------------------------


def rotate_half(x: Tensor) -> Tensor:
    """(x1, x2) -> (-x2, x1), where x1 and x2 are the halves of the last axis."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def apply_rotary_pos_emb(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (x[i], x[i + D/2]) by its position's angle (RoPE, Su et al., arXiv 2104.09864, eq. 34).

    Args:
        x: queries or keys, (B, heads, T, D); rotated in float32, returned in its own type.
        cos, sin: float32, (B or 1, 1, T, D).
    """
    wide = x.float()
    return (wide * cos + rotate_half(wide) * sin).to(x.dtype)


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """Squash x smoothly into (-cap, cap): cap * tanh(x / cap) (Gemma 2, section 2)."""
    return torch.tanh(x / cap) * cap


def attention_weights(
    queries: Tensor, keys: Tensor, mask: Tensor | None, scale: float, softcap: float | None
) -> Tensor:
    """softmax(cap(scale Q K^T) + mask): how much each query takes from each key.

    Args:
        queries: (B, H, T, D). keys: (B, K, S, D), each serving H / K query heads.
        mask: additive, (B or 1, 1, T, S), or None.

    Returns:
        float32, (B, H, T, S); each row sums to 1.
    """
    keys = keys.repeat_interleave(queries.shape[1] // keys.shape[1], dim=1)
    scores = (queries @ keys.transpose(-1, -2)).float() * scale
    if softcap is not None:
        scores = soft_cap(scores, softcap)
    if mask is not None:
        scores = scores + mask.float()
    return scores.softmax(dim=-1)


def plain_attention(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float, softcap: float | None
) -> Tensor:
    """Attention as it is written in the papers, some queries at a time. The specification of `attention`.

    Shapes as in `attention`.
    """
    repeated = values.repeat_interleave(queries.shape[1] // values.shape[1], dim=1)
    blocks = []
    for start in range(0, queries.shape[2], QUERY_BLOCK):
        rows = slice(start, start + QUERY_BLOCK)
        block_mask = None if mask is None else mask[:, :, rows]
        weights = attention_weights(queries[:, :, rows], keys, block_mask, scale, softcap)
        blocks.append(weights.to(values.dtype) @ repeated)
    return torch.cat(blocks, dim=2)


def attention(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float, softcap: float | None
) -> Tensor:
    """What each query reads: attention_weights(...) @ values.

    PyTorch's fused attention has no soft-cap, so Gemma 2 takes the plain one.

    Args:
        queries: (B, H, T, D). keys, values: (B, K, S, D).
        mask: additive, (B or 1, 1, T, S), in the queries' type; None: every query sees every key.

    Returns:
        (B, H, T, D), in the queries' type.
    """
    if softcap is not None:
        return plain_attention(queries, keys, values, mask, scale, softcap)
    grouped = keys.shape[1] != queries.shape[1]
    return F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scale, enable_gqa=grouped)


def checked_mask(mask: Tensor, num_keys: int, embeddings: Tensor) -> Tensor:
    """A caller's additive mask in the embeddings' type, finite.

    Args:
        embeddings: (B, T, hidden).

    Raises ValueError unless the mask is of a float type and (B or 1, 1, T, num_keys): a bool mask would be added as 0
    and 1, and another shape might be stretched to fit.
    """
    batch, num_queries = embeddings.shape[:2]
    allowed = [(rows, 1, num_queries, num_keys) for rows in (batch, 1)]
    if not mask.is_floating_point() or tuple(mask.shape) not in allowed:
        raise ValueError(
            f"attention_mask is {tuple(mask.shape)}, {mask.dtype}; it is added to the scores (0: seen, very negative: "
            f"hidden), so it must be of a float type and {allowed[0]}"
        )
    return mask.to(embeddings.dtype).clamp(min=torch.finfo(embeddings.dtype).min)


def limit_to_window(mask: Tensor | None, num_queries: int, num_keys: int, window: int, like: Tensor) -> Tensor | None:
    """Hide from each generated token the keys that lie `window` or more tokens back.

    The queries are the last `num_queries` of `num_keys` tokens. With window 3, two new tokens behind a
    cache of four (x: hidden) see

        [[x x 0 0 0 -]      "-" is what the causal mask hides already
         [x x x 0 0 0]]

    Args:
        mask: additive mask to tighten, (B or 1, 1, T, S), or None.
        like: a tensor whose type and device the mask takes.
    """
    if num_keys <= window:
        return mask
    query_index = torch.arange(num_keys - num_queries, num_keys, device=like.device)[:, None]
    too_old = torch.arange(num_keys, device=like.device)[None, :] <= query_index - window
    hidden = torch.finfo(like.dtype).min
    if mask is None:
        mask = torch.zeros((1, 1, num_queries, num_keys), dtype=like.dtype, device=like.device)
    return mask.masked_fill(too_old, hidden)


# Modules, from the smallest to the whole ------------------------------------------------------------------------


class GemmaRMSNorm(nn.Module):
    """x / rms(x) * (1 + weight), computed in float32 (Zhang and Sennrich, arXiv 1910.07467, eq. 4)."""

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normalized = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (normalized * (1.0 + self.weight.float())).to(x.dtype)


class GemmaRotaryEmbedding(nn.Module):
    """The angles of RoPE: position / theta^(2i/D) for i < D/2, once for each half of a head."""

    def __init__(self, config: GemmaConfig) -> None:
        super().__init__()
        self.dim = config.head_dim
        self.theta = config.rope_theta

    def forward(self, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """(B or 1, T) integer positions -> cosines and sines, float32, (B or 1, 1, T, D)."""
        exponents = torch.arange(0, self.dim, 2, device=position_ids.device, dtype=torch.float32) / self.dim
        angles = position_ids[:, None, :, None].float() * (1.0 / self.theta**exponents)
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos(), angles.sin()


class GemmaAttention(nn.Module):
    """Multi-query (one key-value head) or grouped-query attention with rotary positions and a cache."""

    def __init__(self, config: GemmaConfig, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.scale = config.attention_scale
        self.softcap = config.attn_logit_softcapping
        query_size = config.num_attention_heads * config.head_dim
        key_size = config.num_key_value_heads * config.head_dim
        self.sizes = (query_size, key_size, key_size)
        self.q_proj = nn.Linear(config.hidden_size, query_size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, key_size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, key_size, bias=False)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=False)
        self.qkv_proj: nn.Module | None = None  # stands for the first three, once the weights are prepared

    def project(self, hidden_states: Tensor) -> tuple[Tensor, ...]:
        """(B, T, hidden) to queries (B, T, H * D), keys and values (B, T, K * D)."""
        if self.qkv_proj is not None:
            return self.qkv_proj(hidden_states).split(self.sizes, dim=-1)
        return self.q_proj(hidden_states), self.k_proj(hidden_states), self.v_proj(hidden_states)

    def queries_keys_values(
        self, hidden_states: Tensor, rotary: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Project (B, T, hidden) to rotated queries (B, H, T, D), rotated keys and values (B, K, T, D)."""
        queries, keys, values = (
            projected.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for projected in self.project(hidden_states)
        )
        return apply_rotary_pos_emb(queries, *rotary), apply_rotary_pos_emb(keys, *rotary), values

    def weights_of_last_queries(
        self, hidden_states: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor | None, count: int
    ) -> Tensor:
        """What each of the last `count` of T tokens takes from all, float32, (B, H, count, T); as for `forward`."""
        queries, keys, _ = self.queries_keys_values(hidden_states, rotary)
        last_mask = None if mask is None else mask[:, :, -count:]
        return attention_weights(queries[:, :, -count:], keys, last_mask, self.scale, self.softcap)

    def forward(
        self,
        hidden_states: Tensor,
        rotary: tuple[Tensor, Tensor],
        mask: Tensor | None,
        kv_cache: KVCache | None,
    ) -> Tensor:
        queries, keys, values = self.queries_keys_values(hidden_states, rotary)
        if kv_cache is not None:
            keys, values = kv_cache.update(keys, values, self.layer_idx)
        attended = attention(queries, keys, values, mask, self.scale, self.softcap)
        return self.o_proj(attended.transpose(1, 2).flatten(2))


class GemmaMLP(nn.Module):
    """GeGLU: down(gelu(gate(x)) * up(x)) (Shazeer, arXiv 2002.05202), with the tanh GELU."""

    def __init__(self, config: GemmaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.gate_up_proj: nn.Module | None = None  # stands for the first two, once the weights are prepared

    def forward(self, hidden_states: Tensor) -> Tensor:
        if self.gate_up_proj is not None:
            gate, up = self.gate_up_proj(hidden_states).chunk(2, dim=-1)
        else:
            gate, up = self.gate_proj(hidden_states), self.up_proj(hidden_states)
        return self.down_proj(F.gelu(gate, approximate="tanh") * up)


class GemmaLayer(nn.Module):
    """Gemma 1: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: GemmaConfig, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.window = config.window_of_layer(layer_idx)
        self.self_attn = GemmaAttention(config, layer_idx)
        self.mlp = GemmaMLP(config)
        self.input_layernorm = GemmaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = GemmaRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        hidden_states: Tensor,
        rotary: tuple[Tensor, Tensor],
        mask: Tensor | None,
        kv_cache: KVCache | None,
    ) -> Tensor:
        hidden_states = hidden_states + self.self_attn(self.input_layernorm(hidden_states), rotary, mask, kv_cache)
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class Gemma2Layer(GemmaLayer):
    """Gemma 2: x + norm(attention(norm(x))), then x + norm(mlp(norm(x)))."""

    def __init__(self, config: GemmaConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.pre_feedforward_layernorm = GemmaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_feedforward_layernorm = GemmaRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        hidden_states: Tensor,
        rotary: tuple[Tensor, Tensor],
        mask: Tensor | None,
        kv_cache: KVCache | None,
    ) -> Tensor:
        attended = self.self_attn(self.input_layernorm(hidden_states), rotary, mask, kv_cache)
        hidden_states = hidden_states + self.post_attention_layernorm(attended)
        transformed = self.mlp(self.pre_feedforward_layernorm(hidden_states))
        return hidden_states + self.post_feedforward_layernorm(transformed)


LAYER_CLASSES = {"gemma": GemmaLayer, "gemma2": Gemma2Layer}


class GemmaModel(nn.Module):
    """Embedding table, layers, last normalization."""

    def __init__(self, config: GemmaConfig) -> None:
        super().__init__()
        self.config = config
        layer_class = LAYER_CLASSES[config.model_type]
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([layer_class(config, index) for index in range(config.num_hidden_layers)])
        self.norm = GemmaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = GemmaRotaryEmbedding(config)

    def scale_embeddings(self, embeddings: Tensor) -> Tensor:
        """Multiply by sqrt(hidden_size), the factor rounded to the embeddings' type as in training."""
        factor = torch.tensor(self.config.hidden_size**0.5, dtype=embeddings.dtype)
        return embeddings * factor.item()

    def forward(
        self,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        kv_cache: KVCache | None = None,
        position_ids: Tensor | None = None,
    ) -> Tensor:
        """Unscaled embeddings (B, T, hidden) to normalized features; the arguments are `GemmaForCausalLM`'s."""
        if inputs_embeds is None:
            raise ValueError("inputs_embeds is missing; embed the ids with get_input_embeddings() first")
        num_tokens, past = inputs_embeds.shape[1], kv_cache.num_items() if kv_cache is not None else 0
        if attention_mask is not None:
            attention_mask = checked_mask(attention_mask, past + num_tokens, inputs_embeds)
        sliding_attention_mask = attention_mask
        if past and self.config.sliding_window is not None:  # without a past it is a prefix, which sees all of itself
            sliding_attention_mask = limit_to_window(
                attention_mask, num_tokens, past + num_tokens, self.config.sliding_window, inputs_embeds
            )
        hidden_states = self.scale_embeddings(inputs_embeds)
        return self.run_layers(hidden_states, attention_mask, kv_cache, position_ids, sliding_attention_mask)

    def run_layers(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        kv_cache: KVCache | None = None,
        position_ids: Tensor | None = None,
        sliding_attention_mask: Tensor | None = None,
    ) -> Tensor:
        """The layers and the last normalization, for rows that are at their scale already.

        Args:
            hidden_states: (B, T, hidden), text rows scaled, image rows as the projector made them.
            attention_mask: additive, (B or 1, 1, T, S); None: every query sees every key.
            position_ids: (B or 1, T); None: counted from 1 behind what the cache holds.
            sliding_attention_mask: the mask of the layers with a window, likewise.

        Returns:
            (B, T, hidden), normalized.
        """
        num_tokens, past = hidden_states.shape[1], kv_cache.num_items() if kv_cache is not None else 0
        if position_ids is None:
            position_ids = torch.arange(past + 1, past + num_tokens + 1, device=hidden_states.device)[None]
        rotary = self.rotary_emb(position_ids)
        for layer in self.layers:
            mask = attention_mask if layer.window is None else sliding_attention_mask
            hidden_states = layer(hidden_states, rotary, mask, kv_cache)
        if kv_cache is not None:
            kv_cache.advance(num_tokens)
        return self.norm(hidden_states)


class GemmaForCausalLM(nn.Module):
    """The decoder and its head, which shares the embedding's weight."""

    def __init__(self, config: GemmaConfig) -> None:
        super().__init__()
        self.config = config
        self.model = GemmaModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.tie_weights()

    def get_input_embeddings(self) -> nn.Embedding:
        """The embedding table, (vocab_size, hidden_size)."""
        return self.model.embed_tokens

    def tie_weights(self) -> None:
        """Make the head's weight the embedding's weight, one tensor under two names."""
        self.lm_head.weight = self.model.embed_tokens.weight

    def compute_logits(self, hidden_states: Tensor, logits_to_keep: int = 0) -> Tensor:
        """Normalized features (B, T, hidden) to float32 logits (B, T or logits_to_keep, vocabulary).

        Gemma 2's logits are soft-capped, so they lie in (-final_logit_softcapping, final_logit_softcapping).
        """
        if logits_to_keep < 0:
            raise ValueError(f"logits_to_keep is {logits_to_keep}; it must be at least 0 (0: all positions)")
        if logits_to_keep:
            # Copied: for a slice, PyTorch's bfloat16 product on a CPU copies the whole head first, 30 times slower.
            hidden_states = hidden_states[:, -logits_to_keep:].clone(memory_format=torch.contiguous_format)
        logits = self.lm_head(hidden_states).float()
        cap = self.config.final_logit_softcapping
        return logits if cap is None else soft_cap(logits, cap)

    def forward(
        self,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        kv_cache: KVCache | None = None,
        position_ids: Tensor | None = None,
        logits_to_keep: int = 0,
    ) -> dict[str, Tensor | KVCache]:
        """Decode embeddings.

        Args:
            attention_mask: additive, (B or 1, 1, T, S), in the embeddings' type; None: every query sees every key,
                which is right for a prefix and for a single new token.
            inputs_embeds: (B, T, hidden), as the embedding table gives them (they are scaled here).
            kv_cache: what came before; it grows by T tokens.
            position_ids: (B or 1, T); None: counted from 1 behind what the cache holds.
            logits_to_keep: how many last positions get logits; 0: all.

        Returns:
            `{"logits": float32 (B, T or logits_to_keep, vocabulary)}`, and `"kv_cache"` when one was given.
        """
        hidden_states = self.model(attention_mask, inputs_embeds, kv_cache, position_ids)
        output: dict[str, Tensor | KVCache] = {"logits": self.compute_logits(hidden_states, logits_to_keep)}
        if kv_cache is not None:
            output["kv_cache"] = kv_cache
        return output
