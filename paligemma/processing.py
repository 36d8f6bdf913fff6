"""Model inputs and outputs: image -> pixel_values, prompt -> input_ids, generated ids -> streamed text.

A prompt is encoded as `<image>` x num_image_tokens, `<bos>`, the text and a newline, which ended every prompt in
training (PaliGemma: Beyer et al., https://arxiv.org/abs/2407.07726). Results equal those of transformers'
PaliGemmaProcessor with SigLIP's Pillow image processor: pixels bit for bit on RGB input, ids for every prompt without
special tokens or trailing newlines. Intended differences are documented at each method.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from tokenizers import Tokenizer

from paligemma import image_processing
from paligemma.config import IGNORE_INDEX, PaliGemmaConfig
from paligemma.errors import InputError
from paligemma.image_processing import ImageSettings
from paligemma.tokenizer import IMAGE, REPLACEMENT_CHARACTER, load_tokenizer, prepare_tokenizer

_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")


class PaliGemmaProcessor:
    """Convert images and prompts to model inputs, and token ids to text.

    The processor modifies the given tokenizer: saved padding and truncation are disabled, and special tokens in text
    are encoded as plain text. It is not modified after construction, so threads can share it.

    Args:
        tokenizer: a Gemma tokenizer with `<bos>`, `<eos>`, `<pad>` and `<image>`.
        image_size: height and width of the vision tower's input, in pixels.
        num_image_tokens: number of image tokens per image, (image_size / patch_size)^2.
        image_settings: mean, std and resampling filter.
        image_token_id: id of `<image>` in the model's config, checked against the tokenizer's; None: not checked.

    Raises:
        InputError: if a control token is missing from the tokenizer, or it encodes a newline as several tokens, decodes
            differently from Gemma's, or has another id for `<image>`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        image_size: int,
        num_image_tokens: int,
        image_settings: ImageSettings | None = None,
        image_token_id: int | None = None,
    ) -> None:
        for name, value in (("image_size", image_size), ("num_image_tokens", num_image_tokens)):
            if value < 1:
                raise ValueError(f"{name} must be >= 1, got {value}.")
        control_ids = prepare_tokenizer(tokenizer)
        self.bos_token_id, self.eos_token_id, self.pad_token_id, self.image_token_id = control_ids
        self.tokenizer = tokenizer
        self.image_size = image_size
        self.num_image_tokens = num_image_tokens
        self.image_settings = image_settings or ImageSettings()
        if image_token_id not in (None, self.image_token_id):
            raise InputError(
                "tokenizer.image_token",
                "{token} must have the same id in the tokenizer ({tokenizer_id}) and in config.json ({config_id}).",
                token=IMAGE,
                tokenizer_id=self.image_token_id,
                config_id=image_token_id,
            )
        added_tokens = tokenizer.get_added_tokens_decoder()
        self.special_token_ids = frozenset(token_id for token_id, token in added_tokens.items() if token.special)
        self.newline_token_id = self._find_newline()

    @classmethod
    def from_folder(cls, folder: str | Path, config: PaliGemmaConfig) -> PaliGemmaProcessor:
        """Load the tokenizer and, if present, the image processor's config.

        Raises:
            InputError: for missing or invalid files.
        """
        vision = config.vision_config
        return cls(
            load_tokenizer(folder),
            image_size=vision.image_size,
            num_image_tokens=vision.num_image_tokens,
            image_settings=ImageSettings.from_folder(Path(folder), vision.image_size),
            image_token_id=config.image_token_index,
        )

    def __call__(
        self, images: Sequence[Image.Image], prompts: Sequence[str], suffix: Sequence[str] | None = None
    ) -> dict[str, torch.Tensor]:
        """Convert a batch to model inputs: one image, one prompt and, for training, one suffix per example.

        Returns:
            pixel_values: (batch, 3, image_size, image_size), float32, in [-1, 1]
            input_ids: (batch, sequence), int64, left-padded with `<pad>`
            attention_mask: (batch, sequence), int64, 0 for padding
        and with a suffix, which is followed by `<eos>`:
            token_type_ids: (batch, sequence), int64, 1 for the suffix, else 0
            labels: (batch, sequence), int64, the ids of the suffix, -100 elsewhere

        Raises:
            InputError: for an empty batch, lists of different lengths, or values that are not images or strings.
        """
        self._check_batch(images, prompts, suffix)
        prefix_ids = [self.encode_prompt(prompt) for prompt in prompts]
        suffix_ids: list[list[int]] = [[] for _ in prompts]
        if suffix is not None:
            suffix_ids = [[*self.encode_text(text), self.eos_token_id] for text in suffix]
        sequences = [prefix + text for prefix, text in zip(prefix_ids, suffix_ids, strict=True)]
        inputs = {
            "pixel_values": torch.stack([self.normalize(self.resize(image)) for image in images]),
            "input_ids": _pad_left(sequences, self.pad_token_id),
            "attention_mask": _pad_left([[1] * len(sequence) for sequence in sequences], 0),
        }
        if suffix is not None:
            # All sequences end with the suffix, so left padding aligns these with input_ids.
            length = inputs["input_ids"].shape[1]
            inputs["token_type_ids"] = _pad_left([[1] * len(ids) for ids in suffix_ids], 0, length)
            inputs["labels"] = _pad_left(suffix_ids, IGNORE_INDEX, length)
        return inputs

    def resize(self, image: Image.Image) -> Image.Image:
        """Convert any Pillow image to RGB and resize it to image_size x image_size, the model's input resolution."""
        return image_processing.resize(image, self.image_size, self.image_settings.resample)

    def normalize(self, square: Image.Image) -> torch.Tensor:
        """Convert a resized image to (3, image_size, image_size), float32; in [-1, 1] with the default settings."""
        return image_processing.normalize(square, self.image_settings.mean, self.image_settings.std)

    def encode_prompt(self, prompt: str) -> list[int]:
        """Encode `<image>` x num_image_tokens, `<bos>`, the prompt, which may be empty, and a newline.

        Unlike in transformers, trailing newlines of the prompt are removed: "\\n\\n" would be a single token, which did
        not occur at the end of prompts in training.
        """
        _check_text("prompt", prompt)
        text_ids = self.encode_text(prompt.rstrip("\r\n"))
        return [self.image_token_id] * self.num_image_tokens + [self.bos_token_id, *text_ids, self.newline_token_id]

    def encode_text(self, text: str) -> list[int]:
        """Encode text without adding special tokens. `<loc0000>` and `<seg000>` are single tokens.

        Unlike in transformers, special tokens are encoded as plain text. Lone surrogates, which have no UTF-8 encoding,
        are replaced with U+FFFD.
        """
        _check_text("text", text)
        return self.tokenizer.encode(replace_lone_surrogates(text), add_special_tokens=False).ids

    def decode(self, token_ids: Iterable[int]) -> str:
        """Decode a complete sequence of ids, without special tokens."""
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=True)

    def stream_decoder(self) -> StreamDecoder:
        """Create a decoder for one answer."""
        return StreamDecoder(self)

    def token_str(self, token_id: int) -> str:
        """Return the vocabulary entry of an id: `▁cat`, `<0xE4>`, `<loc0001>`; `<id 257200>` for an unknown id."""
        token = self._token_or_none(token_id)
        return f"<id {token_id}>" if token is None else token

    def has_token(self, token_id: int) -> bool:
        """Return whether the tokenizer has this id. The model's vocab_size can be larger than the tokenizer's."""
        return self._token_or_none(token_id) is not None

    def text_token_str(self, token_id: int) -> str | None:
        """Return the token, or None if it adds no text: special tokens and unknown ids."""
        return None if token_id in self.special_token_ids else self._token_or_none(token_id)

    def allowed_tokens(self, vocab_size: int) -> torch.Tensor:
        """Return a bool mask (vocab_size,) of the tokens that can be generated: all in the tokenizer except `<image>`.

        Raises:
            InputError: if the tokenizer has more tokens than the model.
        """
        token_ids = set(self.tokenizer.get_vocab(with_added_tokens=True).values()) - {self.image_token_id}
        if max(token_ids) >= vocab_size:
            raise InputError(
                "tokenizer.vocab_size",
                "The tokenizer's ids must be below the model's vocab_size {vocab_size}, got {token_id}.",
                vocab_size=vocab_size,
                token_id=max(token_ids),
            )
        allowed = torch.zeros(vocab_size, dtype=torch.bool)
        allowed[torch.tensor(sorted(token_ids))] = True
        return allowed

    def _token_or_none(self, token_id: int) -> str | None:
        try:
            return self.tokenizer.id_to_token(token_id)
        except OverflowError:  # negative, or more than 32 bits
            return None

    def _find_newline(self) -> int:
        ids = self.encode_text("\n")
        if len(ids) != 1 or ids[0] in self.special_token_ids:
            raise InputError(
                "tokenizer.newline",
                "The tokenizer must encode a newline as a single non-special token, got the ids {ids}.",
                ids=ids,
            )
        return ids[0]

    @staticmethod
    def _check_batch(images: Sequence[Image.Image], prompts: Sequence[str], suffix: Sequence[str] | None) -> None:
        arguments: dict[str, Any] = {"images": images, "prompts": prompts}
        if suffix is not None:
            arguments["suffix"] = suffix
        for name, values in arguments.items():
            if not isinstance(values, list | tuple):
                raise InputError(
                    "batch.type", "{name} must be a list or tuple, got {type}.", name=name, type=type(values).__name__
                )
            if len(values) != len(prompts):
                raise InputError(
                    "batch.length",
                    "{name} must have the length of prompts ({expected}), got {length}.",
                    name=name,
                    expected=len(prompts),
                    length=len(values),
                )
        if not prompts:
            raise InputError("batch.empty", "The batch must have at least one image and prompt.")


