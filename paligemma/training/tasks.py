"""Tasks of the bundled model: prompts and answers about a scene, in PaliGemma's format.

Boxes are `<loc>` tokens of y_min, x_min, y_max, x_max; objects are separated by " ; ". Only every fourth location is
used (`LOCATION_GRID`): at 112 pixels, 1024 locations would spread the probability so thinly that "not in the image"
would be more likely than any single one of them. The answer for an object that is not in the image is empty.

Ambiguous questions are excluded, such as the position of an object on the border of two regions, or the neighbor of an
object if two others are about equally close.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import TypeVar

import numpy as np

from paligemma.parsing import LOCATION_BINS
from paligemma.training.captions import LANGUAGES, caption, left_to_right, noun_phrase
from paligemma.training.classes import CLASSES
from paligemma.training.scenes import Scene, SceneObject

LOCATION_STRIDE = 4
LOCATION_GRID = (*range(0, LOCATION_BINS, LOCATION_STRIDE), LOCATION_BINS - 1)

REGIONS = (("top left", "top", "top right"), ("left", "center", "right"), ("bottom left", "bottom", "bottom right"))
DIRECTIONS = {"left of": (-1, 0), "right of": (1, 0), "above": (0, -1), "below": (0, 1)}
NOTHING = "nothing"

# Smallest distance from a region's border, as a fraction of the image side, to ask "where".
REGION_MARGIN = 0.025
# Angle in degrees between the direction in the question and the direction to another object: up to INSIDE_ANGLE the
# object counts as being in that direction, from OUTSIDE_ANGLE it does not, and in between the question is ambiguous.
INSIDE_ANGLE, OUTSIDE_ANGLE = 40.0, 65.0
# Largest ratio of the distances of the nearest and the second object for the first one to be the answer.
MAX_DISTANCE_RATIO = 0.85
# Probability that `detect` or `segment` asks for a class that is not in the image.
P_ABSENT = 0.025
# Scenes with three or four objects of one class are rare. These weights make the answers 0 to 4 about equally frequent.
# The first ones depend on the count of a class, the second ones, for the task, on the highest count in the scene.
COUNT_ANSWER_WEIGHTS = (0.3, 0.26, 0.9, 2.6, 8.0)
COUNT_TASK_FACTORS = (0.7, 1.2, 3.2, 10.0)

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Target:
    """A ground-truth object of a box task.

    Attributes:
        box: [x0, y0, x1, y1] as fractions of the image side.
        mask: visible region, cropped to the box and resized to (64, 64), float32 in [0, 1]; None unless the task is
            `segment`.
    """

    label: str
    box: np.ndarray
    mask: np.ndarray | None = None


@dataclass(frozen=True, eq=False)
class Question:
    """A prompt and its answer.

    Attributes:
        task: a field of TaskMix.
        answer: for `segment`, with the placeholders `{seg0}`, `{seg1}`, ... for the mask codes of each target.
    """

    task: str
    prompt: str
    answer: str
    targets: tuple[Target, ...] = ()

    def answer_with(self, codes: Sequence[str]) -> str:
        """Return the answer with the placeholders replaced by mask tokens ("<seg012>..."), one string per target."""
        return self.answer.format(**{f"seg{index}": code for index, code in enumerate(codes)})


@dataclass(frozen=True)
class TaskMix:
    """Relative frequencies of the tasks, among those that a scene allows."""

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


def make_question(task: str, scene: Scene, rng: np.random.Generator) -> Question | None:
    """Sample a question of a task; None if the scene allows no unambiguous one.

    Raises:
        ValueError: for an unknown task.
    """
    if task not in _MAKERS:
        raise ValueError(f"task must be one of {', '.join(TASKS)}, got {task!r}.")
    return _MAKERS[task](scene, rng)


def all_questions(scene: Scene, rng: np.random.Generator) -> list[Question]:
    """Sample one question of every task that the scene allows."""
    questions = [make_question(task, scene, rng) for task in TASKS]
    return [question for question in questions if question is not None]


def sample_questions(
    scene: Scene, rng: np.random.Generator, max_questions: int, mix: TaskMix | None = None
) -> list[Question]:
    """Sample up to `max_questions` questions with different prompts, their tasks weighted by `mix`."""
    mix = mix or TaskMix()
    weights = np.array([getattr(mix, task) for task in TASKS])
    largest_group = max(Counter(obj.class_name for obj in scene.objects).values())
    weights[TASKS.index("count")] *= COUNT_TASK_FACTORS[min(largest_group, 4) - 1]
    questions: dict[str, Question] = {}
    while len(questions) < max_questions and weights.any():
        index = int(rng.choice(len(weights), p=weights / weights.sum()))
        question = make_question(TASKS[index], scene, rng)
        if question is None or question.prompt in questions:
            weights[index] = 0
        else:
            questions[question.prompt] = question
    return list(questions.values())


def location_tokens(box: Sequence[float] | np.ndarray) -> str:
    """Format [x0, y0, x1, y1], fractions of the image side, as four `<loc>` tokens, rounded to LOCATION_GRID."""
    grid = np.array(LOCATION_GRID)
    bins = [grid[np.abs(grid - value * LOCATION_BINS).argmin()] for value in box]
    return "".join(f"<loc{bins[axis]:04d}>" for axis in (1, 0, 3, 2))


def region(x: float, y: float) -> str | None:
    """Name the region of a 3 x 3 grid that contains a point (fractions of the side); None close to a border."""
    if any(abs(value - border) < REGION_MARGIN for value in (x, y) for border in (1 / 3, 2 / 3)):
        return None
    return REGIONS[min(2, int(y * 3))][min(2, int(x * 3))]


def neighbor(scene: Scene, anchor: SceneObject, direction: str) -> str | None:
    """Name the nearest object in a direction (a key of DIRECTIONS) from `anchor`.

    Returns:
        For example "a cat"; NOTHING if there is none; None if the answer is ambiguous, either by angle
        (INSIDE_ANGLE, OUTSIDE_ANGLE) or because an object with another name is about as close (MAX_DISTANCE_RATIO).
    """
    candidates = []
    for obj in scene.objects:
        if obj is anchor:
            continue
        offset = np.subtract(obj.center, anchor.center)
        distance = float(np.hypot(*offset))
        angle = math.degrees(math.acos(np.clip(offset @ DIRECTIONS[direction] / distance, -1, 1)))
        if INSIDE_ANGLE < angle < OUTSIDE_ANGLE:
            return None
        if angle <= INSIDE_ANGLE:
            candidates.append((distance, noun_phrase(obj.class_name, obj.color, 1, "en")))
    if not candidates:
        return NOTHING
    nearest, name = min(candidates)
    ambiguous = any(other != name and nearest > MAX_DISTANCE_RATIO * distance for distance, other in candidates)
    return None if ambiguous else name


def _choose(rng: np.random.Generator, choices: Sequence[T]) -> T:
    return choices[int(rng.integers(len(choices)))]


def _classes_in(scene: Scene) -> list[str]:
    return list(dict.fromkeys(obj.class_name for obj in scene.objects))


def _absent_class(scene: Scene, rng: np.random.Generator) -> str:
    present = set(_classes_in(scene))
    return _choose(rng, [name for name in CLASSES if name not in present])


def _unique_objects(scene: Scene) -> list[SceneObject]:
    """Return the objects that are the only one of their class, so that "the dog" is unambiguous."""
    counts = Counter(obj.class_name for obj in scene.objects)
    return [obj for obj in scene.objects if counts[obj.class_name] == 1]


def _make_caption(language: str) -> Callable[[Scene, np.random.Generator], Question]:
    def make_caption(scene: Scene, rng: np.random.Generator) -> Question:
        return Question(f"caption_{language}", f"caption {language}", caption(scene, language))

    return make_caption


def _make_single_box(task: str) -> Callable[[Scene, np.random.Generator], Question]:
    """`detect` or `segment` for one class."""

    def make_single_box(scene: Scene, rng: np.random.Generator) -> Question:
        absent = rng.random() < P_ABSENT
        name = _absent_class(scene, rng) if absent else _choose(rng, _classes_in(scene))
        return _box_question(task, scene, [name])

    return make_single_box


def _make_multi_detect(scene: Scene, rng: np.random.Generator) -> Question:
    """`detect` for two or three classes, sometimes including one that is not in the scene."""
    names = _classes_in(scene)
    rng.shuffle(names)
    names = names[: rng.integers(2, 4)]
    if len(names) == 1 or rng.random() < 0.1:
        names = [*names[:2], _absent_class(scene, rng)]
        rng.shuffle(names)
    return _box_question("multi_detect", scene, names)


def _box_question(task: str, scene: Scene, names: Sequence[str]) -> Question:
    """Objects in the order of the prompt, those of one class from left to right."""
    segment = task == "segment"
    ordered = left_to_right(scene.objects)
    targets = tuple(
        Target(name, obj.box / scene.size, obj.mask() if segment else None)
        for name in names
        for obj in ordered
        if obj.class_name == name
    )
    parts = [
        location_tokens(target.box) + (f"{{seg{index}}}" if segment else "") + f" {target.label}"
        for index, target in enumerate(targets)
    ]
    verb = "segment" if segment else "detect"
    return Question(task, f"{verb} {' ; '.join(names)}", " ; ".join(parts), targets)


def _make_count(scene: Scene, rng: np.random.Generator) -> Question:
    counts = Counter(obj.class_name for obj in scene.objects)
    answers = [0, *counts.values()]
    weights = np.array([COUNT_ANSWER_WEIGHTS[min(answer, 4)] for answer in answers])
    index = int(rng.choice(len(answers), p=weights / weights.sum()))
    name = [_absent_class(scene, rng), *counts][index]
    plural = CLASSES[name].noun.plural
    return Question("count", f"answer en how many {plural} are there?", str(answers[index]))


def _make_present(scene: Scene, rng: np.random.Generator) -> Question:
    present = rng.random() < 0.5
    name = _choose(rng, _classes_in(scene)) if present else _absent_class(scene, rng)
    prompt = f"answer en is there {noun_phrase(name, None, 1, 'en')}?"
    return Question("present", prompt, "yes" if present else "no")


def _make_color(scene: Scene, rng: np.random.Generator) -> Question | None:
    colored = [(obj, obj.color) for obj in _unique_objects(scene) if obj.color is not None]
    if not colored:
        return None
    obj, color = _choose(rng, colored)
    spelling = _choose(rng, ("colour", "color"))  # the model knows both
    return Question("color", f"answer en what {spelling} is the {obj.class_name}?", color)


def _make_where(scene: Scene, rng: np.random.Generator) -> Question | None:
    located = [(obj, region(obj.center[0] / scene.size, obj.center[1] / scene.size)) for obj in _unique_objects(scene)]
    choices = [(obj, where) for obj, where in located if where is not None]
    if not choices:
        return None
    obj, where = _choose(rng, choices)
    return Question("where", f"answer en where is the {obj.class_name}?", where)


def _make_relation(scene: Scene, rng: np.random.Generator) -> Question | None:
    answers = [
        (obj, direction, answer)
        for obj in _unique_objects(scene)
        for direction in DIRECTIONS
        if (answer := neighbor(scene, obj, direction)) is not None
    ]
    positive = [choice for choice in answers if choice[2] != NOTHING]
    if not positive:
        return None  # otherwise scenes with a single object would bias the model towards NOTHING
    negative = [choice for choice in answers if choice[2] == NOTHING]
    choices = negative if negative and rng.random() < 0.3 else positive
    obj, direction, answer = _choose(rng, choices)
    return Question("relation", f"answer en what is {direction} the {obj.class_name}?", answer)


_MAKERS: dict[str, Callable[[Scene, np.random.Generator], Question | None]] = {
    **{f"caption_{language}": _make_caption(language) for language in LANGUAGES},
    "detect": _make_single_box("detect"),
    "multi_detect": _make_multi_detect,
    "segment": _make_single_box("segment"),
    "count": _make_count,
    "present": _make_present,
    "color": _make_color,
    "where": _make_where,
    "relation": _make_relation,
}
