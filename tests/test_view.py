"""What the page and the API show, computed without either."""

from __future__ import annotations

import json

import pytest
from fake_model import FakeModel, make_candidate, make_step
from PIL import Image

from paligemma.generation import GenerationResult, NonFiniteLogitsError
from paligemma.masks import MaskDecoder, from_run_lengths
from paligemma.view import events, tokens, words
from paligemma.view.picture import MAX_PIXELS, open_picture
from paligemma.view.requests import MAX_PROMPT_CHARACTERS, MAX_SECONDS, picture_path, read_request

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
    assert tokens.visible_piece(piece) == shown


@pytest.mark.parametrize(
    ("share", "text"),
    [(0, "0 %"), (1, "100 %"), (0.5, "50.0 %"), (0.0004, "< 0.1 %"), (0.9996, "> 99.9 %"), (0.001, "0.1 %")],
)
def test_a_share_never_looks_more_certain_than_it_is(share, text):
    assert tokens.format_share(share) == text


def test_the_token_list_has_a_row_a_step_and_selects_the_newest():
    shown = tokens.token_list(answer("▁a", "▁cat").steps)
    assert [row["cells"][:3] for row in shown["rows"]] == [
        ("1", "␣a", "5.00"),
        ("2", "␣cat", "5.00"),
        ("3", "<eos>", "5.00"),
    ]
    assert shown["selected"] == 2
    assert all(len(row["cells"]) == len(tokens.TOKEN_COLUMNS) for row in shown["rows"])


def test_the_candidate_table_has_the_numbers_of_its_step():
    top = (make_candidate(7, "▁a", 5.0, 0.75), make_candidate(9, "▁b", 4.0, 0.25), make_candidate(8, "▁c", 1.0, 0.0))
    table = tokens.candidate_table(make_step(top, index=4))
    assert table["title"] == "Token 5: ␣a"
    assert [row["cells"] for row in table["rows"]] == [
        ("1", "␣a", "7", "5.00", "60.7 %", "75.0 %"),
        ("2", "␣b", "9", "4.00", "22.3 %", "25.0 %"),
        ("3", "␣c", "8", "1.00", "1.1 %", "0 %"),
    ]
    assert [row["dropped"] for row in table["rows"]] == [False, False, True]
    assert table["selected"] == 0
    assert dict(table["facts"])["these 3 cover"] == "84.1 %"


def test_a_chosen_token_beyond_the_list_follows_with_its_rank():
    top = (make_candidate(7, "▁a", 5.0), make_candidate(9, "▁b", 4.0))
    table = tokens.candidate_table(make_step(top, chosen=make_candidate(3, "▁rare", 0.5, 0.1), rank=41))
    assert table["rows"][table["selected"]]["cells"][:3] == ("41", "␣rare", "3")


def test_of_two_candidates_that_look_alike_the_one_with_the_chosen_id_is_marked():
    top = (make_candidate(7, "▁a", 4.0), make_candidate(9, "▁a", 4.0))
    assert tokens.candidate_table(make_step(top, chosen=top[1]))["selected"] == 1


def test_before_the_first_step_both_tables_are_empty():
    assert tokens.token_list([]) == {"rows": [], "selected": None}
    assert tokens.candidate_table(None)["rows"] == []


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
    assert from_run_lengths(found["mask"]).shape == (20, 40)


def test_locations_spelled_in_letters_have_no_score():
    (found,) = events.detections(answer("<loc0000><loc0000><loc0512><loc0512>", "▁cat").steps, (40, 20))
    assert found["score"] is None


# Pictures


@pytest.mark.parametrize("name", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
def test_pictures_are_known_by_their_content(tmp_path, name):
    path = tmp_path / "picture.anything"
    Image.new("RGB", (6, 4)).save(path, format=name)
    assert open_picture(path).size == (6, 4)


def test_a_picture_is_turned_upright(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (6, 4)).save(tmp_path / "turned.jpg", exif=exif)
    assert open_picture(tmp_path / "turned.jpg").size == (4, 6)


def test_a_small_file_with_a_huge_picture_is_refused_before_it_is_decoded(tmp_path):
    Image.new("1", (13_000, 13_000)).save(tmp_path / "bomb.png")
    assert (tmp_path / "bomb.png").stat().st_size < 50_000
    with pytest.raises(ValueError, match=f"13000 × 13000 pixels; at most {MAX_PIXELS // 10**6} million"):
        open_picture(tmp_path / "bomb.png")


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
        open_picture(tmp_path / "file.png")


def test_a_truncated_picture_is_refused_in_words(tmp_path):
    Image.effect_noise((64, 64), 50).save(tmp_path / "whole.png")
    (tmp_path / "half.png").write_bytes((tmp_path / "whole.png").read_bytes()[:1000])
    with pytest.raises(ValueError, match="damaged"):
        open_picture(tmp_path / "half.png")


def test_no_picture_is_said_so():
    for nothing in (None, ""):
        with pytest.raises(ValueError, match="Choose a picture"):
            open_picture(nothing)


# Requests


def test_a_request_becomes_the_arguments_of_stream():
    request = read_request("caption en", **{**OPTIONS, "max_new_tokens": 16.0, "seed": 3})
    assert request == {
        "prompt": "caption en",
        "max_new_tokens": 16,
        "temperature": 0.0,
        "top_k": 0,
        "top_p": 1.0,
        "seed": 3,
        "top_n": 10,
        "forced_ids": (),
        "time_limit": MAX_SECONDS,
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
    ],
)
def test_a_wrong_type_is_refused_by_the_name_of_its_field(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        read_request("caption en", **{**OPTIONS, **wrong})


def test_a_prompt_has_a_longest_length_and_a_request_a_longest_time():
    with pytest.raises(ValueError, match=str(MAX_PROMPT_CHARACTERS)):
        read_request("x" * (MAX_PROMPT_CHARACTERS + 1), **OPTIONS)
    assert read_request(None, **OPTIONS, time_limit=10**9)["time_limit"] == MAX_SECONDS
    assert read_request(None, **OPTIONS)["prompt"] == ""


def test_only_what_gradio_stored_is_a_path():
    assert picture_path({"path": "a.png"}) == "a.png"
    assert picture_path("/etc/passwd") is None
    assert picture_path(None) is None


# Words


def test_errors_of_the_library_are_shown_and_others_are_not():
    assert words.explain(ValueError("top_n is 99")) == "top_n is 99"
    assert words.explain(NonFiniteLogitsError("load it in bfloat16")) == "load it in bfloat16"
    assert "memory" in words.explain(MemoryError())
    secret = words.explain(RuntimeError("hf_secret"))
    assert "hf_secret" not in secret and "RuntimeError" in secret


def test_the_summary_names_the_seed_only_where_chance_had_a_part():
    assert "seed" not in words.summary(answer("▁a"), with_seed=False)["text"]
    assert "seed 7" in words.summary(answer("▁a"), with_seed=True)["text"]


def test_the_badge_says_that_logits_are_soft_capped():
    assert words.model_line("m", 3_700_000, "bfloat16", "cpu", None) == "m · 3.7 M · bfloat16 · cpu"
    assert "soft-capped at ±30" in words.model_line("m", 2_923_335_408, "float32", "cuda:0", 30.0)
