"""The public interface and the command line, with a small checkpoint on disk."""

from __future__ import annotations

import dataclasses
import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fake_model import FakeModel
from PIL import Image

import paligemma
from paligemma import __main__ as command_line
from paligemma import checkpoint
from paligemma.benchmarks.random_checkpoints import make_model, save_layout

IMAGE = Image.merge("RGB", [Image.linear_gradient("L"), Image.radial_gradient("L"), Image.linear_gradient("L")])
STEP_FIELDS = (
    *("index", "token_id", "piece", "text_delta", "text", "logit", "logprob", "prob", "sampled_prob", "rank"),
    *("entropy", "logsumexp", "top", "finish_reason", "seconds"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_layout(make_model("grouped"), tmp_path_factory.mktemp("checkpoints") / "tiny")


@pytest.fixture(scope="module")
def vlm(folder) -> paligemma.PaliGemma:
    return paligemma.load(folder, device="cpu")


@pytest.fixture(scope="module")
def image_file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("images") / "gradient.png"
    IMAGE.save(path)
    return path


def without_time(steps) -> list[paligemma.Step]:
    return [dataclasses.replace(step, seconds=0) for step in steps]


# The public interface


def test_names_and_defaults_match_the_contract():
    options = (
        "max_new_tokens=128, temperature=0.0, top_k=0, top_p=1.0, seed=None, top_n=10, forced_ids=(), time_limit=None"
    )
    for method in (paligemma.PaliGemma.stream, paligemma.PaliGemma.generate):
        parameters = list(inspect.signature(method).parameters.values())[3:]
        assert ", ".join(f"{parameter.name}={parameter.default!r}" for parameter in parameters) == options
    assert [field.name for field in dataclasses.fields(paligemma.Step)] == list(STEP_FIELDS)
    candidate_fields = [field.name for field in dataclasses.fields(paligemma.Candidate)]
    assert candidate_fields == ["token_id", "piece", "logit", "logprob", "prob", "sampled_prob"]


def test_public_names_exist_and_are_sorted():
    assert all(hasattr(paligemma, name) for name in paligemma.__all__)
    assert paligemma.__all__ == sorted(paligemma.__all__)


def test_attributes_of_a_loaded_model(vlm, folder):
    assert (vlm.name, vlm.source, vlm.revision) == (str(folder), "folder", None)
    assert (vlm.device, vlm.dtype) == (torch.device("cpu"), torch.float32)
    assert vlm.config is vlm.model.config
    inputs = vlm.processor([IMAGE], ["caption en"])
    assert set(inputs) == {"pixel_values", "input_ids", "attention_mask"}


def test_generate_returns_the_steps_of_stream(vlm):
    options = {"max_new_tokens": 6, "temperature": 1.5, "top_k": 50, "top_p": 0.9, "seed": 4, "top_n": 3}
    steps = list(vlm.stream(IMAGE, "caption en", **options))
    result = vlm.generate(IMAGE, "caption en", **options)
    assert without_time(result.steps) == without_time(steps)
    assert result.token_ids == tuple(step.token_id for step in steps)
    assert (result.text, result.finish_reason, result.seed) == (steps[-1].text, steps[-1].finish_reason, 4)
    assert len(steps[0].top) == 3


def test_positional_arguments(vlm):
    arguments = (IMAGE, "caption en", 5, 1.5, 50, 0.9, 4, 3, (300,), 60.0)
    assert without_time(vlm.generate(*arguments).steps) == without_time(vlm.stream(*arguments))


def test_trailing_newlines_and_special_tokens_in_the_prompt_are_harmless(vlm):
    plain = vlm.generate(IMAGE, "caption en", max_new_tokens=3)
    assert vlm.generate(IMAGE, "caption en\n\n", max_new_tokens=3).token_ids == plain.token_ids
    assert len(vlm.generate(IMAGE, "<image><bos> what", max_new_tokens=3).steps) == 3


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (None, "must be a PIL image, got NoneType"),
        ("cow.png", "must be a PIL image, got str"),
        (torch.zeros(3, 56, 56), "PIL image"),
    ],
)
def test_invalid_image_is_rejected_at_the_call(vlm, image, message):
    for method in (vlm.stream, vlm.generate):
        with pytest.raises(ValueError, match=message):
            method(image, "caption en")


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("max_new_tokens", 0),
        ("max_new_tokens", 10**6),
        ("temperature", -0.5),
        ("top_k", -1),
        ("top_p", 0.0),
        ("seed", -3),
        ("top_n", 51),
        ("forced_ids", [-1]),
        ("time_limit", 0),
    ],
)
def test_invalid_option_is_rejected_at_the_call(vlm, option, value):
    with pytest.raises(ValueError, match=option):
        vlm.stream(IMAGE, "caption en", **{option: value})


