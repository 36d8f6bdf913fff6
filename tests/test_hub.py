"""Download checkpoints from a local fake hub, with every failure as users see it."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
from fake_hub import LICENSED, UNLICENSED, FakeHub, commit_of, files_of, serving, use_address
from huggingface_hub import constants

import paligemma
from paligemma import __main__ as command_line
from paligemma.benchmarks.random_checkpoints import make_model, save_layout
from paligemma.checkpoint import (
    DOWNLOADED_FILES,
    DTYPES,
    INDEX_FILE,
    SINGLE_FILE,
    CheckpointError,
    find,
    find_checkpoint,
    hub,
    load_model,
    memory,
)
from paligemma.checkpoint.hub import redact_tokens
from paligemma.webapp import api, cli, logs, messages
from paligemma.webapp.served_models import ServedModel

ROOT = Path(__file__).parents[1]
BEHAVIOR = (ROOT / "docs" / "behavior.md").read_text(encoding="utf-8")
INVALID_TOKEN = "hf_wrongwrongwrongwrong"


@pytest.fixture(scope="module")
def single(tmp_path_factory) -> Path:
    """A single-file checkpoint in the hub's layout."""
    return save_layout(make_model("paligemma1"), tmp_path_factory.mktemp("files") / "single")


@pytest.fixture(scope="module")
def sharded(tmp_path_factory) -> Path:
    return save_layout(make_model("paligemma1"), tmp_path_factory.mktemp("files") / "sharded", sharded=True)


@pytest.fixture(scope="module")
def bundled() -> ServedModel:
    served_model = cli._build_bundled_model(cli.build_parser().parse_args([]))
    served_model.load_now()
    assert served_model.model
    return served_model


@dataclass
class Environment:
    """The fake hub and the client's cache, which a test may modify."""

    hub: FakeHub
    cache: Path
    monkeypatch: pytest.MonkeyPatch

    def set(self, target: object, name: str, value: object) -> None:
        self.monkeypatch.setattr(target, name, value)

    def log_in(self, token: str) -> None:
        self.monkeypatch.setenv("HF_TOKEN", token)

    def go_offline(self) -> None:
        self.set(constants, "HF_HUB_OFFLINE", True)

    def edit_config(self, **changes: object) -> None:
        config = json.loads(self.hub.main["config.json"])
        for name, value in changes.items():
            config[name] = {**config[name], **value} if isinstance(value, dict) and name in config else value
        self.hub.main["config.json"] = json.dumps(config).encode()

    def keep_only(self, *names: str) -> None:
        self.hub.branches["main"] = dict.fromkeys(names, b"\0" * 100)

    def put_cache_below_a_file(self) -> None:
        blocking = self.cache.parent / "a file"
        blocking.touch()
        self.set(constants, "HF_HUB_CACHE", str(blocking / "cache"))


@pytest.fixture
def env(single, tmp_path, monkeypatch) -> Iterator[Environment]:
    fake = FakeHub({"main": files_of(single)})
    with serving(fake) as address:
        use_address(monkeypatch, address, tmp_path / "cache")
        monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda seconds: None)
        yield Environment(fake, tmp_path / "cache", monkeypatch)


def fail(error: Exception) -> Callable:
    def failing(*_: object, **__: object) -> None:
        raise error

    return failing


# Every failure ----------------------------------------------------------------------------------------------------


def gate(token: str | None) -> Callable[[Environment], None]:
    """Gate the repository for a client with this token."""

    def set_up(env: Environment) -> None:
        env.hub.gated = True
        if token:
            env.log_in(token)

    return set_up


def stall(env: Environment) -> None:
    env.hub.stall = 2
    env.set(hub, "LISTING_TIMEOUT_S", 0.1)


def interrupt_downloads(env: Environment) -> None:
    env.hub.num_cuts = 99


def list_outside_path(env: Environment) -> None:
    files = env.hub.main
    files[INDEX_FILE] = b'{"weight_map": {"a": "../../../secret.safetensors"}}'
    del files[SINGLE_FILE]


def truncate(name: str) -> Callable[[Environment], None]:
    def set_up(env: Environment) -> None:
        env.hub.main[name] = env.hub.main[name][:1000]

    return set_up


def have_memory(total: int, available: int) -> Callable[[Environment], None]:
    return lambda env: env.set(memory, "available_memory", lambda device: memory.Memory(total, available))


