"""Safetensors headers, tensor names of the checkpoint layouts, and checks against the configuration.

The four layouts are those of the hub, transformers >= 4.52, transformers 5, and transformers 5 with
save_original_format=False. Only headers are read here, except by `check_head`, which compares a stored head with the
embedding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from paligemma.checkpoint.files import format_names, require_shard
from paligemma.errors import CheckpointError

STORED_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
EMBEDDING = "language_model.model.embed_tokens.weight"
HEAD = "language_model.lm_head.weight"
# (prefix in the file, prefix of the parameter name); the first match applies. Parameters are named as in the hub's
# checkpoints.
PREFIXES = (
    # transformers >= 4.52; for the vision tower also transformers 5 with save_original_format=False
    ("model.language_model.", "language_model.model."),
    ("model.vision_tower.vision_model.", "vision_tower.vision_model."),
    ("model.vision_tower.", "vision_tower.vision_model."),
    ("model.multi_modal_projector.", "multi_modal_projector."),
    ("lm_head.", "language_model.lm_head."),
    # the hub, and transformers 5 with its flat vision tower
    ("vision_tower.vision_model.", "vision_tower.vision_model."),
    ("vision_tower.", "vision_tower.vision_model."),
)
# Constants that old versions of transformers stored with the weights; the model computes them.
LEGACY_BUFFERS = (".embeddings.position_ids", ".rotary_emb.inv_freq")
ROWS_PER_BLOCK = 8192  # rows of head and embedding compared at a time


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file, as described by the file's header.

    Attributes:
        key: name in the file.
        dtype: safetensors' short name, such as "BF16".
    """

    key: str
    file: Path
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_elements(self) -> int:
        return prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_elements * STORED_DTYPES[self.dtype].itemsize


def canonical_name(key: str) -> str:
    """Return the parameter name of a tensor in any of the four layouts; unknown names are returned unchanged."""
    for stored, canonical in PREFIXES:
        if key.startswith(stored):
            return canonical + key.removeprefix(stored)
    return key


def read_headers(files: Iterable[Path]) -> dict[str, StoredTensor]:
    """Return the stored tensors by parameter name, without legacy buffers."""
    stored: dict[str, StoredTensor] = {}
    for file in files:
        for tensor in _read_header(file):
            if tensor.key.endswith(LEGACY_BUFFERS):
                continue
            name = canonical_name(tensor.key)
            if name in stored:
                first = stored[name]
                raise CheckpointError(
                    "checkpoint.duplicate_tensor",
                    "{first} in {first_file} and {second} in {second_file} are stored for the same parameter. Export "
                    "the model again.",
                    first=first.key,
                    first_file=first.file.name,
                    second=tensor.key,
                    second_file=file.name,
                )
            stored[name] = tensor
    return stored


def _read_header(file: Path) -> list[StoredTensor]:
    require_shard(file)
    try:
        with safe_open(file, framework="pt") as opened:
            slices = {key: opened.get_slice(key) for key in opened.offset_keys()}
            return [StoredTensor(key, file, tuple(s.get_shape()), s.get_dtype()) for key, s in slices.items()]
    except SafetensorError as error:
        raise CheckpointError(
            "checkpoint.corrupt",
            "{file} is truncated or corrupt ({reason}). Delete {target}, then copy or download it again.",
            file=str(file),
            reason=str(error),
            target=str(file.resolve()),
        ) from None


def check_tensors(stored: Mapping[str, StoredTensor], shapes: Mapping[str, tuple[int, ...]], folder: Path) -> None:
    """Raise CheckpointError unless the stored tensors have exactly these names and shapes, and a float dtype."""
    common = [name for name in shapes if name in stored]
    mismatches = {
        "missing": [name for name in shapes if name not in stored],
        "unexpected": [tensor.key for name, tensor in stored.items() if name not in shapes],
        "wrong shape": [
            f"{name} must be {shapes[name]}, got {stored[name].shape}"
            for name in common
            if stored[name].shape != shapes[name]
        ],
        "wrong dtype": [
            f"{name} must be {', '.join(STORED_DTYPES)}, got {stored[name].dtype}"
            for name in common
            if stored[name].dtype not in STORED_DTYPES
        ],
    }
    found = [f"{kind} ({len(names)}): {format_names(names)}" for kind, names in mismatches.items() if names]
    if found:
        raise CheckpointError(
            "checkpoint.mismatch",
            "The weights in {folder} do not match its config.json. {mismatches}.",
            folder=str(folder),
            mismatches="; ".join(found),
        )


def split_head(stored: Mapping[str, StoredTensor]) -> tuple[dict[str, StoredTensor], StoredTensor | None]:
    """Separate a stored `lm_head`, which is tied to the embedding, from the other tensors.

    Returns:
        The tensors with the embedding and without the head, and the head if the file has both. A head without an
        embedding becomes the embedding.
    """
    tensors = dict(stored)
    head = tensors.pop(HEAD, None)
    if head is not None and EMBEDDING not in tensors:
        tensors[EMBEDDING], head = head, None
    return tensors, head


def check_head(head: StoredTensor, embedding: StoredTensor) -> None:
    """Raise CheckpointError unless a stored head equals the embedding."""
    if not _are_equal(head, embedding):
        raise CheckpointError(
            "checkpoint.untied_head",
            "{head} in {file} differs from {embedding}, but PaliGemma ties the two. Export the model again with "
            "tie_word_embeddings=True.",
            head=head.key,
            file=str(head.file),
            embedding=embedding.key,
        )


def _are_equal(first: StoredTensor, second: StoredTensor) -> bool:
    """Compare two stored matrices block by block, in the narrower of their dtypes."""
    if first.shape != second.shape or not {first.dtype, second.dtype} <= STORED_DTYPES.keys():
        return False
    dtype = min((STORED_DTYPES[tensor.dtype] for tensor in (first, second)), key=lambda dtype: dtype.itemsize)
    with (
        safe_open(first.file, framework="pt") as first_file,
        safe_open(second.file, framework="pt") as second_file,
    ):
        first_rows, second_rows = first_file.get_slice(first.key), second_file.get_slice(second.key)
        for start in range(0, first.shape[0], ROWS_PER_BLOCK):
            block = slice(start, min(start + ROWS_PER_BLOCK, first.shape[0]))
            if not torch.equal(first_rows[block].to(dtype), second_rows[block].to(dtype)):
                return False
    return True


def main_dtype(tensors: Iterable[StoredTensor]) -> torch.dtype:
    """Return the dtype of the majority of weights."""
    elements: Counter[torch.dtype] = Counter()
    for tensor in tensors:
        elements[STORED_DTYPES[tensor.dtype]] += tensor.num_elements
    return elements.most_common(1)[0][0]
