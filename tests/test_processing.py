"""Pictures, prompts and streamed text, held against transformers' PaliGemmaProcessor and tokenizers' decode."""

from __future__ import annotations

import json
import math
import random
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PaliGemmaProcessor as ReferenceProcessor
from transformers import PreTrainedTokenizerFast
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from paligemma.benchmarks.tiny_tokenizer import SPECIAL_TOKENS, build_tiny_tokenizer
from paligemma.config import GemmaConfig, PaliGemmaConfig, SiglipVisionConfig
from paligemma.image_processing import ImageSettings, normalize, resize, to_rgb
from paligemma.processing import PaliGemmaProcessor, load_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

REAL_TOKENIZER = Path(__file__).parents[2] / "shared" / "paligemma-tokenizer"
IMAGE_SIZE, NUM_IMAGE_TOKENS = 56, 16
PROMPTS = [
    "",
    " ",
    "caption en",
    "answer en Where is the cow standing?",
    "detect cat ; the cow",
    "segment <loc0012><loc0034><loc1000><loc1023> cat<seg127>",
    "猫在哪里？",
    "ما هذا؟",
    "🐄 and 👨‍👩‍👧",
    "two  spaces   and    more",
    "  leading",
    "trailing ",
    "tab\tand\u00a0nbsp",
    "two\n\nlines\n and\n\n\n\n\n\n\nmore",
    "\nfirst",
    "<b>bold</b> <mask> <unused0> <loc1024> <0x41>",
    "nul \0 inside",
    "▁▁ literal ▁",
    "e\u0301 and é",
    "word " * 300,
]


@pytest.fixture(scope="module")
def processor() -> PaliGemmaProcessor:
    return PaliGemmaProcessor(build_tiny_tokenizer(), IMAGE_SIZE, NUM_IMAGE_TOKENS)


@pytest.fixture(scope="module")
def reference() -> ReferenceProcessor:
    return reference_processor(build_tiny_tokenizer(), IMAGE_SIZE, NUM_IMAGE_TOKENS)


@pytest.fixture(scope="module")
def real_processor() -> PaliGemmaProcessor:
    skip_without_real_tokenizer()
    return PaliGemmaProcessor(load_tokenizer(REAL_TOKENIZER), 224, 256, image_token_id=257152)


@pytest.fixture(scope="module")
def real_reference() -> ReferenceProcessor:
    skip_without_real_tokenizer()
    return reference_processor(load_tokenizer(REAL_TOKENIZER), 224, 256)


def skip_without_real_tokenizer() -> None:
    if not REAL_TOKENIZER.is_dir():
        pytest.skip("the real Gemma tokenizer is not here")


def reference_processor(tokenizer: Tokenizer, image_size: int, num_image_tokens: int) -> ReferenceProcessor:
    images = SiglipImageProcessorPil(size={"height": image_size, "width": image_size})
    images.image_seq_length = num_image_tokens
    names = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}
    texts = PreTrainedTokenizerFast(tokenizer_object=tokenizer, padding_side="left", **names)
    return ReferenceProcessor(images, texts)


def run_reference(
    reference: ReferenceProcessor, images: list, prompts: list[str], **options
) -> dict[str, torch.Tensor]:
    return reference(images=images, text=prompts, return_tensors="pt", padding=True, **options)


def pixel_values(processor: PaliGemmaProcessor, image: Image.Image) -> torch.Tensor:
    return processor.normalize(processor.resize(image))


def noise(width: int, height: int, mode: str = "RGB", seed: int = 0) -> Image.Image:
    channels = len(Image.new(mode, (1, 1)).getbands())
    values = np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)
    return Image.frombytes(mode, (width, height), values.tobytes())


def constant(value: int, size: tuple[int, int] = (30, 20)) -> Image.Image:
    return Image.new("RGB", size, (value,) * 3)


def reopened(image: Image.Image, file_format: str, **options) -> Image.Image:
    file = BytesIO()
    image.save(file, file_format, **options)
    return Image.open(BytesIO(file.getvalue()))


# Pixels


