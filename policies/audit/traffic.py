"""Bytes and seconds of sites under a plan, counted from shapes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...core.route import Route
from ...fusion.site import Site
from ...fusion.traffic import SiteTraffic, traffic_of
from ...linear.batch_class import BatchClass
from ...linear.parts import READS_RAW
from ...linear.registry import LayerRegistry
from ..cost.model import CostModel
from ..plan import Plan
from ..planner import Planner
from ..policy import Policy


@dataclass(frozen=True)
class Load:
    """What one site costs in one batch.

    Attributes:
        moved: bytes written, and read again, until codes and shrunk rows are there.
        seconds: what the device takes for it.
    """

    moved: float
    seconds: float


class BatchTraffic:
    """What sites cost in a batch of so many tokens.

    Args:
        registry: who holds what.
        model: costs of the device.
        tokens: of the batch.
    """

    def __init__(self, registry: LayerRegistry, model: CostModel, tokens: int) -> None:
        self._registry = registry
        self._model = model
        self._tokens = tokens
        self._found: dict[tuple[SiteTraffic, str], dict[Route, Load]] = {}

    def plan(self, planner: Planner, live: Mapping[int, str], policy: Policy) -> Plan:
        """The plan for such a batch, in which every row has an adapter if any has."""
        batch = BatchClass.of(self._tokens, self._tokens if live else 0)
        return planner.plan(live, policy, batch)

    def of(self, site: Site, plan: Plan, live: Mapping[int, str], route: Route) -> Load:
        """What `site` costs on `route`.

        Args:
            site: the site.
            plan: for `live`.
            live: the adapters of the batch; its rows have one each, evenly spread.
            route: usually the planned one.
        """
        key = site.common_key()
        if key is None:
            # No codes are ever made: the activation is written, and its linears read it.
            rows = self._tokens * site.facts.rows_per_token
            moved = rows * site.facts.columns * site.facts.dtype.itemsize
            return Load(moved, moved / self._model.device.bandwidth)
        reading = [layer for layer in site.layers if plan.parts[layer.index] & READS_RAW]
        traffic = traffic_of(
            site,
            key,
            self._registry,
            live,
            tokens=self._tokens,
            adapter_tokens=self._tokens,
            shrink_width=sum(plan.shrink_ranks[layer.index] for layer in reading),
        )
        return self._load(traffic, site.facts.kind, route)

    def _load(self, traffic: SiteTraffic, kind: str, route: Route) -> Load:
        loads = self._found.setdefault((traffic, kind), {})
        if route not in loads:
            seconds = self._model.site_seconds(traffic, route, kind)
            loads[route] = Load(traffic.bytes_moved(route), seconds)
        return loads[route]
