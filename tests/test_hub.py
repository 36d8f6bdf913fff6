"""Checkpoints of the hub: downloading them from a small hub on this machine, and every way in which that fails."""

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
from paligemma import checkpoint
from paligemma.benchmarks.random_checkpoints import make_model, save_layout
from paligemma.checkpoint import DTYPES, INDEX_FILE, SINGLE_FILE, CheckpointError, find, hub, load_model, memory
from paligemma.checkpoint.hub import redact_tokens
from paligemma.webapp import api, cli, logs, messages
from paligemma.webapp.served_models import ServedModel

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
WRONG = "hf_wrongwrongwrongwrong"


@pytest.fixture(scope="module")
def single(tmp_path_factory) -> Path:
    """A checkpoint of one file, in the hub's layout."""
    return save_layout(make_model("paligemma1"), tmp_path_factory.mktemp("files") / "single")


@pytest.fixture(scope="module")
def sharded(tmp_path_factory) -> Path:
    return save_layout(make_model("paligemma1"), tmp_path_factory.mktemp("files") / "sharded", sharded=True)


@pytest.fixture(scope="module")
def bundled() -> ServedModel:
    served_model = cli._build_bundled_model(cli.build_parser().parse_args([]))
    served_model.start()
    assert served_model._finished.wait(60) and served_model.model
    return served_model


@dataclass
class World:
    """What a case may change: the hub, where it is, what is cached."""

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

    def hold_only(self, *names: str) -> None:
        self.hub.branches["main"] = dict.fromkeys(names, b"\0" * 100)

    def put_behind_a_file(self) -> None:
        blocking = self.cache.parent / "a file"
        blocking.touch()
        self.set(constants, "HF_HUB_CACHE", str(blocking / "cache"))


@pytest.fixture
def world(single, tmp_path, monkeypatch) -> Iterator[World]:
    fake = FakeHub({"main": files_of(single)})
    with serving(fake) as address:
        use_address(monkeypatch, address, tmp_path / "cache")
        monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda seconds: None)
        yield World(fake, tmp_path / "cache", monkeypatch)


def fail(error: Exception) -> Callable:
    def failing(*_: object, **__: object) -> None:
        raise error

    return failing


# Every failure ----------------------------------------------------------------------------------------------------


def be_gated_for(token: str | None) -> Callable[[World], None]:
    def prepare(world: World) -> None:
        world.hub.gated = True
        if token:
            world.log_in(token)

    return prepare


def stall(world: World) -> None:
    world.hub.stall = 2
    world.set(hub, "LISTING_TIMEOUT_S", 0.1)


def break_off(world: World) -> None:
    world.hub.num_cuts = 99


def cut_index(world: World) -> None:
    files = world.hub.main
    files[INDEX_FILE] = b'{"weight_map": {"a": "../../../secret.safetensors"}}'
    del files[SINGLE_FILE]


def truncate(name: str) -> Callable[[World], None]:
    def prepare(world: World) -> None:
        world.hub.main[name] = world.hub.main[name][:1000]

    return prepare


def have_memory(total: int, available: int) -> Callable[[World], None]:
    return lambda world: world.set(memory, "available_memory", lambda device: memory.Memory(total, available))


