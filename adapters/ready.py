"""Batches that are ready to run: what a list of names stands for, kept while nothing changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from ..core.errors import AdapterUnsupportedError, BatchError
from ..linear.batch import Batch, BatchMemo, BatchPlan, BatchScope, MixedRows, active_batch
from ..linear.batch_class import BatchClass
from ..linear.parts import Part
from ..linear.registry import LayerRegistry
from .aliases import BASE_NAME, AliasTable
from .invocation import Invocations
from .lease import Lease
from .mixture import Mixture
from .packing import PackedRows, Packing
from .store import VersionStore
from .version import Version

_KEPT = 256
_PACKINGS_KEPT = 8
# Asked for every batch: whether names are no list at all, and what spares the question.
_NO_LISTS = (str, Mapping, Mixture)
_USUAL = (list, tuple)
_ROWS = (str, Mixture, Version)

#: What one row may take.
RowName = str | Mixture | Mapping[str, float] | Lease | None
# Requests that hold leases of one content are alike.
Names = tuple[str | Mixture | Version | None, ...]
#: Makes (or finds) the plan for the adapters of a batch, whether it has mixtures, and its class.
PlanMaker = Callable[[Mapping[int, str], bool, BatchClass], BatchPlan]


@dataclass(frozen=True, eq=False)
class ReadyBatch:
    """What rows of these names need.

    Attributes:
        epoch: of the registry, when the plan was asked for.
        hooks: `LayerRegistry.hooks_unseen` then.
        versions: the different ones.
        lie_in: the slot of each.
        plan: for them, in a batch that is not packed: how many tokens its rows have is not known.
        plan_of: for them, in a batch of another class.
        named: by row, whether it has an adapter.
        slots: int32 (places, rows), on the device; see `Batch.slots`.
        mixed: see `Batch.mixed`.
        invocations: by row, the tokens that its adapter waits for; empty where no row waits.
        memo: of all batches that it begins.
        packed: what its packed batches share, by their packings, and their plans; the latest.
        plans: of packed batches, by class.
    """

    epoch: int
    hooks: tuple[str | int, ...]
    versions: tuple[Version, ...]
    lie_in: tuple[int | None, ...]
    plan: BatchPlan
    plan_of: Callable[[BatchClass], BatchPlan]
    named: tuple[bool, ...]
    slots: torch.Tensor
    mixed: tuple[MixedRows, ...] = ()
    invocations: tuple[tuple[int, ...] | None, ...] = ()
    memo: BatchMemo = field(default_factory=BatchMemo)
    packed: dict[Packing, tuple[PackedRows, BatchPlan]] = field(default_factory=dict)
    plans: dict[BatchClass, BatchPlan] = field(default_factory=dict)

    def begin(self, rows: int, packing: Packing | None) -> Batch:
        """A batch of its own for one block.

        Raises:
            AdapterUnsupportedError: a packed batch of an activated LoRA, which would have to know
                the tokens of each row.
        """
        if packing is not None:
            return self._packed(packing)
        tokens = Invocations(self.invocations) if self.invocations else None
        return Batch(self.plan, rows, self.slots, self.memo, mixed=self.mixed, tokens=tokens)

    def _packed(self, packing: Packing) -> Batch:
        if self.invocations:
            raise AdapterUnsupportedError(
                "a packed batch",
                "has a row of an activated LoRA, which acts from its invocation tokens on",
                "run its rows in a batch that is not packed",
            )
        found = self.packed.get(packing)
        if found is None:
            # What packed rows remember follows from their plan: they keep the one they began with.
            found = PackedRows.of(self.slots, self.mixed, packing), self._plan_for(packing)
            if len(self.packed) >= _PACKINGS_KEPT:
                # Another thread may have been quicker.
                self.packed.pop(next(iter(tuple(self.packed))), None)
            self.packed[packing] = found
        rows, plan = found
        return rows.begin(plan)

    def _plan_for(self, packing: Packing) -> BatchPlan:
        tokens = packing.tokens
        adapted = sum(n for n, named in zip(tokens, self.named, strict=True) if named)
        batch = BatchClass.of(sum(tokens), adapted)
        plan = self.plans.get(batch)
        if plan is None:
            plan = self.plans[batch] = self.plan_of(batch)
        return plan


class ReadyBatches:
    """Makes them, keeps the latest, and counts who uses what.

    Args:
        registry: tells whether anything has changed.
        aliases: the names.
        store: the contents.
        plan: makes (or finds) plans.
        device: of the slots.
    """

    def __init__(
        self,
        registry: LayerRegistry,
        aliases: AliasTable,
        store: VersionStore,
        plan: PlanMaker,
        device: torch.device,
    ) -> None:
        self._registry = registry
        self._aliases = aliases
        self._store = store
        self._plan = plan
        self._device = device
        self._kept: dict[Names, ReadyBatch] = {}
        self.open = 0

    def acquire(self, names: Sequence[RowName]) -> ReadyBatch:
        """What rows of these names need, counted as in use until `release`.

        Raises:
            AdapterError, BatchError: see `AdapterManager.rows`.
        """
        key = _hashable(names)
        with self._store.lock:
            self._store.refuse_if_closed()
            self.open += 1
            batch = self._find(key)
            if batch is not None:
                self._store.use(batch.versions)
                return batch
        with ExitStack() as undo:
            undo.callback(self._count, -1)
            _check_names(names, key)
            made = self._make(key)
            undo.pop_all()
        return made

    def _count(self, change: int) -> None:
        with self._store.lock:
            self.open += change

    def release(self, batch: ReadyBatch) -> None:
        """The batch has ended."""
        with self._store.lock:
            self.open -= 1
            self._store.release(batch.versions)

    def _find(self, names: Names) -> ReadyBatch | None:
        batch = self._kept.get(names)
        if batch is None:
            return None
        if batch.epoch != self._registry.epoch or batch.hooks != self._registry.hooks_unseen():
            return None
        for version, slot in zip(batch.versions, batch.lie_in, strict=True):
            if version.slot != slot:
                return None
        return batch

    def _make(self, names: Names) -> ReadyBatch:
        held: dict[str | Version | None, Version] = {}
        try:
            for name in _adapters_of(names):
                held[name] = self._hold(name)
            called = {v: v.label if n is v else n for n, v in held.items()}
            for version in called:
                self._store.bring_to_memory(version)
            self._store.place(tuple(called))
            epoch, hooks = self._registry.epoch, self._registry.hooks_unseen()
            mixtures = any(isinstance(name, Mixture) for name in names)
            live = {version.key: str(name) for version, name in called.items()}
            plan_of = partial(self._plan, live, mixtures)
            named = tuple(name is not None and name != BASE_NAME for name in names)
            plan = plan_of(BatchClass.of(len(named), sum(named), known=False))
            chosen = [None if isinstance(n, Mixture) else held.get(n) for n in names]
            slots = self._slots(chosen)
            lie_in = tuple(version.slot for version in called)
            invocations = tuple(v.invocation or None if v else None for v in chosen)
            batch = ReadyBatch(
                epoch, hooks, tuple(called), lie_in, plan, plan_of, named, slots,
                self._mixed(names, held), invocations if any(invocations) else (),
            )  # fmt: skip
            with self._store.lock:
                self._store.use(batch.versions)
                # What names point at may have changed before the epoch was read.
                if all(n is v or self._aliases.points_at(str(n), v) for n, v in held.items()):
                    self._keep(names, batch)
        finally:
            with self._store.lock:
                # What was held by its name is held by the batch now, or not at all.
                self._store.release(held.values())
        return batch

    def _hold(self, name: str | Version) -> Version:
        if isinstance(name, str):
            return self._aliases.hold(name)
        with self._store.lock:
            # Its lease may have ended since the row was looked at.
            if not name.in_use:
                raise BatchError(
                    f"adapter '{name.label}'", "was leased, and the lease has ended", "take another"
                )
            name.batches += 1
        return name

    def _slots(self, chosen: Sequence[Version | None]) -> torch.Tensor:
        return slots_by_place(chosen, len(self._registry.places), self._device)

    def _mixed(
        self, names: Names, held: Mapping[str | Version | None, Version]
    ) -> tuple[MixedRows, ...]:
        """The rows of mixtures: first the first adapter of each, then the second, and so on."""
        mixtures = [name.weights if isinstance(name, Mixture) else () for name in names]
        for name in dict.fromkeys(name for mixture in mixtures for name, _ in mixture):
            _check_mixes(name, held[name])
        passes = []
        for place in range(max(map(len, mixtures), default=0)):
            taken = [mixture[place] if place < len(mixture) else None for mixture in mixtures]
            chosen = [None if pair is None else held[pair[0]] for pair in taken]
            weights = torch.tensor([0.0 if pair is None else pair[1] for pair in taken])
            passes.append(MixedRows(self._slots(chosen), weights.to(self._device)))
        return tuple(passes)

    def _keep(self, names: Names, batch: ReadyBatch) -> None:
        self._kept.pop(names, None)
        self._kept[names] = batch
        if len(self._kept) > _KEPT:
            del self._kept[next(iter(self._kept))]


class RowsBlock:
    """The block of `AdapterManager.rows`.  A class, since generators would double its cost.

    Args:
        batches: gives what its rows need.
        owner: of the layers.
        names: by row.
        alone: refuse to begin inside of another block.
        packing: how they lie in one sequence; None for rows of one length.
    """

    def __init__(
        self,
        batches: ReadyBatches,
        owner: int,
        names: Sequence[RowName],
        *,
        alone: bool,
        packing: Packing | None = None,
    ) -> None:
        self._batches = batches
        self._owner = owner
        self._names = names
        self._alone = alone
        self._packing = packing
        self._has_ended = False

    def __enter__(self) -> Batch:
        names = self._names
        if self._alone and active_batch(self._owner) is not None:
            raise BatchError(
                f"rows({names!r})",
                "another rows() block of this model is open here",
                "leave it first, or pass adapter_names= to each call",
            )
        self._ready = ready = self._batches.acquire(names)
        try:
            self._batch = ready.begin(ready.slots.shape[1], self._packing)
        except BaseException:
            self._batches.release(ready)
            raise
        self._scope = BatchScope(self._owner, self._batch)
        self._scope.__enter__()
        return self._batch

    def __exit__(self, *raised: Any) -> None:
        if self._has_ended:
            return
        self._has_ended = True
        try:
            self._scope.__exit__(None, None, None)
        finally:
            self._batch.ended.set()
            # What is kept ready for the next block remembers the first one.
            self._batch.ready.clear()
            self._batches.release(self._ready)


def _hashable(names: Sequence[RowName]) -> Names:
    """The names as a key; one that stands for nothing where they are none."""
    if type(names) not in _USUAL and isinstance(names, _NO_LISTS):
        return ()
    key: tuple[Any, ...] = tuple(names)
    if Lease in map(type, key):
        key = tuple(name.version if isinstance(name, Lease) else name for name in key)
    try:
        hash(key)
    except TypeError:
        key = tuple(Mixture.of(n) if isinstance(n, Mapping) else n for n in key)
        try:
            hash(key)
        except TypeError:
            return ()
    return key


def _adapters_of(names: Names) -> dict[str | Version, None]:
    found: dict[str | Version, None] = {}
    for name in dict.fromkeys(names):
        if isinstance(name, Mixture):
            found |= dict.fromkeys(name.names)
        elif name is not None and name != BASE_NAME:
            found[name] = None
    return found


def _check_mixes(name: str, version: Version) -> None:
    plain = all(holder.parts == Part.PLAIN for holder in version.footprint.layers.values())
    if not plain or version.invocation:
        raise AdapterUnsupportedError(
            f"adapter '{name}'",
            f"is more than low-rank products, which alone are mixed (it is {version.peft_type}, "
            f"with {_more_than_products(version)})",
            "name it alone in its row",
        )


def _more_than_products(version: Version) -> str:
    holders = version.footprint.layers.values()
    products = (Part.PLAIN, Part.LOW_RANK)
    others = [
        part.name.lower()
        for part in Part
        if part not in products and any(holder.parts & part for holder in holders)
    ]
    return ", ".join(others) or "invocation tokens"


def _check_names(names: Sequence[RowName], key: Names) -> None:
    # Names that were found among those that are kept ready were checked then.
    if not key or not all(name is None or isinstance(name, _ROWS) for name in key):
        raise BatchError(
            f"rows({names!r})",
            "expected one adapter name, or None, for every row of the batch",
            "pass a list such as ['sql', None]",
        )


def slots_by_place(
    chosen: Sequence[Version | None], places: int, device: torch.device
) -> torch.Tensor:
    """int32 (places, rows): each row's slot where its version has a branch, else -1.

    Args:
        chosen: by row; those that are there have slots.
        places: of the model.
        device: of the result.
    """
    different = list(dict.fromkeys(version for version in chosen if version is not None))
    # The last row is that of no adapter.
    slots = torch.full((len(different) + 1, places), -1, dtype=torch.int32)
    for index, version in enumerate(different):
        assert version.slot is not None
        slots[index, version.footprint.mask] = version.slot
    at = {version: index for index, version in enumerate(different)}
    rows = [len(different) if version is None else at[version] for version in chosen]
    return slots[rows].T.contiguous().to(device)
