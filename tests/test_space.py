"""The app as a Hugging Face Space: README metadata, allowed versions, and a simulated Space."""

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
# (package, first fixed release, advisory). requirements.txt must not allow older releases.
ADVISORIES = (
    ("gradio", "3.33", "CVE-2023-34239: path traversal, SSRF"),
    ("gradio", "4.11", "CVE-2023-51449: path traversal"),
    ("gradio", "4.13", "CVE-2024-1561: file access"),
    ("gradio", "4.14", "CVE-2023-6572: exposure of secrets"),
    ("gradio", "5.0", "Trail of Bits audit of 2024: XSS by uploads, SSRF and more"),
    (
        "gradio",
        "6.6.0",
        "CVE-2026-27167, CVE-2026-28415, CVE-2026-28416: exposure of the server's access token, open redirects, SSRF",
    ),
    ("gradio", "6.7.0", "CVE-2026-28414: file access on Windows"),
    ("gradio", "6.15.0", "GHSA-2mr9-9r47-px2g, CVE-2026-33937: leaked cookies, template injection"),
    ("gradio", "6.16.0", "GHSA-j36p-7w88-g82j, GHSA-vwgg-rgg9-xx9q: path traversal, open redirects"),
    ("gradio", "6.20.0", "open redirect and client-side SSRF in /file="),
    ("gradio", "6.21.0", "style elements in sanitized text"),
    ("gradio", "6.22.0", "redirects with sign-in"),
    ("gradio", "6.31.0", "CVE-2026-111497: brotli"),
    ("pillow", "12.2.0", "CVE-2026-40192: FITS bombs"),
    ("pillow", "12.3.0", "thirteen CVEs in image readers"),
    ("torch", "2.6", "CVE-2025-32434: code execution by torch.load"),
)


def version(text: str) -> tuple[int, ...]:
    numbers = [int(number) for number in text.split(".")]
    return (*numbers, 0, 0)[:3]


def allowed_range(package: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Lowest allowed version and exclusive upper bound in requirements.txt."""
    requirements = (ROOT / "requirements.txt").read_text(encoding="utf-8")
    oldest, bound = re.search(rf"^{package}>=([\d.]+),<([\d.]+)$", requirements, re.M).groups()
    return version(oldest), version(bound)


@pytest.mark.parametrize(("package", "fixed", "advisory"), ADVISORIES)
def test_vulnerable_releases_are_not_allowed(package, fixed, advisory):
    assert allowed_range(package)[0] >= version(fixed), advisory


def test_dependencies_are_audited_every_week():
    workflow = (ROOT / ".github/workflows/audit.yml").read_text(encoding="utf-8")
    assert "cron:" in workflow and "pip-audit --requirement requirements.txt" in workflow


def test_the_readme_has_the_metadata_of_a_space():
    card = metadata_load(ROOT / "README.md")
    assert card["sdk"] == "gradio"
    oldest, bound = allowed_range("gradio")
    assert oldest <= version(card["sdk_version"]) < bound
    assert (3, 10, 0) <= version(card["python_version"]) < (3, 13, 0)  # ZeroGPU supports 3.10 and 3.12
    assert (ROOT / card["app_file"]).is_file() and (ROOT / card["thumbnail"]).is_file()
    assert "Apache License" in (ROOT / "LICENSE").read_text() and card["license"] == "apache-2.0"
    assert len(card["short_description"]) <= 60  # limit of the hub
    assert all(re.fullmatch(r"google/paligemma2?-3b-mix-224", model) for model in card["models"])


# The app in use: locally and in the environment of a Space, where only the cache and /tmp are writable


@cache
def namespace() -> tuple[str, ...]:
    """Command prefix that disables the network; empty if this machine does not allow it."""
    for options in ("-n", "-rn"):
        command = ("unshare", options)
        if shutil.which("unshare") and subprocess.run([*command, "true"], capture_output=True).returncode == 0:
            return command
    return ()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.fixture(scope="module", params=["local", "space", "zerogpu"])
def report(request, browser, tmp_path_factory) -> dict:
    """Report of tests/use_app.py, without a network if this machine allows it."""
    if not sys.platform.startswith("linux"):
        pytest.skip("Spaces run on Linux")
    port, folder = 7860 if namespace() else free_port(), tmp_path_factory.mktemp("use")
    command = [*namespace(), sys.executable, str(ROOT / "tests" / "use_app.py"), str(port), str(folder)]
    process = subprocess.run([*command, request.param], capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stderr
    return {"port": port, "platform": request.param, **json.loads(process.stdout)}


@pytest.mark.slow
@pytest.mark.browser
def test_a_space_answers_in_the_client_and_in_the_browser(report):
    assert report["health"]["state"] == "ready"
    assert report["client"] and report["client"].split()[0] in report["page"]["text"]
    address = "127.0.0.1" if report["platform"] == "local" else "0.0.0.0"
    assert f"http://{address}:{report['port']}" in report["out"]
    assert len(report["leases"]) == (2 if report["platform"] == "zerogpu" else 0)  # one per answer
    assert all(lease["seconds"] <= 60 and max(lease["sizes"]) < 64_000 for lease in report["leases"])


@pytest.mark.slow
@pytest.mark.browser
def test_a_space_exits_cleanly_and_removes_its_files(report):
    assert report["returncode"] == 0 and report["left"] == []
    # Gradio's hot-reloading thread needs the `spaces` package and ends with a traceback without it.
    from_gradio = 0 if report["platform"] == "local" else 1
    assert (
        report["errors"].count("Traceback") == report["errors"].count("is required to run hot-reloading") <= from_gradio
    )


@pytest.mark.slow
@pytest.mark.browser
def test_the_app_works_offline_and_makes_no_outgoing_connections(report):
    if not namespace():
        pytest.skip("network namespaces are not available")
    own = re.compile(r"None|\(?'?(127\.0\.0\.1|localhost|0\.0\.0\.0|::1?)\b.*|/.*")
    assert [address for address in report["connections"] if not own.fullmatch(address)] == []
    page, local = report["page"], ("http://127.0.0.1:7860/", "data:", "blob:")
    other = [address for address in page["requested"] if not address.startswith(local)]
    if report["platform"] == "local":
        assert other == [] and page["failed"] == [] and set(page["fonts"]) <= {"loaded", "unloaded"}
    # On a Space, Gradio adds the hub's header, which requests fonts and the owner's avatar.
    assert all(address.startswith(("https://huggingface.co/", "https://fonts.g")) for address in other)
