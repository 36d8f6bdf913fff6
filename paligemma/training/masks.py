"""Train the bundled model's mask codes and decoder: `python -m paligemma.training.masks`.

A code stands for what one sixteenth of a mask looks like: the 128 centres of k-means over the slightly blurred
sixteenths of emoji silhouettes. The decoder, of PaliGemma's architecture (`paligemma.masks`), learns to draw the whole
mask from sixteen codes. Codebook and decoder are what the app needs and go to `assets/demo/mask_decoder.safetensors`,
as float16; the centres only make the training labels of the bundled model and stay in `runs/masks/encoder.safetensors`.

PaliGemma's own codes come from a VQ-VAE, whose encoder sees the whole mask (`vae-oid`). Here that was tried first: a
small language model predicted less than a fifth of such codes rightly, since a slightly different box changes two
thirds of them. Codes of the parts change half as often, and a wrong one spoils one part only.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F
from tqdm import trange

from paligemma.masks import CODE_GRID, MASK_SIZE, MaskDecoder, load_parameters
from paligemma.parsing import CODES_PER_MASK, MASK_CODEBOOK_SIZE
from paligemma.training.icons import STYLES_HELD_OUT, STYLES_TRAINED, load_sprites

SPRITE_SIZE = 128
PART_SIZE = MASK_SIZE // CODE_GRID
BLUR = 2  # pixels to each side, twice
VAL_SEED = 1_000_003


@dataclass(frozen=True)
class Options:
    """What the command line sets. `fit_batches` are for the centres, `steps` more for the decoder."""

    icons: Path = Path("runs/icons")
    work: Path = Path("runs/masks")
    out: Path = Path("assets/demo/mask_decoder.safetensors")
    seed: int = 0
    fit_batches: int = 300
    steps: int = 2400
    batch: int = 32
    learning_rate: float = 2e-3
    swap: float = 0.1
    threads: int = 1


# Masks


def silhouettes(icons: Path, styles: Iterable[str]) -> dict[str, list[Image.Image]]:
    """The opacity of every drawing, 8-bit gray, per style; its colors make no difference here."""
    return {
        style: [
            Image.fromarray(opacity)
            for drawings in classes.values()
            for opacity in {sprite.drawing: sprite.pixels[..., 3] for sprite in drawings}.values()
        ]
        for style, classes in load_sprites(icons, SPRITE_SIZE, styles).items()
    }


def random_shape(shape: Image.Image, rng: np.random.Generator) -> np.ndarray:
    """One silhouette, perhaps flipped, rotated by up to 15 degrees, 24 to 160 pixels long: bool, trimmed."""
    if rng.random() < 0.5:
        shape = shape.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    shape = shape.rotate(rng.uniform(-15, 15), Image.Resampling.BILINEAR, expand=True)
    scale = np.exp(rng.uniform(np.log(24), np.log(160))) / max(shape.size)
    size = [max(2, round(side * scale)) for side in shape.size]
    return trim(np.asarray(shape.resize(size, Image.Resampling.BILINEAR)) > 127)


def trim(mask: np.ndarray) -> np.ndarray:
    """Cut a mask to the tight box of its True pixels; a mask without any stays."""
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    if not rows.size:
        return mask
    return mask[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]


def hide_a_side(mask: np.ndarray, other: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Put another silhouette over an edge of `mask`, so that it hides at most 8 % of it."""
    height, width = mask.shape
    angle, shift = rng.uniform(0, 2 * np.pi), rng.uniform(0.7, 0.95)
    corner = round(shift * width * np.cos(angle)), round(shift * height * np.sin(angle))
    cover = Image.new("1", (width, height))
    cover.paste(Image.fromarray(other).resize((width, height)), corner)
    visible = mask & ~np.asarray(cover)
    return trim(visible) if visible.sum() >= 0.92 * mask.sum() else mask


