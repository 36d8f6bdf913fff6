"""The project as a Space: what its README tells the hub, what `requirements.txt` installs, and a visit to one."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from huggingface_hub import metadata_load

ROOT = Path(__file__).parents[1]
# What was found in the past, and the release that closed it. The oldest release that we allow must be no older.
ADVISORIES = (
    ("gradio", "3.33", "CVE-2023-34239: files of the server, requests in its name"),
    ("gradio", "4.11", "CVE-2023-51449: files of the server"),
    ("gradio", "4.13", "CVE-2024-1561: files of the server"),
    ("gradio", "4.14", "CVE-2023-6572: secrets"),
    ("gradio", "5.0", "the audit of 2024: uploads that run as scripts, requests in the server's name, and more"),
    ("gradio", "6.6.0", "CVE-2026-27167, CVE-2026-28415, CVE-2026-28416: the server's token, open redirects"),
    ("gradio", "6.7.0", "CVE-2026-28414: files of the server, on Windows"),
    ("gradio", "6.15.0", "GHSA-2mr9-9r47-px2g, CVE-2026-33937: cookies, templates"),
    ("gradio", "6.16.0", "GHSA-j36p-7w88-g82j, GHSA-vwgg-rgg9-xx9q: files of the server, open redirects"),
    ("gradio", "6.20.0", "open redirect and requests in the client's name through /file="),
    ("gradio", "6.21.0", "styles in sanitised text"),
    ("gradio", "6.22.0", "redirects behind a sign-in"),
    ("gradio", "6.31.0", "CVE-2026-111497: brotli"),
    ("pillow", "12.2.0", "CVE-2026-40192: FITS bombs"),
    ("pillow", "12.3.0", "thirteen in readers of other formats"),
    ("torch", "2.6", "CVE-2025-32434: code in weights"),
)


def version(text: str) -> tuple[int, ...]:
    numbers = [int(number) for number in text.split(".")]
    return (*numbers, 0, 0)[:3]


def allowed_range(package: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The oldest version that requirements.txt allows, and the first one that it does not."""
    requirements = (ROOT / "requirements.txt").read_text(encoding="utf-8")
    oldest, bound = re.search(rf"^{package}>=([\d.]+),<([\d.]+)$", requirements, re.M).groups()
    return version(oldest), version(bound)


@pytest.mark.parametrize(("package", "fixed", "what"), ADVISORIES)
def test_no_release_with_a_known_hole_is_allowed(package, fixed, what):
    assert allowed_range(package)[0] >= version(fixed), what


def test_known_holes_are_looked_for_every_week():
    workflow = (ROOT / ".github/workflows/audit.yml").read_text(encoding="utf-8")
    assert "cron:" in workflow and "pip-audit --requirement requirements.txt" in workflow


def test_the_front_matter_says_what_the_hub_needs():
    card = metadata_load(ROOT / "README.md")
    assert card["sdk"] == "gradio"
    oldest, bound = allowed_range("gradio")
    assert oldest <= version(card["sdk_version"]) < bound
    assert (3, 10, 0) <= version(card["python_version"]) < (3, 13, 0)  # ZeroGPU has 3.10 and 3.12
    assert (ROOT / card["app_file"]).is_file() and (ROOT / card["thumbnail"]).is_file()
    assert "Apache License" in (ROOT / "LICENSE").read_text() and card["license"] == "apache-2.0"
    assert len(card["short_description"]) <= 60  # the hub refuses longer ones
    assert all(re.fullmatch(r"google/paligemma2?-3b-mix-224", model) for model in card["models"])


# A visit to the app, at home and on Spaces that are simulated: their environment, and only cache and /tmp to write to


@cache
def namespace() -> tuple[str, ...]:
    """The command that runs another one without any network; empty where that is not allowed."""
    for options in ("-n", "-rn"):
        command = ("unshare", options)
        if shutil.which("unshare") and subprocess.run([*command, "true"], capture_output=True).returncode == 0:
            return command
    return ()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.fixture(scope="module", params=["home", "space", "zero"])
def session(request, browser, tmp_path_factory) -> dict:
    """What came of a visit by a client and in the browser. Without a network where the machine allows that."""
    if not sys.platform.startswith("linux"):
        pytest.skip("Spaces run on Linux")
    port, folder = 7860 if namespace() else free_port(), tmp_path_factory.mktemp("visit")
    command = [*namespace(), sys.executable, str(ROOT / "tests" / "visit_app.py"), str(port), str(folder)]
    ended = subprocess.run([*command, request.param], capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    return {"port": port, "place": request.param, **json.loads(ended.stdout)}


@pytest.mark.slow
@pytest.mark.browser
def test_a_space_answers_a_client_and_in_the_browser(session):
    assert session["health"]["state"] == "ready"
    assert session["client"] and session["client"].split()[0] in session["page"]["text"]
    address = "127.0.0.1" if session["place"] == "home" else "0.0.0.0"
    assert f"http://{address}:{session['port']}" in session["out"]
    assert len(session["loans"]) == (2 if session["place"] == "zero" else 0)  # a GPU for each of the two answers
    assert all(loan["seconds"] <= 60 and max(loan["sizes"]) < 64_000 for loan in session["loans"])


@pytest.mark.slow
@pytest.mark.browser
def test_a_space_ends_cleanly_and_leaves_nothing(session):
    assert session["returncode"] == 0 and session["left"] == []
    # Without the package `spaces`, Gradio's thread for changing a running Space's code ends so.
    of_gradio = 0 if session["place"] == "home" else 1
    assert (
        session["errors"].count("Traceback") == session["errors"].count("is required to run hot-reloading") <= of_gradio
    )


@pytest.mark.slow
@pytest.mark.browser
def test_without_any_route_everything_works_and_nobody_is_called(session):
    if not namespace():
        pytest.skip("this machine allows no network namespaces")
    own = re.compile(r"None|\(?'?(127\.0\.0\.1|localhost|0\.0\.0\.0|::1?)\b.*|/.*")
    assert [address for address in session["connections"] if not own.fullmatch(address)] == []
    page, here = session["page"], ("http://127.0.0.1:7860/", "data:", "blob:")
    elsewhere = [address for address in page["asked"] if not address.startswith(here)]
    if session["place"] == "home":
        assert elsewhere == [] and page["failed"] == [] and set(page["fonts"]) <= {"loaded", "unloaded"}
    # On a Space, Gradio puts the hub's own bar over the page, and asks for its fonts and its owner's picture.
    assert all(address.startswith(("https://huggingface.co/", "https://fonts.g")) for address in elsewhere)
