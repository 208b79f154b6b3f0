"""What live adapters cost at a site: dual against fused, absorbed against the unfused pair."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
import torch.nn.functional as F

from benchmarks.harness import (
    alternate,
    begin,
    contract_for,
    eager_codes,
    random_bf16,
    report_time_of,
    rounds_for,
    say,
)
from benchmarks.results import Result
from branchline.core import FP8_STATIC_TENSOR
from branchline.core.oracle import ActivationSemantics
from branchline.core.route import Route
from branchline.fusion.producers.activation import NativeActivation
from branchline.fusion.producers.base import Emission
from branchline.fusion.raw import compute_raw
from branchline.fusion.traffic import SiteTraffic
from branchline.linear.outputs import RawRequest, Shrink
from branchline.linear.quantizers import quantize_input
from branchline.linear.shrink import shrink, shrink_eager

ROWS, COLUMNS, SLOTS, RANK = 512, 11264, 16, 16
CASES = {
    "relu2": (ActivationSemantics("relu2", gated=False), lambda x: F.relu(x).square()),
    "silu_mul": (ActivationSemantics("silu", gated=True), lambda g, u: F.silu(g) * u),
}


def run(short: bool = False) -> list[Result]:
    """Print traffic, print and return times of the routes."""
    results: list[Result] = []
    _traffic()
    begin(f"routes at {ROWS}x{COLUMNS}, static FP8")
    rounds = rounds_for(ROWS, short)
    for name, (semantics, function) in CASES.items():
        gate, up = random_bf16(ROWS, COLUMNS), random_bf16(ROWS, COLUMNS, seed=1)
        inputs = (gate, up) if semantics.gated else (gate,)
        results.append(_dual(name, semantics, inputs, rounds))
        for requests in (SLOTS, ROWS):
            label = f"{name}, {requests} requests"
            results += _absorbed(label, semantics, inputs, function, requests, rounds)
    return results


def _traffic() -> None:
    say("\nbytes an element beyond reading the input, adapters on all rows (on 1 of 16)")
    for route in (Route.UNFUSED, Route.DUAL, Route.ABSORBED, Route.FUSED):
        every, few = (
            SiteTraffic(ROWS, COLUMNS, torch.bfloat16, FP8_STATIC_TENSOR, n, RANK)
            for n in (ROWS, ROWS // 16)
        )
        say(f"{route!s:<10}{every.per_element(route):6.2f}  ({few.per_element(route):.2f})")


def _producer(semantics, inputs, emission: Emission) -> Callable[[], object]:
    producer = NativeActivation()
    return lambda: producer.produce(semantics, inputs, emission).activation


def _dual(name: str, semantics, inputs, rounds: int) -> Result:
    contract = contract_for(FP8_STATIC_TENSOR)
    wanted = torch.zeros(16, dtype=torch.bool)
    wanted[5] = True
    dual = _producer(semantics, inputs, Emission(contract, Route.DUAL, raw=RawRequest(wanted)))
    fused = _producer(semantics, inputs, Emission(contract))
    label = f"{name}: dual for 1 of 16 rows against fused"
    return report_time_of("routes", label, dual, fused, rounds)


def _absorbed(label: str, semantics, inputs, function, requests: int, rounds: int) -> list[Result]:
    contract = contract_for(FP8_STATIC_TENSOR)
    a = (random_bf16(SLOTS, RANK, COLUMNS, seed=3).float() / 64).bfloat16()
    slots = torch.arange(requests, dtype=torch.int32) % SLOTS
    ranks = torch.full((SLOTS,), RANK, dtype=torch.int32)
    request = Shrink.stacked("down_proj", a, ranks, slots, RANK)
    absorbed = _producer(semantics, inputs, Emission(contract, Route.ABSORBED, shrinks=(request,)))

    def unfused() -> tuple[object, torch.Tensor]:
        raw = compute_raw(semantics, *inputs)
        return quantize_input(raw, contract, "down_proj"), shrink(raw, request)

    def eager() -> tuple[torch.Tensor, torch.Tensor]:
        raw = function(*inputs)
        return eager_codes(raw, FP8_STATIC_TENSOR), shrink_eager(raw, request)

    made = absorbed()
    codes, shrunk = unfused()
    if not torch.equal(made.codes.view(torch.uint8), codes.codes.view(torch.uint8)):
        raise AssertionError(f"{label}: codes differ")
    if not torch.equal(made.shrunk["down_proj"], shrunk):
        raise AssertionError(f"{label}: shrunk rows differ")
    results: list[Result] = []
    for what, other, count in (("C unfused", unfused, rounds), ("eager", eager, min(rounds, 5))):
        found = alternate(absorbed, other, count)
        say(
            f"{label}: absorbed {found.ratio():.2f} times as fast as {what} "
            f"(best runs: {found.ratio(min):.2f})"
        )
        results.append(
            Result(
                benchmark="routes",
                case=f"{label}: absorbed",
                value=statistics.median(found.ours) * 1e6,
                unit="us",
                ratio=found.ratio(),
                against=what,
            )
        )
    return results


if __name__ == "__main__":
    run()
