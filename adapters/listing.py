"""What is told of the adapters of a served model: listings, sizes, configs, identities."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from ..core.errors import AdapterNotFoundError
from .activity import AdapterCounters
from .aliases import AliasTable
from .store import VersionStore
from .version import AdapterInfo, AdapterMemory, AdapterState, Tier


class AdapterListing:
    """Looks, and changes nothing; see `AdapterManager`.

    Args:
        aliases: the names.
        store: the contents.
    """

    def __init__(self, aliases: AliasTable, store: VersionStore) -> None:
        self._aliases = aliases
        self._store = store

    def list(self) -> tuple[AdapterInfo, ...]:
        """Every adapter that has a name, in the order of loading."""
        with self._store.lock:
            aliases = self._aliases.all()
        infos = []
        for alias in aliases:
            # One by one: a batch must not wait for thousands of lines.
            with self._store.lock:
                infos.append(alias.info())
        return tuple(infos)

    def info(self, name: str) -> AdapterInfo:
        """One line of the listing.

        Raises:
            AdapterNotFoundError: the name is unknown.
        """
        with self._store.lock:
            return self._aliases.known(name).info()

    def config(self, name: str) -> Mapping[str, Any]:
        """The decoded adapter_config.json of a name's content, as the first of its names had it.

        Raises:
            AdapterNotFoundError: the name is unknown, or was not read yet.
        """
        with self._store.lock:
            version = self._aliases.known(name).version
            if version is None:
                raise AdapterNotFoundError(
                    f"adapter '{name}'", "has not been read yet", "use it, or prefetch it"
                )
            return version.config

    def chat_template(self, name: str) -> str | None:
        """The chat template that the source of a name brought; None for none.

        Raises:
            AdapterNotFoundError: the name is unknown.
        """
        with self._store.lock:
            return self._aliases.known(name).chat_template

    def draining(self) -> tuple[AdapterInfo, ...]:
        """Versions that no name points at any more, and batches still use."""
        with self._store.lock:
            drained = sorted(self._store.draining, key=lambda version: version.key)
            return tuple(v.info(v.last_alias) for v in drained if v.last_alias is not None)

    def memory(self) -> AdapterMemory:
        """What adapters take on the device and in host memory."""
        store = self._store
        with store.lock:
            return AdapterMemory(
                store.device.nbytes,
                store.host.nbytes,
                store.host.count,
                len(store.device.slots),
                store.device.occupied,
            )

    def counters(self) -> AdapterCounters:
        """What happened to adapters since the model was wrapped."""
        store = self._store
        with store.lock:
            return AdapterCounters(
                store.log.counts(),
                store.device.loads,
                store.device.evictions,
                store.host.evictions,
            )

    def states(self) -> Mapping[tuple[AdapterState, Tier], int]:
        """How many names stand where in their life, and in which tier."""
        with self._store.lock:
            aliases = self._aliases.all()
        found: Counter[tuple[AdapterState, Tier]] = Counter()
        for alias in aliases:
            # One by one, as in `list`.
            with self._store.lock:
                found[alias.state, alias.tier] += 1
        return found

    def live(self, names: Iterable[str]) -> dict[int, str]:
        """Identities of the contents behind `names`, for the planner.

        Raises:
            AdapterNotFoundError: a name is unknown, or was not read yet.
        """
        found: dict[int, str] = {}
        with self._store.lock:
            for name in names:
                version = self._aliases.known(name).version
                if version is None:
                    raise AdapterNotFoundError(
                        f"adapter '{name}'", "was not read yet", "use it, or prefetch it"
                    )
                found[version.key] = name
        return found
