"""Train the bundled model's mask codebook and decoder: `python -m paligemma.scripts.train_masks`.

A VQ-VAE (van den Oord et al., https://arxiv.org/abs/1711.00937) on the silhouettes of the emoji, with the
decoder's architecture of PaliGemma (`paligemma.masks`). The codebook and decoder are what the app needs and go
to `assets/demo/mask_decoder.safetensors`, as float16; the encoder only makes the training labels of the bundled
model and stays in `runs/masks/encoder.safetensors`.

A small language model has to predict the codes from a picture, so that they should forgive: the targets are
slightly soft, and the decoder learns with some codes swapped for close ones.
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

from paligemma.masks import (
    CODE_WIDTH,
    CODEBOOK_SIZE,
    CODES_PER_MASK,
    HIDDEN_WIDTH,
    MASK_SIZE,
    Codebook,
    MaskDecoder,
    ResidualBlock,
    load_parameters,
)
from paligemma.scripts.demo_icons import STYLES_HELD_OUT, STYLES_TRAINED, load_sprites

SPRITE_SIZE = 128
VAL_SEED = 1_000_003


@dataclass(frozen=True)
class Options:
    """What the command line sets. `steps` counts batches; the first `warmup_steps` use no codebook."""

    icons: Path = Path("runs/icons")
    work: Path = Path("runs/masks")
    out: Path = Path("assets/demo/mask_decoder.safetensors")
    seed: int = 0
    steps: int = 2400
    warmup_steps: int = 300
    batch: int = 32
    learning_rate: float = 2e-3
    commitment: float = 0.25
    swap: float = 0.1
    threads: int = 1


# Masks


def silhouettes(icons: Path, styles: Iterable[str]) -> dict[str, list[Image.Image]]:
    """The opacity of every drawing, 8-bit grey, per style; its colours make no difference here."""
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
    grey = Image.fromarray(mask.astype(np.float32))
    return np.asarray(grey.resize((MASK_SIZE, MASK_SIZE), Image.Resampling.BILINEAR))


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
    """Masks -> codes, for labels only. Layers named as in `vae-oid.npz`, with widths of our own."""

    def __init__(self) -> None:
        super().__init__()
        self._vq_vae = Codebook()
        self.encoder = nn.Sequential(
            *_halve(1, 32),
            *_halve(32, 64),
            *_halve(64, 128),
            *_halve(128, HIDDEN_WIDTH),
            ResidualBlock(HIDDEN_WIDTH),
            ResidualBlock(HIDDEN_WIDTH),
            nn.Conv2d(HIDDEN_WIDTH, CODE_WIDTH, 1),
        )

    @classmethod
    def load(cls, path: str | Path) -> MaskEncoder:
        """Read `encoder.safetensors`, in evaluation mode. Raises FileNotFoundError or ValueError."""
        encoder = cls()
        load_parameters(encoder, Path(path))
        return encoder.eval()

    def forward(self, masks: torch.Tensor) -> torch.Tensor:
        """Masks (n, 64, 64) of 0 and 1, the object stretched to all of it -> vectors (n * 16, 512)."""
        grid = self.encoder(masks[:, None] * 2 - 1)  # (n, 512, 4, 4)
        return grid.flatten(2).transpose(1, 2).reshape(-1, CODE_WIDTH)

    @torch.inference_mode()
    def encode(self, masks: torch.Tensor) -> torch.Tensor:
        """Masks (n, 64, 64), float of [0, 1], cut at 0.5 -> codes (n, 16), int64 of 0..127."""
        vectors = self((masks >= 0.5).float())
        return nearest(vectors, self._vq_vae._embedding)[:, 0].view(-1, CODES_PER_MASK)


def _halve(width_in: int, width_out: int) -> tuple[nn.Module, nn.Module]:
    return nn.Conv2d(width_in, width_out, 4, stride=2, padding=1), nn.ReLU()


def nearest(vectors: torch.Tensor, codebook: torch.Tensor, count: int = 1) -> torch.Tensor:
    """The `count` closest rows of the codebook for each vector (m, 512): int64 (m, count), closest first."""
    return torch.cdist(vectors, codebook).topk(count, largest=False).indices


class CodebookAverages:
    """Moves each code to the running mean of the vectors that choose it (arXiv 1711.00937, appendix A.1)."""

    def __init__(self, codebook: Codebook, vectors: torch.Tensor, decay: float = 0.99) -> None:
        self.codebook, self.decay = codebook, decay
        centres = k_means(vectors, CODEBOOK_SIZE)
        codebook._embedding.data.copy_(centres)
        self.counts = torch.ones(CODEBOOK_SIZE)
        self.sums = centres.clone()

    @torch.no_grad()
    def update(self, vectors: torch.Tensor, codes: torch.Tensor) -> None:
        """Take a batch in: vectors (m, 512) and the codes (m,) that they chose. Unused codes start anew."""
        chosen = F.one_hot(codes, CODEBOOK_SIZE).float()
        self.counts.lerp_(chosen.sum(0), 1 - self.decay)
        self.sums.lerp_(chosen.T @ vectors, 1 - self.decay)
        dead = self.counts < 0.02
        fresh = vectors[torch.randint(len(vectors), (int(dead.sum()),))]
        self.counts[dead], self.sums[dead] = 1.0, fresh
        self.codebook._embedding.data.copy_(self.sums / self.counts[:, None])


def k_means(vectors: torch.Tensor, count: int, rounds: int = 12) -> torch.Tensor:
    """The centres (count, width) of Lloyd's algorithm, from randomly chosen vectors."""
    centres = vectors[torch.randperm(len(vectors))[:count]].clone()
    for _ in range(rounds):
        chosen = F.one_hot(nearest(vectors, centres)[:, 0], count).float()
        sizes = chosen.sum(0)
        used = sizes > 0
        centres[used] = (chosen.T @ vectors)[used] / sizes[used, None]
    return centres


