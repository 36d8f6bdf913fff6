"""Checkpoints: find one, check that it fits its configuration, load it without a second copy, save one.

A checkpoint is a folder in the hub's layout: config.json, `model.safetensors` or shards with an index, tokenizer.json.
Only headers are read until names and shapes are known to fit. Only safetensors are read: PyTorch's .bin and .pt files
are pickles, which run code when opened.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import re
import shutil
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.overrides import TorchFunctionMode

from paligemma.checkpoint import hub, memory
from paligemma.checkpoint.hub import CONFIG_FILE, CheckpointError, Progress, format_gigabytes
from paligemma.config import PaliGemmaConfig
from paligemma.kernels.int8 import Int8Preparation, QuantizedStore, checked_quantization
from paligemma.kernels.linear import (
    ExactPreparation,
    PreparedLinear,
    can_pack,
    decoder_maps,
    multiplies_fast,
    put_in_place,
    widen,
)
from paligemma.modeling import PaliGemmaForConditionalGeneration
from paligemma.paths import BUNDLED_MODEL

BUNDLED_FOLDER = BUNDLED_MODEL
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
TOKENIZER_FILE = "tokenizer.json"
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
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
STORED_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
REVISION_OF_DTYPE = {torch.bfloat16: "bfloat16", torch.float16: "float16"}  # branches of Google's PaliGemma 1 repos

EMBEDDING = "language_model.model.embed_tokens.weight"
HEAD = "language_model.lm_head.weight"
# The beginnings of names in files, and what they are called here, which is what the hub's own files call them. The
# first that fits counts.
RENAMES = (
    # transformers 4.52 and later; for the vision tower also transformers 5 with save_original_format=False
    ("model.language_model.", "language_model.model."),
    ("model.vision_tower.vision_model.", "vision_tower.vision_model."),
    ("model.vision_tower.", "vision_tower.vision_model."),
    ("model.multi_modal_projector.", "multi_modal_projector."),
    ("lm_head.", "language_model.lm_head."),
    # the hub, and transformers 5, whose tower is flat
    ("vision_tower.vision_model.", "vision_tower.vision_model."),
    ("vision_tower.", "vision_tower.vision_model."),
)
# Constants that old versions stored among the weights; the model computes them.
LEGACY_BUFFERS = (".embeddings.position_ids", ".rotary_emb.inv_freq")

# Weights that are not read here, by a file that gives them away, and where to get others. The first that fits counts.
FOREIGN_WEIGHTS = {
    "adapter_config.json": "holds only a PEFT adapter, a change to another model; merge it into that one with peft "
    "(merge_and_unload, then save_pretrained), and give the merged folder",
    "*.gguf": "has its weights as GGUF, which is llama.cpp's; take the checkpoint that they were made from, such as "
    "google/paligemma2-3b-mix-224",
    "*.npz": "has its weights as .npz, which is big_vision's; take the repository of the same name without -jax",
    **dict.fromkeys(
        ("*.bin", "*.pt", "*.pth", "*.ckpt"),
        "has weights only as {file}, a pickle, which could run any code and is never opened; save the model again with "
        "transformers (save_pretrained writes safetensors), or take another revision",
    ),
}

NOT_BUNDLED = "no model is bundled in {folder} yet; name a folder, or a hub id such as google/paligemma2-3b-mix-224"
PARTS = (
    f"a checkpoint holds {CONFIG_FILE}, {SINGLE_FILE} (or shards with {INDEX_FILE}) and {TOKENIZER_FILE}, so copy or "
    "download it again"
)
NOT_A_FOLDER = "{folder} is not a folder; give the folder that holds config.json"
LISTED_NAMES = 8  # tensors named in a message; the rest is counted
COMPARED_ROWS = 8192  # rows of head and embedding held at once while they are compared

log = logging.getLogger("paligemma.checkpoint")


# Devices and types ------------------------------------------------------------------------------------------------


def resolve_device(device: str | torch.device = "auto") -> torch.device:
    """The device to compute on; "auto": CUDA, else MPS, else the CPU. Raises ValueError for one that is not there."""
    if device == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        resolved = torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(f"device {device!r} is unknown; allowed: auto, cpu, cuda, cuda:N, mps") from None
    try:
        torch.empty(0, device=resolved)
    except Exception:  # each backend says in its own way that it is not built in, or that there is no such device
        raise ValueError(f"device {str(device)!r} is not available on this machine; use auto or cpu") from None
    return resolved


def resolve_dtype(dtype: str | torch.dtype = "auto") -> torch.dtype | None:
    """The type of that name; None for "auto", which depends on the checkpoint. Raises ValueError for others."""
    if dtype == "auto":
        return None
    if dtype in DTYPES.values():
        return dtype
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is not supported; allowed: auto, {', '.join(DTYPES)}")
    return DTYPES[dtype]


def is_fast_in_bfloat16(device: torch.device) -> bool:
    """Whether the device multiplies bfloat16 matrices natively (on a CPU: AVX-512 BF16 or AMX)."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type == "mps":
        return True
    # An older PyTorch cannot tell; float32 is right everywhere.
    capabilities = getattr(torch.cpu, "get_capabilities", dict)()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))