# Loading


def test_error_without_a_bundled_model_explains_how_to_choose_one(monkeypatch, tmp_path):
    monkeypatch.setattr(checkpoint.find, "BUNDLED_FOLDER", tmp_path / "demo")
    with pytest.raises(paligemma.CheckpointError, match=r"bundled model is missing: .*a hub id such as google/"):
        paligemma.load()


def test_load_with_dtype_and_progress(folder):
    reports = []
    vlm = paligemma.load(str(folder), dtype="bfloat16", device="cpu", progress=lambda *report: reports.append(report))
    assert vlm.dtype == torch.bfloat16
    stage, done, total = reports[-1]
    assert stage == "loading" and done == total > 0
    assert len(vlm.generate(IMAGE, "caption en", max_new_tokens=2).steps) == 2


# The command line


def test_answer_is_printed(vlm, folder, image_file, capsys):
    arguments = [str(image_file), "caption en", "--model", str(folder), "--device", "cpu", "--max-new-tokens", "8"]
    assert command_line.main(arguments) == 0
    expected = vlm.generate(IMAGE, "caption en", max_new_tokens=8)
    captured = capsys.readouterr()
    assert captured.out == expected.text + "\n"
    assert captured.err == ""


def test_candidates_are_printed_one_line_per_token(vlm, folder, image_file, capsys):
    arguments = [str(image_file), "caption en", "--model", str(folder), "--device", "cpu", "--max-new-tokens", "4"]
    assert command_line.main([*arguments, "--candidates", "3", "--temperature", "1.5", "--seed", "2"]) == 0
    lines = capsys.readouterr().out.split("\n")
    for step, line in zip(vlm.stream(IMAGE, "caption en", 4, 1.5, seed=2, top_n=3), lines, strict=False):
        assert line.startswith(f"{step.index:4d} {step.piece!r} {step.logit:.2f}")
        for candidate in step.top:
            assert f"{candidate.piece!r} {candidate.logit:.2f} {candidate.prob:.1%}" in line


def test_quantize_int8(folder, image_file, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    arguments = [str(image_file), "caption en", "--model", str(folder), "--device", "cpu", "--max-new-tokens", "4"]
    assert command_line.main([*arguments, "--quantize", "int8"]) == 0
    vlm = paligemma.load(folder, device="cpu", quantize="int8")
    assert capsys.readouterr().out == vlm.generate(IMAGE, "caption en", max_new_tokens=4).text + "\n"


@pytest.mark.parametrize(
    "flags",
    [
        ["--quantize", "int4"],
        ["--temperature", "-1"],
        ["--top-p", "2"],
        ["--candidates", "51"],
        ["--max-new-tokens", "0"],
        ["--bogus"],
    ],
)
def test_invalid_arguments_exit_with_2_before_loading(image_file, capsys, flags):
    with pytest.raises(SystemExit) as exit_info:
        command_line.main([str(image_file), "caption en", "--model", "absent", *flags])
    assert exit_info.value.code == 2
    assert "error:" in capsys.readouterr().err


def test_failures_print_one_line_and_exit_with_1(folder, image_file, tmp_path, capsys):
    not_an_image = tmp_path / "text.png"
    not_an_image.write_text("text")
    for image, model, message in (
        (tmp_path / "absent.png", folder, "Image file not found"),
        (not_an_image, folder, "Unsupported or corrupt image"),
        (image_file, tmp_path / "absent", "is neither a local folder"),
    ):
        assert command_line.main([str(image), "caption en", "--model", str(model)]) == 1
        captured = capsys.readouterr()
        assert captured.err.startswith("paligemma: ") and message in captured.err
        assert captured.err.count("\n") == 1
        assert captured.out == ""


def test_empty_answer_prints_a_note(folder, image_file, monkeypatch, capsys):
    monkeypatch.setattr(command_line.paligemma, "load", lambda *_, **__: FakeModel(pieces=()))
    assert command_line.main([str(image_file), "?", "--model", str(folder)]) == 0
    captured = capsys.readouterr()
    assert captured.out == "\n" and "the answer is empty" in captured.err


def test_image_too_large_for_pillow_exits_with_1(folder, image_file, monkeypatch, capsys):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    assert command_line.main([str(image_file), "caption en", "--model", str(folder)]) == 1
    assert "is too large" in capsys.readouterr().err


def test_ctrl_c_ends_with_130(folder, image_file, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(paligemma, "load", interrupted)
    assert command_line.main([str(image_file), "caption en", "--model", str(folder)]) == 130


def test_runs_as_a_module(folder, image_file):
    command = [sys.executable, "-m", "paligemma", str(image_file), "caption en", "--model", str(folder)]
    command += ["--device", "cpu", "--max-new-tokens", "1"]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1], check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
