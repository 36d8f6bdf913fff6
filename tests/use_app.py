"""Start app.py, use it through the client and in a browser, and print a report as JSON.

    python tests/use_app.py PORT FOLDER local|space|zerogpu

"space" and "zerogpu" set the environment of a Hugging Face Space; "zerogpu" also installs a fake `spaces` package.
FOLDER must be empty: it gets the cache and the temporary folder, and the home folder is not writable. In a network
namespace, only the loopback interface is available.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from gradio_client import Client, handle_file
from playwright.sync_api import Route, sync_playwright

ROOT = Path(__file__).parents[1]
IMAGE = ROOT / "assets" / "examples" / "cats.png"
# Runs at the start of Python and records every address that is resolved or connected to.
SITECUSTOMIZE = """
import json, os, sys
record = os.open(os.environ["CONNECTIONS_FILE"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
def hook(event, arguments):
    if event in ("socket.connect", "socket.sendto"):
        os.write(record, (json.dumps(str(arguments[1])) + "\\n").encode())
    elif event in ("socket.getaddrinfo", "socket.gethostbyname"):
        os.write(record, (json.dumps(str(arguments[0])) + "\\n").encode())
sys.addaudithook(hook)
"""


def raise_loopback() -> None:
    """Bring up the loopback interface, which is down in a new network namespace."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        is_up, request = 0x1, struct.pack("16sH14x", b"lo", 0x1 | 0x40)
        flags = struct.unpack("16sH14x", fcntl.ioctl(any_socket, 0x8913, request))[1]
        if not flags & is_up:
            fcntl.ioctl(any_socket, 0x8914, request)


def environment(port: int, folder: Path, platform: str) -> dict[str, str]:
    """Environment of the app's process; only PATH is taken from this process."""
    for name in ("cache", "tmp", "path"):
        (folder / name).mkdir()
    (folder / "path" / "sitecustomize.py").write_text(SITECUSTOMIZE, encoding="utf-8")
    path = [str(folder / "path")]
    if platform == "zerogpu":
        (folder / "path" / "spaces.py").write_text("from fake_spaces import GPU, gradio_auto_wrap\n", encoding="utf-8")
        path.append(str(ROOT / "tests"))
    local = {
        "PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(path), "HOME": "/dev/null/home",
        "HF_HOME": str(folder / "cache"), "TMPDIR": str(folder / "tmp"), "GRADIO_SERVER_PORT": str(port),
        "CONNECTIONS_FILE": str(folder / "connections"), "LEASES_FILE": str(folder / "leases"),
    }  # fmt: skip
    space = {
        "SYSTEM": "spaces", "SPACE_ID": "someone/app", "SPACE_HOST": "someone-app.hf.space",
        "SPACE_AUTHOR_NAME": "someone", "CPU_CORES": "2", "MEMORY": "16Gi", "GRADIO_SERVER_NAME": "0.0.0.0",
        "GRADIO_SSR_MODE": "True",
    }  # fmt: skip
    return local | {"local": {}, "space": space, "zerogpu": space | {"SPACES_ZERO_GPU": "true"}}[platform]


def wait_until_ready(url: str, server: subprocess.Popen) -> dict:
    """Poll /healthz until the model is ready, and return its answer."""
    for _ in range(300):
        if server.poll() is not None:
            sys.exit(f"the app exited: {server.stderr.read()}")
        try:
            with urllib.request.urlopen(f"{url}healthz") as reply:
                return json.load(reply)
        except OSError:
            time.sleep(0.3)
    sys.exit("the app is not ready")


def use_client(url: str) -> str:
    """The answer over the API."""
    client = Client(url, verbose=False)
    job = client.submit(image=handle_file(IMAGE), prompt="caption en", api_name="/generate")
    return list(job)[-1]["text"]


def use_browser(url: str) -> dict:
    """The answer on the page, all requested URLs and all failures. Requests to other hosts are blocked."""
    requested, failed = [], []

    def handle(route: Route) -> None:
        address = route.request.url
        requested.append(address)
        route.continue_() if address.startswith((url, "data:", "blob:")) else route.abort()

    with sync_playwright() as playwright:
        chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(locale="en-US")
        page.set_default_timeout(90_000)
        page.route("**/*", handle)
        page.on("requestfailed", lambda request: failed.append(f"{request.url} {request.failure}"))
        page.on("response", lambda reply: failed.append(f"{reply.url} {reply.status}") if reply.status >= 400 else None)
        page.on("pageerror", lambda error: failed.append(str(error)))
        page.goto(url)
        page.wait_for_selector("#badge .status.done")
        page.wait_for_selector("#tasks .chip")
        page.set_input_files("#image input[type=file]", str(IMAGE))
        page.wait_for_selector("#image-view .figure img")
        page.click("#run")
        page.wait_for_selector("#status .status.done")
        text = page.inner_text("#token-strip .text")
        fonts = page.evaluate("document.fonts.ready.then((fonts) => [...fonts].map((font) => font.status))")
        browser.close()
    # The page itself closes event streams that have ended.
    failed = [failure for failure in failed if "net::ERR_ABORTED" not in failure]
    return {"text": text, "requested": requested, "failed": failed, "fonts": fonts}


def main() -> None:
    port, folder, platform = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    raise_loopback()
    settings = environment(port, folder, platform)
    pipe = subprocess.PIPE
    server = subprocess.Popen([sys.executable, "app.py"], cwd=ROOT, env=settings, stdout=pipe, stderr=pipe, text=True)
    try:
        url = f"http://127.0.0.1:{port}/"
        report = {"health": wait_until_ready(url, server), "client": use_client(url), "page": use_browser(url)}
    finally:
        server.send_signal(signal.SIGTERM)
        out, errors = server.communicate(timeout=60)
    left = [str(path) for path in (folder / "tmp").rglob("*") if path.is_file()]
    report |= {"returncode": server.returncode, "out": out, "errors": errors, "left": left}
    report |= {name: read_lines(folder / name) for name in ("connections", "leases")}
    print(json.dumps(report))


def read_lines(path: Path) -> list:
    """Parse a file with one JSON value per line; empty if it does not exist."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


if __name__ == "__main__":
    main()
