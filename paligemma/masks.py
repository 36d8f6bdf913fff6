"""Decode mask tokens (`<seg>`) to masks, paste masks into an image, and run-length encode them.

A segmented object has a bounding box and 16 mask codes, each 0..127. The codes index a VQ-VAE codebook; the decoder
maps the 4 x 4 grid of codebook vectors to a 64 x 64 mask, which is resized to the box (Ning et al., "All in Tokens",
https://arxiv.org/abs/2301.02229; used by PaliGemma, https://arxiv.org/abs/2407.07726).

Two weight files are available for this architecture:

* `assets/demo/mask_decoder.safetensors` of the bundled model, trained by `paligemma.training.masks`.
* `vae-oid.npz` for Google's checkpoints: published with big_vision (Apache-2.0) at
  `gs://big_vision/paligemma/vae-oid.npz`, trained on Open Images. It also contains the encoder and training counters,
  which are not loaded. Google publishes no checksum; a public copy (Git LFS pointer in
  github.com/zsxkib/cog-paligemma2-10b-mix) has 8,479,556 bytes and the SHA-256 of `VAE_OID_SHA256`.
"""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub import hf_hub_download
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from paligemma.errors import InputError
from paligemma.parsing import CODES_PER_MASK, MASK_CODEBOOK_SIZE, Box

CODE_GRID = 4
CODE_DIM = 512
MASK_SIZE = 64
HIDDEN_CHANNELS = 128
VAE_OID_SHA256 = "5586010257b8536dddefab65e7755077f21d5672d5674dacf911f73ae95a4447"
VAE_OID_SPACE = "big-vision/paligemma"  # Google's Space, which contains the file
MAX_FILE_BYTES = 64 * 2**20
# Parameters in the weight files that decoding does not need: the encoder and the codebook's training counters.
UNUSED_PREFIXES = ("encoder.", "_vq_vae._")


class ResidualBlock(nn.Module):
    """Residual block with two 3 x 3 convolutions and one 1 x 1; input and output (n, channels, height, width)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 1),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.net(x)


class Codebook(nn.Module):
    """The 128 codebook vectors of the VQ-VAE."""

    def __init__(self) -> None:
        super().__init__()
        self._embedding = nn.Parameter(torch.zeros(MASK_CODEBOOK_SIZE, CODE_DIM))

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        """Look up codes (n, 16), a row-major 4 x 4 grid; returns vectors (n, 512, 4, 4)."""
        vectors = self._embedding[codes]  # (n, 16, 512)
        return vectors.transpose(1, 2).reshape(-1, CODE_DIM, CODE_GRID, CODE_GRID)


class MaskDecoder(nn.Module):
    """The codebook and decoder of PaliGemma's mask VQ-VAE, with the parameter names of `vae-oid.npz`."""

    def __init__(self) -> None:
        super().__init__()
        self._vq_vae = Codebook()
        self.decoder = nn.Sequential(
            nn.Conv2d(CODE_DIM, HIDDEN_CHANNELS, 1),
            nn.ReLU(),
            ResidualBlock(HIDDEN_CHANNELS),
            ResidualBlock(HIDDEN_CHANNELS),
            *_upsample(HIDDEN_CHANNELS, 128),
            *_upsample(128, 64),
            *_upsample(64, 32),
            *_upsample(32, 16),
            nn.Conv2d(16, 1, 1),
        )

    @classmethod
    def load(cls, path: str | Path) -> MaskDecoder:
        """Load a `.npz` or `.safetensors` file as float32, in `eval()` mode.

        Raises:
            FileNotFoundError: if there is no such file.
            InputError: if the file cannot be read, parameter names or shapes differ, or a value is not finite.
        """
        decoder = cls()
        load_parameters(decoder, Path(path), UNUSED_PREFIXES)
        return decoder.eval()

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        """Map codebook vectors (n, 512, 4, 4) to masks (n, 64, 64), about -1 outside the object and 1 inside."""
        return self.decoder(vectors)[:, 0]

    @torch.inference_mode()
    def decode(self, codes: torch.Tensor | np.ndarray | Sequence[Sequence[int]]) -> np.ndarray:
        """Decode codes (n, 16), each 0..127, to masks (n, 64, 64), float32 in [0, 1], 0.5 at the contour.

        Raises:
            ValueError: if the shape is different, the dtype is not integer, or a code is out of range.
        """
        codes = _check_codes(torch.as_tensor(codes)).to(self._vq_vae._embedding.device)
        masks = self(self._vq_vae(codes)).float()
        return (masks * 0.5 + 0.5).clamp(0, 1).cpu().numpy()


