"""Load and check the Gemma tokenizer with PaliGemma's additional tokens."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from tokenizers import AddedToken, Tokenizer

from paligemma.errors import InputError

BOS, EOS, PAD, IMAGE = "<bos>", "<eos>", "<pad>", "<image>"
CONTROL_TOKENS = (BOS, EOS, PAD, IMAGE)
REPLACEMENT_CHARACTER = "\ufffd"
CONVERSION_PACKAGES = {"transformers": "transformers", "sentencepiece": "sentencepiece", "google.protobuf": "protobuf"}


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """Load `tokenizer.json`, or convert `tokenizer.model` with transformers if there is none.

    Raises:
        InputError: if both files are missing, the file is corrupt, or packages for the conversion are missing.
    """
    path = Path(folder) / "tokenizer.json"
    if not path.is_file() and path.with_suffix(".model").is_file():
        return _convert_sentencepiece(path.with_suffix(".model"))
    if not path.is_file():
        raise InputError(
            "tokenizer.missing", "{path} not found. Download it from the model's page on the hub.", path=str(path)
        )
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises plain Exception
        raise InputError(
            "tokenizer.corrupt",
            "{path} is not a valid tokenizer: {reason}. Download it again.",
            path=str(path),
            reason=str(error),
        ) from error


def _convert_sentencepiece(path: Path) -> Tokenizer:
    """Convert `tokenizer.model`, with the added tokens of `tokenizer_config.json`, to a fast tokenizer."""
    missing = [package for module, package in CONVERSION_PACKAGES.items() if not _is_installed(module)]
    if missing:
        raise InputError(
            "tokenizer.conversion_packages",
            "tokenizer.json not found next to {path}. To convert {path}, run: pip install {packages}",
            path=str(path),
            packages=" ".join(missing),
        )
    from transformers import GemmaTokenizer  # a slow import, needed only here

    try:
        return GemmaTokenizer.from_pretrained(path.parent, local_files_only=True).backend_tokenizer
    except Exception as error:  # transformers raises many types of exceptions for corrupt files
        raise InputError(
            "tokenizer.conversion_failed",
            "{path} cannot be converted: {reason}. Download tokenizer.json from the model's page on the hub.",
            path=str(path),
            reason=str(error),
        ) from error


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the parent package is missing
        return False


def prepare_tokenizer(tokenizer: Tokenizer) -> list[int]:
    """Validate a tokenizer and configure it in place.

    Saved padding and truncation are disabled, and special tokens in text are encoded as plain text.

    Returns:
        The ids of CONTROL_TOKENS.

    Raises:
        InputError: for a tokenizer that is not PaliGemma's: a control token is missing or cannot be encoded as
            plain text, or tokens are decoded differently from Gemma's.
    """
    found = {token: tokenizer.token_to_id(token) for token in CONTROL_TOKENS}
    missing = [token for token, token_id in found.items() if token_id is None]
    if missing:
        raise InputError(
            "tokenizer.control_tokens",
            "The tokenizer has no {tokens}. Use the tokenizer.json of a PaliGemma checkpoint, not Gemma's.",
            tokens=", ".join(missing),
        )
    tokenizer.no_padding()
    tokenizer.no_truncation()
    # Some saved tokenizers do not mark these as special. Existing tokens keep their ids.
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL_TOKENS])
    tokenizer.encode_special_tokens = True
    control_ids = [token_id for token_id in found.values() if token_id is not None]
    if not set(control_ids).isdisjoint(tokenizer.encode("".join(CONTROL_TOKENS), add_special_tokens=False).ids):
        raise InputError(
            "tokenizer.control_text",
            "The tokenizer must be able to encode {tokens} as plain text.",
            tokens=", ".join(CONTROL_TOKENS),
        )
    _check_decoder(tokenizer)
    return control_ids


def _check_decoder(tokenizer: Tokenizer) -> None:
    """Raise InputError unless the tokenizer decodes tokens like Gemma's, which `StreamDecoder` relies on."""
    tokens = ["▁a▁", "<0xE2>", "<0x82>", "<0xAC>", "▁", "<0xFF>", "<0x41>", "b▁"]
    expected = f" a € {REPLACEMENT_CHARACTER * 2}b "
    decoded = tokenizer.decoder.decode(tokens) if tokenizer.decoder is not None else None
    if decoded != expected:
        raise InputError(
            "tokenizer.decoder",
            "The tokenizer must decode {tokens} to {expected!r} like Gemma's, got {decoded!r}.",
            tokens=" ".join(tokens),
            expected=expected,
            decoded=decoded,
        )
