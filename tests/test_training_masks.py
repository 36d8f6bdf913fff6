"""Training of the mask codes and decoder."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw

from paligemma.masks import MaskDecoder
from paligemma.training.masks import (
    MaskEncoder,
    MaskOptions,
    crop,
    evaluate,
    k_means,
    mask_batches,
    mask_cells,
    nearest_centroids,
    occlude,
    save,
    swap_codes,
    train,
)


def ellipses(count: int = 4) -> dict[str, list[Image.Image]]:
    silhouettes = [Image.new("L", (100, 100)) for _ in range(count)]
    for index, silhouette in enumerate(silhouettes):
        ImageDraw.Draw(silhouette).ellipse((5, 5 + 8 * index, 94, 94 - 8 * index), fill=255)
    return {"ellipses": silhouettes}


def test_crop_to_the_bounding_box() -> None:
    mask = np.zeros((9, 9), dtype=bool)
    mask[2, 3] = mask[5, 4] = True
    assert crop(mask).shape == (4, 2)
    assert crop(np.zeros((3, 3), dtype=bool)).shape == (3, 3)


def test_occlusion_covers_at_most_eight_percent() -> None:
    rng = np.random.default_rng(0)
    whole, other = np.ones((40, 60), dtype=bool), np.ones((10, 10), dtype=bool)
    shares = [occlude(whole, other, rng).sum() / whole.size for _ in range(200)]
    assert 0.92 <= min(shares) < 1


def test_masks_touch_all_borders_and_are_reproducible() -> None:
    masks, again = (next(mask_batches(ellipses(), 8, seed=3)) for _ in range(2))
    assert torch.equal(masks, again)
    assert masks.shape == (8, 64, 64) and masks.min() >= 0 and masks.max() <= 1
    inside = masks >= 0.5
    assert all(edge.any(-1).all() for edge in (inside[:, 0], inside[:, -1], inside[..., 0], inside[..., -1]))


def test_k_means_finds_separate_clusters() -> None:
    torch.manual_seed(0)
    corners = torch.tensor([[0.0, 0], [0, 9], [9, 0], [9, 9]])
    centroids = k_means(corners.repeat(50, 1) + 0.1 * torch.randn(200, 2), 16)
    assert torch.cdist(corners, centroids).min(1).values.max() < 0.3
    assert nearest_centroids(torch.tensor([[8.0, 8]]), corners, 2)[0, 0] == 3


def quarter_mask() -> torch.Tensor:
    """A mask that covers the upper left quarter."""
    mask = torch.zeros(1, 64, 64)
    mask[:, :32, :32] = 1
    return mask


def test_mask_cells_are_in_row_major_order():
    means = mask_cells(quarter_mask()).mean(1).view(4, 4)
    assert (means[:2, :2] > 0.7).all() and (means[3] == 0).all() and (means[:, 3] == 0).all()


def test_codes_depend_on_nearby_cells_only():
    torch.manual_seed(0)
    encoder = MaskEncoder.fit(torch.cat([next(mask_batches(ellipses(), 8, seed)) for seed in range(20)]))
    before = quarter_mask()
    after = before.clone()
    after[:, 48:, 48:] = 1
    changed = (encoder.encode(before) != encoder.encode(after))[0]
    assert changed[15] and not changed[:10].any()


def test_codes_are_sorted_by_area_and_soft_targets_peak_at_the_code():
    torch.manual_seed(0)
    encoder = MaskEncoder.fit(torch.cat([next(mask_batches(ellipses(), 8, seed)) for seed in range(20)]))
    area = encoder.centroids.mean(1)
    assert (area.diff() >= 0).all()
    targets = encoder.soft_targets()
    torch.testing.assert_close(targets.sum(1), torch.ones(128))
    assert (targets.max(1).values <= targets.diagonal() + 1e-6).all()
    codes = torch.arange(128).view(8, 16)
    assert torch.equal(swap_codes(codes, encoder, 0.0), codes)
    assert 0.5 < (swap_codes(codes, encoder, 1.0) != codes).float().mean() <= 1


@pytest.mark.slow
def test_short_training_run_writes_files_that_reconstruct_masks(tmp_path: Path) -> None:
    options = MaskOptions(work=tmp_path, out=tmp_path / "decoder.safetensors", fit_batches=40, steps=60, batch=8)
    encoder, decoder = train(options, ellipses())
    save(encoder, decoder, options)
    assert options.out.stat().st_size <= 2.6e6
    encoder, decoder = MaskEncoder.load(tmp_path / "encoder.safetensors"), MaskDecoder.load(options.out)
    masks = next(mask_batches(ellipses(), 16, seed=5))
    codes = encoder.encode(masks)
    assert codes.shape == (16, 16) and codes.dtype == torch.int64
    assert evaluate(encoder, decoder, masks)["iou"] > 0.6
