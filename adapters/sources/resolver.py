"""From an adapter's name to its source, for loading at first use."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Protocol

from ...core.errors import ConfigError
from ..file_names import CONFIG_NAME
from .remote import ARCHIVE_SUFFIXES
from .source import AdapterSource, LocalSource


class AdapterResolver(Protocol):
    """Says where the adapter of a name lies, when the name is used and nobody loaded it."""

    def __call__(self, name: str) -> AdapterSource | None:
        """The source of `name`; None where this resolver knows no such adapter."""
        ...


@dataclass(frozen=True)
class FolderResolver:
    """Every folder (or archive) in `root` is an adapter, by its name.

    `sql` is `<root>/sql`, or `<root>/sql.zip`, `.tar`, `.tar.gz` or `.tgz`.  A name is one part of
    a path: with a slash, or a dot at its front, it is no adapter's.  A link that leaves `root` is
    refused when it is fetched.

    Args:
        root: the folder.

    Raises:
        ConfigError: there is no such folder.
    """

    root: str

    def __post_init__(self) -> None:
        if not os.path.isdir(self.root):
            raise ConfigError(
                f"adapter folder {self.root!r}", "there is no such folder", "make it, or correct it"
            )

    def __call__(self, name: str) -> AdapterSource | None:
        """The source of `name`, or None."""
        if not name or name.startswith(".") or set(name) & {"/", "\\", "\0"}:
            return None
        folder = os.path.join(self.root, name)
        if os.path.lexists(os.path.join(folder, CONFIG_NAME)):
            return LocalSource(folder, root=self.root)
        for suffix in ARCHIVE_SUFFIXES:
            if os.path.lexists(folder + suffix):
                return LocalSource(folder + suffix, root=self.root)
        return None
