"""SigLIP vision tower (Zhai et al., arXiv 2303.15343): a Vision Transformer without class token or pooling.

Axes: B batch, S image height and width in pixels, N patches, H heads, D head dim.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from paligemma.config import SiglipVisionConfig


class SiglipVisionEmbeddings(nn.Module):
    """Patch embeddings plus learned position embeddings (Dosovitskiy et al., arXiv 2010.11929)."""

    def __init__(self, config: SiglipVisionConfig) -> None:
        super().__init__()
        self.image_size = config.image_size
        self.patch_embedding = nn.Conv2d(
            config.num_channels, config.hidden_size, kernel_size=config.patch_size, stride=config.patch_size
        )
        self.position_embedding = nn.Embedding(config.num_image_tokens, config.hidden_size)

    def forward(self, pixel_values: Tensor) -> Tensor:
        if pixel_values.shape[-2:] != (self.image_size, self.image_size):
            raise ValueError(
                f"pixel_values must be {self.image_size} x {self.image_size} pixels for this checkpoint, "
                f"got shape {tuple(pixel_values.shape)}."
            )
        patches = self.patch_embedding(pixel_values.to(self.patch_embedding.weight.dtype))
        return patches.flatten(2).transpose(1, 2) + self.position_embedding.weight  # (B, N, hidden)


class SiglipAttention(nn.Module):
    """Multi-head self-attention over all patches."""

    def __init__(self, config: SiglipVisionConfig) -> None:
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.q_proj = nn.Linear(config.hidden_size, config.hidden_size)
        self.k_proj = nn.Linear(config.hidden_size, config.hidden_size)
        self.v_proj = nn.Linear(config.hidden_size, config.hidden_size)
        self.out_proj = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden_states: Tensor) -> Tensor:
        queries, keys, values = (
            projection(hidden_states).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)  # (B, H, N, D)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        attended = F.scaled_dot_product_attention(queries, keys, values)
        return self.out_proj(attended.transpose(1, 2).flatten(2))


class SiglipMLP(nn.Module):
    """Two linear layers with a tanh-approximated GELU between them."""

    def __init__(self, config: SiglipVisionConfig) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.fc2 = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(hidden_states), approximate="tanh"))


class SiglipEncoderLayer(nn.Module):
    """Pre-norm transformer block: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: SiglipVisionConfig) -> None:
        super().__init__()
        self.layer_norm1 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.self_attn = SiglipAttention(config)
        self.layer_norm2 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.mlp = SiglipMLP(config)

    def forward(self, hidden_states: Tensor) -> Tensor:
        hidden_states = hidden_states + self.self_attn(self.layer_norm1(hidden_states))
        return hidden_states + self.mlp(self.layer_norm2(hidden_states))


class SiglipEncoder(nn.Module):
    """The stack of encoder layers."""

    def __init__(self, config: SiglipVisionConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList([SiglipEncoderLayer(config) for _ in range(config.num_hidden_layers)])

    def forward(self, hidden_states: Tensor) -> Tensor:
        for layer in self.layers:
            hidden_states = layer(hidden_states)
        return hidden_states


class SiglipVisionTransformer(nn.Module):
    """Embeddings, encoder and final layer norm."""

    def __init__(self, config: SiglipVisionConfig) -> None:
        super().__init__()
        self.embeddings = SiglipVisionEmbeddings(config)
        self.encoder = SiglipEncoder(config)
        self.post_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.post_layernorm(self.encoder(self.embeddings(pixel_values)))


class SiglipVisionModel(nn.Module):
    """Wrapper that adds the prefix `vision_model.` to the parameter names, as in the hub's checkpoints."""

    def __init__(self, config: SiglipVisionConfig) -> None:
        super().__init__()
        self.config = config
        self.vision_model = SiglipVisionTransformer(config)

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Encode pixels (B, 3, S, S) in [-1, 1], any float dtype, to patch features (B, N, hidden), in raster order."""
        return self.vision_model(pixel_values)
