"""Find a checkpoint: the bundled model, a local folder, or a repository on the hub."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import torch

from paligemma.checkpoint import hub, memory
from paligemma.checkpoint.devices import dtype_name, is_fast_in_bfloat16, resolve_device, resolve_dtype
from paligemma.checkpoint.files import DOWNLOADED_FILES, require_files, require_shard, weight_files, wrap_os_errors
from paligemma.checkpoint.load import read_config
from paligemma.errors import CheckpointError
from paligemma.paths import BUNDLED_MODEL

BUNDLED_FOLDER = BUNDLED_MODEL
REVISION_OF_DTYPE = {torch.bfloat16: "bfloat16", torch.float16: "float16"}  # branches of Google's PaliGemma 1 repos
HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")


@dataclass(frozen=True)
class CheckpointSource:
    """A checkpoint folder on this machine.

    Attributes:
        folder: contains config.json, weights and tokenizer.json.
        source: "bundled", "folder" or "hub".
        name: hub id, folder as given, or "bundled demo".
        revision: branch, tag or commit on the hub; None elsewhere.
        dtype: to pass to `load_model`: a dtype, or "auto" for the stored one.
    """

    folder: Path
    source: str
    name: str
    revision: str | None = None
    dtype: str | torch.dtype = "auto"


def find_checkpoint(
    source: str | Path | None = None,
    revision: str | None = None,
    token: str | None = None,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "auto",
    progress: hub.Progress | None = None,
) -> CheckpointSource:
    """Find a checkpoint, and download it if `source` is a hub id that is not in the cache.

    Args:
        source: None for the bundled model; a folder in the hub's layout; or a hub id such as
            "google/paligemma2-3b-mix-224".
        revision: branch, tag or commit, only with a hub id. None: the branch with weights in the requested
            dtype if the repository has one, else main.
        token: access token of the hub; None: the one from `hf auth login` or HF_TOKEN.
        device, dtype: as for `load_model`. For a hub id, dtype "auto" is bfloat16 if the device has native bfloat16
            matmuls, else float32; otherwise it is the stored dtype.
        progress: called with ("downloading", bytes done, total bytes).

    Raises:
        CheckpointError: if the checkpoint is missing, incomplete or not supported.
        InputError: for a device or dtype that is not available.
    """
    resolved_dtype = resolve_dtype(dtype)
    if source is None:
        return _find_bundled(revision, dtype)
    folder = resolve_local_path(source)
    if folder.exists():
        if revision is not None:
            raise CheckpointError(
                "checkpoint.revision_of_folder",
                "revision {revision!r} requires a hub id, got the local folder {source}.",
                revision=revision,
                source=str(source),
            )
        check_folder(folder)
        return CheckpointSource(folder, "bundled" if is_bundled(folder) else "folder", str(source), dtype=dtype)
    if not HUB_ID.fullmatch(str(source)):
        raise CheckpointError(
            "checkpoint.not_found",
            "{source} is neither a local folder nor a hub id such as google/paligemma2-3b-mix-224.",
            source=str(source),
        )
    return _find_on_hub(str(source), revision, token, resolve_device(device), resolved_dtype, progress)


def _find_bundled(revision: str | None, dtype: str | torch.dtype) -> CheckpointSource:
    if revision is not None:
        raise CheckpointError(
            "checkpoint.revision_of_bundled",
            "revision {revision!r} requires a hub id; the bundled model has no revisions.",
            revision=revision,
        )
    if not BUNDLED_FOLDER.is_dir():
        raise CheckpointError(
            "checkpoint.not_bundled",
            "The bundled model is missing: {folder} not found. Use a folder, or a hub id such as "
            "google/paligemma2-3b-mix-224.",
            folder=str(BUNDLED_FOLDER),
        )
    check_folder(BUNDLED_FOLDER)
    return CheckpointSource(BUNDLED_FOLDER, "bundled", "bundled demo", dtype=dtype)


def _find_on_hub(
    repo: str,
    revision: str | None,
    token: str | None,
    device: torch.device,
    dtype: torch.dtype | None,
    progress: hub.Progress | None,
) -> CheckpointSource:
    if dtype is None:
        dtype = torch.bfloat16 if is_fast_in_bfloat16(device) else torch.float32
    branches = [REVISION_OF_DTYPE[dtype]] if revision is None and dtype in REVISION_OF_DTYPE else []
    checks = hub.Checks(
        names=lambda names: require_files(names, repo),
        config=lambda folder: _check_config(folder, repo, device, dtype),
    )
    revisions = [*branches, revision or "main"]
    folder, found_revision = hub.download(repo, revisions, token, DOWNLOADED_FILES, checks, progress)
    check_folder(folder)
    return CheckpointSource(folder, "hub", repo, found_revision, dtype)


def _check_config(folder: Path, name: str, device: torch.device, dtype: torch.dtype) -> None:
    """Raise CheckpointError, before the download, if the model is unsupported or exceeds the total memory."""
    config = read_config(folder, name)
    needed = config.approximate_parameters * dtype.itemsize
    is_memory_mapped = device.type == "cpu" and config.dtype == dtype_name(dtype)
    if needed > memory.available_memory(device).total and not is_memory_mapped:
        memory.require_memory(needed, device, dtype, name, config.dtype)


def check_folder(folder: Path) -> None:
    """Raise CheckpointError unless the folder has the files of a checkpoint."""
    with wrap_os_errors(folder):
        if not folder.is_dir():
            raise CheckpointError(
                "checkpoint.not_a_folder",
                "{folder} is not a folder. Use the folder that contains config.json.",
                folder=str(folder),
            )
        require_files([path.name for path in folder.iterdir() if path.is_file()], str(folder), can_convert=True)
        for file in weight_files(folder):
            require_shard(file)


def is_bundled(folder: Path) -> bool:
    """Whether this is the bundled model's folder, under any path."""
    return folder.exists() and BUNDLED_FOLDER.exists() and folder.samefile(BUNDLED_FOLDER)


def resolve_local_path(source: str | Path) -> Path:
    """Return `source` as a local path with "~" expanded, whether or not it exists.

    Raises CheckpointError if it is not a valid path.
    """
    try:
        folder = Path(source).expanduser()
        folder.exists()  # raises OSError if a name is too long
    except (TypeError, RuntimeError, OSError) as error:
        raise CheckpointError(
            "checkpoint.invalid_source",
            "source must be a folder or a hub id, got {source!r} ({reason}).",
            source=str(source)[:80],
            reason=f"{type(error).__name__}: {error}"[:200],
        ) from None
    return folder
