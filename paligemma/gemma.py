"""Gemma (arXiv 2403.08295) and Gemma 2 (arXiv 2408.00118), the language model of PaliGemma.

Axes: B batch, T new tokens (queries), S keys (cached and new tokens), H query heads, K key/value heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paligemma.attention_mask import check_additive_mask, limit_to_window
from paligemma.config import GemmaConfig
from paligemma.kv_cache import KVCache

QUERY_BLOCK = 256  # queries per block in `eager_attention`; bounds the memory of the scores at 896 pixels

# Functions


def rotate_half(x: Tensor) -> Tensor:
    """(x1, x2) -> (-x2, x1), where x1 and x2 are the halves of the last axis."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def apply_rotary_pos_emb(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary position embeddings to queries or keys (RoPE, Su et al., arXiv 2104.09864, eq. 34).

    Args:
        x: (B, heads, T, D). Pairs (x[i], x[i + D/2]) are rotated in float32; the result has the dtype of x.
        cos, sin: float32, (B or 1, 1, T, D), from `GemmaRotaryEmbedding`.
    """
    x_float = x.float()
    return (x_float * cos + rotate_half(x_float) * sin).to(x.dtype)


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """Squash x smoothly into (-cap, cap): cap * tanh(x / cap) (Gemma 2, section 2)."""
    return torch.tanh(x / cap) * cap


def attention_weights(
    queries: Tensor, keys: Tensor, mask: Tensor | None, scale: float, softcap: float | None
) -> Tensor:
    """Compute softmax(soft_cap(scale * Q K^T) + mask).

    Args:
        queries: (B, H, T, D). keys: (B, K, S, D); each key head is shared by H / K query heads.
        mask: additive, (B or 1, 1, T, S), or None.

    Returns:
        float32, (B, H, T, S); sums to 1 over the keys.
    """
    keys = keys.repeat_interleave(queries.shape[1] // keys.shape[1], dim=1)
    scores = (queries @ keys.transpose(-1, -2)).float() * scale
    if softcap is not None:
        scores = soft_cap(scores, softcap)
    if mask is not None:
        scores = scores + mask.float()
    return scores.softmax(dim=-1)


def eager_attention(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float, softcap: float | None
) -> Tensor:
    """Compute attention explicitly, one block of queries at a time. Arguments as for `attention`."""
    values = values.repeat_interleave(queries.shape[1] // values.shape[1], dim=1)
    outputs = []
    for start in range(0, queries.shape[2], QUERY_BLOCK):
        block = slice(start, start + QUERY_BLOCK)
        block_mask = None if mask is None else mask[:, :, block]
        weights = attention_weights(queries[:, :, block], keys, block_mask, scale, softcap)
        outputs.append(weights.to(values.dtype) @ values)
    return torch.cat(outputs, dim=2)


def attention(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float, softcap: float | None
) -> Tensor:
    """Compute attention with PyTorch's fused kernel, or explicitly if scores are soft-capped (Gemma 2).

    Args:
        queries: (B, H, T, D). keys, values: (B, K, S, D).
        mask: additive, (B or 1, 1, T, S), in the dtype of the queries; None: no mask.

    Returns:
        (B, H, T, D), in the dtype of the queries.
    """
    if softcap is not None:
        return eager_attention(queries, keys, values, mask, scale, softcap)
    grouped = keys.shape[1] != queries.shape[1]
    return F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scale, enable_gqa=grouped)


# Modules


class GemmaRMSNorm(nn.Module):
    """x / rms(x) * (1 + weight), computed in float32 (Zhang and Sennrich, arXiv 1910.07467, eq. 4)."""

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        x_float = x.float()
        normalized = x_float * torch.rsqrt(x_float.pow(2).mean(-1, keepdim=True) + self.eps)
        return (normalized * (1.0 + self.weight.float())).to(x.dtype)


class GemmaRotaryEmbedding(nn.Module):
    """Cosines and sines of the RoPE angles: position / theta^(2i/D) for i < D/2, repeated for both halves of a head."""

    def __init__(self, config: GemmaConfig) -> None:
        super().__init__()
        self.dim = config.head_dim
        self.theta = config.rope_theta

    def forward(self, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Map integer positions (B or 1, T) to cosines and sines, float32, (B or 1, 1, T, D)."""
        exponents = torch.arange(0, self.dim, 2, device=position_ids.device, dtype=torch.float32) / self.dim
        angles = position_ids[:, None, :, None].float() * (1.0 / self.theta**exponents)
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos(), angles.sin()