@pytest.mark.parametrize("size", [(1, 1), (1, 500), (500, 1), (3, 3), (5000, 10), (56, 56), (57, 55), (640, 480)])
@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "LA", "CMYK", "YCbCr"])
def test_pixels_equal_the_reference_to_the_bit(processor, reference, size, mode):
    image = noise(*size, mode)
    ours = pixel_values(processor, image)
    theirs = reference.image_processor(images=[image], return_tensors="pt")["pixel_values"][0]
    assert ours.dtype == torch.float32 and ours.shape == (3, IMAGE_SIZE, IMAGE_SIZE)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize(("level", "value"), [(0, -1.0), (127, 127 / 127.5 - 1), (255, 1.0)])
def test_levels_are_scaled_once(level, value):
    assert torch.allclose(normalize(resize(constant(level), 14)), torch.full((3, 14, 14), value), atol=1e-6)


def test_mean_std_and_filter_are_honoured():
    image = noise(9, 9)
    mean, std, bilinear = (0.4, 0.5, 0.6), (0.2, 0.3, 0.4), Image.Resampling.BILINEAR
    reference = SiglipImageProcessorPil(
        size={"height": 28, "width": 28}, image_mean=mean, image_std=std, resample=int(bilinear)
    )
    theirs = reference(images=[image], return_tensors="pt")["pixel_values"][0]
    assert torch.equal(normalize(resize(image, 28, bilinear), mean, std), theirs)


# Any image to RGB


def every_mode() -> dict[str, Image.Image]:
    color = noise(64, 64)
    gray = color.convert("L")
    palette = color.quantize(16)
    transparent_palette = palette.copy()
    transparent_palette.info["transparency"] = 3
    transparent_bytes = palette.copy()
    transparent_bytes.info["transparency"] = bytes(range(16))
    sixteen = np.arange(64 * 64, dtype=np.uint16).reshape(64, 64) * 16
    images = {mode: color.convert(mode) for mode in ("1", "L", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "LAB", "HSV")}
    images |= {"LA": noise(64, 64, "LA"), "La": noise(64, 64, "LA").convert("La"), "RGBa": noise(64, 64, "RGBa")}
    images |= {"P": palette, "P+index": transparent_palette, "P+bytes": transparent_bytes, "PA": palette.convert("PA")}
    images |= {"I": gray.convert("I"), "F": gray.convert("F")}
    for mode, order in (("I;16", "<u2"), ("I;16L", "<u2"), ("I;16B", ">u2"), ("I;16N", "=u2")):
        images[mode] = Image.frombytes(mode, (64, 64), sixteen.astype(order).tobytes())
    return images


@pytest.mark.parametrize("name", every_mode())
def test_every_mode_gives_pixels(processor, name):
    image = every_mode()[name]
    rgb = to_rgb(image)
    assert (rgb.mode, rgb.size) == ("RGB", image.size)
    pixels = pixel_values(processor, image)
    assert torch.isfinite(pixels).all() and pixels.abs().max() <= 1
    assert pixels.std() > 0.01, "the picture is lost"


@pytest.mark.parametrize("mode", ["I;16", "I;16L", "I;16B", "I;16N"])
def test_16_bit_is_scaled_not_clipped(mode):
    values = np.array([[0, 257, 300, 32896, 65278, 65535]], dtype=">u2" if mode == "I;16B" else "<u2")
    image = Image.frombytes(mode, (6, 1), values.tobytes())
    assert [pixel[0] for pixel in pixels_of(to_rgb(image))] == [0, 1, 1, 128, 254, 255]


def test_16_bit_png_keeps_its_shades_and_its_transparency():
    ramp = Image.fromarray(np.linspace(0, 65535, 256, dtype=np.uint16).reshape(1, 256))
    assert np.array_equal(np.asarray(to_rgb(reopened(ramp, "PNG")))[0, :, 1], np.arange(256))
    marked = to_rgb(reopened(ramp, "PNG", transparency=0))
    assert pixels_of(marked)[:2] == [(255, 255, 255), (1, 1, 1)]


