"""Does a running app stay right and stay small? Cancels, a crowd, a full line, and many short runs, over HTTP.

    python -m paligemma.benchmarks.soak [--url http://127.0.0.1:7860 --pid PID] [--model FOLDER_OR_HUB_ID]

Without --url it starts `app.py` itself, in a process of its own. Four things are done and measured:

    cancels   20 requests, each cancelled as soon as it has begun; then a run gives what it gives alone
    crowd     8 clients at once: all finish, each with what it gets alone
    full      requests until the line is full: the next is refused in words, and those in line finish as alone
    memory    500 short runs: behind the first 50, the server's memory grows by less than 20 KB a run

The last line is JSON; the exit code is 1 where one of them failed. Memory is read from /proc, which only Linux has.
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
PICTURES = ROOT / "assets" / "examples"
PROMPTS = ("caption en", "detect cat", "answer en what is this?", "segment cat")
START_TIMEOUT_S = 300
# Of a long request, which is cancelled early, or keeps the others waiting until the line is full.
LONG_TOKENS = 200


@dataclass(frozen=True)
class Plan:
    """How much is done; each at least 1, `warm_up` less than `runs`."""

    cancels: int = 20
    clients: int = 8
    flood: int = 40
    runs: int = 500
    warm_up: int = 50
    limit_kb: float = 20.0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value < 1:
                raise ValueError(f"{name} is {value}; allowed are numbers of at least 1")
        if self.runs < self.warm_up + 2:
            raise ValueError(f"runs is {self.runs}; behind a warm-up of {self.warm_up} a slope needs two more")


@dataclass(frozen=True)
class Outcome:
    """One of the four: whether it held, a sentence, and its figures."""

    name: str
    passed: bool
    sentence: str
    figures: dict[str, Any]


class Server:
    """A running app, and what is asked of it."""

    def __init__(self, url: str, pid: int | None) -> None:
        self.url = url
        self.pid = pid
        self.images = sorted(PICTURES.glob("*.png"))
        self._client = self.new_client()

    def new_client(self) -> Client:
        return Client(self.url, verbose=False)

    def submit(self, number: int, client: Client | None = None, **changes: Any) -> Any:
        """Request `number` of a row in which pictures, prompts and seeds change; a gradio_client job."""
        request = {
            "image": handle_file(self.images[number % len(self.images)]),
            "prompt": PROMPTS[number % len(PROMPTS)],
            "max_new_tokens": 12,
            "temperature": 1.0,
            "seed": number,
            "top_n": 3,
        }
        return (client or self._client).submit(**{**request, **changes}, api_name="/generate")

    def ask(self, number: int, client: Client | None = None, **changes: Any) -> list[tuple[int, float]]:
        """The answer to a request: each token's id and logit. Raises what the server says went wrong."""
        job = self.submit(number, client, **changes)
        events = list(job)
        job.result()
        return tokens_of(events)

    def cancel(self, job: Any) -> None:
        """End a request of `submit` as the page's own script would.

        At once: `job.cancel()` prepares a new connection first, and by then some tokens have been written.
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
        """The memory that the server's process occupies."""
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def tokens_of(events: Sequence[dict[str, Any]]) -> list[tuple[int, float]]:
    """Id and logit of each token in the events of an answer."""
    return [(event["step"]["token_id"], event["step"]["logit"]) for event in events if event["step"]]


def slope(values: Sequence[float]) -> float:
    """Growth from one value to the next: the slope of the line of least squares through (0, 1, 2, ..., values)."""
    return statistics.linear_regression(range(len(values)), values).slope


# The four


def cancel_first_steps(server: Server, plan: Plan) -> Outcome:
    """Cancel each request as soon as the server has begun it, then run one undisturbed.

    That is during the first step, unless the model is so fast that a few tokens come before the cancel arrives.
    """
    alone, long = server.ask(0), long_request(server)
    counts = []
    for _ in range(plan.cancels):
        job = server.submit(0, **long)
        next(iter(job))
        server.cancel(job)
        wait([job.future])
        counts.append(len(tokens_of(job.outputs())))
    began = time.perf_counter()
    after = server.ask(0)
    seconds = time.perf_counter() - began
    figures = {"cancelled": plan.cancels, "most_tokens": max(counts), "of": LONG_TOKENS, "next_s": round(seconds, 3)}
    sentence = (
        f"{plan.cancels} cancelled, after {max(counts)} of {LONG_TOKENS} tokens at most; the next took {seconds:.2f} s"
    )
    return Outcome("cancels", after == alone and max(counts) < LONG_TOKENS / 10, sentence, figures)


def long_request(server: Server) -> dict[str, Any]:
    """What changes a request into one of LONG_TOKENS tokens: its likeliest first token, again and again."""
    (token_id, _), *_ = server.ask(0, temperature=0.0)
    return {"temperature": 0.0, "max_new_tokens": LONG_TOKENS, "forced_ids": [token_id] * LONG_TOKENS}


def ask_in_a_crowd(server: Server, plan: Plan) -> Outcome:
    """Ask from several clients at once and compare with the same requests one by one."""
    numbers = range(plan.clients)
    clients = [server.new_client() for _ in numbers]
    began = time.perf_counter()
    alone = [server.ask(number) for number in numbers]
    alone_s = time.perf_counter() - began
    with ThreadPoolExecutor(plan.clients) as pool:
        together = list(pool.map(server.ask, numbers, clients))
    together_s = time.perf_counter() - began - alone_s
    same = sum(left == right for left, right in zip(alone, together, strict=True))
    figures = {"clients": plan.clients, "same": same, "alone_s": round(alone_s, 3), "together_s": round(together_s, 3)}
    sentence = f"{same} of {plan.clients} got what they get alone, in {together_s:.2f} s; alone in {alone_s:.2f} s"
    return Outcome("crowd", same == plan.clients, sentence, figures)


