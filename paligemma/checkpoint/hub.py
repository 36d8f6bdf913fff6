"""Download checkpoints from the Hugging Face hub, and convert failures to CheckpointErrors with advice.

huggingface_hub transfers the files and manages the cache. File names, configuration and disk space are checked before
any weights are downloaded. Only files that match the given patterns are downloaded, and no code in them is executed.
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

from paligemma.checkpoint.files import CONFIG_FILE
from paligemma.checkpoint.memory import format_gigabytes
from paligemma.errors import CheckpointError

LISTING_TIMEOUT_S = 20  # huggingface_hub has no timeout for this request by default
TOKEN = re.compile(r"hf_(?:oauth_|jwt_)?[A-Za-z0-9]{10,}[\w.-]*")
CACHE_ERRORS = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ENOENT}

# Called with the stage ("downloading" or "loading"), the bytes done and the total bytes.
Progress = Callable[[str, int, int], None]

log = logging.getLogger("paligemma.checkpoint.hub")


class NotCachedError(hub_errors.LocalEntryNotFoundError):
    """The hub did not list a revision, and it is not in the cache.

    huggingface_hub's base class also covers a failed download of a listed file, after which no other revision is tried.
    """


@dataclass(frozen=True)
class Checks:
    """Checks before any weights are downloaded; each raises CheckpointError.

    Attributes:
        names: called with the file names of the repository.
        config: called with a folder that contains its config.json.
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
    """Download the files that match `patterns` from the first of `revisions` that the repository has.

    Cached files are reused. If the hub is unreachable or rejects the token, a complete cached copy is used.

    Returns:
        The folder in the cache and the revision.

    Raises:
        CheckpointError: if the checkpoint is not available; the message contains no access token.
    """
    token = (token or "").strip() or None
    failures: list[tuple[Exception, str]] = []
    for revision in revisions:
        try:
            return _fetch(repo, revision, token, patterns, checks, progress), revision
        except CheckpointError:
            raise
        except (hub_errors.RevisionNotFoundError, NotCachedError) as error:
            failures.append((error, revision))  # try the next revision
        except Exception as error:  # errors of the HTTP client have no more specific base class
            failures.append((error, revision))
            break
    token = _token_in_use(token)
    incomplete = [pair for pair in failures if isinstance(pair[0], hub_errors.IncompleteSnapshotError)]
    failure, revision = (incomplete or failures)[-1]
    raise _redacted(_explain(failure, repo, revision, token), token) from None


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
    folder = _download_file(repo, CONFIG_FILE, sizes.get(CONFIG_FILE, 0), source).parent
    checks.config(folder)
    wanted = {name: size for name, size in sizes.items() if any(fnmatch(name, pattern) for pattern in patterns)}
    missing = _missing_files(wanted, folder)
    if sizes and not missing:
        return folder  # without writing, so that a read-only cache works
    _require_space(repo, sum(missing.values()))
    bar = _reporting_bar(progress, sum(missing.values()))
    for name in missing:
        if (folder / name).exists():
            _download_file(repo, name, sizes[name], source)
    return Path(huggingface_hub.snapshot_download(repo, allow_patterns=list(patterns), tqdm_class=bar, **source))


def _download_file(repo: str, name: str, size: int, source: Mapping[str, Any]) -> Path:
    """Return a file from the cache or the hub. Replaces a truncated cached file, which huggingface_hub would reuse."""
    file = Path(huggingface_hub.hf_hub_download(repo, name, **source))
    if size and file.stat().st_size != size:
        file = Path(huggingface_hub.hf_hub_download(repo, name, force_download=True, **source))
    return file


def _from_cache(repo: str, revision: str, patterns: Sequence[str], reason: Exception) -> Path:
    """Return the cached folder if the hub failed (`reason`); raise NotCachedError if there is none."""
    try:
        folder = huggingface_hub.snapshot_download(
            repo, revision=revision, local_files_only=True, allow_patterns=list(patterns)
        )
    except hub_errors.IncompleteSnapshotError:
        raise
    except hub_errors.LocalEntryNotFoundError:
        raise NotCachedError("not in the cache") from reason
    log.info("Using the cached %s (%s): %s", repo, revision, redact_tokens(f"{type(reason).__name__}: {reason}"))
    return Path(folder)


