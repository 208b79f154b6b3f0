"""A fleet: requests over replicas, of which a sample is simulated in full."""

from __future__ import annotations

import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from ...core.errors import ConfigError
from ...policies.policy import Policy
from ..serve_config import EngineConfig
from .clock import AdapterKind, ModelClock
from .replica import Replica, ReplicaResult
from .report import SimulatedCase, SimulationReport
from .slots import SimulatedAdapter
from .trace import Trace


class Routing(StrEnum):
    """Which replica a request goes to.

    `affinity`: that of its adapter, so that a replica sees few of them.  `spread`: the next one.
    """

    AFFINITY = "affinity"
    SPREAD = "spread"


@dataclass(frozen=True)
class Simulation:
    """What is simulated.

    Attributes:
        trace: of the whole fleet.
        kinds: of the adapters; each adapter is of one, by their shares.
        clocks: how long things take, by policy.
        config: of each replica's engine; its slots are those of `slots`.
        slots: how many of the width that all kinds fit; a case each.
        replicas: how many there are.
        routing: of requests to them.
        sample: how many of them are simulated.
        blocks: of each replica's KV cache.
    """

    trace: Trace
    kinds: tuple[AdapterKind, ...]
    clocks: dict[Policy, ModelClock]
    config: EngineConfig
    slots: tuple[int, ...]
    replicas: int = 1
    routing: Routing = Routing.AFFINITY
    sample: int = 16
    blocks: int = 1 << 40

    def run(self, *, model: str, device: str, measured: bool, trace: str) -> SimulationReport:
        """Simulate every policy with every number of slots.

        Args:
            model, device, measured, trace: for the report.

        Raises:
            ConfigError: the trace has fewer clients than there are replicas.
        """
        self._check_blocks()
        begun = time.perf_counter()
        homes = self._homes()
        chosen = self._chosen(homes)
        parts = [self._part(homes, replica) for replica in chosen]
        weights = [n / len(part) for n, part in zip(chosen.values(), parts, strict=True)]
        cases = [
            self._case(policy, clock, slots, parts, weights)
            for policy, clock in self.clocks.items()
            for slots in self.slots
        ]
        return SimulationReport(
            model=model,
            device=device,
            measured=measured,
            trace=trace,
            requests=len(self.trace),
            adapters=len(self.trace.names),
            replicas=self.replicas,
            simulated=len(chosen),
            routing=self.routing,
            seconds=time.perf_counter() - begun,
            cases=tuple(cases),
        )

    def _check_blocks(self) -> None:
        longest = int((self.trace.prompts + self.trace.outputs).max())
        held = self.blocks * self.config.block_size
        if longest > held:
            raise ConfigError(
                f"a request of {longest} tokens",
                f"does not fit a KV cache of {held}",
                "give the cache more blocks (command line: --num-gpu-blocks-override), or draw "
                "shorter requests",
            )

    def _homes(self) -> np.ndarray:
        """The replica of each request."""
        count = len(self.trace)
        spread = np.arange(count) % self.replicas
        if self.routing == Routing.SPREAD:
            return spread
        hashes = [zlib.crc32(name.encode()) % self.replicas for name in self.trace.names]
        by_adapter = np.array([*hashes, 0])
        return np.where(self.trace.adapters < 0, spread, by_adapter[self.trace.adapters])

    def _chosen(self, homes: np.ndarray) -> dict[int, float]:
        """Replicas that stand for others of as many requests, and for how many requests each."""
        load = np.bincount(homes, minlength=self.replicas)
        order = np.argsort(load, kind="stable")
        order = order[load[order] > 0]
        strata = np.array_split(order, min(self.sample, len(order)))
        return {int(part[len(part) // 2]): float(load[part].sum()) for part in strata}

    def _part(self, homes: np.ndarray, replica: int) -> Trace:
        clients = self.trace.clients
        if clients is None:
            return self.trace.part(homes == replica, None)
        if clients < self.replicas:
            raise ConfigError(
                f"a trace of {clients} clients",
                f"leaves some of {self.replicas} replicas without any",
                f"draw it with clients={16 * self.replicas}, or with rate= (command line: --trace)",
            )
        return self.trace.part(homes == replica, clients // self.replicas)

    def _case(
        self,
        policy: Policy,
        clock: ModelClock,
        slots: int,
        parts: Sequence[Trace],
        weights: Sequence[float],
    ) -> SimulatedCase:
        width = max(kind.rank for kind in self.kinds)
        given = self.config.model_dump(include=self.config.model_fields_set)
        for name in ("lora_slots", "max_loras", "max_lora_rank"):
            given.pop(name, None)
        config = EngineConfig.checked(**{**given, "max_loras": slots, "max_lora_rank": width})
        results = []
        for part in parts:
            replica = Replica(config, self._adapters(part, clock), clock, self.blocks)
            results.append(replica.run(part))
        return _case(policy.name, slots, results, weights, len(self.trace))

    def _adapters(self, trace: Trace, clock: ModelClock) -> dict[str, SimulatedAdapter]:
        shares = np.array([kind.share for kind in self.kinds]).cumsum()
        nbytes = [clock.nbytes(kind) for kind in range(len(self.kinds))]
        found = {}
        for index in np.unique(trace.adapters[trace.adapters >= 0]).tolist():
            name = trace.names[index]
            # By its name, so that every case and every replica agree.
            at = zlib.crc32(f"kind of {name}".encode()) / 2**32 * shares[-1]
            kind = int(np.searchsorted(shares, at, side="right"))
            found[name] = SimulatedAdapter(name, kind, self.kinds[kind].rank, nbytes[kind])
        return found


def _case(
    policy: str,
    slots: int,
    results: Sequence[ReplicaResult],
    weights: Sequence[float],
    requests: int,
) -> SimulatedCase:
    """All replicas together; each result counts as often as its weight says."""

    def total(name: str) -> float:
        pairs = zip(results, weights, strict=True)
        return float(sum(weight * getattr(result, name) for result, weight in pairs))

    busy, looked_up = total("busy_seconds"), total("hits") + total("misses")
    waits = np.concatenate([result.first_token_seconds for result in results])
    counts = [len(result.first_token_seconds) for result in results]
    p50, p99 = np.quantile(
        waits, (0.5, 0.99), weights=np.repeat(weights, counts), method="inverted_cdf"
    )
    alone = zip(results, weights, strict=True)
    return SimulatedCase(
        policy=policy,
        slots=slots,
        hit_rate=total("hits") / looked_up if looked_up else 1.0,
        loads_per_request=total("loads") / requests,
        stall_seconds_per_request=total("stall_seconds") / requests,
        stall_share=total("stall_seconds") / busy,
        share_lost=1 - total("base_seconds") / busy,
        tokens_per_second=total("tokens") / busy,
        fleet_tokens_per_second=sum(w * r.tokens / r.seconds for r, w in alone if r.seconds),
        first_token_p50=float(p50),
        first_token_p99=float(p99),
    )
