"""ReLU² -> static FP8: the C kernel against torch's activation and the eager quantiser."""

from __future__ import annotations

import torch

from benchmarks.harness import (
    SCALE,
    begin,
    random_bf16,
    report_speedup,
    report_time_of,
    rounds_for,
)
from branchline.core.oracle import ActivationSemantics, quantize_static
from branchline.fusion.producers.unary import NativeRelu2
from branchline.linear.contract import InputScale

SHAPES = ((512, 11264), (1, 11264))


def run(short: bool = False) -> None:
    """Print the comparison at each shape."""
    begin("ReLU² and static FP8")
    semantics, producer = ActivationSemantics("relu2", gated=False), NativeRelu2()
    scale = InputScale.checked(SCALE, "benchmark")
    for rows, columns in SHAPES:
        x = random_bf16(rows, columns)
        rounds = rounds_for(rows, short)

        def native(x: torch.Tensor = x) -> torch.Tensor:
            return producer.codes(semantics, (x,), scale)

        def eager(x: torch.Tensor = x) -> torch.Tensor:
            return quantize_static(torch.relu(x).square(), scale.value)

        report_speedup(f"{rows}x{columns} C against eager", native, eager, rounds)
        report_time_of(f"{rows}x{columns} C against x.clone()", native, x.clone, rounds)


if __name__ == "__main__":
    run()