def _missing_files(sizes: Mapping[str, int], folder: Path) -> dict[str, int]:
    """Return the files that are missing in the folder or have a different size there."""
    return {
        name: size
        for name, size in sizes.items()
        if not (folder / name).is_file() or (size and (folder / name).stat().st_size != size)
    }


def _require_space(repo: str, needed: int) -> None:
    """Raise CheckpointError if the download does not fit on the disk; huggingface_hub only warns."""
    cache = _cache_folder()
    free = shutil.disk_usage(next(path for path in (cache, *cache.parents) if path.exists())).free
    if needed > free:
        raise CheckpointError(
            "hub.no_space",
            "{repo} needs {needed} more disk space, but the disk of {cache} has {free} free. Free some space, or set "
            "HF_HOME to a folder on a larger disk.",
            repo=repo,
            needed=format_gigabytes(needed),
            cache=str(cache),
            free=format_gigabytes(free),
        )


def _cache_folder() -> Path:
    return Path(huggingface_hub.constants.HF_HUB_CACHE)


def _reporting_bar(progress: Progress | None, total: int) -> type[tqdm] | None:
    """Return a tqdm class that calls `progress` instead of drawing; None for huggingface_hub's own bar.

    huggingface_hub counts bytes in two bars, received and written; the larger count is reported.
    """
    if progress is None or not total:  # mirrors of the hub may not report sizes
        return None
    report = progress
    report("downloading", 0, total)
    reported = 0

    class ReportingBar(tqdm):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            self.counts_bytes = options.get("unit") == "B"
            self.num_bytes = 0
            super().__init__(*arguments, **{**options, "disable": True})

        def update(self, n: float | None = 1) -> bool | None:
            nonlocal reported
            self.num_bytes += int(n or 0)
            if self.counts_bytes and self.num_bytes > reported:
                reported = self.num_bytes
                report("downloading", min(reported, total), total)
            return super().update(n)

    return ReportingBar


# Explanations


def _explain(error: Exception, repo: str, revision: str, token: str | None) -> CheckpointError:
    """Explain an error of huggingface_hub, its HTTP client or the disk. Subclasses are tested before their bases."""
    cause = error.__cause__ if isinstance(error, hub_errors.LocalEntryNotFoundError) else error
    if isinstance(cause, hub_errors.HfHubHTTPError):
        return _explain_response(cause, repo, revision, token)
    if isinstance(error, hub_errors.IncompleteSnapshotError):
        return CheckpointError(
            "hub.incomplete",
            "The download of {repo} ({revision}) is incomplete, and the hub is unreachable. Check the connection and "
            "try again; complete files are kept.",
            repo=repo,
            revision=revision,
        )
    if isinstance(error, hub_errors.LocalEntryNotFoundError):
        return _explain_unreachable(error.__cause__, repo, revision)
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return CheckpointError(
            "hub.disk_full",
            "The disk of {cache} is full. Free some space, or set HF_HOME to a folder on a larger disk.",
            cache=str(_cache_folder()),
        )
    if isinstance(error, OSError) and error.errno in CACHE_ERRORS:
        return CheckpointError(
            "hub.cache_not_writable",
            "{repo} cannot be stored in the cache {cache}: {reason}. Make that folder writable, or set HF_HOME to "
            "another folder.",
            repo=repo,
            cache=str(_cache_folder()),
            reason=str(error),
        )
    return CheckpointError(
        "hub.download_failed",
        "Downloading {repo} failed: {reason}. Check the connection and try again; complete files are kept.",
        repo=repo,
        reason=f"{type(error).__name__}: {error}",
    )


