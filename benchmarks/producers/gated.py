"""SiLU(gate) * up -> static FP8: the C kernel against torch's and the eager quantiser."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from benchmarks.harness import (
    SCALE,
    begin,
    random_bf16,
    report_speedup,
    report_time_of,
    rounds_for,
)
from branchline.core.oracle import ActivationSemantics, quantize_static
from branchline.fusion.producers.gated import NativeSiluMul
from branchline.linear.contract import InputScale

SHAPES = ((512, 11264), (1, 11264))


def run(short: bool = False) -> None:
    """Print the comparison at each shape."""
    begin("SiLU(gate) * up and static FP8")
    semantics, producer = ActivationSemantics("silu", gated=True), NativeSiluMul()
    scale = InputScale.checked(SCALE, "benchmark")
    for rows, columns in SHAPES:
        gate, up = random_bf16(rows, columns), random_bf16(rows, columns, seed=1)
        rounds = rounds_for(rows, short)

        def native(gate: torch.Tensor = gate, up: torch.Tensor = up) -> torch.Tensor:
            return producer.codes(semantics, (gate, up), scale)

        def eager(gate: torch.Tensor = gate, up: torch.Tensor = up) -> torch.Tensor:
            return quantize_static(F.silu(gate) * up, scale.value)

        report_speedup(f"{rows}x{columns} C against eager", native, eager, rounds)
        report_time_of(f"{rows}x{columns} C against gate.clone()", native, gate.clone, rounds)


if __name__ == "__main__":
    run()
