"""The mask decoder against an independent NumPy implementation, its weight files, pasting and RLE."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from paligemma.masks import MaskDecoder, decode_rle, encode_rle, paste_mask

RESIDUAL_SHAPES = {0: (128, 128, 3, 3), 2: (128, 128, 3, 3), 4: (128, 128, 1, 1)}
SHAPES = {"_vq_vae._embedding": (128, 512), "decoder.0.weight": (128, 512, 1, 1), "decoder.0.bias": (128,)}
SHAPES |= {f"decoder.{block}.net.{i}.weight": shape for block in (2, 3) for i, shape in RESIDUAL_SHAPES.items()}
SHAPES |= {f"decoder.{block}.net.{i}.bias": (128,) for block in (2, 3) for i in RESIDUAL_SHAPES}
for layer, (width_in, width_out) in {4: (128, 128), 6: (128, 64), 8: (64, 32), 10: (32, 16)}.items():
    SHAPES |= {f"decoder.{layer}.weight": (width_in, width_out, 4, 4), f"decoder.{layer}.bias": (width_out,)}
SHAPES |= {"decoder.12.weight": (1, 16, 1, 1), "decoder.12.bias": (1,)}

Arrays = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def arrays() -> Arrays:
    """Random parameters with the names and shapes of vae-oid.npz, scaled so that activations do not vanish."""
    rng = np.random.default_rng(0)
    scaled = {name: rng.normal(size=shape) / np.sqrt(np.prod(shape[1:])) for name, shape in SHAPES.items()}
    scaled["_vq_vae._embedding"] *= 10
    return {name: array.astype(np.float32) for name, array in scaled.items()}


@pytest.fixture
def npz(arrays: Arrays, tmp_path: Path) -> Path:
    return write_npz(tmp_path / "vae-oid.npz", arrays)


def write_npz(path: Path, arrays: Arrays) -> Path:
    np.savez(path, **arrays)
    return path


def numpy_conv(x: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """Convolution with "same" padding: x (channels, height, width), weight (out, in, k, k)."""
    size = weight.shape[-1]
    padded = np.pad(x, ((0, 0), (size // 2,) * 2, (size // 2,) * 2))
    height, width = x.shape[1:]
    total = sum(
        np.einsum("oi,ihw->ohw", weight[:, :, row, col], padded[:, row : row + height, col : col + width])
        for row in range(size)
        for col in range(size)
    )
    return total + bias[:, None, None]


def numpy_upsample(x: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """Transposed convolution by definition: each input pixel adds a scaled 4 x 4 kernel, with stride 2."""
    height, width = x.shape[1:]
    canvas = np.zeros((weight.shape[1], 2 * height + 2, 2 * width + 2))
    for row in range(height):
        for col in range(width):
            stamp = np.einsum("i,iohw->ohw", x[:, row, col], weight)
            canvas[:, 2 * row : 2 * row + 4, 2 * col : 2 * col + 4] += stamp
    return canvas[:, 1:-1, 1:-1] + bias[:, None, None]


def numpy_decode(arrays: Arrays, codes: list[int]) -> np.ndarray:
    """Decode 16 codes to a mask (64, 64) in float64, written from the architecture's description."""
    arrays = {name: array.astype(np.float64) for name, array in arrays.items()}

    def layer(function, x: np.ndarray, name: str) -> np.ndarray:
        return function(x, arrays[f"{name}.weight"], arrays[f"{name}.bias"])

    def relu(x: np.ndarray) -> np.ndarray:
        return np.maximum(x, 0)

    x = arrays["_vq_vae._embedding"][codes].reshape(4, 4, 512).transpose(2, 0, 1)
    x = relu(layer(numpy_conv, x, "decoder.0"))
    for block in ("decoder.2.net", "decoder.3.net"):
        inner = relu(layer(numpy_conv, x, f"{block}.0"))
        inner = relu(layer(numpy_conv, inner, f"{block}.2"))
        x = x + layer(numpy_conv, inner, f"{block}.4")
    for index in (4, 6, 8, 10):
        x = relu(layer(numpy_upsample, x, f"decoder.{index}"))
    return np.clip(layer(numpy_conv, x, "decoder.12")[0] * 0.5 + 0.5, 0, 1)


def test_parameter_names_and_shapes_are_those_of_vae_oid() -> None:
    assert {name: tuple(value.shape) for name, value in MaskDecoder().named_parameters()} == SHAPES


def test_decode_matches_numpy_implementation(npz: Path, arrays: Arrays) -> None:
    codes = np.random.default_rng(1).integers(0, 128, (3, 16))
    masks = MaskDecoder.load(npz).decode(codes)
    assert masks.shape == (3, 64, 64) and masks.dtype == np.float32
    expected = np.stack([numpy_decode(arrays, row) for row in codes.tolist()])
    assert expected.std() > 0.05
    np.testing.assert_allclose(masks, expected, atol=1e-5)


def test_npz_and_float16_safetensors_give_the_same_masks(npz: Path, arrays: Arrays, tmp_path: Path) -> None:
    path = tmp_path / "mask_decoder.safetensors"
    save_file({name: array.astype(np.float16) for name, array in arrays.items()}, path)
    codes = [list(range(16))]
    np.testing.assert_allclose(MaskDecoder.load(npz).decode(codes), MaskDecoder.load(path).decode(codes), atol=0.01)


def test_no_codes_give_no_masks(npz: Path) -> None:
    assert MaskDecoder.load(npz).decode(torch.zeros(0, 16, dtype=torch.long)).shape == (0, 64, 64)


