"""Attention to the image and logit lens of a generated token.

Attention is not explanation: a head's weights show which positions it attends to, not whether they affect the output,
and different weights can give the same output (Jain and Wallace, arXiv 1902.10186). The logit lens (nostalgebraist,
"interpreting GPT: the logit lens", 2020) applies the final norm and the LM head to the hidden states of every layer,
although only those of the last layer were trained for that; predictions from early layers are only suggestive.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from PIL import Image
from torch import Tensor

from paligemma.attention_mask import PREFIX, SUFFIX
from paligemma.errors import InputError, NonFiniteLogitsError
from paligemma.gemma import GemmaLayer, LayerObserver
from paligemma.generation import check_prefix_length
from paligemma.sampling import rank_of, top_k_indices
from paligemma.validation import is_integer

if TYPE_CHECKING:
    from paligemma.pipeline import PaliGemma


@dataclass(frozen=True)
class LensRow:
    """The logit lens at one depth.

    As in `Step`, probabilities are at temperature 1 and over the allowed tokens; Gemma 2's logits are soft-capped.

    Attributes:
        layer: number of layers applied. 0 is the embedding of the last token; the last row is the model's output.
        token_id, piece, prob: the most likely token (the lowest id among ties) and its probability.
        rank_of_final: rank of the generated token, 1 for the largest logit.
        entropy: in nats.
    """

    layer: int
    token_id: int
    piece: str
    prob: float
    rank_of_final: int
    entropy: float


@dataclass(frozen=True, eq=False)
class Inspection:
    """Attention and logit lens of one generated token, at the position that predicted it (the token before it).

    Attributes:
        index, token_id, piece: the token, as in its `Step`.
        grid: rows and columns of image patches.
        attention: float32, (layers, heads, patches), on the CPU: attention weights on the patches, in raster order.
        image_share: float32, (layers, heads): the fraction of each head's attention on the image:
            `attention` summed over the patches.
        lens: layers + 1 rows. `attention[n]` belongs to the layer between `lens[n]` and `lens[n + 1]`.
    """

    index: int
    token_id: int
    piece: str
    grid: tuple[int, int]
    attention: Tensor
    image_share: Tensor
    lens: tuple[LensRow, ...]


def inspect(vlm: PaliGemma, image: Image.Image, prompt: str, token_ids: Sequence[int], index: int) -> Inspection:
    """Compute attention and logit lens of `token_ids[index]` in one forward pass.

    In float32, the last lens row matches the token's `Step` to within 1e-5. In bfloat16 it differs by rounding, because
    generation runs one token at a time.

    Args:
        image, prompt: as given to `stream`.
        token_ids: the generated token ids; those after `index` are not used.
        index: 0 to len(token_ids) - 1.

    Raises:
        InputError: if `token_ids` is empty, `index` is out of range, a token id is not allowed, or the prompt is too
            long.
        NonFiniteLogitsError: if the logits contain NaN or infinity, because the model overflows (float16) or the
            checkpoint is corrupt.
    """
    inputs = vlm.processor([image], [prompt])
    token_ids = tuple(token_ids)
    _check_request(vlm, inputs["input_ids"].shape[1], token_ids, index)
    attention, logits = read_last_position(vlm, inputs, token_ids[:index])
    attention = attention[..., _image_positions(vlm, inputs)].cpu()
    vision = vlm.config.vision_config
    grid_size = vision.image_size // vision.patch_size
    token_id = int(token_ids[index])
    return Inspection(
        index=int(index),
        token_id=token_id,
        piece=vlm.processor.token_str(token_id),
        grid=(grid_size, grid_size),
        attention=attention,
        image_share=attention.sum(dim=-1),
        lens=_lens_rows(vlm, logits, token_id),
    )


@torch.inference_mode()
def image_shares(vlm: PaliGemma, image: Image.Image, prompt: str, token_ids: Sequence[int]) -> Tensor:
    """Compute `Inspection.image_share` of every generated token in one forward pass.

    Args:
        image, prompt, token_ids: as for `inspect`.

    Returns:
        float32, (tokens, layers, heads), on the CPU.

    Raises:
        InputError: if `token_ids` is empty, a token id is not allowed, or the prompt is too long.
    """
    inputs = vlm.processor([image], [prompt])
    token_ids = tuple(token_ids)
    _check_request(vlm, inputs["input_ids"].shape[1], token_ids, len(token_ids) - 1)
    image_positions = _image_positions(vlm, inputs)
    shares = []

    def observe_layer(layer: GemmaLayer, hidden: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor | None) -> None:
        weights = layer.last_attention_weights(hidden, rotary, mask, num_queries=len(token_ids))[0]
        shares.append(weights[..., image_positions].sum(dim=-1))

    _forward(vlm, inputs, token_ids[:-1], observe_layer)
    return torch.stack(shares).permute(2, 0, 1).cpu()


@torch.inference_mode()
def read_last_position(
    vlm: PaliGemma, inputs: Mapping[str, Tensor], generated_ids: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Run prompt and generated tokens in one forward pass, and record every layer at the last position.

    Args:
        inputs: the processor's output for one image and one prompt.
        generated_ids: token ids that follow the prompt; may be empty.

    Returns:
        Attention weights over all tokens, float32, (layers, heads, tokens), and logit-lens logits at every depth,
        float32, (layers + 1, vocab).
    """
    attention, states = [], []

    def observe_layer(layer: GemmaLayer, hidden: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor | None) -> None:
        attention.append(layer.last_attention_weights(hidden, rotary, mask, num_queries=1)[0, :, 0])
        states.append(hidden[0, -1].clone())  # a view would keep the hidden states of all tokens in memory

    last_logits = _forward(vlm, inputs, generated_ids, observe_layer)
    decoder = vlm.model.language_model
    logits = decoder.compute_logits(decoder.model.norm(torch.stack(states))[None])[0]
    return torch.stack(attention), torch.cat((logits, last_logits))


