"""Producers on a GPU beside the eager pair, the same compiled by torch, and a plain copy."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.gpu import compiled
from benchmarks.gpu.timing import alternate, copy_bandwidth
from benchmarks.harness import GLOBAL_SCALE, SCALE, ResultsDifferError, random_bf16, say
from branchline.core import (
    FP8_DYNAMIC_GROUP128,
    FP8_DYNAMIC_TOKEN,
    FP8_STATIC_TENSOR,
    MXFP8,
    QuantKey,
    detect_platform,
)
from branchline.core.oracle import ActivationSemantics, NormSemantics, Semantics
from branchline.core.route import Route
from branchline.fusion import REGISTRY
from branchline.fusion.producers.base import Emission, Producer, ProducerRequest
from branchline.fusion.producers.eager import EAGER, eager_raw, quantize_for
from branchline.fusion.traffic import SiteTraffic
from branchline.linear.contract import InputContract, InputScale
from branchline.linear.outputs import RawRequest, Shrink
from branchline.linear.shrink import shrink_eager

KEYS = (FP8_STATIC_TENSOR, FP8_DYNAMIC_TOKEN, FP8_DYNAMIC_GROUP128, MXFP8)
SITES: tuple[Semantics, ...] = (
    ActivationSemantics("relu2", gated=False),
    ActivationSemantics("silu", gated=True),
    ActivationSemantics("gelu_tanh", gated=True),
    NormSemantics("llama", 1e-6),
    NormSemantics("layer_norm", 1e-6),
)
SLOTS, RANK = 16, 16


@dataclass(frozen=True)
class Settings:
    """How to measure.

    Attributes:
        device: where.
        rounds: of every time.
        compiled: measure torch.compile too (seconds of compilation for each site and shape).
        force: name of the only producer that may be chosen; None for the registry's own choice.
        bandwidth: bytes a second of a large copy, read and written.
    """

    device: str
    rounds: int
    compiled: bool
    force: str | None
    bandwidth: float


def run(
    device: str, rows: tuple[int, ...], columns: int, rounds: int, compile_too: bool
) -> Iterator[dict[str, Any]]:
    """Every site, key and route at every number of rows; prints and yields one line each.

    Raises:
        ResultsDifferError: a producer's codes are not the definition's.
        KernelUnavailableError: Triton's producers do not run on this GPU.
    """
    triton = device.startswith("cuda") or detect_platform(device).interpreted
    settings = Settings(
        device, rounds, compile_too, "triton" if triton else None, copy_bandwidth(device, rounds)
    )
    say(f"a large copy moves {settings.bandwidth / 1e9:.0f} GB/s, read and written")
    for number in rows:
        for semantics in SITES:
            inputs = _inputs(semantics, number, columns, device)
            for key in KEYS:
                for route in (Route.FUSED, Route.DUAL, Route.ABSORBED):
                    if route == Route.FUSED or key == FP8_STATIC_TENSOR:
                        line = _measure(semantics, inputs, key, route, settings)
                        say(_row(line))
                        yield line


def _inputs(semantics: Semantics, rows: int, columns: int, device: str) -> tuple[torch.Tensor, ...]:
    x = random_bf16(rows, columns).to(device)
    if isinstance(semantics, ActivationSemantics):
        return (x, random_bf16(rows, columns, seed=1).to(device)) if semantics.gated else (x,)
    return x, random_bf16(columns, seed=1).to(device)


def _emission(key: QuantKey, route: Route, rows: int, columns: int, device: str) -> Emission:
    def checked(value: float) -> InputScale:
        return InputScale.checked(torch.tensor([value], device=device), "benchmark")

    contract = InputContract(
        key,
        checked(SCALE) if key.static else None,
        checked(GLOBAL_SCALE) if key.global_scale else None,
    )
    requests = max(1, min(rows, SLOTS))
    if route == Route.DUAL:
        wanted = torch.zeros(requests, dtype=torch.bool, device=device)
        wanted[0] = True
        return Emission(contract, route, raw=RawRequest(wanted))
    if route == Route.FUSED:
        return Emission(contract, route)
    a = (random_bf16(SLOTS, RANK, columns, seed=3).float() / 64).bfloat16().to(device)
    ranks = torch.full((SLOTS,), RANK, dtype=torch.int32, device=device)
    slots = torch.arange(requests, dtype=torch.int32, device=device) % SLOTS
    request = Shrink.stacked("down_proj", a, ranks, slots, RANK)
    return Emission(contract, route, shrinks=(request,))


def _measure(
    semantics: Semantics,
    inputs: tuple[torch.Tensor, ...],
    key: QuantKey,
    route: Route,
    settings: Settings,
) -> dict[str, Any]:
    rows, columns = inputs[0].shape
    emission = _emission(key, route, rows, columns, settings.device)
    producer = _producer(semantics, key, route, columns, settings)

    def ours() -> object:
        return producer.produce(semantics, inputs, emission)

    def eager() -> object:
        raw = eager_raw(semantics, inputs).out
        shrunk = [shrink_eager(raw, request) for request in emission.shrinks]
        return quantize_for(raw, emission, "eager"), shrunk

    codes = _checked_codes(producer, semantics, inputs, emission)
    functions = [ours, eager, inputs[0].clone]
    share = None
    if settings.compiled and route == Route.FUSED:
        theirs = compiled.pair(semantics, key, SCALE)
        if theirs is not None:
            share = _differing(theirs(*inputs), codes)
            functions.append(lambda: theirs(*inputs))
    times = alternate(tuple(functions), settings.device, settings.rounds)
    read = {Route.FUSED: 0, Route.DUAL: max(1, rows // SLOTS), Route.ABSORBED: rows}[route]
    traffic = SiteTraffic(rows, columns, torch.bfloat16, key, read, RANK if read else 0)
    moved = sum(t.nbytes for t in inputs) + traffic.bytes_moved(route)
    return {
        "site": str(semantics),
        "key": str(key),
        "route": str(route),
        "producer": producer.name,
        "rows": rows,
        "columns": columns,
        "microseconds": times[0] * 1e6,
        "eager_microseconds": times[1] * 1e6,
        "copy_microseconds": times[2] * 1e6,
        "compiled_microseconds": times[3] * 1e6 if share is not None else None,
        "compiled_codes_differing": share,
        "bytes_moved": moved,
        "share_of_bandwidth": moved / times[0] / settings.bandwidth,
        "bytes_per_element": traffic.per_element(route),
    }


def _producer(
    semantics: Semantics, key: QuantKey, route: Route, columns: int, settings: Settings
) -> Producer:
    request = ProducerRequest(
        semantics,
        key,
        route,
        torch.bfloat16,
        columns,
        detect_platform(settings.device),
        RANK,
        torch.bfloat16,
    )
    # Nothing is forced on a CPU: where no kernel has the key there, a line names the definition.
    return REGISTRY.select(request, force=settings.force).producer or EAGER


def _checked_codes(producer, semantics, inputs, emission) -> torch.Tensor:
    ours = producer.produce(semantics, inputs, emission).activation.codes
    theirs = EAGER.produce(semantics, inputs, emission).activation.codes
    differing = int((ours.view(torch.uint8) != theirs.view(torch.uint8)).sum())
    if differing:
        raise ResultsDifferError(f"{semantics} {emission.contract.key}: {differing} codes differ")
    return ours


def _differing(theirs: torch.Tensor, codes: torch.Tensor) -> float:
    """The share of codes that are others; rounding once instead of twice is no error of theirs."""
    # float32 holds every sum of a code and the next, and zero is zero whatever its sign.
    differing = (theirs.float() != codes[: theirs.shape[0], : theirs.shape[1]].float()).sum()
    return int(differing) / math.prod(theirs.shape)


def _row(line: dict[str, Any]) -> str:
    ours, eager, copy, theirs = (
        line[f"{name}microseconds"] for name in ("", "eager_", "copy_", "compiled_")
    )
    label = f"{line['rows']}x{line['columns']} {line['site']} {line['key']} {line['route']}"
    beside = f", {theirs / ours:.2f} times as fast as torch.compile" if theirs else ""
    return (
        f"{label:<70}{ours:9.1f} us  {eager / ours:6.1f} times as fast as eager{beside}, "
        f"{ours / copy:.2f} times a copy, {line['share_of_bandwidth']:.2f} of bandwidth"
    )