@pytest.mark.parametrize(
    "codes", [[0] * 16, [[0] * 15], [[0] * 17], [[128] * 16], [[-1] * 16], [[0.0] * 16], np.zeros((1, 16), bool)]
)
def test_invalid_codes_are_rejected(codes: list) -> None:
    with pytest.raises(ValueError, match="codes must"):
        MaskDecoder().decode(codes)


def test_encoder_and_training_counters_are_ignored(arrays: Arrays, tmp_path: Path) -> None:
    extra = {"encoder.0.weight": np.zeros((2, 2)), "_vq_vae._ema_w": np.zeros(3)}
    MaskDecoder.load(write_npz(tmp_path / "full.npz", arrays | extra))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"decoder.0.bias": None}, "missing parameters: decoder.0.bias; unexpected parameters: none"),
        ({"decoder.14.bias": np.zeros(1)}, "missing parameters: none; unexpected parameters: decoder.14.bias"),
        ({"decoder.12.bias": np.zeros(2)}, r"decoder.12.bias .* must have shape \(1,\), got \(2,\)"),
        ({"decoder.12.bias": np.array([np.nan])}, "must contain finite"),
        ({"decoder.12.bias": np.array([1])}, "must contain finite floating-point"),
    ],
)
def test_invalid_parameters_are_rejected(arrays: Arrays, tmp_path: Path, change: Arrays, message: str) -> None:
    changed = {name: array for name, array in (arrays | change).items() if array is not None}
    with pytest.raises(ValueError, match=message):
        MaskDecoder.load(write_npz(tmp_path / "other.npz", changed))


def test_pickled_arrays_are_rejected(arrays: Arrays, tmp_path: Path) -> None:
    pickled = arrays | {"decoder.0.bias": np.array([{}], dtype=object)}
    with pytest.raises(ValueError, match="allow_pickle"):
        MaskDecoder.load(write_npz(tmp_path / "pickled.npz", pickled))


@pytest.mark.parametrize("name", ["broken.npz", "broken.safetensors", "broken.bin"])
def test_unreadable_file_is_rejected(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"not a mask decoder")
    with pytest.raises(ValueError, match=name):
        MaskDecoder.load(tmp_path / name)


def test_truncated_npz_is_rejected(npz: Path) -> None:
    npz.write_bytes(npz.read_bytes()[:10000])
    with pytest.raises(ValueError, match="cannot be read"):
        MaskDecoder.load(npz)


def test_zip_bomb_is_rejected_before_decompression(tmp_path: Path) -> None:
    path = tmp_path / "bomb.npz"
    np.savez_compressed(path, **{"decoder.0.bias": np.zeros(2**23)})
    with pytest.raises(ValueError, match="uncompressed size"):
        MaskDecoder.load(path)


def test_missing_file_is_named_in_the_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"absent\.npz"):
        MaskDecoder.load(tmp_path / "absent.npz")


def test_paste_mask_fills_the_box() -> None:
    mask = np.zeros((64, 64), dtype=np.float32)
    mask[:, 32:] = 1
    image = paste_mask(mask, (10, 4, 30, 10), width=50, height=20)
    assert image.shape == (20, 50) and image.dtype == bool
    expected = np.zeros((20, 50), dtype=bool)
    expected[4:10, 20:30] = True
    np.testing.assert_array_equal(image, expected)


def test_paste_mask_threshold_moves_the_outline() -> None:
    mask = np.tile(np.linspace(0, 1, 64, dtype=np.float32), (64, 1))
    areas = [paste_mask(mask, (0, 0, 64, 64), 64, 64, threshold).sum() for threshold in (0.25, 0.5, 0.75)]
    assert areas == [48 * 64, 32 * 64, 16 * 64]


@pytest.mark.parametrize("box", [(5, 5, 5, 9), (5, 5, 9, 5), (5.1, 2, 5.4, 9), (9, 2, 5, 9)])
def test_empty_box_has_no_mask(box: tuple) -> None:
    assert paste_mask(np.ones((64, 64)), box, 20, 20) is None


@pytest.mark.parametrize("box", [(-1, 0, 5, 5), (0, 0, 21, 5), (0, -1, 5, 5), (0, 0, 5, 11)])
def test_box_outside_the_image_is_rejected(box: tuple) -> None:
    with pytest.raises(ValueError, match="within the image"):
        paste_mask(np.ones((64, 64)), box, 20, 10)


def test_rle_is_column_major_and_starts_with_false() -> None:
    mask = np.array([[0, 1, 1], [0, 0, 1]], dtype=bool)
    assert encode_rle(mask) == {"size": [2, 3], "counts": [2, 1, 1, 2]}
    assert encode_rle(~mask) == {"size": [2, 3], "counts": [0, 2, 1, 1, 2]}


@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (40, 1), (1, 40), (0, 4)])
@pytest.mark.parametrize("share", [0, 0.1, 0.5, 1])
def test_rle_round_trip(shape: tuple[int, int], share: float) -> None:
    mask = np.random.default_rng(0).random(shape) < share
    np.testing.assert_array_equal(decode_rle(encode_rle(mask)), mask)


def test_invalid_rle_is_rejected() -> None:
    with pytest.raises(ValueError, match="sum to 6"):
        decode_rle({"size": [2, 3], "counts": [2, 1]})
    with pytest.raises(ValueError, match="sum to 6"):
        decode_rle({"size": [2, 3], "counts": [8, -2]})
    with pytest.raises(ValueError, match="bool"):
        encode_rle(np.zeros((2, 3)))


def test_bundled_decoder_loads_and_is_small() -> None:
    path = Path(__file__).parent.parent / "assets" / "demo" / "mask_decoder.safetensors"
    assert path.stat().st_size <= 2.6e6
    masks = MaskDecoder.load(path).decode(np.arange(128).reshape(8, 16))
    assert masks.shape == (8, 64, 64) and masks.min() < 0.5 < masks.max()