@pytest.mark.parametrize(
    ("mode", "values", "levels"),
    [
        ("I", [0, 128, 255], [0, 128, 255]),
        ("I", [0, 32896, 65535], [0, 128, 255]),
        ("I", [-100, 0, 100], [0, 128, 255]),
        ("I", [0, 0, 2**31 - 1], [0, 0, 255]),
        ("I", [-5, -5, -5], [0, 0, 0]),
        ("F", [0.0, 0.5, 1.0], [0, 128, 255]),
        ("F", [0.0, 128.0, 255.0], [0, 128, 255]),
        ("F", [-3e38, 0.0, 3e38], [0, 128, 255]),
        ("F", [float("nan"), 1.0, float("inf")], [0, 255, 255]),
        ("F", [float("nan"), float("-inf"), float("nan")], [0, 0, 0]),
    ],
)
def test_unbounded_grey_is_scaled_by_the_range_it_uses(mode, values, levels):
    image = Image.fromarray(np.array([values], dtype=np.int32 if mode == "I" else np.float32))
    assert image.mode == mode
    assert [pixel[0] for pixel in pixels_of(to_rgb(image))] == levels


@pytest.mark.parametrize("mode", ["RGBA", "LA", "La", "RGBa", "PA"])
def test_full_transparency_is_white(processor, mode):
    invisible = Image.new(mode, (8, 8))
    assert torch.equal(pixel_values(processor, invisible), torch.ones(3, IMAGE_SIZE, IMAGE_SIZE))


def test_a_transparent_color_of_a_file_is_white():
    palette = Image.new("P", (2, 1), 0)
    palette.putpalette([255, 0, 0, 0, 0, 255])
    palette.putpixel((1, 0), 1)
    assert pixels_of(to_rgb(reopened(palette, "PNG", transparency=0))) == [(255, 255, 255), (0, 0, 255)]
    red = reopened(Image.new("RGB", (1, 1), (255, 0, 0)), "PNG", transparency=(255, 0, 0))
    assert pixels_of(to_rgb(red)) == [(255, 255, 255)]


def test_half_transparency_is_mixed_with_white():
    assert pixels_of(to_rgb(Image.new("RGBA", (1, 1), (0, 0, 0, 128)))) == [(127, 127, 127)]


