"""The bundled model's data: drawings, scenes, questions and tokenizer, on a few shapes drawn here."""

from collections import Counter

import numpy as np
import pytest
from PIL import Image, ImageDraw

from paligemma.training import icons, tasks
from paligemma.training.icons import CLASSES, COLORS, STYLES_HELD_OUT, STYLES_TRAINED, Sprite, repaint
from paligemma.training.scenes import EVALUATION, Scene, SceneMaker, SceneObject, SceneOptions
from paligemma.training.tasks import (
    TASKS,
    Question,
    Target,
    ask,
    caption,
    caption_counts,
    locations,
    mask_iou,
    neighbor,
    parse_boxes,
    place,
    questions,
    sample_questions,
    score,
    summarize,
)
from paligemma.training.tokenizer import build_tokenizer, save_tokenizer, word_pieces

PAINT = {"dog": (150, 100, 60), "cat": (240, 190, 60), "tree": (40, 140, 60), "car": (30, 60, 200)}


def shape(name: str) -> np.ndarray:
    """An ellipse, a triangle, a column or a box: RGBA, trimmed to what is drawn."""
    image = Image.new("RGBA", (64, 64))
    draw = ImageDraw.Draw(image)
    fill = (*PAINT[name], 255)
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
    drawn["car"] = [Sprite("car", "shapes", 0, color, repaint(shape("car"), color, "main")) for color in COLORS]
    return {"shapes": drawn}


@pytest.fixture(scope="module")
def maker(sprites) -> SceneMaker:
    return SceneMaker(sprites, ["shapes"], seed=7)


def things(*listed: tuple[str, str | None, tuple[float, float, float, float]], size: int = 100) -> Scene:
    """A blank scene with objects of the given class, color and box in pixels."""
    objects = [
        SceneObject(name, color, "shapes", np.array(box, float), np.full((10, 10), 255, np.uint8), (0, 0))
        for name, color, box in listed
    ]
    return Scene(np.zeros((size, size, 3), np.uint8), tuple(objects))


def box_around(x: float, y: float, half: float = 8) -> tuple[float, float, float, float]:
    return (x - half, y - half, x + half, y + half)


# --- drawings ---


def test_forty_classes_have_distinct_words():
    nouns = [icon_class.noun for icon_class in CLASSES.values()]
    assert len(CLASSES) == 40
    for words in ("name", "plural", "spanish", "spanish_plural", "chinese"):
        assert len({getattr(noun, words) for noun in nouns}) == 40
    assert not set(STYLES_TRAINED) & set(STYLES_HELD_OUT)


@pytest.mark.parametrize("color", COLORS)
def test_repainting_sets_the_named_color_whatever_it_was(color):
    pixels = shape("car")
    red_before = pixels.copy()
    red_before[..., :3] = red_before[..., [2, 1, 0]]
    for before in (pixels, red_before):
        after = repaint(before, color, "main")
        body = after[25, 45, :3].astype(int)
        assert np.abs(body - COLORS[color].rgb).max() <= 12
        assert np.array_equal(after[8, 12], before[8, 12])  # the white window
        assert np.array_equal(after[..., 3], before[..., 3])


def test_hue_saturation_value_of_known_colors():
    rgb = np.array([[1, 0, 0], [0, 1, 0], [0, 0, 0.5], [0.5, 0.5, 0.5]])
    hue, saturation, value = icons.hue_saturation_value(rgb)
    assert np.allclose(hue, [0, 120, 240, 0])
    assert np.allclose(saturation, [1, 1, 1, 0])
    assert np.allclose(value, [1, 1, 0.5, 0.5])


def test_unknown_style_is_refused(tmp_path):
    with pytest.raises(ValueError, match="clipart"):
        icons.load_sprites(tmp_path, 32, ["clipart"])


# --- scenes ---


def test_same_seed_same_pictures_and_splits_differ(sprites, maker):
    again = SceneMaker(sprites, ["shapes"], seed=7)
    for index in (0, 5):
        assert np.array_equal(maker.scene(index).image, again.scene(index).image)
    other = SceneMaker(sprites, ["shapes"], seed=7, split="evaluation")
    assert not np.array_equal(maker.scene(0).image, other.scene(0).image)
    with pytest.raises(ValueError, match="validation"):
        SceneMaker(sprites, ["shapes"], split="validation")


