"""Soak test: cancellation, concurrent requests, a full queue and memory growth of a running app, over HTTP.

    python -m paligemma.benchmarks.soak [--url http://127.0.0.1:7860 --pid PID] [--model FOLDER_OR_HUB_ID]

Without --url, the script starts `app.py` in a separate process. The stages:

    cancels   20 requests, each canceled as soon as it starts; the next request must return its reference answer
    crowd     8 concurrent clients; each must receive the answer that the same request returns alone
    full      requests until the queue is full; the next is rejected, and all accepted ones must return correct answers
    memory    500 short requests; after a warm-up of 50, memory must grow by less than 20 KB per request

The last line of the output is JSON. The exit code is 1 if a stage fails. Memory is read from /proc (Linux only).
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from gradio_client import Client, handle_file

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "assets" / "examples"
PROMPTS = ("caption en", "detect cat", "answer en what is this?", "segment cat")
START_TIMEOUT_S = 300
LONG_TOKENS = 200  # a request that is canceled, or that keeps the queue occupied
CANCEL_DEADLINE_S = 1.0  # a fast model may generate this long before the cancel request arrives


@dataclass(frozen=True)
class Workload:
    """Size of each stage. All values must be >= 1, and `runs` >= `warm_up` + 2."""

    cancels: int = 20
    clients: int = 8
    flood: int = 40
    runs: int = 500
    warm_up: int = 50
    limit_kb: float = 20.0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value < 1:
                raise ValueError(f"{name} must be >= 1, got {value}.")
        if self.runs < self.warm_up + 2:
            raise ValueError(f"runs must be >= warm_up + 2 = {self.warm_up + 2}, got {self.runs}.")


@dataclass(frozen=True)
class Outcome:
    """Result of one stage: whether it passed, a summary, and the measured values."""

    name: str
    passed: bool
    summary: str
    figures: dict[str, Any]


class Server:
    """HTTP client of a running app; `pid` is the server process, needed to read its memory."""

    def __init__(self, url: str, pid: int | None) -> None:
        self.url = url
        self.pid = pid
        self.images = sorted(EXAMPLES.glob("*.png"))
        self._client = self.new_client()

    def new_client(self) -> Client:
        return Client(self.url, verbose=False)

    def submit(self, number: int, client: Client | None = None, **changes: Any) -> Any:
        """Submit a request and return its gradio_client job; image, prompt and seed depend on `number`."""
        request = {
            "image": handle_file(self.images[number % len(self.images)]),
            "prompt": PROMPTS[number % len(PROMPTS)],
            "max_new_tokens": 12,
            "temperature": 1.0,
            "seed": number,
            "top_n": 3,
        }
        return (client or self._client).submit(**{**request, **changes}, api_name="/generate")

    def generate(self, number: int, client: Client | None = None, **changes: Any) -> list[tuple[int, float]]:
        """Return (token id, logit) of each generated token. Raises the server's error."""
        job = self.submit(number, client, **changes)
        events = list(job)
        job.result()
        return tokens_of(events)

    def cancel(self, job: Any) -> None:
        """Cancel a submitted request as the page does.

        `job.cancel()` of gradio_client opens a new connection first, which takes longer than several tokens.
        """
        events = self._client.config["dependencies"]
        body = {
            "event_id": job.communicator.event_id,
            "session_hash": self._client.session_hash,
            "fn_index": next(event["id"] for event in events if event["api_name"] == "generate"),
        }
        url, headers = f"{self.url.rstrip('/')}/gradio_api/cancel", {"Content-Type": "application/json"}
        with urlopen(Request(url, json.dumps(body).encode(), headers)) as reply:
            reply.read()

    def resident_bytes(self) -> int:
        """Resident memory of the server process in bytes."""
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def tokens_of(events: Sequence[dict[str, Any]]) -> list[tuple[int, float]]:
    """Token id and logit of each event that contains a step."""
    return [(event["step"]["token_id"], event["step"]["logit"]) for event in events if event["step"]]


def slope(values: Sequence[float]) -> float:
    """Least-squares slope of the values over their index."""
    return statistics.linear_regression(range(len(values)), values).slope


# Stages


