"""Activations and every key: the C kernel against torch's activation and the eager quantiser."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from benchmarks.harness import (
    begin,
    contract_for,
    eager_codes,
    random_bf16,
    report_speedup,
    report_time_of,
    rounds_for,
)
from benchmarks.results import Result
from branchline.core import FP8_STATIC_TENSOR, KEYS
from branchline.core.oracle import ActivationSemantics
from branchline.fusion.producers.activation import NativeActivation
from branchline.fusion.producers.base import Emission

SHAPES = ((512, 11264), (1, 11264))
STATIC = {
    "relu2": lambda x: F.relu(x).square(),
    "silu": F.silu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


def run(short: bool = False) -> list[Result]:
    """Print and return the comparison at each shape."""
    results: list[Result] = []
    begin("activations and static FP8")
    for rows, columns in SHAPES:
        gate, up = random_bf16(rows, columns), random_bf16(rows, columns, seed=1)
        for name, function in STATIC.items():
            plain, gated = (ActivationSemantics(name, gated=g) for g in (False, True))
            results += _compare(plain, (gate,), lambda x, f=function: f(x), short)
            results += _compare(gated, (gate, up), lambda g, u, f=function: f(g) * u, short)
    begin("SiLU(gate) * up and every key")
    semantics = ActivationSemantics("silu", gated=True)
    gate, up = random_bf16(512, 11264), random_bf16(512, 11264, seed=1)
    for key in KEYS[1:]:
        results += _compare(semantics, (gate, up), lambda g, u: F.silu(g) * u, short, key)
    return results


def _compare(semantics, inputs, activation, short, key=FP8_STATIC_TENSOR) -> list[Result]:
    emission, producer = Emission(contract_for(key)), NativeActivation()
    rows, columns = inputs[0].shape
    label = f"{rows}x{columns} {semantics} {'' if key.static else key}".rstrip()

    def native() -> torch.Tensor:
        return producer.produce(semantics, inputs, emission).activation.codes

    def eager() -> torch.Tensor:
        return eager_codes(activation(*inputs), key)

    rounds = rounds_for(rows, short)
    # torch's GELU gives an element other bytes at the end of a tensor: at these widths it does not.
    name, clone = "activation", inputs[0].clone
    return [
        report_speedup(name, f"{label} against eager", native, eager, rounds),
        report_time_of(name, f"{label} against clone()", native, clone, rounds),
    ]


if __name__ == "__main__":
    run()
