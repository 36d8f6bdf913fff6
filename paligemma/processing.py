"""Image -> pixels, prompt -> token ids, token ids -> text while streaming.

A request is `<image>` x N, `<bos>`, the prompt, and one newline, which ended every prompt in training
(PaliGemma: Beyer et al., arXiv 2407.07726). Numbers equal those of transformers' PaliGemmaProcessor with
the Pillow image processor of SigLIP: pixels to the bit on RGB input, ids on every prompt that names no
special token and does not end in a newline. Where the two differ on purpose, the docstrings say so.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from PIL import Image
from tokenizers import AddedToken, Tokenizer

from paligemma import image_processing
from paligemma.image_processing import ImageSettings

if TYPE_CHECKING:
    from paligemma.config import PaliGemmaConfig

BOS, EOS, PAD, IMAGE = "<bos>", "<eos>", "<pad>", "<image>"
CONTROL_TOKENS = (BOS, EOS, PAD, IMAGE)
IGNORED_LABEL = -100
REPLACEMENT_CHARACTER = "\ufffd"

_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_BYTE_PIECE = re.compile("<0x([0-9A-Fa-f]{2})>")


# Tokenizer


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """Read `tokenizer.json`; ValueError with what to do when it is missing or damaged."""
    path = Path(folder) / "tokenizer.json"
    if not path.is_file():
        advice = "it belongs to every checkpoint on the hub; download it into this folder."
        if (path.parent / "tokenizer.model").is_file():
            advice = (
                "There is a tokenizer.model only. Convert it once with transformers: "
                "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)."
            )
        raise ValueError(f"{path} is missing: {advice}")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the tokenizers library raises plain Exception
        raise ValueError(f"{path} cannot be read as a tokenizer: {error}") from error


def _prepare_tokenizer(tokenizer: Tokenizer) -> None:
    """Make a tokenizer ours: no saved padding or truncation, and special tokens without power in a text."""
    missing = [token for token in CONTROL_TOKENS if tokenizer.token_to_id(token) is None]
    if missing:
        raise ValueError(
            f"the tokenizer has no {', '.join(missing)}; PaliGemma needs {', '.join(CONTROL_TOKENS)}. "
            "Take the tokenizer.json of a PaliGemma checkpoint, not Gemma's."
        )
    tokenizer.no_padding()
    tokenizer.no_truncation()
    # Some saved files leave the special mark out. An existing token keeps its id.
    control_tokens = [AddedToken(token, special=True, normalized=False) for token in CONTROL_TOKENS]
    tokenizer.add_special_tokens(control_tokens)
    tokenizer.encode_special_tokens = True
    control_ids = {tokenizer.token_to_id(token) for token in CONTROL_TOKENS}
    written = tokenizer.encode("".join(CONTROL_TOKENS), add_special_tokens=False).ids
    if control_ids.intersection(written):
        raise ValueError(f"the tokenizer cannot spell {', '.join(CONTROL_TOKENS)} as ordinary characters")


def _check_decoder(tokenizer: Tokenizer) -> None:
    """Refuse a tokenizer that joins pieces in another way than Gemma's, which StreamDecoder follows."""
    pieces = ["▁a▁", "<0xE2>", "<0x82>", "<0xAC>", "▁", "<0xFF>", "<0x41>", "b▁"]
    expected = f" a € {REPLACEMENT_CHARACTER * 2}b "
    joined = tokenizer.decoder.decode(pieces) if tokenizer.decoder is not None else None
    if joined != expected:
        raise ValueError(f"the tokenizer joins {pieces} to {joined!r}; a Gemma tokenizer gives {expected!r}")