# Finding ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CheckpointSource:
    """A checkpoint's folder on this machine.

    Attributes:
        folder: holds config.json, weights and tokenizer.json.
        origin: "bundled", "folder" or "hub".
        name: the hub id, or the folder as it was given.
        revision: the hub's branch, tag or commit; None elsewhere.
        dtype: what to give to `load_model`: a type, or "auto" to keep the stored one.
    """

    folder: Path
    origin: str
    name: str
    revision: str | None = None
    dtype: str | torch.dtype = "auto"


def find(
    source: str | Path | None = None,
    revision: str | None = None,
    token: str | None = None,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "auto",
    progress: Progress | None = None,
) -> CheckpointSource:
    """Find a checkpoint, downloading it where `source` is a hub id; what is in the hub's cache is used again.

    Args:
        source: None for the bundled demo, or its folder; another folder; or a hub id such as
            "google/paligemma2-3b-mix-224".
        revision: branch, tag or commit, only with a hub id. None: the branch stored in the wanted type where the
            repository has one, else main.
        token: of the hub; None: the one that `hf auth login` stored, or HF_TOKEN.
        device, dtype: what the model will be loaded with. "auto" for a hub id: bfloat16 where the device is fast in
            it, else float32; otherwise the stored type.
        progress: called with ("downloading", bytes done, bytes in all).

    Raises:
        CheckpointError: says what to do. ValueError: for a device or type that is not there.
    """
    wanted = resolve_dtype(dtype)
    if source is None:
        if revision is not None:
            raise CheckpointError(f"revision {revision!r} belongs to a hub id, and the bundled demo has no revisions")
        return CheckpointSource(_checked(BUNDLED_FOLDER, NOT_BUNDLED), "bundled", "bundled demo", dtype=dtype)
    folder = resolve_local_path(source)
    if folder.exists():
        if revision is not None:
            raise CheckpointError(f"revision {revision!r} belongs to a hub id, and {source} is on this machine")
        return CheckpointSource(
            _checked(folder), "bundled" if is_bundled(folder) else "folder", str(source), dtype=dtype
        )
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", str(source)):
        raise CheckpointError(
            f"{source} is neither a folder on this machine nor a hub id like google/paligemma2-3b-mix-224"
        )
    return _find_on_hub(str(source), revision, token, resolve_device(device), wanted, progress)


def _find_on_hub(
    repo: str,
    revision: str | None,
    token: str | None,
    device: torch.device,
    wanted: torch.dtype | None,
    progress: Progress | None,
) -> CheckpointSource:
    if wanted is None:
        wanted = torch.bfloat16 if is_fast_in_bfloat16(device) else torch.float32
    # Most repositories have main only.
    branches = [REVISION_OF_DTYPE[wanted]] if revision is None and wanted in REVISION_OF_DTYPE else []
    revisions = [*branches, revision or "main"]
    checks = hub.Checks(
        names=lambda names: require_files(names, repo),
        config=lambda folder: _check_config(folder, repo, device, wanted),
    )
    folder, revision = hub.download(repo, revisions, token, DOWNLOADED_FILES, checks, progress)
    return CheckpointSource(_checked(folder), "hub", repo, revision, wanted)


def is_bundled(folder: Path) -> bool:
    """Whether this is the bundled model's folder, by whatever name."""
    return folder.exists() and BUNDLED_FOLDER.exists() and folder.samefile(BUNDLED_FOLDER)


