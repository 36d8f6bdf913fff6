"""Token ids and soft targets that the training losses need."""

from __future__ import annotations

import torch
from torch import Tensor

from paligemma.parsing import LOCATION_BINS
from paligemma.training.classes import CLASSES, COLORS
from paligemma.training.masks import MaskEncoder
from paligemma.training.tasks import LOCATION_GRID, LOCATION_STRIDE
from paligemma.training.tokenizer import IMAGE_TOKEN, build_tokenizer, name_token_ids, token_id

# Input corruption: the fraction of corrupted location and mask tokens is uniform between 0 and this, per sequence.
MAX_CORRUPTION = 0.6
LOCATION_NOISE = 6.0  # standard deviation in bins, about that of the trained model's errors


class Vocabulary:
    """Token ids by meaning.

    Attributes:
        size: number of tokens.
        image: id of `<image>`, directly after the mask tokens.
        first_location, first_mask_code: ids of `<loc0000>` and `<seg000>`.
        location_ids: (len(LOCATION_GRID),), ids of the locations that answers use.
        class_token_ids, color_token_ids: (variants, names), tokens that name each class and color.
        centroids: (128, 256), cell shapes of the mask codes, see `MaskEncoder`.
        code_targets: (128, 128), soft targets of the mask codes.
        code_noise: (128, 128), flatter distribution that `corrupt` samples from.
    """

    def __init__(self, mask_encoder: MaskEncoder) -> None:
        tokenizer = build_tokenizer()
        self.centroids = mask_encoder.centroids.detach()
        self.code_targets = mask_encoder.soft_targets()
        self.code_noise = self.code_targets.pow(0.25)
        self.size = tokenizer.get_vocab_size()
        self.image = token_id(tokenizer, IMAGE_TOKEN)
        self.first_location = token_id(tokenizer, "<loc0000>")
        self.location_ids = self.first_location + torch.tensor(LOCATION_GRID)
        self.first_mask_code = token_id(tokenizer, "<seg000>")
        classes, colors = name_token_ids(tokenizer)
        self.class_token_ids = _pad_names([classes[name] for name in CLASSES])
        self.color_token_ids = _pad_names([colors[name] for name in COLORS])

    def corrupt(self, ids: Tensor) -> Tensor:
        """Replace random location and mask tokens in the inputs (B, T) by similar ones; the targets stay correct.

        This reduces exposure bias: a model that is trained on correct preceding tokens only accumulates errors when it
        generates (Bengio et al., https://arxiv.org/abs/1506.03099).
        """
        corrupted = torch.rand(ids.shape) < MAX_CORRUPTION * torch.rand(len(ids), 1)
        corrupted = corrupted.to(ids.device)
        ids = ids.clone()
        codes = corrupted & self.is_mask_code(ids)
        noise = torch.multinomial(self.code_noise[(ids[codes] - self.first_mask_code).cpu()], 1)[:, 0]
        ids[codes] = noise.to(ids.device) + self.first_mask_code
        locations = corrupted & self.is_location(ids)
        shift = LOCATION_NOISE * torch.randn(int(locations.sum()), device=ids.device)
        shifted = (ids[locations] - self.first_location + shift) / LOCATION_STRIDE
        shifted = shifted.round().long().clamp(0, LOCATION_BINS // LOCATION_STRIDE - 1)
        ids[locations] = self.first_location + LOCATION_STRIDE * shifted
        return ids

    def is_location(self, ids: Tensor) -> Tensor:
        """Return a bool mask of the `<loc>` tokens."""
        return (ids >= self.first_location) & (ids < self.first_location + LOCATION_BINS)

    def is_mask_code(self, ids: Tensor) -> Tensor:
        """Return a bool mask of the `<seg>` tokens."""
        return (ids >= self.first_mask_code) & (ids < self.image)


def _pad_names(ids: list[list[int]]) -> Tensor:
    """Stack the token ids of every name as (variants, names), repeating the last one of shorter lists."""
    num_variants = max(map(len, ids))
    return torch.tensor([[name[min(k, len(name) - 1)] for name in ids] for k in range(num_variants)])
