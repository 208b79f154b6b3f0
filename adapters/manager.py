"""The adapter manager: names for contents, from loading to the last batch, while batches run.

What lies where is the store's matter (`store.py`); here are the names.  A name points at one
content, and several may point at the same.  A swap points the name at another content; batches in
flight finish on the one they started with.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import torch

from ..core.errors import AdapterBusyError, ConfigError
from ..core.team import then_alone
from ..linear.batch import Batch
from ..linear.batch_class import BatchClass
from ..linear.registry import LayerRegistry
from .activity import Operation
from .aliases import BASE_NAME, AliasTable
from .base import BaseFacts, BaseWeights
from .disabled import is_disabled
from .lease import Lease
from .listing import AdapterListing
from .mixture import Mixture
from .packing import Packing
from .read import PlanCache, read_adapter
from .ready import PlanMaker, ReadyBatches, RowName, RowsBlock
from .side_thread import SideThread
from .sources import AdapterResolver, AdapterSource, SourceReader
from .store import VersionStore
from .tiers.disk import DiskTier, SourceFolders, passing_told
from .tiers.limits import TierLimits
from .version import AdapterInfo, AdapterMemory, Version
from .weights import AdapterWeights

__all__ = ["BASE_NAME", "AdapterManager", "AdapterMemory"]

AnySource = str | os.PathLike[str] | AdapterSource


class AdapterManager(AdapterListing):
    """The adapters of one served model.

    Args:
        registry: its places that take adapters.
        base: what reading checks an adapter against.
        limits: how many adapters fit the device and host memory.
        dtype: of the slots.
        device: of the slots.
        plan: makes (or finds) plans.
        folders: makes local folders of sources; None for `SourceReader()`.
        resolver: gives the source of a name that rows use and nobody registered; None for none.
        base_weights: the base model's, for adapters that cannot be read without them.
    """

    def __init__(
        self,
        registry: LayerRegistry,
        base: BaseFacts,
        *,
        limits: TierLimits,
        dtype: torch.dtype,
        device: torch.device,
        plan: PlanMaker,
        folders: SourceFolders | None = None,
        resolver: AdapterResolver | None = None,
        base_weights: BaseWeights | None = None,
    ) -> None:
        self._registry = registry
        self._base = base
        self._base_weights = base_weights
        self._plans = PlanCache()
        self._plan = plan
        disk = DiskTier(folders or SourceReader(), self._read)
        store = VersionStore(registry, disk, limits, dtype, device)
        super().__init__(AliasTable(store, resolver), store)
        self._batches = ReadyBatches(registry, self._aliases, self._store, plan, device)
        self._side_thread = SideThread("branchline-prefetch")

    @property
    def resolver(self) -> AdapterResolver | None:
        """Gives the source of a name that is used and unknown; may be set at any time."""
        return self._aliases.resolver

    @resolver.setter
    def resolver(self, resolver: AdapterResolver | None) -> None:
        self._aliases.resolver = resolver

    # --- life cycle -----------------------------------------------------------------------------

    @then_alone
    def load(self, name: str, source: AnySource) -> AdapterInfo:
        """Read the adapter at `source` and serve it as `name`; all or nothing (I8).

        It takes a slot where one is free; if not, the first batch that uses it gives it one.
        A content that is loaded already, under whatever name, is shared and not kept twice.

        Args:
            name: what rows call it.
            source: a PEFT folder, or what `AdapterSource.parse` reads.

        Raises:
            AdapterExistsError: the name is taken.
            AdapterNotFoundError: nothing lies there.
            AdapterSourceError, AdapterFormatError, AdapterUnsupportedError, AdapterMismatchError:
                see `SourceReader.resolve`, `read_adapter` and `check_range`.
            AdapterCapacityError: its rank is higher than that of any slot, or there are none.
        """
        parsed = AdapterSource.parse(source)
        with self._store.log.timed(Operation.LOAD):
            return self._aliases.load(name, parsed, lambda: self._read_source(name, parsed))

    @then_alone
    def install(self, name: str, weights: AdapterWeights) -> AdapterInfo:
        """Serve weights that are in memory; having no source, they stay in host memory.

        Args:
            name: what rows call them.
            weights: checked against the base model.

        Raises:
            AdapterExistsError: the name is taken.
            AdapterUnsupportedError: see `check_range`.
            AdapterCapacityError: as in `load`, or no room in host memory.
        """
        return self._aliases.load(name, None, lambda: weights)

    def register(self, name: str, source: AnySource) -> AdapterInfo:
        """Serve what lies at `source` as `name`; it is read and checked at its first use.

        Args:
            name: what rows call it.
            source: as in `load`.

        Raises:
            AdapterExistsError: the name is taken.
            AdapterSourceError: `source` is no source.
            AdapterCapacityError: there are no slots.
        """
        parsed = AdapterSource.parse(source)
        return self._aliases.register(name, parsed).info()

    @then_alone
    def swap(self, name: str, source: AnySource) -> AdapterInfo:
        """Point `name` at what lies at `source`; batches in flight finish on the old version.

        Args:
            name: in use already.
            source: as in `load`.

        Raises:
            AdapterNotFoundError: the name is unknown, or nothing lies there.
            AdapterSourceError, AdapterFormatError, AdapterUnsupportedError, AdapterMismatchError,
            AdapterCapacityError: as in `load`.
        """
        parsed = AdapterSource.parse(source)
        with self._store.log.timed(Operation.SWAP):
            alias = self._aliases.settled(name)
            weights = self._read_source(name, parsed)
            return self._aliases.publish(alias, weights, parsed, f"adapter '{name}' was swapped")

    @then_alone
    def reload(self, name: str) -> AdapterInfo:
        """Read the source of `name` again, and take what lies there now; mends a broken adapter.

        Raises:
            AdapterNotFoundError: the name is unknown, or nothing lies there.
            ConfigError: it has no source.
            AdapterSourceError, AdapterFormatError, AdapterUnsupportedError, AdapterMismatchError,
            AdapterCapacityError: as in `load`.
        """
        source = self._aliases.settled(name).source
        if source is None:
            raise ConfigError(
                f"adapter '{name}'", "came from memory, not from a source", "unload it instead"
            )
        return self.swap(name, source)

    def unload(self, name: str, timeout: float | None = None) -> None:
        """Forget `name` at once; its memory is free when no batch uses it any more.

        Args:
            name: to forget; other names of the same content stay.
            timeout: seconds to wait for those batches; None does not wait.

        Raises:
            AdapterNotFoundError: the name is unknown.
            AdapterBusyError: batches still use it after `timeout`; the name is forgotten all the
                same, and the memory freed when they end.
        """
        with self._store.log.timed(Operation.UNLOAD), self._store.changed:
            self.refuse_if_closed()
            alias = self._aliases.forget(name)
            version = alias.version
            if timeout is None or version is None:
                return
            if not self._store.changed.wait_for(lambda: not version.drains, timeout):
                raise AdapterBusyError(
                    f"adapter '{name}'",
                    f"batches in flight ({version.batches}) still use it after {timeout:g} s",
                    "its memory is freed when they end; wait longer, or end them (a rows() block "
                    "of this thread counts too)",
                )

    @then_alone
    def pin(self, name: str) -> AdapterInfo:
        """Keep `name` where it lies, in a slot or in host memory, until `unpin`.

        One that lies on disk is brought to host memory first.

        Raises:
            AdapterNotFoundError: the name is unknown.
            AdapterCapacityError: what is pinned already leaves no room in host memory.
            AdapterError: it is broken, or cannot be read; see `rows`.
        """
        with self._held(name) as version, self._store.lock:
            alias = self._aliases.known(name)
            self._store.host.check_can_keep(version)
            alias.pinned = True
            self._store.follow(version)
        return self.info(name)

    def unpin(self, name: str) -> AdapterInfo:
        """Let `name` be evicted again.

        Raises:
            AdapterNotFoundError: the name is unknown.
        """
        return self._change(name, pinned=False)

    def set_priority(self, name: str, priority: int) -> AdapterInfo:
        """Set what the eviction policy "priority" goes by; the default is 0.

        Raises:
            AdapterNotFoundError: the name is unknown.
            ConfigError: it is no integer.
        """
        if type(priority) is not int:
            raise ConfigError(
                f"priority {priority!r} of adapter '{name}'", "is no integer", "pass an integer"
            )
        return self._change(name, priority=priority)

    def prefetch(self, names: Iterable[str]) -> tuple[Future[AdapterInfo], ...]:
        """Bring adapters to host memory, and into free slots, on a thread beside the batches.

        Returns:
            by name, what tells when it is there; or raises what `rows` would.

        Raises:
            AdapterNotFoundError: a name is unknown.
            ConfigError: `names` are not names.
        """
        wanted = tuple(dict.fromkeys(names))
        if isinstance(names, str) or not all(isinstance(name, str) for name in wanted):
            raise ConfigError(f"prefetch({names!r})", "is no list of names", "pass one")
        for name in wanted:
            self._aliases.resolve(name)
        with self._store.lock:
            self.refuse_if_closed()
            return tuple(self._side_thread.submit(self._fetch, name) for name in wanted)

    def refuse_if_computed_with(self, linear: str) -> None:
        """Refuse to change the weights of a linear that went into adapters (DoRA).

        Raises:
            ConfigError: they did.
        """
        found = self._store.computed_with(linear)
        if found:
            raise ConfigError(
                f"linear '{linear}'",
                "its weights went into " + ", ".join(f"adapter '{v.label}'" for v in found),
                "unload what was computed with them, requantize, then load it again",
            )

    # --- batches --------------------------------------------------------------------------------

    def rows(
        self,
        names: Sequence[RowName],
        *,
        tokens: Sequence[int] | None = None,
        logits: Sequence[int] | None = None,
    ) -> AbstractContextManager[Batch]:
        """Forwards inside take one adapter (or None) for each row of their batch.

        The choice holds for this thread (or task) only.  The versions that the names point at now
        are kept until the block ends, whatever is loaded, swapped or unloaded meanwhile.  Those
        without a slot are given one; idle adapters make room.

        Args:
            names: one name, None, a lease, or a mixture (``{'sql': 0.7, 'tone': 0.3}``) for every
                row.
            tokens: where the rows are packed, one after the other in one sequence (as continuous
                batching runs them): how many tokens each has.  Inputs are then (1, tokens, ...).
            logits: of packed rows, places in the sequence of the tokens that the head is fed, where
                those are not all.

        Raises:
            AdapterNotFoundError: a name is unknown.
            AdapterUnsupportedError: a packed batch with an activated LoRA.
            AdapterCapacityError: the batch, with others in flight, needs more slots than there are.
            AdapterBrokenError: an adapter's source is gone or has changed.
            AdapterSourceError: it cannot be read at the moment; the next block tries again.
            AdapterError: a registered adapter cannot be read; see `load`.
            BatchError: not a sequence of names, or an empty one; or a block of this model is open
                in this thread (or task) already, which two generators in turn would mix up.
        """
        owner = self._registry.owner
        if is_disabled(owner) and not isinstance(names, str | Mapping | Mixture):
            names = [None for _ in names]
        if tokens is not None:
            names = tuple(names)
        packing = Packing.of(tokens, logits, names)
        return RowsBlock(self._batches, owner, names, alone=True, packing=packing)

    def rows_of_call(self, names: Sequence[RowName]) -> AbstractContextManager[Batch]:
        """As `rows`, for one call that ends before anything else can run; overrides a block."""
        return RowsBlock(self._batches, self._registry.owner, names, alone=False)

    def lease(self, name: str) -> Lease:
        """Keep what `name` points at now for a request that takes several batches.

        `rows` takes the lease in the place of the name, until it is released: the content stays,
        whatever the name points at meanwhile.

        Raises:
            AdapterError: as in `rows`.
        """
        with self._held(name, to_host=True) as version, self._store.lock:
            version.leases += 1
            return Lease(self._store, version, name)

    @contextmanager
    def held_in_slots(self, names: Sequence[str]) -> Iterator[tuple[Version, ...]]:
        """Keep the contents of `names` in slots, briefly and for no batch: nothing counts as used.

        Idle adapters make room, as for a batch; batches that need the slots wait.

        Raises:
            AdapterCapacityError: batches in flight leave too few slots now.
            AdapterError: as in `rows`.
        """
        with ExitStack() as held:
            versions = tuple(held.enter_context(self._held(name)) for name in names)
            self._store.place(tuple(dict.fromkeys(versions)), wait=False)
            yield versions

    def base_batch(self) -> Batch:
        """The batch of forwards that name no adapter: base rows, any number of them."""
        self.refuse_if_closed()
        return Batch(self._plan({}, False, BatchClass()))

    def close(self) -> None:
        """Refuse everything from now on: the model was unwrapped.

        Raises:
            ConfigError: batches are in flight.
        """
        with self._store.lock:
            if self._batches.open:
                raise ConfigError(
                    "unwrap", f"{self._batches.open} batches are in flight", "let them end first"
                )
            self._store.closed = True
            self._side_thread.close()

    def refuse_if_closed(self) -> None:
        """Refuse where the model was unwrapped.

        Raises:
            ConfigError: it was.
        """
        self._store.refuse_if_closed()

    # --- inside ---------------------------------------------------------------------------------

    def _read_source(self, name: str, source: AdapterSource) -> AdapterWeights:
        with passing_told(name, source):
            return self._store.disk.read(source)

    def _read(self, folder: Path) -> AdapterWeights:
        return read_adapter(
            folder,
            self._base,
            max_rank=self._store.limits.width,
            base_weights=self._base_weights,
            plans=self._plans,
        )

    def _change(self, name: str, **changes: bool | int) -> AdapterInfo:
        with self._store.lock:
            self.refuse_if_closed()
            alias = self._aliases.known(name)
            for attribute, value in changes.items():
                setattr(alias, attribute, value)
            if alias.version is not None:
                self._store.follow(alias.version)
                self._store.host.trim()
            return alias.info()

    @contextmanager
    def _held(self, name: str, *, to_host: bool = False) -> Iterator[Version]:
        """The content of `name`, in memory, and kept there."""
        version = self._aliases.hold(name, briefly=True)
        try:
            self._store.bring_to_memory(version, to_host=to_host)
            yield version
        finally:
            self._store.let_go(version)

    def _fetch(self, name: str) -> AdapterInfo:
        with self._held(name) as version:
            self._store.place_if_free(version)
        return self.info(name)