def replace_lone_surrogates(text: str) -> str:
    """Replace each lone surrogate with U+FFFD, so that the text can be encoded as UTF-8."""
    return _LONE_SURROGATE.sub(REPLACEMENT_CHARACTER, text)


def _check_text(name: str, text: str) -> None:
    if not isinstance(text, str):
        raise InputError("text.type", "{name} must be a string, got {type}.", name=name, type=type(text).__name__)


def _pad_left(sequences: Sequence[Sequence[int]], value: int, length: int = 0) -> torch.Tensor:
    """Pad to the longest sequence or `length`: (batch, length), int64."""
    length = max(length, *map(len, sequences))
    return torch.tensor([[value] * (length - len(sequence)) + list(sequence) for sequence in sequences])


class StreamDecoder:
    """Decode one answer incrementally, in constant time per token.

    The joined results of `push` and `finish` equal `PaliGemmaProcessor.decode` of all ids. Gemma encodes rare
    characters with byte-fallback tokens. A run of them is buffered until another token follows, and is decoded as a
    whole, as by the `ByteFallback` decoder of tokenizers: as UTF-8, or to one U+FFFD per byte if it is invalid.
    Special tokens and unknown ids add no text and do not end a run.
    """

    def __init__(self, processor: PaliGemmaProcessor) -> None:
        self._processor = processor
        self._buffered_bytes = bytearray()

    def push(self, token_id: int) -> str:
        """Return the text that becomes final with this token; may be empty."""
        token = self._processor.text_token_str(token_id)
        if token is None:
            return ""
        byte_token = _BYTE_TOKEN.fullmatch(token)
        if byte_token:
            self._buffered_bytes.append(int(byte_token[1], base=16))
            return ""
        return self.finish() + token.replace("▁", " ")

    def finish(self) -> str:
        """Return the text of the buffered bytes, and end the run."""
        held, self._buffered_bytes = self._buffered_bytes, bytearray()
        try:
            return held.decode("utf-8")
        except UnicodeDecodeError:
            return REPLACEMENT_CHARACTER * len(held)