# Training


def train(options: Options, shapes: dict[str, list[Image.Image]]) -> tuple[MaskEncoder, MaskDecoder]:
    """Train from nothing; both models share one codebook."""
    torch.manual_seed(options.seed)
    encoder, decoder = MaskEncoder(), MaskDecoder()
    encoder._vq_vae = decoder._vq_vae
    decoder._vq_vae._embedding.requires_grad_(False)
    parameters = [*encoder.encoder.parameters(), *decoder.decoder.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=options.learning_rate, betas=(0.9, 0.98), weight_decay=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, options.learning_rate, total_steps=options.steps, pct_start=0.05, final_div_factor=100
    )
    averages = None
    masks = batches(shapes, options.batch, options.seed)
    progress = trange(options.steps, desc="masks", mininterval=5)
    for step in progress:
        if step == options.warmup_steps:
            averages = CodebookAverages(decoder._vq_vae, _sample_vectors(encoder, masks))
        loss = training_loss(encoder, decoder, next(masks), averages, options)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0:
            progress.set_postfix(loss=f"{loss.item():.4f}")
    return encoder.eval(), decoder.eval()


@torch.no_grad()
def _sample_vectors(encoder: MaskEncoder, masks: Iterator[torch.Tensor], count: int = 20) -> torch.Tensor:
    return torch.cat([encoder((next(masks) >= 0.5).float()) for _ in range(count)])


def training_loss(
    encoder: MaskEncoder,
    decoder: MaskDecoder,
    masks: torch.Tensor,
    averages: CodebookAverages | None,
    options: Options,
) -> torch.Tensor:
    """Squared error of the masks in [-1, 1], and how far the vectors lie from their codes."""
    vectors = encoder((masks >= 0.5).float())
    if averages is None:
        quantized, commitment = vectors, 1e-3 * vectors.square().mean()
    else:
        quantized, commitment = quantize(vectors, averages, options)
    grid = quantized.view(-1, CODES_PER_MASK, CODE_WIDTH).transpose(1, 2).reshape(-1, CODE_WIDTH, 4, 4)
    return F.mse_loss(decoder(grid), masks * 2 - 1) + commitment


def quantize(vectors: torch.Tensor, averages: CodebookAverages, options: Options) -> tuple[torch.Tensor, torch.Tensor]:
    """Vectors (m, 512) -> their codes' vectors, gradients passed straight through, and the commitment loss.

    Some codes are swapped for one of the three next closest, so that a near miss costs little later.
    """
    codebook = averages.codebook._embedding
    close = nearest(vectors.detach(), codebook, 4)
    chosen = codebook[close[:, 0]]
    commitment = options.commitment * F.mse_loss(vectors, chosen)
    column = torch.where(torch.rand(len(close)) < options.swap, torch.randint(1, 4, (len(close),)), 0)
    used = codebook[close.gather(1, column[:, None])[:, 0]]
    averages.update(vectors.detach(), close[:, 0])
    return vectors + (used - vectors).detach(), commitment


# Evaluation


def intersection_over_union(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """For bool masks (n, 64, 64): float (n,)."""
    return (a & b).sum((1, 2)) / np.maximum((a | b).sum((1, 2)), 1)


def evaluate(encoder: MaskEncoder, decoder: MaskDecoder, masks: torch.Tensor, seed: int) -> dict[str, float]:
    """Mean IoU of the masks that come back, whole and with 4 of 16 codes swapped for a close one."""
    true = (masks >= 0.5).numpy()
    codes = encoder.encode(masks)
    swapped = swap_codes(codes, decoder._vq_vae._embedding, np.random.default_rng(seed))
    ious = [intersection_over_union(decoder.decode(c) >= 0.5, true) for c in (codes, swapped)]
    return {
        "iou": float(ious[0].mean()),
        "iou_worst_5%": float(np.quantile(ious[0], 0.05)),
        "iou_4_swapped": float(ious[1].mean()),
        "codes_used": len(codes.unique()),
    }


def swap_codes(codes: torch.Tensor, codebook: torch.Tensor, rng: np.random.Generator) -> torch.Tensor:
    """Replace 4 random codes of each row by one of their three closest neighbours in the codebook."""
    neighbours = nearest(codebook.detach(), codebook.detach(), 4)
    codes = codes.clone()
    for row in codes:
        for place in rng.choice(CODES_PER_MASK, 4, replace=False):
            row[place] = neighbours[row[place], rng.integers(1, 4)]
    return codes


def report(encoder: MaskEncoder, decoder: MaskDecoder, icons: Path, count: int = 300) -> None:
    """Print the figures per style, on augmentations that were not trained on."""
    for style, shapes in silhouettes(icons, (*STYLES_TRAINED, *STYLES_HELD_OUT)).items():
        masks = next(batches({style: shapes}, count, VAL_SEED))
        figures = evaluate(encoder, decoder, masks, VAL_SEED)
        note = "" if style in STYLES_TRAINED else "  (style never trained)"
        print(f"{style:18}", "  ".join(f"{name} {value:.3f}" for name, value in figures.items()) + note)


# Files


def save(encoder: MaskEncoder, decoder: MaskDecoder, options: Options) -> None:
    """Write the shipped half as float16, and the encoder with the same rounded codebook."""
    decoder.half().float()
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
