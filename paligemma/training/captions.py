"""Captions of scenes in English, Spanish and Chinese, and their parser."""

from collections import Counter
from collections.abc import Sequence

from paligemma.training.classes import CLASSES, COLORS
from paligemma.training.layout import MAX_OBJECTS
from paligemma.training.scenes import Scene, SceneObject

LANGUAGES = ("en", "es", "zh")
NUMBERS = {
    "en": ("a", "two", "three", "four"),
    "es": ("un", "dos", "tres", "cuatro"),
    "zh": ("一", "两", "三", "四"),
}
SEPARATORS = {"en": (", ", " and "), "es": (", ", " y "), "zh": ("、", "和")}  # between phrases, before the last one


def noun_phrase(class_name: str, color: str | None, number: int, language: str) -> str:
    """Name `number` (1 to 4) objects of a class, such as "a red car", "dos perros" or "一只狗".

    Raises:
        ValueError: for another number or language.
    """
    if not 1 <= number <= MAX_OBJECTS:
        raise ValueError(f"number must be 1 to {MAX_OBJECTS}, got {number}.")
    noun = CLASSES[class_name].noun
    if language == "en":
        words = [*([color] if color else []), noun.name if number == 1 else noun.plural]
        article = "an" if words[0][0] in "aeiou" else "a"
        return " ".join([article if number == 1 else NUMBERS["en"][number - 1], *words])
    if language == "es":
        form = 2 * (number > 1) + (noun.gender == "f")
        article = "una" if noun.gender == "f" else "un"
        words = [article if number == 1 else NUMBERS["es"][number - 1]]
        words.append(noun.spanish if number == 1 else noun.spanish_plural)
        return " ".join(words + ([COLORS[color].spanish[form]] if color else []))
    if language == "zh":
        adjective = f"{COLORS[color].chinese}的" if color else ""
        return NUMBERS["zh"][number - 1] + noun.measure_word + adjective + noun.chinese
    raise ValueError(f"language must be one of {', '.join(LANGUAGES)}, got {language!r}.")


def caption(scene: Scene, language: str) -> str:
    """Caption a scene: its objects grouped by class and color, ordered by the leftmost object of each group."""
    groups = Counter((obj.class_name, obj.color) for obj in left_to_right(scene.objects))
    phrases = [noun_phrase(name, color, number, language) for (name, color), number in groups.items()]
    comma, last = SEPARATORS[language]
    return last.join([comma.join(phrases[:-1])] * (len(phrases) > 1) + phrases[-1:])


def left_to_right(objects: Sequence[SceneObject]) -> list[SceneObject]:
    """Sort objects by the x coordinate of their center, then by y."""
    return sorted(objects, key=lambda obj: obj.center)


def parse_caption(text: str, language: str) -> Counter[tuple[str, str | None]]:
    """Count the objects of each (class, color) in a caption; unknown phrases are ignored."""
    comma, last = SEPARATORS[language]
    counts: Counter[tuple[str, str | None]] = Counter()
    for phrase in text.replace(last, comma).split(comma):
        if phrase in _PHRASES[language]:
            name, color, number = _PHRASES[language][phrase]
            counts[name, color] += number
    return counts


def _list_phrases(language: str) -> dict[str, tuple[str, str | None, int]]:
    """Map every noun phrase to its class, color and number."""
    return {
        noun_phrase(name, color, number, language): (name, color, number)
        for name, object_class in CLASSES.items()
        for color in ((None,) if object_class.recolor is None else COLORS)
        for number in range(1, MAX_OBJECTS + 1)
    }


_PHRASES = {language: _list_phrases(language) for language in LANGUAGES}
