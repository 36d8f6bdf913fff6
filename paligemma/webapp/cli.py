"""Command line of the web app: options, models, launch."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import paligemma
from paligemma import checkpoint
from paligemma.errors import InputError
from paligemma.masks import download_vae_oid
from paligemma.webapp.limits import Limits
from paligemma.webapp.logs import configure_logging
from paligemma.webapp.served_models import ServedModel, ServedModels
from paligemma.webapp.server import serve
from paligemma.webapp.zerogpu import is_zerogpu, with_gpu_lease

# Public name of the bundled model, in the form of a hub id.
BUNDLED_NAME = "paligemma-emoji"
MASK_DECODER_FILES = ("mask_decoder.safetensors", "vae-oid.npz")


def build_parser() -> argparse.ArgumentParser:
    """Build the argument parser. `--model` defaults to the environment variable MODEL_ID."""
    parser = argparse.ArgumentParser(
        prog="paligemma-app",
        description="Web app that streams PaliGemma's answer token by token, with the candidates of each token.",
    )
    parser.add_argument(
        "--model",
        nargs="+",
        default=os.environ.get("MODEL_ID", "").split(),
        help="checkpoint folder or hub id; with several, the page shows a model list "
        "(default: $MODEL_ID, else the bundled model)",
    )
    parser.add_argument("--revision", help="branch, tag or commit on the hub")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N or mps (default: %(default)s)")
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16 (default: %(default)s)")
    parser.add_argument(
        "--quantize",
        help="int8: about half the memory of bfloat16; faster on CPU, slower on other devices (default: off)",
    )
    parser.add_argument(
        "--mask-decoder",
        type=Path,
        help="vae-oid.npz, the mask decoder of Google's checkpoints (default: in the checkpoint folder, "
        "else downloaded for a hub id)",
    )
    parser.add_argument("--mcp", action="store_true", help="also serve the API as MCP tools; requires gradio[mcp]")
    parser.add_argument("--host", help="address to listen on (default: $GRADIO_SERVER_NAME, else 127.0.0.1)")
    parser.add_argument(
        "--port", type=int, help="port to listen on (default: $GRADIO_SERVER_PORT, else the first free port from 7860)"
    )
    return parser


def build_served_models(arguments: argparse.Namespace, limits: Limits | None = None) -> list[ServedModel]:
    """Create a ServedModel for each `--model`, with the bundled model as fallback. Loads nothing.

    Raises:
        InputError: the mask decoder does not exist, or two models have the same name.
    """
    mask_decoder = arguments.mask_decoder
    if mask_decoder and not mask_decoder.is_file():
        raise InputError(
            "cli.mask_decoder", "--mask-decoder must be an existing file, got {path!r}.", path=str(mask_decoder)
        )
    settings = {"limits": limits or Limits(), "gpu_lease": with_gpu_lease if is_zerogpu() else None}
    bundled = _build_bundled_model(arguments, **settings)
    served_models = [_build_served_model(source, arguments, bundled, **settings) for source in arguments.model]
    names = [served_model.name for served_model in served_models]
    if len(set(names)) < len(names):
        raise InputError(
            "cli.model", "--model must have unique names, got {names}. Rename a folder.", names=", ".join(names)
        )
    return served_models or [bundled]


def _build_bundled_model(arguments: argparse.Namespace, **settings: Any) -> ServedModel:
    folder = checkpoint.BUNDLED_FOLDER
    if not (folder / "config.json").is_file():
        return ServedModel("no model", None, **settings)
    # The fallback ignores the options: the device or dtype may be why the other model could not be loaded.
    names = () if arguments.model else ("revision", "device", "dtype", "quantize")
    options = {name: getattr(arguments, name) for name in names}
    mask_decoders = _mask_decoder_files(folder, None if arguments.model else arguments.mask_decoder)
    return ServedModel(BUNDLED_NAME, partial(paligemma.load, None, **options), mask_decoders, **settings)


def _build_served_model(
    source: str, arguments: argparse.Namespace, bundled: ServedModel, **settings: Any
) -> ServedModel:
    folder = checkpoint.resolve_local_path(source)
    is_folder = folder.is_dir()
    name = BUNDLED_NAME if checkpoint.is_bundled(folder) else folder.resolve().name if is_folder else source
    return ServedModel(
        name,
        partial(paligemma.load, source, arguments.revision, arguments.device, arguments.dtype, arguments.quantize),
        _mask_decoder_files(folder, arguments.mask_decoder),
        None if is_folder else download_vae_oid,
        fallback=bundled,
        **settings,
    )


def _mask_decoder_files(folder: Path, path: Path | None) -> list[Path]:
    """Candidate paths of a model's mask decoder."""
    return [path] if path else [folder / name for name in MASK_DECODER_FILES]


def start_loading(served_models: ServedModels) -> None:
    """Load the first model in a thread; on ZeroGPU load all of them now, because a GPU is visible only at startup."""
    if not is_zerogpu():
        served_models[0].start()
        return
    for served_model in served_models:
        served_model.load_now()


def read_sign_in(environment: Mapping[str, str]) -> list[tuple[str, str]] | None:
    """Parse user names and passwords from SIGN_IN. Returns None if no sign-in is required.

    Raises:
        InputError: SIGN_IN is malformed. The message does not contain its value.
    """
    pairs = [
        (name, password)
        for name, _, password in (item.partition(":") for item in environment.get("SIGN_IN", "").split())
    ]
    if not all(name and password for name, password in pairs):
        raise InputError("cli.sign_in", "SIGN_IN must be NAME:PASSWORD, or several of them separated by spaces.")
    return pairs or None


def _exit(*_: Any) -> None:
    sys.exit(0)


def main() -> None:
    """Run the web app: `python app.py` and `paligemma-app`."""
    parser = build_parser()
    arguments = parser.parse_args()
    configure_logging()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _exit)
    try:
        limits, sign_in = Limits.from_environment(os.environ), read_sign_in(os.environ)
        served_models = build_served_models(arguments, limits)
        start_loading(served_models)
        serve(
            served_models,
            server_name=arguments.host,
            server_port=arguments.port,
            auth=sign_in,
            mcp_server=arguments.mcp or None,
        )
    except InputError as error:
        parser.error(str(error))
