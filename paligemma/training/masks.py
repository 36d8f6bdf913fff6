"""Train the bundled model's mask codes and mask decoder: `python -m paligemma.training.masks`.

A mask is divided into 4 x 4 cells. The code of a cell is the nearest of 128 k-means centroids, fitted to slightly
blurred cells of emoji silhouettes. The decoder has PaliGemma's architecture (`paligemma.masks`) and learns to draw the
mask from its 16 codes. It is written in float16, with its codebook, to `assets/demo/mask_decoder.safetensors`. The
centroids are needed only for training labels and are written to `runs/masks/encoder.safetensors`.

PaliGemma's own codes come from a VQ-VAE whose encoder sees the whole mask (`vae-oid`). With those, a model of this size
predicted fewer than one code in five correctly, because a slightly different box changes two thirds of them. Codes of
single cells change half as often, and a wrong code affects only its own cell.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F
from tqdm import trange

from paligemma.masks import CODE_GRID, MASK_SIZE, MaskDecoder, load_parameters
from paligemma.parsing import CODES_PER_MASK, MASK_CODEBOOK_SIZE
from paligemma.training.command_line import parse_options
from paligemma.training.icons import STYLES, TRAINED_STYLES, bounding_box, fetch_icons, load_sprites

SPRITE_SIZE = 128
CELL_SIZE = MASK_SIZE // CODE_GRID
BLUR_RADIUS = 2  # pixels; the box blur is applied twice
MIN_VISIBLE_SHARE = 0.92
EVALUATION_SEED = 1_000_003


@dataclass(frozen=True)
class MaskOptions:
    """Options of the command line."""

    icons: Annotated[Path, "folder of the icon packages"] = Path("runs/icons")
    work: Annotated[Path, "folder for encoder.safetensors"] = Path("runs/masks")
    out: Annotated[Path, "file for the decoder"] = Path("assets/demo/mask_decoder.safetensors")
    seed: Annotated[int, "random seed"] = 0
    fit_batches: Annotated[int, "batches for k-means"] = 300
    steps: Annotated[int, "training steps of the decoder"] = 2400
    batch: Annotated[int, "masks per batch"] = 32
    learning_rate: Annotated[float, "maximum learning rate"] = 2e-3
    swap: Annotated[float, "fraction of the codes replaced by a similar one during training"] = 0.1
    threads: Annotated[int, "CPU threads"] = 1


# Masks


def load_silhouettes(icons: Path, styles: Iterable[str]) -> dict[str, list[Image.Image]]:
    """Return the alpha channel of every icon, 8-bit gray, by style."""
    return {
        style: [
            Image.fromarray(alpha)
            for sprites in classes.values()
            for alpha in {sprite.variant: sprite.pixels[..., 3] for sprite in sprites}.values()
        ]
        for style, classes in load_sprites(icons, SPRITE_SIZE, styles).items()
    }


def random_silhouette(silhouette: Image.Image, rng: np.random.Generator) -> np.ndarray:
    """Flip, rotate by up to 15 degrees and scale to 24 to 160 pixels: bool (height, width), cropped."""
    if rng.random() < 0.5:
        silhouette = silhouette.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    silhouette = silhouette.rotate(rng.uniform(-15, 15), Image.Resampling.BILINEAR, expand=True)
    scale = np.exp(rng.uniform(np.log(24), np.log(160))) / max(silhouette.size)
    width, height = (max(2, round(side * scale)) for side in silhouette.size)
    return crop(np.asarray(silhouette.resize((width, height), Image.Resampling.BILINEAR)) > 127)


def crop(mask: np.ndarray) -> np.ndarray:
    """Crop a bool mask to the bounding box of its True pixels; an empty mask is returned unchanged."""
    left, top, right, bottom = bounding_box(mask)
    return mask[top:bottom, left:right] if bottom else mask


def occlude(mask: np.ndarray, other: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Cover part of an edge with another silhouette, unless less than MIN_VISIBLE_SHARE would remain visible."""
    height, width = mask.shape
    angle, distance = rng.uniform(0, 2 * np.pi), rng.uniform(0.7, 0.95)
    corner = round(distance * width * np.cos(angle)), round(distance * height * np.sin(angle))
    cover = Image.new("1", (width, height))
    cover.paste(Image.fromarray(other).resize((width, height)), corner)
    visible = mask & ~np.asarray(cover)
    return crop(visible) if visible.sum() >= MIN_VISIBLE_SHARE * mask.sum() else mask