def fill_the_line(server: Server, plan: Plan) -> Outcome:
    """Send long requests until one is refused; all that were taken must end as one does alone."""
    long = long_request(server)
    alone = server.ask(0, **long)
    jobs: list[Any] = []
    while len(jobs) < plan.flood and not any(map(failure_of, jobs)):
        jobs.append(server.submit(0, **long))
        time.sleep(0.02)  # one after the other, as visitors come
    wait([job.future for job in jobs])
    words = [str(error) for error in map(failure_of, jobs) if error]
    taken = [job for job in jobs if not failure_of(job)]
    right = sum(tokens_of(job.outputs()) == alone for job in taken)
    figures = {"taken": len(taken), "right": right, "refused": len(words), "words": words[:1]}
    sentence = f"{len(taken)} were taken, {right} of them right; {len(words)} refused: {words[:1]}"
    return Outcome("full", right == len(taken) and any(" " in said for said in words), sentence, figures)


def failure_of(job: Any) -> BaseException | None:
    """What a job has failed with so far."""
    return job.exception() if job.done() else None


def run_many(server: Server, plan: Plan) -> Outcome:
    """Make short runs and fit a line to the server's memory behind the warm-up."""
    if server.pid is None:
        return Outcome("memory", False, "memory was not measured: name the server's process with --pid", {})
    sizes = []
    began = time.perf_counter()
    for number in range(plan.runs):
        server.ask(number, max_new_tokens=4)
        sizes.append(server.resident_bytes())
    seconds = time.perf_counter() - began
    growth_kb = slope(sizes[plan.warm_up :]) / 1000
    megabytes = [round(sizes[place] / 1e6, 1) for place in (0, plan.warm_up, -1)]
    figures = {"runs": plan.runs, "kb_a_run": round(growth_kb, 3), "megabytes": megabytes, "seconds": round(seconds, 1)}
    sentence = (
        f"{plan.runs} runs in {seconds:.0f} s; {growth_kb:+.2f} KB a run behind the first {plan.warm_up} (less than "
        f"{plan.limit_kb:g} is asked); MB at the first, at {plan.warm_up}, at the last: {megabytes}"
    )
    return Outcome("memory", growth_kb < plan.limit_kb, sentence, figures)


STAGES: dict[str, Callable[[Server, Plan], Outcome]] = {
    "cancels": cancel_first_steps,
    "crowd": ask_in_a_crowd,
    "full": fill_the_line,
    "memory": run_many,
}


# The process


@contextmanager
def started_app(model: str | None) -> Iterator[Server]:
    """`app.py` in a process of its own, once its model is ready."""
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
    """The url, once the server there has a model; SystemExit when it ends, cannot load it, or takes too long."""
    end = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < end and process.poll() is None:
        if answers(url):
            (model, *_) = Client(url, verbose=False).predict(api_name="/models")
            if model["state"] == "error":
                raise SystemExit(model["message"])
            if model["state"] == "ready":
                return url
        time.sleep(0.5)
    raise SystemExit(f"{url} did not become ready")


def answers(url: str) -> bool:
    """Whether a server is there."""
    try:
        with urlopen(url):
            return True
    except OSError:
        return False


def soak(server: Server, plan: Plan, names: Sequence[str]) -> list[Outcome]:
    """Do the named stages one after the other and print each as it ends."""
    outcomes = []
    for name in names:
        outcome = STAGES[name](server, plan)
        print(f"{'ok  ' if outcome.passed else 'FAIL'} {outcome.name}: {outcome.sentence}", flush=True)
        outcomes.append(outcome)
    print(json.dumps({outcome.name: {"passed": outcome.passed, **outcome.figures} for outcome in outcomes}))
    return outcomes


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", help="of a running app (default: one is started)")
    parser.add_argument("--pid", type=int, help="the process of the app at --url, whose memory is read")
    parser.add_argument("--model", help="a folder or a hub id for the app that is started (default: the bundled model)")
    parser.add_argument("--only", nargs="+", choices=STAGES, default=list(STAGES), help="stages (default: all)")
    defaults = Plan()
    parser.add_argument("--cancels", type=int, default=defaults.cancels, help="default: %(default)s")
    parser.add_argument("--clients", type=int, default=defaults.clients, help="at once (default: %(default)s)")
    parser.add_argument(
        "--flood", type=int, default=defaults.flood, help="most requests to fill the line (default: %(default)s)"
    )
    parser.add_argument("--runs", type=int, default=defaults.runs, help="default: %(default)s")
    parser.add_argument(
        "--warm-up", type=int, default=defaults.warm_up, help="runs not looked at (default: %(default)s)"
    )
    parser.add_argument(
        "--limit-kb", type=float, default=defaults.limit_kb, help="growth of a run (default: %(default)s)"
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    chosen = build_parser().parse_args(arguments)
    plan = Plan(**{name: getattr(chosen, name) for name in asdict(Plan())})
    if chosen.url:
        outcomes = soak(Server(chosen.url, chosen.pid), plan, chosen.only)
    else:
        with started_app(chosen.model) as server:
            outcomes = soak(server, plan, chosen.only)
    return 0 if all(outcome.passed for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
