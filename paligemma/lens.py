"""Looking inside one step: where the position that wrote a token looked, and what each layer would have written.

Attention is not an explanation: a head's weights say where it read, not that what it read there mattered, and quite
other weights can give the same answer (Jain and Wallace, arXiv 1902.10186). The logit lens (nostalgebraist,
"interpreting GPT: the logit lens", 2020) reads every layer's output as if it were the last one's, although only the
last one's was trained to be read so; what it says of early layers is a hint.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import TYPE_CHECKING

import torch
from PIL import Image
from torch import Tensor

from paligemma.generation import NonFiniteLogitsError, rank_of, top_k_indices
from paligemma.modeling import PREFIX, SUFFIX, PaliGemmaForConditionalGeneration, prefix_lm_visible
from paligemma.processing import PaliGemmaProcessor

if TYPE_CHECKING:
    from paligemma.pipeline import PaliGemma


@dataclass(frozen=True)
class LensRow:
    """What would be written if the decoder ended at this depth.

    As in `Step`, everything is at temperature 1 and over the rows of the vocabulary that may be sampled; for Gemma 2
    the logits are soft-capped.

    Attributes:
        layer: 0 is what enters the first layer (the last token's embedding), n what leaves the n-th. The row of the
            last layer is the model's output.
        token_id, piece, prob: the likeliest token here, the lower id among equals, and its probability.
        rank_of_final: the place here of the token that was generated, 1 for the largest logit.
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
    """Attention and logit lens of one generated token, at the position that predicted it (the one before it).

    Attributes:
        index, token_id, piece: the token, as in its `Step`.
        grid: rows and columns of patches, into which the square that the model sees is cut.
        attention: float32, (layers, heads, rows * columns), on the CPU: the weight of each patch, row by row from the
            top left one. A head's weights over everything that it sees sum to 1, so these sum to its `picture_share`.
        picture_share: float32, (layers, heads): the part of each head's attention that goes to the picture.
        lens: a row a depth, layers + 1 of them. `attention[n]` is of the layer between `lens[n]` and `lens[n + 1]`.
    """

    index: int
    token_id: int
    piece: str
    grid: tuple[int, int]
    attention: Tensor
    image_share: Tensor
    lens: tuple[LensRow, ...]


def inspect(vlm: PaliGemma, image: Image.Image, prompt: str, token_ids: Sequence[int], index: int) -> Inspection:
    """Look at the step that wrote `token_ids[index]`, by one forward pass over all before it.

    Args:
        image, prompt: those of the request.
        token_ids: the generated ids, those behind `index` too or not.
        index: of the token, 0 to len(token_ids) - 1.

    Raises:
        ValueError: for an index outside the answer and for ids that cannot be generated.
        NonFiniteLogitsError: when the model's numbers overflow (float16).
    """
    inputs = vlm.processor([image], [prompt])
    return inspect_step(vlm.model, vlm.processor, inputs, vlm.allowed_tokens, token_ids, index)


def image_shares(vlm: PaliGemma, image: Image.Image, prompt: str, token_ids: Sequence[int]) -> Tensor:
    """How much of its attention each token's step gave to the picture: `picture_share` of every `inspect`, in one pass.

    No position sees what was generated behind it, so that a pass over the whole answer serves all its tokens.

    Args:
        image, prompt: those of the request.
        token_ids: the generated ids, at least one.

    Returns:
        float32, (tokens, layers, heads), on the CPU.

    Raises:
        ValueError: for no ids and for ids that cannot be generated.
    """
    inputs = vlm.processor([image], [prompt])
    token_ids = tuple(token_ids)
    _check_request(vlm.model, inputs["input_ids"], vlm.allowed_tokens, token_ids, len(token_ids) - 1)
    return read_image_shares(vlm.model, inputs["input_ids"], inputs["pixel_values"], token_ids)


@torch.inference_mode()
def read_image_shares(
    model: PaliGemmaForConditionalGeneration, prefix_ids: Tensor, pixel_values: Tensor, token_ids: Sequence[int]
) -> Tensor:
    """`picture_shares`, for a model and a processor's inputs: (1, P) ids and (1, 3, S, S) pixels."""
    generated = prefix_ids.new_tensor([token_ids[:-1]], dtype=torch.long)
    is_image = (prefix_ids[0] == model.config.image_token_index).nonzero().flatten().to(model.device)
    shares = []
    for _, weights in _walk_layers(model, prefix_ids, generated, pixel_values, num_queries=len(token_ids)):
        if weights is not None:
            shares.append(weights[0].index_select(-1, is_image).sum(dim=-1))
    return torch.stack(shares).permute(2, 0, 1).cpu()


def inspect_step(
    model: PaliGemmaForConditionalGeneration,
    processor: PaliGemmaProcessor,
    inputs: Mapping[str, Tensor],
    allowed_tokens: Tensor,
    token_ids: Sequence[int],
    index: int,
) -> Inspection:
    """`inspect`, for a model and a processor's inputs.

    Computing the generated tokens side by side sums in another order than one by one, so that in bfloat16 the lens's
    last row differs from the Step by that type's rounding; in float32 they agree to 1e-5.

    Args:
        inputs: the processor's dict for one picture and one prompt.
        sampleable: (vocab_size,), bool, from `processor.sampleable`.
        token_ids, index: see `inspect`.
    """
    token_ids = tuple(token_ids)
    _check_request(model, inputs["input_ids"], allowed_tokens, token_ids, index)
    generated = inputs["input_ids"].new_tensor([token_ids[:index]], dtype=torch.long)
    weights, streams = read_last_position(model, inputs["input_ids"], generated, inputs["pixel_values"])
    is_image = torch.cat((inputs["input_ids"], generated), dim=1)[0].cpu() == model.config.image_token_index
    attention = weights.cpu()[..., is_image]
    side = model.config.vision_config.image_size // model.config.vision_config.patch_size
    token_id = int(token_ids[index])
    return Inspection(
        index=int(index),
        token_id=token_id,
        piece=processor.token_str(token_id),
        grid=(side, side),
        attention=attention,
        image_share=attention.sum(dim=-1),
        lens=_lens_rows(model, processor, streams, allowed_tokens, token_id),
    )


@torch.inference_mode()
def read_last_position(
    model: PaliGemmaForConditionalGeneration, prefix_ids: Tensor, generated_ids: Tensor, pixel_values: Tensor
) -> tuple[Tensor, Tensor]:
    """Run the decoder layer by layer and keep what concerns the last position.

    Each position sees what it saw when the answer was generated: the prefix itself, a generated token what came
    before it, in windowed layers the last `sliding_window` tokens. Of the attention only one row a layer is ever
    held, so that this needs no more memory than a forward pass.

    Args:
        prefix_ids: (1, P), image tokens and prompt. generated_ids: (1, G); G may be 0.
        pixel_values: (1, 3, S, S), in [-1, 1].

    Returns:
        The attention of the last position to all, float32, (layers, heads, P + G), rows summing to 1; and the residual
        stream there before the first layer and after each, (layers + 1, hidden), not normalized.
    """
    weights, streams = [], []
    for stream, layer_weights in _walk_layers(model, prefix_ids, generated_ids, pixel_values, num_queries=1):
        streams.append(stream[0, -1].clone())  # cloned: a view would keep all positions in memory
        if layer_weights is not None:
            weights.append(layer_weights[0, :, 0])
    return torch.stack(weights), torch.stack(streams)


def _walk_layers(
    model: PaliGemmaForConditionalGeneration,
    prefix_ids: Tensor,
    generated_ids: Tensor,
    pixel_values: Tensor,
    num_queries: int,
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Before each layer and behind the last one: the residual stream, (1, P + G, hidden), and what the layer's last
    `num_queries` positions take from all, float32, (1, heads, num_queries, P + G); behind the last one None.
    """
    token_ids = torch.cat((prefix_ids, generated_ids), dim=1).to(model.device)
    token_types = torch.full_like(token_ids, PREFIX)
    token_types[:, prefix_ids.shape[1] :] = SUFFIX
    decoder = model.language_model.model
    stream = model.merge_image_and_text(token_ids, model.get_image_features(pixel_values.to(model.device)))
    rotary = decoder.rotary_emb(torch.arange(1, token_ids.shape[1] + 1, device=model.device)[None])
    masks = {window: _mask(token_types, window, stream) for window in {layer.window for layer in decoder.layers}}
    for layer in decoder.layers:
        mask = masks[layer.window]
        weights = layer.self_attn.weights_of_last_queries(layer.input_layernorm(stream), rotary, mask, num_queries)
        yield stream, weights
        stream = layer(stream, rotary, mask, kv_cache=None)
    yield stream, None


def _mask(token_types: Tensor, window: int | None, like: Tensor) -> Tensor | None:
    """The additive mask (1, 1, T, T) of layers with this window, in `like`'s type; None where nothing is hidden."""
    visible = prefix_lm_visible(token_types, token_types, window)
    if bool(visible.all()):
        return None
    return torch.zeros_like(visible, dtype=like.dtype).masked_fill(~visible, torch.finfo(like.dtype).min)


@torch.inference_mode()
def _lens_rows(
    model: PaliGemmaForConditionalGeneration,
    processor: PaliGemmaProcessor,
    streams: Tensor,
    allowed_tokens: Tensor,
    final_id: int,
) -> tuple[LensRow, ...]:
    """Read (depths, hidden) residual streams with the model's last normalization and head."""
    row_ids = allowed_tokens.nonzero().flatten()
    final_row = int(torch.searchsorted(row_ids, final_id))
    decoder = model.language_model
    # Every depth at once: the head, the largest matrix of the model, is read a single time.
    logits = decoder.compute_logits(decoder.model.norm(streams)[None])[0].cpu().index_select(1, row_ids)
    lens = []
    for layer, rows in enumerate(logits.double()):
        if not bool(rows.isfinite().all()):
            raise NonFiniteLogitsError(
                "lens.non_finite",
                "The logits at depth {depth} contain NaN or infinity. Gemma overflows in float16: load the model with "
                "dtype='bfloat16' or 'float32'.",
                depth=layer,
            )
        logprobs = rows.log_softmax(dim=0)
        best = top_k_indices(rows, 1)[0]
        token_id = int(row_ids[best])
        prob, entropy = float(logprobs[best].exp()), max(0.0, -float(logprobs.exp() @ logprobs))
        lens.append(LensRow(layer, token_id, processor.token_str(token_id), prob, rank_of(rows, final_row), entropy))
    return tuple(lens)


def _check_request(
    model: PaliGemmaForConditionalGeneration,
    prefix_ids: Tensor,
    allowed_tokens: Tensor,
    token_ids: tuple[int, ...],
    index: int,
) -> None:
    batch, prefix_length = prefix_ids.shape
    if batch != 1:
        raise ValueError(f"there are {batch} prompts; one inspection looks at one")
    if not _is_integer(index) or not 0 <= index < len(token_ids):
        raise ValueError(f"index is {index!r}; allowed is a whole number of at least 0 and below {len(token_ids)}")
    for token_id in token_ids:
        if not _is_integer(token_id) or not 0 <= token_id < allowed_tokens.numel() or not allowed_tokens[token_id]:
            raise ValueError(
                f"token_ids holds {token_id!r}; allowed are ids from 0 to {allowed_tokens.numel() - 1} that have a "
                "tokenizer piece, except the image token"
            )
    positions = model.config.text_config.max_position_embeddings
    if prefix_length + index > positions:
        raise ValueError(
            f"index is {index}; picture and prompt take {prefix_length} of the model's {positions} positions, so at "
            f"most {positions - prefix_length} is allowed"
        )


def _is_integer(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)