def resolve_local_path(source: str | Path) -> Path:
    """Where `source` would lie on this machine, "~" resolved. Raises CheckpointError for what can be no path."""
    try:
        folder = Path(source).expanduser()
        folder.exists()  # raises OSError for a name that is too long
    except (TypeError, RuntimeError, OSError) as error:
        reason = f"{type(error).__name__}: {error}"[:200]
        raise CheckpointError(f"{str(source)[:80]!r} is no folder and no hub id ({reason})") from None
    return folder


def _checked(folder: Path, if_absent: str = NOT_A_FOLDER) -> Path:
    """The folder, where it holds the files that a checkpoint needs."""
    with _disk_errors_in_words(folder):
        if not folder.is_dir():
            raise CheckpointError(if_absent.format(folder=folder))
        require_files([path.name for path in folder.iterdir() if path.is_file()], str(folder))
        for file in weight_files(folder):
            _require_shard(file)
    return folder


def _check_config(folder: Path, name: str, device: torch.device, dtype: torch.dtype) -> None:
    """Raise CheckpointError, before a download, for what cannot be computed or would never fit into memory."""
    config = read_config(folder, name)
    machine, needed = memory.available_memory(device), config.approximate_parameters * dtype.itemsize
    stays_in_file = device.type == "cpu" and config.dtype == _name_of(dtype)
    if machine and needed > machine.total and not stays_in_file:
        _require_memory(needed, device, dtype, name, config.dtype)


@contextmanager
def _disk_errors_in_words(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{folder} cannot be read ({error}); let this user read it, or copy it to another disk"
        ) from None


def require_files(names: Collection[str], place: str) -> None:
    """Raise CheckpointError, with what to do, unless a place with files of these names may hold a checkpoint."""
    if not {SINGLE_FILE, INDEX_FILE} & set(names):
        raise _without_weights(names, place)
    if CONFIG_FILE not in names:
        raise CheckpointError(f"{place} has no {CONFIG_FILE}; {PARTS}")
    if TOKENIZER_FILE not in names:
        has_old = "tokenizer.model" in names
        reason = "only tokenizer.model, which is not read here" if has_old else "no tokenizer at all"
        raise CheckpointError(
            f"{place} has no {TOKENIZER_FILE} ({reason}); take that file from the same model on the hub, or write it "
            "with transformers: AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
        )


def _without_weights(names: Collection[str], place: str) -> CheckpointError:
    for pattern, reason in FOREIGN_WEIGHTS.items():
        file = next((name for name in sorted(names) if fnmatch(name, pattern)), None)
        if file:
            return CheckpointError(f"{place} {reason.format(file=file)}")
    return CheckpointError(f"{place} has neither {SINGLE_FILE} nor {INDEX_FILE}; {PARTS}")


# Reading headers --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file, known from the file's header.

    Attributes:
        key: its name there.
        dtype: safetensors' short name, such as "BF16".
    """

    key: str
    file: Path
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * STORED_DTYPES[self.dtype].itemsize


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that hold the model: the single one, or the index's shards. Others do not count."""
    if (folder / SINGLE_FILE).exists():
        return [folder / SINGLE_FILE]
    index = folder / INDEX_FILE
    if index.exists():
        return _files_of_index(index)
    raise _without_weights([path.name for path in folder.iterdir()], str(folder))


