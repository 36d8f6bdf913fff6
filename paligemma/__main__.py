"""python -m paligemma PICTURE PROMPT: the answer in a terminal, streamed."""

from __future__ import annotations

import argparse
import io
import signal
import sys
from collections.abc import Sequence

from PIL import Image, UnidentifiedImageError

import paligemma
from paligemma.checkpoint import DTYPES, Progress
from paligemma.generation import MAX_TOP_N, GenerationOptions, Sampling, Step
from paligemma.kernels import QUANTIZATIONS

FAILURE, INTERRUPTED = 1, 128 + signal.SIGINT


def main(arguments: Sequence[str] | None = None) -> int:
    """Answer one prompt. Returns the exit code: 0, 1 for a failure, 2 for bad usage, 130 after Ctrl-C.

    The answer goes to stdout; progress and errors, one line each, to stderr.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a character must not end the answer
    parser = build_parser()
    chosen = parser.parse_args(arguments)
    try:
        check(chosen)
    except ValueError as error:
        parser.error(str(error))
    try:
        answer(chosen)
    except KeyboardInterrupt:
        return INTERRUPTED
    except (OSError, ValueError, ArithmeticError, RuntimeError) as error:
        print(f"paligemma: {' '.join(str(error).split())}", file=sys.stderr)
        return FAILURE
    return 0


def build_parser() -> argparse.ArgumentParser:
    """The flags, with the defaults of `PaliGemma.stream` and `load`."""
    parser = argparse.ArgumentParser(
        prog="python -m paligemma", description="Answer a prompt about a picture, token by token."
    )
    parser.add_argument("image", metavar="PICTURE", help="a picture file")
    parser.add_argument("prompt", metavar="PROMPT", help='the task, such as "caption en" or "detect cat"')
    parser.add_argument("--model", help="a folder or a hub id (default: the bundled demo)")
    parser.add_argument("--revision", help="the hub's branch, tag or commit")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N or mps (default: %(default)s)")
    parser.add_argument("--dtype", default="auto", choices=["auto", *DTYPES], help="(default: %(default)s)")
    parser.add_argument(
        "--quantize",
        choices=QUANTIZATIONS,
        help="smaller, a little less exact; faster on a CPU, slower elsewhere",
    )
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 takes the likeliest (default: %(default)s)")
    parser.add_argument("--top-k", type=int, default=0, help="sample from the k likeliest; 0: all (default)")
    parser.add_argument("--top-p", type=float, default=1.0, help="sample from this share of probability (default: 1)")
    parser.add_argument("--seed", type=int, help="the same seed gives the same answer (default: a fresh one)")
    parser.add_argument(
        "--candidates",
        type=int,
        default=0,
        metavar="N",
        help=f"a line a token, with its N likeliest (1 to {MAX_TOP_N})",
    )
    return parser


def check(chosen: argparse.Namespace) -> None:
    """Raise ValueError for numbers that are not allowed, before anything is loaded."""
    sampling = Sampling(chosen.temperature, chosen.top_k, chosen.top_p, chosen.seed)
    GenerationOptions(chosen.max_new_tokens, sampling)
    if not 0 <= chosen.candidates <= MAX_TOP_N:
        raise ValueError(f"--candidates is {chosen.candidates}; allowed are 0 (none) to {MAX_TOP_N}")


def answer(chosen: argparse.Namespace) -> None:
    """Load the model and print the answer while it is made."""
    with open_image(chosen.image) as image:
        vlm = paligemma.load(
            chosen.model,
            chosen.revision,
            chosen.device,
            chosen.dtype,
            chosen.quantize,
            progress=report_progress(sys.stderr.isatty()),
        )
        steps = vlm.stream(
            image,
            chosen.prompt,
            max_new_tokens=chosen.max_new_tokens,
            temperature=chosen.temperature,
            top_k=chosen.top_k,
            top_p=chosen.top_p,
            seed=chosen.seed,
            top_n=chosen.candidates or 1,
        )
        text = ""
        for step in steps:
            text = step.text
            print(line_of(step) if chosen.candidates else step.text_delta, end="", flush=True)
    print(f"\n{text}" if chosen.candidates else "")
    if not text.strip():
        print("paligemma: the model ended its answer at once; it may not know this kind of prompt", file=sys.stderr)


def open_image(path: str) -> Image.Image:
    """The picture, not decoded yet. ValueError for what is none, and for one so large that it may be an attack."""
    try:
        return Image.open(path)
    except FileNotFoundError:
        raise ValueError(f"there is no file {path}") from None
    except UnidentifiedImageError:
        raise ValueError(f"{path} is no picture that can be read, or is damaged; JPEG, PNG and WEBP can be") from None
    except Image.DecompressionBombError as error:
        raise ValueError(f"{path} is too large a picture: {error}") from None


def line_of(step: Step) -> str:
    """One token as a line: its logit and probability, then the candidates, likeliest first."""
    candidates = "  ".join(f"{token.piece!r} {token.logit:.2f} {token.prob:.1%}" for token in step.top)
    return f"{step.index:4d} {step.piece!r} {step.logit:.2f} {step.prob:.1%} | {candidates}\n"


def report_progress(is_terminal: bool) -> Progress:
    """A counter on one line of the terminal; silent where stderr goes elsewhere."""
    if not is_terminal:
        return lambda stage, done, total: None

    def report(stage: str, done: int, total: int) -> None:
        end = "\r" if done < total else "\n"
        print(f"{stage} weights: {done / total:4.0%}", end=end, file=sys.stderr, flush=True)

    return report


if __name__ == "__main__":
    sys.exit(main())
