"""Fetching an adapter's files from behind a URL, by whatever file system fsspec has for it."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
from fsspec.core import url_to_fs

from ...core.errors import AdapterNotFoundError, AdapterSourceError, BranchlineError
from ..file_names import CONFIG_NAME, PICKLE_NAME, TENSORS_NAME
from .archive import unpack
from .limits import Budget, SourceLimits
from .source import UrlSource

#: What a URL's path ends with where an archive lies behind it, and not a folder.
ARCHIVE_SUFFIXES = (".zip", ".tar", ".tar.gz", ".tgz")

# They read this machine's disk, run code, or hand on to another file system past the limits.
_REFUSED = frozenset({
    "arrow_hdfs", "async_wrapper", "asynclocal", "asyncwrapper", "blockcache", "cached", "dask",
    "data", "dir", "dvc", "filecache", "generic", "git", "jlab", "jupyter", "lakefs",
    "libarchive", "pyscript", "reference", "simplecache", "tar", "zip",
})  # fmt: skip


def fetch_url(source: UrlSource, target: Path, limits: SourceLimits) -> Path:
    """Fetch an adapter's files into `target`, and return the folder that they are in.

    Args:
        source: a URL that ends in `ARCHIVE_SUFFIXES` is an archive, any other a folder.
        target: an empty folder.
        limits: of sizes; a redirection is not followed where roots restrict.

    Raises:
        AdapterNotFoundError: nothing lies there.
        AdapterSourceError: the scheme is not served, needs a package that is not installed, the
            server cannot be reached or refuses, or a limit is exceeded.
        AdapterFormatError: see `unpack`.
    """
    system, path = _file_system(source, limits)
    budget = Budget(source, limits)
    if source.path.lower().endswith(ARCHIVE_SUFFIXES):
        packed, unpacked = target / "archive", target / "unpacked"
        _copy(source, system, path, packed, budget)
        unpacked.mkdir()
        with packed.open("rb") as file:
            return unpack(file, unpacked, source, limits)
    _copy(source, system, _below(source, path, CONFIG_NAME), target / CONFIG_NAME, budget)
    try:
        _copy(source, system, _below(source, path, TENSORS_NAME), target / TENSORS_NAME, budget)
    except AdapterNotFoundError:
        pickle = _below(source, path, PICKLE_NAME)
        _copy(source, system, pickle, target / PICKLE_NAME, budget)
    return target


def _file_system(source: UrlSource, limits: SourceLimits) -> tuple[Any, str]:
    subject = f"adapter {source.label!r}"
    schemes = "use s3://, gs://, https:// or another file system of fsspec"
    if source.scheme in _REFUSED:
        reason = f"{source.scheme}:// reads this machine, or hands on to another file system"
        raise AdapterSourceError(subject, reason, schemes)
    options: dict[str, Any] = {}
    if source.scheme in ("http", "https") and limits.allowed_roots is not None:
        options["allow_redirects"] = False
    try:
        fsspec.get_filesystem_class(source.scheme)
    except ImportError as error:
        missing = error.__cause__ if isinstance(error.__cause__, ImportError) else error
        package = missing.name or source.scheme
        raise AdapterSourceError(
            subject, f"{source.scheme}:// needs a package: {error}", f"pip install {package}"
        ) from error
    except ValueError as error:
        raise AdapterSourceError(
            subject, f"no file system serves {source.scheme}://", schemes
        ) from error
    with _reachable(source):
        return url_to_fs(source.url, **options)


def _below(source: UrlSource, path: str, name: str) -> str:
    if source.scheme not in ("http", "https"):
        return f"{path.rstrip('/')}/{name}"
    # The path of the web is the URL; a query, often a signature, stays at its end.
    plain, mark, query = path.partition("#")[0].partition("?")
    return f"{plain.rstrip('/')}/{name}{mark}{query}"


def _copy(source: UrlSource, system: Any, path: str, target: Path, budget: Budget) -> None:
    try:
        with _reachable(source), system.open(path, "rb", cache_type="readahead") as file:
            budget.copy(file, target)
    except FileNotFoundError as error:
        # The web's file system calls whatever went wrong "not found".
        cause = error.__cause__
        if cause is not None and getattr(cause, "status", None) != 404:
            raise _unreadable(source, cause) from error
        raise AdapterNotFoundError(
            f"adapter {source.label!r}",
            f"has no {target.name} there" if target.name != "archive" else "nothing lies there",
            "check the URL; only names that end in .zip, .tar, .tar.gz or .tgz are archives",
        ) from error


@contextmanager
def _reachable(source: UrlSource) -> Iterator[None]:
    try:
        yield
    except (BranchlineError, FileNotFoundError):
        raise
    except (OSError, ValueError, NotImplementedError, *_client_errors(source.scheme)) as error:
        raise _unreadable(source, error) from error


def _unreadable(source: UrlSource, error: BaseException) -> AdapterSourceError:
    # Its message may repeat the URL, with its signature: only the type is told.
    return AdapterSourceError(
        f"adapter {source.label!r}",
        f"cannot be read ({type(error).__name__})",
        "check the URL, the network and the credentials that its file system asks for",
    )


def _client_errors(scheme: str) -> tuple[type[Exception], ...]:
    """Base errors of clients that derive from no OSError."""
    known = {
        "http": ("aiohttp", "ClientError"),
        "https": ("aiohttp", "ClientError"),
        "s3": ("botocore.exceptions", "BotoCoreError"),
        "s3a": ("botocore.exceptions", "BotoCoreError"),
        "az": ("azure.core.exceptions", "AzureError"),
        "abfs": ("azure.core.exceptions", "AzureError"),
        "sftp": ("paramiko", "SSHException"),
        "ssh": ("paramiko", "SSHException"),
    }
    if scheme not in known:
        return ()
    module, name = known[scheme]
    return (getattr(importlib.import_module(module), name),)
