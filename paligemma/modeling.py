"""PaliGemma: a picture's patches and a prompt, read together, answered token by token (arXiv 2407.07726)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paligemma.config import PaliGemmaConfig
from paligemma.gemma import GemmaForCausalLM
from paligemma.kv_cache import KVCache
from paligemma.siglip import SiglipVisionModel

IGNORED_LABEL = -100
PREFIX, SUFFIX = 0, 1


def prefix_lm_visible(query_types: Tensor, key_types: Tensor, window: int | None = None) -> Tensor:
    """Which keys each query sees: a prefix sees all of itself, a suffix what came before (arXiv 2407.07726, fig. 2).

    Three prefix tokens and two suffix tokens (1: sees):

        [[1 1 1 0 0]
         [1 1 1 0 0]
         [1 1 1 0 0]
         [1 1 1 1 0]
         [1 1 1 1 1]]

    The queries are the last T of the S tokens. With a window, a suffix token sees only the last `window` tokens up to
    itself; the prefix still sees all of itself.

    Args:
        query_types: (B, T), 0 prefix and 1 suffix. key_types: (B, S), likewise.

    Returns:
        bool, (B, 1, T, S).
    """
    num_queries, num_keys = query_types.shape[1], key_types.shape[1]
    key_index = torch.arange(num_keys, device=key_types.device)
    query_index = key_index[num_keys - num_queries :, None]
    causal = key_index <= query_index
    if window is not None:
        causal = causal & (key_index > query_index - window)
    within_prefix = (query_types[:, :, None] == PREFIX) & (key_types[:, None, :] == PREFIX)
    return (causal | within_prefix)[:, None]


class PaliGemmaMultiModalProjector(nn.Module):
    """One linear map from the vision tower's width to the decoder's."""

    def __init__(self, config: PaliGemmaConfig) -> None:
        super().__init__()
        self.linear = nn.Linear(config.vision_config.hidden_size, config.text_config.hidden_size, bias=True)

    def forward(self, image_features: Tensor) -> Tensor:
        return self.linear(image_features)


class PaliGemmaForConditionalGeneration(nn.Module):
    """Vision tower, projector and language model; parameter names are those of the hub's checkpoints."""

    def __init__(self, config: PaliGemmaConfig) -> None:
        super().__init__()
        self.config = config
        self.vision_tower = SiglipVisionModel(config.vision_config)
        self.multi_modal_projector = PaliGemmaMultiModalProjector(config)
        self.language_model = GemmaForCausalLM(config.text_config)
        self._activation_dtype: torch.dtype | None = None

    @property
    def activation_dtype(self) -> torch.dtype:
        """The type of the decoder's rows and its cache: that of the weights, unless they were prepared for another."""
        return self._activation_dtype or self.dtype

    @activation_dtype.setter
    def activation_dtype(self, dtype: torch.dtype) -> None:
        self._activation_dtype = dtype

    @property
    def dtype(self) -> torch.dtype:
        return self.language_model.get_input_embeddings().weight.dtype

    @property
    def device(self) -> torch.device:
        return self.language_model.get_input_embeddings().weight.device

    def tie_weights(self) -> None:
        """Make the head's weight the embedding's weight, one tensor under two names."""
        self.language_model.tie_weights()

    def get_image_features(self, pixel_values: Tensor) -> Tensor:
        """Pixels (B, 3, S, S) in [-1, 1] to the decoder's image rows, (B, image tokens, hidden), not scaled."""
        return self.multi_modal_projector(self.vision_tower(pixel_values))

    def merge_image_and_text(self, input_ids: Tensor, image_features: Tensor | None) -> Tensor:
        """The decoder's first rows, (B, T, hidden): text embeddings, scaled, with image features in the image places.

        Raises ValueError where the number of image tokens in `input_ids` is not that of the image features.
        """
        is_image = input_ids == self.config.image_token_index
        # The image token may lie outside the table; its row is replaced below, so any row serves.
        text_ids = input_ids.masked_fill(is_image, 0)
        model = self.language_model.model
        rows = model.scale_embeddings(model.embed_tokens(text_ids)).to(self.activation_dtype)
        num_features = 0 if image_features is None else image_features.shape[0] * image_features.shape[1]
        num_places = int(is_image.sum())
        if num_places != num_features:
            raise ValueError(f"the prompt has {num_places} image tokens and the pictures give {num_features}")
        if image_features is None:
            return rows
        return rows.masked_scatter(is_image[..., None], image_features.to(rows.dtype))

    def forward(
        self,
        input_ids: Tensor,
        pixel_values: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        kv_cache: KVCache | None = None,
        labels: Tensor | None = None,
        logits_to_keep: int = 0,
        image_features: Tensor | None = None,
    ) -> dict[str, Tensor | KVCache]:
        """Read a picture and tokens; give logits for the token behind each.

        Args:
            input_ids: (B, T). Without a cache or with an empty one: image tokens, bos, prompt, newline, and any suffix.
                With a warm cache: the tokens that follow.
            pixel_values: (B, 3, S, S) in [-1, 1], any float type; only with the image tokens.
            attention_mask: (B, past + T), 0 at padding; None: no padding.
            token_type_ids: (B, T), 0 prefix (sees all of the prefix), 1 suffix (causal); None: prefix on an empty
                cache, suffix on a warm one. With labels, each row's suffix begins at its first label, so that no
                token sees what it is to learn.
            position_ids: (B or 1, T); None: real tokens counted from 1.
            kv_cache: grows by T tokens.
            labels: (B, T), the tokens themselves where they are to be learned, -100 elsewhere; shifted here.
            logits_to_keep: how many last positions get logits; 0: all. Must be 0 with labels.
            image_features: (B, image tokens, hidden) from `get_image_features`, instead of `pixel_values`.

        Returns:
            `"logits"` float32 (B, T or logits_to_keep, vocabulary); `"kv_cache"` when one was given;
            `"loss"`, the mean cross-entropy over the labels, when labels were given.
        """
        if labels is not None and logits_to_keep:
            raise ValueError(f"logits_to_keep is {logits_to_keep}; with labels all logits are needed, so it must be 0")
        if pixel_values is not None:
            image_features = self.get_image_features(pixel_values)
        rows = self.merge_image_and_text(input_ids, image_features)
        past = kv_cache.num_items() if kv_cache is not None else 0
        if token_type_ids is None:
            token_type_ids = default_token_types(input_ids, labels, past)
        full_mask, sliding_mask = self._masks(token_type_ids, attention_mask, past)
        if position_ids is None and attention_mask is not None:
            position_ids = attention_mask.long().cumsum(-1).clamp(min=1)[:, past:]
        hidden = self.language_model.model.run_layers(rows, full_mask, kv_cache, position_ids, sliding_mask)
        output: dict[str, Tensor | KVCache] = {"logits": self.language_model.compute_logits(hidden, logits_to_keep)}
        if kv_cache is not None:
            output["kv_cache"] = kv_cache
        if labels is not None:
            output["loss"] = suffix_loss(output["logits"], labels)
        return output

    def _masks(
        self, query_types: Tensor, attention_mask: Tensor | None, past: int
    ) -> tuple[Tensor | None, Tensor | None]:
        """Additive masks (B, 1, T, past + T) of the full and of the windowed layers; None where nothing is hidden."""
        batch, num_tokens = query_types.shape
        if attention_mask is not None and attention_mask.shape != (batch, past + num_tokens):
            raise ValueError(
                f"attention_mask is {tuple(attention_mask.shape)}; it must cover the {past} cached and the "
                f"{num_tokens} new tokens: {(batch, past + num_tokens)}"
            )
        if attention_mask is not None and bool(attention_mask.all()):
            attention_mask = None
        key_types = torch.cat((query_types.new_full((batch, past), PREFIX), query_types), dim=1)
        window = self.config.text_config.sliding_window
        full = self._additive(prefix_lm_visible(query_types, key_types), attention_mask)
        if window is None or past + num_tokens <= window:
            return full, full
        return full, self._additive(prefix_lm_visible(query_types, key_types, window), attention_mask)

    def _additive(self, visible: Tensor, attention_mask: Tensor | None) -> Tensor | None:
        if attention_mask is not None:
            visible = visible & attention_mask.bool()[:, None, None, :]
        if bool(visible.all()):
            return None
        # The type's lowest number, not minus infinity: a row that sees nothing (padding) must stay finite.
        hidden = torch.finfo(self.activation_dtype).min
        return torch.zeros(visible.shape, dtype=self.activation_dtype, device=visible.device).masked_fill(
            ~visible, hidden
        )


def default_token_types(input_ids: Tensor, labels: Tensor | None, past: int) -> Tensor:
    """Token types (B, T) where none are given; see `PaliGemmaForConditionalGeneration.forward`."""
    if labels is None or past:
        return torch.full_like(input_ids, SUFFIX if past else PREFIX)
    return (labels != IGNORED_LABEL).long().cummax(dim=1).values  # 0 before a row's first label, 1 from there on


def suffix_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy of each labeled token given all before it.

    Args:
        logits: float32, (B, T, vocabulary). labels: (B, T), -100 where nothing is to be learned.
    """
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED_LABEL)
