"""The parts of the mask training: its silhouettes, its codes, and a few steps from nothing to files."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw

from paligemma.masks import MaskDecoder
from paligemma.training.masks import (
    MaskEncoder,
    Options,
    batches,
    evaluate,
    hide_a_side,
    k_means,
    nearest,
    parts,
    save,
    swap_codes,
    train,
    trim,
)


def ellipses(count: int = 4) -> dict[str, list[Image.Image]]:
    drawings = [Image.new("L", (100, 100)) for _ in range(count)]
    for index, drawing in enumerate(drawings):
        ImageDraw.Draw(drawing).ellipse((5, 5 + 8 * index, 94, 94 - 8 * index), fill=255)
    return {"drawn": drawings}


def test_trim_leaves_the_tight_box() -> None:
    mask = np.zeros((9, 9), dtype=bool)
    mask[2, 3] = mask[5, 4] = True
    assert trim(mask).shape == (4, 2)
    assert trim(np.zeros((3, 3), dtype=bool)).shape == (3, 3)


def test_at_most_eight_percent_is_hidden_at_a_side() -> None:
    rng = np.random.default_rng(0)
    whole, other = np.ones((40, 60), dtype=bool), np.ones((10, 10), dtype=bool)
    shares = [hide_a_side(whole, other, rng).sum() / whole.size for _ in range(200)]
    assert 0.92 <= min(shares) < 1


def test_masks_touch_all_sides_and_repeat_with_the_seed() -> None:
    masks, again = (next(batches(ellipses(), 8, seed=3)) for _ in range(2))
    assert torch.equal(masks, again)
    assert masks.shape == (8, 64, 64) and masks.min() >= 0 and masks.max() <= 1
    inside = masks >= 0.5
    assert all(edge.any(-1).all() for edge in (inside[:, 0], inside[:, -1], inside[..., 0], inside[..., -1]))


def test_k_means_finds_separate_clusters() -> None:
    torch.manual_seed(0)
    corners = torch.tensor([[0.0, 0], [0, 9], [9, 0], [9, 9]])
    centres = k_means(corners.repeat(50, 1) + 0.1 * torch.randn(200, 2), 16)
    assert torch.cdist(corners, centres).min(1).values.max() < 0.3
    assert nearest(torch.tensor([[8.0, 8]]), corners, 2)[0, 0] == 3


def quadrants() -> torch.Tensor:
    """A mask that fills its upper left quarter."""
    mask = torch.zeros(1, 64, 64)
    mask[:, :32, :32] = 1
    return mask


def test_the_parts_of_a_mask_come_row_by_row():
    means = parts(quadrants()).mean(1).view(4, 4)
    assert (means[:2, :2] > 0.7).all() and (means[3] == 0).all() and (means[:, 3] == 0).all()


def test_a_code_speaks_of_its_own_part_alone():
    torch.manual_seed(0)
    encoder = MaskEncoder.fit(torch.cat([next(batches(ellipses(), 8, seed)) for seed in range(20)]))
    before = quadrants()
    after = before.clone()
    after[:, 48:, 48:] = 1
    changed = (encoder.encode(before) != encoder.encode(after))[0]
    assert changed[15] and not changed[:10].any()


def test_codes_are_sorted_and_most_like_themselves():
    torch.manual_seed(0)
    encoder = MaskEncoder.fit(torch.cat([next(batches(ellipses(), 8, seed)) for seed in range(20)]))
    filled = encoder.centres.mean(1)
    assert (filled.diff() >= 0).all()
    likeness = encoder.likeness()
    torch.testing.assert_close(likeness.sum(1), torch.ones(128))
    assert (likeness.max(1).values <= likeness.diagonal() + 1e-6).all()
    codes = torch.arange(128).view(8, 16)
    assert torch.equal(swap_codes(codes, encoder, 0.0), codes)
    assert 0.5 < (swap_codes(codes, encoder, 1.0) != codes).float().mean() <= 1


@pytest.mark.slow
def test_a_short_training_writes_files_that_load_and_reconstruct(tmp_path: Path) -> None:
    options = Options(work=tmp_path, out=tmp_path / "decoder.safetensors", fit_batches=40, steps=60, batch=8)
    encoder, decoder = train(options, ellipses())
    save(encoder, decoder, options)
    assert options.out.stat().st_size <= 2.6e6
    encoder, decoder = MaskEncoder.load(tmp_path / "encoder.safetensors"), MaskDecoder.load(options.out)
    masks = next(batches(ellipses(), 16, seed=5))
    codes = encoder.encode(masks)
    assert codes.shape == (16, 16) and codes.dtype == torch.int64
    assert evaluate(encoder, decoder, masks)["iou"] > 0.6