def test_boxes_are_tight_inside_and_apart(maker):
    options = maker.options
    for index in range(60):
        scene = maker.scene(index)
        assert scene.image.shape == (112, 112, 3) and scene.image.dtype == np.uint8
        assert 1 <= len(scene.objects) <= 4
        middles = np.sort([thing.centre[0] for thing in scene.objects])
        assert (np.diff(middles) >= 112 * options.apart - 4).all()
        for thing in scene.objects:
            assert thing.box.min() >= 0 and thing.box.max() <= 112
            rows, columns = np.nonzero(thing.alpha >= 128)
            x, y = thing.corner
            seen = [columns.min() + x, rows.min() + y, columns.max() + 1 + x, rows.max() + 1 + y]
            assert np.abs(thing.box - seen).max() <= 1.6


def test_one_scene_looks_alike_at_every_size(sprites):
    maker = SceneMaker(sprites, ["shapes"], EVALUATION, split="evaluation")
    for index in range(5):
        small, large = maker.scene(index, 112), maker.scene(index, 448)
        shrunk = Image.fromarray(large.image).resize((112, 112), Image.Resampling.BICUBIC)
        assert np.abs(small.image.astype(int) - np.asarray(shrunk)).mean() < 4
        for one, other in zip(small.objects, large.objects, strict=True):
            assert (one.class_name, one.color) == (other.class_name, other.color)
            assert np.abs(one.box - other.box / 4).max() < 1.5


def test_mask_shows_the_shape_inside_its_box(sprites):
    only_cats = {"shapes": {"cat": sprites["shapes"]["cat"]}}
    options = SceneOptions(counts=(1.0,), tilt_degrees=0, longest=(0.5, 0.55), augment=False, supersampled=0)
    mask = SceneMaker(only_cats, ["shapes"], options).scene(3).objects[0].mask()
    assert mask.shape == (64, 64) and mask.dtype == np.float32
    assert mask[-4:].mean() > 0.9 and mask[:4].mean() < 0.2  # a triangle on its base
    assert abs(mask.mean() - 0.5) < 0.05


def test_supersampled_scenes_keep_their_geometry(sprites):
    options = SceneOptions(supersampled=1.0, augment=False)
    for thing in SceneMaker(sprites, ["shapes"], options).scene(1).objects:
        rows, columns = np.nonzero(thing.alpha >= 128)
        assert abs(columns.min() + thing.corner[0] - thing.box[0]) <= 1.6
        assert abs(rows.max() + 1 + thing.corner[1] - thing.box[3]) <= 1.6


def test_scene_options_refuse_nonsense():
    with pytest.raises(ValueError, match="counts"):
        SceneOptions(counts=())
    with pytest.raises(ValueError, match="longest"):
        SceneOptions(longest=(0.6, 0.3))
    with pytest.raises(ValueError, match="overlap"):
        SceneOptions(overlap=0.9)


# --- questions ---


def test_captions_in_three_languages():
    scene = things(
        ("car", "red", box_around(20, 50)), ("dog", None, box_around(60, 50)), ("dog", None, box_around(85, 20))
    )
    assert caption(scene, "en") == "a red car and two dogs"
    assert caption(scene, "es") == "un coche rojo y dos perros"
    assert caption(scene, "zh") == "一辆红色的汽车和两只狗"
    three = things(
        ("apple", None, box_around(20, 50)),
        ("butterfly", "yellow", box_around(50, 50)),
        ("owl", None, box_around(80, 50)),
    )
    assert caption(three, "en") == "an apple, a yellow butterfly and an owl"
    assert caption(three, "es") == "una manzana, una mariposa amarilla y un búho"
    assert caption(three, "zh") == "一个苹果、一只黄色的蝴蝶和一只猫头鹰"


def test_captions_read_back_as_their_objects(maker):
    for index in range(30):
        scene = maker.scene(index)
        true = Counter((thing.class_name, thing.color) for thing in scene.objects)
        for language in tasks.LANGUAGES:
            assert caption_counts(caption(scene, language), language) == true


