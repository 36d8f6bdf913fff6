"""Command line of the web application: arguments, models, launch."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import paligemma
from paligemma import checkpoint
from paligemma.masks import download_vae_oid
from paligemma.webapp import logs, serving
from paligemma.webapp.served_models import ServedModel, ServedModels
from paligemma.webapp.server import serve
from paligemma.webapp.zerogpu import is_zerogpu, with_gpu_lease

# The public name of the bundled model, in the form of a hub id.
BUNDLED_NAME = "paligemma-emoji"
MASK_DECODER_FILES = ("mask_decoder.safetensors", "vae-oid.npz")

log = logging.getLogger("paligemma.app")


def build_parser() -> argparse.ArgumentParser:
    """The command line; `--model` falls back to the environment variable MODEL_ID."""
    parser = argparse.ArgumentParser(
        description="A page on which PaliGemma answers prompts about pictures, with the candidates behind every token."
    )
    parser.add_argument(
        "--model",
        nargs="+",
        default=os.environ.get("MODEL_ID", "").split(),
        help="a folder in the hub's layout, or a hub id; several make a list to choose from "
        "(default: MODEL_ID from the environment, else the bundled one)",
    )
    parser.add_argument("--revision", help="the hub's branch, tag or commit")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N or mps (default: %(default)s)")
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16 (default: %(default)s)")
    parser.add_argument(
        "--quantize", help="int8: smaller, a little less exact; faster on a CPU, slower elsewhere (default: off)"
    )
    parser.add_argument(
        "--mask-decoder",
        type=Path,
        help="vae-oid.npz, which reads the masks of Google's checkpoints (default: beside the model)",
    )
    parser.add_argument("--mcp", action="store_true", help="offer the API as MCP tools too; needs gradio[mcp]")
    parser.add_argument("--host", help="the address to listen on (default: GRADIO_SERVER_NAME, else 127.0.0.1)")
    parser.add_argument("--port", type=int, help="the port to listen on (default: the first free one from 7860)")
    return parser


def build_served_models(arguments: argparse.Namespace, limits: serving.Limits | None = None) -> list[ServedModel]:
    """A host for each model that the command line names; nothing is loaded yet.

    The bundled model answers where one of them cannot be loaded. Raises ValueError for a model or a mask decoder that
    can be none.
    """
    if arguments.mask_decoder and not arguments.mask_decoder.is_file():
        raise ValueError(f"--mask-decoder is {str(arguments.mask_decoder)!r}, and there is no such file")
    how = {"limits": limits or serving.Limits(), "gpu_lease": with_gpu_lease if is_zerogpu() else None}
    bundled = _build_bundled_model(arguments, **how)
    served_models = [_build_served_model(name, arguments, bundled, **how) for name in arguments.model] or [bundled]
    names = [served_model.name for served_model in served_models]
    if len(set(names)) < len(names):
        raise ValueError(f"--model names models that go by one name: {', '.join(names)}. Rename a folder.")
    return served_models


def _build_bundled_model(arguments: argparse.Namespace, **how: Any) -> ServedModel:
    folder = checkpoint.BUNDLED_FOLDER
    if not (folder / "config.json").is_file():
        return ServedModel("no model", None, **how)
    # Named models may ask for a device or a type that is not to be had; as their stand-in this one asks for neither.
    own = ("revision", "device", "dtype", "quantize")
    wanted = {} if arguments.model else {name: getattr(arguments, name) for name in own}
    mask_decoders = _mask_decoders(folder, None if arguments.model else arguments.mask_decoder)
    return ServedModel(BUNDLED_NAME, partial(paligemma.load, None, **wanted), mask_decoders, **how)


def _build_served_model(source: str, arguments: argparse.Namespace, bundled: ServedModel, **how: Any) -> ServedModel:
    folder = checkpoint.resolve_local_path(source)
    is_folder = folder.is_dir()
    name = BUNDLED_NAME if checkpoint.is_bundled(folder) else folder.resolve().name if is_folder else source
    return ServedModel(
        name,
        partial(paligemma.load, source, arguments.revision, arguments.device, arguments.dtype, arguments.quantize),
        _mask_decoders(folder, arguments.mask_decoder),
        None if is_folder else download_vae_oid,
        fallback=bundled,
        **how,
    )


def _mask_decoders(folder: Path, named: Path | None) -> list[Path]:
    """Where a model's mask decoder may lie."""
    return [named] if named else [folder / file for file in MASK_DECODER_FILES]


def start_loading(served_models: ServedModels) -> None:
    """Load the first model in a thread; where the GPU is lent, all of them now, since later there is none to see."""
    if not is_zerogpu():
        return served_models[0].start()
    for served_model in served_models:
        served_model.load_now()


def read_sign_in(environment: Mapping[str, str]) -> list[tuple[str, str]] | None:
    """The names and passwords of SIGN_IN, "NAME:PASSWORD", several with spaces between; None: everybody may come in.

    Raises ValueError, which does not hold them, for anything else.
    """
    pairs = [tuple(pair.split(":", 1)) for pair in environment.get("SIGN_IN", "").split()]
    if not all(len(pair) == 2 and all(pair) for pair in pairs):
        raise ValueError("SIGN_IN is not what is allowed: NAME:PASSWORD, or several of them with spaces between")
    return pairs or None


def _end(*_: Any) -> None:
    sys.exit(0)


def main() -> None:
    parser = build_parser()
    arguments = parser.parse_args()
    logs.set_up()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _end)
    try:
        limits, sign_in = serving.Limits.from_environment(os.environ), read_sign_in(os.environ)
        served_models = build_served_models(arguments, limits)
        start_loading(served_models)
        serve(
            served_models,
            server_name=arguments.host,
            server_port=arguments.port,
            auth=sign_in,
            mcp_server=arguments.mcp or None,
        )
    except ValueError as error:
        parser.error(str(error))