def _files_of_index(index: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CheckpointError(f"{index} has no readable weight_map; copy or download it again") from None
    if not names or not all(map(_is_plain_name, names)):
        raise CheckpointError(f"{index} must name .safetensors files that lie beside it; it names {_listed(names)}")
    return [index.parent / name for name in names]


def _is_plain_name(name: Any) -> bool:
    """Whether this is a weight file's bare name; any other could lead out of the folder."""
    return isinstance(name, str) and Path(name).name == name and name.endswith(".safetensors")


def _require_shard(file: Path) -> None:
    if not file.is_file():
        raise CheckpointError(f"{file.name} is missing in {file.parent}; copy or download it again")


def read_headers(files: Iterable[Path]) -> dict[str, StoredTensor]:
    """Every tensor of the files by our name for it, without the legacy buffers; no tensor is read."""
    stored: dict[str, StoredTensor] = {}
    for file in files:
        for tensor in _read_header(file):
            if tensor.key.endswith(LEGACY_BUFFERS):
                continue
            name = our_name(tensor.key)
            if name in stored:
                first = stored[name]
                raise CheckpointError(
                    f"{first.key} in {first.file.name} and {tensor.key} in {file.name} are one tensor, given twice"
                )
            stored[name] = tensor
    return stored


def _read_header(file: Path) -> list[StoredTensor]:
    _require_shard(file)
    try:
        with safe_open(file, framework="pt") as opened:
            slices = {key: opened.get_slice(key) for key in opened.offset_keys()}
            return [StoredTensor(key, file, tuple(s.get_shape()), s.get_dtype()) for key, s in slices.items()]
    except SafetensorError as error:
        raise CheckpointError(
            f"{file} is cut short or damaged ({error}); delete {file.resolve()} and copy or download it again"
        ) from None


def our_name(key: str) -> str:
    """The parameter that a tensor of any of the four layouts is; an unknown name stays as it is."""
    for old, new in RENAMES:
        if key.startswith(old):
            return new + key.removeprefix(old)
    return key


# Checking ---------------------------------------------------------------------------------------------------------


def check_fit(stored: Mapping[str, StoredTensor], shapes: Mapping[str, tuple[int, ...]], folder: Path) -> None:
    """Raise CheckpointError unless the stored tensors are exactly those of `shapes`, in a type that can be loaded."""
    common = [name for name in shapes if name in stored]
    faults = {
        "missing": [name for name in shapes if name not in stored],
        "unexpected": [tensor.key for name, tensor in stored.items() if name not in shapes],
        "wrong shape": [
            f"{name} is {stored[name].shape}, the configuration needs {shapes[name]}"
            for name in common
            if stored[name].shape != shapes[name]
        ],
        "wrong type": [
            f"{name} is {stored[name].dtype}, not one of {', '.join(STORED_DTYPES)}"
            for name in common
            if stored[name].dtype not in STORED_DTYPES
        ],
    }
    lines = [f"{fault} ({len(found)}): {_listed(found)}" for fault, found in faults.items() if found]
    if lines:
        raise CheckpointError(
            f"the weights in {folder} are not those that its config.json describes; take both from the same model:\n"
            + "\n".join(lines)
        )


def _listed(names: list[Any]) -> str:
    more = f", and {len(names) - LISTED_NAMES} more" if len(names) > LISTED_NAMES else ""
    return ", ".join(str(name)[:200] for name in names[:LISTED_NAMES]) + more


def split_head(stored: Mapping[str, StoredTensor]) -> tuple[dict[str, StoredTensor], StoredTensor | None]:
    """The tensors without the tied head, and the head where it was stored beside the embedding.

    The hub's files have no head; a head that stands alone becomes the embedding.
    """
    tensors = dict(stored)
    head = tensors.pop(HEAD, None)
    if head is not None and EMBEDDING not in tensors:
        tensors[EMBEDDING], head = head, None
    return tensors, head


def check_head(head: StoredTensor, embedding: StoredTensor) -> None:
    """Raise CheckpointError unless a stored head repeats the embedding, which the model uses for both."""
    if not _are_equal(head, embedding):
        raise CheckpointError(
            f"{head.key} in {head.file} differs from {embedding.key}; PaliGemma's head and embedding are one tensor. "
            "An untied model is not a PaliGemma; export it again with tie_word_embeddings true"
        )


def _are_equal(first: StoredTensor, second: StoredTensor) -> bool:
    """Whether two stored matrices hold the same values, some rows at a time; where types differ, in the narrower."""
    if first.shape != second.shape or not {first.dtype, second.dtype} <= STORED_DTYPES.keys():
        return False
    dtype = min((STORED_DTYPES[tensor.dtype] for tensor in (first, second)), key=lambda dtype: dtype.itemsize)
    with (
        safe_open(first.file, framework="pt") as first_file,
        safe_open(second.file, framework="pt") as second_file,
    ):
        first_rows, second_rows = first_file.get_slice(first.key), second_file.get_slice(second.key)
        for start in range(0, first.shape[0], COMPARED_ROWS):
            rows = slice(start, min(start + COMPARED_ROWS, first.shape[0]))
            if not torch.equal(first_rows[rows].to(dtype), second_rows[rows].to(dtype)):
                return False
    return True


# Loading and saving -----------------------------------------------------------------------------------------------


def load_model(
    folder: str | Path,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "auto",
    progress: Progress | None = None,
    trainable: bool = False,
) -> PaliGemmaForConditionalGeneration:
    """Load a checkpoint's model, ready to answer (`eval()`).

    On the CPU and in the stored type the weights stay in the file's pages, which the system reads when they are first
    used and may drop again; the file is never written to. Otherwise each tensor is read, converted and moved alone,
    so that no more than the model and one tensor are held.

    Args:
        folder: holds config.json and the weights, in any of the four layouts.
        device: "auto" (CUDA, else MPS, else CPU) or a device.
        dtype: "auto" keeps the stored type (that of most weights, where a file mixes them), or float32, bfloat16,
            float16.
        progress: called with ("loading", bytes done, bytes in all) after each tensor.
        trainable: whether parameters require gradients.

    Raises:
        CheckpointError: for files that are missing, damaged, or not what config.json describes, and where memory is
            too small; before any weight takes some. ValueError: for a device or type that is not there.
    """
    model, tensors, device, dtype = _open(Path(folder), device, dtype)
    _fill(model, tensors, device, dtype, _Counter(progress, tensors.values()))
    return model.requires_grad_(trainable).eval()


def load_for_inference(
    folder: str | Path,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "auto",
    quantize: str | None = None,
    progress: Progress | None = None,
) -> tuple[PaliGemmaForConditionalGeneration, str]:
    """Load a checkpoint's model to answer with and nothing else, as fast as this machine can.

    Where a faster kernel than the plain product is known, the decoder's linear maps and the head become
    `PreparedLinear`s, a layer at a time, each read from the file for itself alone, so that no more than the prepared
    weights and one layer are held. Such a model cannot be trained, moved or saved.

    Args:
        quantize: None: computes with the loaded values. "int8": with int8 weights in the decoder and the head.
        folder, device, dtype, progress: see `load_model`; so are the errors.

    Returns:
        The model, and what computes, such as "bfloat16 (packed for oneDNN)".
    """
    folder = Path(folder)
    model, tensors, device, dtype = _open(folder, device, dtype)
    groups = decoder_maps(model.config.text_config.num_hidden_layers)
    sources = {
        part: tensors[_weight_name(part)] for maps in groups.values() for parts in maps.values() for part in parts
    }
    preparation = _preparation(quantize, list(sources.values()), folder, device, dtype)
    if preparation is None:
        _fill(model, tensors, device, dtype, _Counter(progress, tensors.values()))
        return _finished(model, device, dtype, _name_of(dtype), "picture and prompt")
    counter = _Counter(progress, [*tensors.values(), tensors[EMBEDDING]])  # which is read as the head, too
    _fill(model, tensors, device, dtype, counter, left_out={*map(_weight_name, sources)} - {EMBEDDING})
    model.activation_dtype = preparation.activation_dtype
    for group, maps in groups.items():
        weights = {name: partial(_read_joined, [sources[part] for part in parts]) for name, parts in maps.items()}
        with _disk_errors_in_words(folder):
            prepared = preparation.make(group, weights)
        for name, linear in prepared.items():
            put_in_place(model.language_model, name, linear, maps[name])
            counter.add(*(sources[part] for part in maps[name]))
    return _finished(model, device, dtype, preparation.backend, "picture")


def _finished(
    model: PaliGemmaForConditionalGeneration, device: torch.device, dtype: torch.dtype, backend: str, plain: str
) -> tuple[PaliGemmaForConditionalGeneration, str]:
    """The model, and what computes; `plain` names what still goes through plain linear maps."""
    if not multiplies_fast(device, dtype):
        widen(model)
        backend = f"{backend}, {plain} in float32"
    return model.requires_grad_(False).eval(), backend


def _preparation(
    quantize: str | None, weights: Collection[StoredTensor], folder: Path, device: torch.device, dtype: torch.dtype
) -> ExactPreparation | Int8Preparation | None:
    """What prepares the weights; None where the model computes with them as they are."""
    numbers = [prod(weight.shape) for weight in weights]
    needed = sum(numbers) + max(numbers)  # of which one is there twice while it is prepared
    if checked_quantization(quantize):
        _require_memory(needed, device, torch.int8, str(folder), None)
        return Int8Preparation(QuantizedStore.of_files(weight_files(folder)), device)
    if not can_pack(device, dtype):
        return None
    machine = memory.available_memory(device)
    if machine is not None and needed * dtype.itemsize > machine.available:
        log.warning("the weights of %s are used as they are: to pack them, too little memory is free", folder)
        return None
    return ExactPreparation()


def _weight_name(linear: str) -> str:
    """The stored tensor of one of the language model's linear maps."""
    return EMBEDDING if linear == "lm_head" else f"language_model.{linear}.weight"


def _open(
    folder: Path, device: str | torch.device, dtype: str | torch.dtype
) -> tuple[PaliGemmaForConditionalGeneration, dict[str, StoredTensor], torch.device, torch.dtype]:
    """The empty model, its tensors in the files, checked to fit, and where and in what type to load them."""
    device, wanted = resolve_device(device), resolve_dtype(dtype)
    model = build_empty_model(read_config(folder))
    with _disk_errors_in_words(folder):
        tensors, head = split_head(read_headers(weight_files(folder)))
        check_fit(tensors, {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}, folder)
        if head is not None:
            check_head(head, tensors[EMBEDDING])
    return model, tensors, device, wanted or main_dtype(tensors.values())


def _fill(
    model: PaliGemmaForConditionalGeneration,
    tensors: Mapping[str, StoredTensor],
    device: torch.device,
    dtype: torch.dtype,
    counter: _Counter,
    left_out: Collection[str] = (),
) -> None:
    """Give the empty model its weights; those left out stay empty."""
    kept = {name: tensor for name, tensor in tensors.items() if name not in left_out}
    folder = tensors[EMBEDDING].file.parent
    check_memory(kept.values(), device, dtype, folder)
    with _disk_errors_in_words(folder):
        state = _read_tensors(kept, device, dtype, counter)
    empty = {name: torch.empty(tensors[name].shape, device="meta") for name in left_out}
    model.load_state_dict({**state, **empty, HEAD: state[EMBEDDING]}, strict=True, assign=True)
    model.tie_weights()


def read_config(folder: Path, name: str | None = None) -> PaliGemmaConfig:
    """The folder's configuration. Raises CheckpointError where it is absent or not one that this model computes.

    The message calls the checkpoint by its `name`, where it has another one than the folder's.
    """
    if not (folder / CONFIG_FILE).is_file():
        raise CheckpointError(f"{folder} has no {CONFIG_FILE}; {PARTS}")
    try:
        return PaliGemmaConfig.from_folder(folder)
    except (ValueError, OSError, RecursionError) as error:
        raise CheckpointError(f"{name or folder} cannot be used: {error}") from None


def build_empty_model(config: PaliGemmaConfig) -> PaliGemmaForConditionalGeneration:
    """The model with its names and shapes, on the meta device: no weight takes memory."""
    with torch.device("meta"), _WithoutRandomStart():
        return PaliGemmaForConditionalGeneration(config)


class _WithoutRandomStart(TorchFunctionMode):
    """Leaves new weights as they are. On the meta device a random start means nothing, and PyTorch loads its whole
    compiler for it, some seconds and 70 MB."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if getattr(func, "__module__", None) == torch.nn.init.__name__:
            return None
        return func(*args, **(kwargs or {}))


def main_dtype(tensors: Iterable[StoredTensor]) -> torch.dtype:
    """The type in which most of the weights are stored."""
    elements: Counter[torch.dtype] = Counter()
    for tensor in tensors:
        elements[STORED_DTYPES[tensor.dtype]] += prod(tensor.shape)
    return elements.most_common(1)[0][0]


def check_memory(tensors: Collection[StoredTensor], device: torch.device, dtype: torch.dtype, folder: Path) -> None:
    """Raise CheckpointError, with numbers, unless there is room for the weights that have to be copied.

    Those that stay in their file take no memory of their own: the system reads them when they are used, and again
    where it had to drop them. Where all memory is too small to keep them, that is slow, and logged.
    """
    machine = memory.available_memory(device)
    if machine is None:
        return
    copied = [tensor for tensor in tensors if not _stays_in_file(tensor, device, dtype)]
    # While one is converted, it is there twice.
    needed = sum(prod(tensor.shape) * dtype.itemsize for tensor in copied)
    needed += max((tensor.num_bytes for tensor in copied), default=0)
    _require_memory(needed, device, dtype, str(folder), _name_of(main_dtype(tensors)))
    total = needed + sum(tensor.num_bytes for tensor in tensors) - sum(tensor.num_bytes for tensor in copied)
    if total > machine.total:
        log.warning(
            "the weights in %s take %s, more than the memory of this machine, %s; they will be read from the disk "
            "again and again, so every token takes long",
            *(folder, format_gigabytes(total), format_gigabytes(machine.total)),
        )


def _require_memory(needed: int, device: torch.device, dtype: torch.dtype, place: str, stored: str | None) -> None:
    """Raise CheckpointError unless so many bytes are free; `stored` is the type that would need none of its own."""
    machine = memory.available_memory(device)
    if machine is None or needed <= machine.available:
        return
    advice = "close other programs, or take a smaller model"
    if device.type != "cpu":
        advice = f"take the device cpu, {advice}"
    elif stored in DTYPES and stored != _name_of(dtype):
        advice = f"ask for the type that it is stored in, {stored}, which stays in the file; else {advice}"
    raise CheckpointError(
        f"the weights of {place} need {format_gigabytes(needed)} of memory as {_name_of(dtype)} on {device}, and "
        f"{format_gigabytes(machine.available)} of {format_gigabytes(machine.total)} are free; {advice}"
    )


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _stays_in_file(tensor: StoredTensor, device: torch.device, dtype: torch.dtype) -> bool:
    return device.type == "cpu" and STORED_DTYPES[tensor.dtype] == dtype


class _Counter:
    """Tells `progress` how many bytes of all have been read."""

    def __init__(self, progress: Progress | None, tensors: Iterable[StoredTensor]) -> None:
        self._progress = progress
        self._total = sum(tensor.num_bytes for tensor in tensors)
        self._done = 0

    def add(self, *tensors: StoredTensor) -> None:
        self._done += sum(tensor.num_bytes for tensor in tensors)
        if self._progress is not None:
            self._progress("loading", self._done, self._total)


def _read_tensors(
    tensors: Mapping[str, StoredTensor], device: torch.device, dtype: torch.dtype, counter: _Counter
) -> dict[str, Tensor]:
    state: dict[str, Tensor] = {}
    for file in dict.fromkeys(tensor.file for tensor in tensors.values()):
        with safe_open(file, framework="pt") as opened:
            for name, tensor in tensors.items():
                if tensor.file != file:
                    continue
                stays = _stays_in_file(tensor, device, dtype)
                read = opened.get_tensor(tensor.key) if stays else _read_alone(tensor)
                state[name] = read.to(device=device, dtype=dtype)
                counter.add(tensor)
    return state


def _read_alone(tensor: StoredTensor) -> Tensor:
    """The tensor, for which alone the file is mapped, so that its pages leave memory with it."""
    with safe_open(tensor.file, framework="pt") as opened:
        return opened.get_tensor(tensor.key)


def _read_joined(tensors: Sequence[StoredTensor]) -> Tensor:
    """Matrices with equally long rows as one, one below the other."""
    parts = [_read_alone(tensor) for tensor in tensors]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def save(model: PaliGemmaForConditionalGeneration, folder: str | Path, dtype: str | torch.dtype | None = None) -> None:
    """Write config.json and model.safetensors in the hub's layout, which transformers reads too.

    Args:
        folder: made where it does not exist. It may be the one that the model was loaded from; on Windows not.
        dtype: of the stored weights; None: the model's.

    Raises:
        CheckpointError: where the files cannot be written. What was there before is still there then.
    """
    if any(isinstance(module, PreparedLinear) for module in model.modules()):
        raise ValueError("this model was prepared for answering and holds no weights to save; take `load_model`'s")
    folder = Path(folder)
    stored_dtype = (resolve_dtype(dtype) if dtype is not None else None) or model.dtype
    config = dataclasses.replace(model.config, dtype=_name_of(stored_dtype))
    # named_parameters gives the tied head and embedding once, under the embedding's name.
    weights = {
        name: parameter.detach().to("cpu", stored_dtype).contiguous() for name, parameter in model.named_parameters()
    }
    # A loaded model's weights may lie in the very file, so it is replaced as a whole and never written into.
    new_weights, new_config = (folder / f"{name}.unfinished" for name in (SINGLE_FILE, CONFIG_FILE))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        new_config.write_text(json.dumps(config.to_dict(), indent=2) + "\n", encoding="utf-8")
        save_file(weights, new_weights, metadata={"format": "pt"})
        shutil.copymode(new_config, new_weights)  # safetensors makes files that only their owner can read
        os.replace(new_weights, folder / SINGLE_FILE)
        os.replace(new_config, folder / CONFIG_FILE)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{folder} cannot be written ({error}); take a folder that this user may write to, on a disk with room, "
            "and on Windows not the one that a loaded model's weights lie in"
        ) from None
    finally:
        for file in (new_weights, new_config):
            with suppress(OSError):
                file.unlink()
