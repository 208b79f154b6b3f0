"""The versions of a served model: one for each content, in use by batches, moving between tiers.

One lock guards all that is known of them.  It is never held while a source is read or a slot is
written: the version says that a thread is at it, and whoever needs it too waits for that thread,
which itself waits for nothing.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from types import MappingProxyType
from weakref import WeakValueDictionary

import torch

from ..core.errors import (
    AdapterBrokenError,
    AdapterCapacityError,
    AdapterError,
    ConfigError,
)
from ..linear.registry import Holding, LayerRegistry
from .activity import Operation, OperationLog
from .branch import check_range, holder_of
from .shards import own_share
from .tiers.device import DeviceTier, Move
from .tiers.disk import DiskTier
from .tiers.host import HostTier, page_locked
from .tiers.limits import TierLimits
from .version import Alias, Footprint, Version
from .weights import AdapterWeights


class VersionStore:
    """Holds versions by their digest, from the first name that points at one to its last batch.

    Args:
        registry: is told what is held where.
        disk: reads what is in no memory.
        limits: of device and host memory.
        dtype: of the slots.
        device: of the slots.
    """

    def __init__(
        self,
        registry: LayerRegistry,
        disk: DiskTier,
        limits: TierLimits,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._registry = registry
        self._dtype = dtype
        self._page_locked = device.type == "cuda"
        self.limits = limits
        self.disk = disk
        self.log = OperationLog()
        self.host = HostTier(limits)
        self.device = DeviceTier(registry, limits, dtype, device)
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.draining: set[Version] = set()
        self.forgotten_leases: deque[Version] = deque()
        self._by_digest: dict[str, Version] = {}
        # The places of a large model are many; adapters of one shape share what is said of them.
        self._footprints: WeakValueDictionary[tuple[object, ...], Footprint] = WeakValueDictionary()
        self._briefly_held: set[Version] = set()
        self._tick = 0
        self.closed = False

    def refuse_if_closed(self) -> None:
        """Refuse where the model was unwrapped.

        Raises:
            ConfigError: it was.
        """
        if self.closed:
            raise ConfigError("this served model", "was unwrapped", "wrap the model again")

    # --- contents -------------------------------------------------------------------------------

    def prepare(self, name: str, weights: AdapterWeights) -> Version:
        """A version of `weights` that is not in the store yet.

        Args:
            name: for messages.
            weights: checked against the base model.

        Raises:
            AdapterUnsupportedError: see `check_range` and `own_share`.
            AdapterCapacityError: no slot can hold it.
        """
        self.device.check_fits(name, weights.rank)
        check_range(name, weights, self._dtype)
        return Version(self._placed(name, weights), self._footprint(weights))

    def fill_slot(self, version: Version, replaces: Version | None) -> None:
        """Write a version that was prepared into a slot, where one is free.

        Args:
            version: not in the store yet.
            replaces: what its name points at now, if anything.  For that the spare slot may be
                taken, and while batches use it, there must be a slot: their successors would be
                refused otherwise.

        Raises:
            AdapterCapacityError: there must be one, and is none.
        """
        with self.lock:
            if version.digest in self._by_digest:
                return
            move = self.device.reserve_free(version, for_swap=replaces is not None)
            if move is None and replaces is not None and replaces.slot is not None:
                moves = self.device.reserve([version]) if replaces.batches else []
            else:
                moves = [] if move is None else [move]
        self._write(moves)

    def point(self, alias: Alias, version: Version, reason: str) -> Version:
        """Let a name point at a content; what it pointed at before goes, or drains.

        Called under the lock.  All is done before slots are cleared, which alone may fail.

        Args:
            alias: the name; its other fields are up to date.
            version: prepared.
            reason: for the listeners.

        Returns:
            the version in the store that has this content.
        """
        old, known = alias.version, self._by_digest.get(version.digest)
        added: dict[int, Holding] = {}
        if known is None:
            known = self._by_digest[version.digest] = version
            self._enter(version, old)
            added[version.key] = Holding(alias.name, version.footprint.layers)
        elif known.weights is None and version.weights is not None:
            self.host.put(known, version.weights)
        known.error = alias.error = None
        alias.version = known
        known.names[alias.name] = alias
        if known.drains:
            self.device.set_draining(known, False)
            self.draining.discard(known)
        dropped = set() if old in (None, known) else self._drop(old, alias, added)
        self.follow(known)
        self._settle(added, dropped, reason)
        return known

    def unpoint(self, alias: Alias, reason: str) -> None:
        """Let a name point at nothing; called under the lock.  See `point`."""
        version = alias.version
        added: dict[int, Holding] = {}
        dropped = set() if version is None else self._drop(version, alias, added)
        self._settle(added, dropped, reason)

    def announce(self, reason: str) -> None:
        """Tell the listeners of a change that no version has part in; called under the lock."""
        self._settle({}, set(), reason)

    def computed_with(self, place: str) -> list[Version]:
        """Those that the base's weights of one place went into."""
        with self.lock:
            known = self._by_digest.values()
            return [v for v in known if v.uses_base and place in v.footprint.layers]

    def follow(self, version: Version) -> None:
        """A name has come or gone, or its pin or priority has changed; called under the lock."""
        version.pinned = any(alias.pinned for alias in version.names.values())
        version.priority = max((a.priority for a in version.names.values()), default=0)
        self.device.follow(version)
        self.host.follow(version)

    def _enter(self, version: Version, old: Version | None) -> None:
        assert version.weights is not None
        # A new version of a name is asked for as often as the old one was.
        version.hits = 0 if old is None else old.hits
        version.last_use = None if old is None else old.last_use
        version.tick = self._tick
        self.host.put(version, version.weights)

    def _drop(self, version: Version, alias: Alias, added: dict[int, Holding]) -> set[Version]:
        """Take a name from a version; gives the version where that was all that kept it."""
        del version.names[alias.name]
        version.last_alias = alias
        if version.names:
            # The registry may know it by the name that it has lost.
            added[version.key] = Holding(version.label, version.footprint.layers)
            self.follow(version)
            return set()
        if version.in_use:
            self.device.set_draining(version, True)
            self.draining.add(version)
            return set()
        return {version}

    def _settle(self, added: dict[int, Holding], gone: set[Version], reason: str) -> None:
        freed = [slot for slot in map(self._forget, gone) if slot is not None]
        freed += self.device.restore_spares()
        self.host.trim()
        self._registry.set_holdings(added, {version.key for version in gone}, reason)
        self.changed.notify_all()
        for slot in {*freed, *self.device.unclean}:
            self.device.clear(slot)

    def _forget(self, version: Version) -> int | None:
        """Leave nothing of a version; gives the slot that is to be cleared."""
        slot = self.device.leave(version)
        version.gone, version.drains = True, False
        del self._by_digest[version.digest]
        self.draining.discard(version)
        self.host.remove(version)
        return slot

    def discard(self, version: Version) -> None:
        """Leave nothing of a version that was prepared, and then not entered."""
        with self.lock:
            if version.gone or version is self._by_digest.get(version.digest):
                return
            version.gone = True
            slot = self.device.leave(version)
            if slot is not None:
                self.device.clear(slot)

    # --- use ------------------------------------------------------------------------------------

    def use(self, versions: Iterable[Version]) -> None:
        """Count one batch on each; called under the lock, in every batch."""
        self._tick += 1
        tick, now = self._tick, time.time()
        for version in versions:
            version.batches += 1
            version.hits += 1
            version.tick = tick
            version.last_use = now

    def release(self, versions: Iterable[Version]) -> None:
        """The batch on each has ended; called under the lock, at the end of every batch."""
        while self.forgotten_leases:
            self.end_lease(self.forgotten_leases.popleft())
        gone = set()
        for version in versions:
            version.batches -= 1
            if version.drains and not version.in_use:
                gone.add(version)
        self._end(gone)

    def _end(self, gone: set[Version]) -> None:
        if gone:
            names = ", ".join(f"'{version.label}'" for version in gone)
            self._settle({}, gone, f"the last use of an older {names} ended")
        elif self.host.is_over:
            self.host.trim()

    def end_lease(self, version: Version) -> None:
        """One request less goes on using a version."""
        with self.lock:
            version.leases -= 1
            self._end({version} if version.drains and not version.in_use else set())

    def hold_briefly(self, version: Version) -> None:
        """Keep a version for no batch until `let_go`; called under the lock.

        Whoever holds one so waits for no slot.
        """
        version.batches += 1
        version.brief_holds += 1
        self._briefly_held.add(version)

    def let_go(self, version: Version) -> None:
        """End a brief hold; a batch may wait for the slot."""
        with self.changed:
            version.brief_holds -= 1
            if not version.brief_holds:
                self._briefly_held.discard(version)
            self.release([version])
            self.changed.notify_all()

    def bring_to_memory(self, version: Version, *, to_host: bool = False) -> None:
        """Read a version that a batch holds from its source, where it is in no memory.

        Args:
            version: held.
            to_host: also where it lies in a slot alone, which it may have to leave.

        Raises:
            AdapterSourceError: it cannot be read at the moment; the next batch tries again.
            AdapterBrokenError: it cannot come back; every later batch is told so at once.
        """
        with self.changed:
            self.changed.wait_for(lambda: not version.loading)
            if version.error is not None:
                raise as_new(version.error, version.label)
            in_slot = version.slot is not None and not to_host
            if version.weights is not None or in_slot:
                return
            version.loading = True
            sources = version.sources
        weights = error = None
        try:
            with self.log.timed(Operation.READ):
                found = self.disk.read_again(version.label, version.digest, sources)
            weights = self._placed(version.label, found)
        except AdapterBrokenError as caught:
            error = caught
            raise
        finally:
            with self.changed:
                version.loading = False
                # Whoever loaded the same content meanwhile has mended it.
                if version.weights is None:
                    version.error = error
                    if weights is not None:
                        self.host.put(version, weights)
                        self.host.trim()
                self.changed.notify_all()

    def place(self, versions: Sequence[Version], *, wait: bool = True) -> None:
        """Give each of a batch's versions a slot, all or none.

        Args:
            versions: held by the batch, and in memory.
            wait: for slots that come free by themselves; not who holds versions briefly.

        Raises:
            AdapterCapacityError: they, or other batches in flight, need more slots than there are.
        """
        with self.changed:
            moves = None
            while moves is None:
                self.changed.wait_for(lambda: not any(version.moving for version in versions))
                try:
                    moves = self._reserve(versions)
                except AdapterCapacityError:
                    # A slot that is being written, or held by no batch, is idle a moment later.
                    if not wait or not (self.device.writing or self._hold_ends(versions)):
                        raise
                    self.changed.wait()
        if moves:
            self._write(moves)

    def _reserve(self, versions: Sequence[Version]) -> list[Move]:
        missing = [version for version in versions if version.slot is None]
        movable = [
            version
            for version in versions
            if version.slot is not None and version.batches == 1 and version.weights is not None
        ]
        return self.device.reserve(missing, movable) if missing else []

    def _hold_ends(self, versions: Sequence[Version]) -> bool:
        """Whether a slot is kept from a batch of `versions` by a brief hold alone."""
        return any(
            version.slot is not None
            and version.batches - version.brief_holds == (version in versions)
            for version in self._briefly_held
        )

    def place_if_free(self, version: Version) -> None:
        """Give a version a slot, where one is free; it is held, and in memory."""
        with self.changed:
            self.changed.wait_for(lambda: not version.moving)
            if version.slot is not None or version.weights is None:
                return
            move = self.device.reserve_free(version)
        if move is not None:
            self._write([move])

    def _write(self, moves: Sequence[Move]) -> None:
        written: set[Move] = set()
        began = time.perf_counter()
        try:
            for move in moves:
                self.device.write(move)
                written.add(move)
        finally:
            seconds = time.perf_counter() - began
            with self.changed:
                self.device.count_loads(len(written), seconds)
                for move in moves:
                    (self.device.finish if move in written else self.device.cancel)(move)
                self.changed.notify_all()
                for move in moves:
                    if move not in written:
                        self.device.clear(move.slot)

    def _footprint(self, weights: AdapterWeights) -> Footprint:
        holders = {name: holder_of(parts) for name, parts in sorted(weights.modules.items())}
        key = tuple((name, holder.parts, holder.shrink_rank) for name, holder in holders.items())
        with self.lock:
            found = self._footprints.get(key)
            if found is None:
                places = self._registry.places
                mask = torch.zeros(len(places), dtype=torch.bool)
                mask[[places[name].index for name in holders]] = True
                found = Footprint(MappingProxyType(holders), mask)
                self._footprints[key] = found
            return found

    def _placed(self, name: str, weights: AdapterWeights) -> AdapterWeights:
        own = own_share(name, weights, self._registry.layers)
        return page_locked(own) if self._page_locked else own


def as_new(error: AdapterError, name: str) -> AdapterError:
    """An error that was kept, to be raised once more: an exception object serves one thread."""
    subject = f"adapter '{name}'"
    # What was read before it had a name is called by its place.
    reason = error.reason if error.subject == subject else f"{error.subject}: {error.reason}"
    remedy = error.remedy if "reload" in error.remedy else f"{error.remedy}, then reload it"
    return AdapterBrokenError(subject, reason, remedy)
