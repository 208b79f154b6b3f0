"""Where adapters come from: folders, archives, URLs and the hub, as local folders to read."""

from .fetch import SourceReader, fetch
from .limits import SourceLimits
from .resolver import AdapterResolver, FolderResolver
from .source import AdapterSource, HubSource, LocalSource, UrlSource

__all__ = [
    "AdapterResolver",
    "AdapterSource",
    "FolderResolver",
    "HubSource",
    "LocalSource",
    "SourceLimits",
    "SourceReader",
    "UrlSource",
    "fetch",
]
