"""Training data: icons, scenes, questions, scores and tokenizer, tested with simple shapes as sprites."""

from collections import Counter

import numpy as np
import pytest
from PIL import Image, ImageDraw

from paligemma.training import icons
from paligemma.training.captions import LANGUAGES, caption, parse_caption
from paligemma.training.classes import CLASSES, COLORS
from paligemma.training.icons import HELD_OUT_STYLES, TRAINED_STYLES, Sprite, recolor
from paligemma.training.layout import EVALUATION, SceneOptions
from paligemma.training.scenes import Scene, SceneGenerator, SceneObject
from paligemma.training.scoring import mask_iou, parse_boxes, score, summarize
from paligemma.training.tasks import (
    TASKS,
    Question,
    Target,
    all_questions,
    location_tokens,
    make_question,
    neighbor,
    region,
    sample_questions,
)
from paligemma.training.tokenizer import build_tokenizer, name_token_ids, save_tokenizer

SHAPE_COLORS = {"dog": (150, 100, 60), "cat": (240, 190, 60), "tree": (40, 140, 60), "car": (30, 60, 200)}


def shape(name: str) -> np.ndarray:
    """Draw an ellipse, a triangle or a rectangle: RGBA, cropped."""
    image = Image.new("RGBA", (64, 64))
    draw = ImageDraw.Draw(image)
    fill = (*SHAPE_COLORS[name], 255)
    if name == "dog":
        draw.ellipse((2, 10, 61, 53), fill=fill)
    elif name == "cat":
        draw.polygon([(2, 60), (60, 60), (31, 3)], fill=fill)
    elif name == "tree":
        draw.rectangle((20, 2, 43, 61), fill=fill)
    else:
        draw.rectangle((2, 20, 61, 50), fill=fill)
        draw.rectangle((10, 25, 20, 33), fill=(240, 240, 240, 255))
    return np.asarray(image.crop(image.getbbox()))


@pytest.fixture(scope="module")
def sprites() -> dict[str, dict[str, list[Sprite]]]:
    drawn = {name: [Sprite(name, "shapes", 0, None, shape(name))] for name in ("dog", "cat", "tree")}
    drawn["car"] = [Sprite("car", "shapes", 0, color, recolor(shape("car"), color, "main")) for color in COLORS]
    return {"shapes": drawn}


@pytest.fixture(scope="module")
def scenes(sprites) -> SceneGenerator:
    return SceneGenerator(sprites, ["shapes"], seed=7)


def make_scene(*objects: tuple[str, str | None, tuple[float, float, float, float]], size: int = 100) -> Scene:
    """Make a black image with objects of the given class, color and box in pixels."""
    scene_objects = [
        SceneObject(name, color, "shapes", np.array(box, float), np.full((10, 10), 255, np.uint8), (0, 0))
        for name, color, box in objects
    ]
    return Scene(np.zeros((size, size, 3), np.uint8), tuple(scene_objects))


def box_around(x: float, y: float, half: float = 8) -> tuple[float, float, float, float]:
    return (x - half, y - half, x + half, y + half)


# Icons


def test_forty_classes_have_distinct_names():
    nouns = [object_class.noun for object_class in CLASSES.values()]
    assert len(CLASSES) == 40
    for form in ("name", "plural", "spanish", "spanish_plural", "chinese"):
        assert len({getattr(noun, form) for noun in nouns}) == 40
    assert not set(TRAINED_STYLES) & set(HELD_OUT_STYLES)


@pytest.mark.parametrize("color", COLORS)
def test_recoloring_does_not_depend_on_the_original_color(color):
    blue = shape("car")
    red = blue.copy()
    red[..., :3] = red[..., [2, 1, 0]]
    for before in (blue, red):
        after = recolor(before, color, "main")
        body = after[25, 45, :3].astype(int)
        assert np.abs(body - COLORS[color].rgb).max() <= 12
        assert np.array_equal(after[8, 12], before[8, 12])  # the white window
        assert np.array_equal(after[..., 3], before[..., 3])