def _upsample(in_channels: int, out_channels: int) -> tuple[nn.Module, nn.Module]:
    """Double height and width."""
    return nn.ConvTranspose2d(in_channels, out_channels, 4, stride=2, padding=1), nn.ReLU()


def _check_codes(codes: torch.Tensor) -> torch.Tensor:
    if codes.ndim != 2 or codes.shape[1] != CODES_PER_MASK:
        raise ValueError(f"codes must have shape (n, {CODES_PER_MASK}), got {tuple(codes.shape)}.")
    if codes.is_floating_point() or codes.dtype == torch.bool:
        raise ValueError(f"codes must be integers, got {codes.dtype}.")
    if codes.numel() and not 0 <= int(codes.min()) <= int(codes.max()) < MASK_CODEBOOK_SIZE:
        raise ValueError(
            f"codes must be 0 to {MASK_CODEBOOK_SIZE - 1}, got values from {int(codes.min())} to {int(codes.max())}."
        )
    return codes.long()


# Files


def load_parameters(module: nn.Module, path: Path, unused_prefixes: tuple[str, ...] = ()) -> None:
    """Load the parameters of `module` from a `.npz` or `.safetensors` file with the same names and shapes.

    Names in the file that start with one of `unused_prefixes` are ignored.

    Raises:
        FileNotFoundError: if there is no such file.
        InputError: if the file cannot be read, names or shapes differ, or a value is not finite.
    """
    expected = {name: parameter.shape for name, parameter in module.named_parameters()}
    tensors = _read_file(path)
    missing = sorted(expected.keys() - tensors.keys())
    unexpected = sorted(name for name in tensors.keys() - expected.keys() if not name.startswith(unused_prefixes))
    if missing or unexpected:
        raise InputError(
            "masks.names",
            "{file} has missing parameters: {missing}; unexpected parameters: {unexpected}.",
            file=path.name,
            missing=", ".join(missing) or "none",
            unexpected=", ".join(unexpected) or "none",
        )
    for name, shape in expected.items():
        _check_parameter(path.name, name, tensors[name], shape)
    module.load_state_dict({name: tensors[name].float() for name in expected})


def _check_parameter(file: str, name: str, tensor: torch.Tensor, shape: torch.Size) -> None:
    if tensor.shape != shape:
        raise InputError(
            "masks.shape",
            "{name} in {file} must have shape {expected}, got {shape}.",
            name=name,
            file=file,
            expected=tuple(shape),
            shape=tuple(tensor.shape),
        )
    if not tensor.is_floating_point() or not tensor.isfinite().all():
        raise InputError(
            "masks.finite", "{name} in {file} must contain finite floating-point values.", name=name, file=file
        )


def download_vae_oid() -> Path:
    """Return the path of `vae-oid.npz` in the Hugging Face cache; download it if it is not cached.

    Raises:
        OSError: if it cannot be downloaded.
        InputError: if its checksum is not `VAE_OID_SHA256`.
    """
    path = Path(hf_hub_download(VAE_OID_SPACE, "vae-oid.npz", repo_type="space"))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if digest != VAE_OID_SHA256:
        raise InputError(
            "masks.checksum",
            "vae-oid.npz of {space} must have SHA-256 {expected}, got {digest}.",
            space=VAE_OID_SPACE,
            expected=VAE_OID_SHA256,
            digest=digest,
        )
    return path


