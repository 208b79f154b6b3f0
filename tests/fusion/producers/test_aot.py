"""The Triton kernels, compiled ahead of time for every architecture with float8e4nv.

No GPU is needed: the compiler makes PTX and machine code, and both are read.  What the interpreter
cannot show is shown here: the casts are the hardware's, nothing is contracted, nothing spills.
"""

from __future__ import annotations

import functools
import re
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from branchline.fusion.kernels import gated, norm, unary
from branchline.fusion.kernels.numerics import launch_options

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
ARCHITECTURES = (89, 90, 100, 120)
COLUMNS = 11264  # wider than a block
FMA_IN_SILU = 11
BF16, FP32, FP8, INT = "*bf16", "*fp32", "*fp8e4nv", "i32"
#: name: kernel, argument types, compile-time constants.
KERNELS = {
    "relu2": (unary.relu2_e4m3_kernel, [BF16, FP32, FP8, INT, INT], {}),
    "silu_mul": (gated.silu_mul_e4m3_kernel, [BF16, BF16, FP32, FP8, INT, INT, INT], {}),
    **{
        f"{order}-{'one-block' if one_block else 'loop'}": (
            norm.rms_norm_e4m3_kernel,
            [BF16, BF16, FP32, FP8, INT, INT, "fp32"],
            {"GEMMA": order == "gemma", "ONE_BLOCK": one_block},
        )
        for order in ("llama", "gemma")
        for one_block in (True, False)
    },
}


@functools.cache
def compiled(name: str, architecture: int):
    """As a launch on contiguous tensors specialises it: pointers and sizes divisible by 16."""
    kernel, types, constants = KERNELS[name]
    options = launch_options(COLUMNS)
    names = kernel.arg_names
    constants = {**constants, "BLOCK": options.pop("BLOCK")}
    signature = dict(zip(names, types, strict=False))
    source = ASTSource(
        fn=kernel,
        signature={**signature, **dict.fromkeys(constants, "constexpr")},
        constexprs={(names.index(key),): value for key, value in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i, kind in enumerate(types) if kind != "fp32"},
    )
    target = GPUTarget("cuda", architecture, 32)
    return triton.compile(source, target=target, options=options)


@functools.cache
def read_cubin(name: str, architecture: int, *command: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled(name, architecture).asm["cubin"])
        file.flush()
        run = [str(TOOLS / command[0]), *command[1:], file.name]
        return subprocess.run(run, check=True, capture_output=True, text=True).stdout


@pytest.fixture(params=KERNELS)
def name(request):
    return request.param


@pytest.fixture(params=ARCHITECTURES)
def architecture(request):
    return request.param


def test_nothing_spills(name, architecture):
    usage = read_cubin(name, architecture, "cuobjdump", "--dump-resource-usage")
    stack, local = re.search(r"STACK:(\d+).*?LOCAL:(\d+)", usage).groups()
    assert (stack, local) == ("0", "0")
    assert int(re.search(r"REG:(\d+)", usage).group(1)) <= 128
    assert "STL" not in read_cubin(name, architecture, "nvdisasm", "-c")


def test_loads_are_128_bits_wide(name, architecture):
    sass = read_cubin(name, architecture, "nvdisasm", "-c")
    loads = re.findall(r"\bLDG\.E[.\w]*", sass)
    wide = [load for load in loads if ".128" in load]
    assert wide
    # The scale is one float; everything else is bfloat16.
    assert all(load in wide or not re.search(r"\.(U16|64)", load) for load in loads), loads


def test_casts_are_the_hardware_s(name, architecture):
    """To bfloat16 by a conversion, or within a product of bfloat16 (see below)."""
    ptx = compiled(name, architecture).asm["ptx"]
    assert "cvt.rn.satfinite.e4m3x2.f32" in ptx
    assert re.search(r"cvt\.rn\.bf16|(mul|fma)\.rn\.bf16", ptx)
    sass = read_cubin(name, architecture, "nvdisasm", "-c")
    assert re.search(r"F2FP\.\S*E4M3", sass)


def test_a_product_of_bf16_may_be_rounded_at_once():
    """The compiler makes ``round_bf16(a * b)`` one bfloat16 product: the same value.

    A product of two bfloat16 has 16 bits, so float32 rounds it among its own subnormals only.
    There, all mantissas and exponents: rounding to float32 first changes nothing.
    """
    mantissa = torch.arange(128, 256, dtype=torch.float64)
    for exponent in range(-30, 1):
        a, b = mantissa[:, None] * 2.0**-133, mantissa * 2.0**exponent
        twice = (a.float() * b.float()).bfloat16().double()
        once = torch.round(a * b * 2.0**133) * 2.0**-133  # ties to even, last place 2**-133
        subnormal = a * b < 2.0**-126
        assert torch.equal(twice[subnormal], once[subnormal])


def test_arithmetic_is_ieee(name, architecture):
    """No flushed subnormals, no approximations, and no product fused but those asked for."""
    ptx = compiled(name, architecture).asm["ptx"]
    assert ".ftz" not in ptx
    assert ".approx" not in ptx
    assert "div.full" not in ptx
    assert not re.search(r"\b(mul|add|sub)\.f32", ptx), "an operation that ptxas may contract"
    assert "fma.rn.f64" not in ptx
    fused = len(re.findall(r"fma\.rn\.f32\s", ptx)) + 2 * len(re.findall(r"fma\.rn\.f32x2\s", ptx))
    options = launch_options(COLUMNS)
    elements = options["BLOCK"] // (32 * options["num_warps"])
    assert fused == (FMA_IN_SILU * elements if name == "silu_mul" else 0)
