"""Which adapters a fleet has, and how one replica comes to have them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from urllib.parse import unquote

from ...adapters.manager import AdapterManager
from ...core.errors import AdapterError
from .asgi import Forwarded

#: Requests that change what is loaded: the fields of their bodies for a name and its source.
_CHANGES: Mapping[tuple[str, str], tuple[str, str | None]] = {
    ("POST", "/v1/load_lora_adapter"): ("lora_name", "lora_path"),
    ("POST", "/v1/unload_lora_adapter"): ("lora_name", None),
    ("POST", "/adapters"): ("name", "src"),
}
_ADAPTERS = "/adapters/"


@dataclass(frozen=True)
class Entry:
    """One adapter of a fleet.

    Attributes:
        source: it is read from, as whoever loaded it wrote it.
        digest: of its content; empty while no replica has read it.
    """

    source: str
    digest: str = ""


@dataclass(frozen=True)
class Table:
    """All adapters of a fleet.

    Attributes:
        generation: a later table has a higher one.
        entries: by name.
    """

    generation: int = 0
    entries: Mapping[str, Entry] = field(default_factory=dict)

    def settled(self, digests: Mapping[str, str]) -> Table:
        """With the digests of entries that nobody had read before.

        Args:
            digests: that a replica has found, by name.
        """
        new = {
            name: replace(entry, digest=digests[name])
            for name, entry in self.entries.items()
            if not entry.digest and name in digests
        }
        return Table(self.generation + 1, {**self.entries, **new}) if new else self

    def changed(self, change: Change, digest: str) -> Table:
        """After a change.

        Args:
            change: that every replica has made.
            digest: of the content; empty where it was unloaded.
        """
        entries = {name: entry for name, entry in self.entries.items() if name != change.name}
        if change.source is not None:
            entries[change.name] = Entry(change.source, digest)
        return Table(self.generation + 1, entries)


@dataclass(frozen=True)
class Change:
    """What a request would change.

    Attributes:
        name: of the adapter.
        source: of its content; None to unload it.
    """

    name: str
    source: str | None


def is_change(request: Forwarded) -> bool:
    """Whether a request is one that changes what is loaded."""
    removes = request.method == "DELETE" and request.path.startswith(_ADAPTERS)
    return removes or (request.method, request.path) in _CHANGES


def change_of(request: Forwarded) -> Change | None:
    """What a request would change; None where its body does not say so, and is to be refused."""
    if request.method == "DELETE":
        return Change(request.path.removeprefix(_ADAPTERS), None)
    name_field, source_field = _CHANGES[request.method, request.path]
    body = _object(request.body)
    name = body.get(name_field)
    if not isinstance(name, str):
        return None
    if source_field is None:
        return Change(name, None)
    source = body.get(source_field)
    return Change(name, source) if isinstance(source, str) else None


def model_of(request: Forwarded) -> str | None:
    """The model that a request names, in its body or its path; None for none."""
    if request.method == "POST":
        found = _object(request.body).get("model")
        return found if isinstance(found, str) else None
    prefix, _, name = request.path.partition("/v1/models/")
    return unquote(name) if name and not prefix else None


def _object(body: bytes) -> dict[str, object]:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def follow(adapters: AdapterManager, table: Table) -> dict[str, str]:
    """Load, swap and unload until the adapters are those of `table`.

    A content is that of the table or it is not served: where a source cannot be read any more, or
    holds something else by now, the name is not loaded.

    Args:
        adapters: of this replica.
        table: of the fleet.

    Returns:
        why, by name, entries are not loaded.

    Raises:
        AdapterError: an entry that no replica has read before cannot be loaded.
    """
    loaded = {info.name: info.digest for info in adapters.list()}
    for name in loaded.keys() - table.entries.keys():
        adapters.unload(name)
    missing: dict[str, str] = {}
    for name, entry in table.entries.items():
        if name in loaded and loaded[name] == entry.digest:
            continue
        reason = _take(adapters, name, entry, name in loaded)
        if reason:
            missing[name] = reason
    return missing


def _take(adapters: AdapterManager, name: str, entry: Entry, known: bool) -> str:
    """Load one entry; gives back why that failed, or nothing."""
    try:
        info = (adapters.swap if known else adapters.load)(name, entry.source)
    except AdapterError as error:
        if not entry.digest:
            raise
        if known:
            adapters.unload(name)
        return str(error)
    if not entry.digest or info.digest == entry.digest:
        return ""
    adapters.unload(name)
    return (
        f"adapter '{name}': its source holds another content than the fleet's; load it again in "
        "place, or restore the source"
    )