def _explain_unreachable(cause: BaseException | None, repo: str, revision: str) -> CheckpointError:
    """The error for a revision that is not cached while the hub is unreachable."""
    if isinstance(cause, hub_errors.OfflineModeIsEnabled):
        return CheckpointError(
            "hub.offline",
            "{repo} ({revision}) is not in the cache {cache}, and HF_HUB_OFFLINE disables downloads. Unset it, or use "
            "a local folder.",
            repo=repo,
            revision=revision,
            cache=str(_cache_folder()),
        )
    return CheckpointError(
        "hub.unreachable",
        "{repo} ({revision}) is not in the cache {cache}, and the hub is unreachable ({reason}). Check the connection "
        "and try again, or use a local folder.",
        repo=repo,
        revision=revision,
        cache=str(_cache_folder()),
        reason=f"{type(cause).__name__}: {cause}" if cause else "no connection",
    )


def _explain_response(error: hub_errors.HfHubHTTPError, repo: str, revision: str, token: str | None) -> CheckpointError:
    """Explain an HTTP error of the hub."""
    url, status = f"https://huggingface.co/{repo}", error.response.status_code
    if isinstance(error, hub_errors.GatedRepoError):
        return _explain_gated(repo, url, status)
    if isinstance(error, hub_errors.RevisionNotFoundError):
        return CheckpointError(
            "hub.no_revision",
            "{repo} has no revision {revision!r}. Its branches are listed at {url}/tree/main.",
            repo=repo,
            revision=revision,
            url=url,
        )
    # Without a token, the hub returns 401 for repositories that do not exist; with one, only if the token is invalid.
    if status == 403 or (status == 401 and token):
        return CheckpointError(
            "hub.token_rejected",
            "The hub rejected the access token for {repo}: it is invalid, expired, or lacks read permission. Create "
            "one at https://huggingface.co/settings/tokens, then run `hf auth login` or set HF_TOKEN.",
            repo=repo,
        )
    if isinstance(error, hub_errors.RepositoryNotFoundError) or status == 401:
        return CheckpointError(
            "hub.not_found",
            "{repo} is neither a local folder nor a public model on the hub. Check the spelling, or log in with an "
            "access token that can read it.",
            repo=repo,
        )
    if status == 429:
        return CheckpointError(
            "hub.rate_limited",
            "The hub's rate limit is exceeded for {repo}. Wait a few minutes, or log in with an access token.",
            repo=repo,
        )
    return CheckpointError(
        "hub.http_error",
        "The hub returned HTTP {status} for {repo}. Try again later, or use a local folder.",
        status=status,
        repo=repo,
    )


def _explain_gated(repo: str, url: str, status: int) -> CheckpointError:
    """The error for a gated repository: 401 without a valid token, 403 for a token without access."""
    if status == 401:
        return CheckpointError(
            "hub.gated",
            "{repo} is gated and needs an access token. Accept its license at {url}, then run `hf auth login` or set "
            "HF_TOKEN.",
            repo=repo,
            url=url,
        )
    return CheckpointError(
        "hub.gated_no_access",
        "{repo} is gated and the access token has no access to it. Accept the license at {url} with the token's "
        "account; a fine-grained token also needs permission to read gated repositories.",
        repo=repo,
        url=url,
    )


# Access tokens


def _token_in_use(token: str | None) -> str | None:
    """Return the given token, else the one that huggingface_hub finds."""
    try:
        return token or huggingface_hub.get_token()
    except Exception:  # huggingface_hub may request an OIDC token over the network
        return None


def _redacted(error: CheckpointError, token: str | None) -> CheckpointError:
    """Return the error with all access tokens in its values redacted."""
    values = {
        name: redact_tokens(value, token) if isinstance(value, str) else value for name, value in error.values.items()
    }
    return CheckpointError(error.code, error.template, **values)


def redact_tokens(text: str, token: str | None = None) -> str:
    """Replace `token`, and anything that looks like an access token of the hub, with "[token]"."""
    if token:
        text = text.replace(token, "[token]")
    return TOKEN.sub("[token]", text)
