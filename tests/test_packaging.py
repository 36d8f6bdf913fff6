"""The wheel: its files, its console scripts, and an answer of the bundled model outside the checkout."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import urllib.request
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
START_SECONDS = 120


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked wheel, as pip puts it into site-packages."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout[-2000:] + built.stderr[-2000:]
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def environment(installed: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(installed), "GRADIO_ANALYTICS_ENABLED": "False"}


def test_the_wheel_holds_the_package_and_its_assets(installed):
    files = {path.relative_to(installed).as_posix() for path in installed.rglob("*") if path.is_file()}
    source = {path.relative_to(ROOT).as_posix() for path in (ROOT / "paligemma").rglob("*.py")}
    assert source <= files and "paligemma/py.typed" in files
    for folder in ("demo", "examples", "page"):
        assert {f"paligemma/assets/{folder}/{path.name}" for path in (ROOT / "assets" / folder).iterdir()} <= files
    (metadata,) = installed.glob("*.dist-info/METADATA")
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    names = {line.split(">")[0].replace("_", "-") for line in lines if line and not line.startswith("#")}
    needed = re.findall(r"^Requires-Dist: ([\w-]+)(?!.*extra ==).*$", metadata.read_text(encoding="utf-8"), re.M)
    assert set(needed) == names
    scripts = next(installed.glob("*.dist-info/entry_points.txt")).read_text(encoding="utf-8")
    assert "paligemma = paligemma.__main__:main" in scripts and "paligemma-app = paligemma.webapp.cli:main" in scripts


def test_the_command_answers_in_an_empty_folder(installed, tmp_path):
    image = installed / "paligemma/assets/examples/rabbit.png"
    script = "from paligemma.__main__ import main; main()"
    command = [sys.executable, "-c", script, str(image), "caption en"]
    ended = subprocess.run(command, cwd=tmp_path, env=environment(installed), capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip() == "a pig and a rabbit"


def test_the_app_starts_in_an_empty_folder(installed, tmp_path):
    script = "from paligemma.webapp.cli import main; main()"
    command = [sys.executable, "-u", "-c", script, "--port", "0"]
    command[-1] = str(free_port())
    with subprocess.Popen(command, cwd=tmp_path, env=environment(installed), stdout=subprocess.PIPE, text=True) as app:
        try:
            address = wait_for_address(app)
            with urllib.request.urlopen(address, timeout=START_SECONDS) as page:
                assert "PaliGemma" in page.read().decode()
        finally:
            app.terminate()
    assert app.returncode == 0


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_for_address(app: subprocess.Popen[str]) -> str:
    for line in app.stdout:
        found = re.search(r"http://[\d.]+:\d+", line)
        if found:
            return found[0]
    raise AssertionError("the app ended before it printed its address")
