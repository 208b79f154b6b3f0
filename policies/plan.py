"""The plan: the routes of all sites for one set of adapters, with the reason for each (I11)."""

from __future__ import annotations

from dataclasses import dataclass

from ..core.quant_key import QuantKey
from ..core.route import Route
from ..core.selection import Rejection
from ..fusion.producers.base import Producer
from ..linear.batch_class import BatchClass
from .reasons import ReasonCode


@dataclass(frozen=True)
class OutOfService:
    """A producer that may not serve one route of one site any more.

    Attributes:
        site: its name.
        route: what it was planned for.
        producer: its name.
        reason: what was found.
    """

    site: str
    route: Route
    producer: str
    reason: str


@dataclass(frozen=True)
class SitePlan:
    """What one site does, and why.

    Attributes:
        site: its name.
        route: what it does.
        code: why, as a word.
        reason: why.
        producer: name of the chosen producer; "" where unfused.
        emulated: the producer saves no memory traffic.
        rejected: producers that were passed over, with reasons.
        key: what its consumers accept; None where they take no codes or not the same.
        raw_readers: who reads its output raw in such a batch.
        blame: the adapters among them, by name.
    """

    site: str
    route: Route
    code: ReasonCode
    reason: str
    producer: str
    emulated: bool
    rejected: tuple[Rejection, ...]
    key: QuantKey | None
    raw_readers: tuple[str, ...]
    blame: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """One frozen object that the forward, the audit and `--json` all read.

    Attributes:
        epoch: of the registry when it was made.
        policy: name of the policy that made it.
        adapters: names of the adapters it is for, sorted.
        sites: by site index.
        routes: by site index, for the forward.
        producers: by site index, for the forward.
        branched: by the index of each place that takes adapters (linears first): some of the
            adapters has a branch there.
        parts: likewise: all `Part`s of the adapters there; 0 for none.
        shrink_ranks: by layer index: the highest rank of their LoRA branches there; 0 for none.
        batch: class of the batches it is for; None where its policy takes all alike.
    """

    epoch: int
    policy: str
    adapters: tuple[str, ...]
    sites: tuple[SitePlan, ...]
    routes: tuple[Route, ...]
    producers: tuple[Producer | None, ...]
    branched: tuple[bool, ...]
    parts: tuple[int, ...]
    shrink_ranks: tuple[int, ...]
    batch: BatchClass | None = None

    def count(self, route: Route) -> int:
        """How many sites take `route`."""
        return self.routes.count(route)
