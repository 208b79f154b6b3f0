"""The names that rows call adapters by, and what reading one of them for the first time takes.

A name is entered before its source is read, so that it cannot be taken twice; who uses it
meanwhile waits for the thread that reads.  That thread holds no lock.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

from ..core.errors import AdapterError, AdapterExistsError, AdapterNotFoundError, ConfigError
from .activity import Operation
from .sources import AdapterResolver, AdapterSource
from .store import VersionStore, as_new
from .tiers.disk import is_passing, passing_told
from .version import AdapterInfo, Alias, Version
from .weights import AdapterWeights

#: PEFT's name for "no adapter" in a list of adapter names.
BASE_NAME = "__base__"

_NAMED_IN_ERRORS = 10


class AliasTable:
    """Names by what they point at.

    Args:
        store: of the contents; its lock guards the names too.
        resolver: gives the source of an unknown name; None for none.
    """

    def __init__(self, store: VersionStore, resolver: AdapterResolver | None) -> None:
        self.resolver = resolver
        self._store = store
        self._aliases: dict[str, Alias] = {}

    # --- under the lock -------------------------------------------------------------------------

    def all(self) -> tuple[Alias, ...]:
        """Every name, in the order of loading."""
        return tuple(self._aliases.values())

    def known(self, name: str) -> Alias:
        """What `name` points at.

        Raises:
            AdapterNotFoundError: it is unknown.
        """
        alias = self._aliases.get(name)
        if alias is None:
            some = ", ".join(f"'{n}'" for n in islice(self._aliases, _NAMED_IN_ERRORS)) or "none"
            more = len(self._aliases) - _NAMED_IN_ERRORS
            some += f" and {more} more" if more > 0 else ""
            raise AdapterNotFoundError(
                f"adapter '{name}'", f"is not loaded (loaded: {some})", "load it first"
            )
        return alias

    def points_at(self, name: str, version: Version) -> bool:
        """Whether `name` stands for that content now."""
        alias = self._aliases.get(name)
        return alias is not None and alias.version is version

    def forget(self, name: str) -> Alias:
        """Take `name` away from what it points at.

        Raises:
            AdapterNotFoundError: it is unknown.
        """
        alias = self.known(name)
        del self._aliases[name]
        self._store.unpoint(alias, f"adapter '{name}' was unloaded")
        return alias

    def _enter(self, name: str, source: AdapterSource | None, *, loading: bool) -> Alias:
        self._store.refuse_if_closed()
        if not isinstance(name, str):
            raise ConfigError(f"adapter name {name!r}", "is no text", "pass a string")
        if not name.strip() or name == BASE_NAME or not name.isprintable():
            reason = "is empty, reserved, or holds line breaks or the like"
            raise ConfigError(f"adapter name {name!r}", reason, "choose another name")
        found = self._aliases.get(name)
        if found is not None:
            raise AdapterExistsError(
                f"adapter '{name}'",
                f"is loaded already, from {found.origin}",
                "swap it, unload it first, or choose another name",
            )
        self._store.device.check_fits(name, 0)
        origin = "" if source is None else source.label
        alias = self._aliases[name] = Alias(name, source, origin, loading=loading)
        return alias

    # --- outside of it --------------------------------------------------------------------------

    def register(self, name: str, source: AdapterSource) -> Alias:
        """Enter a name whose source is read at its first use.

        Raises:
            AdapterExistsError: it is taken.
            AdapterCapacityError: there are no slots.
        """
        with self._store.lock:
            alias = self._enter(name, source, loading=False)
            self._store.announce(f"adapter '{name}' was registered")
            return alias

    def load(
        self, name: str, source: AdapterSource | None, read: Callable[[], AdapterWeights]
    ) -> AdapterInfo:
        """Enter a name and what `read` gives; neither where anything fails.

        Raises:
            AdapterExistsError: the name is taken.
            AdapterError: see `AdapterManager.load`.
        """
        with self._store.lock:
            alias = self._enter(name, source, loading=True)
        try:
            return self.publish(alias, read(), source, f"adapter '{name}' was loaded")
        finally:
            with self._store.changed:
                alias.loading = False
                if alias.version is None and self._aliases.get(name) is alias:
                    del self._aliases[name]
                self._store.changed.notify_all()

    def settled(self, name: str) -> Alias:
        """What `name` points at, as soon as no thread reads it for the first time.

        Raises:
            AdapterNotFoundError: it is unknown.
        """
        with self._store.changed:
            while True:
                self._store.refuse_if_closed()
                alias = self.known(name)
                if not alias.loading:
                    return alias
                self._store.changed.wait()

    def resolve(self, name: str) -> None:
        """See that `name` is known, by the resolver if it must be.

        Raises:
            AdapterNotFoundError: it is unknown, and to the resolver too.
        """
        with self._store.lock:
            if name in self._aliases or self.resolver is None or not name.strip():
                self.known(name)
                return
        source = self.resolver(name)
        with self._store.lock:
            if source is None or name in self._aliases:
                self.known(name)
                return
            self.register(name, source)

    def hold(self, name: str, *, briefly: bool = False) -> Version:
        """The content of `name`, read where it never was; it stays until it is released.

        Args:
            name: of it.
            briefly: no batch holds it; see `VersionStore.let_go`.

        Raises:
            AdapterNotFoundError: the name is unknown.
            AdapterBrokenError: it could not be read before.
            AdapterError: it cannot be read, or not at the moment; see `AdapterManager.load`.
        """
        while True:
            self.resolve(name)
            with self._store.changed:
                alias = self.settled(name)
                if alias.error is not None:
                    raise as_new(alias.error, alias.name)
                if alias.version is not None:
                    if briefly:
                        self._store.hold_briefly(alias.version)
                    else:
                        alias.version.batches += 1
                    return alias.version
                alias.loading = True
            self._read(alias)

    def _read(self, alias: Alias) -> None:
        source, error = alias.source, None
        assert source is not None
        try:
            with self._store.log.timed(Operation.READ), passing_told(alias.name, source):
                weights = self._store.disk.read(source)
                self.publish(alias, weights, source, f"adapter '{alias.name}' was read", first=True)
        except AdapterError as caught:
            # What may pass is tried again at the next use.
            error = None if is_passing(caught, source) else caught
            raise
        finally:
            with self._store.changed:
                # A swap meanwhile has given the name another content, which goes before.
                alias.loading, alias.error = False, None if alias.version is not None else error
                self._store.changed.notify_all()

    def publish(
        self,
        alias: Alias,
        weights: AdapterWeights,
        source: AdapterSource | None,
        reason: str,
        *,
        first: bool = False,
    ) -> AdapterInfo:
        """Let a name point at a content, which others may share; all or nothing.

        Args:
            alias: the name.
            weights: the content.
            source: where it was read.
            reason: for the listeners.
            first: it is the first use of a registered name: nothing is written into a slot yet, and
                a content that the name was given meanwhile stays.

        Raises:
            AdapterNotFoundError: the name was unloaded meanwhile.
            AdapterUnsupportedError: see `check_range`.
            AdapterCapacityError: no slot can hold it, or it has to stay in host memory and there
                is no room.
        """
        version = self._store.prepare(alias.name, weights)
        try:
            if not first:
                self._store.fill_slot(version, alias.version)
            with self._store.lock:
                self._store.refuse_if_closed()
                if self._aliases.get(alias.name) is not alias:
                    raise AdapterNotFoundError(
                        f"adapter '{alias.name}'", "was unloaded while it was read", "load it again"
                    )
                if first and alias.version is not None:
                    return alias.info()
                if source is None or alias.pinned:
                    self._store.host.check_can_keep(version)
                alias.source, alias.origin = source, weights.source
                alias.chat_template = weights.chat_template
                self._store.point(alias, version, reason)
                return alias.info()
        finally:
            self._store.discard(version)
