"""What the bundled model is asked about its scenes, in PaliGemma's own prompts, and how its answers are scored.

Boxes are written as PaliGemma writes them: `<loc>` of y_min, x_min, y_max, x_max, several joined by " ; ". Of the 1024
places only every fourth is used (`LOCATION_BINS`): the model sees 112 pixels, and with all of them its belief would
lie so thin that "nothing there" outweighed each of them. Something that is not in the picture is answered with the
empty string. Every rule that leaves a question out (an object between two thirds, two things equally far to the left)
is meant to keep only questions that people would answer alike.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np

from paligemma.training.icons import CLASSES, COLORS
from paligemma.training.scenes import Scene, SceneObject

LANGUAGES = ("en", "es", "zh")
NUMBERS = {
    "en": ("a", "two", "three", "four"),
    "es": ("un", "dos", "tres", "cuatro"),
    "zh": ("一", "两", "三", "四"),
}
SEPARATORS = {"en": (", ", " and "), "es": (", ", " y "), "zh": ("、", "和")}
PLACES = (("top left", "top", "top right"), ("left", "center", "right"), ("bottom left", "bottom", "bottom right"))
DIRECTIONS = {"left of": (-1, 0), "right of": (1, 0), "above": (0, -1), "below": (0, 1)}
NOTHING = "nothing"

# Shares of the side: how near a border between thirds is too near to ask "where".
PLACE_MARGIN = 0.025
# Degrees off the asked direction up to which a thing clearly lies there, and from which it clearly does not.
CLEARLY_THERE, CLEARLY_NOT = 40.0, 65.0
# The nearest thing must be this much nearer than the next one that goes by another name.
NEAREST_BY = 0.85
ABSENT_SHARE = 0.025
# The places that answers use, out of 1024.
LOCATION_BINS = (*range(0, 1024, 4), 1023)
_BINS = np.array(LOCATION_BINS)
# Scenes with three or four of a kind are few; these factors make the answers 0 to 4 about equally frequent.
COUNT_ANSWER_WEIGHTS = (0.3, 0.26, 0.9, 2.6, 8.0)
COUNT_TASK_FACTORS = (0.7, 1.2, 3.2, 10.0)

BOX = re.compile(r"<loc(\d{4})><loc(\d{4})><loc(\d{4})><loc(\d{4})>((?:<seg\d{3}>){16})?\s*([^;<]*)")


@dataclass(frozen=True, eq=False)
class Target:
    """One thing that an answer must box: `box` is [x0, y0, x1, y1] as shares of the side.

    `mask` is its visible part stretched over the box, (64, 64) float32 in [0, 1], where the task is to segment.
    """

    label: str
    box: np.ndarray
    mask: np.ndarray | None = None


@dataclass(frozen=True, eq=False)
class Question:
    """A prompt and its answer. `task` is a field of TaskMix.

    In a segmentation's answer `{seg0}`, `{seg1}`, ... stand for the sixteen codes of `targets[0].mask` and so on:
    see `answer_with`.
    """

    task: str
    prompt: str
    answer: str
    targets: tuple[Target, ...] = ()

    def answer_with(self, codes: Sequence[str]) -> str:
        """The answer with a target's codes ("<seg012>...") in each place for them."""
        return self.answer.format(**{f"seg{number}": code for number, code in enumerate(codes)})


@dataclass(frozen=True)
class TaskMix:
    """How often each task is asked, as weights among the tasks that a scene allows."""

    caption_en: float = 0.19
    caption_es: float = 0.07
    caption_zh: float = 0.07
    detect: float = 0.15
    multi_detect: float = 0.13
    segment: float = 0.2
    count: float = 0.10
    present: float = 0.05
    color: float = 0.13
    where: float = 0.08
    relation: float = 0.16


TASKS = tuple(field.name for field in fields(TaskMix))