def test_locations_are_the_nearest_on_the_grid_and_in_paligemmas_order():
    assert locations((0.0, 0.25, 0.5, 1.0)) == "<loc0256><loc0000><loc1023><loc0512>"
    assert locations((-0.1, 1.9 / 1024, 2.1 / 1024, 2.0)) == "<loc0000><loc0000><loc1023><loc0004>"


def test_boxes_come_in_the_prompts_order_and_from_left_to_right():
    scene = things(
        ("dog", None, box_around(80, 20)), ("cat", None, box_around(10, 10)), ("dog", None, box_around(30, 60))
    )
    seen = set()
    for seed in range(40):
        question = ask("multi_detect", scene, np.random.default_rng(seed))
        labels = [label for label, _, _ in parse_boxes(question.answer)]
        names = question.prompt.removeprefix("detect ").split(" ; ")
        assert labels == [name for name in names for _ in range({"dog": 2, "cat": 1}.get(name, 0))]
        lefts = [box[0] for label, box, _ in parse_boxes(question.answer) if label == "dog"]
        assert lefts == sorted(lefts)
        seen.add(question.prompt)
    assert len(seen) > 2


def test_absent_things_are_answered_with_nothing(maker):
    scene = things(("dog", None, box_around(50, 50)))
    for task in ("detect", "segment"):
        asked = [ask(task, scene, np.random.default_rng(seed)) for seed in range(100)]
        absent = [question for question in asked if question.prompt.split()[1] != "dog"]
        assert absent and all(question.answer == "" and not question.targets for question in absent)


def test_segmentations_leave_room_for_the_codes():
    scene = things(("dog", None, box_around(20, 50)), ("dog", None, box_around(70, 50)))
    question = next(q for seed in range(9) if (q := ask("segment", scene, np.random.default_rng(seed))).targets)
    codes = ["<seg001>" * 16, "<seg127>" * 16]
    parsed = parse_boxes(question.answer_with(codes))
    assert [codes for _, _, codes in parsed] == [(1,) * 16, (127,) * 16]
    assert all(target.mask.shape == (64, 64) for target in question.targets)


def test_places_of_the_picture():
    assert place(0.1, 0.1) == "top left"
    assert place(0.5, 0.5) == "center"
    assert place(0.9, 0.5) == "right"
    assert place(0.5, 0.99) == "bottom"
    assert place(0.34, 0.5) is None


def test_neighbors_need_a_clear_direction():
    dog, cat, tree = box_around(50, 50), box_around(20, 52), box_around(80, 82)
    scene = things(("dog", None, dog), ("cat", None, cat), ("tree", None, tree))
    anchor = scene.objects[0]
    assert neighbor(scene, anchor, "left of") == "a cat"
    assert neighbor(scene, anchor, "above") == "nothing"
    assert neighbor(scene, anchor, "right of") is None  # the tree is as much below as right
    near = things(("dog", None, dog), ("cat", None, box_around(25, 45)), ("owl", None, box_around(24, 60)))
    assert neighbor(near, near.objects[0], "left of") is None
    far = things(("dog", None, dog), ("car", "red", box_around(30, 50)), ("owl", None, box_around(9, 55)))
    assert neighbor(far, far.objects[0], "left of") == "a red car"


def test_color_is_asked_only_of_the_one_painted_thing():
    two = things(("car", "red", box_around(20, 50)), ("car", "blue", box_around(70, 50)))
    assert ask("color", two, np.random.default_rng(0)) is None
    one = things(("car", "red", box_around(20, 50)), ("dog", None, box_around(70, 50)))
    prompts = {ask("color", one, np.random.default_rng(seed)).prompt for seed in range(20)}
    assert prompts == {"answer en what colour is the car?", "answer en what color is the car?"}


