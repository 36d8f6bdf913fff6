"""Images, prompts and streamed text against transformers' PaliGemmaProcessor and tokenizers' decode."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer
from transformers import PaliGemmaProcessor as ReferenceProcessor
from transformers import PreTrainedTokenizerFast
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from paligemma.benchmarks.tiny_tokenizer import SPECIAL_TOKENS, build_tiny_tokenizer
from paligemma.config import GemmaConfig, PaliGemmaConfig, SiglipVisionConfig
from paligemma.image_processing import ImageSettings
from paligemma.processing import PaliGemmaProcessor, load_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

GEMMA_TOKENIZER = Path(__file__).parents[2] / "shared" / "paligemma-tokenizer"
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
def gemma_processor() -> PaliGemmaProcessor:
    skip_without_gemma_tokenizer()
    return PaliGemmaProcessor(load_tokenizer(GEMMA_TOKENIZER), 224, 256, image_token_id=257152)


@pytest.fixture(scope="module")
def gemma_reference() -> ReferenceProcessor:
    skip_without_gemma_tokenizer()
    return reference_processor(load_tokenizer(GEMMA_TOKENIZER), 224, 256)


def skip_without_gemma_tokenizer() -> None:
    if not GEMMA_TOKENIZER.is_dir():
        pytest.skip("the Gemma tokenizer is not available")


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


def noise(width: int, height: int, mode: str = "RGB") -> Image.Image:
    channels = len(Image.new(mode, (1, 1)).getbands())
    values = np.random.default_rng(0).integers(0, 256, (height, width, channels), dtype=np.uint8)
    return Image.frombytes(mode, (width, height), values.tobytes())


def constant(value: int, size: tuple[int, int] = (30, 20)) -> Image.Image:
    return Image.new("RGB", size, (value,) * 3)


# Prompts


@pytest.mark.parametrize("prompt", PROMPTS)
def test_prompt_ids_equal_the_reference(processor, reference, prompt):
    theirs = run_reference(reference, [constant(0)], [prompt])
    assert processor.encode_prompt(prompt) == theirs["input_ids"][0].tolist()


@pytest.mark.parametrize("prompt", PROMPTS)
def test_prompt_ids_equal_the_reference_with_the_gemma_tokenizer(gemma_processor, gemma_reference, prompt):
    theirs = run_reference(gemma_reference, [constant(0)], [prompt])
    assert gemma_processor.encode_prompt(prompt) == theirs["input_ids"][0].tolist()


def test_known_ids_of_the_gemma_tokenizer(gemma_processor):
    assert gemma_processor.encode_prompt("") == [257152] * 256 + [2, 108]
    assert gemma_processor.encode_text("<loc0000><seg127>") == [256000, 257151]
    assert gemma_processor.encode_text("beach") == [54901]
    assert gemma_processor.decode([256000, 1, 257151]) == "<loc0000><seg127>"
    assert gemma_processor.newline_token_id == 108


@pytest.mark.parametrize("ending", ["\n", "\n\n", "\n" * 200, "\r\n", "\n\r\n"])
@pytest.mark.parametrize("prompt", ["", "x", "two\n\nlines", "space "])
def test_trailing_newlines_are_removed(processor, prompt, ending):
    assert processor.encode_prompt(prompt + ending) == processor.encode_prompt(prompt)


def test_trailing_newlines_are_removed_with_the_gemma_tokenizer(gemma_processor):
    assert gemma_processor.encode_prompt("x\n") == gemma_processor.encode_prompt("x")
    assert gemma_processor.encode_prompt("x\n")[-2:] == [235297, 108]
    assert gemma_processor.encode_prompt("\n" * 200) == gemma_processor.encode_prompt("")


@pytest.mark.parametrize("special", [*SPECIAL_TOKENS, "<image>"])
@pytest.mark.parametrize("prompt", ["{}", "what is {} ?", "{}{}{}", "caption {}\n", "<loc0001>{}"])
def test_special_tokens_in_a_prompt_are_ordinary_characters(processor, special, prompt):
    text = prompt.replace("{}", special)
    ids = processor.encode_prompt(text)
    assert ids[:17] == [processor.image_token_id] * 16 + [processor.bos_token_id]
    assert not processor.special_token_ids.intersection(ids[17:])
    assert processor.decode(ids[17:-1]) == text.rstrip("\n")


def test_special_tokens_of_the_gemma_tokenizer_are_ordinary_characters(gemma_processor):
    added = gemma_processor.tokenizer.get_added_tokens_decoder()
    special = [token.content for token in added.values() if token.special]
    assert {"<bos>", "<image>", "<start_of_turn>"} <= set(special)
    ids = gemma_processor.encode_prompt(" ".join(special))
    assert not gemma_processor.special_token_ids.intersection(ids[257:])
    assert gemma_processor.decode(ids) == " ".join(special) + "\n"


def test_location_and_mask_tokens_are_single_tokens(processor):
    ids = processor.encode_text("<loc0000><loc1023><seg000><seg127>")
    assert [processor.token_str(token_id) for token_id in ids] == ["<loc0000>", "<loc1023>", "<seg000>", "<seg127>"]


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb", "\ud83d\ud83d", "\0", "a\0b"])
def test_lone_surrogates_and_null_characters(processor, text):
    expected = "".join("\ufffd" if "\ud800" <= character <= "\udfff" else character for character in text)
    assert processor.decode(processor.encode_text(text)) == expected


@pytest.mark.parametrize("prompt", [None, 3, b"caption"])
def test_prompt_must_be_a_string(processor, prompt):
    with pytest.raises(ValueError, match="prompt must be a string"):
        processor.encode_prompt(prompt)


# Batches


def test_batch_equals_the_reference(processor, reference):
    images = [noise(30, 20), noise(64, 64, "RGBA"), noise(10, 90, "L")]
    prompts = ["caption en", "", "detect the cat ; cow"]
    ours, theirs = processor(images, prompts), run_reference(reference, images, prompts)
    assert list(ours) == ["pixel_values", "input_ids", "attention_mask"]
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype
        assert torch.equal(tensor, theirs[name]), name
    assert ours["attention_mask"].sum(dim=1).tolist() == [len(processor.encode_prompt(prompt)) for prompt in prompts]


@pytest.mark.parametrize("suffix", [["cat", "", "the blue square <loc0001>"], ["\n", "猫在", "a\n\nb "]])
def test_batch_with_suffix_equals_the_reference(processor, reference, suffix):
    images, prompts = [constant(9)] * 3, ["caption en", "answer en what?", ""]
    ours, theirs = processor(images, prompts, suffix=suffix), run_reference(reference, images, prompts, suffix=suffix)
    for name in ("input_ids", "attention_mask", "token_type_ids", "labels"):
        assert torch.equal(ours[name], theirs[name]), name
    assert (ours["labels"][:, -1] == processor.eos_token_id).all()


def test_known_labels_of_the_gemma_tokenizer(gemma_processor):
    suffix = ["beach", "cow standing on the beach"]
    labels = gemma_processor([constant(0)] * 2, ["", "caption en"], suffix=suffix)["labels"]
    assert labels[0][labels[0] != -100].tolist() == [54901, 1]
    assert labels[1][labels[1] != -100].tolist() == [14706, 9980, 611, 573, 8318, 1]


def test_eos_in_a_suffix_is_ordinary_characters(processor):
    labels = processor([constant(0)], ["x"], suffix=["a<eos>b<pad>"])["labels"]
    assert (labels == processor.eos_token_id).sum() == 1


@pytest.mark.parametrize(
    ("images", "prompts", "suffix", "message"),
    [
        ([], [], None, "batch must have at least one"),
        ([constant(0)], ["a", "b"], None, r"images must have the length of prompts \(2\), got 1"),
        ([constant(0)], ["a"], ["b", "c"], r"suffix must have the length of prompts \(1\), got 2"),
        ([constant(0)], "a", None, "prompts must be a list"),
        (constant(0), ["a"], None, "images must be a list"),
        ([None], ["a"], None, "must be a PIL image"),
        ([constant(0)], [None], None, "prompt must be a string"),
    ],
)
def test_invalid_batch_is_rejected(processor, images, prompts, suffix, message):
    with pytest.raises(ValueError, match=message):
        processor(images, prompts, suffix=suffix)


# Streamed text


def stream(processor: PaliGemmaProcessor, token_ids: list[int]) -> list[str]:
    decoder = processor.stream_decoder()
    return [decoder.push(token_id) for token_id in token_ids] + [decoder.finish()]


def random_ids(processor: PaliGemmaProcessor, vocab_size: int, generator: random.Random) -> list[int]:
    """Concatenate short runs of ids of every kind, among them valid and invalid UTF-8 bytes and unknown ids."""
    bytes_start = processor.tokenizer.token_to_id("<0x00>")
    first_location = processor.tokenizer.token_to_id("<loc0000>")
    special_ids = sorted(processor.special_token_ids)

    def run() -> list[int]:
        kind = generator.randrange(7)
        if kind == 0:
            return [generator.randrange(vocab_size) for _ in range(generator.randint(1, 4))]
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
            return [generator.choice(special_ids)]
        return [vocab_size + generator.randrange(100)]

    return [token_id for _ in range(generator.randint(0, 12)) for token_id in run()]


def assert_stream_equals_decode(processor: PaliGemmaProcessor, vocab_size: int, count: int) -> None:
    generator = random.Random(0)
    for _ in range(count):
        ids = random_ids(processor, vocab_size, generator)
        assert "".join(stream(processor, ids)) == processor.decode(ids), ids


def test_streamed_text_equals_decode(processor):
    assert_stream_equals_decode(processor, 1568, count=3000)


def test_streamed_text_equals_decode_with_the_gemma_tokenizer(gemma_processor):
    assert_stream_equals_decode(gemma_processor, 257153, count=2000)


def test_every_single_id_streams_as_decoded(processor):
    for token_id in range(1570):
        assert "".join(stream(processor, [token_id])) == processor.decode([token_id])


def test_bytes_are_held_back_until_the_run_ends(processor):
    bytes_start = processor.tokenizer.token_to_id("<0x00>")
    cow = [bytes_start + byte for byte in "🐄".encode()]
    cat = processor.encode_text(" cat")
    assert stream(processor, cow + cat) == ["", "", "", "", "🐄 cat", ""]
    assert stream(processor, cow) == ["", "", "", "", "🐄"]
    assert stream(processor, cow[:3] + cat) == ["", "", "", "\ufffd" * 3 + " cat", ""]
    assert stream(processor, cow[:2]) == ["", "", "\ufffd" * 2]


def test_special_token_does_not_end_a_run_of_bytes(processor):
    bytes_start = processor.tokenizer.token_to_id("<0x00>")
    first, *rest = (bytes_start + byte for byte in "é".encode())
    ids = [first, processor.pad_token_id, 99_999, *rest]
    assert "".join(stream(processor, ids)) == processor.decode(ids) == "é"


def test_location_tokens_are_not_held_back(processor):
    ids = processor.encode_text("<loc0001><loc0500><seg003>" * 7)
    assert stream(processor, ids) == [processor.token_str(token_id) for token_id in ids] + [""]


def test_special_tokens_add_no_text_and_spaces_are_kept(processor):
    ids = [processor.bos_token_id, *processor.encode_text(" cat  cow"), processor.eos_token_id]
    assert stream(processor, ids)[0] == "" and stream(processor, ids)[-2:] == ["", ""]
    assert "".join(stream(processor, ids)) == " cat  cow"


def test_finish_resets_the_decoder(processor):
    decoder = processor.stream_decoder()
    decoder.push(processor.tokenizer.token_to_id("<0xFF>"))
    assert (decoder.finish(), decoder.finish()) == ("\ufffd", "")


# Tokens


def test_token_str_is_the_vocabulary_entry(processor):
    names = ["▁cat", "<0xE4>", "<loc0001>", "\n", "<bos>"]
    assert [processor.token_str(processor.tokenizer.token_to_id(name)) for name in names] == names


@pytest.mark.parametrize("token_id", [1568, 257200, -1, 2**40])
def test_token_str_of_an_unknown_id(processor, token_id):
    assert processor.token_str(token_id) == f"<id {token_id}>"
    assert not processor.has_token(token_id)


def test_image_token_and_unknown_ids_are_not_allowed(processor):
    allowed = processor.allowed_tokens(1600)
    assert allowed.dtype == torch.bool and allowed.shape == (1600,)
    assert allowed[:1567].all() and not allowed[1567:].any()
    assert processor.image_token_id == 1567


def test_allowed_tokens_of_the_gemma_tokenizer(gemma_processor):
    allowed = gemma_processor.allowed_tokens(257216)
    assert allowed[:257152].all() and not allowed[257152:].any()
    assert gemma_processor.allowed_tokens(257152).all()


def test_vocab_size_below_the_tokenizers_is_rejected(processor):
    with pytest.raises(ValueError, match="vocab_size 1000, got 1566"):
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


def test_from_folder_gives_the_same_processor(folder, processor):
    loaded = PaliGemmaProcessor.from_folder(folder, tiny_config())
    assert loaded.encode_prompt("detect cat") == processor.encode_prompt("detect cat")
    assert torch.equal(pixel_values(loaded, noise(9, 9)), pixel_values(processor, noise(9, 9)))


def test_configs_of_the_hub_and_of_transformers_are_read(folder, reference):
    hub = {"do_convert_rgb": None, "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "resample": 3, "do_resize": True}
    hub |= {"rescale_factor": 0.00392156862745098, "size": {"height": 56, "width": 56}}
    (folder / "preprocessor_config.json").write_text(json.dumps(hub), encoding="utf-8")
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


def test_different_image_token_id_in_the_config_is_rejected(folder):
    with pytest.raises(ValueError, match=r"in the tokenizer \(1567\) and in config.json \(1500\)"):
        PaliGemmaProcessor.from_folder(folder, tiny_config(image_token=1500))


@pytest.mark.parametrize("sizes", [{"image_size": 0, "num_image_tokens": 1}, {"image_size": 1, "num_image_tokens": 0}])
def test_sizes_below_1_are_rejected(sizes):
    with pytest.raises(ValueError, match="must be >= 1, got 0"):
        PaliGemmaProcessor(build_tiny_tokenizer(), **sizes)