def cancel_requests(server: Server, workload: Workload) -> Outcome:
    """Cancel long requests as soon as they start, then check that an undisturbed request is unaffected."""
    expected, request = server.generate(0), long_request(server)
    limit = max_tokens_before_cancel(server, request)
    counts = []
    for _ in range(workload.cancels):
        job = server.submit(0, **request)
        next(iter(job))
        server.cancel(job)
        wait([job.future])
        counts.append(len(tokens_of(job.outputs())))
    started = time.perf_counter()
    actual = server.generate(0)
    seconds = time.perf_counter() - started
    figures = {
        "cancelled": workload.cancels,
        "most_tokens": max(counts),
        "limit": limit,
        "of": LONG_TOKENS,
        "next_s": round(seconds, 3),
    }
    summary = (
        f"{workload.cancels} requests canceled after at most {max(counts)} of {LONG_TOKENS} tokens (limit {limit}); "
        f"the next request took {seconds:.2f} s"
    )
    return Outcome("cancels", actual == expected and max(counts) <= limit, summary, figures)


def max_tokens_before_cancel(server: Server, request: dict[str, Any]) -> int:
    """Tokens that a canceled request may have generated: a tenth, or what the server generates in CANCEL_DEADLINE_S.

    A server that completes the whole answer within the deadline may complete it before the cancel arrives.
    """
    started = time.perf_counter()
    tokens = server.generate(0, **request)
    tokens_per_s = len(tokens) / (time.perf_counter() - started)
    return min(LONG_TOKENS, max(LONG_TOKENS // 10, round(CANCEL_DEADLINE_S * tokens_per_s)))


def long_request(server: Server) -> dict[str, Any]:
    """Options of a request for LONG_TOKENS tokens, all forced to its most probable first token."""
    (token_id, _), *_ = server.generate(0, temperature=0.0)
    return {"temperature": 0.0, "max_new_tokens": LONG_TOKENS, "forced_ids": [token_id] * LONG_TOKENS}


def run_concurrent_clients(server: Server, workload: Workload) -> Outcome:
    """Run the same requests sequentially and from concurrent clients, and compare the answers."""
    numbers = range(workload.clients)
    clients = [server.new_client() for _ in numbers]
    started = time.perf_counter()
    sequential = [server.generate(number) for number in numbers]
    sequential_s = time.perf_counter() - started
    with ThreadPoolExecutor(workload.clients) as pool:
        concurrent = list(pool.map(server.generate, numbers, clients))
    concurrent_s = time.perf_counter() - started - sequential_s
    same = sum(left == right for left, right in zip(sequential, concurrent, strict=True))
    figures = {
        "clients": workload.clients,
        "same": same,
        "alone_s": round(sequential_s, 3),
        "together_s": round(concurrent_s, 3),
    }
    summary = (
        f"{same} of {workload.clients} answers are identical; {concurrent_s:.2f} s concurrent, "
        f"{sequential_s:.2f} s sequential"
    )
    return Outcome("crowd", same == workload.clients, summary, figures)


def fill_queue(server: Server, workload: Workload) -> Outcome:
    """Submit long requests until one is rejected, and check the answers of all accepted ones."""
    request = long_request(server)
    expected = server.generate(0, **request)
    jobs: list[Any] = []
    while len(jobs) < workload.flood and not any(map(failure_of, jobs)):
        jobs.append(server.submit(0, **request))
        time.sleep(0.02)
    wait([job.future for job in jobs])
    errors = [str(error) for error in map(failure_of, jobs) if error]
    accepted = [job for job in jobs if not failure_of(job)]
    correct = sum(tokens_of(job.outputs()) == expected for job in accepted)
    figures = {"taken": len(accepted), "right": correct, "refused": len(errors), "words": errors[:1]}
    summary = f"{len(accepted)} accepted, {correct} correct; {len(errors)} rejected: {errors[:1]}"
    has_message = any(" " in error for error in errors)
    return Outcome("full", correct == len(accepted) and has_message, summary, figures)


def failure_of(job: Any) -> BaseException | None:
    """The error of a finished job, or None."""
    return job.exception() if job.done() else None


def measure_memory_growth(server: Server, workload: Workload) -> Outcome:
    """Run short requests and fit a line to the server's resident memory after the warm-up."""
    if server.pid is None:
        return Outcome("memory", False, "memory is not measured; pass the server's process id with --pid", {})
    sizes = []
    started = time.perf_counter()
    for number in range(workload.runs):
        server.generate(number, max_new_tokens=4)
        sizes.append(server.resident_bytes())
    seconds = time.perf_counter() - started
    growth_kb = slope(sizes[workload.warm_up :]) / 1000
    megabytes = [round(sizes[index] / 1e6, 1) for index in (0, workload.warm_up, -1)]
    figures = {
        "runs": workload.runs,
        "kb_a_run": round(growth_kb, 3),
        "megabytes": megabytes,
        "seconds": round(seconds, 1),
    }
    summary = (
        f"{workload.runs} requests in {seconds:.0f} s; {growth_kb:+.2f} KB per request after the first "
        f"{workload.warm_up} (limit {workload.limit_kb:g} KB); MB at start, warm-up and end: {megabytes}"
    )
    return Outcome("memory", growth_kb < workload.limit_kb, summary, figures)


STAGES: dict[str, Callable[[Server, Workload], Outcome]] = {
    "cancels": cancel_requests,
    "crowd": run_concurrent_clients,
    "full": fill_queue,
    "memory": measure_memory_growth,
}


# Process


@contextmanager
def started_app(model: str | None) -> Iterator[Server]:
    """Start `app.py` in a separate process and yield its client once the model is ready."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, str(ROOT / "app.py"), "--port", str(port), *(["--model", model] if model else [])]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        yield Server(wait_until_ready(f"http://127.0.0.1:{port}", process), process.pid)
    finally:
        process.terminate()
        process.wait(60)


def wait_until_ready(url: str, process: subprocess.Popen) -> str:
    """Return the URL once the server's model is ready; SystemExit if it exits, fails to load, or times out."""
    end = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < end and process.poll() is None:
        if is_reachable(url):
            (model, *_) = Client(url, verbose=False).predict(api_name="/models")
            if model["state"] == "error":
                raise SystemExit(model["message"])
            if model["state"] == "ready":
                return url
        time.sleep(0.5)
    raise SystemExit(f"{url} is not ready.")


def is_reachable(url: str) -> bool:
    """Whether a server responds at the URL."""
    try:
        with urlopen(url):
            return True
    except OSError:
        return False


def soak(server: Server, workload: Workload, names: Sequence[str]) -> list[Outcome]:
    """Run the named stages in order and print each result."""
    outcomes = []
    for name in names:
        outcome = STAGES[name](server, workload)
        print(f"{'ok  ' if outcome.passed else 'FAIL'} {outcome.name}: {outcome.summary}", flush=True)
        outcomes.append(outcome)
    print(json.dumps({outcome.name: {"passed": outcome.passed, **outcome.figures} for outcome in outcomes}))
    return outcomes


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m paligemma.benchmarks.soak", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--url", help="URL of a running app (default: start one)")
    parser.add_argument("--pid", type=int, help="process id of the app at --url, to read its memory")
    parser.add_argument("--model", help="checkpoint folder or hub id of the started app (default: bundled model)")
    parser.add_argument("--only", nargs="+", choices=STAGES, default=list(STAGES), help="stages to run (default: all)")
    defaults = Workload()
    helps = {
        "cancels": "requests to cancel",
        "clients": "concurrent clients",
        "flood": "maximum requests to fill the queue",
        "runs": "requests of the memory stage",
        "warm_up": "requests before memory growth is measured",
        "limit_kb": "maximum memory growth per request, in KB",
    }
    for name, text in helps.items():
        default = getattr(defaults, name)
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=type(default), default=default, help=f"{text} (default: %(default)s)")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    options = build_parser().parse_args(arguments)
    workload = Workload(**{name: getattr(options, name) for name in asdict(Workload())})
    if options.url:
        outcomes = soak(Server(options.url, options.pid), workload, options.only)
    else:
        with started_app(options.model) as server:
            outcomes = soak(server, workload, options.only)
    return 0 if all(outcome.passed for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
