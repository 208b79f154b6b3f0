"""What an adapter's content is known by, the names that point at it, and the listing."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import torch

from ..core.errors import AdapterError
from ..linear.registry import Holder
from .sources import AdapterSource
from .weights import AdapterWeights

_identities = itertools.count(1)


class AdapterState(StrEnum):
    """Where an adapter stands in its life.

    `registered`: only its source is known.  `loading`: being read.  `ready`: rows may name it.
    `draining`: no name points at it, batches still run on it.  `gone`: nothing is left of it.
    `broken`: its source could not be read, or holds something else by now; reload or unload it.
    """

    REGISTERED = "registered"
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    GONE = "gone"
    BROKEN = "broken"


class Tier(StrEnum):
    """The fastest place that an adapter's weights lie in."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


@dataclass(frozen=True)
class AdapterInfo:
    """One line of the listing.

    Attributes:
        name: what rows call it.
        digest: BLAKE3 of what it computes; its identity (I9).  Empty while its source has not
            been read, and so are `rank`, `modules`, `nbytes` and `notes`.
        source: where it came from.
        rank: the highest of any layer.
        modules: how many modules it has weights for.
        nbytes: size as stored.
        slot: its slot on the device; None where it has none now.
        batches: how many batches in flight use it.
        notes: such as "no effect: every lora_B is zero".
        state: where it stands in its life.
        tier: where its weights lie.
        hits: how many batches used it.
        last_use: when the last of them began, in seconds since 1970; None for never.
        priority: under the policy "priority", a higher one stays longer.
        pinned: it keeps the slot and the host memory that it has.
        aliases: other names of the same content.
        reason: why it is broken; else empty.
        peft_type: as its config names it; empty while its source has not been read.
        parameters: how many numbers it holds.
    """

    name: str
    digest: str
    source: str
    rank: int
    modules: int
    nbytes: int
    slot: int | None
    batches: int
    notes: tuple[str, ...]
    state: AdapterState = AdapterState.READY
    tier: Tier = Tier.DISK
    hits: int = 0
    last_use: float | None = None
    priority: int = 0
    pinned: bool = False
    aliases: tuple[str, ...] = ()
    reason: str = ""
    peft_type: str = ""
    parameters: int = 0


@dataclass(frozen=True)
class AdapterMemory:
    """What adapters take.

    Attributes:
        device_bytes: of all stacks, whether a slot is taken or not.
        host_bytes: of the copies in host memory.
        host_adapters: how many copies.
        slots: on the device, spare ones included.
        slots_taken: of them.
    """

    device_bytes: int
    host_bytes: int
    host_adapters: int
    slots: int
    slots_taken: int


@dataclass(frozen=True, eq=False)
class Footprint:
    """Which places an adapter touches, and how; shared by all adapters of one shape.

    Attributes:
        layers: by the name of the place.
        mask: bool (places of the model,), on the CPU: where it has a branch.
    """

    layers: Mapping[str, Holder]
    mask: torch.Tensor


