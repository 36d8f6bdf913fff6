"""A small tokenizer laid out as PaliGemma's, built in code, so that nothing here needs the real one."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

SPECIAL_TOKENS = ("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>")
WHITESPACE_RUNS = (*("\n" * length for length in range(1, 6)), *("▁" * length for length in range(2, 5)))
TAGS = ("<mask>", "<unused0>", "<b>", "</b>")
BYTE_PIECES = tuple(f"<0x{byte:02X}>" for byte in range(256))
CHARACTERS = ("▁", *(chr(code) for code in range(0x21, 0x7F)), *"é的猫在🐄")
WORDS = ("▁cat", "▁the", "caption", "detect", "cow", "▁in", "▁en", "▁on", "answer", "▁;", "▁blue", "▁square")
LOCATIONS = tuple(f"<loc{number:04d}>" for number in range(1024))
SEGMENTS = tuple(f"<seg{number:03d}>" for number in range(128))


def build_tiny_tokenizer(num_pieces: int = 0) -> Tokenizer:
    """Specials, whitespace runs, tags, bytes, characters, words; then locations, segments, and `<image>` last.

    As in Gemma: BPE with byte fallback, a space is `▁`, a run of newlines is one added token, and the decoder
    puts pieces together without stripping anything. About 1,600 pieces.

    Args:
        num_pieces: pieces before `<image>`, which is then this id; filler makes up for what is missing. A model with
            the vocabulary of Google's checkpoints costs what theirs cost only if so many tokens may be chosen.
    """
    prefixes = dict.fromkeys(word[:length] for word in WORDS for length in range(2, len(word) + 1))
    pieces = (*SPECIAL_TOKENS, *WHITESPACE_RUNS, *TAGS, *BYTE_PIECES, *CHARACTERS, *prefixes)
    num_filler = num_pieces - len(pieces) - len(LOCATIONS) - len(SEGMENTS)
    pieces = (*pieces, *(f"▁filler{number}" for number in range(num_filler)))
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
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