class GemmaAttention(nn.Module):
    """Multi-query (one key/value head) or grouped-query attention with rotary position embeddings and a KV cache."""

    def __init__(self, config: GemmaConfig, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.scale = config.attention_scale
        self.softcap = config.attn_logit_softcapping
        query_size = config.num_attention_heads * config.head_dim
        key_size = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query_size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, key_size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, key_size, bias=False)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=False)

    def split_heads(self, x: Tensor) -> Tensor:
        """(B, T, heads * D) -> (B, heads, T, D)."""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def queries_and_keys(self, hidden_states: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Project (B, T, hidden) to rotated queries (B, H, T, D) and rotated keys (B, K, T, D)."""
        queries, keys = self.split_heads(self.q_proj(hidden_states)), self.split_heads(self.k_proj(hidden_states))
        return apply_rotary_pos_emb(queries, *rotary), apply_rotary_pos_emb(keys, *rotary)

    def forward(
        self, hidden_states: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor | None, kv_cache: KVCache | None
    ) -> Tensor:
        queries, keys = self.queries_and_keys(hidden_states, rotary)
        values = self.split_heads(self.v_proj(hidden_states))
        if kv_cache is not None:
            keys, values = kv_cache.update(keys, values, self.layer_idx)
        attended = attention(queries, keys, values, mask, self.scale, self.softcap)
        return self.o_proj(attended.transpose(1, 2).flatten(2))


class GemmaMLP(nn.Module):
    """GeGLU: down(gelu(gate(x)) * up(x)) (Shazeer, arXiv 2002.05202), with the tanh approximation of GELU."""

    def __init__(self, config: GemmaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, hidden_states: Tensor) -> Tensor:
        gate = F.gelu(self.gate_proj(hidden_states), approximate="tanh")
        return self.down_proj(gate * self.up_proj(hidden_states))


class GemmaLayer(nn.Module):
    """Gemma 1 block: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: GemmaConfig, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.window = config.window_of_layer(layer_idx)
        self.self_attn = GemmaAttention(config, layer_idx)
        self.mlp = GemmaMLP(config)
        self.input_layernorm = GemmaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = GemmaRMSNorm(config.hidden_size, config.rms_norm_eps)

    def last_attention_weights(
        self, hidden_states: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor | None, num_queries: int
    ) -> Tensor:
        """Compute the attention weights of the last `num_queries` tokens, without a cache; the rest as for `forward`.

        Returns:
            float32, (B, H, num_queries, T).
        """
        queries, keys = self.self_attn.queries_and_keys(self.input_layernorm(hidden_states), rotary)
        mask = None if mask is None else mask[:, :, -num_queries:]
        scale, softcap = self.self_attn.scale, self.self_attn.softcap
        return attention_weights(queries[:, :, -num_queries:], keys, mask, scale, softcap)

    def forward(
        self, hidden_states: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor | None, kv_cache: KVCache | None
    ) -> Tensor:
        """Transform (B, T, hidden); `rotary` is from `GemmaRotaryEmbedding`, `mask` as for `attention`."""
        hidden_states = hidden_states + self.self_attn(self.input_layernorm(hidden_states), rotary, mask, kv_cache)
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class Gemma2Layer(GemmaLayer):
    """Gemma 2 block: x + norm(attention(norm(x))), then x + norm(mlp(norm(x)))."""

    def __init__(self, config: GemmaConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.pre_feedforward_layernorm = GemmaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_feedforward_layernorm = GemmaRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, hidden_states: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor | None, kv_cache: KVCache | None
    ) -> Tensor:
        attended = self.self_attn(self.input_layernorm(hidden_states), rotary, mask, kv_cache)
        hidden_states = hidden_states + self.post_attention_layernorm(attended)
        transformed = self.mlp(self.pre_feedforward_layernorm(hidden_states))
        return hidden_states + self.post_feedforward_layernorm(transformed)


LAYER_CLASSES = {"gemma": GemmaLayer, "gemma2": Gemma2Layer}

LayerObserver = Callable[[GemmaLayer, Tensor, tuple[Tensor, Tensor], Tensor | None], None]


class GemmaModel(nn.Module):
    """Token embeddings, decoder layers and final norm."""

    def __init__(self, config: GemmaConfig) -> None:
        super().__init__()
        self.config = config
        layer_class = LAYER_CLASSES[config.model_type]
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([layer_class(config, index) for index in range(config.num_hidden_layers)])
        self.norm = GemmaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = GemmaRotaryEmbedding(config)

    def scale_embeddings(self, embeddings: Tensor) -> Tensor:
        """Multiply token embeddings by sqrt(hidden_size), rounded to their dtype as in training."""
        factor = torch.tensor(self.config.hidden_size**0.5, dtype=embeddings.dtype)
        return embeddings * factor.item()

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        sliding_attention_mask: Tensor | None = None,
        kv_cache: KVCache | None = None,
        position_ids: Tensor | None = None,
        observe_layer: LayerObserver | None = None,
    ) -> Tensor:
        """Run the decoder layers and the final norm.

        Args:
            hidden_states: (B, T, hidden): scaled token embeddings, and image features as the projector returns them.
            attention_mask: additive, (B or 1, 1, T, S); None: no mask.
            sliding_attention_mask: the same for layers with a sliding window; None: `attention_mask`.
            kv_cache: keys and values of the past tokens; extended by T tokens.
            position_ids: (B or 1, T), counted from 1; None: those that follow the cached tokens.
            observe_layer: called before each layer with (layer, hidden_states, rotary, mask), the layer's inputs.

        Returns:
            Normalized hidden states, (B, T, hidden).
        """
        num_tokens, past = hidden_states.shape[1], kv_cache.num_items() if kv_cache is not None else 0
        if position_ids is None:
            position_ids = torch.arange(past + 1, past + num_tokens + 1, device=hidden_states.device)[None]
        if sliding_attention_mask is None:
            sliding_attention_mask = attention_mask
        rotary = self.rotary_emb(position_ids)
        for layer in self.layers:
            mask = attention_mask if layer.window is None else sliding_attention_mask
            if observe_layer is not None:
                observe_layer(layer, hidden_states, rotary, mask)  # type: ignore[arg-type]  # ModuleList is untyped
            hidden_states = layer(hidden_states, rotary, mask, kv_cache)
        if kv_cache is not None:
            kv_cache.advance(num_tokens)
        return self.norm(hidden_states)