OTHER, REVISION, HALF = ["--model", "owner/other"], ["--revision", "v9"], ["--dtype", "float16"]
# name: (fault, command line flags, error message)
CASES: dict[str, tuple[Callable[[Environment], object], list[str], str]] = {
    "gated, no access token": (gate(None), [], r"is gated and needs .* Accept its license at https.*HF_TOKEN"),
    "gated, license not accepted": (gate(UNLICENSED), [], r"gated and the access token has no access.* fine-grained"),
    "invalid access token": (
        lambda env: env.log_in(INVALID_TOKEN),
        [],
        r"rejected the access token for owner/model.*settings/tokens",
    ),
    "no such repository": (lambda env: None, OTHER, r"owner/other is neither a local folder nor a public model"),
    "no such repository, with a token": (lambda env: env.log_in(LICENSED), OTHER, r"Check the spelling"),
    "no such revision": (lambda env: None, REVISION, r"has no revision 'v9'\. Its branches are listed at"),
    "hub down": (
        lambda env: setattr(env.hub, "status", 503),
        [],
        r"The hub returned HTTP 503 for owner/model\. Try again later",
    ),
    "rate limit": (lambda env: setattr(env.hub, "status", 429), [], r"rate limit is exceeded.*Wait a few minutes"),
    "offline": (lambda env: env.go_offline(), [], r"not in the cache .* HF_HUB_OFFLINE disables .*Unset it"),
    "no connection": (
        lambda env: env.set(constants, "ENDPOINT", "http://127.0.0.1:9"),
        [],
        r"not in the cache .*is unreachable \(ConnectError.*Check the connection",
    ),
    "no DNS": (
        lambda env: env.set(socket, "getaddrinfo", fail(socket.gaierror(-3, "no name server"))),
        [],
        r"is unreachable \(ConnectError: .*no name server\)\. Check the connection",
    ),
    "timeout": (stall, [], r"is unreachable \(ReadTimeout.*Check the connection"),
    "interrupted download": (
        interrupt_downloads,
        [],
        r"Downloading owner/model failed: .*try again; complete files are kept",
    ),
    "disk too small": (
        lambda env: env.set(shutil, "disk_usage", lambda path: SimpleNamespace(free=10**4)),
        [],
        r"needs 0\.\d\d GB more disk space, but the disk of .*cache has 0\.00 GB free\. Free some space, or",
    ),
    "disk full": (
        lambda env: env.set(huggingface_hub, "snapshot_download", fail(OSError(errno.ENOSPC, "No space left"))),
        [],
        r"The disk of .*cache is full\. Free some space",
    ),
    "cache folder cannot be created": (
        Environment.put_cache_below_a_file,
        [],
        r"cannot be stored in the cache .*\. Make that folder writable",
    ),
    "cache not writable": (
        lambda env: env.set(huggingface_hub, "hf_hub_download", fail(PermissionError(errno.EACCES, "denied"))),
        [],
        r"cannot be stored in the cache .*denied.*set HF_HOME",
    ),
    "GGUF": (lambda env: env.keep_only("config.json", "q4.gguf"), [], r"GGUF weights, which are not supported\. Use"),
    "big_vision": (lambda env: env.keep_only("pt_224.npz"), [], r"big_vision weights \(\.npz\), which are not"),
    "adapter": (
        lambda env: env.keep_only("adapter_config.json", "adapter_model.safetensors"),
        [],
        r"only a PEFT adapter.*Merge",
    ),
    "pickle": (lambda env: env.keep_only("config.json", "pytorch_model.bin"), [], r"only pytorch_model\.bin\. Pickle"),
    "no weights": (lambda env: env.keep_only("README.md"), [], r"neither model\.safetensors nor"),
    "no configuration": (lambda env: env.hub.main.pop("config.json"), [], r"has no config\.json\. Copy or"),
    "no tokenizer": (lambda env: env.hub.main.pop("tokenizer.json"), [], r"has no tokenizer\.json\. Download it"),
    "another model": (
        lambda env: env.edit_config(model_type="llava"),
        [],
        r"config\.json of owner/model cannot be used: .*'llava'",
    ),
    "bitsandbytes": (
        lambda env: env.edit_config(quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True}),
        [],
        r"config\.json of owner/model cannot be used: .*bitsandbytes",
    ),
    "GPTQ": (
        lambda env: env.edit_config(quantization_config={"quant_method": "gptq", "bits": 4}),
        [],
        r"config\.json of owner/model cannot be used: .*gptq",
    ),
    "absurd sizes": (
        lambda env: env.edit_config(text_config={"hidden_size": 10**6, "intermediate_size": 10**6}),
        [],
        r"config\.json of owner/model cannot be used: .*9e\+12",
    ),
    "invalid JSON": (truncate("config.json"), [], r"config\.json of owner/model cannot be used: .*not valid JSON"),
    "truncated weights": (truncate(SINGLE_FILE), [], r"truncated or corrupt .*Delete .*blobs.*, then copy or download"),
    "invalid tokenizer": (truncate("tokenizer.json"), [], r"tokenizer\.json"),
    "index with a path outside the folder": (
        list_outside_path,
        [],
        r"must list \.safetensors files in the same folder, got \.\./",
    ),
    "too little memory": (
        have_memory(2 * 10**9, 10**5),
        HALF,
        r"needs 0\.\d\d GB of memory as float16 on cpu, but only 0\.00 GB of 2\.00 GB is available\. Use dtype float32",
    ),
    "far too little memory": (
        have_memory(10**5, 10**5),
        HALF,
        r"owner/model needs 0\.\d\d GB of memory as float16",
    ),
}
# All other failures are detected before any weights are downloaded.
AFTER_THE_DOWNLOAD = {
    "interrupted download",
    "disk full",
    "truncated weights",
    "invalid tokenizer",
    "index with a path outside the folder",
    "too little memory",
}


