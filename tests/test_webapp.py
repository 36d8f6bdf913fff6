"""What the page and the API show, computed without either."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from fake_model import PROCESSOR, FakeModel, fake_inspection, make_candidate, make_step
from PIL import Image, ImageColor

from paligemma.generation import GenerationResult
from paligemma.masks import MaskDecoder, decode_rle
from paligemma.sampling import Sampling
from paligemma.webapp import events, run_file
from paligemma.webapp.examples import example_chips, load_examples
from paligemma.webapp.images import MAX_PIXELS, PREVIEW_SIDE, image_view_state, make_input_image, open_image
from paligemma.webapp.render import attention, objects, token_strip
from paligemma.webapp.requests import MAX_PROMPT_CHARACTERS, read_request, uploaded_path
from paligemma.webapp.runs import MAX_RUNS, History, Run, run_tree
from paligemma.webapp.tasks import BUNDLED_NOTE, MIX_TASKS, apply_task, note_on, tasks_of

ASSETS = Path(__file__).parents[1] / "assets"

OPTIONS = {"max_new_tokens": 16, "temperature": 0, "top_k": 0, "top_p": 1, "seed": None, "top_n": 10}


def answer(*pieces: str) -> GenerationResult:
    stream = FakeModel(pieces).stream(None, "", top_n=3)
    while True:
        try:
            next(stream)
        except StopIteration as end:
            return end.value


# Tokens and candidates


@pytest.mark.parametrize(
    ("piece", "shown"),
    [
        ("▁cat", "␣cat"),
        ("\n\n", "↵↵"),
        ("\t", "⇥"),
        ("<0xE4>", "<0xE4>"),
        ("猫", "猫"),
        ("${alert(1)}", "${alert(1)}"),
        ("\u200b", "\\u200b"),
        ("\u202e", "\\u202e"),
        ("\u0301", "\\u0301"),
        ("\U000e0041", "\\U000e0041"),
        ("", ""),
    ],
)
def test_every_character_of_a_piece_can_be_seen(piece, shown):
    assert token_strip.visible_piece(piece) == shown


@pytest.mark.parametrize(
    ("share", "text"),
    [(0, "0 %"), (1, "100 %"), (0.5, "50.0 %"), (0.0004, "< 0.1 %"), (0.9996, "> 99.9 %"), (0.001, "0.1 %")],
)
def test_a_share_never_looks_more_certain_than_it_is(share, text):
    assert token_strip.format_share(share) == text


GREEDY = Sampling()


def test_the_strip_gets_only_what_it_lacks():
    steps = answer("▁a", "<loc0001>", "\n").steps
    update = token_strip.token_strip_state(3, steps, 1, GREEDY)
    assert (update["run"], update["start"], update["count"], update["done"]) == (3, 1, 4, False)
    assert [(token["index"], token["piece"], token["kind"]) for token in update["tokens"]] == [
        (1, "<loc0001>", "loc"), (2, "↵", "space"), (3, "<eos>", "special"),
    ]  # fmt: skip


def test_an_update_has_the_same_size_however_long_the_answer_is():
    steps = answer(*["▁a"] * 300).steps
    sizes = [
        len(json.dumps(token_strip.token_strip_state(1, steps[: end + 1], end, GREEDY))) for end in (100, 200, 299)
    ]
    assert max(sizes) - min(sizes) < 10


def test_the_list_at_a_step_belongs_to_that_step():
    steps = answer("▁a", "▁b", "▁c").steps
    for index, step in enumerate(steps):
        entry = token_strip.token_entry(steps, index, GREEDY)
        assert [row["id"] for row in entry["rows"]] == [candidate.token_id for candidate in step.top]
        assert entry["rows"][entry["chosen"]]["id"] == entry["id"] == step.token_id


def test_a_candidate_s_row_shows_every_stage():
    top = (make_candidate(7, "▁a", 5.0, 0.75), make_candidate(9, "▁b", 4.0, 0.25), make_candidate(8, "▁c", 1.0, 0.0))
    entry = token_strip.token_entry([make_step(top)], 0, Sampling(temperature=0.5, top_k=2))
    assert [row["cells"] for row in entry["rows"]] == [
        ["1", "␣a", "7", "5.00", "10.00", "-0.50", "60.7 %", "60.7 %", "kept", "75.0 %"],
        ["2", "␣b", "9", "4.00", "8.00", "-1.50", "22.3 %", "83.0 %", "kept", "25.0 %"],
        ["3", "␣c", "8", "1.00", "2.00", "-4.50", "1.1 %", "84.1 %", "top-k", "0 %"],
    ]
    assert all(len(row["cells"]) == len(token_strip.CANDIDATE_COLUMNS) for row in entry["rows"])
    assert [row["dropped"] for row in entry["rows"]] == [False, False, True]
    assert dict(entry["metrics"])["top-k mass"] == "84.1 %"
    assert dict(entry["metrics"])["top-2 logit margin"] == "1.00"


@pytest.mark.parametrize(
    ("sampling", "rank", "logit", "stage"),
    [
        (Sampling(), 2, 4.0, "greedy"),
        (Sampling(1.0, top_k=1), 2, 4.0, "top-k"),
        (Sampling(1.0, top_k=1, top_p=0.5), 2, 5.0, "top-p"),  # equal to the k-th logit: top-k keeps it
        (Sampling(1.0, top_p=0.5), 2, 4.0, "top-p"),
        (Sampling(1.0), 2, -900.0, "kept"),  # only too small for a number
    ],
)
def test_what_dropped_a_candidate_is_named(sampling, rank, logit, stage):
    top = (make_candidate(7, "▁a", 5.0, 1.0), make_candidate(9, "▁b", logit, 0.0))
    assert token_strip.filter_stage(rank, top[1], make_step(top), sampling) == stage


def test_a_chosen_token_beyond_the_list_follows_with_its_rank():
    top = (make_candidate(7, "▁a", 5.0), make_candidate(9, "▁b", 4.0))
    entry = token_strip.token_entry([make_step(top, chosen=make_candidate(3, "▁rare", 0.5, 0.1), rank=41)], 0, GREEDY)
    assert entry["rows"][entry["chosen"]]["cells"][:3] == ["41", "␣rare", "3"]
    assert entry["rows"][entry["chosen"]]["cells"][7] == token_strip.NOT_APPLIED


def test_of_two_candidates_that_look_alike_the_one_with_the_chosen_id_is_marked():
    top = (make_candidate(7, "▁a", 4.0), make_candidate(9, "▁a", 4.0))
    assert token_strip.token_entry([make_step(top, chosen=top[1])], 0, GREEDY)["chosen"] == 1


def test_a_location_token_says_which_edge_it_is():
    steps = answer("<loc0001>", "<loc0002>", "<loc0003>", "<loc0004>", "▁cat", "<loc0005>").steps
    roles = [token_strip.token_entry(steps, index, GREEDY)["role"] for index in range(6)]
    assert roles == ["y_min", "x_min", "y_max", "x_max", "", "y_min"]


# Tasks


def test_a_task_writes_the_prompt_and_keeps_what_was_asked_about():
    detect, segment = (next(task for task in MIX_TASKS if task.name == name) for name in ("detect", "segment"))
    caption = MIX_TASKS[0]
    assert apply_task(segment, "detect two dogs", MIX_TASKS) == "segment two dogs"
    assert apply_task(detect, "caption en", MIX_TASKS) == "detect "
    assert apply_task(detect, "answer en where?", MIX_TASKS) == "detect "
    assert apply_task(caption, "detect dog", MIX_TASKS) == "caption en"


def test_only_tasks_that_the_model_knows_are_offered():
    assert "ocr" not in {task.name for task in tasks_of("bundled")}
    assert {"caption", "detect", "segment", "answer", "ocr"} == {task.name for task in tasks_of("hub")}


# Runs


def make_run(number: int, *pieces: str, parent: int | None = None, branched_at: int | None = None) -> Run:
    image = make_input_image(Image.linear_gradient("L").resize((80, 40)).convert("RGB"), PROCESSOR)
    request = {**OPTIONS, "prompt": "detect cat", "seed": 7, "forced_ids": (), "time_limit": None}
    model = {"name": "m", "revision": None, "dtype": "float32", "device": "cpu", "parameters": 8}
    run = Run(number, image, request, model, parent, branched_at)
    result = answer(*pieces)
    run.steps = list(result.steps)
    run.finish(result)
    return run


def test_a_branch_is_planned_by_id():
    history = History()
    history.add(make_run(1, "▁a", "▁b"))
    run_request = history.branch_request(1, 1, 12)
    assert run_request.parent == 1 and run_request.branched_at == 1
    assert read_request(*run_request.arguments)["forced_ids"] == (0, 12)
    for unknown in ((2, 0, 1), (1, 9, 1), (1, -1, 1), (1, "0", 1), (None, 0, 1)):
        assert history.branch_request(*unknown) is None


def test_one_step_continues_a_run_that_has_not_ended():
    history = History()
    run = history.add(make_run(1, "▁a", "▁b"))
    assert history.step_request() is None  # it ended with its end token
    run.steps, run.finish_reason = run.steps[:2], "stopped"
    run_request = history.step_request()
    assert (run_request.replaces, run_request.stop_after) == (1, 3)
    assert read_request(*run_request.arguments)["forced_ids"] == run.token_ids


def test_a_branch_from_behind_the_largest_number_of_tokens_gets_to_its_token():
    history = History()
    history.add(make_run(1, *["▁a"] * 20))
    request = read_request(*history.branch_request(1, 18, 182).arguments)
    assert request["max_new_tokens"] == len(request["forced_ids"]) == 19


def stopped_branch() -> Run:
    """Of three forced tokens it has one."""
    run = make_run(2, "▁a", "▁b", "▁c", parent=1, branched_at=2)
    run.request["forced_ids"] = (0, 10, 22)
    run.steps = run.steps[:1]
    run.finish(None)
    return run


def test_a_branch_that_was_stopped_early_goes_on_to_the_token_it_was_made_for():
    history = History()
    run = history.add(stopped_branch())
    (row,) = run_tree(history)["runs"]
    assert (row["count"], row["branched_at"], row["piece"]) == (1, 3, "")
    run_request = history.step_request()
    assert (
        run_request.stop_after == 2 and read_request(*run_request.arguments)["forced_ids"] == run.request["forced_ids"]
    )


def test_the_tree_has_branches_below_the_run_that_they_left():
    history = History()
    for run in (make_run(1, "▁a"), make_run(2, "▁a"), make_run(3, "▁a", parent=1, branched_at=0)):
        history.add(run)
    assert [(row["number"], row["depth"]) for row in run_tree(history)["runs"]] == [(1, 0), (3, 1), (2, 0)]
    assert [row["current"] for row in run_tree(history)["runs"]] == [False, True, False]


def test_the_tree_shows_the_beginning_of_a_text_without_half_a_token():
    history = History()
    run = history.add(make_run(1, *["<loc0001>"] * 30))
    (row,) = run_tree(history)["runs"]
    assert run.text.startswith(row["text"]) and row["text"].endswith("<loc0001>") and len(row["text"]) == 198


def test_the_oldest_run_goes_when_there_are_too_many_and_its_branches_stay():
    history = History()
    for number in range(1, MAX_RUNS + 2):
        history.add(make_run(number, "▁a", parent=1 if number > 1 else None))
    rows = run_tree(history)["runs"]
    assert len(rows) == MAX_RUNS and all(row["depth"] == 0 for row in rows)
    assert f"The last {MAX_RUNS} stay" in (ASSETS.parent / "README.md").read_text(encoding="utf-8")


def test_two_runs_side_by_side_show_where_they_differ():
    left, right = make_run(1, "▁a", "▁b"), make_run(2, "▁a", "▁b")
    right.steps[1] = dataclasses.replace(right.steps[1], token_id=99)
    sides = run_tree(History(), (left, right))["compared"]
    assert [[token["same"] for token in side["tokens"]] for side in sides] == [[True, False, True]] * 2


# Export


VERSIONS = {"python": "3", "torch": "2", "gradio": "6"}


def test_a_run_comes_back_from_its_file_as_it_was():
    run = make_run(1, "<loc0001>", "▁cat", parent=None, branched_at=1)
    run.request["forced_ids"] = (0, 10)
    back = run_file.read_run(run_file.write_run(run, VERSIONS).encode(), 5)
    assert back.number == 5 and back.imported
    assert back.steps == run.steps
    assert back.image.size == run.image.size and back.image.model_input.tobytes() == run.image.model_input.tobytes()
    assert (back.request, back.model, back.timing, back.finish_reason, back.branched_at) == (
        run.request, run.model, run.timing, run.finish_reason, run.branched_at,
    )  # fmt: skip


@pytest.mark.parametrize("reason", ["stopped", "time"])
def test_a_branch_that_ended_before_its_token_comes_back_too(reason):
    run = stopped_branch()
    run.finish_reason = reason
    back = run_file.read_run(run_file.write_run(run, VERSIONS).encode(), 5)
    assert (back.branched_at, len(back.steps), back.request["forced_ids"]) == (2, 1, (0, 10, 22))


def test_noise_of_the_largest_size_comes_back():
    run = make_run(1, "▁a")
    levels = np.random.default_rng(0).integers(0, 256, (run_file.MAX_SEEN_SIDE, run_file.MAX_SEEN_SIDE, 3), np.uint8)
    run.image = dataclasses.replace(run.image, model_input=Image.fromarray(levels))
    back = run_file.read_run(run_file.write_run(run, VERSIONS).encode(), 5)
    assert back.image.model_input.tobytes() == run.image.model_input.tobytes()


def change(document: dict, path: str, value: object) -> None:
    *folders, name = path.split("/")
    for folder in folders:
        document = document[int(folder)] if isinstance(document, list) else document[folder]
    document[name] = value


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("format", "paligemma-run/2", "format"),
        ("extra", 1, "extra"),
        ("request/prompt", "x" * 3000, "prompt"),
        ("request/top_p", 0, "top_p"),
        ("request/seed", 1.5, "seed"),
        ("request/forced_ids", [-1], "forced_ids"),
        ("model/name", 3, "name"),
        ("tokens/0/prob", 1.5, "prob"),
        ("tokens/0/logit", float("nan"), "NaN"),
        ("tokens/0/logit", True, "logit"),
        ("tokens/0/top", [{"token_id": 1}], "top"),
        ("picture/shown", "AAAA", "shown"),
        ("picture/seen_sha256", "0" * 64, "seen_sha256"),
        ("branched_at", 9, "branched_at"),
        ("timing/total_s", -1, "total_s"),
    ],
)
def test_a_file_with_anything_else_in_it_is_refused_by_name(path, value, message):
    document = json.loads(run_file.write_run(make_run(1, "▁a"), VERSIONS))
    change(document, path, value)
    with pytest.raises(ValueError, match=message):
        run_file.read_run(json.dumps(document).encode(), 1)


@pytest.mark.parametrize("file", [b"", b"[]", b"{}", b"\xff\xfe", b"[" * 200_000, b'{"format": NaN}'])
def test_what_is_no_run_is_refused(file):
    with pytest.raises(ValueError):
        run_file.read_run(file, 1)


def test_a_token_of_the_hub_is_never_exported():
    run = make_run(1, "▁a")
    run.request["prompt"] = "hf_abcdefghijklmnop"
    assert "hf_abcdef" not in run_file.write_run(run, VERSIONS)


# Objects


CODES = [f"<seg{number:03d}>" for number in range(16)]
BOX = ("<loc0256>", "<loc0512>", "<loc0768>", "<loc1023>")


def test_objects_are_shares_of_the_picture_with_their_tokens():
    run = make_run(1, *BOX, "▁cat", "▁;", "▁", "<loc0001>", "▁dog")
    preview = objects.object_list(run)
    (found,) = preview["objects"]
    assert found["label"] == "cat" and found["tokens"] == [0, 1, 2, 3, 4]
    assert found["box"] == pytest.approx([0.5, 0.25, 511 / 1024, 0.5])
    assert found["pixels"] == "40, 10 – 80, 30"
    (problem,) = preview["problems"]
    assert problem["text"] == "<loc0001> dog" and problem["tokens"][0] == 7 and "1 location" in problem["reason"]


def test_an_object_appears_as_soon_as_it_is_complete():
    run = make_run(1, *BOX, "▁cat", "▁;")
    steps, run.finish_reason = run.steps, None
    preview = []
    for count in range(1, 7):
        run.steps = steps[:count]
        preview.append(len(objects.object_list(run)["objects"]))
    assert preview == [0, 0, 0, 0, 1, 1]


def test_sixteen_codes_become_a_mask_and_without_a_decoder_a_sentence():
    run = make_run(1, *BOX, *CODES, "▁cat")
    assert objects.object_list(run)["has_codes"]
    preview = objects.object_list(run, MaskDecoder().eval())
    assert preview["objects"][0]["mask"].startswith("data:image/png;base64,") and not preview["has_codes"]


def test_a_mask_s_picture_is_opaque_where_the_mask_is():
    mask = np.zeros((64, 64), dtype=np.float32)
    mask[:, 32:] = 1
    drawn = np.asarray(objects.mask_image(mask))[..., 1]
    assert drawn[:, :120].max() == 0 and drawn[:, 136:].min() == 255


def test_objects_are_downloaded_as_coco_and_as_a_picture():
    run = make_run(1, *BOX, *CODES, "▁cat")
    document = json.loads(objects.coco_file(run, MaskDecoder().eval()))
    (annotation,) = document["annotations"]
    assert annotation["bbox"] == pytest.approx([40, 10, 39.92, 20], abs=0.01)
    assert annotation["segmentation"]["size"] == [40, 80]
    assert document["categories"] == [{"id": annotation["category_id"], "name": "cat"}]
    drawn = Image.open(io.BytesIO(objects.annotated_image(run, MaskDecoder().eval())))
    assert drawn.format == "PNG" and drawn.size == (80, 40)


def test_a_label_of_several_lines_is_drawn_as_one():
    several, one = (make_run(1, *BOX, *pieces) for pieces in (("▁cat", "\n", "▁dog"), ("▁cat", "▁dog")))
    assert objects.object_list(several)["objects"][0]["label"] == "cat\n dog"
    assert objects.annotated_image(several) == objects.annotated_image(one)


def test_a_label_at_the_right_edge_is_whole():
    def label_pixels(left: str, right: str) -> int:
        run = make_run(1, "<loc0640>", left, "<loc0900>", right, "▁cat")
        above_the_box = np.asarray(Image.open(io.BytesIO(objects.annotated_image(run))))[:24]
        return int((above_the_box == ImageColor.getrgb(objects.PALETTE[0])).all(axis=-1).sum())

    assert label_pixels("<loc1000>", "<loc1023>") == label_pixels("<loc0000>", "<loc0023>") > 50


# Attention


def test_an_inspection_keeps_its_patches_and_layers_in_order():
    found = fake_inspection(None, None, "", (3, 4, 5, 6, 7, 8), 5)
    event = attention.inspection_event(found, 5)
    assert event["grid"] == [4, 4] and np.asarray(event["attention"]).shape == (2, 2, 16)
    assert event["attention"][0][0][5] == 0.5 and sum(event["attention"][0][0]) == 0.5
    assert [row["rank_of_final"] for row in event["lens"]] == [3, 2, 1]
    assert len(attention.inspect(1, found, 5)["rows"][0]["cells"]) == len(attention.LENS_COLUMNS)
    assert attention.mean_shares(torch.tensor([[[0.1, 0.3]], [[0.5, 0.5]]])) == [0.2, 0.5]


# Events of the API


def test_an_event_is_json_with_every_field_of_the_step():
    step = answer("▁a").steps[0]
    event = json.loads(json.dumps(events.step_event(step)))
    assert event["text"] == " a" and "text" not in event["step"]
    assert event["step"]["top"][0] == {
        name: event["step"][name] for name in ("token_id", "piece", "logit", "logprob", "prob", "sampled_prob")
    }


def test_the_last_event_has_objects_in_pixels_and_times():
    result = answer("<loc0256>", "<loc0512>", "<loc0768>", "<loc1023>", "▁cat")
    event = events.last_event(result, (1024, 512))
    (found,) = event["detections"]
    assert found["label"] == "cat"
    assert found["box"] == [512, 128, 1023, 384]
    assert found["score"] == pytest.approx(result.steps[0].prob)
    assert found["mask"] is None
    assert event["timing"] == {"image_s": 0.01, "first_token_s": 0.02, "total_s": 0.05, "tokens_per_s": 50.0}
    assert event["finish_reason"] == "eos"


def test_codes_become_a_mask_where_there_is_a_decoder():
    codes = [f"<seg{number:03d}>" for number in range(16)]
    result = answer("<loc0000>", "<loc0000>", "<loc0512>", "<loc0512>", *codes, "▁cat")
    (found,) = events.detections(result.steps, (40, 20), MaskDecoder().eval())
    assert decode_rle(found["mask"]).shape == (20, 40)


def test_locations_spelled_in_letters_have_no_score():
    (found,) = events.detections(answer("<loc0000><loc0000><loc0512><loc0512>", "▁cat").steps, (40, 20))
    assert found["score"] is None


# Pictures


@pytest.mark.parametrize("name", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
def test_pictures_are_known_by_their_content(tmp_path, name):
    path = tmp_path / "picture.anything"
    Image.new("RGB", (6, 4)).save(path, format=name)
    assert open_image(path).size == (6, 4)


def test_a_picture_is_turned_upright(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (6, 4)).save(tmp_path / "turned.jpg", exif=exif)
    assert open_image(tmp_path / "turned.jpg").size == (4, 6)


def test_a_small_file_with_a_huge_picture_is_refused_before_it_is_decoded(tmp_path):
    Image.new("1", (13_000, 13_000)).save(tmp_path / "bomb.png")
    assert (tmp_path / "bomb.png").stat().st_size < 50_000
    with pytest.raises(ValueError, match=f"13000 × 13000 pixels; at most {MAX_PIXELS // 10**6} million"):
        open_image(tmp_path / "bomb.png")


@pytest.mark.parametrize(
    ("content", "words_of_it"),
    [
        (b"", "none of the pictures"),
        (b"not a picture", "none of the pictures"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "none of the pictures"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "none of the pictures"),
    ],
)
def test_other_files_are_refused_in_words(tmp_path, content, words_of_it):
    (tmp_path / "file.png").write_bytes(content)
    with pytest.raises(ValueError, match=words_of_it):
        open_image(tmp_path / "file.png")


def test_a_truncated_picture_is_refused_in_words(tmp_path):
    Image.effect_noise((64, 64), 50).save(tmp_path / "whole.png")
    (tmp_path / "half.png").write_bytes((tmp_path / "whole.png").read_bytes()[:1000])
    with pytest.raises(ValueError, match="damaged"):
        open_image(tmp_path / "half.png")


def test_no_picture_is_said_so():
    for nothing in (None, ""):
        with pytest.raises(ValueError, match="Choose a picture"):
            open_image(nothing)


def test_the_model_sees_the_same_in_the_kept_square_as_in_the_picture():
    image = Image.effect_noise((90, 40), 60).convert("RGB")
    model_input = make_input_image(image, PROCESSOR).model_input
    assert PROCESSOR.resize(model_input) == PROCESSOR.resize(image)


def test_what_is_shown_of_a_picture_is_small_and_has_its_shape():
    image = make_input_image(Image.new("RGB", (3000, 1500)), PROCESSOR)
    assert Image.open(io.BytesIO(image.preview)).size == (PREVIEW_SIDE, PREVIEW_SIDE // 2)
    value = image_view_state(image, 16)
    assert (value["width"], value["height"], value["side"], value["patches"]) == (3000, 1500, 56, 16)
    assert image_view_state(None) is None


def test_every_example_can_be_opened():
    examples = load_examples(ASSETS / "examples")
    assert examples and all(open_image(example.path) and example.prompt and example.credit for example in examples)
    assert len(example_chips(examples)["chips"]) == len(examples)


def test_examples_whose_picture_is_missing_are_an_error_and_none_are_none(tmp_path):
    assert load_examples(tmp_path) == ()
    (tmp_path / "examples.json").write_text('[{"file": "a.png", "prompt": "caption en"}]')
    with pytest.raises(ValueError, match=r"a\.png"):
        load_examples(tmp_path)


@pytest.mark.parametrize(
    ("name", "source", "note"),
    [
        ("paligemma-emoji", "bundled", "emoji"),
        ("google/paligemma2-3b-pt-224", "hub", "pre-trained"),
        ("paligemma-3b-pt-448", "folder", "pre-trained"),
        ("google/paligemma-3b-ft-docvqa-224", "hub", "fine-tuned"),
    ],
)
def test_a_model_that_can_be_asked_less_says_so(name, source, note):
    assert note in note_on(name, source)
    assert note_on("google/paligemma2-3b-mix-224", source) == (BUNDLED_NOTE if source == "bundled" else "")


# Requests


def test_a_request_becomes_the_arguments_of_stream():
    request = read_request("caption en", **{**OPTIONS, "max_new_tokens": 16.0, "seed": 3})
    assert read_request("caption en", **{**OPTIONS, "seed": ""})["seed"] is None  # an empty field
    assert request == {
        "prompt": "caption en",
        "max_new_tokens": 16,
        "temperature": 0.0,
        "top_k": 0,
        "top_p": 1.0,
        "seed": 3,
        "top_n": 10,
        "forced_ids": (),
        "time_limit": None,
    }


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_new_tokens": 1.5},
        {"max_new_tokens": None},
        {"top_k": "4"},
        {"top_n": True},
        {"temperature": "hot"},
        {"top_p": None},
        {"seed": float("nan")},
        {"seed": float("inf")},
        {"forced_ids": "12"},
        {"forced_ids": [1, "2"]},
        {"time_limit": [1]},
        {"max_new_tokens": 1e308},
        {"seed": -(10**400)},
        {"temperature": 10**400},
    ],
)
def test_a_wrong_value_is_refused_shortly_by_the_name_of_its_field(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))) as refused:
        read_request("caption en", **{**OPTIONS, **wrong})
    assert len(str(refused.value)) < 100


def test_a_prompt_has_a_longest_length_and_a_request_a_longest_time():
    with pytest.raises(ValueError, match=str(MAX_PROMPT_CHARACTERS)):
        read_request("x" * (MAX_PROMPT_CHARACTERS + 1), **OPTIONS)
    assert read_request(None, **OPTIONS, time_limit=9)["time_limit"] == 9
    assert read_request(None, **OPTIONS)["prompt"] == ""


def test_only_what_gradio_stored_is_a_path():
    marked = {"meta": {"_type": "gradio.FileData"}}
    assert uploaded_path({"path": "a.png", **marked}) == "a.png"
    unmarked = {"path": "/etc/passwd"}
    for upload in (
        None,
        "/etc/passwd",
        unmarked,
        {**unmarked, "meta": None},
        {**unmarked, "meta": {}},
        {"path": 1, **marked},
    ):
        assert uploaded_path(upload) is None