class DecoderOutput(TypedDict, total=False):
    """Output dict of a forward pass."""

    logits: Tensor  # float32, (B, T or logits_to_keep, vocab)
    kv_cache: KVCache  # if one was given
    loss: Tensor  # mean cross-entropy, if labels were given


class GemmaForCausalLM(nn.Module):
    """The decoder and its LM head, which is tied to the token embeddings."""

    def __init__(self, config: GemmaConfig) -> None:
        super().__init__()
        self.config = config
        self.model = GemmaModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.tie_weights()

    def get_input_embeddings(self) -> nn.Embedding:
        """Return the token embeddings, (vocab_size, hidden_size)."""
        return self.model.embed_tokens

    def tie_weights(self) -> None:
        """Make `lm_head.weight` and the embedding weight the same tensor."""
        self.lm_head.weight = self.model.embed_tokens.weight

    def compute_logits(self, hidden_states: Tensor, logits_to_keep: int = 0) -> Tensor:
        """Apply the head to normalized hidden states (B, T, hidden).

        Args:
            logits_to_keep: number of last positions to compute; 0: all.

        Returns:
            float32, (B, T or logits_to_keep, vocab); Gemma 2's are soft-capped by `final_logit_softcapping`.
        """
        if logits_to_keep < 0:
            raise ValueError(f"logits_to_keep must be >= 0 (0 = all positions), got {logits_to_keep}.")
        if logits_to_keep:
            # Contiguous: for a strided input, PyTorch's bfloat16 CPU kernel copies the whole weight, 30 times slower.
            hidden_states = hidden_states[:, -logits_to_keep:].clone(memory_format=torch.contiguous_format)
        logits = self.lm_head(hidden_states).float()
        cap = self.config.final_logit_softcapping
        return logits if cap is None else soft_cap(logits, cap)

    def decode(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        sliding_attention_mask: Tensor | None = None,
        kv_cache: KVCache | None = None,
        position_ids: Tensor | None = None,
        logits_to_keep: int = 0,
        observe_layer: LayerObserver | None = None,
    ) -> DecoderOutput:
        """Run the decoder and the head; arguments as for `GemmaModel.forward` and `compute_logits`."""
        masks = (attention_mask, sliding_attention_mask)
        hidden_states = self.model(hidden_states, *masks, kv_cache, position_ids, observe_layer)
        output: DecoderOutput = {"logits": self.compute_logits(hidden_states, logits_to_keep)}
        if kv_cache is not None:
            output["kv_cache"] = kv_cache
        return output

    def forward(
        self,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        kv_cache: KVCache | None = None,
        position_ids: Tensor | None = None,
        logits_to_keep: int = 0,
    ) -> DecoderOutput:
        """Scale token embeddings and decode them.

        Args:
            attention_mask: additive, (B or 1, 1, T, S); None: no mask, as in a prefix or for a single new token.
                With cached tokens, layers with a sliding window additionally mask the keys outside it.
            inputs_embeds: (B, T, hidden), from `get_input_embeddings`, not scaled.
            kv_cache, position_ids, logits_to_keep: as for `decode`.
        """
        if inputs_embeds is None:
            raise ValueError("inputs_embeds is missing; pass get_input_embeddings()(input_ids).")
        num_tokens, past = inputs_embeds.shape[1], kv_cache.num_items() if kv_cache is not None else 0
        if attention_mask is not None:
            attention_mask = check_additive_mask(attention_mask, past + num_tokens, inputs_embeds)
        sliding_mask, window = attention_mask, self.config.sliding_window
        if past and window is not None:
            sliding_mask = limit_to_window(attention_mask, num_tokens, past + num_tokens, window, inputs_embeds)
        hidden_states = self.model.scale_embeddings(inputs_embeds)
        return self.decode(hidden_states, attention_mask, sliding_mask, kv_cache, position_ids, logits_to_keep)