def to_square(mask: np.ndarray) -> np.ndarray:
    """Stretch a bool mask to (64, 64), float32 in [0, 1], with soft edges."""
    gray = Image.fromarray(mask.astype(np.float32))
    return np.asarray(gray.resize((MASK_SIZE, MASK_SIZE), Image.Resampling.BILINEAR))


def random_mask(shapes: list[Image.Image], rng: np.random.Generator) -> np.ndarray:
    """One training mask (64, 64), float32 in [0, 1]."""
    mask = random_shape(shapes[rng.integers(len(shapes))], rng)
    if rng.random() < 0.3:
        mask = hide_a_side(mask, random_shape(shapes[rng.integers(len(shapes))], rng), rng)
    return to_square(mask)


def batches(shapes: dict[str, list[Image.Image]], batch: int, seed: int) -> Iterator[torch.Tensor]:
    """Masks (batch, 64, 64) without end, every style equally often."""
    rng = np.random.default_rng(seed)
    styles = list(shapes)
    while True:
        chosen = rng.integers(len(styles), size=batch)
        yield torch.from_numpy(np.stack([random_mask(shapes[styles[index]], rng) for index in chosen]))


# Models


class MaskEncoder(nn.Module):
    """Masks -> codes, for labels only: the nearest centre for each sixteenth of a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.centres = nn.Parameter(torch.zeros(MASK_CODEBOOK_SIZE, PART_SIZE**2), requires_grad=False)

    @classmethod
    def load(cls, path: str | Path) -> MaskEncoder:
        """Read `encoder.safetensors`. Raises FileNotFoundError or ValueError."""
        encoder = cls()
        load_parameters(encoder, Path(path))
        return encoder

    @classmethod
    def fit(cls, masks: torch.Tensor) -> MaskEncoder:
        """The centres of k-means over the parts of masks (n, 64, 64), from nearly empty to full."""
        encoder = cls()
        centres = k_means(parts(masks), MASK_CODEBOOK_SIZE)
        encoder.centres.copy_(centres[centres.mean(1).argsort()])
        return encoder

    @torch.inference_mode()
    def encode(self, masks: torch.Tensor) -> torch.Tensor:
        """Masks (n, 64, 64), float of [0, 1], cut at 0.5 -> codes (n, 16), int64 of 0..127."""
        return nearest(parts(masks), self.centres)[:, 0].view(-1, CODES_PER_MASK)

    def likeness(self) -> torch.Tensor:
        """How much like each code the others draw: (128, 128), every row a distribution, most of it on the code."""
        distances = torch.cdist(self.centres, self.centres).square()
        closest = distances.topk(2, largest=False).values[:, 1].median()
        return torch.softmax(-2.0 * distances / closest, dim=-1)


def parts(masks: torch.Tensor) -> torch.Tensor:
    """The sixteenths of masks (n, 64, 64), row by row: (n * 16, 256).

    The masks are cut at 0.5 and then blurred, so that the distance of two parts grows with the shift of an outline.
    """
    blurred = (masks >= 0.5).float()[:, None]
    for _ in range(2):
        blurred = F.avg_pool2d(blurred, 2 * BLUR + 1, stride=1, padding=BLUR)
    return F.unfold(blurred, PART_SIZE, stride=PART_SIZE).transpose(1, 2).flatten(0, 1)


def nearest(vectors: torch.Tensor, centres: torch.Tensor, count: int = 1) -> torch.Tensor:
    """The `count` closest centres (k, width) for each vector (m, width): int64 (m, count), closest first."""
    return torch.cdist(vectors, centres).topk(count, largest=False).indices


def k_means(vectors: torch.Tensor, count: int, rounds: int = 25) -> torch.Tensor:
    """The centres (count, width) of Lloyd's algorithm, from randomly chosen vectors."""
    centres = vectors[torch.randperm(len(vectors))[:count]].clone()
    for _ in range(rounds):
        chosen = torch.cat([nearest(some, centres)[:, 0] for some in vectors.split(8192)])
        sizes = chosen.bincount(minlength=count)
        sums = torch.zeros_like(centres).index_add_(0, chosen, vectors)
        fresh = vectors[torch.randint(len(vectors), (count,))]  # for a centre that nothing chose
        centres = torch.where(sizes[:, None] > 0, sums / sizes[:, None].clamp(min=1), fresh)
    return centres


