"""Base matmuls on a GPU: checked against the emulated kernel, then timed beside bfloat16.

Every kernel that the device has for a scheme is measured, not only the one that would be chosen.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.gpu.timing import alternate
from benchmarks.harness import GLOBAL_SCALE, SCALE, ResultsDifferError, random_bf16, say
from branchline.core.platform import detect_platform
from branchline.core.scheme import SCHEMES
from branchline.linear.contract import InputContract, InputScale
from branchline.linear.kernels.base import CodesKernel, LinearConfig
from branchline.linear.kernels.emulated import EmulatedLinear
from branchline.linear.kernels.selection import KERNELS
from branchline.linear.quantized_weight import QuantizedWeight
from branchline.linear.quantizers import quantize_input

NAMES = ("fp8-static", "fp8-dynamic", "fp8-block", "mxfp8", "nvfp4")
WEIGHTS = ("4096x4096", "4096x14336")
TOKENS = (1, 16, 512, 4096)
#: Hopper adds FP8 products with 14 bits or so: a part of the sum of all magnitudes gets lost.
_ACCUMULATION = 2.0**-10


@dataclass(frozen=True, eq=False)
class Linear:
    """One weight, as the model stores it and as a scheme quantises it.

    Attributes:
        name: of the scheme.
        plain: bfloat16 (N, K).
        weight: its codes.
        emulated: what every kernel is compared with.
    """

    name: str
    plain: torch.Tensor
    weight: QuantizedWeight
    emulated: EmulatedLinear

    @property
    def config(self) -> LinearConfig:
        """What a kernel is chosen by."""
        n, k = self.plain.shape
        return LinearConfig(k, n, SCHEMES[self.name])


def run(
    device: str, tokens: tuple[int, ...], weights: tuple[str, ...], rounds: int
) -> Iterator[dict[str, Any]]:
    """Every scheme, weight and kernel at every number of rows; prints and yields one line each.

    Args:
        device: where.
        tokens: numbers of rows, M.
        weights: "NxK" each.
        rounds: of every time.

    Raises:
        ResultsDifferError: a kernel computes something else than the emulated one.
    """
    for size in weights:
        n, k = map(int, size.split("x"))
        plain = (random_bf16(n, k).float() / k**0.5).bfloat16().to(device)
        for name in NAMES:
            linear = _linear(name, plain, device)
            for kernel in _kernels(linear, device):
                for rows in tokens:
                    line = _measure(linear, kernel, rows, device, rounds)
                    say(_row(line))
                    yield line


def _linear(name: str, plain: torch.Tensor, device: str) -> Linear:
    weight = QuantizedWeight.from_float(plain, name, SCHEMES[name].weight)
    contract = _contract(EmulatedLinear, plain, name, device)
    return Linear(name, plain, weight, EmulatedLinear(weight, None, contract))


def _contract(
    kernel: type[CodesKernel], plain: torch.Tensor, name: str, device: str
) -> InputContract:
    n, k = plain.shape
    key = kernel.consumes(LinearConfig(k, n, SCHEMES[name]))
    assert key is not None

    def checked(value: float) -> InputScale:
        return InputScale.checked(torch.tensor([value], device=device), "benchmark")

    return InputContract(
        key,
        checked(SCALE) if key.static else None,
        checked(GLOBAL_SCALE) if key.global_scale else None,
    )


def _kernels(linear: Linear, device: str) -> list[CodesKernel]:
    platform = detect_platform(device)
    made = []
    for kernel in KERNELS:
        if not issubclass(kernel, CodesKernel) or kernel.emulated:
            continue
        verdict = kernel.serves(linear.config, platform)
        if verdict.ok:
            contract = _contract(kernel, linear.plain, linear.name, device)
            made.append(kernel(linear.weight, None, contract))
        else:
            say(f"{linear.name}: no {kernel.name}: {verdict.reason}")
    return made


def _measure(
    linear: Linear, kernel: CodesKernel, rows: int, device: str, rounds: int
) -> dict[str, Any]:
    n, k = linear.plain.shape
    x = random_bf16(rows, k, seed=rows).to(device)
    codes = quantize_input(x, kernel.contract, "benchmark")
    _refuse_other_results(linear, kernel, x, kernel.multiply(codes))
    times = alternate(
        (lambda: kernel.multiply(codes), lambda: F.linear(x, linear.plain)), device, rounds
    )
    return {
        "scheme": linear.name,
        "kernel": kernel.name,
        "rows": rows,
        "channels": n,
        "columns": k,
        "microseconds": times[0] * 1e6,
        "bfloat16_microseconds": times[1] * 1e6,
        "teraflops": 2e-12 * rows * n * k / times[0],
        "weight_bytes": kernel.weight_bytes,
    }


def _refuse_other_results(
    linear: Linear, kernel: CodesKernel, x: torch.Tensor, out: torch.Tensor
) -> None:
    wanted = linear.emulated.apply(x, "benchmark").float()
    lengths = x.float().norm(dim=1, keepdim=True) * linear.plain.float().norm(dim=1)
    excess = (out.float() - wanted).abs() - wanted.abs() * 2.0**-7 - lengths * _ACCUMULATION
    # Written so that a NaN is refused as well.
    if not bool((excess <= 0).all()):
        worst = excess.max().item()
        raise ResultsDifferError(
            f"{kernel.name} {linear.name} {tuple(out.shape)}: off by {worst} more than allowed"
        )


def _row(line: dict[str, Any]) -> str:
    ours, theirs = line["microseconds"], line["bfloat16_microseconds"]
    shape = f"{line['rows']} x {line['channels']}x{line['columns']}"
    label = f"{shape} {line['scheme']} {line['kernel']}"
    return (
        f"{label:<54}{ours:9.1f} us {line['teraflops']:8.1f} TFLOPS  "
        f"{theirs / ours:6.2f} times as fast as bfloat16"
    )
