"""The bundled model's tokenizer: every word of its tasks is one piece, anything else falls to letters and bytes.

It is saved as the hub saves one (`tokenizer.json`) and follows Gemma's conventions: a space is written "▁" and
belongs to the word behind it, no space is put in front of a text, unknown characters become byte pieces, and no
`<bos>` is added (the processor adds it). `<loc0000>`..`<loc1023>`, `<seg000>`..`<seg127>` and `<image>` stand at the
end, as in PaliGemma.
"""

import json
import string
from collections.abc import Mapping
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from paligemma.training.icons import CLASSES, COLORS
from paligemma.training.tasks import NOTHING, NUMBERS, PLACES

SPACE = "▁"
SPECIAL = ("<pad>", "<eos>", "<bos>", "<unk>")
IMAGE = "<image>"
VERBS = ("caption", "detect", "segment", "answer")
FUNCTION_WORDS = (
    "en es zh how many are there is a an what colour color the where left right of above below and y un una "
    "center top bottom yes no"
)
LETTERS = string.ascii_letters + "áéíóúüñÁÉÍÓÚÜÑ¿¡"
PUNCTUATION = string.punctuation + string.digits + "、，。？"


def build_tokenizer() -> Tokenizer:
    """The tokenizer, the same at every call."""
    vocabulary = {piece: number for number, piece in enumerate(_plain_pieces())}
    chinese = "|".join(sorted(_chinese_words(), key=len, reverse=True))
    # Every match is looked up whole (ignore_merges); without merges, what is not a piece falls to its characters.
    words = Regex(f"{chinese}|{SPACE}?[\\p{{Latin}}]+|{SPACE}?[;?]|\n|.")
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True, ignore_merges=True)
    )
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(words, behavior="isolated")
    tokenizer.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken(piece, normalized=False, special=True) for piece in SPECIAL])
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in _location_and_mask_pieces()])
    tokenizer.add_special_tokens([AddedToken(IMAGE, normalized=False, special=True)])
    return tokenizer


def save_tokenizer(folder: Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json`, which AutoTokenizer reads."""
    folder.mkdir(parents=True, exist_ok=True)
    build_tokenizer().save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "extra_special_tokens": {"image_token": IMAGE},
        "clean_up_tokenization_spaces": False,
        "padding_side": "left",
        "model_max_length": 512,
    }
    text = json.dumps(settings, indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")


def word_pieces(tokenizer: Tokenizer) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
    """The pieces that name each class and each color, as they follow a space: two maps from name to ids.

    A class has its English and Spanish singular and plural and its Chinese noun; a color its English word, its
    Spanish forms and its Chinese word.
    """
    classes = {name: _noun_words(name) for name in CLASSES}
    colors = {name: [SPACE + name, *_spanish_forms(name), color.chinese] for name, color in COLORS.items()}
    return _piece_ids(tokenizer, classes), _piece_ids(tokenizer, colors)


def _piece_ids(tokenizer: Tokenizer, words: Mapping[str, list[str]]) -> dict[str, list[int]]:
    return {name: [tokenizer.token_to_id(piece) for piece in pieces] for name, pieces in words.items()}


def _noun_words(class_name: str) -> list[str]:
    noun = CLASSES[class_name].noun
    spaced = (noun.name, noun.plural, noun.spanish, noun.spanish_plural)
    return list(dict.fromkeys([SPACE + word for word in spaced] + [noun.chinese]))


def _spanish_forms(color: str) -> list[str]:
    return [SPACE + word for word in dict.fromkeys(COLORS[color].spanish)]


def _chinese_words() -> list[str]:
    nouns = [icon_class.noun for icon_class in CLASSES.values()]
    words = [noun.chinese for noun in nouns] + [noun.measure for noun in nouns]
    words += [color.chinese for color in COLORS.values()] + [*NUMBERS["zh"], "的", "和"]
    return list(dict.fromkeys(words))


def _opening_words() -> list[str]:
    """Words that can begin a prompt or an answer, and so come without a space before them too."""
    places = [word for row in PLACES for place in row for word in place.split()]
    articles = [*NUMBERS["en"], "an", *NUMBERS["es"], "una"]
    return [*VERBS, *articles, *COLORS, *places, "yes", "no", NOTHING]


def _plain_pieces() -> list[str]:
    """Everything before `<loc0000>`, in the order of the ids."""
    pieces = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), "\n", SPACE]
    pieces += [*LETTERS, *PUNCTUATION, f"{SPACE};", f"{SPACE}?"]
    pieces += _opening_words()
    pieces += [SPACE + word for word in FUNCTION_WORDS.split()]
    pieces += [SPACE + word for language in ("en", "es") for word in NUMBERS[language]]
    for name in COLORS:
        pieces += [SPACE + name, *_spanish_forms(name)]
    for name in CLASSES:
        pieces += _noun_words(name)
    return list(dict.fromkeys(pieces + _chinese_words()))


def _location_and_mask_pieces() -> list[str]:
    return [f"<loc{number:04d}>" for number in range(1024)] + [f"<seg{number:03d}>" for number in range(128)]