class Version:
    """One content: what several names may point at, and batches run on.

    Everything but the facts changes under the store's lock only.

    Args:
        weights: its content.
        footprint: of `weights`.

    Attributes:
        key: its identity in plans.
        config: its decoded adapter_config.json.
        invocation: see `AdapterWeights`.
        uses_base: see `AdapterWeights`.
        names: the aliases that point at it, oldest first.
        last_alias: the one that ceased to last, if any has.
        weights: its copy in host memory, if there is one.
        slot: its slot, if it has one.
        batches: how many batches in flight use it; a prefetch and a pin that are at it count too.
        brief_holds: how many of these are no batches, and end by themselves.
        leases: how many requests go on using it between batches; it stays in host memory.
        hits, tick, last_use: how often and when it was used; see `Usage` and `AdapterInfo`.
        priority: the highest of its names.
        pinned: one of its names is.
        loading: a thread is reading it back from its source.
        moving: a thread is writing it into a slot.
        error: why it is broken.
        drains: no name points at it any more, and batches or leases still use it.
        gone: nothing is left of it.
    """

    def __init__(self, weights: AdapterWeights, footprint: Footprint) -> None:
        self.key = next(_identities)
        self.digest = weights.digest
        self.footprint = footprint
        self.rank = weights.rank
        self.nbytes = weights.nbytes
        self.modules = len(weights.modules)
        self.notes = weights.notes
        self.peft_type = weights.peft_type
        self.parameters = weights.parameters
        self.config = weights.config
        self.invocation = weights.invocation
        self.uses_base = weights.uses_base
        self.names: dict[str, Alias] = {}
        self.last_alias: Alias | None = None
        self.weights: AdapterWeights | None = weights
        self.slot: int | None = None
        self.batches = 0
        self.brief_holds = 0
        self.leases = 0
        self.hits = 0
        self.tick = 0
        self.last_use: float | None = None
        self.priority = 0
        self.pinned = False
        self.loading = False
        self.moving = False
        self.error: AdapterError | None = None
        self.drains = False
        self.gone = False

    @property
    def in_use(self) -> bool:
        """Whether batches or leases keep it, whatever becomes of its names."""
        return bool(self.batches or self.leases)

    @property
    def tier(self) -> Tier:
        """The fastest place that it lies in."""
        if self.slot is not None:
            return Tier.DEVICE
        return Tier.DISK if self.weights is None else Tier.HOST

    @property
    def state(self) -> AdapterState:
        """Where it stands in its life."""
        if self.gone:
            return AdapterState.GONE
        if self.drains:
            return AdapterState.DRAINING
        if self.error is not None:
            return AdapterState.BROKEN
        return AdapterState.LOADING if self.loading else AdapterState.READY

    @property
    def label(self) -> str:
        """One of its names, for messages; of a version that drains, the last one."""
        aliases = tuple(self.names.values()) or (self.last_alias,)
        return "" if aliases[0] is None else aliases[0].name

    @property
    def sources(self) -> tuple[AdapterSource, ...]:
        """Where its content can be read again."""
        aliases = tuple(self.names.values()) or (self.last_alias,)
        return tuple(a.source for a in aliases if a is not None and a.source is not None)

    def info(self, alias: Alias) -> AdapterInfo:
        """Its line of the listing under one of its names."""
        return AdapterInfo(
            name=alias.name,
            digest=self.digest,
            source=alias.origin,
            rank=self.rank,
            modules=self.modules,
            nbytes=self.nbytes,
            slot=self.slot,
            batches=self.batches,
            notes=self.notes,
            state=self.state,
            tier=self.tier,
            hits=self.hits,
            last_use=self.last_use,
            priority=alias.priority,
            pinned=alias.pinned,
            aliases=tuple(name for name in self.names if name != alias.name),
            reason="" if self.error is None else str(self.error),
            peft_type=self.peft_type,
            parameters=self.parameters,
        )


@dataclass(eq=False)
class Alias:
    """A name, and what it points at.

    Attributes:
        name: what rows call it.
        source: where its content is read; None where it came from memory.
        origin: what the listing says of that.
        version: its content; None until it was read.
        loading: a thread is reading it for the first time.
        error: why it could not be read.
        priority: for the policy "priority".
        pinned: its content keeps its slot and its host memory.
        chat_template: that its source brought; two names of one content may have two.
    """

    name: str
    source: AdapterSource | None
    origin: str
    version: Version | None = None
    loading: bool = False
    error: AdapterError | None = field(default=None, repr=False)
    priority: int = 0
    pinned: bool = False
    chat_template: str | None = field(default=None, repr=False)

    @property
    def state(self) -> AdapterState:
        """Where it stands in its life."""
        if self.version is not None:
            return self.version.state
        if self.error is not None:
            return AdapterState.BROKEN
        return AdapterState.LOADING if self.loading else AdapterState.REGISTERED

    @property
    def tier(self) -> Tier:
        """The fastest place that its content lies in."""
        return Tier.DISK if self.version is None else self.version.tier

    def info(self) -> AdapterInfo:
        """Its line of the listing."""
        if self.version is not None:
            return self.version.info(self)
        return AdapterInfo(
            self.name, "", self.origin, 0, 0, 0, None, 0, (),
            state=self.state,
            priority=self.priority,
            pinned=self.pinned,
            reason="" if self.error is None else str(self.error),
        )  # fmt: skip