OTHER, REVISION, HALF = ["--model", "owner/other"], ["--revision", "v9"], ["--dtype", "float16"]
# name: (what is wrong, flags, what is said)
CASES: dict[str, tuple[Callable[[World], object], list[str], str]] = {
    "gated, no token": (
        be_gated_for(None),
        [],
        r"is gated and no valid token .* accept its license at https.*HF_TOKEN",
    ),
    "gated, no license": (be_gated_for(UNLICENSED), [], r"gated and this token has no access.* fine-grained"),
    "wrong token": (lambda world: world.log_in(WRONG), [], r"refuses the token for owner/model.*settings/tokens"),
    "no such repository": (lambda world: None, OTHER, r"no folder owner/other here, and on the hub no such model"),
    "no such repository for a token": (lambda world: world.log_in(LICENSED), OTHER, r"check the spelling"),
    "no such revision": (lambda world: None, REVISION, r"has no revision 'v9'; its branches are listed at"),
    "hub down": (
        lambda world: setattr(world.hub, "status", 503),
        [],
        r"the hub fails for owner/model \(503\); try again later",
    ),
    "asked too often": (lambda world: setattr(world.hub, "status", 429), [], r"asked too often.*wait some minutes"),
    "offline": (lambda world: world.go_offline(), [], r"not in the cache .* HF_HUB_OFFLINE forbids .*unset that"),
    "no connection": (
        lambda world: world.set(constants, "ENDPOINT", "http://127.0.0.1:9"),
        [],
        r"not in the cache .*cannot be reached \(ConnectError.*check the connection",
    ),
    "no name server": (
        lambda world: world.set(socket, "getaddrinfo", fail(socket.gaierror(-3, "no name server"))),
        [],
        r"cannot be reached \(ConnectError: .*no name server\); check the connection",
    ),
    "no answer": (stall, [], r"cannot be reached \(ReadTimeout.*check the connection"),
    "breaks off": (break_off, [], r"downloading owner/model failed: .*start again, files that are complete are kept"),
    "disk too small": (
        lambda world: world.set(shutil, "disk_usage", lambda path: SimpleNamespace(free=10**4)),
        [],
        r"needs 0\.\d\d GB more on the disk of .*cache, which has 0\.00 GB free; make room, or set HF_HOME",
    ),
    "disk full": (
        lambda world: world.set(huggingface_hub, "snapshot_download", fail(OSError(errno.ENOSPC, "No space left"))),
        [],
        r"the disk of .*cache is full; make room",
    ),
    "cache cannot be made": (
        World.put_behind_a_file,
        [],
        r"cannot be stored in the cache .*; make that folder writable",
    ),
    "cache cannot be written": (
        lambda world: world.set(huggingface_hub, "hf_hub_download", fail(PermissionError(errno.EACCES, "denied"))),
        [],
        r"cannot be stored in the cache .*denied.*set HF_HOME",
    ),
    "GGUF": (lambda world: world.hold_only("config.json", "q4.gguf"), [], r"as GGUF.* take the checkpoint that they"),
    "big_vision's": (lambda world: world.hold_only("pt_224.npz"), [], r"as \.npz, which is big_vision's; take"),
    "adapter": (
        lambda world: world.hold_only("adapter_config.json", "adapter_model.safetensors"),
        [],
        r"only a PEFT adapter.*merge",
    ),
    "pickle": (
        lambda world: world.hold_only("config.json", "pytorch_model.bin"),
        [],
        r"only as pytorch_model\.bin, a pickle",
    ),
    "no weights": (lambda world: world.hold_only("README.md"), [], r"neither model\.safetensors nor"),
    "no configuration": (lambda world: world.hub.main.pop("config.json"), [], r"has no config\.json; a checkpoint"),
    "no tokenizer": (lambda world: world.hub.main.pop("tokenizer.json"), [], r"has no tokenizer\.json .*; take that"),
    "another model": (
        lambda world: world.edit_config(model_type="llava"),
        [],
        r"owner/model cannot be used: .*'llava'; only 'paligemma' .*such as google/",
    ),
    "bitsandbytes": (
        lambda world: world.edit_config(quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True}),
        [],
        r"quantized \(bitsandbytes\); take the model that they were made from",
    ),
    "GPTQ": (
        lambda world: world.edit_config(quantization_config={"quant_method": "gptq", "bits": 4}),
        [],
        r"quantized \(gptq\)",
    ),
    "absurd sizes": (
        lambda world: world.edit_config(text_config={"hidden_size": 10**6, "intermediate_size": 10**6}),
        [],
        r"about 9e\+12 parameters; allowed are 1e\+11",
    ),
    "broken configuration": (truncate("config.json"), [], r"owner/model cannot be used: .*not valid JSON"),
    "cut weights": (
        truncate(SINGLE_FILE),
        [],
        r"cut short or damaged .*; delete .*blobs.* and copy or download it again",
    ),
    "broken tokenizer": (truncate("tokenizer.json"), [], r"tokenizer\.json cannot be read as a tokenizer"),
    "index that leads out": (cut_index, [], r"must name \.safetensors files that lie beside it; it names \.\./"),
    "memory too small": (
        have_memory(2 * 10**9, 10**5),
        HALF,
        r"need 0\.\d\d GB of memory as float16 on cpu, and 0\.00 GB of 2\.00 GB are free; ask for .*float32, which",
    ),
    "memory far too small": (have_memory(10**5, 10**5), HALF, r"weights of owner/model need 0\.\d\d GB .* are free"),
}
# What is known before the weights come is said before they come.
BEFORE_THE_WEIGHTS = set(CASES) - {
    *("breaks off", "disk full", "cut weights", "broken tokenizer", "index that leads out", "memory too small")
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_failure_is_one_line_of_the_terminal(world, case, picture_file, capsys):
    prepare, flags, message = CASES[case]
    prepare(world)
    arguments = [str(picture_file), "caption en", "--model", "owner/model", "--dtype", "float32", "--device", "cpu"]
    assert command_line.main([*arguments, *flags]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert_is_the_one_line(captured.err.removeprefix("paligemma: "), message)
    if case in BEFORE_THE_WEIGHTS:
        assert not [name for name in world.hub.downloads() if name.endswith(".safetensors")]


@pytest.mark.parametrize("case", CASES)
def test_a_failure_is_on_the_badge(world, case, bundled, caplog):
    prepare, flags, message = CASES[case]
    prepare(world)
    arguments = cli.build_parser().parse_args(
        ["--model", "owner/model", "--dtype", "float32", "--device", "cpu", *flags]
    )
    world.set(cli, "_build_bundled_model", lambda arguments, **_: bundled)
    (served_model,) = cli.build_served_models(arguments)
    with caplog.at_level(logging.INFO, "paligemma"):
        served_model.start()
        assert served_model._finished.wait(60)
    said = messages.format_message(served_model.status)
    assert served_model.status["kind"] == "error" and said.endswith(f" · {cli.BUNDLED_NAME} answers instead")
    assert_is_the_one_line(said, message)
    (record,) = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert record.exc_info is None
    assert_is_the_one_line(record.getMessage(), message)
    assert (served_model.model, served_model.metadata()["name"], served_model.state) == (
        bundled.model,
        cli.BUNDLED_NAME,
        "ready",
    )


def assert_is_the_one_line(said: str, message: str) -> None:
    assert re.search(message, said), said
    assert said.strip().count("\n") == 0 and len(said) < 700 and "Traceback" not in said
    assert not re.search("hf_[a-z]{10}", said)


def test_the_bundled_model_really_answers_instead(world, bundled, picture_file):
    world.hub.gated = True
    world.set(cli, "_build_bundled_model", lambda arguments, **_: bundled)
    (served_model,) = cli.build_served_models(cli.build_parser().parse_args(["--model", "owner/model"]))
    served_model.start()
    upload = {"path": str(picture_file), "meta": {"_type": "gradio.FileData"}}
    events = list(api.answer_over_api((served_model,), upload, "caption en", 4, 0, 0, 1))
    assert events[-1]["finish_reason"] and events[-1]["text"]
    described = served_model.describe()
    assert (described["name"], described["answered_by"], described["state"]) == (
        "owner/model",
        cli.BUNDLED_NAME,
        "ready",
    )
    assert "gated" in described["message"]


def test_the_command_line_asks_the_hub_of_the_environment(world, picture_file, tmp_path):
    world.hub.gated = True
    command = [sys.executable, "-m", "paligemma", str(picture_file), "caption en", "--model", "owner/model"]
    environment = {**os.environ, "HF_ENDPOINT": constants.ENDPOINT, "HF_HOME": str(tmp_path), "HF_TOKEN": UNLICENSED}
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
    assert ended.returncode == 1 and ended.stderr.count("\n") == 1
    assert "this token has no access to it; accept the license" in ended.stderr and UNLICENSED not in ended.stderr


# Downloading ------------------------------------------------------------------------------------------------------


def test_a_checkpoint_is_downloaded_once_and_then_used_again(world):
    found = find("owner/model", dtype="float32")
    assert (found.origin, found.name, found.revision, found.dtype) == ("hub", "owner/model", "main", torch.float32)
    assert load_model(found.folder, "cpu").dtype == torch.float32
    downloaded = world.hub.downloads()
    assert find("owner/model", dtype="float32").folder == found.folder
    assert sorted(world.hub.downloads()) == sorted(downloaded) and downloaded[0] == "config.json"


def test_only_what_the_model_needs_is_downloaded_and_no_code_is_run(world, tmp_path):
    ran = tmp_path / "ran"
    world.edit_config(auto_map={"AutoModel": "modeling_evil.EvilModel"})
    code = f"open({str(ran)!r}, 'w')".encode()
    others = (
        "modeling_evil.py",
        "pytorch_model.bin",
        "adapter_model.safetensors",
        "README.md",
        "a.gguf",
        "x/config.json",
    )
    world.hub.main.update(dict.fromkeys(others, code))
    paligemma.load("owner/model", dtype="float32", device="cpu")
    assert set(world.hub.downloads()) <= set(checkpoint.DOWNLOADED_FILES)
    assert not ran.exists() and "modeling_evil" not in sys.modules


@pytest.mark.parametrize(
    ("dtype", "is_fast", "expected"),
    [
        ("auto", True, "bfloat16"),
        ("auto", False, "main"),
        ("float32", True, "main"),
        ("bfloat16", False, "bfloat16"),
        ("float16", False, "main"),  # without such a branch
    ],
)
def test_the_revision_stored_in_the_wanted_type_is_taken_where_there_is_one(world, dtype, is_fast, expected):
    world.set(checkpoint, "is_fast_in_bfloat16", lambda device: is_fast)
    world.hub.branches["bfloat16"] = world.hub.main
    found = find("owner/model", device="cpu", dtype=dtype)
    assert (found.revision, found.folder.name) == (expected, commit_of(expected))
    assert found.dtype == {"auto": torch.bfloat16 if is_fast else torch.float32}.get(dtype, DTYPES.get(dtype))


def test_the_user_s_revision_is_taken_alone(world):
    world.hub.branches.update(mine=world.hub.main, bfloat16=world.hub.main)
    assert find("owner/model", revision="mine", dtype="bfloat16").revision == "mine"


def test_a_licensed_token_is_let_in(world):
    world.hub.gated = True
    assert find("owner/model", token=f"{LICENSED}\n", dtype="float32").origin == "hub"


def test_the_bytes_of_a_download_are_counted_and_shown_on_the_badge(world):
    model_input: list[tuple[str, int, int]] = []
    preview: list[str] = []
    served_model = ServedModel("owner/model", None)

    def follow(*report) -> None:
        model_input.append(report)
        served_model._show_progress(*report)
        preview.append(messages.format_message(served_model.status))

    paligemma.load("owner/model", dtype="float32", device="cpu", progress=follow)
    assert sorted({stage for stage, *_ in model_input}) == ["downloading", "loading"]
    downloads = [(done, total) for stage, done, total in model_input if stage == "downloading"]
    # The configuration is there before the rest is counted.
    total = sum(map(len, world.hub.main.values())) - len(world.hub.main["config.json"])
    assert downloads == sorted(downloads) and downloads[0] == (0, total) and downloads[-1] == (total, total)
    assert preview[0].startswith("Downloading owner/model: 0% of 0.0") and preview[-1] == "Loading owner/model: 100%"


# What is half there -----------------------------------------------------------------------------------------------


def test_a_connection_that_breaks_goes_on_where_it_broke(world):
    world.hub.num_cuts, world.hub.cut_after = 2, 5000
    folder = find("owner/model", dtype="float32").folder
    assert (folder / SINGLE_FILE).read_bytes() == world.hub.main[SINGLE_FILE]
    assert world.hub.downloads().count(SINGLE_FILE) == 3


def test_a_half_download_counts_as_none_and_is_finished_later(world, sharded):
    world.hub.branches["main"] = files_of(sharded)
    first, *_, last = sorted(name for name in world.hub.main if name.endswith(".safetensors"))
    world.hub.cut, world.hub.num_cuts = last, 99
    with pytest.raises(CheckpointError, match="files that are complete are kept"):
        find("owner/model", dtype="float32")
    world.go_offline()
    with pytest.raises(
        CheckpointError, match="was not finished and the hub cannot be reached; connect and start again"
    ):
        find("owner/model", dtype="float32")
    world.set(constants, "HF_HUB_OFFLINE", False)
    world.hub.num_cuts = 0
    world.hub.asked.clear()
    folder = find("owner/model", dtype="float32").folder
    assert last in world.hub.downloads() and first not in world.hub.downloads()
    assert load_model(folder, "cpu")


def test_a_cached_file_that_was_cut_short_is_downloaded_again(world):
    folder = find("owner/model", dtype="float32").folder
    for name in (SINGLE_FILE, "config.json"):
        (folder / name).resolve().write_bytes(world.hub.main[name][:50])
        assert (find("owner/model", dtype="float32").folder / name).read_bytes() == world.hub.main[name]


def test_a_damaged_file_of_the_right_size_is_named_and_comes_anew_once_it_is_deleted(world):
    folder = find("owner/model", dtype="float32").folder
    file = (folder / SINGLE_FILE).resolve()
    file.write_bytes(b"\xff" * file.stat().st_size)
    with pytest.raises(CheckpointError) as caught:
        load_model(folder, "cpu")
    assert f"delete {file} and" in str(caught.value)
    file.unlink()
    assert load_model(find("owner/model", dtype="float32").folder, "cpu")


@pytest.mark.parametrize("case", ["offline", "no connection", "hub down", "wrong token", "no answer", "cached branch"])
def test_what_is_cached_is_used_when_the_hub_does_not_help(world, case):
    if case == "cached branch":
        world.hub.branches["bfloat16"] = world.hub.branches.pop("main")
    dtype = "bfloat16"
    folder = find("owner/model", dtype=dtype).folder
    (CASES.get(case) or CASES["offline"])[0](world)
    found = find("owner/model", dtype=dtype)
    assert (found.folder, found.dtype) == (folder, torch.bfloat16)


def test_a_cache_that_is_only_read_will_do_when_it_is_complete(world, monkeypatch):
    folder = find("owner/model", dtype="float32").folder
    monkeypatch.setattr(os, "makedirs", fail(PermissionError(errno.EROFS, "read-only file system")))
    assert find("owner/model", dtype="float32").folder == folder


def test_the_readme_s_cases_are_these():
    named = re.findall(r"^\| (.+?) \| .* \| `test_hub\.py::test_a_failure_is_on_the_badge` \|$", README, re.M)
    assert len(named) > 25 and set(named) <= CASES.keys()


# Tokens -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("token", [LICENSED, "hf_oauth_eyJhbGciOiJFZERTQSJ9.eyJzY29wZSI-_x.abc", "my-secret\n"])
def test_a_token_of_any_form_is_kept_out_of_messages(world, token):
    error = RuntimeError(f"Illegal header value b'Bearer {token.strip()}'")
    world.set(huggingface_hub.HfApi, "model_info", fail(error))
    with pytest.raises(CheckpointError, match="Illegal header value") as caught:
        find("owner/model", token=token, dtype="float32")
    assert "[token]" in str(caught.value) and token.strip()[-4:] not in str(caught.value)
    assert caught.value.__cause__ is None and caught.value.__suppress_context__


def test_words_that_begin_like_a_token_stay():
    assert redact_tokens("hf_hub_download of hf_xet") == "hf_hub_download of hf_xet"


def test_the_server_s_log_has_no_token_and_no_traceback_of_a_model_that_does_not_load(bundled):
    written: list[str] = []
    handler = logging.StreamHandler(SimpleNamespace(write=written.append, flush=lambda: None))
    handler.setFormatter(logs.TokenlessFormatter(logs.LINE))
    log = logging.getLogger("paligemma.app")
    log.addHandler(handler)
    try:
        served_model = ServedModel("broken", lambda progress: fail(RuntimeError(f"no {LICENSED}"))(), fallback=bundled)
        served_model.start()
        assert served_model._finished.wait(10)
        assert "broken could not be loaded: RuntimeError: no [token]" in "".join(written)
        assert "Traceback" not in "".join(written)
        try:
            raise RuntimeError(LICENSED)
        except RuntimeError:
            log.exception("unexpected")
    finally:
        log.removeHandler(handler)
    assert "Traceback" in "".join(written) and LICENSED not in "".join(written)