def noun_phrase(class_name: str, color: str | None, number: int, language: str) -> str:
    """ "a red car", "dos perros", "一只狗": `number` (1 to 4) things of a class."""
    if not 1 <= number <= 4:
        raise ValueError(f"number is {number}, expected 1 to 4")
    noun = CLASSES[class_name].noun
    if language == "en":
        words = [color] * (color is not None) + [noun.name if number == 1 else noun.plural]
        article = "an" if words[0][0] in "aeiou" else "a"
        return " ".join([article if number == 1 else NUMBERS["en"][number - 1], *words])
    if language == "es":
        form = 2 * (number > 1) + (noun.gender == "f")
        one = "una" if noun.gender == "f" else "un"
        words = [one if number == 1 else NUMBERS["es"][number - 1]]
        words.append(noun.spanish if number == 1 else noun.spanish_plural)
        return " ".join(words + ([COLORS[color].spanish[form]] if color else []))
    if language == "zh":
        paint = f"{COLORS[color].chinese}的" if color else ""
        return NUMBERS["zh"][number - 1] + noun.measure + paint + noun.chinese
    raise ValueError(f"language is {language!r}, expected one of {', '.join(LANGUAGES)}")


def caption(scene: Scene, language: str) -> str:
    """The scene's one caption: groups of like things, from left to right by their leftmost member."""
    groups = Counter((thing.class_name, thing.color) for thing in left_to_right(scene.objects))
    phrases = [noun_phrase(name, color, number, language) for (name, color), number in groups.items()]
    comma, last = SEPARATORS[language]
    return last.join([comma.join(phrases[:-1])] * (len(phrases) > 1) + phrases[-1:])


def left_to_right(objects: Sequence[SceneObject]) -> list[SceneObject]:
    """Ordered by the box's centre from the left, then from the top."""
    return sorted(objects, key=lambda thing: thing.centre)


def locations(box: Sequence[float]) -> str:
    """The four `<loc>` tokens of [x0, y0, x1, y1], shares of the side: of LOCATION_BINS the nearest ones."""
    bins = [LOCATION_BINS[np.abs(_BINS - value * 1024).argmin()] for value in box]
    return "".join(f"<loc{bins[axis]:04d}>" for axis in (1, 0, 3, 2))


def ask(task: str, scene: Scene, generator: np.random.Generator) -> Question | None:
    """A random question of a task (a field of TaskMix) about a scene, or None where none is fair."""
    if task not in _ASK:
        raise ValueError(f"task is {task!r}, expected one of {', '.join(TASKS)}")
    return _ASK[task](scene, generator)


def questions(scene: Scene, generator: np.random.Generator) -> list[Question]:
    """One question of every task that the scene allows."""
    asked = [ask(task, scene, generator) for task in TASKS]
    return [question for question in asked if question is not None]


def sample_questions(
    scene: Scene, generator: np.random.Generator, budget: int, mix: TaskMix | None = None
) -> list[Question]:
    """Up to `budget` different questions, their tasks drawn by the weights of `mix`."""
    mix = mix or TaskMix()
    weights = np.array([getattr(mix, task) for task in TASKS])
    most = max(Counter(thing.class_name for thing in scene.objects).values())
    weights[TASKS.index("count")] *= COUNT_TASK_FACTORS[min(most, 4) - 1]
    found: dict[str, Question] = {}
    while len(found) < budget and weights.any():
        number = int(generator.choice(len(weights), p=weights / weights.sum()))
        question = ask(TASKS[number], scene, generator)
        if question is None or question.prompt in found:
            weights[number] = 0
        else:
            found[question.prompt] = question
    return list(found.values())


def score(
    question: Question, text: str, decode_mask: Callable[[Sequence[int]], np.ndarray] | None = None
) -> dict[str, float]:
    """Sums that `summarize` turns into figures.

    Captions: `exact`, `objects`, `recalled`. Boxes: `exact` (nothing said where nothing is), `true`, `predicted`,
    `hits50`, `hits75`, `iou` (0 for a missed object), and where `decode_mask` turns sixteen codes into a (64, 64) mask
    in [0, 1], `masks`, `mask_iou` of what is drawn in the answer's box and `shape_iou` of the same mask in the true
    box (0 for a missed object). Other answers: `exact`.
    """
    text = text.strip()
    if question.task in ("detect", "multi_detect", "segment"):
        return _score_boxes(question, text, decode_mask)
    result = {"asked": 1.0, "exact": float(text == question.answer)}
    if question.task.startswith("caption"):
        language = question.task[-2:]
        true, said = caption_counts(question.answer, language), caption_counts(text, language)
        result |= {"objects": float(true.total()), "recalled": float((true & said).total())}
    return result


