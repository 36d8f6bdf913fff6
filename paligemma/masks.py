"""`<seg>` codes -> masks: PaliGemma's mask decoder, and masks in the picture and as run lengths.

A segmented object is a box and 16 codes of 0..127. The codes name vectors of a codebook; the decoder turns
the 4 x 4 grid of vectors into a 64 x 64 mask, which is stretched over the box (Ning et al., "All in Tokens",
https://arxiv.org/abs/2301.02229; used by PaliGemma, https://arxiv.org/abs/2407.07726).

Two files fit this architecture:

* `assets/demo/mask_decoder.safetensors` of the bundled model, made by `paligemma.training.masks`.
* `vae-oid.npz`, which Google's checkpoints need: published with big_vision (Apache-2.0) at
  `gs://big_vision/paligemma/vae-oid.npz`, trained on Open Images. It is larger than a decoder alone; encoder
  and training counters in it are not read. Its publisher states no checksum; a public copy (Git LFS pointer
  in github.com/zsxkib/cog-paligemma2-10b-mix) has 8,479,556 bytes and the SHA-256 of `VAE_OID_SHA256`.
"""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub import hf_hub_download
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

CODES_PER_MASK = 16
CODE_GRID = 4
CODEBOOK_SIZE = 128
CODE_WIDTH = 512
MASK_SIZE = 64
HIDDEN_WIDTH = 128
VAE_OID_SHA256 = "5586010257b8536dddefab65e7755077f21d5672d5674dacf911f73ae95a4447"
VAE_OID_SPACE = "big-vision/paligemma"  # a Space of the publisher's that carries the file
MAX_FILE_BYTES = 64 * 2**20
# What a training file may hold beside the decoder: the encoder and the codebook's training counters.
UNUSED_PREFIXES = ("encoder.", "_vq_vae._")

Box = tuple[float, float, float, float]


class ResidualBlock(nn.Module):
    """x + (3 x 3, ReLU, 3 x 3, ReLU, 1 x 1 convolutions of x); (batch, width, height, width) in and out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, width, 1),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.net(x)


class Codebook(nn.Module):
    """The 128 vectors that the codes name."""

    def __init__(self) -> None:
        super().__init__()
        self._embedding = nn.Parameter(torch.zeros(CODEBOOK_SIZE, CODE_WIDTH))

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        """Look codes (n, 16), row by row of the grid, up: vectors (n, 512, 4, 4)."""
        vectors = self._embedding[codes]  # (n, 16, 512)
        return vectors.transpose(1, 2).reshape(-1, CODE_WIDTH, CODE_GRID, CODE_GRID)


class MaskDecoder(nn.Module):
    """The codebook and decoder of PaliGemma's mask VQ-VAE, with the parameter names of `vae-oid.npz`."""

    def __init__(self) -> None:
        super().__init__()
        self._vq_vae = Codebook()
        self.decoder = nn.Sequential(
            nn.Conv2d(CODE_WIDTH, HIDDEN_WIDTH, 1),
            nn.ReLU(),
            ResidualBlock(HIDDEN_WIDTH),
            ResidualBlock(HIDDEN_WIDTH),
            *_upsample(HIDDEN_WIDTH, 128),
            *_upsample(128, 64),
            *_upsample(64, 32),
            *_upsample(32, 16),
            nn.Conv2d(16, 1, 1),
        )

    @classmethod
    def load(cls, path: str | Path) -> MaskDecoder:
        """Read a decoder from `.npz` or `.safetensors`, as float32, in evaluation mode.

        Raises FileNotFoundError, or ValueError when the file cannot be read, when a name is missing or
        unknown, when a shape differs, or when a number is not finite.
        """
        decoder = cls()
        load_parameters(decoder, Path(path), UNUSED_PREFIXES)
        return decoder.eval()

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        """Codebook vectors (n, 512, 4, 4) -> masks (n, 64, 64), about -1 outside the object and 1 inside."""
        return self.decoder(vectors)[:, 0]

    @torch.inference_mode()
    def decode(self, codes: torch.Tensor | np.ndarray | Sequence[Sequence[int]]) -> np.ndarray:
        """Codes (n, 16) of 0..127 -> masks (n, 64, 64), float32 in [0, 1], 0.5 at the outline.

        Raises ValueError for another shape, for numbers that are not whole, or for codes out of range.
        """
        codes = _checked_codes(codes).to(self._vq_vae._embedding.device)
        masks = self(self._vq_vae(codes)).float()
        return (masks * 0.5 + 0.5).clamp(0, 1).cpu().numpy()


def _upsample(width_in: int, width_out: int) -> tuple[nn.Module, nn.Module]:
    """Twice the height and width."""
    return nn.ConvTranspose2d(width_in, width_out, 4, stride=2, padding=1), nn.ReLU()


def _checked_codes(codes: torch.Tensor | np.ndarray | Sequence[Sequence[int]]) -> torch.Tensor:
    codes = torch.as_tensor(codes)
    if codes.ndim != 2 or codes.shape[1] != CODES_PER_MASK:
        raise ValueError(f"codes have the shape {tuple(codes.shape)}; allowed is (n, {CODES_PER_MASK})")
    if codes.is_floating_point() or codes.dtype == torch.bool:
        raise ValueError(f"codes are {codes.dtype}; allowed are whole numbers")
    if codes.numel() and not 0 <= int(codes.min()) <= int(codes.max()) < CODEBOOK_SIZE:
        raise ValueError(f"codes reach from {int(codes.min())} to {int(codes.max())}; allowed is 0 to 127")
    return codes.long()


