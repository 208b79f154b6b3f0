"""Where an adapter comes from, as a value: a local path, a URL, or a repository of the hub."""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from urllib.parse import unquote

from ...core.errors import AdapterSourceError

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_SEGMENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_REVISION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./-]*")
_LOCAL_SCHEMES = ("file", "local")
_HUB_FORM = "write hf://owner/name, hf://owner/name@revision or hf://owner/name/folder"


class AdapterSource(ABC):
    """A place that an adapter is read from; frozen, and nothing is looked up to make one."""

    @property
    @abstractmethod
    def label(self) -> str:
        """What listings and errors say: without passwords, tokens and queries."""

    @property
    @abstractmethod
    def place(self) -> str:
        """What allowed roots are compared with, by whole segments between slashes."""

    @staticmethod
    def parse(text: str | os.PathLike[str] | AdapterSource) -> AdapterSource:
        """Read a source from what somebody wrote.

        Args:
            text: a path of this machine (`adapters/sql`, `sql.zip`, `file:///srv/sql`); a
                repository of the hub (`hf://owner/name@revision/folder`); any other URL
                (`s3://bucket/sql`, `https://host/sql.tar.gz`). A source is returned as it is.

        Raises:
            AdapterSourceError: it is empty, or a malformed or chained URL.
        """
        if isinstance(text, AdapterSource):
            return text
        path = os.fspath(text)
        if not isinstance(path, str) or not path.strip() or "\0" in path:
            raise AdapterSourceError(
                f"adapter source {path!r}", "is no path and no URL", "name a folder or a URL"
            )
        if not isinstance(text, str):
            return LocalSource(path)
        scheme = _SCHEME.match(path)
        if scheme is None:
            _refuse_chained(path)
            return LocalSource(path)
        name, rest = scheme[1].lower(), path[scheme.end() :]
        if name in _LOCAL_SCHEMES:
            return _file_url(path, rest)
        return _hub(path, rest) if name == "hf" else _url(name, path, rest)


@dataclass(frozen=True)
class LocalSource(AdapterSource):
    """A folder, or an archive, of this machine.

    Args:
        path: as it was written.
        root: a folder that it must lie in whatever the limits allow, links resolved; None for any.
    """

    path: str
    root: str | None = None

    @property
    def label(self) -> str:
        """The path."""
        return self.path

    @property
    def place(self) -> str:
        """The real path, links resolved; of what does not exist, as far as it does."""
        return os.path.realpath(self.path)


@dataclass(frozen=True)
class UrlSource(AdapterSource):
    """A folder, or an archive, behind a URL.

    Args:
        scheme: in small letters.
        url: as it was written; may hold a password or a signature.
        authority: host, or bucket, without user and password.
        path: of the URL, without its query.
    """

    scheme: str
    url: str
    authority: str
    path: str

    @property
    def label(self) -> str:
        """The URL without user, password and query."""
        return f"{self.scheme}://{self.authority}{self.path}"

    @property
    def place(self) -> str:
        """The same."""
        return self.label

    def __repr__(self) -> str:
        return f"UrlSource({self.label!r})"


@dataclass(frozen=True)
class HubSource(AdapterSource):
    """A model repository of the Hugging Face hub.

    Args:
        repository: `owner/name`.
        revision: branch, tag or commit; None for the default branch.
        folder: below the repository's root; "" for the root.
    """

    repository: str
    revision: str | None = None
    folder: str = ""

    @property
    def label(self) -> str:
        """As it would be written."""
        at = f"@{self.revision}" if self.revision else ""
        return f"hf://{self.repository}{at}" + (f"/{self.folder}" if self.folder else "")

    @property
    def place(self) -> str:
        """Without the revision: a root allows them all."""
        return f"hf://{self.repository}" + (f"/{self.folder}" if self.folder else "")

    @staticmethod
    def is_repository(text: str) -> bool:
        """Whether `text` has the form `owner/name`, which a relative path may have too."""
        parts = text.split("/")
        return len(parts) == 2 and all(_SEGMENT.fullmatch(part) for part in parts)


def _refuse_chained(text: str) -> None:
    if "::" in text and "://" in text:
        raise AdapterSourceError(
            f"adapter source {text.partition('://')[0]!r}...",
            "is a chain of file systems, which would go around the limits",
            "name the file itself; archives are unpacked here",
        )


def _file_url(text: str, rest: str) -> LocalSource:
    host, slash, path = rest.partition("/")
    if host not in ("", "localhost") or not path:
        raise AdapterSourceError(
            f"adapter source {text!r}", "names no absolute path", "write file:///path"
        )
    decoded = unquote(slash + path)
    if "\0" in decoded:
        raise AdapterSourceError(f"adapter source {text!r}", "holds a NUL byte", "correct it")
    return LocalSource(decoded)


def _hub(text: str, rest: str) -> HubSource:
    parts = rest.rstrip("/").split("/")
    owner, named, folder = parts[0], "/".join(parts[1:2]), parts[2:]
    name, at, revision = named.partition("@")
    revision = unquote(revision)
    wrong = [part for part in (owner, name, *folder) if not _SEGMENT.fullmatch(part)]
    if wrong or (at and not _REVISION.fullmatch(revision)) or ".." in revision:
        raise AdapterSourceError(
            f"adapter source {text!r}", "is no repository of the hub", _HUB_FORM
        )
    return HubSource(f"{owner}/{name}", revision or None, "/".join(folder))


def _url(scheme: str, text: str, rest: str) -> UrlSource:
    _refuse_chained(text)
    web = scheme in ("http", "https")
    # Only the web has queries; elsewhere "?" and "#" are letters of a key.
    plain = rest.partition("?")[0].partition("#")[0] if web else rest
    login, slash, path = plain.partition("/")
    authority = login.rpartition("@")[2]
    source = UrlSource(scheme, text, authority.lower() if web else authority, slash + path)
    segments = [unquote(part) for part in path.split("/")]
    climbs = any(part in (".", "..") or set(part) & set("/\\\0") for part in segments)
    if climbs or not (authority or path) or "\\" in login or "%" in authority:
        raise AdapterSourceError(
            f"adapter source {source.label!r}", "is malformed, or climbs out by '..'", "correct it"
        )
    return source
