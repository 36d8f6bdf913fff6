"""PaliGemma: a SigLIP vision tower, a linear projector and a Gemma decoder (arXiv 2407.07726)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paligemma.attention_mask import PREFIX, SUFFIX, additive_mask, prefix_lm_visible
from paligemma.config import IGNORE_INDEX, PaliGemmaConfig
from paligemma.gemma import DecoderOutput, GemmaForCausalLM, LayerObserver
from paligemma.kv_cache import KVCache
from paligemma.siglip import SiglipVisionModel


class PaliGemmaMultiModalProjector(nn.Module):
    """Linear projection from the vision tower's hidden size to the decoder's."""

    def __init__(self, config: PaliGemmaConfig) -> None:
        super().__init__()
        self.linear = nn.Linear(config.vision_config.hidden_size, config.text_config.hidden_size, bias=True)

    def forward(self, image_features: Tensor) -> Tensor:
        return self.linear(image_features)


class PaliGemmaForConditionalGeneration(nn.Module):
    """Vision tower, projector and language model. Parameter names match the hub's checkpoints."""

    def __init__(self, config: PaliGemmaConfig) -> None:
        super().__init__()
        self.config = config
        self.vision_tower = SiglipVisionModel(config.vision_config)
        self.multi_modal_projector = PaliGemmaMultiModalProjector(config)
        self.language_model = GemmaForCausalLM(config.text_config)
        self._activation_dtype: torch.dtype | None = None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return self.language_model.get_input_embeddings().weight.dtype

    @property
    def device(self) -> torch.device:
        return self.language_model.get_input_embeddings().weight.device

    @property
    def activation_dtype(self) -> torch.dtype:
        """Dtype of the hidden states and the KV cache: the weights' dtype unless set (float32 for int8 weights)."""
        return self._activation_dtype or self.dtype

    @activation_dtype.setter
    def activation_dtype(self, dtype: torch.dtype) -> None:
        self._activation_dtype = dtype

    def tie_weights(self) -> None:
        """Make `lm_head.weight` and the embedding weight the same tensor."""
        self.language_model.tie_weights()

    def get_image_features(self, pixel_values: Tensor) -> Tensor:
        """Encode pixels (B, 3, height, width) in [-1, 1] to projected image features, (B, image tokens, hidden)."""
        return self.multi_modal_projector(self.vision_tower(pixel_values))

    def merge_image_and_text(self, input_ids: Tensor, image_features: Tensor | None) -> Tensor:
        """Build the decoder's input: scaled token embeddings, with image features at the image tokens (not scaled).

        Args:
            input_ids: (B, T). image_features: (B, image tokens, hidden), or None without image tokens.

        Returns:
            (B, T, hidden), in `activation_dtype`.

        Raises:
            ValueError: if `input_ids` has a different number of image tokens than there are image features.
        """
        is_image = input_ids == self.config.image_token_index
        num_features = 0 if image_features is None else image_features.shape[0] * image_features.shape[1]
        if int(is_image.sum()) != num_features:
            raise ValueError(
                f"input_ids must have one image token per image feature ({num_features}), got {int(is_image.sum())}."
            )
        # The image token's id can exceed the embedding table; its embedding is replaced, so look up id 0.
        decoder = self.language_model.model
        embeddings = decoder.embed_tokens(input_ids.masked_fill(is_image, 0))
        hidden_states = decoder.scale_embeddings(embeddings).to(self.activation_dtype)
        if image_features is None:
            return hidden_states
        return hidden_states.masked_scatter(is_image[..., None], image_features.to(hidden_states.dtype))

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
        observe_layer: LayerObserver | None = None,
    ) -> DecoderOutput:
        """Compute next-token logits for an image and a prompt, or for tokens that follow the cached ones.

        Args:
            input_ids: (B, T). Without cached tokens: image tokens, bos, prompt, newline, and optionally a suffix.
            pixel_values: (B, 3, height, width) in [-1, 1], any float dtype; or pass `image_features`.
            attention_mask: (B, past + T), 0 at padding; None: no padding.
            token_type_ids: (B, T), 0 for prefix, 1 for suffix; None: see `default_token_types`.
            position_ids: (B or 1, T); None: counted from 1, skipping padding.
            kv_cache: keys and values of the past tokens; extended by T tokens.
            labels: (B, T), unshifted token ids, -100 where ignored.
            logits_to_keep: number of last positions with logits; 0: all. Must be 0 with labels.
            image_features: from `get_image_features`. observe_layer: see `GemmaModel.forward`.
        """
        if labels is not None and logits_to_keep:
            raise ValueError(f"logits_to_keep must be 0 with labels, got {logits_to_keep}.")
        if pixel_values is not None:
            image_features = self.get_image_features(pixel_values)
        past = kv_cache.num_items() if kv_cache is not None else 0
        if token_type_ids is None:
            token_type_ids = default_token_types(input_ids, labels, past)
        full_mask, sliding_mask = self._attention_masks(token_type_ids, attention_mask, past)
        if position_ids is None and attention_mask is not None:
            position_ids = attention_mask.long().cumsum(-1).clamp(min=1)[:, past:]
        hidden = self.merge_image_and_text(input_ids, image_features)
        decode = self.language_model.decode
        output = decode(hidden, full_mask, sliding_mask, kv_cache, position_ids, logits_to_keep, observe_layer)
        if labels is not None:
            output["loss"] = suffix_loss(output["logits"], labels)
        return output

    def _attention_masks(
        self, token_types: Tensor, padding_mask: Tensor | None, past: int
    ) -> tuple[Tensor | None, Tensor | None]:
        """Build additive masks (B, 1, T, past + T) for full and sliding-window attention; None if nothing is masked."""
        batch, num_tokens = token_types.shape
        if padding_mask is not None and padding_mask.shape != (batch, past + num_tokens):
            raise ValueError(
                f"attention_mask must have shape {(batch, past + num_tokens)} ({past} cached and {num_tokens} new "
                f"tokens), got {tuple(padding_mask.shape)}."
            )
        # Cached tokens get type PREFIX: new prefix tokens attend to them; suffix tokens attend to them anyway, because
        # they come earlier.
        key_types = torch.cat((token_types.new_full((batch, past), PREFIX), token_types), dim=1)

        def additive(window: int | None) -> Tensor | None:
            visible = prefix_lm_visible(token_types, key_types, window)
            if padding_mask is not None:
                visible = visible & padding_mask.bool()[:, None, None, :]
            return additive_mask(visible, self.activation_dtype)

        window, full = self.config.text_config.sliding_window, additive(None)
        return full, full if window is None or past + num_tokens <= window else additive(window)


def default_token_types(input_ids: Tensor, labels: Tensor | None, past: int) -> Tensor:
    """Infer token types (B, T): suffix if there are cached tokens, or from a sequence's first label on; else prefix."""
    if labels is None or past:
        return torch.full_like(input_ids, SUFFIX if past else PREFIX)
    return (labels != IGNORE_INDEX).long().cummax(dim=1).values


def suffix_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy of each label given the tokens before it.

    Args:
        logits: float32, (B, T, vocab). labels: (B, T), unshifted, -100 where ignored.
    """
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORE_INDEX)