class PaliGemmaProcessor:
    """Pictures and prompts to the model's inputs, and ids back to text.

    The tokenizer becomes the processor's own: padding and truncation saved in it are switched off, and
    special tokens in a text become ordinary characters. Nothing changes after that, so that threads may
    share a processor.

    Args:
        tokenizer: a Gemma tokenizer with `<bos>`, `<eos>`, `<pad>` and `<image>`.
        image_size: side of the square that the vision tower takes, in pixels.
        num_image_tokens: image tokens a picture, (image_size / patch_size)^2.
        image_settings: mean, std and filter of the preprocessing.
        image_token_id: the id the model's configuration gives `<image>`; checked against the tokenizer's.

    Raises ValueError for a tokenizer that lacks a special token, writes a newline as several pieces,
    disagrees on the image token, or joins pieces differently from Gemma's.
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
                raise ValueError(f"{name} is {value}; it must be at least 1")
        _prepare_tokenizer(tokenizer)
        _check_decoder(tokenizer)
        self.tokenizer = tokenizer
        self.image_size = image_size
        self.num_image_tokens = num_image_tokens
        self.image_settings = image_settings or ImageSettings()
        self.bos_token_id, self.eos_token_id, self.pad_token_id, self.image_token_id = map(
            tokenizer.token_to_id, CONTROL_TOKENS
        )
        if image_token_id not in (None, self.image_token_id):
            raise ValueError(
                f"{IMAGE} is {image_token_id} in the configuration and {self.image_token_id} in the tokenizer"
            )
        added_tokens = tokenizer.get_added_tokens_decoder()
        self.special_token_ids = frozenset(number for number, token in added_tokens.items() if token.special)
        self.newline_token_id = self._single_newline()

    @classmethod
    def from_folder(cls, folder: str | Path, config: PaliGemmaConfig) -> PaliGemmaProcessor:
        """Read tokenizer.json and, if present, the image processor's settings; ValueError for bad files."""
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
        """The model's inputs for a batch: one picture and one prompt (and suffix, for training) a row.

        Returns:
            pixel_values: (batch, 3, image_size, image_size), float32, in [-1, 1]
            input_ids: (batch, sequence), int64, shorter rows padded on the left with `<pad>`
            attention_mask: (batch, sequence), int64, 0 on padding
        and with a suffix, which is followed by `<eos>`:
            token_type_ids: (batch, sequence), int64, 1 on the suffix, else 0
            labels: (batch, sequence), int64, the suffix's ids, -100 elsewhere

        Raises ValueError for an empty batch, lists of unequal length, and what is no picture or no text.
        """
        self._check_batch(images, prompts, suffix)
        prefix_rows = [self.encode_prompt(prompt) for prompt in prompts]
        suffix_rows = [[*self.encode_text(text), self.eos_token_id] for text in suffix or ()]
        rows = [left + right for left, right in zip_longest(prefix_rows, suffix_rows, fillvalue=[])]
        inputs = {
            "pixel_values": torch.stack([self.normalize(self.resize(image)) for image in images]),
            "input_ids": _pad_left(rows, self.pad_token_id),
            "attention_mask": _pad_left([[1] * len(row) for row in rows], 0),
        }
        if suffix is not None:
            # Rows end alike, at the suffix's end, so that padding these on the left aligns them with the ids.
            length = inputs["input_ids"].shape[1]
            inputs["token_type_ids"] = _pad_left([[1] * len(row) for row in suffix_rows], 0, length)
            inputs["labels"] = _pad_left(suffix_rows, IGNORED_LABEL, length)
        return inputs

    def resize(self, image: Image.Image) -> Image.Image:
        """Convert any Pillow image to RGB and resize it to image_size x image_size, the model's input resolution."""
        return image_processing.resize(image, self.image_size, self.image_settings.resample)

    def normalize(self, square: Image.Image) -> torch.Tensor:
        """Convert a resized image to (3, image_size, image_size), float32; in [-1, 1] with the default settings."""
        return image_processing.normalize(square, self.image_settings.mean, self.image_settings.std)

    def encode_prompt(self, prompt: str) -> list[int]:
        """`<image>` x N, `<bos>`, the prompt, one newline. The prompt may be empty.

        Newlines at the prompt's end are dropped, so that it ends as in training: two newlines would be one
        token that the model never saw there.
        """
        _check_text("prompt", prompt)
        text = self.encode_text(prompt.rstrip("\r\n"))
        image = [self.image_token_id] * self.num_image_tokens
        return [*image, self.bos_token_id, *text, self.newline_token_id]

    def encode_text(self, text: str) -> list[int]:
        """Ids of a text, nothing added. `<loc0000>` and `<seg000>` are one id; special tokens are spelled out.

        A lone surrogate, which has no UTF-8 form, becomes U+FFFD.
        """
        _check_text("text", text)
        return self.tokenizer.encode(replace_lone_surrogates(text), add_special_tokens=False).ids

    def decode(self, token_ids: Iterable[int]) -> str:
        """The text of all ids at once, without special tokens."""
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=True)

    def stream_decoder(self) -> StreamDecoder:
        """A new decoder for one answer."""
        return StreamDecoder(self)

    def token_str(self, token_id: int) -> str:
        """The raw piece: `▁cat`, `<0xE4>`, `<loc0001>`, a newline as it is; `<id 257200>` without one."""
        piece = self._piece_or_none(token_id)
        return f"<id {token_id}>" if piece is None else piece

    def has_token(self, token_id: int) -> bool:
        """Whether the tokenizer has a piece for this id; checkpoints have more rows than pieces."""
        return self._piece_or_none(token_id) is not None

    def text_token_str(self, token_id: int) -> str | None:
        """The piece that an id adds to a text: None for a special token and for an id without a piece."""
        return None if token_id in self.special_token_ids else self._piece_or_none(token_id)

    def allowed_tokens(self, vocab_rows: int) -> torch.Tensor:
        """Which rows of the model's vocabulary may be sampled: (vocab_rows,), bool.

        False for `<image>` and for rows without a piece. Raises ValueError when the model has too few rows
        for the tokenizer.
        """
        token_ids = set(self.tokenizer.get_vocab(with_added_tokens=True).values()) - {self.image_token_id}
        if max(token_ids) >= vocab_rows:
            raise ValueError(f"the tokenizer's ids go up to {max(token_ids)}, the model has {vocab_rows} rows")
        allowed = torch.zeros(vocab_rows, dtype=torch.bool)
        allowed[torch.tensor(sorted(token_ids))] = True
        return allowed

    def _piece_or_none(self, token_id: int) -> str | None:
        try:
            return self.tokenizer.id_to_token(token_id)
        except OverflowError:  # below 0, or beyond 32 bits
            return None

    def _single_newline(self) -> int:
        ids = self.encode_text("\n")
        if len(ids) != 1 or ids[0] in self.special_token_ids:
            raise ValueError(f"the tokenizer writes a newline as the ids {ids}; PaliGemma needs one piece for it")
        return ids[0]

    @staticmethod
    def _check_batch(images: Sequence[Image.Image], prompts: Sequence[str], suffix: Sequence[str] | None) -> None:
        given = {"images": images, "prompts": prompts} | ({} if suffix is None else {"suffix": suffix})
        for name, values in given.items():
            if not isinstance(values, list | tuple):
                raise ValueError(f"{name} must be a list with one entry a row, got {type(values).__name__}")
            if len(values) != len(prompts):
                raise ValueError(f"there are {len(values)} {name} for {len(prompts)} prompts")
        if not prompts:
            raise ValueError("the batch is empty: give at least one image and one prompt")


