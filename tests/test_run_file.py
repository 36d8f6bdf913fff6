"""Export and import of runs. tests/test_hostile_input.py has contradictory and oversized files."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from run_helpers import VERSIONS, make_run, make_stopped_branch, set_value

import paligemma
from paligemma.errors import InputError
from paligemma.webapp import run_file
from paligemma.webapp.run_schema import MAX_MODEL_INPUT_SIDE

# Exported by an earlier version.
EXPORTED = sorted((Path(__file__).parent / "data").glob("run-*.json"))


def reimport(run):
    return run_file.read_run(run_file.write_run(run, VERSIONS).encode(), 5)


def test_an_imported_run_equals_the_exported_one():
    run = make_run(1, "<loc0001>", "▁cat", parent=None, branched_at=1)
    run.request["forced_ids"] = (0, 10)
    imported = reimport(run)
    assert imported.number == 5 and imported.imported
    assert imported.steps == run.steps
    assert imported.image.size == run.image.size
    assert imported.image.model_input.tobytes() == run.image.model_input.tobytes()
    for name in ("request", "model", "timing", "finish_reason", "branched_at"):
        assert getattr(imported, name) == getattr(run, name)


@pytest.mark.parametrize("reason", ["stopped", "time"])
def test_a_run_that_ended_before_its_branch_can_be_imported(reason):
    run = make_stopped_branch()
    run.finish_reason = reason
    imported = reimport(run)
    assert (imported.branched_at, len(imported.steps), imported.request["forced_ids"]) == (2, 1, (0, 10, 22))


def test_noise_of_the_maximum_size_can_be_imported():
    run = make_run(1, "▁a")
    shape = (MAX_MODEL_INPUT_SIDE, MAX_MODEL_INPUT_SIDE, 3)
    noise = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    run.image = dataclasses.replace(run.image, model_input=Image.fromarray(noise))
    assert reimport(run).image.model_input.tobytes() == run.image.model_input.tobytes()


# Runs of earlier versions


@pytest.mark.parametrize("path", EXPORTED, ids=lambda path: path.stem)
def test_a_run_of_an_earlier_version_can_be_imported_and_exported_again(path):
    document = json.loads(path.read_bytes())
    run = run_file.read_run(path.read_bytes(), 1)
    exported = json.loads(run_file.write_run(run, document["versions"]))
    document["picture"].pop("seen"), exported["picture"].pop("seen")  # PNG files; the hash of their pixels is compared
    assert exported == document


def test_a_run_of_an_earlier_version_can_be_reproduced():
    run = run_file.read_run((Path(__file__).parent / "data" / "run-caption-greedy.json").read_bytes(), 1)
    result = paligemma.load(device="cpu").generate(run.image.model_input, **run.request)
    assert result.token_ids == run.token_ids and result.text == run.text


# Invalid files


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("format", "paligemma-run/2", "format must be 'paligemma-run/1', got 'paligemma-run/2'"),
        ("extra", 1, "run: missing fields: none; unexpected fields: 'extra'"),
        ("request/prompt", "x" * 3000, r"request\.prompt"),
        ("request/top_p", 0, r"request\.top_p"),
        ("request/seed", 1.5, r"request\.seed: .*, got 1\.5"),
        ("request/forced_ids", [-1], r"request\.forced_ids\[0\]"),
        ("model/name", 3, r"model\.name"),
        ("tokens/0/prob", 1.5, r"tokens\[0\]\.prob: .* less than or equal to 1, got 1\.5"),
        ("tokens/0/logit", float("nan"), "must be finite, got NaN"),
        ("tokens/0/logit", True, r"tokens\[0\]\.logit"),
        ("tokens/0/top", [{"token_id": 1}], r"tokens\[0\]\.top\[0\]: missing fields: 'piece', 'logit'"),
        ("picture/shown", "AAAA", r"picture\.shown must be a JPEG file"),
        ("picture/seen_sha256", "0" * 64, r"picture\.seen_sha256"),
        ("branched_at", 9, "branched_at must be less"),
        ("timing/total_s", -1, r"timing\.total_s"),
    ],
)
def test_an_error_names_the_invalid_field(path, value, message):
    document = json.loads(run_file.write_run(make_run(1, "▁a"), VERSIONS))
    set_value(document, path, value)
    with pytest.raises(InputError, match=message):
        run_file.read_run(json.dumps(document).encode(), 1)


@pytest.mark.parametrize("file", [b"", b"[]", b"{}", b"\xff\xfe", b"[" * 200_000, b'{"format": NaN}'])
def test_other_files_are_rejected(file):
    with pytest.raises(InputError):
        run_file.read_run(file, 1)


def test_access_tokens_are_not_exported():
    run = make_run(1, "▁a")
    run.request["prompt"] = "hf_abcdefghijklmnop"
    assert "hf_abcdef" not in run_file.write_run(run, VERSIONS)