def test_rgb_to_hsv_of_known_colors():
    rgb = np.array([[1, 0, 0], [0, 1, 0], [0, 0, 0.5], [0.5, 0.5, 0.5]])
    hue, saturation, value = icons.rgb_to_hsv(rgb)
    assert np.allclose(hue, [0, 120, 240, 0])
    assert np.allclose(saturation, [1, 1, 1, 0])
    assert np.allclose(value, [1, 1, 0.5, 0.5])


def test_unknown_style_raises(tmp_path):
    with pytest.raises(ValueError, match="clipart"):
        icons.load_sprites(tmp_path, 32, ["clipart"])


# Scenes


def test_scenes_depend_on_seed_index_and_split_only(sprites, scenes):
    again = SceneGenerator(sprites, ["shapes"], seed=7)
    for index in (0, 5):
        assert np.array_equal(scenes.scene(index).image, again.scene(index).image)
    other = SceneGenerator(sprites, ["shapes"], seed=7, split="evaluation")
    assert not np.array_equal(scenes.scene(0).image, other.scene(0).image)
    with pytest.raises(ValueError, match="validation"):
        SceneGenerator(sprites, ["shapes"], split="validation")


def test_boxes_are_tight_inside_the_image_and_separated(scenes):
    options = scenes.options
    for index in range(60):
        scene = scenes.scene(index)
        assert scene.image.shape == (112, 112, 3) and scene.image.dtype == np.uint8
        assert 1 <= len(scene.objects) <= 4
        centers = np.sort([obj.center[0] for obj in scene.objects])
        assert (np.diff(centers) >= 112 * options.min_center_distance - 4).all()
        for obj in scene.objects:
            assert obj.box.min() >= 0 and obj.box.max() <= 112
            rows, columns = np.nonzero(obj.alpha >= 128)
            x, y = obj.corner
            visible = [columns.min() + x, rows.min() + y, columns.max() + 1 + x, rows.max() + 1 + y]
            assert np.abs(obj.box - visible).max() <= 1.6


def test_a_scene_is_the_same_at_every_size(sprites):
    scenes = SceneGenerator(sprites, ["shapes"], EVALUATION, split="evaluation")
    for index in range(5):
        small, large = scenes.scene(index, 112), scenes.scene(index, 448)
        shrunk = Image.fromarray(large.image).resize((112, 112), Image.Resampling.BICUBIC)
        assert np.abs(small.image.astype(int) - np.asarray(shrunk)).mean() < 4
        for one, other in zip(small.objects, large.objects, strict=True):
            assert (one.class_name, one.color) == (other.class_name, other.color)
            assert np.abs(one.box - other.box / 4).max() < 1.5


def test_mask_is_the_shape_inside_its_box(sprites):
    only_cats = {"shapes": {"cat": sprites["shapes"]["cat"]}}
    options = SceneOptions(count_weights=(1.0,), max_rotation=0, size_range=(0.5, 0.55), augment=False, p_supersample=0)
    mask = SceneGenerator(only_cats, ["shapes"], options).scene(3).objects[0].mask()
    assert mask.shape == (64, 64) and mask.dtype == np.float32
    assert mask[-4:].mean() > 0.9 and mask[:4].mean() < 0.2  # a triangle on its base
    assert abs(mask.mean() - 0.5) < 0.05


def test_supersampled_scenes_keep_their_geometry(sprites):
    options = SceneOptions(p_supersample=1.0, augment=False)
    for obj in SceneGenerator(sprites, ["shapes"], options).scene(1).objects:
        rows, columns = np.nonzero(obj.alpha >= 128)
        assert abs(columns.min() + obj.corner[0] - obj.box[0]) <= 1.6
        assert abs(rows.max() + 1 + obj.corner[1] - obj.box[3]) <= 1.6


@pytest.mark.parametrize("field, value", [("count_weights", ()), ("size_range", (0.6, 0.3)), ("max_overlap", 0.9)])
def test_invalid_scene_options_raise(field, value):
    with pytest.raises(ValueError, match=field):
        SceneOptions(**{field: value})


# Questions