def replace_lone_surrogates(text: str) -> str:
    """A text that has a UTF-8 form: each half of a broken surrogate pair becomes U+FFFD."""
    return _LONE_SURROGATE.sub(REPLACEMENT_CHARACTER, text)


def _check_text(name: str, text: str) -> None:
    if not isinstance(text, str):
        raise ValueError(f"{name} must be text, got {type(text).__name__}")


def _pad_left(rows: Sequence[Sequence[int]], value: int, length: int = 0) -> torch.Tensor:
    """(rows, longest row or `length`), int64."""
    length = max(length, *map(len, rows))
    return torch.tensor([[value] * (length - len(row)) + list(row) for row in rows])


# Text while streaming


class StreamDecoder:
    """Text of one answer, id by id.

    All deltas and `finish()`, joined, equal `PaliGemmaProcessor.decode` of all ids. Gemma writes rare
    characters as runs of byte pieces. Such a run is held until another piece or the end comes and is decoded
    as a whole, as the `ByteFallback` decoder of tokenizers does: as UTF-8, or to one U+FFFD a byte when it is
    not valid. Special tokens and ids without a piece add no text and do not end a run. Everything else,
    `<loc0000>` too, is shown at once. A step costs the same however long the answer is.
    """

    def __init__(self, processor: PaliGemmaProcessor) -> None:
        self._processor = processor
        self._held_bytes = bytearray()

    def push(self, token_id: int) -> str:
        """The text that this id lets out; often empty."""
        piece = self._processor.text_token_str(token_id)
        if piece is None:
            return ""
        byte_piece = _BYTE_PIECE.fullmatch(piece)
        if byte_piece:
            self._held_bytes.append(int(byte_piece[1], base=16))
            return ""
        return self.finish() + piece.replace("▁", " ")

    def finish(self) -> str:
        """The text of the bytes still held; the run ends here."""
        held, self._held_bytes = self._held_bytes, bytearray()
        try:
            return held.decode("utf-8")
        except UnicodeDecodeError:
            return REPLACEMENT_CHARACTER * len(held)