def test_every_task_is_asked_and_answers_are_balanced(maker):
    generator = np.random.default_rng(0)
    asked = Counter()
    counts, present = Counter(), Counter()
    for index in range(400):
        for question in sample_questions(maker.scene(index), generator, 3):
            asked[question.task] += 1
            counts[question.answer] += question.task == "count"
            present[question.answer] += question.task == "present"
    assert set(asked) == set(TASKS)
    assert all(counts[str(number)] > 0 for number in range(5))
    assert 0.6 < present["yes"] / present["no"] < 1.6


def test_questions_and_unknown_tasks(maker):
    found = questions(maker.scene(0), np.random.default_rng(0))
    assert len({question.task for question in found}) == len(found) >= 8
    with pytest.raises(ValueError, match="poem"):
        ask("poem", maker.scene(0), np.random.default_rng(0))


# --- scores ---


def test_a_right_answer_scores_fully(maker):
    for index in range(20):
        for question in questions(maker.scene(index), np.random.default_rng(index)):
            codes = ["<seg000>" * 16] * len(question.targets)
            figures = summarize([score(question, question.answer_with(codes))])
            assert figures.get("recall", 1) == figures.get("f1_50", 1) == 1
            assert figures.get("iou", 1) > 0.9
            if not question.targets:
                assert figures["exact"] == 1


def test_a_wrong_caption_keeps_what_it_recalled():
    question = Question("caption_en", "caption en", "a red car and two dogs")
    result = score(question, "a blue car and a dog")
    assert (result["exact"], result["objects"], result["recalled"]) == (0, 3, 1)


def test_boxes_match_by_label_and_only_once():
    box = np.array([0.25, 0.25, 0.5, 0.5])
    question = Question("detect", "detect dog", "", (Target("dog", box),))
    text = f"{locations(box)} dog ; {locations(box)} dog ; {locations(box)} cat"
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
    answer = f"{locations(target.box)}{'<seg003>' * 16} dog"
    result = score(question, answer, decode_mask=lambda codes: left_half)
    assert summarize([result])["mask_iou"] > 0.95
    shifted = score(question, f"{locations([0.3, 0.2, 0.7, 0.6])}{'<seg003>' * 16} dog", lambda codes: left_half)
    assert shifted["shape_iou"] == 1 and shifted["mask_iou"] == pytest.approx(0.33, abs=0.05)
    assert summarize([shifted, score(question, "", lambda codes: left_half)])["shape_iou"] == 0.5


# --- tokenizer ---


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


def test_token_layout_is_paligemmas(tokenizer):
    ids = [tokenizer.token_to_id(piece) for piece in ("<pad>", "<eos>", "<bos>", "<unk>")]
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
def test_any_text_comes_back(tokenizer, text):
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.token_to_id("<unk>") not in ids and tokenizer.token_to_id("<bos>") not in ids


def test_task_words_are_whole_pieces_and_others_letters(tokenizer):
    assert tokenizer.encode("detect dog ; cat").tokens == ["detect", "▁dog", "▁;", "▁cat"]
    assert tokenizer.encode("dos peces rojos").tokens == ["dos", "▁peces", "▁rojos"]
    assert tokenizer.encode("一只熊猫").tokens == ["一", "只", "熊猫"]
    assert tokenizer.encode("detect carpet").tokens == ["detect", "▁", *"carpet"]


def test_no_question_needs_letters_or_bytes(tokenizer, maker):
    allowed = {"a", "▁", "?", ",", *"01234"}
    for index in range(60):
        for question in questions(maker.scene(index), np.random.default_rng(index)):
            for text in (question.prompt, question.answer_with(["<seg000>" * 16] * len(question.targets))):
                short = {piece for piece in tokenizer.encode(text).tokens if len(piece) == 1 and piece.isascii()}
                assert short <= allowed


def test_word_pieces_name_every_class_and_color(tokenizer):
    classes, colors = word_pieces(tokenizer)
    assert set(classes) == set(CLASSES) and set(colors) == set(COLORS)
    assert [tokenizer.id_to_token(piece) for piece in classes["fish"]] == ["▁fish", "▁pez", "▁peces", "鱼"]
    assert all(isinstance(piece, int) for pieces in (*classes.values(), *colors.values()) for piece in pieces)


def test_saved_tokenizer_loads_in_both_libraries(tokenizer, tmp_path):
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
