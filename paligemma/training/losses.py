"""Training losses: auxiliary per-patch supervision of the image features, and the loss of the answers' tokens."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paligemma.config import PaliGemmaConfig
from paligemma.parsing import CODES_PER_MASK, LOCATION_BINS
from paligemma.training.batches import COVERAGE_CELLS, GRID, IGNORED, NUM_PATCHES
from paligemma.training.classes import CLASSES, COLORS
from paligemma.training.tasks import LOCATION_GRID
from paligemma.training.vocabulary import Vocabulary


class PatchHeads(nn.Module):
    """Auxiliary heads that predict the content of every image patch; used in training only.

    Class, color, box and coverage are predicted from the vision tower. From the projected features, the tokens that
    name class and color, the location tokens of the box and the mask tokens are predicted against the token embeddings,
    which aligns image features and embeddings.
    """

    def __init__(self, config: PaliGemmaConfig) -> None:
        super().__init__()
        vision, text = config.vision_config.hidden_size, config.text_config.hidden_size
        self.classes = nn.Linear(vision, len(CLASSES) + 1)
        self.colors = nn.Linear(vision, len(COLORS))
        self.boxes = nn.Linear(vision, 4)
        self.locations = nn.Linear(text, 4 * text)
        self.codes = nn.Linear(text, CODES_PER_MASK * text)
        self.coverage = nn.Linear(vision, COVERAGE_CELLS)

    def forward(
        self,
        vision_features: Tensor,
        image_features: Tensor,
        embeddings: Tensor,
        labels: dict[str, Tensor],
        vocabulary: Vocabulary,
    ) -> Tensor:
        """Compute the weighted sum of the losses.

        Args:
            vision_features: (B, N, vision hidden), from the vision tower.
            image_features: (B, N, text hidden), from the projector.
            embeddings: (vocab, text hidden), the token embeddings.
            labels: the patch labels of `Batch`.
        """
        classes, colors, boxes = (labels[name].flatten(0, 1) for name in ("patch_class", "patch_color", "patch_box"))
        loss = F.cross_entropy(self.classes(vision_features).float().flatten(0, 1), classes)
        coverage = self.coverage(vision_features).float()
        loss = loss + 3 * F.binary_cross_entropy_with_logits(coverage, labels["patch_coverage"])
        # A fixed number of object patches: oneDNN compiles and caches kernels for every new shape.
        sample = (classes < len(CLASSES)).nonzero()[:, 0]
        sample = sample[torch.randint(len(sample), (len(classes) // 6,), device=sample.device)]
        classes, colors, boxes = classes[sample], colors[sample], boxes[sample]
        vision_features = vision_features.flatten(0, 1)[sample]
        centers = patch_centers(vision_features.device)[sample % NUM_PATCHES]
        loss = loss + 8 * (self.boxes(vision_features).float() + centers - boxes).abs().mean()
        loss = loss + 0.5 * masked_cross_entropy(self.colors(vision_features).float(), colors)
        features = _rms_norm(image_features.flatten(0, 1)[sample].float())
        for ids in vocabulary.class_token_ids:
            loss = loss + 0.5 / len(vocabulary.class_token_ids) * F.cross_entropy(features @ embeddings[ids].T, classes)
        for ids in vocabulary.color_token_ids:
            color_loss = masked_cross_entropy(features @ embeddings[ids].T, colors)
            loss = loss + 0.2 / len(vocabulary.color_token_ids) * color_loss
        codes = labels["patch_codes"].flatten(0, 1)[sample].flatten()
        loss = loss + 0.25 * self._location_loss(features, embeddings[vocabulary.location_ids], boxes)
        code_embeddings = embeddings[vocabulary.first_mask_code : vocabulary.image]
        return loss + 0.75 * self._code_loss(features, code_embeddings, vocabulary.code_targets.to(codes.device)[codes])

    def _location_loss(self, features: Tensor, embeddings: Tensor, boxes: Tensor) -> Tensor:
        queries = _rms_norm(self.locations(features).unflatten(-1, (4, -1)))
        bins = boxes[:, [1, 0, 3, 2]].flatten() * LOCATION_BINS
        return location_loss((queries @ embeddings.T).flatten(0, 1), bins, 8.0).mean()

    def _code_loss(self, features: Tensor, embeddings: Tensor, targets: Tensor) -> Tensor:
        queries = _rms_norm(self.codes(features).unflatten(-1, (CODES_PER_MASK, -1)))
        return F.cross_entropy((queries @ embeddings.T).flatten(0, 1).float(), targets)


def patch_centers(device: torch.device | str) -> Tensor:
    """Return [x, y, x, y] of the center of every patch as fractions of the image side, (N, 4)."""
    steps = (torch.arange(GRID, device=device) + 0.5) / GRID
    y, x = torch.meshgrid(steps, steps, indexing="ij")
    return torch.stack([x, y, x, y], dim=-1).flatten(0, 1)


def masked_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy over labels other than IGNORED; 0 (not NaN) if there are none."""
    total = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
    return total / (labels != IGNORED).sum().clamp(min=1)


def location_loss(logits: Tensor, bins: Tensor, sigma: float) -> Tensor:
    """Cross-entropy (n,) with Gaussian-smoothed targets.

    Args:
        logits: (n, len(LOCATION_GRID)).
        bins: (n,), true coordinates in [0, 1024).
        sigma: standard deviation of the targets in bins.
    """
    distance = torch.tensor(LOCATION_GRID, device=logits.device) - bins[:, None]
    target = torch.softmax(-0.5 * (distance / sigma) ** 2, dim=-1)
    return -(target * logits.log_softmax(-1)).sum(-1)


def text_loss(
    logits: Tensor, targets: Tensor, vocabulary: Vocabulary, progress: float
) -> tuple[Tensor, dict[str, float]]:
    """Weighted mean cross-entropy of answer tokens, and the unweighted means for locations, mask codes and words.

    Location targets are smoothed with a Gaussian that narrows over training, and their weight increases. Mask codes
    have soft targets, in which similar codes share the probability.

    Args:
        logits: float32 (n, vocab).
        targets: (n,), without ignored ones.
        progress: completed fraction of training, 0 to 1.
    """
    is_location = vocabulary.is_location(targets)
    losses = F.cross_entropy(logits, targets, reduction="none")
    all_logits = logits[is_location]
    grid_logits = all_logits[:, vocabulary.location_ids]
    # Cross-entropy of "any location of the grid", plus that of the location within the grid.
    off_grid = torch.logsumexp(all_logits, -1) - torch.logsumexp(grid_logits, -1)
    bins = targets[is_location] - vocabulary.first_location
    losses = losses.masked_scatter(is_location, off_grid + location_loss(grid_logits, bins, 10 - 7.5 * progress))
    is_code = vocabulary.is_mask_code(targets)
    soft_targets = vocabulary.code_targets.to(logits.device)[targets[is_code] - vocabulary.first_mask_code]
    code_logprobs = logits[is_code].log_softmax(-1)[:, vocabulary.first_mask_code : vocabulary.image]
    losses = losses.masked_scatter(is_code, -(soft_targets * code_logprobs).sum(-1))
    weights = torch.where(is_location, 0.4 + 0.4 * progress, torch.where(is_code, 1.2, 1.0))
    kinds = {"locations": is_location, "codes": is_code, "words": ~(is_location | is_code)}
    means = {name: losses[kind].mean().item() for name, kind in kinds.items() if kind.any()}
    return (losses * weights).sum() / weights.sum(), means


def _rms_norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:])
