"""Checkpoints: find one, check that it fits its configuration, load it without a second copy, save one.

A checkpoint is a folder in the hub's layout: config.json, `model.safetensors` or shards with an index, tokenizer.json.
Only headers are read until names and shapes are known to fit. Only safetensors are read: PyTorch's .bin and .pt files
are pickles, which run code when opened.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
from huggingface_hub import errors as hub_errors
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.overrides import TorchFunctionMode

from paligemma.config import PaliGemmaConfig
from paligemma.modeling import PaliGemmaForConditionalGeneration

BUNDLED_FOLDER = Path(__file__).resolve().parent.parent / "assets" / "demo"
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
DOWNLOADED_FILES = (
    "config.json",
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "tokenizer.json",
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

NOT_BUNDLED = "no model is bundled in {folder} yet; name a folder, or a hub id such as google/paligemma2-3b-mix-224"
NOT_A_FOLDER = "{folder} is not a folder; give the folder that holds config.json"
LISTED_NAMES = 8  # tensors named in a message; the rest is counted
COMPARED_ROWS = 8192  # rows of head and embedding held at once while they are compared

Progress = Callable[[int, int], None]


class CheckpointError(ValueError):
    """A checkpoint that cannot be had or used. The message says why and what to do; it never holds a token."""


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
class Found:
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
) -> Found:
    """Find a checkpoint, downloading it where `source` is a hub id; what is in the hub's cache is used again.

    Args:
        source: None for the bundled demo; a folder; or a hub id such as "google/paligemma2-3b-mix-224".
        revision: branch, tag or commit, only with a hub id. None: the branch stored in the wanted type where the
            repository has one, else main.
        token: of the hub; None: the one that `hf auth login` stored, or HF_TOKEN.
        device, dtype: what the model will be loaded with. "auto" for a hub id: bfloat16 where the device is fast in
            it, else float32; otherwise the stored type.

    Raises:
        CheckpointError: says what to do. ValueError: for a device or type that is not there.
    """
    wanted = resolve_dtype(dtype)
    if source is None:
        if revision is not None:
            raise CheckpointError(f"revision {revision!r} belongs to a hub id, and the bundled demo has no revisions")
        return Found(_checked(BUNDLED_FOLDER, NOT_BUNDLED), "bundled", "bundled demo", dtype=dtype)
    folder = local_path(source)
    if folder.exists():
        if revision is not None:
            raise CheckpointError(f"revision {revision!r} belongs to a hub id, and {source} is on this machine")
        return Found(_checked(folder), "folder", str(source), dtype=dtype)
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", str(source)):
        raise CheckpointError(
            f"{source} is neither a folder on this machine nor a hub id like google/paligemma2-3b-mix-224"
        )
    if wanted is None:
        wanted = torch.bfloat16 if is_fast_in_bfloat16(resolve_device(device)) else torch.float32
    folder, revision = _download(str(source), revision, token, wanted)
    return Found(_checked(folder), "hub", str(source), revision, wanted)


def local_path(source: str | Path) -> Path:
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
    if not folder.is_dir():
        raise CheckpointError(if_absent.format(folder=folder))
    _require_config(folder)
    for file in weight_files(folder):
        _require_shard(file)
    if not (folder / "tokenizer.json").exists():
        has_old = (folder / "tokenizer.model").exists()
        reason = "only tokenizer.model, which is not read here" if has_old else "no tokenizer at all"
        raise CheckpointError(
            f"{folder} has no tokenizer.json ({reason}); take that file from the same model on the hub, or write it "
            "with transformers: AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
        )
    return folder


def _require_config(folder: Path) -> None:
    if not (folder / "config.json").is_file():
        raise CheckpointError(
            f"{folder} has no config.json; a checkpoint folder holds config.json, {SINGLE_FILE} (or shards with "
            f"{INDEX_FILE}) and tokenizer.json"
        )


# The hub ----------------------------------------------------------------------------------------------------------


def _download(repo: str, revision: str | None, token: str | None, wanted: torch.dtype) -> tuple[Path, str]:
    """The snapshot's folder and the revision that was taken."""
    token = (token or "").strip() or None
    branch = REVISION_OF_DTYPE.get(wanted) if revision is None else None
    revision = revision or "main"
    try:
        if branch is not None:
            try:
                return _snapshot(repo, branch, token), branch
            except (hub_errors.RevisionNotFoundError, hub_errors.LocalEntryNotFoundError):
                pass  # most repositories have main only, and offline main may be what the cache has
        return _snapshot(repo, revision, token), revision
    except CheckpointError:
        raise
    # The hub library raises many kinds, among them its HTTP client's own, which share no base but Exception.
    except Exception as error:
        raise CheckpointError(_redacted(_hub_message(error, repo, revision), token)) from None


