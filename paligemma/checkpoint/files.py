"""Files of a checkpoint folder in the hub's layout: config.json, safetensors weights and tokenizer.json."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from paligemma.errors import CheckpointError

CONFIG_FILE = "config.json"
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
TOKENIZER_FILE = "tokenizer.json"
SENTENCEPIECE_FILE = "tokenizer.model"
DOWNLOADED_FILES = (
    CONFIG_FILE,
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    TOKENIZER_FILE,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    INDEX_FILE,
    SINGLE_FILE,
    "model-*-of-*.safetensors",
)
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
MAX_LISTED_NAMES = 8  # in an error message
MAX_NAME_LENGTH = 200


@contextmanager
def wrap_os_errors(folder: Path) -> Iterator[None]:
    """Raise CheckpointError instead of OSError while reading a folder."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            "checkpoint.unreadable",
            "{folder} cannot be read: {reason}. Check its permissions, or copy it to another disk.",
            folder=str(folder),
            reason=str(error),
        ) from None


def require_files(names: Collection[str], checkpoint: str, can_convert: bool = False) -> None:
    """Raise CheckpointError if the files of a folder or repository do not form a checkpoint.

    Args:
        names: of the files.
        checkpoint: the folder or hub id shown in messages.
        can_convert: whether tokenizer.model is accepted instead of tokenizer.json; see `load_tokenizer`.
    """
    if not {SINGLE_FILE, INDEX_FILE} & set(names):
        raise _missing_weights(names, checkpoint)
    if CONFIG_FILE not in names:
        raise missing_config(checkpoint)
    if TOKENIZER_FILE in names or (can_convert and SENTENCEPIECE_FILE in names):
        return
    if SENTENCEPIECE_FILE in names:
        raise CheckpointError(
            "checkpoint.tokenizer_model",
            "{checkpoint} has tokenizer.model, but no tokenizer.json. Download tokenizer.json from the same model on "
            "the hub, or create it with transformers: AutoTokenizer.from_pretrained(folder).save_pretrained(folder).",
            checkpoint=checkpoint,
        )
    raise CheckpointError(
        "checkpoint.no_tokenizer",
        "{checkpoint} has no tokenizer.json. Download it from the same model on the hub.",
        checkpoint=checkpoint,
    )


def missing_config(checkpoint: str) -> CheckpointError:
    """The error for a folder or repository without config.json."""
    return CheckpointError(
        "checkpoint.no_config",
        "{checkpoint} has no config.json. Copy or download the checkpoint again.",
        checkpoint=checkpoint,
    )


def _missing_weights(names: Collection[str], checkpoint: str) -> CheckpointError:
    """The error for a folder or repository without safetensors weights; depends on what it has instead."""
    if "adapter_config.json" in names:
        return CheckpointError(
            "checkpoint.adapter",
            "{checkpoint} contains only a PEFT adapter. Merge it into its base model with peft (merge_and_unload, then "
            "save_pretrained), and load the merged folder.",
            checkpoint=checkpoint,
        )
    if _first_match(names, "*.gguf"):
        return CheckpointError(
            "checkpoint.gguf",
            "{checkpoint} contains GGUF weights, which are not supported. Use the checkpoint they were converted from, "
            "such as google/paligemma2-3b-mix-224.",
            checkpoint=checkpoint,
        )
    if _first_match(names, "*.npz"):
        return CheckpointError(
            "checkpoint.npz",
            "{checkpoint} contains big_vision weights (.npz), which are not supported. Use the repository of the same "
            "name without -jax.",
            checkpoint=checkpoint,
        )
    pickle = _first_match(names, *PICKLES)
    if pickle:
        return CheckpointError(
            "checkpoint.pickle",
            "{checkpoint} has no safetensors weights, only {file}. Pickle files can execute code and are never opened; "
            "convert the model with transformers (save_pretrained), or use another revision.",
            checkpoint=checkpoint,
            file=pickle,
        )
    return CheckpointError(
        "checkpoint.no_weights",
        "{checkpoint} has neither model.safetensors nor model.safetensors.index.json. Copy or download the checkpoint "
        "again.",
        checkpoint=checkpoint,
    )


def _first_match(names: Collection[str], *patterns: str) -> str | None:
    return next((name for name in sorted(names) if any(fnmatch(name, pattern) for pattern in patterns)), None)


def weight_files(folder: Path) -> list[Path]:
    """Return the model's safetensors files: the single file, or the shards in the index. Others are ignored."""
    if (folder / SINGLE_FILE).exists():
        return [folder / SINGLE_FILE]
    index = folder / INDEX_FILE
    if index.exists():
        return _read_index(index)
    raise _missing_weights([path.name for path in folder.iterdir()], str(folder))


def _read_index(index: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CheckpointError(
            "checkpoint.bad_index",
            "{index} has no valid weight_map. Copy or download it again.",
            index=str(index),
        ) from None
    if not names or not all(map(_is_plain_name, names)):
        raise CheckpointError(
            "checkpoint.bad_index_names",
            "The weight_map of {index} must list .safetensors files in the same folder, got {names}.",
            index=str(index),
            names=format_names(names) or "none",
        )
    return [index.parent / name for name in names]


def _is_plain_name(name: Any) -> bool:
    """Whether this is a bare .safetensors file name; a path could point outside the folder."""
    return isinstance(name, str) and Path(name).name == name and name.endswith(".safetensors")


def require_shard(file: Path) -> None:
    """Raise CheckpointError unless a weight file exists."""
    if not file.is_file():
        raise CheckpointError(
            "checkpoint.missing_shard",
            "{file} is missing in {folder}. Copy or download it again.",
            file=file.name,
            folder=str(file.parent),
        )


def format_names(names: list[Any]) -> str:
    """Join names for a message; names after the first MAX_LISTED_NAMES are only counted."""
    more = f", and {len(names) - MAX_LISTED_NAMES} more" if len(names) > MAX_LISTED_NAMES else ""
    return ", ".join(str(name)[:MAX_NAME_LENGTH] for name in names[:MAX_LISTED_NAMES]) + more
