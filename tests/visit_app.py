"""Start the app, visit it with a client and a browser, and print what happened as JSON.

    python tests/visit_app.py PORT FOLDER home|space|zero

At home, on a Space, or on one whose GPU is lent, by a stand-in for `spaces`. FOLDER is new: it gets the cache and the
temporary folder; the home cannot be written to. In a network namespace of its own, only the machine itself is there.
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
PICTURE = ROOT / "assets" / "examples" / "cats.png"
# Python runs a module of this name first; this one notes every address that is looked up or connected to.
WATCH = """
import json, os, sys
noted = os.open(os.environ["CONNECTIONS_FILE"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
def note(event, arguments):
    if event in ("socket.connect", "socket.sendto"):
        os.write(noted, (json.dumps(str(arguments[1])) + "\\n").encode())
    elif event in ("socket.getaddrinfo", "socket.gethostbyname"):
        os.write(noted, (json.dumps(str(arguments[0])) + "\\n").encode())
sys.addaudithook(note)
"""


def raise_loopback() -> None:
    """Bring `lo` up, which a new network namespace has not done; elsewhere it is up already."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        is_up, request = 0x1, struct.pack("16sH14x", b"lo", 0x1 | 0x40)
        flags = struct.unpack("16sH14x", fcntl.ioctl(any_socket, 0x8913, request))[1]
        if not flags & is_up:
            fcntl.ioctl(any_socket, 0x8914, request)


def environment(port: int, folder: Path, place: str) -> dict[str, str]:
    """What the app's process gets; of this machine's environment only where programs lie."""
    for name in ("cache", "tmp", "path"):
        (folder / name).mkdir()
    (folder / "path" / "sitecustomize.py").write_text(WATCH, encoding="utf-8")
    path = [str(folder / "path")]
    if place == "zero":
        (folder / "path" / "spaces.py").write_text("from fake_spaces import GPU, gradio_auto_wrap\n", encoding="utf-8")
        path.append(str(ROOT / "tests"))
    home = {
        "PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(path), "HOME": "/dev/null/home",
        "HF_HOME": str(folder / "cache"), "TMPDIR": str(folder / "tmp"), "GRADIO_SERVER_PORT": str(port),
        "CONNECTIONS_FILE": str(folder / "connections"), "LOANS_FILE": str(folder / "loans"),
    }  # fmt: skip
    space = {
        "SYSTEM": "spaces", "SPACE_ID": "someone/window", "SPACE_HOST": "someone-window.hf.space",
        "SPACE_AUTHOR_NAME": "someone", "CPU_CORES": "2", "MEMORY": "16Gi", "GRADIO_SERVER_NAME": "0.0.0.0",
        "GRADIO_SSR_MODE": "True",
    }  # fmt: skip
    return home | {"home": {}, "space": space, "zero": space | {"SPACES_ZERO_GPU": "true"}}[place]


def wait_until_ready(url: str, server: subprocess.Popen) -> dict:
    """What /healthz says once the model is there."""
    for _ in range(300):
        if server.poll() is not None:
            sys.exit(f"the app ended: {server.stderr.read()}")
        try:
            with urllib.request.urlopen(f"{url}healthz") as reply:
                return json.load(reply)
        except OSError:
            time.sleep(0.3)
    sys.exit("the app is not ready")


def ask_client(url: str) -> str:
    client = Client(url, verbose=False)
    job = client.submit(image=handle_file(PICTURE), prompt="caption en", api_name="/generate")
    return list(job)[-1]["text"]


def ask_in_browser(url: str) -> dict:
    """The answer of the page, every address that it asked for, and what failed. Other machines are not let through."""
    submitted, failed = [], []

    def note(route: Route) -> None:
        address = route.request.url
        submitted.append(address)
        route.continue_() if address.startswith((url, "data:", "blob:")) else route.abort()

    with sync_playwright() as playwright:
        chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(locale="en-US")
        page.set_default_timeout(90_000)
        page.route("**/*", note)
        page.on("requestfailed", lambda request: failed.append(f"{request.url} {request.failure}"))
        page.on("response", lambda reply: failed.append(f"{reply.url} {reply.status}") if reply.status >= 400 else None)
        page.on("pageerror", lambda error: failed.append(str(error)))
        page.goto(url)
        page.wait_for_selector("#badge .status.done")
        page.wait_for_selector("#tasks .chip")
        page.set_input_files("#image input[type=file]", str(PICTURE))
        page.wait_for_selector("#image-view .picture img")
        page.click("#run")
        page.wait_for_selector("#status .status.done")
        text = page.inner_text("#token-strip .text")
        fonts = page.evaluate("document.fonts.ready.then((fonts) => [...fonts].map((font) => font.status))")
        browser.close()
    # The page itself hangs up on streams that have ended.
    failed = [failure for failure in failed if "net::ERR_ABORTED" not in failure]
    return {"text": text, "asked": submitted, "failed": failed, "fonts": fonts}


def main() -> None:
    port, folder, place = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    raise_loopback()
    settings = environment(port, folder, place)
    pipe = subprocess.PIPE
    server = subprocess.Popen([sys.executable, "app.py"], cwd=ROOT, env=settings, stdout=pipe, stderr=pipe, text=True)
    try:
        url = f"http://127.0.0.1:{port}/"
        report = {"health": wait_until_ready(url, server), "client": ask_client(url), "page": ask_in_browser(url)}
    finally:
        server.send_signal(signal.SIGTERM)
        out, errors = server.communicate(timeout=60)
    noted = (folder / "connections").read_text(encoding="utf-8") if (folder / "connections").exists() else ""
    loans = (folder / "loans").read_text(encoding="utf-8") if (folder / "loans").exists() else ""
    left = [str(path) for path in (folder / "tmp").rglob("*") if path.is_file()]
    report |= {"returncode": server.returncode, "out": out, "errors": errors, "left": left}
    report |= {name: [json.loads(line) for line in text.splitlines()]
               for name, text in (("connections", noted), ("loans", loans))}  # fmt: skip
    print(json.dumps(report))


if __name__ == "__main__":
    main()
