"""RMSNorm -> static FP8: the C kernel against the eager norm and quantiser."""

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
from branchline.core.oracle import NormSemantics, quantize_static, rms_norm
from branchline.fusion.producers.norm import NativeRmsNorm
from branchline.linear.contract import InputScale

SHAPES = ((512, 11264), (1, 11264))
EPS = 1e-5


def _module_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """As model code has it; the mean in float32, so a code may differ now and then."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    return weight * normed.to(x.dtype)


def run(short: bool = False) -> None:
    """Print the comparison at each shape."""
    begin("RMSNorm and static FP8")
    semantics, producer = NormSemantics("llama", EPS), NativeRmsNorm()
    scale = InputScale.checked(SCALE, "benchmark")
    for rows, columns in SHAPES:
        x, weight = random_bf16(rows, columns), random_bf16(columns, seed=1)
        rounds = rounds_for(rows, short)

        def native(x: torch.Tensor = x, weight: torch.Tensor = weight) -> torch.Tensor:
            return producer.codes(semantics, (x, weight), scale)

        def eager(x: torch.Tensor = x, weight: torch.Tensor = weight) -> torch.Tensor:
            return quantize_static(rms_norm(semantics, x, weight), scale.value)

        def module(x: torch.Tensor = x, weight: torch.Tensor = weight) -> torch.Tensor:
            return quantize_static(_module_norm(x, weight), scale.value)

        report_speedup(f"{rows}x{columns} C against eager (float64 mean)", native, eager, rounds)
        report_time_of(f"{rows}x{columns} C against float32 mean", native, module, rounds)
        report_time_of(f"{rows}x{columns} C against x.clone()", native, x.clone, rounds)


if __name__ == "__main__":
    run()
