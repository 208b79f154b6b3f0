"""The Triton kernels compiled ahead of time; no GPU is needed."""

from __future__ import annotations

import functools
import re

import pytest
import torch
from triton.runtime.jit import JITFunction

from branchline.adapters.kernels.base import LowRankCall
from branchline.adapters.kernels.triton.low_rank import TritonLowRank
from tests.adapters.kernels.cases import BF16, F16, F32, slots_of, stack_of
from tests.aot import compile_launch, read_code

ARCHITECTURES = (89, 90, 100, 120)
#: Rows of a request, dtype of the activation, dtype of the slots.
CASES = {
    "decode": (1, BF16, BF16),
    "prefill": (128, BF16, BF16),
    "float32": (128, F32, F32),
    "half": (1, F16, F16),
    "mixed": (16, BF16, F32),
    "siblings": (1, BF16, BF16),
    "siblings, prefill": (128, BF16, BF16),
}
#: Channels of the linears of one launch.
SIBLINGS = (2048, 512, 512)
EACH = [(name, sm) for name in CASES for sm in (ARCHITECTURES if name != "half" else (90,))]


@functools.cache
def launches(name: str) -> tuple[tuple, tuple]:
    """What would be launched, the shrink and the expand: kernel, arguments, options."""
    tokens, activation, dtype = CASES[name]
    caught = []

    def catch(kernel, *args, grid, warmup, **options):
        caught.append((kernel, args, options))

    x, out = (torch.zeros(2 * tokens, size, dtype=activation) for size in (512, 1024))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "run", catch)
        if name.startswith("siblings"):
            kernels = [TritonLowRank(stack_of((16, 64), 4096, n, dtype)) for n in SIBLINGS]
            x = torch.zeros(2 * tokens, 4096, dtype=activation)
            outs = [torch.zeros(2 * tokens, n, dtype=activation) for n in SIBLINGS]
            calls = zip(kernels, outs, strict=True)
            TritonLowRank.run([LowRankCall(k, o, x, slots_of(0, 1)) for k, o in calls])
        else:
            TritonLowRank(stack_of((16, 64), 512, 1024, dtype)).add(out, x, slots_of(0, 1))
    shrink, expand = caught
    return shrink, expand


@functools.cache
def compiled(name: str, architecture: int):
    return [compile_launch(launch, architecture) for launch in launches(name)]


@pytest.mark.parametrize(("name", "architecture"), EACH)
def test_nothing_spills(name, architecture):
    for kernel in compiled(name, architecture):
        usage = read_code(kernel, "cuobjdump", "--dump-resource-usage")
        assert re.search(r"STACK:(\d+).*?LOCAL:(\d+)", usage).groups() == ("0", "0")
        assert kernel.metadata.shared <= 99 * 1024


@pytest.mark.parametrize(("name", "architecture"), EACH)
def test_the_expand_is_a_chain_of_fused_products(name, architecture):
    """So that it gives the bytes that the C kernel gives; only the scaling is a product apart."""
    _, expand = compiled(name, architecture)
    ptx = expand.asm["ptx"]
    assert re.search(r"fma\.rn\.f32", ptx)
    assert not re.search(r"\b(mul|add|sub)\.f32", ptx), "an operation that ptxas may contract"
    assert ".ftz" not in ptx


@pytest.mark.parametrize(("name", "architecture"), EACH)
def test_the_shrink_of_bfloat16_is_in_tensor_cores(name, architecture):
    shrink, _ = compiled(name, architecture)
    narrow = CASES[name][1:] == (BF16, BF16)
    assert bool(re.search(r"\b(mma|wgmma|tcgen05)\.", shrink.asm["ptx"])) == narrow
