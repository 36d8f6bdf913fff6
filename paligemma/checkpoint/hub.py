"""Checkpoints on the hub: list what a repository holds, check it while it is small, download it, say what went wrong.

huggingface_hub does the transfer and keeps the cache. Here are the order (names, configuration, room on the disk, and
only then the weights) and the sentences. Nothing but the named patterns is downloaded, and nothing that comes is run.
"""

from __future__ import annotations

import errno
import logging
import re
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub import errors as hub_errors
from huggingface_hub.utils import tqdm

CONFIG_FILE = "config.json"
LISTING_TIMEOUT_S = 20  # huggingface_hub itself would wait for this answer without end
TOKEN = re.compile(r"hf_(?:oauth_|jwt_)?[A-Za-z0-9]{10,}[\w.-]*")
DISK_FAULTS = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ENOENT}
TOKEN_PAGE = "https://huggingface.co/settings/tokens"

# Called with the stage, "downloading" or "loading", the bytes done, and the bytes in all.
Progress = Callable[[str, int, int], None]

log = logging.getLogger("paligemma.checkpoint.hub")


class CheckpointError(ValueError):
    """A checkpoint that cannot be had or used. The message says why and what to do; it never holds a token."""


class NothingCachedError(hub_errors.LocalEntryNotFoundError):
    """There is no listing of a revision, and the cache does not have it. The library's own error of that kind may also
    mean that a listed file did not come, which is no reason to download another revision instead."""


@dataclass(frozen=True)
class Checks:
    """What is looked at before any weight is downloaded; each raises CheckpointError.

    Attributes:
        names: gets the names of the repository's files.
        config: gets a folder that holds its config.json.
    """

    names: Callable[[Collection[str]], None]
    config: Callable[[Path], None]


def download(
    repo: str,
    revisions: Sequence[str],
    token: str | None,
    patterns: Sequence[str],
    checks: Checks,
    progress: Progress | None = None,
) -> tuple[Path, str]:
    """Download the files that match `patterns`, of the first of `revisions` that the repository has.

    What the cache holds is used again, and all there is when the hub is out of reach or refuses the token.

    Returns the folder and the revision. Raises CheckpointError, which says what to do.
    """
    token = (token or "").strip() or None
    failures: list[tuple[Exception, str]] = []
    for revision in revisions:
        try:
            return _fetch(repo, revision, token, patterns, checks, progress), revision
        except CheckpointError:
            raise
        except (hub_errors.RevisionNotFoundError, NothingCachedError) as error:
            failures.append((error, revision))  # another revision may be what there is, or what the cache has
        # The library raises many kinds, among them its HTTP client's own, which share no base but Exception.
        except Exception as error:
            failures.append((error, revision))
            break
    token = _token_in_use(token)
    unfinished = [failure for failure in failures if isinstance(failure[0], hub_errors.IncompleteSnapshotError)]
    error, revision = (unfinished or failures)[-1]
    raise CheckpointError(redact_tokens(_explain(error, repo, revision, token), token)) from None


def _fetch(
    repo: str,
    revision: str,
    token: str | None,
    patterns: Sequence[str],
    checks: Checks,
    progress: Progress | None,
) -> Path:
    try:
        api = huggingface_hub.HfApi(token=token)
        listing = api.model_info(repo, revision=revision, timeout=LISTING_TIMEOUT_S, files_metadata=True)
    except hub_errors.RevisionNotFoundError:
        raise
    except Exception as error:
        return _from_cache(repo, revision, patterns, error)
    sizes = {file.rfilename: file.size or 0 for file in listing.siblings or ()}
    if sizes:
        checks.names(sizes.keys())
    source: dict[str, Any] = {"revision": revision, "token": token}
    folder = _whole_file(repo, CONFIG_FILE, sizes.get(CONFIG_FILE, 0), source).parent
    checks.config(folder)
    wanted = {name: size for name, size in sizes.items() if any(fnmatch(name, pattern) for pattern in patterns)}
    missing = _missing(wanted, folder)
    if sizes and not missing:
        return folder  # nothing is written, so a cache that is only read will do
    _require_space(repo, sum(missing.values()))
    bar = _bar_that_tells(progress, sum(missing.values()))
    for name in missing:
        if (folder / name).exists():
            _whole_file(repo, name, sizes[name], source)
    return Path(huggingface_hub.snapshot_download(repo, allow_patterns=list(patterns), tqdm_class=bar, **source))


def _whole_file(repo: str, name: str, size: int, source: Mapping[str, Any]) -> Path:
    """A file from the cache or the hub. The library would take a cached one that was cut short as it is."""
    file = Path(huggingface_hub.hf_hub_download(repo, name, **source))
    if size and file.stat().st_size != size:
        file = Path(huggingface_hub.hf_hub_download(repo, name, force_download=True, **source))
    return file


def _from_cache(repo: str, revision: str, patterns: Sequence[str], reason: Exception) -> Path:
    """The cached folder, where the hub did not answer or refused; NothingCachedError where there is none."""
    try:
        folder = huggingface_hub.snapshot_download(
            repo, revision=revision, local_files_only=True, allow_patterns=list(patterns)
        )
    except hub_errors.IncompleteSnapshotError:
        raise
    except hub_errors.LocalEntryNotFoundError:
        raise NothingCachedError("nothing is cached") from reason
    log.info("%s (%s) comes from the cache: %s", repo, revision, redact_tokens(f"{type(reason).__name__}: {reason}"))
    return Path(folder)


