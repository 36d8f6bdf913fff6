"""A local HTTP server that responds to huggingface_hub like the Hugging Face hub, with faults on demand."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import constants

LICENSED, UNLICENSED = "hf_licensedlicensedlicensed", "hf_unlicensedunlicensed"


@dataclass
class FakeHub:
    """State and behavior of the server; tests modify it.

    Attributes:
        branches: branches of the only repository, owner/model, each with its files.
        gated: only LICENSED may download files; the listing is public, as on the hub.
        status: HTTP status of every response, if not 200.
        stall: seconds before each response.
        cut: file whose download is interrupted after `cut_after` bytes, the next `num_cuts` times.
        requests: "METHOD path" of each request.
    """

    branches: dict[str, dict[str, bytes]]
    gated: bool = False
    status: int = 200
    stall: float = 0.0
    cut: str = "model.safetensors"
    cut_after: int = 0
    num_cuts: int = 0
    requests: list[str] = field(default_factory=list)

    @property
    def main(self) -> dict[str, bytes]:
        return self.branches["main"]

    def downloads(self) -> list[str]:
        """Names of the downloaded files, in order."""
        return [line.rsplit("/", 1)[1] for line in self.requests if line.startswith("GET") and "/resolve/" in line]

    def refusal(self, revision: str, token: str | None, is_file: bool) -> tuple[int, dict[str, str]] | None:
        """(status, headers) of a request that is refused; None if it is allowed."""
        if self.status != 200:
            return self.status, {}
        if token not in (None, LICENSED, UNLICENSED):
            return 401, {"X-Error-Message": "Invalid credentials in Authorization header"}
        if self.gated and is_file and token != LICENSED:
            return 403 if token else 401, {"X-Error-Code": "GatedRepo", "X-Error-Message": f"no access with {token}"}
        if self.branch_of(revision) is None:
            return 404, {"X-Error-Code": "RevisionNotFound"}
        return None

    def branch_of(self, revision: str) -> str | None:
        return next((name for name in self.branches if revision in (name, commit_of(name))), None)


def commit_of(branch: str) -> str:
    return hashlib.sha1(branch.encode()).hexdigest()


def make_handler(hub: FakeHub) -> type[BaseHTTPRequestHandler]:
    """Create the request handler class."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path)
            hub.requests.append(f"{self.command} {path}")
            threading.Event().wait(hub.stall)
            token = (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None
            listed = re.fullmatch(r"/api/models/owner/model/(revision|tree)/([^/]+)", path)
            file = re.fullmatch(r"/owner/model/resolve/([^/]+)/(.+)", path)
            if not listed and not file:
                # Without a token, the hub does not reveal which repositories exist.
                self.respond(b"", 404 if token else 401, {"X-Error-Code": "RepoNotFound"} if token else {})
                return
            revision = listed[2] if listed else file[1]
            refusal = hub.refusal(revision, token, is_file=bool(file))
            if refusal:
                self.respond(b"", *refusal)
                return
            branch = hub.branch_of(revision)
            if listed:
                self.respond(json.dumps(listing(hub, branch)[listed[1]]).encode(), 200, {})
            else:
                self.send_file(hub.branches[branch][file[2]], branch, file[2])

        def send_file(self, content: bytes, branch: str, name: str) -> None:
            etag = hashlib.sha256(content).hexdigest()
            headers = {"X-Repo-Commit": commit_of(branch), "ETag": f'"{etag}"', "Accept-Ranges": "bytes"}
            start = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")
            status = 206 if start else 200
            if start:
                headers["Content-Range"] = f"bytes {start[1]}-{len(content) - 1}/{len(content)}"
                content = content[int(start[1]) :]
            is_cut = self.command == "GET" and hub.num_cuts > 0 and name == hub.cut
            hub.num_cuts -= is_cut
            self.respond(content, status, headers, hub.cut_after if is_cut else None)

        def respond(self, body: bytes, status: int, headers: dict[str, str], cut_after: int | None = None) -> None:
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body[:cut_after])
            self.close_connection = self.close_connection or cut_after is not None

    return Handler


def listing(hub: FakeHub, branch: str) -> dict[str, object]:
    """The responses of the hub's `revision` and `tree` endpoints."""
    files = {name: len(content) for name, content in hub.branches[branch].items()}
    return {
        "revision": {
            "id": "owner/model",
            "sha": commit_of(branch),
            "siblings": [{"rfilename": name, "size": size} for name, size in files.items()],
        },
        "tree": [
            {"type": "file", "path": name, "size": size, "oid": hashlib.sha1(name.encode()).hexdigest()}
            for name, size in files.items()
        ],
    }


class QuietServer(ThreadingHTTPServer):
    """Does not log clients that disconnect early."""

    def handle_error(self, *_: object) -> None:
        pass


@contextmanager
def serving(hub: FakeHub) -> Iterator[str]:
    """Serve `hub` in a thread; the value is the server's address."""
    server = QuietServer(("127.0.0.1", 0), make_handler(hub))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def use_address(monkeypatch: pytest.MonkeyPatch, address: str, cache: Path) -> None:
    """Point huggingface_hub to this address and cache folder, without an access token."""
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(cache / "no token"))
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
