"""The C matmul against `F.linear`, in float32 and in bfloat16, and against a plain read."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
import torch.nn.functional as F

from benchmarks.harness import THREADS, alternate_all, begin, say
from benchmarks.results import Result
from branchline.core import quantize
from branchline.core.scheme import SCHEMES
from branchline.linear.contract import InputContract
from branchline.linear.kernels.emulated import EmulatedLinear
from branchline.linear.kernels.native_fp8 import NativeFp8Linear
from branchline.linear.quantized_weight import QuantizedWeight

WEIGHTS = ((2048, 5632), (4096, 14336))
ROWS = (1, 4, 16, 512)
TARGETS = {1: 2.0, 4: 3.0, 16: 2.5, 512: 0.8}
BANDWIDTH_TARGET = 0.7


def run(short: bool = False) -> list[Result]:
    """Print and return the ratios, with what is aimed at beside them."""
    begin("FP8 matmul, fp8-dynamic weights and inputs")
    weights = WEIGHTS[:1] if short else WEIGHTS
    return [result for n, k in weights for result in _weight(n, k, short)]


def _weight(n: int, k: int, short: bool) -> list[Result]:
    results: list[Result] = []
    scheme = SCHEMES["fp8-dynamic"]
    generator = torch.Generator().manual_seed(n)
    full = torch.randn(n, k, generator=generator)
    weight = QuantizedWeight.from_float(full, "benchmark", scheme.weight)
    kernel = NativeFp8Linear(weight, None, InputContract(scheme.input))
    say(f"{n}x{k}: {kernel.weight_bytes / (full.numel() * 4):.3f} of float32's memory")
    half = full.bfloat16()
    # As many bytes as the codes have, in words that torch adds quickly.
    read = torch.ones(n * k // 8, dtype=torch.int64)
    for m in ROWS:
        x = torch.randn(m, k, generator=generator)
        codes = quantize(x.bfloat16(), scheme.input)
        _check(kernel, weight, codes)
        functions: list[Callable[[], object]] = [
            lambda codes=codes: kernel.multiply(codes),
            lambda x=x: F.linear(x, full),
            lambda x=x: F.linear(x.bfloat16(), half),
        ]
        if m == 1:
            functions.append(read.sum)
        rounds = 3 if short or m > 100 else 31
        ours, *others = (statistics.median(t) for t in alternate_all(functions, rounds))
        ratio = min(others[:2]) / ours
        line = f"{n}x{k}, {m:>3} rows: {ours * 1e3:8.2f} ms, {ratio:.2f} times as fast as the best "
        line += (
            f"F.linear (aim {TARGETS[m]}; f32 {others[0] / ours:.2f}, bf16 {others[1] / ours:.2f})"
        )
        against = {"the faster F.linear": (min(others[:2]), TARGETS[m])}
        if m == 1:
            against["a plain read of the weight"] = (others[2], BANDWIDTH_TARGET)
            line += f"; {others[2] / ours:.2f} of a plain read (aim {BANDWIDTH_TARGET})"
        say(line)
        results += [
            Result(
                benchmark="matmul",
                case=f"{n}x{k}, {m} rows",
                value=ours * 1e6,
                unit="us",
                ratio=seconds / ours,
                against=what,
                aim=aim,
            )
            for what, (seconds, aim) in against.items()
        ]
    return results


def _check(kernel: NativeFp8Linear, weight: QuantizedWeight, codes) -> None:
    wanted = EmulatedLinear(weight, None, kernel.contract).multiply(codes).float()
    error = (kernel.multiply(codes).float() - wanted).abs().max() / wanted.abs().max()
    if not error < 2**-7:
        raise AssertionError(f"the C matmul is off by {error:.2e} of the largest output")


if __name__ == "__main__":
    torch.set_num_threads(THREADS)
    run()
