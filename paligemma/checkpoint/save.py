"""Save a model in the hub's layout."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from paligemma.checkpoint.devices import dtype_name, resolve_dtype
from paligemma.checkpoint.files import CONFIG_FILE, SINGLE_FILE
from paligemma.errors import CheckpointError
from paligemma.kernels import InferenceLinear
from paligemma.modeling import PaliGemmaForConditionalGeneration


def save_model(
    model: PaliGemmaForConditionalGeneration, folder: str | Path, dtype: str | torch.dtype | None = None
) -> None:
    """Write config.json and model.safetensors, which transformers can load too.

    Args:
        folder: created if it does not exist. It may be the folder the model was loaded from, except on Windows.
        dtype: of the stored weights; None: the model's.

    Raises:
        CheckpointError: if the files cannot be written (existing files are then unchanged), or if the model was
            loaded by `load_for_inference` and its weights are packed or quantized.
    """
    if any(isinstance(module, InferenceLinear) for module in model.modules()):
        raise CheckpointError(
            "checkpoint.not_savable",
            "A model with packed or quantized weights cannot be saved. Load it with load_model instead.",
        )
    folder = Path(folder)
    stored_dtype = (resolve_dtype(dtype) if dtype is not None else None) or model.dtype
    config = dataclasses.replace(model.config, dtype=dtype_name(stored_dtype))
    # named_parameters lists the tied head and embedding once, under the embedding's name.
    weights = {
        name: parameter.detach().to("cpu", stored_dtype).contiguous() for name, parameter in model.named_parameters()
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _replace_files(folder, weights, json.dumps(config.to_dict(), indent=2) + "\n")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            "checkpoint.not_writable",
            "{folder} cannot be written: {reason}. Check its permissions and the free disk space; on Windows, do not "
            "overwrite the checkpoint of a loaded model.",
            folder=str(folder),
            reason=str(error),
        ) from None


def _replace_files(folder: Path, weights: dict[str, Tensor], config: str) -> None:
    """Write both files under temporary names, then move them over the old ones.

    The model's weights may be memory-mapped from the old file, which must not be written to.
    """
    temporary_weights, temporary_config = (folder / f"{name}.tmp" for name in (SINGLE_FILE, CONFIG_FILE))
    try:
        temporary_config.write_text(config, encoding="utf-8")
        save_file(weights, temporary_weights, metadata={"format": "pt"})
        shutil.copymode(temporary_config, temporary_weights)  # safetensors creates files with mode 0600
        os.replace(temporary_weights, folder / SINGLE_FILE)
        os.replace(temporary_config, folder / CONFIG_FILE)
    finally:
        for file in (temporary_weights, temporary_config):
            with suppress(OSError):
                file.unlink()