def _read_file(path: Path) -> dict[str, torch.Tensor]:
    if not path.is_file():
        raise FileNotFoundError(f"Mask decoder not found: {path}.")
    readers: dict[str, Callable[[Path], dict[str, torch.Tensor]]] = {".npz": _read_npz, ".safetensors": load_file}
    if path.suffix not in readers:
        raise InputError(
            "masks.suffix", "A mask decoder must be a .npz or .safetensors file, got {file}.", file=path.name
        )
    try:
        return readers[path.suffix](path)
    except (SafetensorError, zipfile.BadZipFile, ValueError, TypeError, EOFError, KeyError) as error:
        raise InputError("masks.read", "{file} cannot be read: {reason}.", file=path.name, reason=str(error)) from error


def _read_npz(path: Path) -> dict[str, torch.Tensor]:
    with zipfile.ZipFile(path) as archive:
        num_bytes = sum(entry.file_size for entry in archive.infolist())
    if num_bytes > MAX_FILE_BYTES:
        raise ValueError(f"uncompressed size must be <= {MAX_FILE_BYTES} bytes, got {num_bytes}")
    with np.load(path, allow_pickle=False) as arrays:
        return {name: torch.from_numpy(np.asarray(arrays[name])) for name in arrays.files}


# Masks in the image


def paste_mask(mask: np.ndarray, box: Box, width: int, height: int, threshold: float = 0.5) -> np.ndarray | None:
    """Resize a mask to its box (bilinear, as in big_vision's demo) and paste it into an empty image.

    Args:
        mask: (64, 64), values in [0, 1].
        box: (x_min, y_min, x_max, y_max) in pixels; rounded to whole pixels.
        width, height: size of the image in pixels.
        threshold: smallest value inside the object.

    Returns:
        bool (height, width), or None if the rounded box is empty.

    Raises:
        ValueError: if the box exceeds the image.
    """
    x_min, y_min, x_max, y_max = box
    if min(box) < 0 or max(x_min, x_max) > width or max(y_min, y_max) > height:
        raise ValueError(f"box must be within the image of {width} x {height} pixels, got {box}.")
    left, top, right, bottom = round(x_min), round(y_min), round(x_max), round(y_max)
    if right <= left or bottom <= top:
        return None
    small = Image.fromarray(np.asarray(mask, dtype=np.float32))
    resized = small.resize((right - left, bottom - top), Image.Resampling.BILINEAR)
    image = np.zeros((height, width), dtype=bool)
    image[top:bottom, left:right] = np.asarray(resized) >= threshold
    return image


def encode_rle(mask: np.ndarray) -> dict[str, list[int]]:
    """Encode a bool mask (height, width) as COCO's uncompressed RLE: {"size": [height, width], "counts": [...]}.

    The counts are run lengths in column-major order, alternating False and True; the first is of False, so it is 0 if
    the first pixel is True.
    """
    mask = np.asarray(mask)
    if mask.ndim != 2 or mask.dtype != bool:
        raise ValueError(f"mask must be bool (height, width), got {mask.dtype} {mask.shape}.")
    pixels = mask.flatten(order="F")
    changes = np.flatnonzero(np.diff(pixels, prepend=False))
    counts = np.diff(changes, prepend=0, append=pixels.size)
    return {"size": [int(size) for size in mask.shape], "counts": counts.tolist()}


def decode_rle(run_lengths: dict[str, Any]) -> np.ndarray:
    """Decode the result of `encode_rle` to a bool mask (height, width).

    Raises:
        ValueError: if a count is negative or their sum is not height * width.
    """
    height, width = run_lengths["size"]
    counts = np.asarray(run_lengths["counts"], dtype=np.int64)
    if (counts < 0).any() or counts.sum() != height * width:
        raise ValueError(f"counts must be >= 0 and sum to {height * width}, got a sum of {counts.sum()}.")
    values = np.arange(len(counts)) % 2 == 1
    return np.repeat(values, counts).reshape((height, width), order="F")