def _forward(
    vlm: PaliGemma, inputs: Mapping[str, Tensor], generated_ids: Sequence[int], observe_layer: LayerObserver
) -> Tensor:
    """Run prompt and generated tokens through the model; return the last position's logits, (1, vocab)."""
    prefix = inputs["input_ids"].to(vlm.device)
    suffix = prefix.new_tensor([generated_ids], dtype=torch.long)
    output = vlm.model(
        torch.cat((prefix, suffix), dim=1),
        token_type_ids=torch.cat((torch.full_like(prefix, PREFIX), torch.full_like(suffix, SUFFIX)), dim=1),
        image_features=vlm.image_features(inputs["pixel_values"].to(vlm.device)),
        logits_to_keep=1,
        observe_layer=observe_layer,
    )
    return output["logits"][0]


def _image_positions(vlm: PaliGemma, inputs: Mapping[str, Tensor]) -> Tensor:
    """Positions of the image tokens, (image tokens,), on the model's device."""
    return (inputs["input_ids"][0].to(vlm.device) == vlm.config.image_token_index).nonzero().flatten()


def _lens_rows(vlm: PaliGemma, logits: Tensor, final_id: int) -> tuple[LensRow, ...]:
    """Summarize the logits of each depth, (depths, vocab)."""
    allowed_ids = vlm.allowed_tokens.nonzero().flatten()
    final_index = int(torch.searchsorted(allowed_ids, final_id))
    rows = []
    for layer, allowed_logits in enumerate(logits.cpu().index_select(1, allowed_ids).double()):
        if not bool(allowed_logits.isfinite().all()):
            raise NonFiniteLogitsError(
                "lens.non_finite",
                "The logits after layer {layer} contain NaN or infinity. Gemma overflows in float16: load the model "
                "with dtype='bfloat16' or 'float32'. If it happens in those dtypes, the checkpoint may be corrupt.",
                layer=layer,
            )
        logprobs = allowed_logits.log_softmax(dim=0)
        best = top_k_indices(allowed_logits, 1)[0]
        token_id = int(allowed_ids[best])
        prob, entropy = float(logprobs[best].exp()), max(0.0, -float(logprobs.exp() @ logprobs))
        rank = rank_of(allowed_logits, final_index)
        rows.append(LensRow(layer, token_id, vlm.processor.token_str(token_id), prob, rank, entropy))
    return tuple(rows)


def _check_request(vlm: PaliGemma, prefix_length: int, token_ids: tuple[int, ...], index: int) -> None:
    if not token_ids:
        raise InputError("lens.no_tokens", "token_ids must not be empty.")
    if not is_integer(index) or not 0 <= index < len(token_ids):
        raise InputError(
            "lens.index",
            "index must be an integer >= 0 and < len(token_ids) = {count}, got {index!r}.",
            count=len(token_ids),
            index=index,
        )
    for token_id in token_ids:
        allowed = vlm.allowed_tokens
        if not is_integer(token_id) or not 0 <= token_id < len(allowed) or not allowed[token_id]:
            raise InputError(
                "lens.token_id",
                "token_ids must contain only tokenizer ids other than <image>, got {token_id!r}.",
                token_id=token_id,
            )
    positions = vlm.config.text_config.max_position_embeddings
    check_prefix_length(prefix_length, positions)
    if prefix_length + index > positions:
        raise InputError(
            "lens.positions",
            "index must be <= {largest}, got {index}: image and prompt take {prefix} of the model's {positions} "
            "positions.",
            largest=positions - prefix_length,
            index=index,
            prefix=prefix_length,
            positions=positions,
        )