@pytest.mark.parametrize("case", CASES)
def test_failure_is_one_line_in_the_terminal(env, case, image_file, capsys):
    set_up, flags, message = CASES[case]
    set_up(env)
    arguments = [str(image_file), "caption en", "--model", "owner/model", "--dtype", "float32", "--device", "cpu"]
    assert command_line.main([*arguments, *flags]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert_is_one_line(captured.err.removeprefix("paligemma: "), message)
    if case not in AFTER_THE_DOWNLOAD:
        assert not [name for name in env.hub.downloads() if name.endswith(".safetensors")]


@pytest.mark.parametrize("case", CASES)
def test_failure_is_shown_on_the_badge(env, case, bundled, caplog):
    set_up, flags, message = CASES[case]
    set_up(env)
    arguments = cli.build_parser().parse_args(
        ["--model", "owner/model", "--dtype", "float32", "--device", "cpu", *flags]
    )
    env.set(cli, "_build_bundled_model", lambda arguments, **_: bundled)
    (served_model,) = cli.build_served_models(arguments)
    with caplog.at_level(logging.INFO, "paligemma"):
        served_model.load_now()
    text = messages.format_message(served_model.status)
    assert served_model.status["kind"] == "error" and text.endswith(f" Using {cli.BUNDLED_NAME} instead.")
    assert_is_one_line(text, message)
    (record,) = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert record.exc_info is None
    assert_is_one_line(record.getMessage(), message)
    assert (served_model.model, served_model.metadata()["name"], served_model.state) == (
        bundled.model,
        cli.BUNDLED_NAME,
        "ready",
    )


def assert_is_one_line(text: str, message: str) -> None:
    assert re.search(message, text), text
    assert text.strip().count("\n") == 0 and len(text) < 700 and "Traceback" not in text
    assert not re.search("hf_[a-z]{10}", text)


def test_documented_failures_are_these_cases():
    named = re.findall(r"^\| (.+?) \| .* \| `test_hub\.py::test_failure_is_shown_on_the_badge` \|$", BEHAVIOR, re.M)
    assert len(named) > 25 and set(named) <= CASES.keys()


def test_bundled_model_answers_instead_of_a_failed_one(env, bundled, image_file):
    env.hub.gated = True
    env.set(cli, "_build_bundled_model", lambda arguments, **_: bundled)
    (served_model,) = cli.build_served_models(cli.build_parser().parse_args(["--model", "owner/model"]))
    served_model.load_now()
    upload = {"path": str(image_file), "meta": {"_type": "gradio.FileData"}}
    events = list(api.answer_over_api((served_model,), upload, "caption en", 4, 0, 0, 1))
    assert events[-1]["finish_reason"] and events[-1]["text"]
    described = served_model.describe()
    assert (described["name"], described["answered_by"], described["state"]) == (
        "owner/model",
        cli.BUNDLED_NAME,
        "ready",
    )
    assert "gated" in described["message"]


def test_command_line_uses_the_hub_of_the_environment(env, image_file, tmp_path):
    env.hub.gated = True
    command = [sys.executable, "-m", "paligemma", str(image_file), "caption en", "--model", "owner/model"]
    environment = {**os.environ, "HF_ENDPOINT": constants.ENDPOINT, "HF_HOME": str(tmp_path), "HF_TOKEN": UNLICENSED}
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
    assert ended.returncode == 1 and ended.stderr.count("\n") == 1
    assert "has no access to it. Accept the license" in ended.stderr and UNLICENSED not in ended.stderr


# Downloading ------------------------------------------------------------------------------------------------------


def test_checkpoint_is_downloaded_once(env):
    found = find_checkpoint("owner/model", dtype="float32")
    assert (found.source, found.name, found.revision, found.dtype) == ("hub", "owner/model", "main", torch.float32)
    assert load_model(found.folder, "cpu").dtype == torch.float32
    downloaded = env.hub.downloads()
    assert find_checkpoint("owner/model", dtype="float32").folder == found.folder
    assert sorted(env.hub.downloads()) == sorted(downloaded) and downloaded[0] == "config.json"


def test_repository_code_is_neither_downloaded_nor_executed(env, tmp_path):
    ran = tmp_path / "ran"
    env.edit_config(auto_map={"AutoModel": "modeling_evil.EvilModel"})
    code = f"open({str(ran)!r}, 'w')".encode()
    others = (
        "modeling_evil.py",
        "pytorch_model.bin",
        "adapter_model.safetensors",
        "README.md",
        "a.gguf",
        "x/config.json",
    )
    env.hub.main.update(dict.fromkeys(others, code))
    paligemma.load("owner/model", dtype="float32", device="cpu")
    assert set(env.hub.downloads()) <= set(DOWNLOADED_FILES)
    assert not ran.exists() and "modeling_evil" not in sys.modules


@pytest.mark.parametrize(
    ("dtype", "is_fast", "expected"),
    [
        ("auto", True, "bfloat16"),
        ("auto", False, "main"),
        ("float32", True, "main"),
        ("bfloat16", False, "bfloat16"),
        ("float16", False, "main"),  # the repository has no such branch
    ],
)
def test_revision_in_the_requested_dtype_is_preferred(env, dtype, is_fast, expected):
    env.set(find, "is_fast_in_bfloat16", lambda device: is_fast)
    env.hub.branches["bfloat16"] = env.hub.main
    found = find_checkpoint("owner/model", device="cpu", dtype=dtype)
    assert (found.revision, found.folder.name) == (expected, commit_of(expected))
    assert found.dtype == {"auto": torch.bfloat16 if is_fast else torch.float32}.get(dtype, DTYPES.get(dtype))


def test_explicit_revision_is_used_for_every_dtype(env):
    env.hub.branches.update(mine=env.hub.main, bfloat16=env.hub.main)
    assert find_checkpoint("owner/model", revision="mine", dtype="bfloat16").revision == "mine"


def test_token_with_a_license_downloads_a_gated_model(env):
    env.hub.gated = True
    assert find_checkpoint("owner/model", token=f"{LICENSED}\n", dtype="float32").source == "hub"


def test_download_progress_is_counted_and_shown_on_the_badge(env):
    reports: list[tuple[str, int, int]] = []
    texts: list[str] = []
    served_model = ServedModel("owner/model", None)

    def record(*report) -> None:
        reports.append(report)
        served_model._show_progress(*report)
        texts.append(messages.format_message(served_model.status))

    paligemma.load("owner/model", dtype="float32", device="cpu", progress=record)
    assert sorted({stage for stage, *_ in reports}) == ["downloading", "loading"]
    downloads = [(done, total) for stage, done, total in reports if stage == "downloading"]
    # config.json is downloaded before the sizes are added up.
    total = sum(map(len, env.hub.main.values())) - len(env.hub.main["config.json"])
    assert downloads == sorted(downloads) and downloads[0] == (0, total) and downloads[-1] == (total, total)
    assert texts[0].startswith("Downloading owner/model: 0% of 0.0") and texts[-1] == "Loading owner/model: 100%"


# Incomplete downloads and the cache -------------------------------------------------------------------------------


def test_interrupted_download_resumes(env):
    env.hub.num_cuts, env.hub.cut_after = 2, 5000
    folder = find_checkpoint("owner/model", dtype="float32").folder
    assert (folder / SINGLE_FILE).read_bytes() == env.hub.main[SINGLE_FILE]
    assert env.hub.downloads().count(SINGLE_FILE) == 3


def test_incomplete_download_does_not_count_as_cached(env, sharded):
    env.hub.branches["main"] = files_of(sharded)
    first, *_, last = sorted(name for name in env.hub.main if name.endswith(".safetensors"))
    env.hub.cut, env.hub.num_cuts = last, 99
    with pytest.raises(CheckpointError, match="complete files are kept"):
        find_checkpoint("owner/model", dtype="float32")
    env.go_offline()
    with pytest.raises(CheckpointError, match=r"is incomplete, and the hub is unreachable\. Check the connection"):
        find_checkpoint("owner/model", dtype="float32")
    env.set(constants, "HF_HUB_OFFLINE", False)
    env.hub.num_cuts = 0
    env.hub.requests.clear()
    folder = find_checkpoint("owner/model", dtype="float32").folder
    assert last in env.hub.downloads() and first not in env.hub.downloads()
    assert load_model(folder, "cpu")


def test_truncated_cached_file_is_downloaded_again(env):
    folder = find_checkpoint("owner/model", dtype="float32").folder
    for name in (SINGLE_FILE, "config.json"):
        (folder / name).resolve().write_bytes(env.hub.main[name][:50])
        assert (find_checkpoint("owner/model", dtype="float32").folder / name).read_bytes() == env.hub.main[name]


def test_corrupt_cached_file_is_named_and_downloaded_again_after_deletion(env):
    folder = find_checkpoint("owner/model", dtype="float32").folder
    file = (folder / SINGLE_FILE).resolve()
    file.write_bytes(b"\xff" * file.stat().st_size)
    with pytest.raises(CheckpointError) as caught:
        load_model(folder, "cpu")
    assert f"Delete {file}, then" in str(caught.value)
    file.unlink()
    assert load_model(find_checkpoint("owner/model", dtype="float32").folder, "cpu")


@pytest.mark.parametrize(
    "case", ["offline", "no connection", "hub down", "invalid access token", "timeout", "cached branch"]
)
def test_cache_is_used_if_the_hub_is_unreachable_or_rejects_the_token(env, case):
    if case == "cached branch":
        env.hub.branches["bfloat16"] = env.hub.branches.pop("main")
    dtype = "bfloat16"
    folder = find_checkpoint("owner/model", dtype=dtype).folder
    (CASES.get(case) or CASES["offline"])[0](env)
    found = find_checkpoint("owner/model", dtype=dtype)
    assert (found.folder, found.dtype) == (folder, torch.bfloat16)


def test_complete_read_only_cache_is_used(env, monkeypatch):
    folder = find_checkpoint("owner/model", dtype="float32").folder
    monkeypatch.setattr(os, "makedirs", fail(PermissionError(errno.EROFS, "read-only file system")))
    assert find_checkpoint("owner/model", dtype="float32").folder == folder


# Access tokens ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("token", [LICENSED, "hf_oauth_eyJhbGciOiJFZERTQSJ9.eyJzY29wZSI-_x.abc", "my-secret\n"])
def test_access_token_is_redacted_in_errors(env, token):
    error = RuntimeError(f"Illegal header value b'Bearer {token.strip()}'")
    env.set(huggingface_hub.HfApi, "model_info", fail(error))
    with pytest.raises(CheckpointError, match="Illegal header value") as caught:
        find_checkpoint("owner/model", token=token, dtype="float32")
    for text in (str(caught.value), str(caught.value.values)):
        assert "[token]" in text and token.strip()[-4:] not in text
    assert caught.value.__cause__ is None and caught.value.__suppress_context__


def test_names_that_start_like_a_token_are_not_redacted():
    assert redact_tokens("hf_hub_download of hf_xet") == "hf_hub_download of hf_xet"


def test_server_log_has_no_token_and_no_traceback_of_a_failed_load(bundled):
    written: list[str] = []
    handler = logging.StreamHandler(SimpleNamespace(write=written.append, flush=lambda: None))
    handler.setFormatter(logs.RedactingFormatter(logs.LOG_FORMAT))
    log = logging.getLogger("paligemma.app")
    log.addHandler(handler)
    try:
        served_model = ServedModel("broken", lambda progress: fail(RuntimeError(f"no {LICENSED}"))(), fallback=bundled)
        served_model.load_now()
        assert "broken could not be loaded: RuntimeError: no [token]" in "".join(written)
        assert "Traceback" not in "".join(written)
        try:
            raise RuntimeError(LICENSED)
        except RuntimeError:
            log.exception("unexpected")
    finally:
        log.removeHandler(handler)
    assert "Traceback" in "".join(written) and LICENSED not in "".join(written)
