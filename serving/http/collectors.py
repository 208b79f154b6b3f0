"""Metrics that are kept elsewhere: read from engine, adapters and sites when asked for."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

from ...adapters.branch import LayerBranch
from ...adapters.experts import ExpertsBranch
from ...adapters.manager import AdapterManager
from ...core.route import Route
from ..engine.requests import EngineStats
from ..model import ServedModel
from ..self_check import Readiness
from ..serve_config import ServeConfig


class RunningEngine(Protocol):
    """What is read of the engine."""

    @property
    def alive(self) -> bool:
        """Whether its thread runs."""
        ...

    def stats(self) -> EngineStats:
        """How it stands now."""
        ...


def _gauge(name: str, documentation: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, documentation, value=value)


def _counter(name: str, documentation: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(name, documentation, value=value)


def listed(names: Iterable[str]) -> str:
    """Adapter names as the Gateway API inference extension splits them: at commas.

    A comma within a name is written %2C, so that no name can pass for two.
    """
    return ",".join(name.replace(",", "%2C") for name in sorted(names))


class EngineCollector(Collector):
    """What the engine counts, under vLLM's names where schedulers read them by these.

    Args:
        engine: is asked at every scrape.
        config: of the server.
        model_name: of the base model.
    """

    def __init__(self, engine: RunningEngine, config: ServeConfig, model_name: str) -> None:
        self._engine = engine
        self._config = config
        self._model_name = model_name
        self._lock = threading.Lock()
        self._adapters: tuple[str, str] = ("", "")
        self._changed_at = time.time()

    def collect(self) -> Iterator[Metric]:
        """The engine's numbers now."""
        stats = self._engine.stats()
        yield self._lora_requests(stats)
        yield from self._load(stats)
        alive = self._engine.alive
        yield _gauge("branchline_engine_alive", "1 while the engine's thread runs.", alive)
        yield _counter("branchline_engine_steps", "Forwards.", stats.steps)
        yield _counter(
            "branchline_engine_prompt_tokens", "Tokens of prompts computed.", stats.prompt_tokens
        )
        yield _counter(
            "branchline_engine_cached_tokens",
            "Tokens of prompts taken from the prefix cache.",
            stats.cached_tokens,
        )
        yield _counter("branchline_engine_generated_tokens", "Tokens made.", stats.generated_tokens)
        yield _counter(
            "branchline_engine_failed_requests", "Answers that failed.", stats.failed_requests
        )
        yield _counter(
            "branchline_engine_preemptions",
            "Answers that gave their cache blocks back and began anew.",
            stats.preemptions,
        )

        lookups = CounterMetricFamily(
            "branchline_adapter_slot_lookups",
            "Requests by whether their adapter had a slot at their first forward.",
            labels=("outcome",),
        )
        lookups.add_metric(("hit",), stats.slot_hits)
        lookups.add_metric(("miss",), stats.slot_misses)
        yield lookups

    def _lora_requests(self, stats: EngineStats) -> Metric:
        now = (listed(stats.running_by_adapter), listed(stats.waiting_by_adapter))
        with self._lock:
            if now != self._adapters:
                self._adapters, self._changed_at = now, time.time()
            changed_at = self._changed_at
        family = GaugeMetricFamily(
            "vllm:lora_requests_info",
            "Adapters of running and waiting requests; the value is when they last changed.",
            labels=("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
        )
        family.add_metric((str(self._config.tier_limits.count), *now), changed_at)
        return family

    def _load(self, stats: EngineStats) -> Iterator[Metric]:
        used = stats.used_blocks / stats.blocks if stats.blocks else 0.0
        for name, documentation, value in (
            ("num_requests_running", "Answers that hold blocks of the KV cache.", stats.running),
            ("num_requests_waiting", "Answers that wait for blocks.", stats.waiting),
            ("kv_cache_usage_perc", "Share of the KV cache in use, 0 to 1.", used),
            ("gpu_cache_usage_perc", "The same, under its older name.", used),
        ):
            family = GaugeMetricFamily(f"vllm:{name}", documentation, labels=("model_name",))
            family.add_metric((self._model_name,), value)
            yield family
        cache = GaugeMetricFamily(
            "vllm:cache_config_info",
            "The KV cache; the value is always 1.",
            labels=("block_size", "num_gpu_blocks", "enable_prefix_caching"),
        )
        sharing = str(self._config.enable_prefix_caching)
        cache.add_metric((str(self._config.block_size), str(stats.blocks), sharing), 1)
        yield cache


class AdapterCollector(Collector):
    """What the adapter manager keeps.

    Args:
        adapters: is asked at every scrape.
    """

    def __init__(self, adapters: AdapterManager) -> None:
        self._adapters = adapters

    def collect(self) -> Iterator[Metric]:
        """The adapters' numbers now."""
        yield from self._memory()
        yield self._states()
        counters = self._adapters.counters()
        evictions = CounterMetricFamily(
            "branchline_adapter_evictions",
            "Adapters that made room for others, by the tier they left.",
            labels=("tier",),
        )
        loads = SummaryMetricFamily(
            "branchline_adapter_slot_load_seconds",
            "Adapters written into slots, and how long that took.",
            count_value=counters.slot_loads.count,
            sum_value=counters.slot_loads.seconds,
        )
        yield loads
        evictions.add_metric(("device",), counters.slot_evictions)
        evictions.add_metric(("host",), counters.host_evictions)
        yield evictions
        operations = SummaryMetricFamily(
            "branchline_adapter_operation_seconds",
            "Loads, swaps, unloads and reads of adapters, by outcome.",
            labels=("operation", "outcome"),
        )
        for (operation, outcome), found in counters.operations.items():
            operations.add_metric((operation.value, outcome), found.count, found.seconds)
        yield operations

    def _memory(self) -> Iterator[Metric]:
        memory = self._adapters.memory()
        for name, documentation, value in (
            ("adapter_slots", "Slots of the device, spare ones included.", memory.slots),
            ("adapter_slots_taken", "Of these, those that hold an adapter.", memory.slots_taken),
            ("adapter_device_bytes", "Device memory of all slots.", memory.device_bytes),
            ("adapter_host_bytes", "Host memory of adapters' copies.", memory.host_bytes),
            ("adapter_host_copies", "Adapters with a copy in host memory.", memory.host_adapters),
        ):
            yield _gauge(f"branchline_{name}", documentation, value)

    def _states(self) -> Metric:
        family = GaugeMetricFamily(
            "branchline_adapters", "Names by state and tier.", labels=("state", "tier")
        )
        for (state, tier), count in sorted(self._adapters.states().items()):
            family.add_metric((state.value, tier.value), count)
        return family


class RouteCollector(Collector):
    """What ran at the sites, summed by their kind.

    Args:
        served: whose sites and linears are asked at every scrape.
    """

    def __init__(self, served: ServedModel) -> None:
        self._served = served

    def collect(self) -> Iterator[Metric]:
        """The sites' numbers now."""
        policy = self._served.planner.policy.name
        ran, fallbacks = site_counts(self._served)
        routes = CounterMetricFamily(
            "branchline_site_routes",
            "Calls of sites by what they did, summed over the sites of a kind.",
            labels=("kind", "route", "policy"),
        )
        for (kind, route), count in sorted(ran.items()):
            routes.add_metric((kind, str(route), policy), count)
        yield routes
        yield _by_label(
            "branchline_site_fallbacks",
            "Calls in which the definition ran in the place of the planned producer.",
            "kind",
            fallbacks,
        )
        yield _by_label(
            "branchline_low_rank_fallbacks",
            "Adapter products that the definition computed in the place of the kernel.",
            "kernel",
            _low_rank_fallbacks(self._served),
        )
        yield _counter(
            "branchline_epoch",
            "Changes of adapters, hooks or kernels.",
            self._served.registry.epoch,
        )


class SelfCheckCollector(Collector):
    """What the last self-check found, and what is out of service since any of them.

    Args:
        served: whose routes are checked.

    Attributes:
        report: of the last check; None before the first.
    """

    def __init__(self, served: ServedModel) -> None:
        self._served = served
        self.report: Readiness | None = None

    def collect(self) -> Iterator[Metric]:
        """What is known now."""
        withdrawn = GaugeMetricFamily(
            "branchline_routes_out_of_service",
            "Routes of sites that a self-check took out of service.",
            labels=("route",),
        )
        faults = Counter(str(fault.route) for fault in self._served.planner.out_of_service)
        for route in (Route.FUSED, Route.DUAL, Route.ABSORBED):
            withdrawn.add_metric((str(route),), faults[str(route)])
        yield withdrawn
        report = self.report
        if report is None:
            return
        for name, documentation, value in (
            (
                "differences",
                "Outputs that differed in the last self-check.",
                len(report.differences),
            ),
            ("routes", "Routes that the last self-check compared.", report.routes),
            ("unchecked", "Adapters' routes that it could not compare.", len(report.unchecked)),
            ("seconds", "How long the last self-check took.", report.seconds),
        ):
            yield _gauge(f"branchline_self_check_{name}", documentation, value)
        saturated = GaugeMetricFamily(
            "branchline_saturated_share",
            "FP8 codes at the end of the range in the last self-check, 0 to 1.",
            labels=("kind",),
        )
        for kind, share in sorted(report.saturated.items()):
            saturated.add_metric((kind,), share)
        yield saturated


def site_counts(served: ServedModel) -> tuple[Counter[tuple[str, Route]], Counter[str]]:
    """Calls of the sites by kind and route, and fallbacks by kind; zeros are there too."""
    ran: Counter[tuple[str, Route]] = Counter()
    fallbacks: Counter[str] = Counter()
    for site in served.planner.sites:
        kind = site.facts.kind
        fallbacks[kind] += sum(site.counters.fallbacks().values())
        found = site.counters.routes()
        for route in Route:
            ran[kind, route] += found.get(route, 0)
    return ran, fallbacks


def _low_rank_fallbacks(served: ServedModel) -> Counter[str]:
    found: Counter[str] = Counter()
    for layer in served.registry:
        branch = layer.branch
        slots = branch.product if isinstance(branch, LayerBranch | ExpertsBranch) else None
        if slots is not None:
            found[slots.kernel.name] += sum(slots.fallbacks.copy().values())
    return found


def _by_label(
    name: str, documentation: str, label: str, counts: Mapping[str, int]
) -> CounterMetricFamily:
    family = CounterMetricFamily(name, documentation, labels=(label,))
    for value, count in sorted(counts.items()):
        family.add_metric((value,), count)
    return family
