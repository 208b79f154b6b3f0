"""Producers and base matmuls on a GPU: checked against the definition, then timed.

``python -m benchmarks.gpu --out results.json`` takes a few minutes.  Every time of a producer is a
median beside that of the eager pair and of a plain copy of the input, in one process; that of a
matmul beside bfloat16's.  ``--only matmul`` takes less than two minutes; ``--only experts`` has the
grouped ones of mixtures of experts.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import experts, matmul
from benchmarks.gpu.timing import alternate
from benchmarks.harness import GLOBAL_SCALE, SCALE, random_bf16, say
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
from branchline.fusion import REGISTRY, verify
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


def run(device: str, rows: tuple[int, ...], columns: int, rounds: int) -> list[dict[str, Any]]:
    """Every site, key and route at every number of rows; prints and returns one line each."""
    lines = []
    for number in rows:
        for semantics in SITES:
            inputs = _inputs(semantics, number, columns, device)
            for key in KEYS:
                for route in (Route.FUSED, Route.DUAL, Route.ABSORBED):
                    if route == Route.FUSED or key == FP8_STATIC_TENSOR:
                        lines.append(_measure(semantics, inputs, key, route, device, rounds))
                        say(_row(lines[-1]))
    return lines


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
    device: str,
    rounds: int,
) -> dict[str, Any]:
    rows, columns = inputs[0].shape
    emission = _emission(key, route, rows, columns, device)
    producer = _producer(semantics, key, route, columns, device)

    def ours() -> object:
        return producer.produce(semantics, inputs, emission)

    def eager() -> object:
        raw = eager_raw(semantics, inputs).out
        shrunk = [shrink_eager(raw, request) for request in emission.shrinks]
        return quantize_for(raw, emission, "eager"), shrunk

    _refuse_other_codes(producer, semantics, inputs, emission)
    times = alternate((ours, eager, inputs[0].clone), device, rounds)
    share = {Route.FUSED: 0, Route.DUAL: max(1, rows // SLOTS), Route.ABSORBED: rows}[route]
    traffic = SiteTraffic(rows, columns, torch.bfloat16, key, share, RANK if share else 0)
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
        "bytes_per_element": traffic.per_element(route),
    }


def _producer(
    semantics: Semantics, key: QuantKey, route: Route, columns: int, device: str
) -> Producer:
    request = ProducerRequest(
        semantics,
        key,
        route,
        torch.bfloat16,
        columns,
        detect_platform(device),
        RANK,
        torch.bfloat16,
    )
    return REGISTRY.select(request, force="triton").producer or EAGER


def _refuse_other_codes(producer, semantics, inputs, emission) -> None:
    ours = producer.produce(semantics, inputs, emission).activation.codes
    theirs = EAGER.produce(semantics, inputs, emission).activation.codes
    differing = int((ours.view(torch.uint8) != theirs.view(torch.uint8)).sum())
    if differing:
        raise AssertionError(f"{semantics} {emission.contract.key}: {differing} codes differ")


def _row(line: dict[str, Any]) -> str:
    ours, eager, copy = (
        line[name] for name in ("microseconds", "eager_microseconds", "copy_microseconds")
    )
    label = f"{line['rows']}x{line['columns']} {line['site']} {line['key']} {line['route']}"
    return (
        f"{label:<70}{ours:9.1f} us  {eager / ours:6.1f} times as fast as eager, "
        f"{ours / copy:.2f} times a copy"
    )


def _arguments() -> Iterator[tuple[str, dict[str, Any]]]:
    yield "--device", {"default": "cuda", "help": "cuda; cpu runs in Triton's interpreter"}
    yield "--rows", {"type": int, "nargs": "+", "default": [4096, 64, 1]}
    yield "--columns", {"type": int, "default": 11264}
    yield "--tokens", {"type": int, "nargs": "+", "default": matmul.TOKENS}
    yield "--weights", {"nargs": "+", "default": matmul.WEIGHTS, "metavar": "NxK"}
    yield "--layers", {"nargs": "+", "default": experts.LAYERS, "metavar": "ExkxNxK"}
    yield "--only", {"choices": ["producers", "matmul", "experts"], "help": "leave the rest out"}
    yield "--rounds", {"type": int, "default": 50}
    yield "--out", {"type": Path, "help": "write the results as JSON"}
    yield "--no-verify", {"action": "store_true", "help": "skip the check against the definition"}


def main(arguments: list[str] | None = None) -> int:
    """Verify, measure, write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    for name, settings in _arguments():
        parser.add_argument(name, **settings)
    chosen = parser.parse_args(arguments)
    results: dict[str, Any] = {"device": _device_name(chosen.device), "torch": torch.__version__}
    parts = (chosen.only,) if chosen.only else ("producers", "matmul", "experts")
    if "producers" in parts and not _producers(chosen, results):
        # No speed of a kernel that computes something else.
        return _write(chosen.out, results, 1)
    device, tokens, rounds = chosen.device, tuple(chosen.tokens), chosen.rounds
    if "matmul" in parts:
        results["matmuls"] = matmul.run(device, tokens, tuple(chosen.weights), rounds)
    if "experts" in parts:
        results["experts"] = experts.run(device, tokens, tuple(chosen.layers), rounds)
    return _write(chosen.out, results, 0)


def _producers(chosen: argparse.Namespace, results: dict[str, Any]) -> bool:
    """Verify and measure; False where a producer is refuted."""
    if not chosen.no_verify:
        report = verify(device=chosen.device, quick=True)
        say(str(report))
        results["verify"] = report.model_dump(mode="json")
        if not report.ok:
            return False
    results["lines"] = run(chosen.device, tuple(chosen.rows), chosen.columns, chosen.rounds)
    return True


def _device_name(device: str) -> str:
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else device


def _write(out: Path | None, results: dict[str, Any], code: int) -> int:
    if out is not None:
        out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return code


if __name__ == "__main__":
    raise SystemExit(main())