# Files


def load_parameters(module: nn.Module, path: Path, unused_prefixes: tuple[str, ...] = ()) -> None:
    """Fill `module` from a `.npz` or `.safetensors` file of the same names and shapes, or raise ValueError.

    Names that start with one of `unused_prefixes` may be in the file and are not read into the module.
    """
    wanted = {name: parameter.shape for name, parameter in module.named_parameters()}
    found = _read_file(path)
    missing = sorted(wanted.keys() - found.keys())
    unknown = sorted(name for name in found.keys() - wanted.keys() if not name.startswith(unused_prefixes))
    if missing or unknown:
        raise ValueError(f"{path.name}: missing {missing or 'nothing'}, unknown {unknown or 'nothing'}")
    for name, shape in wanted.items():
        tensor = found[name]
        if tensor.shape != shape:
            raise ValueError(f"{path.name}: {name} has the shape {tuple(tensor.shape)}, allowed is {tuple(shape)}")
        if not tensor.is_floating_point() or not tensor.isfinite().all():
            raise ValueError(f"{path.name}: {name} is not made of finite floating-point numbers")
    module.load_state_dict({name: found[name].float() for name in wanted})


def download_vae_oid() -> Path:
    """Where `vae-oid.npz` lies in the hub's cache, downloaded if it was not there.

    Raises OSError where it cannot be had, and ValueError where it is not the file of `VAE_OID_SHA256`.
    """
    path = Path(hf_hub_download(VAE_OID_SPACE, "vae-oid.npz", repo_type="space"))
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != VAE_OID_SHA256:
        raise ValueError(f"vae-oid.npz of {VAE_OID_SPACE} has the SHA-256 {found}; allowed is {VAE_OID_SHA256}")
    return path


def _read_file(path: Path) -> dict[str, torch.Tensor]:
    if not path.is_file():
        raise FileNotFoundError(f"there is no mask decoder at {path}")
    readers = {".npz": _read_npz, ".safetensors": load_file}
    if path.suffix not in readers:
        raise ValueError(f"{path.name} ends with {path.suffix!r}; allowed are {', '.join(readers)}")
    try:
        return readers[path.suffix](path)
    except (SafetensorError, zipfile.BadZipFile, ValueError, TypeError, EOFError, KeyError) as error:
        raise ValueError(f"{path.name} cannot be read: {error}") from error


def _read_npz(path: Path) -> dict[str, torch.Tensor]:
    with zipfile.ZipFile(path) as archive:
        unpacked_bytes = sum(entry.file_size for entry in archive.infolist())
    if unpacked_bytes > MAX_FILE_BYTES:
        raise ValueError(f"it unpacks to {unpacked_bytes} bytes, allowed are {MAX_FILE_BYTES}")
    with np.load(path, allow_pickle=False) as arrays:
        return {name: torch.from_numpy(np.asarray(arrays[name])) for name in arrays.files}


# Masks in the picture


def paste_mask(mask: np.ndarray, box: Box, width: int, height: int, threshold: float = 0.5) -> np.ndarray | None:
    """Stretch a mask (64, 64) of [0, 1] over `box` in an empty picture: bool (height, width).

    `box` is (x_min, y_min, x_max, y_max) in pixels; its edges are rounded to whole pixels. None when it then
    covers no pixel. Bilinear, as in big_vision's demo. Raises ValueError for a box outside the picture.
    """
    x_min, y_min, x_max, y_max = box
    if min(x_min, x_max) < 0 or max(x_min, x_max) > width:
        raise ValueError(f"the box {box} leaves a picture {width} pixels wide")
    if min(y_min, y_max) < 0 or max(y_min, y_max) > height:
        raise ValueError(f"the box {box} leaves a picture {height} pixels high")
    left, top, right, bottom = round(x_min), round(y_min), round(x_max), round(y_max)
    if right <= left or bottom <= top:
        return None
    small = Image.fromarray(np.asarray(mask, dtype=np.float32))
    stretched = small.resize((right - left, bottom - top), Image.Resampling.BILINEAR)
    image = np.zeros((height, width), dtype=bool)
    image[top:bottom, left:right] = np.asarray(stretched) >= threshold
    return image


def encode_rle(mask: np.ndarray) -> dict[str, list[int]]:
    """A bool mask (height, width) as COCO's run lengths: {"size": [height, width], "counts": [...]}.

    The counts go down the columns, one after the other, and are in turn runs of False and True, False first
    (so the first count is 0 when the first pixel is True). They are COCO's uncompressed kind.
    """
    mask = np.asarray(mask)
    if mask.ndim != 2 or mask.dtype != bool:
        raise ValueError(f"the mask is {mask.dtype} with shape {mask.shape}; allowed is bool (height, width)")
    pixels = mask.flatten(order="F")
    changes = np.flatnonzero(np.diff(pixels, prepend=False))
    counts = np.diff(changes, prepend=0, append=pixels.size)
    return {"size": [int(size) for size in mask.shape], "counts": counts.tolist()}


def decode_rle(run_lengths: dict[str, Any]) -> np.ndarray:
    """The bool mask (height, width) of `to_run_lengths`. Raises ValueError when the counts do not fit."""
    height, width = run_lengths["size"]
    counts = np.asarray(run_lengths["counts"], dtype=np.int64)
    if (counts < 0).any() or counts.sum() != height * width:
        raise ValueError(f"the counts sum to {counts.sum()}; allowed is {height * width}, each at least 0")
    values = np.arange(len(counts)) % 2 == 1
    return np.repeat(values, counts).reshape((height, width), order="F")
