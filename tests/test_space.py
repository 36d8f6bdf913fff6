"""The project as a Space: what its README tells the hub, and what `requirements.txt` would install there."""

from __future__ import annotations

import re
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