def _missing(sizes: Mapping[str, int], folder: Path) -> dict[str, int]:
    """Of the files, those that the cached folder lacks or that are of another size there."""
    return {
        name: size
        for name, size in sizes.items()
        if not (folder / name).is_file() or (size and (folder / name).stat().st_size != size)
    }


def _require_space(repo: str, needed: int) -> None:
    """huggingface_hub only warns of a disk that is too small, and then fills it."""
    cache = _cache()
    free = shutil.disk_usage(next(path for path in (cache, *cache.parents) if path.exists())).free
    if needed > free:
        raise CheckpointError(
            f"{repo} needs {format_gigabytes(needed)} more on the disk of {cache}, which has {format_gigabytes(free)} free; make "
            "room, or set HF_HOME to a folder on a larger disk"
        )


def _cache() -> Path:
    return Path(huggingface_hub.constants.HF_HUB_CACHE)


def _bar_that_tells(progress: Progress | None, total: int) -> type[tqdm] | None:
    """A class of progress bars that draw nothing and report the bytes; None, for the library's own, where nobody asks.

    The library counts bytes in two bars, as they arrive and as they are written; the one that is ahead counts.
    """
    if progress is None or not total:  # a mirror of the hub may not tell sizes
        return None
    progress("downloading", 0, total)
    furthest = 0

    class ReportingBar(tqdm):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            self.counts_bytes = options.get("unit") == "B"
            self.num_bytes = 0
            super().__init__(*arguments, **{**options, "disable": True})

        def update(self, n: float | None = 1) -> bool | None:
            nonlocal furthest
            self.num_bytes += int(n or 0)
            if self.counts_bytes and self.num_bytes > furthest:
                furthest = self.num_bytes
                progress("downloading", min(furthest, total), total)
            return super().update(n)

    return ReportingBar


# What went wrong --------------------------------------------------------------------------------------------------


def _explain(error: Exception, repo: str, revision: str, token: str | None) -> str:
    """What happened, and what to do about it. The order matters: the kinds derive from one another."""
    answer = error.__cause__ if isinstance(error, hub_errors.LocalEntryNotFoundError) else error
    if isinstance(answer, hub_errors.HfHubHTTPError):
        return _explain_answer(answer, repo, revision, token)
    if isinstance(error, hub_errors.IncompleteSnapshotError):
        return (
            f"the download of {repo} ({revision}) was not finished and the hub cannot be reached; connect and start "
            "again, files that are complete are kept"
        )
    if isinstance(error, hub_errors.LocalEntryNotFoundError):
        return f"{repo} ({revision}) is not in the cache {_cache()}, and {_why_unreachable(error.__cause__)}"
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return f"the disk of {_cache()} is full; make room, or set HF_HOME to a folder on a larger disk"
    if isinstance(error, OSError) and error.errno in DISK_FAULTS:
        return (
            f"{repo} cannot be stored in the cache {_cache()} ({error}); make that folder writable, or set HF_HOME to "
            "one that is"
        )
    return (
        f"downloading {repo} failed: {type(error).__name__}: {error}; check the connection and start again, files "
        "that are complete are kept"
    )


def _why_unreachable(cause: BaseException | None) -> str:
    if isinstance(cause, hub_errors.OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE forbids to download it; unset that, or give a folder"
    reason = f" ({type(cause).__name__}: {cause})" if cause else ""
    return f"the hub cannot be reached{reason}; check the connection and start again, or give a folder"


def _explain_answer(error: hub_errors.HfHubHTTPError, repo: str, revision: str, token: str | None) -> str:
    """What the hub's refusal means."""
    page, status = f"https://huggingface.co/{repo}", error.response.status_code
    if isinstance(error, hub_errors.GatedRepoError) and status == 401:
        return (
            f"{repo} is gated and no valid token was given; accept its license at {page}, then run `hf auth login` or "
            "set HF_TOKEN"
        )
    if isinstance(error, hub_errors.GatedRepoError):
        return (
            f"{repo} is gated and this token has no access to it; accept the license at {page} with the token's "
            "account, and let a fine-grained token read gated repositories"
        )
    if isinstance(error, hub_errors.RevisionNotFoundError):
        return f"{repo} has no revision {revision!r}; its branches are listed at {page}/tree/main"
    # Without a token the hub answers 401 for what does not exist; with one, only where the token is not good.
    if status == 403 or (status == 401 and token):
        return (
            f"the hub refuses the token for {repo}, it may be wrong, expired, or not allowed to read; make a new one "
            f"at {TOKEN_PAGE}, then run `hf auth login` or set HF_TOKEN"
        )
    if isinstance(error, hub_errors.RepositoryNotFoundError) or status == 401:
        return (
            f"there is no folder {repo} here, and on the hub no such model, or a private one; check the spelling, or "
            "give a token that may read it"
        )
    if status == 429:
        return f"the hub was asked too often for {repo}; wait some minutes and start again, or log in with a token"
    return f"the hub fails for {repo} ({status}); try again later, or give a folder"


def _token_in_use(token: str | None) -> str | None:
    """The given token, else the one that the library finds; None where there is none, or it cannot be had."""
    try:
        return token or huggingface_hub.get_token()
    except Exception:  # some kinds of token are fetched
        return None


def redact_tokens(text: str, token: str | None = None) -> str:
    """The text without the token and without anything that looks like a token of the hub."""
    if token:
        text = text.replace(token, "[token]")
    return TOKEN.sub("[token]", text)


def format_gigabytes(num_bytes: int) -> str:
    """`5.85 GB`."""
    return f"{num_bytes / 1e9:.2f} GB"
