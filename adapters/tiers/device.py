"""Device slots: which version lies in which, which makes room, and writing them.

Slots come in classes by rank.  A version takes a slot of the lowest class that fits it and has
room, a free one before an occupied one.  Each class has one slot more than was asked for: it is
taken only while some slot of the class is held by a version that drains, so that a swap need not
wait for the batches on the version it replaces.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from ...core.errors import AdapterCapacityError
from ...linear.registry import LayerRegistry
from ..activity import OperationCount
from ..places import AnyBranch, make_branch
from ..slots import SlotClasses
from ..version import Version
from ..weights import AdapterWeights
from .eviction import EvictionQueue
from .limits import TierLimits

_logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _SlotClass:
    rank: int
    free: list[int]
    queue: EvictionQueue[Version]
    occupied: set[int] = field(default_factory=set)
    draining: int = 0

    @property
    def has_room(self) -> bool:
        """Whether a free slot may be taken: not the last one, unless something drains."""
        return len(self.free) > (0 if self.draining else 1)


@dataclass(frozen=True, eq=False)
class Move:
    """A version on its way into a slot.

    Attributes:
        version: which.
        slot: reserved for it.
        weights: what is written.
        evicted: who had the slot, or None.
    """

    version: Version
    slot: int
    weights: AdapterWeights
    evicted: Version | None


class DeviceTier:
    """The slots of a served model and the branches that hold them.

    All but `write` is called under the store's lock.

    Args:
        registry: the places that take adapters.
        limits: how many slots of which rank.
        dtype: of the stacks.
        device: of the stacks.
    """

    def __init__(
        self, registry: LayerRegistry, limits: TierLimits, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._registry = registry
        self._limits = limits
        self._dtype = dtype
        self._device = device
        with_spares = {rank: count + 1 for rank, count in limits.slots.items() if count}
        self.slots = SlotClasses.of(with_spares)
        self._classes = [
            _SlotClass(
                rank,
                [slot for slot, held in enumerate(self.slots.ranks) if held == rank],
                EvictionQueue(limits.eviction),
            )
            for rank in sorted(with_spares)
        ]
        by_rank = {slots.rank: slots for slots in self._classes}
        self._class_of = [by_rank[rank] for rank in self.slots.ranks]
        self._branches: dict[str, AnyBranch] = {}
        self._writing = threading.Lock()
        #: Versions that lost their slot to another one, so far.
        self.evictions = 0
        #: Versions that were written into a slot so far, and how long that took.
        self.loads = OperationCount(0, 0.0)
        # Free slots that could not be emptied when they should have been.
        self.unclean: set[int] = set()
        #: Versions whose slot is being written.
        self.writing: set[Version] = set()
        # By slot, the places that something was written to since it was last cleared.
        self._written: list[frozenset[str]] = [frozenset()] * len(self.slots)

    @property
    def nbytes(self) -> int:
        """Device memory of all branches."""
        return sum(branch.nbytes for branch in tuple(self._branches.values()))

    @property
    def occupied(self) -> int:
        """How many slots hold, or are reserved for, a version."""
        return sum(len(slots.occupied) for slots in self._classes)

    # --- who lies where -------------------------------------------------------------------------

    def check_fits(self, name: str, rank: int) -> None:
        """Refuse an adapter that no slot can hold.

        Raises:
            AdapterCapacityError: there are no slots, or its rank is higher than theirs.
        """
        if not self._classes:
            raise AdapterCapacityError(
                f"adapter '{name}'",
                "adapters are switched off by max_loras=0",
                "wrap with a higher max_loras (command line: --max-loras)",
            )
        if rank > self.slots.width:
            raise AdapterCapacityError(
                f"adapter '{name}'",
                f"has rank {rank}, but slots hold at most {self.slots.width}",
                "wrap with a higher max_lora_rank (command line: --max-lora-rank)",
            )

    def reserve(self, versions: Iterable[Version], movable: Sequence[Version] = ()) -> list[Move]:
        """Slots for all of `versions`, or none; idle versions make room.

        Args:
            versions: without slots, with copies in host memory, in use by the batch that asks.
            movable: with slots that only the same batch uses, and copies in host memory; where
                there is no room otherwise, they are given other slots.

        Raises:
            AdapterCapacityError: what cannot be evicted leaves too few slots.
        """
        wanted = list(versions)
        try:
            return self._reserve(wanted)
        except AdapterCapacityError:
            if not movable or len(self._classes) == 1:
                raise
        before = {version: version.slot for version in movable}
        for version in movable:
            self._take_out(version)
        try:
            moves = self._reserve([*wanted, *movable])
        except AdapterCapacityError:
            for version, slot in before.items():
                assert slot is not None
                self._put_in(version, slot)
            raise
        taken = {move.slot for move in moves}
        for slot in before.values():
            if slot is not None and slot not in taken:
                self.clear(slot)
        return moves

    def _reserve(self, versions: list[Version]) -> list[Move]:
        moves: list[Move] = []
        try:
            # Those that fit the fewest slots choose first.
            for version in sorted(versions, key=lambda version: -version.rank):
                moves.append(self._take(version))
        except AdapterCapacityError:
            for move in reversed(moves):
                self.cancel(move, untouched=True)
            raise
        return moves

    def reserve_free(self, version: Version, *, for_swap: bool = False) -> Move | None:
        """A free slot for a version, if there is one; nothing is evicted.

        Args:
            version: with a copy in host memory.
            for_swap: the spare slot will do too.
        """
        for slots in self._fitting(version):
            if slots.free if for_swap else slots.has_room:
                return self._move(version, slots, slots.free[0], None)
        return None

    def _take(self, version: Version) -> Move:
        fitting = self._fitting(version)
        for slots in fitting:
            if slots.has_room:
                return self._move(version, slots, slots.free[0], None)
        for slots in fitting:
            victim = slots.queue.first(lambda other: not other.batches)
            if victim is not None:
                slot = victim.slot
                assert slot is not None
                self._take_out(victim)
                return self._move(version, slots, slot, victim)
        raise AdapterCapacityError(
            f"adapter '{version.label}' of rank {version.rank}",
            f"every slot that fits it is taken by adapters of batches in flight (this batch "
            f"included) or pinned; {self._described()}",
            "name fewer different adapters in a batch, try again when others have ended, or wrap "
            "with more slots (command line: --max-loras or --lora-slots)",
        )

    def _described(self) -> str:
        slots = ", ".join(f"{n} of rank {rank}" for rank, n in sorted(self._limits.slots.items()))
        return f"max_loras={self._limits.count} (slots: {slots})"

    def _fitting(self, version: Version) -> list[_SlotClass]:
        return [slots for slots in self._classes if slots.rank >= version.rank]

    def _move(
        self, version: Version, slots: _SlotClass, slot: int, evicted: Version | None
    ) -> Move:
        assert version.weights is not None
        slots.free.remove(slot)
        slots.occupied.add(slot)
        self.unclean.discard(slot)
        version.moving = True
        self.writing.add(version)
        return Move(version, slot, version.weights, evicted)

    def _take_out(self, version: Version) -> None:
        """The version has no slot any more, and the slot is free."""
        slot = version.slot
        assert slot is not None
        slots = self._class_of[slot]
        slots.queue.discard(version)
        slots.draining -= version.drains
        slots.occupied.discard(slot)
        slots.free.append(slot)
        version.slot = None

    def _put_in(self, version: Version, slot: int) -> None:
        """A free slot holds the version, as it did before."""
        slots = self._class_of[slot]
        slots.free.remove(slot)
        slots.occupied.add(slot)
        self._seat(version, slot)

    def _seat(self, version: Version, slot: int) -> None:
        version.slot = slot
        self._class_of[slot].draining += version.drains
        self.follow(version)

    def finish(self, move: Move) -> None:
        """The slot was written: the version lies there."""
        move.version.moving = False
        self.writing.discard(move.version)
        self.evictions += move.evicted is not None
        self._seat(move.version, move.slot)

    def count_loads(self, count: int, seconds: float) -> None:
        """So many slots were written, one after the other."""
        self.loads = OperationCount(self.loads.count + count, self.loads.seconds + seconds)

    def cancel(self, move: Move, *, untouched: bool = False) -> None:
        """The version does not come.

        Args:
            move: from `reserve`.
            untouched: nothing was written, so that whoever was evicted still lies there.
        """
        move.version.moving = False
        self.writing.discard(move.version)
        slots = self._class_of[move.slot]
        slots.occupied.discard(move.slot)
        slots.free.append(move.slot)
        if move.evicted is not None:
            if untouched:
                self._put_in(move.evicted, move.slot)
            else:
                self.evictions += 1

    def follow(self, version: Version) -> None:
        """Whether a version may go has changed, or its priority."""
        if version.slot is None:
            return
        queue = self._class_of[version.slot].queue
        queue.discard(version)
        if not version.pinned:
            queue.add(version)

    def set_draining(self, version: Version, drains: bool) -> None:
        """No name points at a version in use any more, or one does again."""
        if version.slot is not None:
            self._class_of[version.slot].draining += drains - version.drains
        version.drains = drains

    def leave(self, version: Version) -> int | None:
        """Free the slot of a version, if it has one; it is for the caller to `clear` it."""
        slot = version.slot
        if slot is not None:
            self._take_out(version)
        return slot

    def restore_spares(self) -> list[int]:
        """Evict one idle version of each class whose spare slot is taken though nothing drains.

        Returns:
            the slots to `clear`.
        """
        freed = []
        for slots in self._classes:
            if slots.free or slots.draining:
                continue
            victim = slots.queue.first(lambda other: not other.batches)
            if victim is not None and victim.slot is not None:
                freed.append(victim.slot)
                self._take_out(victim)
                self.evictions += 1
        return freed

    # --- what lies there ------------------------------------------------------------------------

    def write(self, move: Move) -> None:
        """Fill a reserved slot; nothing of what was there before is left.

        Raises:
            Exception: whatever writing raises; the slot is then of no use until it is written anew.
        """
        modules = move.weights.modules
        with self._changing():
            branches = {name: self._branch(name) for name in modules}
            before = self._written[move.slot]
            self._written[move.slot] = before | branches.keys()
            # What is written below is overwritten whole.
            for name in before - branches.keys():
                self._branches[name].clear(move.slot)
            self._written[move.slot] = frozenset(branches)
            for name, parts in modules.items():
                branches[name].write(move.slot, parts)

    def clear(self, slot: int) -> None:
        """Leave nothing in a free slot.

        What the caller does has happened by then.  So a device that fails is logged and not raised:
        no row reads a free slot, whoever takes it empties it first, and until then it is tried
        again with every change.
        """
        try:
            with self._changing():
                self._empty(slot)
        except (RuntimeError, MemoryError):
            _logger.exception("slot %d could not be emptied", slot)
            self.unclean.add(slot)
        else:
            self.unclean.discard(slot)

    @contextmanager
    def _changing(self) -> Iterator[None]:
        # One at a time: branches make what they lack as they are written.  And tensors that were
        # made in inference mode could not be written later.
        with self._writing, torch.inference_mode(False), torch.no_grad():
            yield

    def _empty(self, slot: int) -> None:
        for name in self._written[slot]:
            self._branches[name].clear(slot)
        self._written[slot] = frozenset()

    def _branch(self, name: str) -> AnyBranch:
        branch = self._branches.get(name)
        if branch is None:
            place = self._registry.places[name]
            branch = make_branch(place, self.slots, self._dtype, self._device)
            self._branches[name] = branch
            place.branch = branch
        return branch
