"""Loading, checking and converting tokenizers."""

from __future__ import annotations

import importlib.util
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models

from paligemma import tokenizer as tokenizer_module
from paligemma.benchmarks.tiny_tokenizer import build_tiny_tokenizer
from paligemma.errors import InputError
from paligemma.processing import PaliGemmaProcessor
from paligemma.tokenizer import load_tokenizer


def processor_of(tokenizer: Tokenizer) -> PaliGemmaProcessor:
    return PaliGemmaProcessor(tokenizer, image_size=56, num_image_tokens=16)


# tokenizer.json


def test_missing_tokenizer_is_named_in_the_error(tmp_path):
    with pytest.raises(InputError, match=r"tokenizer\.json not found\. Download it"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("text", ["", "{}", "no json"])
def test_corrupt_tokenizer_is_named_in_the_error(tmp_path, text):
    (tmp_path / "tokenizer.json").write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=r"tokenizer\.json is not a valid tokenizer"):
        load_tokenizer(tmp_path)


def test_saved_padding_and_truncation_are_turned_off(tmp_path):
    tokenizer = build_tiny_tokenizer()
    tokenizer.enable_padding(length=50)
    tokenizer.enable_truncation(2)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    ids = processor_of(load_tokenizer(tmp_path)).encode_text("caption the cat")
    assert ids == processor_of(build_tiny_tokenizer()).encode_text("caption the cat")


def test_control_tokens_that_are_not_marked_as_special():
    data = json.loads(build_tiny_tokenizer().to_str())
    for token in data["added_tokens"]:
        token["special"] = False
    processor = processor_of(Tokenizer.from_str(json.dumps(data)))
    expected = processor_of(build_tiny_tokenizer()).encode_prompt("<bos><image> cat")
    assert processor.encode_prompt("<bos><image> cat") == expected
    assert processor.decode([processor.bos_token_id, processor.image_token_id]) == ""


# Tokenizers that do not fit


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
    vocab = {"<pad>": 0, "<eos>": 1, "<bos>": 2, "<image>": 3, "<unk>": 4}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>"))
    tokenizer.add_special_tokens([AddedToken("<unk>", special=True)])
    tokenizer.decoder = build_tiny_tokenizer().decoder
    return tokenizer


def with_merges_to_special_tokens() -> Tokenizer:
    tokens = ["<pad>", "<eos>", "<image>", *"<bos>", "<b", "<bo", "<bos", "<bos>"]
    merges = [("<", "b"), ("<b", "o"), ("<bo", "s"), ("<bos", ">")]
    return Tokenizer(models.BPE({token: token_id for token_id, token in enumerate(tokens)}, merges))


@pytest.mark.parametrize(
    ("build", "code"),
    [
        (without_image_token, "tokenizer.control_tokens"),
        (with_stripping_decoder, "tokenizer.decoder"),
        (with_metaspace_decoder, "tokenizer.decoder"),
        (without_newline, "tokenizer.newline"),
        (with_merges_to_special_tokens, "tokenizer.control_text"),
    ],
)
def test_other_tokenizers_are_rejected(build, code):
    with pytest.raises(InputError) as caught:
        processor_of(build())
    assert caught.value.code == code


# tokenizer.model


@pytest.fixture(scope="module")
def sentencepiece_folder(tmp_path_factory) -> Path:
    """A folder with a small `tokenizer.model` like Gemma's, and PaliGemma's tokens in tokenizer_config.json."""
    sentencepiece = pytest.importorskip("sentencepiece")
    pytest.importorskip("google.protobuf")
    folder = tmp_path_factory.mktemp("sentencepiece")
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter((Path(__file__).parents[1] / "LICENSE").read_text(encoding="utf-8").split("\n")),
        model_writer=model,
        model_type="bpe",
        vocab_size=800,
        byte_fallback=True,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        user_defined_symbols=["<mask>", "<start_of_turn>", "<end_of_turn>", "\n", "\n\n"],
        pad_id=0,
        eos_id=1,
        bos_id=2,
        unk_id=3,
        pad_piece="<pad>",
        eos_piece="<eos>",
        bos_piece="<bos>",
        unk_piece="<unk>",
        minloglevel=2,
    )
    (folder / "tokenizer.model").write_bytes(model.getvalue())
    tokens = [f"<loc{number:04d}>" for number in range(1024)] + [f"<seg{number:03d}>" for number in range(128)]
    added = {0: "<pad>", 1: "<eos>", 2: "<bos>", 3: "<unk>"} | dict(enumerate([*tokens, "<image>"], start=800))
    options = {"normalized": False, "lstrip": False, "rstrip": False, "single_word": False}
    config = {
        "tokenizer_class": "GemmaTokenizer",
        "added_tokens_decoder": {
            str(token_id): {"content": token, "special": token_id < 4 or token == "<image>", **options}
            for token_id, token in added.items()
        },
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    "text",
    ["caption en", "the Work and any Licensor, 2024", "猫在哪里？ 🐄", "a\nb\n\nc", " License", "tab\tend", "12345"],
)
def test_converted_sentencepiece_model_gives_the_same_ids(sentencepiece_folder, text):
    sentencepiece = pytest.importorskip("sentencepiece")
    original = sentencepiece.SentencePieceProcessor(model_file=str(sentencepiece_folder / "tokenizer.model"))
    processor = processor_of(load_tokenizer(sentencepiece_folder))
    assert processor.encode_text(text) == original.encode(text)
    assert processor.decode(processor.encode_text(text)) == text


def test_converted_sentencepiece_model_has_the_added_tokens(sentencepiece_folder):
    processor = processor_of(load_tokenizer(sentencepiece_folder))
    assert processor.encode_text("<loc0000><seg127>") == [800, 800 + 1151]
    assert processor.image_token_id == 800 + 1152
    assert not processor.special_token_ids.intersection(processor.encode_text("<image><bos>"))


def test_missing_packages_for_the_conversion_are_named(tmp_path, monkeypatch):
    (tmp_path / "tokenizer.model").write_bytes(b"")
    find_spec = importlib.util.find_spec
    missing = ("sentencepiece", "google.protobuf")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in missing else find_spec(name))
    message = r"tokenizer\.json not found next to .*tokenizer\.model\. .*pip install sentencepiece protobuf$"
    with pytest.raises(InputError, match=message):
        load_tokenizer(tmp_path)
    monkeypatch.setattr(tokenizer_module, "CONVERSION_PACKAGES", {"absent.module": "absent"})
    with pytest.raises(InputError, match=r"pip install absent$"):
        load_tokenizer(tmp_path)


def test_corrupt_sentencepiece_model_is_named_in_the_error(sentencepiece_folder, tmp_path):
    (tmp_path / "tokenizer.model").write_bytes((sentencepiece_folder / "tokenizer.model").read_bytes()[:1000])
    with pytest.raises(InputError, match=r"tokenizer\.model cannot be converted"):
        load_tokenizer(tmp_path)


def test_transformers_is_imported_for_the_conversion_only():
    script = "import sys, paligemma; assert 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], cwd=Path(__file__).parents[1], check=True)