def test_captions_in_three_languages():
    scene = make_scene(
        ("car", "red", box_around(20, 50)), ("dog", None, box_around(60, 50)), ("dog", None, box_around(85, 20))
    )
    assert caption(scene, "en") == "a red car and two dogs"
    assert caption(scene, "es") == "un coche rojo y dos perros"
    assert caption(scene, "zh") == "一辆红色的汽车和两只狗"
    three = make_scene(
        ("apple", None, box_around(20, 50)),
        ("butterfly", "yellow", box_around(50, 50)),
        ("owl", None, box_around(80, 50)),
    )
    assert caption(three, "en") == "an apple, a yellow butterfly and an owl"
    assert caption(three, "es") == "una manzana, una mariposa amarilla y un búho"
    assert caption(three, "zh") == "一个苹果、一只黄色的蝴蝶和一只猫头鹰"


def test_parsed_captions_equal_the_objects(scenes):
    for index in range(30):
        scene = scenes.scene(index)
        true = Counter((obj.class_name, obj.color) for obj in scene.objects)
        for language in LANGUAGES:
            assert parse_caption(caption(scene, language), language) == true


def test_location_tokens_are_rounded_to_the_grid_in_paligemma_order():
    assert location_tokens((0.0, 0.25, 0.5, 1.0)) == "<loc0256><loc0000><loc1023><loc0512>"
    assert location_tokens((-0.1, 1.9 / 1024, 2.1 / 1024, 2.0)) == "<loc0000><loc0000><loc1023><loc0004>"


def test_boxes_follow_the_prompt_then_go_from_left_to_right():
    scene = make_scene(
        ("dog", None, box_around(80, 20)), ("cat", None, box_around(10, 10)), ("dog", None, box_around(30, 60))
    )
    prompts = set()
    for seed in range(40):
        question = make_question("multi_detect", scene, np.random.default_rng(seed))
        labels = [label for label, _, _ in parse_boxes(question.answer)]
        names = question.prompt.removeprefix("detect ").split(" ; ")
        assert labels == [name for name in names for _ in range({"dog": 2, "cat": 1}.get(name, 0))]
        lefts = [box[0] for label, box, _ in parse_boxes(question.answer) if label == "dog"]
        assert lefts == sorted(lefts)
        prompts.add(question.prompt)
    assert len(prompts) > 2


def test_answer_for_an_absent_class_is_empty():
    scene = make_scene(("dog", None, box_around(50, 50)))
    for task in ("detect", "segment"):
        questions = [make_question(task, scene, np.random.default_rng(seed)) for seed in range(100)]
        absent = [question for question in questions if question.prompt.split()[1] != "dog"]
        assert absent and all(question.answer == "" and not question.targets for question in absent)


def test_segment_answers_have_placeholders_for_mask_codes():
    scene = make_scene(("dog", None, box_around(20, 50)), ("dog", None, box_around(70, 50)))
    question = next(
        q for seed in range(9) if (q := make_question("segment", scene, np.random.default_rng(seed))).targets
    )
    codes = ["<seg001>" * 16, "<seg127>" * 16]
    parsed = parse_boxes(question.answer_with(codes))
    assert [codes for _, _, codes in parsed] == [(1,) * 16, (127,) * 16]
    assert all(target.mask.shape == (64, 64) for target in question.targets)


def test_regions_of_the_image():
    assert region(0.1, 0.1) == "top left"
    assert region(0.5, 0.5) == "center"
    assert region(0.9, 0.5) == "right"
    assert region(0.5, 0.99) == "bottom"
    assert region(0.34, 0.5) is None


def test_ambiguous_neighbors_are_none():
    dog, cat, tree = box_around(50, 50), box_around(20, 52), box_around(80, 82)
    scene = make_scene(("dog", None, dog), ("cat", None, cat), ("tree", None, tree))
    anchor = scene.objects[0]
    assert neighbor(scene, anchor, "left of") == "a cat"
    assert neighbor(scene, anchor, "above") == "nothing"
    assert neighbor(scene, anchor, "right of") is None  # the tree is both below and to the right
    near = make_scene(("dog", None, dog), ("cat", None, box_around(25, 45)), ("owl", None, box_around(24, 60)))
    assert neighbor(near, near.objects[0], "left of") is None
    far = make_scene(("dog", None, dog), ("car", "red", box_around(30, 50)), ("owl", None, box_around(9, 55)))
    assert neighbor(far, far.objects[0], "left of") == "a red car"


