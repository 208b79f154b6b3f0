"""The C matmul of bfloat16 weights against `F.linear`, on the shapes of output heads."""

from __future__ import annotations

import statistics

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.harness import THREADS, alternate_all, begin, say, timed
from benchmarks.results import Result
from branchline.linear.kernels.native_bf16 import NativeBf16Linear

HEADS = ((32000, 256), (32000, 2048), (151936, 896))
ROWS = (1, 16, 256)
#: `float_kernel` "auto" takes this kernel where it is no slower than torch.
AIM = 1.0


def run(short: bool = False) -> list[Result]:
    """Print and return how many times as fast as torch's bfloat16 and float32 it is."""
    begin("bfloat16 output head, unquantised")
    heads = HEADS[:1] if short else HEADS
    return [result for n, k in heads for result in _head(n, k, short)]


def _head(n: int, k: int, short: bool) -> list[Result]:
    results: list[Result] = []
    generator = torch.Generator().manual_seed(n)
    module = nn.Linear(k, n, bias=False, dtype=torch.bfloat16)
    with torch.no_grad():
        module.weight.copy_(torch.randn(n, k, generator=generator))
    kernel = NativeBf16Linear(module, keeps_weight=True)
    half = module.weight.detach()
    full = half.float()
    for m in ROWS:
        x = torch.randn(m, k, generator=generator).bfloat16()
        wide = x.float()
        _check(kernel, x, F.linear(wide, full))
        functions = (
            lambda x=x: kernel.apply(x, "benchmark"),
            lambda x=x: F.linear(x, half),
            lambda wide=wide: F.linear(wide, full),
        )
        rounds = 3 if short or m > 100 else 15
        ours, bf16, f32 = (statistics.median(t) for t in alternate_all(functions, rounds))
        say(
            f"{n}x{k}, {m:>3} rows: {ours * 1e3:8.2f} ms, {bf16 / ours:.2f} times as fast as "
            f"F.linear in bfloat16, {f32 / ours:.2f} as in float32"
        )
        for dtype, theirs in (("bfloat16", bf16), ("float32", f32)):
            against = (f"F.linear in {dtype}", theirs)
            results.append(timed("head", f"{n}x{k}, {m} rows", ours, against, AIM))
    return results


def _check(kernel: NativeBf16Linear, x: torch.Tensor, wanted: torch.Tensor) -> None:
    error = (kernel.apply(x, "benchmark").float() - wanted).abs().max() / wanted.abs().max()
    if not error < 2**-7:
        raise AssertionError(f"the C matmul is off by {error:.2e} of the largest output")


if __name__ == "__main__":
    torch.set_num_threads(THREADS)
    run()