def _snapshot(repo: str, revision: str, token: str | None) -> Path:
    options: dict[str, Any] = {"revision": revision, "token": token, "allow_patterns": list(DOWNLOADED_FILES)}
    try:
        files = huggingface_hub.snapshot_download(repo, dry_run=True, **options)
    except hub_errors.DryRunError:  # the hub is out of reach; the next call finds the cached files or says why not
        files = []
    _require_space(repo, sum(file.file_size or 0 for file in files if file.will_download))
    return Path(huggingface_hub.snapshot_download(repo, **options))


def _require_space(repo: str, needed: int) -> None:
    """The hub library only warns of a disk that is too small, and then fills it."""
    cache = Path(huggingface_hub.constants.HF_HUB_CACHE)
    existing = next(path for path in (cache, *cache.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if needed > free:
        raise CheckpointError(
            f"{repo} needs {_gigabytes(needed)} more on the disk of {cache}, which has {_gigabytes(free)} free; make "
            "room, or set HF_HOME to a folder on a larger disk"
        )


def _hub_message(error: Exception, repo: str, revision: str) -> str:
    """What to do about a hub error. The order matters: the kinds derive from one another."""
    page = f"https://huggingface.co/{repo}"
    if isinstance(error, hub_errors.GatedRepoError):
        if error.response.status_code == 401:
            return (
                f"{repo} is gated and no valid token was given; accept its licence at {page}, then run "
                "`hf auth login` or set HF_TOKEN"
            )
        return (
            f"{repo} is gated and this token has no access to it; accept the licence at {page} with the token's "
            "account, and let a fine-grained token read gated repositories"
        )
    if isinstance(error, hub_errors.RepositoryNotFoundError):
        return (
            f"there is no folder {repo} here, and on the hub no such model, or a private one; check the spelling, "
            "or give a token that may read it"
        )
    if isinstance(error, hub_errors.RevisionNotFoundError):
        return f"{repo} has no revision {revision!r}; its branches are listed at {page}/tree/main"
    if isinstance(error, hub_errors.IncompleteSnapshotError):
        return (
            f"the download of {repo} ({revision}) was not finished and the hub cannot be reached; connect and start "
            "again, it goes on where it stopped"
        )
    if isinstance(error, (hub_errors.LocalEntryNotFoundError, hub_errors.OfflineModeIsEnabled)):
        return (
            f"{repo} ({revision}) is not in the cache and the hub cannot be reached; check the connection, unset "
            "HF_HUB_OFFLINE, or give a folder"
        )
    if isinstance(error, hub_errors.HfHubHTTPError) and error.response.status_code in (401, 403):
        return f"the hub refuses the token for {repo}; make a new one at https://huggingface.co/settings/tokens"
    return f"downloading {repo} failed: {type(error).__name__}: {error}; start again, it goes on where it stopped"


def _redacted(text: str, token: str | None) -> str:
    """The text without anything that looks like a token of the hub."""
    if token:
        text = text.replace(token, "[token]")
    return re.sub(r"hf_[A-Za-z0-9]{10,}", "[token]", text)


def _gigabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB"


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
    pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
    if pickles:
        raise CheckpointError(
            f"{folder} has weights only as {pickles[0]}, a pickle, which could run any code and is never opened; "
            "save the model again with transformers (save_pretrained writes safetensors), or take another revision"
        )
    raise CheckpointError(f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}; copy or download the weights again")


def _files_of_index(index: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CheckpointError(f"{index} has no readable weight_map; copy or download it again") from None
    # A name that is no plain file's is refused: it could lead out of the folder.
    if not names or not all(isinstance(name, str) and Path(name).name == name not in ("", "..") for name in names):
        raise CheckpointError(f"{index} must name files that lie beside it; it names {names}")
    return [index.parent / name for name in names]


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
            f"{file} is cut short or damaged ({error}); delete it and copy or download it again"
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


def _listed(names: list[str]) -> str:
    more = f", and {len(names) - LISTED_NAMES} more" if len(names) > LISTED_NAMES else ""
    return ", ".join(names[:LISTED_NAMES]) + more


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
        progress: called with (bytes done, bytes in all) after each tensor.
        trainable: whether parameters require gradients.

    Raises:
        CheckpointError: for files that are missing, damaged, or not what config.json describes; before any weight
            takes memory. ValueError: for a device or type that is not there.
    """
    folder = Path(folder)
    device, wanted = resolve_device(device), resolve_dtype(dtype)
    model = empty_model(read_config(folder))
    tensors, head = split_head(read_headers(weight_files(folder)))
    check_fit(tensors, {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}, folder)
    if head is not None:
        check_head(head, tensors[EMBEDDING])
    state = _read_tensors(tensors, device, wanted or main_dtype(tensors.values()), progress)
    model.load_state_dict({**state, HEAD: state[EMBEDDING]}, strict=True, assign=True)
    model.tie_weights()
    return model.requires_grad_(trainable).eval()


def read_config(folder: Path) -> PaliGemmaConfig:
    """The folder's configuration. Raises CheckpointError where it is absent or not one that this model computes."""
    _require_config(folder)
    try:
        return PaliGemmaConfig.from_folder(folder)
    except ValueError as error:
        raise CheckpointError(f"{folder} cannot be used: {error}") from None


def empty_model(config: PaliGemmaConfig) -> PaliGemmaForConditionalGeneration:
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


def _read_tensors(
    tensors: Mapping[str, StoredTensor], device: torch.device, dtype: torch.dtype, progress: Progress | None
) -> dict[str, Tensor]:
    total = sum(tensor.num_bytes for tensor in tensors.values())
    done = 0
    state: dict[str, Tensor] = {}
    for file in dict.fromkeys(tensor.file for tensor in tensors.values()):
        with safe_open(file, framework="pt") as opened:
            for name, tensor in tensors.items():
                if tensor.file != file:
                    continue
                adopted = device.type == "cpu" and STORED_DTYPES[tensor.dtype] == dtype
                state[name] = opened.get_tensor(tensor.key) if adopted else _converted(tensor, device, dtype)
                done += tensor.num_bytes
                if progress is not None:
                    progress(done, total)
    return state


def _converted(tensor: StoredTensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """The tensor in another type or place. The file is mapped for it alone, so that its pages leave memory with it."""
    with safe_open(tensor.file, framework="pt") as opened:
        return opened.get_tensor(tensor.key).to(device=device, dtype=dtype)


def save(model: PaliGemmaForConditionalGeneration, folder: str | Path, dtype: str | torch.dtype | None = None) -> None:
    """Write config.json and model.safetensors in the hub's layout, which transformers reads too.

    Args:
        folder: made where it does not exist. It may be the one that the model was loaded from.
        dtype: of the stored weights; None: the model's.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    stored_dtype = (resolve_dtype(dtype) if dtype is not None else None) or model.dtype
    # named_parameters gives the tied head and embedding once, under the embedding's name.
    weights = {
        name: parameter.detach().to("cpu", stored_dtype).contiguous() for name, parameter in model.named_parameters()
    }
    config = dataclasses.replace(model.config, dtype=str(stored_dtype).removeprefix("torch."))
    config_file = folder / "config.json"
    config_file.write_text(json.dumps(config.to_dict(), indent=2) + "\n", encoding="utf-8")
    # A loaded model's weights may lie in this very file, so it is replaced as a whole and never written into.
    unfinished = folder / f"{SINGLE_FILE}.unfinished"
    save_file(weights, unfinished, metadata={"format": "pt"})
    shutil.copymode(config_file, unfinished)  # safetensors makes files that only their owner can read
    os.replace(unfinished, folder / SINGLE_FILE)
