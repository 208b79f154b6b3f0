"""Norms and static FP8: the C kernel against the eager norm and quantiser."""

from __future__ import annotations

import torch

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
from branchline.core import FP8_STATIC_TENSOR
from branchline.core.oracle import NORM_ORDERS, NormSemantics, norm
from branchline.fusion.producers.base import Emission
from branchline.fusion.producers.norm import NativeNorm

SHAPES = ((512, 4096), (1, 4096))


def run(short: bool = False) -> list[Result]:
    """Print and return the comparison at each shape."""
    begin("norms and static FP8")
    results: list[Result] = []
    emission, producer = Emission(contract_for(FP8_STATIC_TENSOR)), NativeNorm()
    for rows, columns in SHAPES:
        x, residual = random_bf16(rows, columns), random_bf16(rows, columns, seed=2)
        weight = random_bf16(columns, seed=1)
        for order in NORM_ORDERS:
            for added in (False, True):
                semantics = NormSemantics(order, 1e-6, residual=added)
                inputs = (x, residual, weight) if added else (x, weight)

                def native(semantics=semantics, inputs=inputs) -> torch.Tensor:
                    return producer.produce(semantics, inputs, emission).activation.codes

                def eager(semantics=semantics, inputs=inputs) -> torch.Tensor:
                    return eager_codes(norm(semantics, inputs).out, FP8_STATIC_TENSOR)

                label, rounds = f"{rows}x{columns} {semantics}", rounds_for(rows, short)
                against = f"{label} against eager"
                results.append(report_speedup("norm", against, native, eager, rounds))
                against = f"{label} against clone()"
                results.append(report_time_of("norm", against, native, x.clone, rounds))
    return results


if __name__ == "__main__":
    run()
