"""The bundled model's tokenizer: one token per word of its tasks, characters and bytes for everything else.

It is saved in the hub's format (`tokenizer.json`) and follows Gemma's conventions: a space is "▁" and belongs to the
following word, no space is added before the text, unknown characters are encoded as bytes, and `<bos>` is added by the
processor. The last tokens are `<loc0000>`..`<loc1023>`, `<seg000>`..`<seg127>` and `<image>`, as in PaliGemma.
"""

import json
import string
from collections.abc import Mapping
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from paligemma.parsing import LOCATION_BINS, MASK_CODEBOOK_SIZE
from paligemma.training.captions import NUMBERS
from paligemma.training.classes import CLASSES, COLORS
from paligemma.training.tasks import NOTHING, REGIONS

SPACE = "▁"
SPECIAL_TOKENS = ("<pad>", "<eos>", "<bos>", "<unk>")
PAD, EOS, BOS = 0, 1, 2
IMAGE_TOKEN = "<image>"
VERBS = ("caption", "detect", "segment", "answer")
FUNCTION_WORDS = (
    "en es zh how many are there is a an what colour color the where left right of above below and y un una "
    "center top bottom yes no"
)
LETTERS = string.ascii_letters + "áéíóúüñÁÉÍÓÚÜÑ¿¡"
PUNCTUATION = string.punctuation + string.digits + "、，。？"


def build_tokenizer() -> Tokenizer:
    """Build the tokenizer; deterministic."""
    vocabulary = {token: index for index, token in enumerate(_text_tokens())}
    chinese = "|".join(sorted(_chinese_words(), key=len, reverse=True))
    # The pre-tokenizer splits into words, and ignore_merges looks up each word as a whole. Without merges, a word that
    # is not in the vocabulary is split into characters.
    words = Regex(f"{chinese}|{SPACE}?[\\p{{Latin}}]+|{SPACE}?[;?]|\n|.")
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True, ignore_merges=True)
    )
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(words, behavior="isolated")
    tokenizer.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in _location_and_mask_tokens()])
    tokenizer.add_special_tokens([AddedToken(IMAGE_TOKEN, normalized=False, special=True)])
    return tokenizer


def save_tokenizer(folder: Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json`, which `AutoTokenizer` can load."""
    folder.mkdir(parents=True, exist_ok=True)
    build_tokenizer().save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "extra_special_tokens": {"image_token": IMAGE_TOKEN},
        "clean_up_tokenization_spaces": False,
        "padding_side": "left",
        "model_max_length": 512,
    }
    text = json.dumps(settings, indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")


def name_token_ids(tokenizer: Tokenizer) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
    """Return the ids of the tokens that name each class and each color, as they appear after a space.

    A class has the English and Spanish singular and plural and the Chinese noun; a color has the English word, the
    Spanish forms and the Chinese word.
    """
    classes = {name: _noun_words(name) for name in CLASSES}
    colors = {name: [SPACE + name, *_spanish_forms(name), color.chinese] for name, color in COLORS.items()}
    return _token_ids(tokenizer, classes), _token_ids(tokenizer, colors)


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """Return the id of a token. Raises KeyError if there is none."""
    index = tokenizer.token_to_id(token)
    if index is None:
        raise KeyError(token)
    return index


def _token_ids(tokenizer: Tokenizer, words: Mapping[str, list[str]]) -> dict[str, list[int]]:
    return {name: [token_id(tokenizer, token) for token in tokens] for name, tokens in words.items()}


def _noun_words(class_name: str) -> list[str]:
    noun = CLASSES[class_name].noun
    spaced = (noun.name, noun.plural, noun.spanish, noun.spanish_plural)
    return list(dict.fromkeys([SPACE + word for word in spaced] + [noun.chinese]))


def _spanish_forms(color: str) -> list[str]:
    return [SPACE + word for word in dict.fromkeys(COLORS[color].spanish)]


def _chinese_words() -> list[str]:
    nouns = [object_class.noun for object_class in CLASSES.values()]
    words = [noun.chinese for noun in nouns] + [noun.measure_word for noun in nouns]
    words += [color.chinese for color in COLORS.values()] + [*NUMBERS["zh"], "的", "和"]
    return list(dict.fromkeys(words))


def _initial_words() -> list[str]:
    """Words that may start a prompt or an answer and therefore also need a token without a space."""
    regions = [word for row in REGIONS for name in row for word in name.split()]
    articles = [*NUMBERS["en"], "an", *NUMBERS["es"], "una"]
    return [*VERBS, *articles, *COLORS, *regions, "yes", "no", NOTHING]


def _text_tokens() -> list[str]:
    """All tokens before `<loc0000>`, in the order of their ids."""
    tokens = [*SPECIAL_TOKENS, *(f"<0x{byte:02X}>" for byte in range(256)), "\n", SPACE]
    tokens += [*LETTERS, *PUNCTUATION, f"{SPACE};", f"{SPACE}?"]
    tokens += _initial_words()
    tokens += [SPACE + word for word in FUNCTION_WORDS.split()]
    tokens += [SPACE + word for language in ("en", "es") for word in NUMBERS[language]]
    for name in COLORS:
        tokens += [SPACE + name, *_spanish_forms(name)]
    for name in CLASSES:
        tokens += _noun_words(name)
    return list(dict.fromkeys(tokens + _chinese_words()))


def _location_and_mask_tokens() -> list[str]:
    locations = [f"<loc{index:04d}>" for index in range(LOCATION_BINS)]
    return locations + [f"<seg{index:03d}>" for index in range(MASK_CODEBOOK_SIZE)]
