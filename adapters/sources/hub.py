"""Fetching an adapter's files from a repository of the Hugging Face hub, through its cache."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import HfApi, constants, snapshot_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HFValidationError,
    HTTPError,  # pyright: ignore[reportPrivateImportUsage]
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from ...core.errors import AdapterError, AdapterNotFoundError, AdapterSourceError
from ..file_names import CONFIG_NAME, PICKLE_NAME, TEMPLATE_FILES, TENSORS_NAME
from .limits import Budget, SourceLimits
from .local import ADAPTER_FILES
from .source import HubSource


def fetch_repository(source: HubSource, limits: SourceLimits) -> Path:
    """Bring an adapter's files into the hub's cache, and return their folder there.

    The revision is resolved to a commit first and the sizes of its files are checked; then just
    these files of just this commit are fetched.  With `HF_HUB_OFFLINE=1` the cache alone is asked.

    Args:
        source: the repository.
        limits: `max_adapter_bytes` counts.

    Raises:
        AdapterNotFoundError: there is no such repository, revision or file.
        AdapterSourceError: the hub cannot be reached or refuses, or a limit is exceeded.
    """
    try:
        if constants.HF_HUB_OFFLINE:
            folder = _cached(source)
        else:
            commit, names = _listed(source, limits)
            folder = snapshot_download(
                source.repository, revision=commit, allow_patterns=list(names)
            )
    except AdapterError:
        raise
    except (HTTPError, OSError, EntryNotFoundError, ValueError) as error:
        raise _explained(source, error) from error
    # What was cached by somebody else went past the sizes above.
    budget, found = Budget(source, limits), Path(folder, source.folder)
    for name in ADAPTER_FILES:
        if (found / name).exists():
            budget.take((found / name).stat().st_size)
    return found


def _cached(source: HubSource) -> str:
    return snapshot_download(
        source.repository,
        revision=source.revision,
        local_files_only=True,
        allow_patterns=[_path(source, name) for name in ADAPTER_FILES],
    )


def _listed(source: HubSource, limits: SourceLimits) -> tuple[str, tuple[str, ...]]:
    """The commit behind the revision, and the adapter's files in it."""
    info = HfApi().model_info(source.repository, revision=source.revision, files_metadata=True)
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    wanted = [_path(source, name) for name in (CONFIG_NAME, TENSORS_NAME)]
    if wanted[1] not in sizes:
        wanted[1] = _path(source, PICKLE_NAME)
    missing = [name for name in wanted if name not in sizes]
    if missing or not info.sha:
        raise AdapterNotFoundError(
            f"adapter {source.label!r}",
            f"the repository has no {' and no '.join(missing) or 'commit'}",
            "check the folder and the revision",
        )
    wanted += [name for file in TEMPLATE_FILES if (name := _path(source, file)) in sizes]
    budget = Budget(source, limits)
    for name in wanted:
        budget.take(sizes[name])
    return info.sha, tuple(wanted)


def _path(source: HubSource, name: str) -> str:
    return f"{source.folder}/{name}" if source.folder else name


def _explained(source: HubSource, error: Exception) -> AdapterError:
    subject = f"adapter {source.label!r}"
    if isinstance(error, LocalEntryNotFoundError):
        return AdapterSourceError(
            subject,
            "is not in the hub's cache, and the hub is not asked or cannot be reached",
            "unset HF_HUB_OFFLINE where there is a network, or fetch it once beforehand",
        )
    if isinstance(error, GatedRepoError):
        return AdapterSourceError(subject, "is gated on the hub", "ask for access, and log in")
    if isinstance(error, RevisionNotFoundError):
        return AdapterNotFoundError(subject, "has no such revision", "check the revision")
    if isinstance(error, RepositoryNotFoundError | EntryNotFoundError):
        return AdapterNotFoundError(
            subject, "is no repository of the hub that you may read", "check the name, and log in"
        )
    if isinstance(error, HFValidationError):
        return AdapterSourceError(subject, f"is malformed ({error})", "correct the name")
    return AdapterSourceError(
        subject,
        f"the hub cannot be reached ({type(error).__name__})",
        "check the network; with HF_HUB_OFFLINE=1 what is in the hub's cache is used",
    )