@pytest.mark.parametrize("file_format", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied_once(processor, orientation, file_format):
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {} if file_format in ("PNG", "TIFF") else {"quality": 95}
    stored = reopened(noise(40, 20), file_format, exif=exif, **options)
    upright = ImageOps.exif_transpose(reopened(noise(40, 20), file_format, exif=exif, **options)).convert("RGB")
    assert upright.size == ((20, 40) if orientation >= 5 else (40, 20))
    rgb = to_rgb(stored)
    assert np.array_equal(np.asarray(rgb), np.asarray(upright))
    assert np.array_equal(np.asarray(to_rgb(rgb)), np.asarray(upright)), "turned twice"
    assert torch.equal(pixel_values(processor, stored), pixel_values(processor, Image.fromarray(np.array(upright))))


@pytest.mark.parametrize("exif", [b"garbage", b"Exif\0\0II*\0", b"Exif\0\0II*\0\x08\0\0\0\xff\xff", b""])
@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
def test_damaged_exif_means_upright(exif):
    image = noise(4, 2)
    image.info["exif"] = exif
    assert np.array_equal(np.asarray(to_rgb(image)), np.asarray(image))


@pytest.mark.parametrize("file_format", ["GIF", "WEBP", "PNG", "TIFF"])
def test_first_frame_of_an_animation_wherever_it_stands(file_format):
    frames = [constant(value) for value in (255, 0, 100)]
    options = {"lossless": True} if file_format == "WEBP" else {}
    animation = reopened(frames[0], file_format, save_all=True, append_images=frames[1:], **options)
    assert animation.n_frames == 3
    for position in (0, 2):
        animation.seek(position)
        assert pixels_of(to_rgb(animation))[0] == (255, 255, 255)
        assert animation.tell() == position


def test_to_rgb_leaves_the_callers_image_alone():
    image = noise(5, 3)
    before = image.tobytes()
    to_rgb(image).putpixel((0, 0), (1, 2, 3))
    assert image.tobytes() == before and image.mode == "RGB"


@pytest.mark.parametrize("size", [(0, 0), (0, 5), (5, 0)])
def test_an_image_without_pixels_is_refused(size):
    with pytest.raises(ValueError, match=rf"at least one pixel, got {size[0]} x {size[1]}"):
        to_rgb(Image.new("RGB", size))


@pytest.mark.parametrize("value", [None, "cat.png", np.zeros((4, 4, 3), dtype=np.uint8)])
def test_what_is_no_image_is_refused(value):
    with pytest.raises(ValueError, match="must be a PIL image"):
        to_rgb(value)


@pytest.mark.parametrize("file_format", ["JPEG", "PNG", "GIF", "BMP", "QOI"])
def test_a_truncated_file_is_a_value_error(file_format):
    file = BytesIO()
    noise(64, 64).save(file, file_format)
    truncated = Image.open(BytesIO(file.getvalue()[: len(file.getvalue()) // 2]))
    with pytest.raises(ValueError, match="cannot be decoded"):
        to_rgb(truncated)


def pixels_of(image: Image.Image) -> list[tuple[int, int, int]]:
    return [tuple(map(int, pixel)) for pixel in np.asarray(image).reshape(-1, 3)]


# Prompts


@pytest.mark.parametrize("prompt", PROMPTS)
def test_prompt_ids_equal_the_reference(processor, reference, prompt):
    theirs = run_reference(reference, [constant(0)], [prompt])
    assert processor.encode_prompt(prompt) == theirs["input_ids"][0].tolist()


@pytest.mark.parametrize("prompt", PROMPTS)
def test_real_prompt_ids_equal_the_reference(real_processor, real_reference, prompt):
    theirs = run_reference(real_reference, [constant(0)], [prompt])
    assert real_processor.encode_prompt(prompt) == theirs["input_ids"][0].tolist()


def test_known_ids_of_the_real_tokenizer(real_processor):
    assert real_processor.encode_prompt("") == [257152] * 256 + [2, 108]
    assert real_processor.encode_text("<loc0000><seg127>") == [256000, 257151]
    assert real_processor.encode_text("beach") == [54901]
    assert real_processor.decode([256000, 1, 257151]) == "<loc0000><seg127>"
    assert real_processor.newline_token_id == 108


@pytest.mark.parametrize("ending", ["\n", "\n\n", "\n" * 200, "\r\n", "\n\r\n"])
@pytest.mark.parametrize("prompt", ["", "x", "two\n\nlines", "space "])
def test_newlines_at_the_end_are_dropped(processor, prompt, ending):
    assert processor.encode_prompt(prompt + ending) == processor.encode_prompt(prompt)


def test_real_newlines_at_the_end_do_not_merge(real_processor):
    assert real_processor.encode_prompt("x\n") == real_processor.encode_prompt("x")
    assert real_processor.encode_prompt("x\n")[-2:] == [235297, 108]
    assert real_processor.encode_prompt("\n" * 200) == real_processor.encode_prompt("")


@pytest.mark.parametrize("special", [*SPECIAL_TOKENS, "<image>"])
@pytest.mark.parametrize("prompt", ["{}", "what is {} ?", "{}{}{}", "caption {}\n", "<loc0001>{}"])
def test_special_tokens_in_a_prompt_have_no_power(processor, special, prompt):
    text = prompt.replace("{}", special)
    ids = processor.encode_prompt(text)
    assert ids[:17] == [processor.image_token_id] * 16 + [processor.bos_token_id]
    assert not processor.special_token_ids.intersection(ids[17:])
    assert processor.decode(ids[17:-1]) == text.rstrip("\n"), "the model reads what was written"


def test_real_special_tokens_in_a_prompt_have_no_power(real_processor):
    added = real_processor.tokenizer.get_added_tokens_decoder()
    special = [token.content for token in added.values() if token.special]
    assert {"<bos>", "<image>", "<start_of_turn>"} <= set(special)
    ids = real_processor.encode_prompt(" ".join(special))
    assert not real_processor.special_token_ids.intersection(ids[257:])
    assert real_processor.decode(ids) == " ".join(special) + "\n"


def test_locations_and_segments_are_single_tokens(processor):
    ids = processor.encode_text("<loc0000><loc1023><seg000><seg127>")
    assert [processor.token_str(number) for number in ids] == ["<loc0000>", "<loc1023>", "<seg000>", "<seg127>"]


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb", "\ud83d\ud83d", "\0", "a\0b"])
def test_odd_characters_do_not_crash(processor, text):
    readable = "".join("\ufffd" if "\ud800" <= character <= "\udfff" else character for character in text)
    assert processor.decode(processor.encode_text(text)) == readable


@pytest.mark.parametrize("prompt", [None, 3, b"caption"])
def test_a_prompt_must_be_text(processor, prompt):
    with pytest.raises(ValueError, match="prompt must be text"):
        processor.encode_prompt(prompt)


# Batches


def test_a_batch_equals_the_reference(processor, reference):
    images = [noise(30, 20), noise(64, 64, "RGBA"), noise(10, 90, "L")]
    prompts = ["caption en", "", "detect the cat ; cow"]
    ours, theirs = processor(images, prompts), run_reference(reference, images, prompts)
    assert list(ours) == ["pixel_values", "input_ids", "attention_mask"]
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype
        assert torch.equal(tensor, theirs[name]), name
    assert ours["attention_mask"].sum(dim=1).tolist() == [len(processor.encode_prompt(prompt)) for prompt in prompts]


@pytest.mark.parametrize("suffix", [["cat", "", "the blue square <loc0001>"], ["\n", "猫在", "a\n\nb "]])
def test_training_rows_equal_the_reference(processor, reference, suffix):
    images, prompts = [constant(9)] * 3, ["caption en", "answer en what?", ""]
    ours, theirs = processor(images, prompts, suffix=suffix), run_reference(reference, images, prompts, suffix=suffix)
    for name in ("input_ids", "attention_mask", "token_type_ids", "labels"):
        assert torch.equal(ours[name], theirs[name]), name
    assert (ours["labels"][:, -1] == processor.eos_token_id).all()


def test_known_labels_of_the_real_tokenizer(real_processor):
    suffix = ["beach", "cow standing on the beach"]
    labels = real_processor([constant(0)] * 2, ["", "caption en"], suffix=suffix)["labels"]
    assert labels[0][labels[0] != -100].tolist() == [54901, 1]
    assert labels[1][labels[1] != -100].tolist() == [14706, 9980, 611, 573, 8318, 1]


def test_a_suffix_cannot_end_itself(processor):
    labels = processor([constant(0)], ["x"], suffix=["a<eos>b<pad>"])["labels"]
    assert (labels == processor.eos_token_id).sum() == 1


@pytest.mark.parametrize(
    ("images", "prompts", "suffix", "message"),
    [
        ([], [], None, "batch is empty"),
        ([constant(0)], ["a", "b"], None, "1 images for 2 prompts"),
        ([constant(0)], ["a"], ["b", "c"], "2 suffix for 1 prompts"),
        ([constant(0)], "a", None, "prompts must be a list"),
        (constant(0), ["a"], None, "images must be a list"),
        ([None], ["a"], None, "must be a PIL image"),
        ([constant(0)], [None], None, "prompt must be text"),
    ],
)
def test_a_bad_batch_is_refused(processor, images, prompts, suffix, message):
    with pytest.raises(ValueError, match=message):
        processor(images, prompts, suffix=suffix)


# Text while streaming


def stream(processor: PaliGemmaProcessor, token_ids: list[int]) -> list[str]:
    decoder = processor.stream_decoder()
    return [decoder.push(number) for number in token_ids] + [decoder.finish()]


def random_ids(processor: PaliGemmaProcessor, vocab_rows: int, generator: random.Random) -> list[int]:
    """Ids in short runs: any piece, bytes (valid characters and not), CJK and emoji, locations, specials, no piece."""
    bytes_start = processor.tokenizer.token_to_id("<0x00>")
    first_location = processor.tokenizer.token_to_id("<loc0000>")
    specials = sorted(processor.special_token_ids)

    def run() -> list[int]:
        kind = generator.randrange(7)
        if kind == 0:
            return [generator.randrange(vocab_rows) for _ in range(generator.randint(1, 4))]
        if kind == 1:
            return [bytes_start + generator.randrange(256) for _ in range(generator.randint(1, 3))]
        if kind == 2:
            character = generator.choice(["é", "牛", "🐄", "؟", "☃", "\u0301", "A"])
            return [bytes_start + byte for byte in character.encode()]
        if kind == 3:
            return processor.encode_text(generator.choice(["  the cat", "猫在 ", "🐄👨‍👩‍👧", "\n\n x", "▁"]))
        if kind == 4:
            return [first_location + generator.randrange(1152) for _ in range(generator.randint(1, 4))]
        if kind == 5:
            return [generator.choice(specials)]
        return [vocab_rows + generator.randrange(100)]

    return [number for _ in range(generator.randint(0, 12)) for number in run()]


def assert_stream_equals_decode(processor: PaliGemmaProcessor, vocab_rows: int, count: int) -> None:
    generator = random.Random(0)
    for _ in range(count):
        ids = random_ids(processor, vocab_rows, generator)
        assert "".join(stream(processor, ids)) == processor.decode(ids), ids


def test_streamed_text_equals_the_whole_decode(processor):
    assert_stream_equals_decode(processor, 1568, count=3000)


def test_streamed_text_equals_the_whole_decode_with_the_real_tokenizer(real_processor):
    assert_stream_equals_decode(real_processor, 257153, count=2000)


def test_every_single_id_streams_as_it_decodes(processor):
    for number in range(1570):
        assert "".join(stream(processor, [number])) == processor.decode([number])


def test_bytes_are_held_until_the_character_is_whole(processor):
    bytes_start = processor.tokenizer.token_to_id("<0x00>")
    cow = [bytes_start + byte for byte in "🐄".encode()]
    cat = processor.encode_text(" cat")
    assert stream(processor, cow + cat) == ["", "", "", "", "🐄 cat", ""]
    assert stream(processor, cow) == ["", "", "", "", "🐄"]
    assert stream(processor, cow[:3] + cat) == ["", "", "", "\ufffd" * 3 + " cat", ""]
    assert stream(processor, cow[:2]) == ["", "", "\ufffd" * 2]


def test_a_special_token_does_not_end_a_run_of_bytes(processor):
    bytes_start = processor.tokenizer.token_to_id("<0x00>")
    first, *rest = (bytes_start + byte for byte in "é".encode())
    ids = [first, processor.pad_token_id, 99_999, *rest]
    assert "".join(stream(processor, ids)) == processor.decode(ids) == "é"


def test_locations_are_shown_at_once(processor):
    ids = processor.encode_text("<loc0001><loc0500><seg003>" * 7)
    assert stream(processor, ids) == [processor.token_str(number) for number in ids] + [""]


def test_specials_are_never_shown_and_spaces_stay(processor):
    ids = [processor.bos_token_id, *processor.encode_text(" cat  cow"), processor.eos_token_id]
    assert stream(processor, ids)[0] == "" and stream(processor, ids)[-2:] == ["", ""]
    assert "".join(stream(processor, ids)) == " cat  cow"


def test_finish_leaves_nothing_behind(processor):
    decoder = processor.stream_decoder()
    decoder.push(processor.tokenizer.token_to_id("<0xFF>"))
    assert (decoder.finish(), decoder.finish()) == ("\ufffd", "")


# Pieces


def test_pieces_are_raw(processor):
    names = ["▁cat", "<0xE4>", "<loc0001>", "\n", "<bos>"]
    assert [processor.token_str(processor.tokenizer.token_to_id(name)) for name in names] == names


@pytest.mark.parametrize("number", [1568, 257200, -1, 2**40])
def test_an_id_without_a_piece_has_a_name(processor, number):
    assert processor.token_str(number) == f"<id {number}>"
    assert not processor.has_token(number)


def test_image_token_and_rows_without_a_piece_are_not_sampleable(processor):
    allowed = processor.allowed_tokens(1600)
    assert allowed.dtype == torch.bool and allowed.shape == (1600,)
    assert allowed[:1567].all() and not allowed[1567:].any()
    assert processor.image_token_id == 1567


def test_real_sampleable_rows(real_processor):
    allowed = real_processor.allowed_tokens(257216)
    assert allowed[:257152].all() and not allowed[257152:].any()
    assert real_processor.allowed_tokens(257152).all()


def test_a_model_with_too_few_rows_is_refused(processor):
    with pytest.raises(ValueError, match="go up to 1566, the model has 1000 rows"):
        processor.allowed_tokens(1000)


# Files


def tiny_config(image_token: int = 1567) -> PaliGemmaConfig:
    vision = SiglipVisionConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, image_size=56, patch_size=14
    )
    text = GemmaConfig(
        vocab_size=1600, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, head_dim=8
    )
    return PaliGemmaConfig(vision_config=vision, text_config=text, image_token_index=image_token)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    build_tiny_tokenizer().save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def write_settings(folder: Path, name: str = "preprocessor_config.json", **settings: object) -> None:
    (folder / name).write_text(json.dumps(settings), encoding="utf-8")


def test_a_folder_gives_the_same_processor(folder, processor):
    loaded = PaliGemmaProcessor.from_folder(folder, tiny_config())
    assert loaded.encode_prompt("detect cat") == processor.encode_prompt("detect cat")
    assert torch.equal(pixel_values(loaded, noise(9, 9)), pixel_values(processor, noise(9, 9)))


def test_padding_and_truncation_saved_in_a_tokenizer_are_switched_off(tmp_path, processor):
    tokenizer = build_tiny_tokenizer()
    tokenizer.enable_padding(length=50)
    tokenizer.enable_truncation(2)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    loaded = PaliGemmaProcessor.from_folder(tmp_path, tiny_config())
    assert loaded.encode_text("caption the cat") == processor.encode_text("caption the cat")


def test_what_the_hub_and_transformers_write_is_understood(folder, reference):
    hub = {"do_convert_rgb": None, "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "resample": 3, "do_resize": True}
    write_settings(folder, **hub, rescale_factor=0.00392156862745098, size={"height": 56, "width": 56})
    assert PaliGemmaProcessor.from_folder(folder, tiny_config()).image_settings == ImageSettings()
    (folder / "preprocessor_config.json").unlink()
    reference.save_pretrained(folder)
    assert (folder / "processor_config.json").exists()
    loaded = PaliGemmaProcessor.from_folder(folder, tiny_config())
    assert loaded.image_settings == ImageSettings()
    assert (
        loaded.encode_prompt("cat <b> x")
        == run_reference(reference, [constant(0)], ["cat <b> x"])["input_ids"][0].tolist()
    )


def test_other_mean_std_and_filter_are_read(folder):
    write_settings(folder, image_mean=[0.1, 0.2, 0.3], image_std=0.25, resample=2)
    settings = PaliGemmaProcessor.from_folder(folder, tiny_config()).image_settings
    assert settings == ImageSettings(mean=(0.1, 0.2, 0.3), std=(0.25,) * 3, resample=2)


@pytest.mark.parametrize(
    "settings",
    [
        {"do_resize": False},
        {"do_rescale": False},
        {"do_normalize": False},
        {"do_center_crop": True},
        {"do_pad": True},
        {"rescale_factor": 1.0},
        {"size": {"height": 224, "width": 224}},
        {"size": {"shortest_edge": 56}},
        {"resample": 9},
        {"image_mean": [0.5, 0.5]},
        {"image_std": [0.5, 0.5, 0.0]},
        {"image_mean": [None, None, None]},
        {"image_mean": "0.5"},
        {"image_std": {"r": 0.5}},
        {"image_std": math.inf},
        {"rescale_factor": "1/255"},
        {"rescale_factor": [1 / 255]},
    ],
)
def test_a_step_that_we_do_not_do_is_refused(folder, settings):
    write_settings(folder, **settings)
    with pytest.raises(ValueError, match=next(iter(settings))):
        PaliGemmaProcessor.from_folder(folder, tiny_config())


@pytest.mark.parametrize("settings", ["none", [1], 0.5])
def test_settings_of_transformers_5_must_be_an_object(folder, settings):
    (folder / "processor_config.json").write_text(json.dumps({"image_processor": settings}), encoding="utf-8")
    with pytest.raises(ValueError, match="must be an object"):
        PaliGemmaProcessor.from_folder(folder, tiny_config())


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_damaged_preprocessor_file_is_named(folder, text):
    (folder / "preprocessor_config.json").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=r"preprocessor_config\.json"):
        PaliGemmaProcessor.from_folder(folder, tiny_config())


def test_a_missing_tokenizer_says_what_to_do(tmp_path):
    with pytest.raises(ValueError, match=r"tokenizer\.json is missing: .*download it"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(ValueError, match=r"tokenizer\.model only\. Convert it"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("text", ["", "{}", "no json"])
def test_a_damaged_tokenizer_is_named(tmp_path, text):
    (tmp_path / "tokenizer.json").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=r"tokenizer\.json cannot be read"):
        load_tokenizer(tmp_path)


def test_another_image_token_in_the_configuration_is_refused(folder):
    with pytest.raises(ValueError, match="1500 in the configuration and 1567 in the tokenizer"):
        PaliGemmaProcessor.from_folder(folder, tiny_config(image_token=1500))


def without_image_token() -> Tokenizer:
    return Tokenizer(models.BPE({"<pad>": 0, "<eos>": 1, "<bos>": 2}, []))


def with_stripping_decoder() -> Tokenizer:
    tokenizer = build_tiny_tokenizer()
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def with_metaspace_decoder() -> Tokenizer:
    tokenizer = build_tiny_tokenizer()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def without_newline() -> Tokenizer:
    vocabulary = {"<pad>": 0, "<eos>": 1, "<bos>": 2, "<image>": 3, "<unk>": 4}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>"))
    tokenizer.add_special_tokens([AddedToken("<unk>", special=True)])
    tokenizer.decoder = build_tiny_tokenizer().decoder
    return tokenizer


def that_merges_special_tokens() -> Tokenizer:
    pieces = ["<pad>", "<eos>", "<image>", *"<bos>", "<b", "<bo", "<bos", "<bos>"]
    merges = [("<", "b"), ("<b", "o"), ("<bo", "s"), ("<bos", ">")]
    return Tokenizer(models.BPE({piece: number for number, piece in enumerate(pieces)}, merges))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (without_image_token, "has no <image>; PaliGemma needs"),
        (with_stripping_decoder, "joins"),
        (with_metaspace_decoder, "joins"),
        (without_newline, "newline"),
        (that_merges_special_tokens, "cannot spell"),
    ],
)
def test_a_tokenizer_that_does_not_fit_is_refused(build, message):
    with pytest.raises(ValueError, match=message):
        PaliGemmaProcessor(build(), IMAGE_SIZE, NUM_IMAGE_TOKENS)


def test_control_tokens_saved_without_the_special_mark_get_it(tmp_path, processor):
    data = json.loads(build_tiny_tokenizer().to_str())
    for token in data["added_tokens"]:
        token["special"] = False
    loaded = PaliGemmaProcessor(Tokenizer.from_str(json.dumps(data)), IMAGE_SIZE, NUM_IMAGE_TOKENS)
    assert loaded.encode_prompt("<bos><image> cat") == processor.encode_prompt("<bos><image> cat")
    assert loaded.decode([loaded.bos_token_id, loaded.image_token_id]) == ""


@pytest.mark.parametrize(
    "numbers", [{"image_size": 0, "num_image_tokens": 1}, {"image_size": 1, "num_image_tokens": 0}]
)
def test_sizes_below_one_are_refused(numbers):
    with pytest.raises(ValueError, match="must be at least 1"):
        PaliGemmaProcessor(build_tiny_tokenizer(), **numbers)