# Training


def train(options: Options, shapes: dict[str, list[Image.Image]]) -> tuple[MaskEncoder, MaskDecoder]:
    """The centres first, then the decoder and its codebook, from nothing."""
    torch.manual_seed(options.seed)
    masks = batches(shapes, options.batch, options.seed)
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


def swap_codes(codes: torch.Tensor, encoder: MaskEncoder, share: float) -> torch.Tensor:
    """Replace about `share` of the codes (n, 16) by one of their three closest neighbors."""
    neighbors = nearest(encoder.centres, encoder.centres, 4)
    column = torch.where(torch.rand(codes.shape) < share, torch.randint(1, 4, codes.shape), 0)
    return neighbors[codes, column]


# Evaluation


def intersection_over_union(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """For bool masks (n, 64, 64): float (n,)."""
    return (a & b).sum((1, 2)) / np.maximum((a | b).sum((1, 2)), 1)


def evaluate(encoder: MaskEncoder, decoder: MaskDecoder, masks: torch.Tensor) -> dict[str, float]:
    """Mean IoU of the masks that come back, whole and with a quarter of the codes swapped for a close one."""
    true = (masks >= 0.5).numpy()
    codes = encoder.encode(masks)
    swapped = swap_codes(codes, encoder, 0.25)
    ious = [intersection_over_union(decoder.decode(c) >= 0.5, true) for c in (codes, swapped)]
    return {
        "iou": float(ious[0].mean()),
        "iou_worst_5%": float(np.quantile(ious[0], 0.05)),
        "iou_quarter_swapped": float(ious[1].mean()),
        "codes_used": len(codes.unique()),
    }


def report(encoder: MaskEncoder, decoder: MaskDecoder, icons: Path, count: int = 300) -> None:
    """Print the figures per style, on augmentations that were not trained on."""
    for style, shapes in silhouettes(icons, (*STYLES_TRAINED, *STYLES_HELD_OUT)).items():
        masks = next(batches({style: shapes}, count, VAL_SEED))
        figures = evaluate(encoder, decoder, masks)
        note = "" if style in STYLES_TRAINED else "  (style never trained)"
        print(f"{style:18}", "  ".join(f"{name} {value:.3f}" for name, value in figures.items()) + note)


# Files


def save(encoder: MaskEncoder, decoder: MaskDecoder, options: Options) -> None:
    """Write the decoder as float16, and the encoder."""
    options.work.mkdir(parents=True, exist_ok=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    shipped = {name: tensor.half().contiguous() for name, tensor in decoder.state_dict().items()}
    save_file(shipped, options.out, metadata={"format": "pt"})
    save_file(encoder.state_dict(), options.work / "encoder.safetensors", metadata={"format": "pt"})
    for path in (options.out, options.work / "encoder.safetensors"):
        print(f"{path}: {path.stat().st_size:,} bytes")


def parse_options(arguments: list[str] | None = None) -> Options:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in vars(Options()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value, help=f"default: {value}")
    return Options(**vars(parser.parse_args(arguments)))


def main() -> None:
    options = parse_options()
    torch.set_num_threads(options.threads)
    start = time.perf_counter()
    encoder, decoder = train(options, silhouettes(options.icons, STYLES_TRAINED))
    print(f"trained in {time.perf_counter() - start:.0f} s on {options.threads} thread(s)")
    save(encoder, decoder, options)
    report(MaskEncoder.load(options.work / "encoder.safetensors"), MaskDecoder.load(options.out), options.icons)


if __name__ == "__main__":
    main()
