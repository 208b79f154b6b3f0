"""How long forwards take: by the cost model of a device, or as it was measured."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ...core.errors import ConfigError
from ...core.route import Route
from ...fusion.traffic import SiteTraffic
from ...linear.batch_class import BatchClass
from ...linear.experts.layer import ExpertsLinear
from ...linear.parts import Part
from ...linear.registry import Holder, Holding
from ...linear.routed import RoutedLayer
from ...policies.cost import CostModel
from ...policies.plan import Plan
from ...policies.policy import DynamicPolicy, Policy
from ..hollow.audit import HollowModel
from ..serve_config import EngineConfig
from .replica import StepLoad
from .slots import SimulatedAdapter

#: Of a slot's numbers, and of keys and values: two bytes each.
_ITEM = 2
_ENDLESS = 1 << 40
#: PCIe of the fifth generation, sixteen lanes, as copies reach it; bytes a second.
_HOST_BANDWIDTH = 50e9


@dataclass(frozen=True)
class AdapterKind:
    """Adapters that hold the same.

    Attributes:
        targets: ends of the names of their linears; empty for all.
        rank: of every product.
        share: of all adapters, relative to the other kinds.
    """

    targets: tuple[str, ...] = ()
    rank: int = 16
    share: float = 1.0

    @classmethod
    def parse(cls, text: str) -> AdapterKind:
        """Read ``q_proj,v_proj:16:0.7``; targets ``all`` are all linears.

        Raises:
            ConfigError: it is no such text.
        """
        targets, *numbers = text.split(":")
        try:
            rank = int(numbers[0]) if numbers else cls.rank
            share = float(numbers[1]) if len(numbers) > 1 else cls.share
        except ValueError:
            rank = 0
            share = 0.0
        usable = rank in range(1, 1025) and 0 < share < math.inf and len(numbers) <= 2
        if not usable or not targets.strip(","):
            raise ConfigError(
                f"kind of adapters {text!r}",
                "is no TARGETS:RANK:SHARE",
                "write q_proj,v_proj:16:0.7, or all:8 (command line: --kind)",
            )
        names = () if targets == "all" else tuple(filter(None, targets.split(",")))
        return cls(names, rank, share)

    def holds(self, layer: RoutedLayer) -> bool:
        """Whether it has a branch there."""
        return not self.targets or layer.name.rpartition(".")[2] in self.targets


@dataclass(frozen=True)
class MeasuredClock:
    """As it was measured, whatever is fed.

    Attributes:
        step_seconds: of a forward.
        load_seconds: of a slot that is written.
    """

    step_seconds: float
    load_seconds: float

    def step(self, load: StepLoad) -> float:
        """See `StepClock`."""
        return self.step_seconds

    def base_step(self, load: StepLoad) -> float:
        """See `StepClock`."""
        return self.step_seconds

    def load(self, adapter: SimulatedAdapter) -> float:
        """See `StepClock`."""
        return self.load_seconds


@dataclass(frozen=True)
class _Linear:
    inputs: int
    outputs: int
    weight_bytes: float
    rows: int


@dataclass(frozen=True)
class _Branched:
    inputs: int
    outputs: int
    rank: int
    rows: int


@dataclass(frozen=True)
class _Planned:
    """A batch's sites and branches, those that are alike together."""

    sites: Mapping[tuple[SiteTraffic, Route, str], int]
    branches: Mapping[_Branched, int]