def resize_mask(mask: np.ndarray) -> np.ndarray:
    """Resize a bool mask to (64, 64), float32 in [0, 1]."""
    gray = Image.fromarray(mask.astype(np.float32))
    return np.asarray(gray.resize((MASK_SIZE, MASK_SIZE), Image.Resampling.BILINEAR))


def random_mask(silhouettes: list[Image.Image], rng: np.random.Generator) -> np.ndarray:
    """Sample a training mask: (64, 64), float32 in [0, 1]."""
    mask = random_silhouette(silhouettes[rng.integers(len(silhouettes))], rng)
    if rng.random() < 0.3:
        mask = occlude(mask, random_silhouette(silhouettes[rng.integers(len(silhouettes))], rng), rng)
    return resize_mask(mask)


def mask_batches(silhouettes: dict[str, list[Image.Image]], batch: int, seed: int) -> Iterator[torch.Tensor]:
    """Yield batches of masks (batch, 64, 64) indefinitely, with uniformly sampled styles."""
    rng = np.random.default_rng(seed)
    styles = list(silhouettes)
    while True:
        chosen = rng.integers(len(styles), size=batch)
        yield torch.from_numpy(np.stack([random_mask(silhouettes[styles[index]], rng) for index in chosen]))


# Encoder


class MaskEncoder(nn.Module):
    """Encodes masks for training labels: the nearest centroid of each cell."""

    def __init__(self) -> None:
        super().__init__()
        self.centroids = nn.Parameter(torch.zeros(MASK_CODEBOOK_SIZE, CELL_SIZE**2), requires_grad=False)

    @classmethod
    def load(cls, path: str | Path) -> MaskEncoder:
        """Load `encoder.safetensors`.

        Raises:
            FileNotFoundError: if there is no such file.
            InputError: if it is not valid.
        """
        encoder = cls()
        load_parameters(encoder, Path(path))
        return encoder

    @classmethod
    def fit(cls, masks: torch.Tensor) -> MaskEncoder:
        """Fit centroids to the cells of masks (n, 64, 64), sorted from nearly empty to full."""
        encoder = cls()
        centroids = k_means(mask_cells(masks), MASK_CODEBOOK_SIZE)
        encoder.centroids.copy_(centroids[centroids.mean(1).argsort()])
        return encoder

    @torch.inference_mode()
    def encode(self, masks: torch.Tensor) -> torch.Tensor:
        """Encode masks (n, 64, 64), float in [0, 1], as codes (n, 16), int64, 0 to 127."""
        return nearest_centroids(mask_cells(masks), self.centroids)[:, 0].view(-1, CODES_PER_MASK)

    def soft_targets(self) -> torch.Tensor:
        """Return a target distribution for each code, (128, 128): softmax over negative squared centroid distances."""
        distances = torch.cdist(self.centroids, self.centroids).square()
        scale = distances.topk(2, largest=False).values[:, 1].median()  # typical distance to the nearest other centroid
        return torch.softmax(-2.0 * distances / scale, dim=-1)


def mask_cells(masks: torch.Tensor) -> torch.Tensor:
    """Split masks (n, 64, 64) into cells in row-major order: (n * 16, 256).

    Masks are thresholded at 0.5 and then blurred, so that the distance of two cells grows with the shift of an edge.
    """
    blurred = (masks >= 0.5).float()[:, None]
    for _ in range(2):
        blurred = F.avg_pool2d(blurred, 2 * BLUR_RADIUS + 1, stride=1, padding=BLUR_RADIUS)
    return F.unfold(blurred, CELL_SIZE, stride=CELL_SIZE).transpose(1, 2).flatten(0, 1)


def nearest_centroids(vectors: torch.Tensor, centroids: torch.Tensor, count: int = 1) -> torch.Tensor:
    """Return the indices of the `count` nearest centroids (k, d) of each vector (m, d): int64 (m, count)."""
    return torch.cdist(vectors, centroids).topk(count, largest=False).indices


def k_means(vectors: torch.Tensor, count: int, iterations: int = 25) -> torch.Tensor:
    """Lloyd's algorithm, initialized with random vectors; returns centroids (count, d)."""
    centroids = vectors[torch.randperm(len(vectors))[:count]].clone()
    for _ in range(iterations):
        assigned = torch.cat([nearest_centroids(chunk, centroids)[:, 0] for chunk in vectors.split(8192)])
        sizes = assigned.bincount(minlength=count)
        sums = torch.zeros_like(centroids).index_add_(0, assigned, vectors)
        restarts = vectors[torch.randint(len(vectors), (count,))]  # for empty clusters
        centroids = torch.where(sizes[:, None] > 0, sums / sizes[:, None].clamp(min=1), restarts)
    return centroids


