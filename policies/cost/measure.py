"""Measures what routes cost on this device, by the kernels that would serve them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from ...adapters.kernels.base import LowRankCall, LowRankConfig, LowRankStack
from ...adapters.kernels.selection import select_low_rank
from ...core.errors import KernelUnavailableError
from ...core.fingerprint import fingerprint_of
from ...core.oracle import ActivationSemantics, NormSemantics, Semantics
from ...core.platform import Platform, detect_platform
from ...core.quant_key import (
    FP8_DYNAMIC_GROUP128,
    FP8_DYNAMIC_TOKEN,
    FP8_STATIC_TENSOR,
    MXFP8,
    QuantKey,
)
from ...core.route import Route
from ...fusion.producers.base import Emission, Producer, ProducerRequest
from ...fusion.raw import compute_raw
from ...fusion.registry import REGISTRY
from ...fusion.traffic import SiteTraffic
from ...linear.contract import InputContract, InputScale
from ...linear.outputs import RawRequest, Shrink
from ...linear.quantizers import quantize_input
from .calibration import DeviceCosts
from .routes import RouteCost, Timing, fitted

_DTYPE = torch.bfloat16
_SEMANTICS: dict[str, Semantics] = {
    "activation": ActivationSemantics("silu", gated=True),
    "norm": NormSemantics("llama", 1e-6),
}
_KEYS = (FP8_STATIC_TENSOR, FP8_DYNAMIC_TOKEN, FP8_DYNAMIC_GROUP128, MXFP8)
_SLOTS = 8
# The expand is the same on every route and no part of a site's cost.
_OUTPUTS = 16
_SITE = "calibrate"


@dataclass(frozen=True)
class Extent:
    """How much is measured.

    Attributes:
        rows: of the activations.
        columns: likewise.
        ranks: of the adapters.
        rounds: of each case, its routes in turn.
    """

    rows: tuple[int, ...] = (1, 8, 64, 512)
    columns: tuple[int, ...] = (512, 4096)
    ranks: tuple[int, ...] = (8, 64)
    rounds: int = 9


@dataclass(frozen=True)
class Case:
    """One batch at one site, which every route is measured with.

    Attributes:
        kind: "activation" or "norm".
        key: of the consumer.
        rows: of the activation.
        columns: of it.
        adapter_rows: the first so many have an adapter.
        rank: of the adapters; 0 without.
    """

    kind: str
    key: QuantKey
    rows: int
    columns: int
    adapter_rows: int = 0
    rank: int = 0

    @property
    def traffic(self) -> SiteTraffic:
        """Its traffic."""
        return SiteTraffic(self.rows, self.columns, _DTYPE, self.key, self.adapter_rows, self.rank)

    @property
    def routes(self) -> tuple[Route, ...]:
        """Those that are possible."""
        if not self.adapter_rows:
            return (Route.UNFUSED, Route.FUSED)
        return (Route.UNFUSED, Route.DUAL, Route.ABSORBED)


def calibrate(
    device: str,
    extent: Extent | None = None,
    told: Callable[[int, int], None] = lambda done, count: None,
) -> DeviceCosts:
    """Measure this device.

    Args:
        device: "cpu", "cuda" or "cuda:N".
        extent: how much is measured.
        told: after each case, how many are done, of how many.

    Raises:
        KernelUnavailableError: no producer runs there that would save anything.
    """
    extent = extent or Extent()
    begin = time.perf_counter()
    bench = Bench(torch.device(device), extent.rounds)
    wanted = list(cases(extent))
    timings: dict[Case, dict[Route, float]] = {}
    for case in wanted:
        timings[case] = bench.measure(case)
        told(len(timings), len(wanted))
    routes = tuple(
        fitted(kind, route, [Timing(c.traffic, found[route]) for c, found in group])
        for kind in _SEMANTICS
        for key in _KEYS
        for route in Route
        if (
            group := [
                (case, found)
                for case, found in timings.items()
                if (case.kind, case.key) == (kind, key) and route in found
            ]
        )
    )
    if not routes:
        raise KernelUnavailableError(
            f"calibrate on {device}",
            "no producer runs here that saves anything, so there is nothing to choose among",
            "install branchline where a C compiler is, or calibrate a GPU with Triton installed",
        )
    bandwidth, launch = _whole(timings)
    return DeviceCosts(
        device_type=bench.platform.device_type,
        fingerprint=fingerprint_of(bench.platform),
        bandwidth=bandwidth,
        launch_seconds=launch,
        routes=routes,
        median_error=_median_error(timings, routes),
        seconds=time.perf_counter() - begin,
    )


def cases(extent: Extent) -> Iterator[Case]:
    """All that is measured."""
    for kind in _SEMANTICS:
        for key in _KEYS:
            for rows in extent.rows:
                for columns in extent.columns:
                    yield Case(kind, key, rows, columns)
                    for adapted in sorted({max(rows // 8, 1), rows}):
                        for rank in extent.ranks:
                            yield Case(kind, key, rows, columns, adapted, rank)


class Bench:
    """Runs cases on one device.

    Args:
        device: to measure.
        rounds: of each case.
    """

    def __init__(self, device: torch.device, rounds: int) -> None:
        self.device = device
        self.platform: Platform = detect_platform(device)
        self._rounds = rounds

    def measure(self, case: Case) -> dict[Route, float]:
        """Median seconds by route, for all routes that a producer serves here, in turn."""
        runs = {
            route: run for route in case.routes if (run := self.run_of(case, route)) is not None
        }
        if set(runs) == {Route.UNFUSED}:
            return {}
        seconds = self._in_turn(tuple(runs.values()))
        return dict(zip(runs, seconds, strict=True))

    def run_of(self, case: Case, route: Route) -> Callable[[], object] | None:
        """What a site and its branch do on `route`; None where no producer serves it."""
        semantics = _SEMANTICS[case.kind]
        contract = _contract(case.key, self.device)
        inputs = self._inputs(case)
        low_rank = self._low_rank(case) if case.adapter_rows else None
        if route == Route.UNFUSED:
            return partial(_unfused, semantics, inputs, contract, low_rank)
        producer = self._producer(case, route)
        if producer is None:
            return None
        return partial(
            _routed, producer, semantics, inputs, _emission(contract, route, low_rank), low_rank
        )

    def _producer(self, case: Case, route: Route) -> Producer | None:
        absorbed = route == Route.ABSORBED
        request = ProducerRequest(
            _SEMANTICS[case.kind], case.key, route, _DTYPE, case.columns, self.platform,
            case.rank if absorbed else 0, _DTYPE if absorbed else None,
        )  # fmt: skip
        found = REGISTRY.select(request).producer
        return None if found is None or found.emulated else found

    def _inputs(self, case: Case) -> tuple[torch.Tensor, ...]:
        x = self._random(case.rows, case.columns)
        other = (case.rows, case.columns) if case.kind == "activation" else (case.columns,)
        return x, self._random(*other)

    def _low_rank(self, case: Case) -> _LowRank:
        slots = torch.arange(case.rows, dtype=torch.int32) % _SLOTS
        slots[case.adapter_rows :] = -1
        stack = LowRankStack(
            _SITE,
            self._random(_SLOTS * case.rank, case.columns),
            self._random(_SLOTS * case.rank, _OUTPUTS),
            (torch.arange(_SLOTS, dtype=torch.int32) * case.rank).to(self.device),
            torch.full((_SLOTS,), case.rank, dtype=torch.int32, device=self.device),
            torch.ones(_SLOTS, device=self.device),
            case.rank,
        )
        kernel = select_low_rank(LowRankConfig(_DTYPE, case.rank), self.platform).kernel
        out = torch.zeros(case.rows, _OUTPUTS, dtype=_DTYPE, device=self.device)
        return _LowRank(stack, kernel(stack), slots.to(self.device), out)

    def _random(self, *shape: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(len(shape))
        return torch.randn(shape, generator=generator).to(_DTYPE).to(self.device)

    def _in_turn(self, runs: Sequence[Callable[[], object]]) -> list[float]:
        found: list[list[float]] = [[] for _ in runs]
        # Short ones are repeated, so that a clock and an interrupt weigh little.
        repeats = [max(1, min(20, int(200e-6 / self._once(run, 1)))) for run in runs]
        for _ in range(self._rounds):
            for run, record, repeat in zip(runs, found, repeats, strict=True):
                record.append(self._once(run, repeat))
        return [statistics.median(record) for record in found]

    def _once(self, run: Callable[[], object], repeat: int) -> float:
        run()
        self._wait()
        begin = time.perf_counter()
        for _ in range(repeat):
            run()
        self._wait()
        return (time.perf_counter() - begin) / repeat

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


@dataclass(frozen=True, eq=False)
class _LowRank:
    """The adapters of a case: their matrices, the kernel, each row's slot, the base output."""

    stack: LowRankStack
    kernel: object
    slots: torch.Tensor
    out: torch.Tensor

    def add(self, source: torch.Tensor, *, shrunk: bool) -> object:
        call = LowRankCall(self.kernel, self.out, source, self.slots, shrunk)
        return type(self.kernel).run([call])  # pyright: ignore[reportAttributeAccessIssue]

    def request(self) -> Shrink:
        stack = self.stack
        return Shrink(
            _SITE, stack.a, stack.starts, stack.ranks, self.slots, stack.width, stack.width
        )


