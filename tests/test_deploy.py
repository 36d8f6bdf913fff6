"""Deployment to a Space, with a fake hub API."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
from huggingface_hub.errors import HfHubHTTPError

from paligemma.tools import deploy

REQUIREMENTS = "# Requirements of the app.\ntorch>=2.8,<2.14\ngradio>=6.31,<7\n"


class FakeHub:
    """Records the calls of the hub API."""

    def __init__(self) -> None:
        self.created: dict = {}
        self.variables: dict = {}
        self.files: dict = {}

    def create_repo(self, name: str, **settings) -> str:
        self.created = {"name": name, **settings}
        return f"https://hub/spaces/{name}"

    def add_space_variable(self, name: str, key: str, value: str) -> None:
        self.variables[key] = value

    def create_commit(self, name: str, operations: list, commit_message: str, repo_type: str) -> None:
        assert (name, repo_type) == (self.created["name"], "space")
        self.files = {operation.path_in_repo: operation.path_or_fileobj for operation in operations}


@pytest.mark.parametrize(
    ("hardware", "expected"),
    [
        ("zero-a10g", "# Requirements of the app.\ntorch>=2.8,<2.12\ngradio>=6.31,<7\n"),
        ("cpu-basic", f"{deploy.CPU_WHEELS}\n{REQUIREMENTS}"),
        ("t4-small", REQUIREMENTS),
    ],
)
def test_requirements_are_adapted_to_the_hardware(hardware, expected):
    assert deploy.requirements_for(REQUIREMENTS, hardware) == expected


def test_requirements_without_torch_are_rejected():
    with pytest.raises(ValueError, match="torch>="):
        deploy.requirements_for("numpy\n", "zero-a10g")


def test_only_files_of_the_app_are_uploaded():
    names = set(deploy.files_to_upload())
    assert names >= {
        "app.py",
        "README.md",
        "requirements.txt",
        "LICENSE",
        "paligemma/pipeline.py",
        "assets/page/page.css",
    }
    assert "assets/demo/config.json" in names and "assets/examples/cats.png" in names
    assert not [name for name in names if "__pycache__" in name or name.startswith((".", "tests/", "runs/"))]


def test_upload_is_one_commit_with_two_adapted_files():
    hub = FakeHub()
    url = deploy.upload(hub, "me/paligemma", "zero-a10g", "google/paligemma2-3b-mix-224", private=True)
    assert url == "https://hub/spaces/me/paligemma"
    assert hub.created == {
        "name": "me/paligemma", "repo_type": "space", "space_sdk": "gradio", "space_hardware": "zero-a10g",
        "private": True, "exist_ok": True,
    }  # fmt: skip
    assert hub.variables == {"MODEL_ID": "google/paligemma2-3b-mix-224"}
    assert hub.files.keys() == set(deploy.files_to_upload())
    changed = {name: file.decode() for name, file in hub.files.items() if isinstance(file, bytes)}
    assert changed.keys() == {"requirements.txt", "README.md"}
    assert "\ntorch>=2.8,<2.12\n" in changed["requirements.txt"]
    front_matter = changed["README.md"].split("---")[1]
    assert "thumbnail: https://huggingface.co/spaces/me/paligemma/resolve/main/assets/screenshots/" in front_matter
    assert "suggested_hardware: zero-a10g" in front_matter


def test_dry_run_prints_the_files_and_uploads_nothing(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["deploy", "me/paligemma", "--dry-run"])
    monkeypatch.setattr(deploy, "HfApi", lambda: pytest.fail("the hub API was called"))
    deploy.main()
    printed = capsys.readouterr().out
    assert "  app.py\n" in printed and "requirements.txt  (changed)" in printed
    assert "+torch>=2.8,<2.12" in printed and "-torch>=2.8,<2.14" in printed


def test_hub_error_explains_how_to_log_in(monkeypatch):
    def fail(*_, **__):
        raise HfHubHTTPError("401", response=SimpleNamespace(headers={}, request=None))

    monkeypatch.setattr(sys, "argv", ["deploy", "me/paligemma"])
    monkeypatch.setattr(deploy, "upload", fail)
    with pytest.raises(SystemExit, match="hf auth login"):
        deploy.main()