def swap_codes(codes: torch.Tensor, encoder: MaskEncoder, fraction: float) -> torch.Tensor:
    """Replace about `fraction` of the codes (n, 16) by one of their three nearest neighbors."""
    neighbors = nearest_centroids(encoder.centroids, encoder.centroids, 4)
    column = torch.where(torch.rand(codes.shape) < fraction, torch.randint(1, 4, codes.shape), 0)
    return neighbors[codes, column]


# Training


def train(options: MaskOptions, silhouettes: dict[str, list[Image.Image]]) -> tuple[MaskEncoder, MaskDecoder]:
    """Fit the encoder, then train the decoder and its codebook from scratch."""
    torch.manual_seed(options.seed)
    masks = mask_batches(silhouettes, options.batch, options.seed)
    encoder = MaskEncoder.fit(torch.cat([next(masks) for _ in range(options.fit_batches)]))
    decoder = MaskDecoder()
    nn.init.normal_(decoder._vq_vae._embedding)
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=options.learning_rate, betas=(0.9, 0.98), weight_decay=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, options.learning_rate, total_steps=options.steps, pct_start=0.05, final_div_factor=100
    )
    progress = trange(options.steps, desc="masks", mininterval=5)
    for step in progress:
        batch = next(masks)
        codes = swap_codes(encoder.encode(batch), encoder, options.swap)
        loss = F.mse_loss(decoder(decoder._vq_vae(codes)), batch * 2 - 1)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(decoder.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0:
            progress.set_postfix(loss=f"{loss.item():.4f}")
    return encoder, decoder.eval()


# Evaluation


def batch_mask_iou(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Intersection over union of bool masks (n, 64, 64): float (n,)."""
    return (a & b).sum((1, 2)) / np.maximum((a | b).sum((1, 2)), 1)


def evaluate(encoder: MaskEncoder, decoder: MaskDecoder, masks: torch.Tensor) -> dict[str, float]:
    """Compute the IoU of reconstructed masks, with the true codes and with a quarter of them swapped."""
    true = (masks >= 0.5).numpy()
    codes = encoder.encode(masks)
    swapped = swap_codes(codes, encoder, 0.25)
    ious = [batch_mask_iou(decoder.decode(c) >= 0.5, true) for c in (codes, swapped)]
    return {
        "iou": float(ious[0].mean()),
        "iou_worst_5%": float(np.quantile(ious[0], 0.05)),
        "iou_quarter_swapped": float(ious[1].mean()),
        "codes_used": len(codes.unique()),
    }


def report(encoder: MaskEncoder, decoder: MaskDecoder, icons: Path, count: int = 300) -> None:
    """Print metrics per style, on masks that were not used for training."""
    for style, silhouettes in load_silhouettes(icons, STYLES).items():
        metrics = evaluate(encoder, decoder, next(mask_batches({style: silhouettes}, count, EVALUATION_SEED)))
        note = "" if style in TRAINED_STYLES else "  (held-out style)"
        print(f"{style:18}", "  ".join(f"{name} {value:.3f}" for name, value in metrics.items()) + note)


# Files


def save(encoder: MaskEncoder, decoder: MaskDecoder, options: MaskOptions) -> None:
    """Write the decoder in float16 and the encoder in float32."""
    options.work.mkdir(parents=True, exist_ok=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    half = {name: tensor.half().contiguous() for name, tensor in decoder.state_dict().items()}
    save_file(half, options.out, metadata={"format": "pt"})
    save_file(encoder.state_dict(), options.work / "encoder.safetensors", metadata={"format": "pt"})
    for path in (options.out, options.work / "encoder.safetensors"):
        print(f"{path}: {path.stat().st_size:,} bytes")


def main() -> None:
    """Train, save and evaluate."""
    options = parse_options(MaskOptions, "python -m paligemma.training.masks", "Train the mask codes and decoder.")
    torch.set_num_threads(options.threads)
    fetch_icons(options.icons)
    start = time.perf_counter()
    encoder, decoder = train(options, load_silhouettes(options.icons, TRAINED_STYLES))
    print(f"Trained in {time.perf_counter() - start:.0f} s on {options.threads} thread(s).")
    save(encoder, decoder, options)
    report(MaskEncoder.load(options.work / "encoder.safetensors"), MaskDecoder.load(options.out), options.icons)


if __name__ == "__main__":
    main()
