"""A small tokenizer with the structure of PaliGemma's, for random checkpoints and tests."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

SPECIAL_TOKENS = ("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>")
WHITESPACE_RUNS = (*("\n" * length for length in range(1, 6)), *("▁" * length for length in range(2, 5)))
TAGS = ("<mask>", "<unused0>", "<b>", "</b>")
BYTE_TOKENS = tuple(f"<0x{byte:02X}>" for byte in range(256))
CHARACTERS = ("▁", *(chr(code) for code in range(0x21, 0x7F)), *"é的猫在🐄")
WORDS = ("▁cat", "▁the", "caption", "detect", "cow", "▁in", "▁en", "▁on", "answer", "▁;", "▁blue", "▁square")
LOCATIONS = tuple(f"<loc{number:04d}>" for number in range(1024))
SEGMENTS = tuple(f"<seg{number:03d}>" for number in range(128))


def build_tiny_tokenizer(image_token_id: int = 0) -> Tokenizer:
    """Build a tokenizer of about 1,600 tokens.

    The vocabulary contains special, whitespace, byte, character, word, location and segment tokens, and ends with
    `<image>`. As in Gemma, it is BPE with byte fallback, a space is `▁`, a run of newlines is one added token, and the
    decoder does not strip whitespace.

    Args:
        image_token_id: id of `<image>`; filler tokens extend the vocabulary up to it. 0 adds no filler.
    """
    prefixes = dict.fromkeys(word[:length] for word in WORDS for length in range(2, len(word) + 1))
    tokens = (*SPECIAL_TOKENS, *WHITESPACE_RUNS, *TAGS, *BYTE_TOKENS, *CHARACTERS, *prefixes)
    num_filler = image_token_id - len(tokens) - len(LOCATIONS) - len(SEGMENTS)
    tokens = (*tokens, *(f"▁filler{number}" for number in range(num_filler)))
    vocabulary = {token: number for number, token in enumerate(tokens)}
    merges = [(prefix[:-1], prefix[-1]) for prefix in prefixes]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()],
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A <bos> $B", special_tokens=[("<bos>", vocabulary["<bos>"])]
    )
    plain_tokens = (*WHITESPACE_RUNS, *TAGS, *LOCATIONS, *SEGMENTS)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in plain_tokens])
    tokenizer.add_special_tokens([AddedToken("<image>", normalized=False, special=True)])
    return tokenizer
