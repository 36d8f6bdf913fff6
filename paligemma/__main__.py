"""Command line: `paligemma IMAGE PROMPT` (or `python -m paligemma`) prints the answer while it is generated."""

from __future__ import annotations

import argparse
import io
import signal
import sys
from collections.abc import Sequence

from PIL import Image, UnidentifiedImageError

import paligemma
from paligemma.checkpoint import DTYPES, Progress
from paligemma.errors import InputError
from paligemma.generation import MAX_TOP_N, GenerationOptions, Step, StepCollector
from paligemma.kernels import QUANTIZATIONS
from paligemma.sampling import Sampling

EXIT_FAILURE, EXIT_INTERRUPTED = 1, 128 + signal.SIGINT


def main(arguments: Sequence[str] | None = None) -> int:
    """Answer one prompt about one image.

    The answer is printed to stdout, progress and errors (one line each) to stderr.

    Returns:
        The exit code: 0, 1 for a failure, 130 after Ctrl-C. Invalid arguments exit with 2.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # for terminals that cannot encode every character
    parser = build_parser()
    options = parser.parse_args(arguments)
    try:
        check_options(options)
    except InputError as error:
        parser.error(str(error))
    try:
        run(options)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except (OSError, ValueError, ArithmeticError, RuntimeError) as error:
        print(f"paligemma: {' '.join(str(error).split())}", file=sys.stderr)
        return EXIT_FAILURE
    return 0


def build_parser() -> argparse.ArgumentParser:
    """Build the argument parser, with the defaults of `paligemma.load` and `PaliGemma.stream`."""
    parser = argparse.ArgumentParser(prog="paligemma", description="Answer a prompt about an image, token by token.")
    parser.add_argument("image", metavar="IMAGE", help="image file")
    parser.add_argument("prompt", metavar="PROMPT", help='task prompt, such as "caption en" or "detect cat"')
    parser.add_argument("--model", help="checkpoint folder or hub id (default: the bundled model)")
    parser.add_argument("--revision", help="branch, tag or commit on the hub")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N or mps (default: %(default)s)")
    parser.add_argument("--dtype", default="auto", choices=["auto", *DTYPES], help="(default: %(default)s)")
    parser.add_argument(
        "--quantize",
        choices=QUANTIZATIONS,
        help="int8: about half the memory of bfloat16; faster on CPU, slower on other devices (default: off)",
    )
    parser.add_argument(
        "--max-new-tokens", type=int, default=128, metavar="N", help="maximum tokens (default: %(default)s)"
    )
    parser.add_argument("--temperature", type=float, default=0.0, help="0 = greedy (default: %(default)s)")
    parser.add_argument("--top-k", type=int, default=0, help="sample from the k largest logits; 0 = off (default)")
    parser.add_argument("--top-p", type=float, default=1.0, help="nucleus sampling threshold; 1 = off (default)")
    parser.add_argument("--seed", type=int, help="seed for sampling (default: random)")
    parser.add_argument(
        "--candidates",
        type=int,
        default=0,
        metavar="N",
        help=f"print one line per token with its N most probable candidates; 0 to {MAX_TOP_N}, 0 = off (default)",
    )
    return parser


def check_options(options: argparse.Namespace) -> None:
    """Raise InputError for values out of range, before the model is loaded."""
    sampling = Sampling(options.temperature, options.top_k, options.top_p, options.seed)
    GenerationOptions(options.max_new_tokens, sampling)
    if not 0 <= options.candidates <= MAX_TOP_N:
        raise InputError(
            "cli.candidates",
            "--candidates must be 0 (off) to {maximum}, got {value}.",
            maximum=MAX_TOP_N,
            value=options.candidates,
        )


def run(options: argparse.Namespace) -> None:
    """Load the model and print the answer while it is generated."""
    with open_image(options.image) as image:
        vlm = paligemma.load(
            options.model,
            options.revision,
            options.device,
            options.dtype,
            options.quantize,
            progress=progress_printer(sys.stderr.isatty()),
        )
        steps = StepCollector(
            vlm.stream(
                image,
                options.prompt,
                max_new_tokens=options.max_new_tokens,
                temperature=options.temperature,
                top_k=options.top_k,
                top_p=options.top_p,
                seed=options.seed,
                top_n=options.candidates or 1,
            )
        )
        for step in steps:
            print(format_step(step) if options.candidates else step.text_delta, end="", flush=True)
    text = steps.steps[-1].text
    print(f"\n{text}" if options.candidates else "")
    if not text.strip():
        print("paligemma: the answer is empty; the model may not support this kind of prompt", file=sys.stderr)


def open_image(path: str) -> Image.Image:
    """Open an image file without decoding it.

    Raises:
        InputError: if the file is missing, is not an image, or is so large that it may be a decompression bomb.
    """
    try:
        return Image.open(path)
    except FileNotFoundError:
        raise InputError("cli.image_missing", "Image file not found: {path}.", path=path) from None
    except UnidentifiedImageError:
        raise InputError(
            "cli.image_format", "Unsupported or corrupt image: {path}. Use JPEG, PNG or WebP.", path=path
        ) from None
    except Image.DecompressionBombError as error:
        raise InputError(
            "cli.image_too_large", "The image {path} is too large: {reason}", path=path, reason=str(error)
        ) from None


def format_step(step: Step) -> str:
    """Format a token as one line: its logit and probability, then the candidates."""
    candidates = "  ".join(f"{token.piece!r} {token.logit:.2f} {token.prob:.1%}" for token in step.top)
    return f"{step.index:4d} {step.piece!r} {step.logit:.2f} {step.prob:.1%} | {candidates}\n"


def progress_printer(is_terminal: bool) -> Progress:
    """Return a callback that prints the percentage loaded to stderr, or nothing if stderr is not a terminal."""
    if not is_terminal:
        return lambda stage, done, total: None

    def report(stage: str, done: int, total: int) -> None:
        end = "\r" if done < total else "\n"
        print(f"{stage} weights: {done / total:4.0%}", end=end, file=sys.stderr, flush=True)

    return report


if __name__ == "__main__":
    sys.exit(main())