def _contract(key: QuantKey, device: torch.device) -> InputContract:
    scale = torch.tensor([0.04], device=device)
    return InputContract(key, InputScale.checked(scale, _SITE) if key.static else None)


def _emission(contract: InputContract, route: Route, low_rank: _LowRank | None) -> Emission:
    if low_rank is None:
        return Emission(contract, route, _SITE)
    if route == Route.DUAL:
        return Emission(contract, route, _SITE, RawRequest(low_rank.slots >= 0))
    return Emission(contract, route, _SITE, shrinks=(low_rank.request(),))


def _unfused(
    semantics: Semantics,
    inputs: tuple[torch.Tensor, ...],
    contract: InputContract,
    low_rank: _LowRank | None,
) -> None:
    raw = compute_raw(semantics, *inputs)
    quantize_input(raw, contract, _SITE)
    if low_rank is not None:
        low_rank.add(raw, shrunk=False)


def _routed(
    producer: Producer,
    semantics: Semantics,
    inputs: tuple[torch.Tensor, ...],
    emission: Emission,
    low_rank: _LowRank | None,
) -> None:
    made = producer.produce(semantics, inputs, emission).activation
    if low_rank is None:
        return
    if emission.route == Route.DUAL:
        low_rank.add(made.require_raw_rows(_SITE).values, shrunk=False)
        return
    shrunk = made.shrunk_for(_SITE)
    assert shrunk is not None
    low_rank.add(shrunk, shrunk=True)


def _whole(timings: dict[Case, dict[Route, float]]) -> tuple[float, float]:
    """Bytes a second of the largest fused activation, and the seconds of the fastest call."""
    fused = {
        case: found[Route.FUSED]
        for case, found in timings.items()
        if case.kind == "activation" and Route.FUSED in found
    }
    large = max(fused, key=lambda case: (case.rows * case.columns, -fused[case]))
    read = 2 * large.rows * large.columns * _DTYPE.itemsize
    moved = read + large.traffic.bytes_moved(Route.FUSED)
    return moved / fused[large], min(fused.values())


def _median_error(timings: dict[Case, dict[Route, float]], routes: Sequence[RouteCost]) -> float:
    costs = {(cost.kind, cost.key, cost.route): cost for cost in routes}
    return statistics.median(
        abs(costs[case.kind, str(case.key), str(route)].seconds(case.traffic) / seconds - 1)
        for case, found in timings.items()
        for route, seconds in found.items()
    )
