"""Command line and environment variables of the web app."""

from __future__ import annotations

import signal
import sys

import gradio as gr
import pytest
from webapp_helpers import run_api, run_page, status_text

from paligemma import checkpoint
from paligemma.errors import InputError
from paligemma.webapp import cli, messages
from paligemma.webapp.limits import Limits
from paligemma.webapp.served_models import ServedModel
from paligemma.webapp.session import Session


def build_served_models(*arguments: str) -> list[ServedModel]:
    return cli.build_served_models(cli.build_parser().parse_args(arguments))


def run_main(monkeypatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["app.py", *arguments])
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    with pytest.raises(SystemExit):
        cli.main()


def test_models_come_from_the_command_line_or_the_environment(monkeypatch):
    monkeypatch.setenv("MODEL_ID", "someone/from-environment")
    assert [served.name for served in build_served_models()] == ["someone/from-environment"]
    named = build_served_models("--model", "someone/first", "someone/second")
    assert [served.name for served in named] == ["someone/first", "someone/second"]
    monkeypatch.setenv("MODEL_ID", "")
    assert cli.build_parser().parse_args([]).model == []


def test_a_local_model_has_the_name_of_its_folder(tiny_checkpoint):
    (served_model,) = build_served_models("--model", str(tiny_checkpoint))
    assert served_model.name == "tiny-random"


def test_the_bundled_folder_has_the_public_name(tiny_checkpoint):
    served_models = build_served_models("--model", str(checkpoint.BUNDLED_FOLDER), str(tiny_checkpoint))
    assert [served_model.name for served_model in served_models] == [cli.BUNDLED_NAME, "tiny-random"]


def test_model_names_must_be_unique(tmp_path):
    folders = [tmp_path / parent / "model" for parent in ("a", "b")]
    for folder in folders:
        folder.mkdir(parents=True)
    with pytest.raises(InputError, match="must have unique names, got model, model"):
        build_served_models("--model", *map(str, folders))


def test_without_a_bundled_model_the_page_explains_the_option(image_file, monkeypatch, tmp_path):
    monkeypatch.setattr(checkpoint, "BUNDLED_FOLDER", tmp_path)
    (served_model,) = build_served_models()
    served_model.start()
    last = run_page(Session((served_model,)), image_file)[-1]
    assert last.status == served_model.status and last.status["code"] == "model.none"
    assert status_text(last) == messages.NO_MODEL
    with pytest.raises(gr.Error, match="--model"):
        run_api(served_model, image_file)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "~unknown-user/x"], "~unknown-user/x"),
        (["--mask-decoder", "none.npz"], "must be an existing file, got 'none.npz'"),
    ],
)
def test_an_invalid_option_is_reported_at_start(arguments, message, monkeypatch, capsys):
    run_main(monkeypatch, *arguments)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("name", "value"), [("MAX_SECONDS", "soon"), ("SIGN_IN", "secret")])
def test_an_invalid_environment_variable_is_reported_at_start(name, value, monkeypatch, capsys):
    monkeypatch.setenv(name, value)
    run_main(monkeypatch)
    message = capsys.readouterr().err.splitlines()[-1]
    assert f"error: {name} must be" in message and "secret" not in message


def test_limits_come_from_the_environment():
    assert Limits.from_environment({}) == Limits(512, 600, 16)
    environment = {"MAX_NEW_TOKENS": "64", "MAX_SECONDS": " 30", "MAX_WAITING": "4"}
    assert Limits.from_environment(environment) == Limits(64, 30, 4)
    for value in ("0", "-1", "many", "1.5"):
        with pytest.raises(InputError, match=f"MAX_SECONDS must be an integer >= 1, got '{value}'"):
            Limits.from_environment({"MAX_SECONDS": value})


def test_the_sign_in_comes_from_the_environment():
    assert cli.read_sign_in({}) is None
    assert cli.read_sign_in({"SIGN_IN": "ann:one:two bob:x"}) == [("ann", "one:two"), ("bob", "x")]
    for value in ("secret", ":secret", "ann:", "ann:x secret"):
        with pytest.raises(InputError, match="NAME:PASSWORD") as error:
            cli.read_sign_in({"SIGN_IN": value})
        assert "secret" not in str(error.value)