class ModelClock:
    """By the cost model, from the shapes of a model and what kinds of adapters hold.

    Args:
        hollow: the model; it is told of the kinds.
        costs: of the device.
        policy: that batches are planned by.
        kinds: of the adapters.

    Raises:
        ConfigError: a kind names no linear of the model that takes adapters.
    """

    def __init__(
        self,
        hollow: HollowModel,
        costs: CostModel,
        policy: Policy,
        kinds: Sequence[AdapterKind],
    ) -> None:
        self._hollow = hollow
        self._costs = costs
        self._policy = policy
        self._registry = hollow.planner.registry
        self._kinds = tuple(kinds)
        self._rows_per_token = {
            layer.name: site.facts.rows_per_token
            for site in hollow.planner.sites
            for layer in site.layers
        }
        self._linears = Counter(map(self._linear, self._registry))
        self._cache_bytes = _cache_bytes(hollow)
        self._planned: dict[tuple[Policy, frozenset[int], BatchClass | None], _Planned] = {}
        self._seconds: dict[tuple[Policy, StepLoad], float] = {}
        self._enter()

    def blocks(self, config: EngineConfig) -> int:
        """Blocks of a KV cache of these settings; as good as endless where they say nothing."""
        if config.num_gpu_blocks_override is not None:
            return config.num_gpu_blocks_override
        if config.kv_cache_memory_bytes is not None:
            return config.kv_cache_memory_bytes // (self._cache_bytes * config.block_size)
        return _ENDLESS

    def nbytes(self, kind: int) -> int:
        """Bytes of an adapter of this kind in its slot."""
        found = self._kinds[kind]
        return sum(
            _ITEM * found.rank * (layer.in_features + layer.out_features)
            for layer in self._registry
            if found.holds(layer)
        )

    def step(self, load: StepLoad) -> float:
        """See `StepClock`."""
        return self._without_cache(self._policy, load) + self._cache_seconds(load)

    def base_step(self, load: StepLoad) -> float:
        """See `StepClock`; under a policy that lets every site be fused."""
        base = replace(load, adapter_tokens=0, kinds=frozenset(), adapters=0)
        return self._without_cache(DynamicPolicy(), base) + self._cache_seconds(load)

    def load(self, adapter: SimulatedAdapter) -> float:
        """See `StepClock`."""
        device = self._costs.device
        # On a CPU a slot is written by reading and writing its memory.
        on_cpu = device.platform.device_type == "cpu"
        bandwidth = device.bandwidth / 2 if on_cpu else _HOST_BANDWIDTH
        modules = sum(map(self._kinds[adapter.kind].holds, self._registry))
        return adapter.nbytes / bandwidth + 2 * modules * device.launch_seconds

    # --- inside ---------------------------------------------------------------------------------

    def _enter(self) -> None:
        holdings = {}
        for number, kind in enumerate(self._kinds):
            layers = {
                layer.name: Holder(Part.PLAIN, kind.rank)
                for layer in self._registry
                if kind.holds(layer) and layer.takes_branches
            }
            if not layers:
                raise ConfigError(
                    f"kind of adapters {','.join(kind.targets)!r}",
                    "names no linear of the model that takes adapters",
                    "name the ends of their names, such as q_proj (command line: --kind)",
                )
            holdings[number] = Holding(f"kind {number}", layers)
        self._registry.set_holdings(holdings, (), "kinds of adapters for a simulation")

    def _linear(self, layer: RoutedLayer) -> _Linear:
        kernel = layer.kernel
        experts = layer.experts if isinstance(layer, ExpertsLinear) else 1
        elements = max(1, experts * layer.in_features * layer.out_features)
        rows = self._rows_per_token.get(layer.name, 1)
        per_weight = kernel.weight_bytes / elements
        return _Linear(layer.in_features, layer.out_features * experts, per_weight, rows)

    def _cache_seconds(self, load: StepLoad) -> float:
        return load.context * self._cache_bytes / self._costs.device.bandwidth

    def _without_cache(self, policy: Policy, load: StepLoad) -> float:
        key = policy, replace(load, context=0)
        found = self._seconds.get(key)
        if found is None:
            found = self._seconds[key] = self._work_out(policy, load)
        return found

    def _work_out(self, policy: Policy, load: StepLoad) -> float:
        costs, planned = self._costs, self._plan(policy, load)
        linears = 0.0
        for one, number in self._linears.items():
            rows = load.tokens * one.rows
            linears += number * costs.linear_seconds(
                rows, one.inputs, one.outputs, one.weight_bytes
            )
        sites = sum(
            number * costs.site_seconds(_scaled(traffic, load), route, kind)
            for (traffic, route, kind), number in planned.sites.items()
        )
        return linears + sites + self._branch_seconds(load, planned)

    def _branch_seconds(self, load: StepLoad, planned: _Planned) -> float:
        costs = self._costs
        total = 0.0
        for one, number in planned.branches.items():
            rows = load.adapter_tokens * one.rows
            seconds = costs.branch_seconds(rows, one.inputs, one.outputs, one.rank)
            # Every other adapter has matrices of its own.
            more = (load.adapters - 1) * _ITEM * one.rank * (one.inputs + one.outputs)
            total += number * (seconds + more / costs.device.bandwidth)
        return total

    def _plan(self, policy: Policy, load: StepLoad) -> _Planned:
        batch = BatchClass.of(load.tokens, load.adapter_tokens) if policy.by_batch else None
        key = policy, load.kinds, batch
        found = self._planned.get(key)
        if found is None:
            live = {number: f"kind {number}" for number in load.kinds}
            plan = self._hollow.planner.plan(live, policy, batch)
            found = self._planned[key] = self._grouped(plan, load.kinds)
        return found

    def _grouped(self, plan: Plan, kinds: frozenset[int]) -> _Planned:
        sites: Counter[tuple[SiteTraffic, Route, str]] = Counter()
        for site in self._hollow.planner.sites:
            key = site.common_key()
            if key is not None:
                width = sum(plan.shrink_ranks[layer.index] for layer in site.layers)
                rows = site.facts.rows_per_token
                traffic = SiteTraffic(
                    rows, site.facts.columns, site.facts.dtype, key, rows if width else 0, width
                )
                sites[traffic, plan.routes[site.index], site.facts.kind] += 1
        branches = Counter(
            _Branched(
                layer.in_features,
                layer.out_features,
                max(self._kinds[k].rank for k in kinds if self._kinds[k].holds(layer)),
                self._rows_per_token.get(layer.name, 1),
            )
            for layer in self._registry
            if plan.branched[layer.index]
        )
        return _Planned(sites, branches)


def _scaled(traffic: SiteTraffic, load: StepLoad) -> SiteTraffic:
    """Of one token, for as many as are fed."""
    return replace(
        traffic,
        rows=traffic.rows * load.tokens,
        adapter_rows=traffic.adapter_rows * load.adapter_tokens,
    )


def _cache_bytes(hollow: HollowModel) -> int:
    """Keys and values of one token, in all layers."""
    config = hollow.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * heads * width * _ITEM