def summarize(scores: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Figures over many scores of one task, those that apply.

    They are `exact`, `recall`, `f1_50`, `f1_75`, `iou`, `mask_iou` and `shape_iou`.
    """
    sums: Counter[str] = Counter()
    for one in scores:
        sums.update(one)
    figures = {"asked": sums["asked"], "exact": sums["exact"] / max(1, sums["asked"])}
    if sums["objects"]:
        figures["recall"] = sums["recalled"] / sums["objects"]
    if sums["true"]:
        boxes = sums["true"] + sums["predicted"]
        figures |= {"f1_50": 2 * sums["hits50"] / boxes, "f1_75": 2 * sums["hits75"] / boxes}
        figures["iou"] = sums["iou"] / sums["true"]
    if sums["masks"]:
        figures |= {name: sums[name] / sums["masks"] for name in ("mask_iou", "shape_iou")}
    return figures


def caption_counts(text: str, language: str) -> Counter[tuple[str, str | None]]:
    """How many of each (class, color) a caption names; phrases that are none of ours count for nothing."""
    comma, last = SEPARATORS[language]
    counts: Counter[tuple[str, str | None]] = Counter()
    for phrase in text.replace(last, comma).split(comma):
        if phrase in _PHRASES[language]:
            name, color, number = _PHRASES[language][phrase]
            counts[name, color] += number
    return counts


def parse_boxes(text: str) -> list[tuple[str, np.ndarray, tuple[int, ...]]]:
    """Label, box ([x0, y0, x1, y1] as shares of the side, bin centres) and codes of each answered object."""
    found = []
    for match in BOX.finditer(text):
        y0, x0, y1, x1 = (int(match[group]) for group in (1, 2, 3, 4))
        box = (np.array([x0, y0, x1, y1]) + 0.5) / 1024
        codes = tuple(int(code) for code in re.findall(r"\d{3}", match[5] or ""))
        found.append((match[6].strip(), box, codes))
    return found


def box_iou(first: np.ndarray, second: np.ndarray) -> float:
    """Intersection over union of two boxes [x0, y0, x1, y1]."""
    common = np.prod(np.clip(np.minimum(first[2:], second[2:]) - np.maximum(first[:2], second[:2]), 0, None))
    union = np.prod(first[2:] - first[:2]) + np.prod(second[2:] - second[:2]) - common
    return float(common / union) if union > 0 else 0.0


def mask_iou(true: Target, box: np.ndarray, mask: np.ndarray) -> float:
    """IoU of a predicted mask in its own box with the true one, over the pixels of the true box."""
    side = true.mask.shape[0]
    steps = (np.arange(side) + 0.5) / side
    columns = _cells(true.box[0] + steps * (true.box[2] - true.box[0]), box[0], box[2], mask.shape[1])
    rows = _cells(true.box[1] + steps * (true.box[3] - true.box[1]), box[1], box[3], mask.shape[0])
    padded = np.pad(mask >= 0.5, ((0, 1), (0, 1)))  # the last row and column stand for outside the box
    predicted, solid = padded[np.ix_(rows, columns)], true.mask >= 0.5
    return float((predicted & solid).sum() / max(1, (predicted | solid).sum()))


def _cells(places: np.ndarray, low: float, high: float, side: int) -> np.ndarray:
    cells = np.floor((places - low) / max(high - low, 1e-6) * side).astype(int)
    return np.where((cells >= 0) & (cells < side), cells, side)


def _score_boxes(question: Question, text: str, decode_mask: Callable | None) -> dict[str, float]:
    predicted = parse_boxes(text)
    pairs = _match(question.targets, predicted)
    overlaps = [box_iou(question.targets[true].box, predicted[said][1]) for true, said in pairs]
    result = {
        "asked": 1.0,
        "exact": float(text == question.answer),
        "true": float(len(question.targets)),
        "predicted": float(len(predicted)),
        "hits50": float(sum(overlap >= 0.5 for overlap in overlaps)),
        "hits75": float(sum(overlap >= 0.75 for overlap in overlaps)),
        "iou": float(sum(overlaps)),
    }
    if decode_mask is not None and question.task == "segment":
        result |= {"masks": float(len(question.targets)), "mask_iou": 0.0, "shape_iou": 0.0}
        for true, said in pairs:
            _, box, codes = predicted[said]
            if len(codes) == 16:
                target, mask = question.targets[true], decode_mask(codes)
                result["mask_iou"] += mask_iou(target, box, mask)
                result["shape_iou"] += mask_iou(target, target.box, mask)
    return result


def _match(targets: Sequence[Target], predicted: Sequence[tuple]) -> list[tuple[int, int]]:
    """Pairs of a target and a prediction of the same label, best overlap first, each used once."""
    candidates = [
        (box_iou(target.box, box), true, said)
        for true, target in enumerate(targets)
        for said, (label, box, _) in enumerate(predicted)
        if label == target.label
    ]
    pairs: list[tuple[int, int]] = []
    for overlap, true, said in sorted(candidates, reverse=True):
        if overlap > 0 and all(true != other and said != taken for other, taken in pairs):
            pairs.append((true, said))
    return pairs


def _phrases(language: str) -> dict[str, tuple[str, str | None, int]]:
    """Each noun phrase and what it means; where one and many sound alike, the first."""
    phrases: dict[str, tuple[str, str | None, int]] = {}
    for name, icon_class in CLASSES.items():
        for color in (None,) if icon_class.recolor is None else COLORS:
            for number in range(1, 5):
                phrases[noun_phrase(name, color, number, language)] = (name, color, number)
    return phrases


_PHRASES = {language: _phrases(language) for language in LANGUAGES}


def _pick(generator: np.random.Generator, choices: Sequence) -> object:
    return choices[generator.integers(len(choices))]


def _present(scene: Scene) -> list[str]:
    return list(dict.fromkeys(thing.class_name for thing in scene.objects))


def _absent(scene: Scene, generator: np.random.Generator) -> str:
    present = set(_present(scene))
    return _pick(generator, [name for name in CLASSES if name not in present])


def _only_ones(scene: Scene) -> list[SceneObject]:
    """The objects whose class stands once in the scene, so that "the dog" means one."""
    counts = Counter(thing.class_name for thing in scene.objects)
    return [thing for thing in scene.objects if counts[thing.class_name] == 1]


def _with_article(class_name: str, color: str | None = None) -> str:
    return noun_phrase(class_name, color, 1, "en")


def _targets(scene: Scene, names: Sequence[str], masks: bool = False) -> tuple[Target, ...]:
    """What to box, in the answer's order: by the names as asked, then from left to right."""
    ordered = left_to_right(scene.objects)
    return tuple(
        Target(name, thing.box / scene.size, thing.mask() if masks else None)
        for name in names
        for thing in ordered
        if thing.class_name == name
    )


def _box_question(task: str, scene: Scene, names: Sequence[str]) -> Question:
    segment = task == "segment"
    targets = _targets(scene, names, masks=segment)
    parts = [
        locations(target.box) + (f"{{seg{number}}}" if segment else "") + f" {target.label}"
        for number, target in enumerate(targets)
    ]
    verb = "segment" if segment else "detect"
    return Question(task, f"{verb} {' ; '.join(names)}", " ; ".join(parts), targets)


def _ask_caption(language: str) -> Callable[[Scene, np.random.Generator], Question]:
    def ask_caption(scene: Scene, generator: np.random.Generator) -> Question:
        return Question(f"caption_{language}", f"caption {language}", caption(scene, language))

    return ask_caption


def _ask_one_box(task: str) -> Callable[[Scene, np.random.Generator], Question]:
    def ask_one_box(scene: Scene, generator: np.random.Generator) -> Question:
        absent = generator.random() < ABSENT_SHARE
        name = _absent(scene, generator) if absent else _pick(generator, _present(scene))
        return _box_question(task, scene, [name])

    return ask_one_box


def _ask_multi_detect(scene: Scene, generator: np.random.Generator) -> Question:
    """Two or three names; the scene's own, or one of them beside something that is not there."""
    names = _present(scene)
    generator.shuffle(names)
    names = names[: generator.integers(2, 4)]
    if len(names) == 1 or generator.random() < 0.1:
        names = [*names[:2], _absent(scene, generator)]
        generator.shuffle(names)
    return _box_question("multi_detect", scene, names)


def _ask_count(scene: Scene, generator: np.random.Generator) -> Question:
    counts = Counter(thing.class_name for thing in scene.objects)
    answers = [0, *counts.values()]
    weights = np.array([COUNT_ANSWER_WEIGHTS[min(answer, 4)] for answer in answers])
    number = int(generator.choice(len(answers), p=weights / weights.sum()))
    name = [_absent(scene, generator), *counts][number]
    plural = CLASSES[name].noun.plural
    return Question("count", f"answer en how many {plural} are there?", str(answers[number]))


def _ask_present(scene: Scene, generator: np.random.Generator) -> Question:
    present = generator.random() < 0.5
    name = _pick(generator, _present(scene)) if present else _absent(scene, generator)
    return Question("present", f"answer en is there {_with_article(name)}?", "yes" if present else "no")


def _ask_color(scene: Scene, generator: np.random.Generator) -> Question | None:
    painted = [thing for thing in _only_ones(scene) if thing.color is not None]
    if not painted:
        return None
    thing = _pick(generator, painted)
    word = _pick(generator, ("colour", "color"))
    return Question("color", f"answer en what {word} is the {thing.class_name}?", thing.color)


def place(x: float, y: float) -> str | None:
    """Which of nine parts of the picture a point is in (shares of the side), or None too near a border."""
    if any(abs(value - border) < PLACE_MARGIN for value in (x, y) for border in (1 / 3, 2 / 3)):
        return None
    return PLACES[min(2, int(y * 3))][min(2, int(x * 3))]


def _ask_where(scene: Scene, generator: np.random.Generator) -> Question | None:
    placed = [(thing, place(*(value / scene.size for value in thing.centre))) for thing in _only_ones(scene)]
    clear = [(thing, where) for thing, where in placed if where is not None]
    if not clear:
        return None
    thing, where = _pick(generator, clear)
    return Question("where", f"answer en where is the {thing.class_name}?", where)


def neighbor(scene: Scene, anchor: SceneObject, direction: str) -> str | None:
    """What lies in a direction (a key of DIRECTIONS) of `anchor`: "a cat", "nothing", or None if unclear.

    The nearest thing within CLEARLY_THERE degrees of the direction counts; any thing between that and
    CLEARLY_NOT makes it unclear, and so does a second thing that is about as near and has another name.
    """
    there = []
    for thing in scene.objects:
        if thing is anchor:
            continue
        offset = np.subtract(thing.centre, anchor.centre)
        distance = float(np.hypot(*offset))
        angle = math.degrees(math.acos(np.clip(offset @ DIRECTIONS[direction] / distance, -1, 1)))
        if CLEARLY_THERE < angle < CLEARLY_NOT:
            return None
        if angle <= CLEARLY_THERE:
            there.append((distance, _with_article(thing.class_name, thing.color)))
    if not there:
        return NOTHING
    nearest, name = min(there)
    unclear = any(other != name and nearest > NEAREST_BY * distance for distance, other in there)
    return None if unclear else name


def _ask_relation(scene: Scene, generator: np.random.Generator) -> Question | None:
    found = [
        (thing, direction, answer)
        for thing in _only_ones(scene)
        for direction in DIRECTIONS
        if (answer := neighbor(scene, thing, direction)) is not None
    ]
    something = [one for one in found if one[2] != NOTHING]
    if not something:
        return None  # a scene of one object would only teach "nothing"
    nothing = [one for one in found if one[2] == NOTHING]
    choices = nothing if nothing and generator.random() < 0.3 else something
    thing, direction, answer = _pick(generator, choices)
    return Question("relation", f"answer en what is {direction} the {thing.class_name}?", answer)


_ASK: dict[str, Callable[[Scene, np.random.Generator], Question | None]] = {
    "caption_en": _ask_caption("en"),
    "caption_es": _ask_caption("es"),
    "caption_zh": _ask_caption("zh"),
    "detect": _ask_one_box("detect"),
    "multi_detect": _ask_multi_detect,
    "segment": _ask_one_box("segment"),
    "count": _ask_count,
    "present": _ask_present,
    "color": _ask_color,
    "where": _ask_where,
    "relation": _ask_relation,
}