def test_color_question_requires_a_unique_colored_object():
    two = make_scene(("car", "red", box_around(20, 50)), ("car", "blue", box_around(70, 50)))
    assert make_question("color", two, np.random.default_rng(0)) is None
    one = make_scene(("car", "red", box_around(20, 50)), ("dog", None, box_around(70, 50)))
    prompts = {make_question("color", one, np.random.default_rng(seed)).prompt for seed in range(20)}
    assert prompts == {"answer en what colour is the car?", "answer en what color is the car?"}


def test_sampled_questions_cover_all_tasks_and_are_balanced(scenes):
    rng = np.random.default_rng(0)
    tasks = Counter()
    counts, present = Counter(), Counter()
    for index in range(400):
        for question in sample_questions(scenes.scene(index), rng, 3):
            tasks[question.task] += 1
            counts[question.answer] += question.task == "count"
            present[question.answer] += question.task == "present"
    assert set(tasks) == set(TASKS)
    assert all(counts[str(number)] > 0 for number in range(5))
    assert 0.6 < present["yes"] / present["no"] < 1.6


def test_all_questions_have_different_tasks(scenes):
    questions = all_questions(scenes.scene(0), np.random.default_rng(0))
    assert len({question.task for question in questions}) == len(questions) >= 8


def test_unknown_task_raises(scenes):
    with pytest.raises(ValueError, match="poem"):
        make_question("poem", scenes.scene(0), np.random.default_rng(0))


# Scores


def test_correct_answers_have_perfect_metrics(scenes):
    for index in range(20):
        for question in all_questions(scenes.scene(index), np.random.default_rng(index)):
            codes = ["<seg000>" * 16] * len(question.targets)
            metrics = summarize([score(question, question.answer_with(codes))])
            assert metrics.get("recall", 1) == metrics.get("f1_50", 1) == 1
            assert metrics.get("iou", 1) > 0.9
            if not question.targets:
                assert metrics["exact"] == 1


def test_recall_of_a_wrong_caption():
    question = Question("caption_en", "caption en", "a red car and two dogs")
    result = score(question, "a blue car and a dog")
    assert (result["exact"], result["objects"], result["recalled"]) == (0, 3, 1)


def test_boxes_are_matched_by_label_at_most_once():
    box = np.array([0.25, 0.25, 0.5, 0.5])
    question = Question("detect", "detect dog", "", (Target("dog", box),))
    text = f"{location_tokens(box)} dog ; {location_tokens(box)} dog ; {location_tokens(box)} cat"
    result = score(question, text)
    assert (result["true"], result["predicted"], result["hits50"], result["hits75"]) == (1, 3, 1, 1)
    assert summarize([result])["f1_50"] == pytest.approx(0.5)
    missed = score(question, "")
    assert missed["iou"] == 0 and summarize([result, missed])["iou"] == pytest.approx(0.5, abs=0.02)


def test_mask_iou_is_measured_inside_the_true_box():
    left_half = np.zeros((64, 64), np.float32)
    left_half[:, :32] = 1
    target = Target("dog", np.array([0.2, 0.2, 0.6, 0.6]), left_half)
    assert mask_iou(target, target.box, left_half) == 1
    assert mask_iou(target, target.box, np.ones((64, 64))) == pytest.approx(0.5)
    assert mask_iou(target, np.array([0.2, 0.2, 0.4, 0.6]), np.ones((64, 64))) == pytest.approx(1, abs=0.04)
    question = Question("segment", "segment dog", "", (target,))
    answer = f"{location_tokens(target.box)}{'<seg003>' * 16} dog"
    result = score(question, answer, decode_mask=lambda codes: left_half)
    assert summarize([result])["mask_iou"] > 0.95
    shifted = score(question, f"{location_tokens([0.3, 0.2, 0.7, 0.6])}{'<seg003>' * 16} dog", lambda codes: left_half)
    assert shifted["shape_iou"] == 1 and shifted["mask_iou"] == pytest.approx(0.33, abs=0.05)
    assert summarize([shifted, score(question, "", lambda codes: left_half)])["shape_iou"] == 0.5


# Tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


def test_token_order_equals_paligemma(tokenizer):
    ids = [tokenizer.token_to_id(token) for token in ("<pad>", "<eos>", "<bos>", "<unk>")]
    assert ids == [0, 1, 2, 3]
    first, last = tokenizer.token_to_id("<loc0000>"), tokenizer.get_vocab_size() - 1
    assert tokenizer.token_to_id("<loc1023>") == first + 1023
    assert tokenizer.token_to_id("<seg000>") == first + 1024
    assert tokenizer.token_to_id("<seg127>") == first + 1151
    assert tokenizer.token_to_id("<image>") == last == first + 1152
    assert tokenizer.get_vocab_size() < 2200


@pytest.mark.parametrize(
    "text",
    [
        "caption en\n",
        "answer en how many penguins are there?",
        "Describe the zebra, please! 3.14",
        "un pingüino y dos búhos; ¿qué más?",
        "一只红色的熊猫和两只猫头鹰。谢谢",
        "<loc0001><loc0002><loc1023><loc0000><seg001> dog ; ",
        "日本 €🎉 e\u0301",
        "  two  spaces\n\n\ttab\r\n",
        "<0x41> <loc> <image",
        "",
    ],
)
def test_decoding_restores_any_text(tokenizer, text):
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.token_to_id("<unk>") not in ids and tokenizer.token_to_id("<bos>") not in ids


def test_task_words_are_single_tokens_and_other_words_are_split(tokenizer):
    assert tokenizer.encode("detect dog ; cat").tokens == ["detect", "▁dog", "▁;", "▁cat"]
    assert tokenizer.encode("dos peces rojos").tokens == ["dos", "▁peces", "▁rojos"]
    assert tokenizer.encode("一只熊猫").tokens == ["一", "只", "熊猫"]
    assert tokenizer.encode("detect carpet").tokens == ["detect", "▁", *"carpet"]


def test_questions_and_answers_consist_of_word_tokens(tokenizer, scenes):
    allowed = {"a", "▁", "?", ",", *"01234"}
    for index in range(60):
        for question in all_questions(scenes.scene(index), np.random.default_rng(index)):
            for text in (question.prompt, question.answer_with(["<seg000>" * 16] * len(question.targets))):
                short = {token for token in tokenizer.encode(text).tokens if len(token) == 1 and token.isascii()}
                assert short <= allowed


def test_name_token_ids_cover_all_classes_and_colors(tokenizer):
    classes, colors = name_token_ids(tokenizer)
    assert set(classes) == set(CLASSES) and set(colors) == set(COLORS)
    assert [tokenizer.id_to_token(index) for index in classes["fish"]] == ["▁fish", "▁pez", "▁peces", "鱼"]
    assert all(isinstance(index, int) for ids in (*classes.values(), *colors.values()) for index in ids)


def test_saved_tokenizer_loads_with_transformers(tokenizer, tmp_path):
    transformers = pytest.importorskip("transformers")
    save_tokenizer(tmp_path)
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path)
    text = "answer en where is the fish?\n<loc0005> dog"
    assert loaded(text).input_ids == tokenizer.encode(text).ids
    special = (loaded.pad_token_id, loaded.eos_token_id, loaded.bos_token_id, loaded.unk_token_id)
    assert special == (0, 1, 2, 3)
    ids = [loaded.bos_token_id, *tokenizer.encode("<loc0005><seg007> dog").ids, loaded.eos_token_id]
    assert loaded.decode(ids, skip_special_tokens=True) == "<loc0005><seg007> dog"
    assert loaded.convert_tokens_to_ids("<image>") == len(loaded) - 1
