"""The Triton kernels, compiled ahead of time for every architecture with float8e4nv.

No GPU is needed: the compiler makes PTX and machine code, and both are read.  What the interpreter
cannot show is shown here: the casts are the hardware's, nothing is contracted, nothing spills, and
nothing is read twice.  Kernels are compiled as their launch would have them: it is cut off just
before the driver.
"""

from __future__ import annotations

import functools
import importlib.util
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from triton.runtime.jit import JITFunction

from branchline.core.oracle import ActivationSemantics, NormSemantics, Semantics
from branchline.core.platform import Platform
from branchline.core.quant_key import (
    FP8_DYNAMIC_GROUP128,
    FP8_DYNAMIC_TOKEN,
    FP8_STATIC_TENSOR,
    MXFP8,
    NVFP4,
    Granularity,
    QuantKey,
    ScaleLayout,
)
from branchline.core.route import Route
from branchline.fusion.kernels import activation, norm, tiles
from branchline.fusion.producers.activation import TritonActivation
from branchline.fusion.producers.base import ProducerRequest
from branchline.linear.contract import InputContract, InputScale
from branchline.linear.outputs import RawRequest, Shrink, new_outputs
from tests.aot import compile_launch, read_code

ARCHITECTURES = (89, 90, 100, 120)
#: Shared memory that a program may have: KiB, of compute capability 8.9 and 12.0.
LEAST_SHARED = 99
ROWS = 64
FMA_IN_SILU = 11
SILU_MUL = ActivationSemantics("silu", gated=True)
ADD_LLAMA = NormSemantics("llama", 1e-5, residual=True)


class Lora(NamedTuple):
    consumers: int
    rank: int
    tokens: int
    dtype: torch.dtype = torch.bfloat16


class Case(NamedTuple):
    semantics: Semantics
    key: QuantKey | None
    columns: int = 11264  # wider than a part
    raw: RawRequest | None = None
    lora: Lora | None = None
    architectures: tuple[int, ...] = (90,)
    rows: int = ROWS

    @property
    def inputs(self) -> int:
        """How many bfloat16 are read for one that is written."""
        if isinstance(self.semantics, ActivationSemantics):
            return 1 + self.semantics.gated
        return 2 + self.semantics.residual + self.semantics.bias


BLACKWELL = (100, 120)
SOME_ROWS = RawRequest(torch.tensor([True, False] * (ROWS // 2)), compact=True)
CASES = {
    "silu_mul-static": Case(SILU_MUL, FP8_STATIC_TENSOR, architectures=ARCHITECTURES),
    "silu_mul-token": Case(SILU_MUL, FP8_DYNAMIC_TOKEN, architectures=(89, 100)),
    "silu_mul-group": Case(SILU_MUL, FP8_DYNAMIC_GROUP128),
    "silu_mul-mx": Case(SILU_MUL, MXFP8, architectures=(120,)),
    "silu_mul-nvfp4": Case(SILU_MUL, NVFP4, architectures=BLACKWELL),
    "silu_mul-raw": Case(SILU_MUL, FP8_STATIC_TENSOR, raw=SOME_ROWS),
    "silu_mul-only-raw": Case(SILU_MUL, None, raw=RawRequest()),
    "relu2-static": Case(ActivationSemantics("relu2", gated=False), FP8_STATIC_TENSOR),
    "gelu_mul-group": Case(ActivationSemantics("gelu_tanh", gated=True), FP8_DYNAMIC_GROUP128),
    "limits": Case(ActivationSemantics("silu", True, 7.0, 1.7), MXFP8),
    "gelu_mul-offset": Case(
        ActivationSemantics("gelu_tanh", True, 7.0, up_offset=1.0),
        MXFP8,
        architectures=ARCHITECTURES,
    ),
    "add_llama-static": Case(ADD_LLAMA, FP8_STATIC_TENSOR, 5120, architectures=ARCHITECTURES),
    "add_llama-nvfp4": Case(ADD_LLAMA, NVFP4, 5120, architectures=(100,)),
    "add_llama-raw": Case(ADD_LLAMA, FP8_DYNAMIC_TOKEN, 5120, RawRequest()),
    "gemma-token": Case(NormSemantics("gemma", 1e-6), FP8_DYNAMIC_TOKEN, 16384),
    "layer_norm-mx": Case(NormSemantics("layer_norm", 1e-5, bias=True), MXFP8, 5120),
    "layer_norm_1p-wide": Case(
        NormSemantics("layer_norm_1p", 1e-5, True, True), FP8_DYNAMIC_TOKEN, 16384
    ),
}
ABSORBED = {
    "decode": Case(SILU_MUL, FP8_STATIC_TENSOR, lora=Lora(1, 16, 1), architectures=ARCHITECTURES),
    "prefill": Case(SILU_MUL, FP8_DYNAMIC_GROUP128, lora=Lora(2, 64, 16), architectures=(89,)),
    "nvfp4": Case(SILU_MUL, NVFP4, lora=Lora(1, 32, 16), architectures=BLACKWELL),
    "qkv": Case(ADD_LLAMA, FP8_DYNAMIC_TOKEN, 5120, lora=Lora(3, 64, 16), architectures=(90, 120)),
    "qkv-float32": Case(ADD_LLAMA, FP8_STATIC_TENSOR, 5120, lora=Lora(3, 64, 16, torch.float32)),
    "one-chunk-after-the-other": Case(
        ADD_LLAMA, MXFP8, 2048, lora=Lora(2, 32, 16), architectures=(100,), rows=8192
    ),
}
#: Rows wider than registers, which are read again.
WIDE = {
    "wide-norm": Case(NormSemantics("layer_norm", 1e-5, True), FP8_DYNAMIC_TOKEN, 20480),
    "wide-token": Case(SILU_MUL, FP8_DYNAMIC_TOKEN, 20480),
}
#: Layouts, and sizes of 1, which the compiler takes for constants.
ODD = {
    "swizzled": Case(SILU_MUL, replace(MXFP8, layout=ScaleLayout.SWIZZLE_128X4)),
    "swizzled-nvfp4": Case(
        ADD_LLAMA,
        replace(NVFP4, layout=ScaleLayout.SWIZZLE_128X4, row_multiple=48),
        3420,
        SOME_ROWS,
        architectures=(100,),
    ),
    "column-major": Case(
        ADD_LLAMA,
        replace(FP8_DYNAMIC_GROUP128, layout=ScaleLayout.COLUMN_MAJOR, row_multiple=48),
        5120,
        lora=Lora(2, 16, 16),
    ),
    "one-element": Case(SILU_MUL, MXFP8, 1, RawRequest(), Lora(1, 1, 1), rows=1),
    "one-column": Case(ADD_LLAMA, FP8_DYNAMIC_TOKEN, 1, RawRequest()),
    "one-row": Case(ADD_LLAMA, FP8_STATIC_TENSOR, 5120, lora=Lora(1, 1, 1), rows=1),
}
EVERY = CASES | ABSORBED | WIDE | ODD


def launches(case: Case, module=activation) -> list[tuple]:
    """What a producer would launch: kernel, arguments, options."""
    caught = []

    def catch(kernel, *args, grid, warmup, **options):
        caught.append((kernel, args, options))

    x, vector = (
        torch.zeros(case.rows, case.columns).bfloat16(),
        torch.zeros(case.columns).bfloat16(),
    )
    contract = InputContract(
        case.key,
        InputScale.checked(0.5, "test") if case.key and case.key.static else None,
        InputScale.checked(0.5, "test") if case.key and case.key.global_scale else None,
    )
    outputs = new_outputs(x, contract, "test", raw=case.raw, shrinks=shrinks(case))
    semantics = case.semantics
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "run", catch)
        if isinstance(semantics, ActivationSemantics):
            module.launch_activation(semantics, (x, x)[: case.inputs], outputs)
        else:
            added = (x,) if semantics.residual else ()
            bias = (vector,) if semantics.bias else ()
            norm.launch_norm(semantics, (x, *added, vector, *bias), outputs)
    return caught


def shrinks(case: Case) -> tuple[Shrink, ...]:
    if case.lora is None:
        return ()
    number, rank, tokens, dtype = case.lora
    a = torch.zeros(4, 64, case.columns, dtype=dtype)
    slots = torch.zeros(case.rows // tokens, dtype=torch.int32)
    ranks = torch.full((4,), rank, dtype=torch.int32)
    return tuple(Shrink.stacked(str(i), a, ranks, slots, rank) for i in range(number))


@functools.cache
def compiled(name: str, architecture: int):
    return compile_launch(launches(EVERY[name])[0], architecture)


def plan_of(name: str):
    _, _, options = launches(EVERY[name])[0]
    return options["PLAN"], options["num_warps"]


@functools.cache
def sass_of(name: str, architecture: int) -> str:
    return read_code(compiled(name, architecture), "nvdisasm", "-c")


def each(cases: dict[str, Case]):
    pairs = [(name, arch) for name, case in cases.items() for arch in case.architectures]
    return pytest.mark.parametrize(("name", "architecture"), pairs)


@each(EVERY)
def test_nothing_spills(name, architecture):
    usage = read_code(compiled(name, architecture), "cuobjdump", "--dump-resource-usage")
    stack, local = re.search(r"STACK:(\d+).*?LOCAL:(\d+)", usage).groups()
    assert (stack, local) == ("0", "0")
    assert not re.search(r"\b(STL|LDL)\b", sass_of(name, architecture))
    assert compiled(name, architecture).metadata.shared <= LEAST_SHARED * 1024


@each(CASES)
def test_every_input_is_read_once_in_128_bits(name, architecture):
    sass, case = sass_of(name, architecture), EVERY[name]
    plan, warps = plan_of(name)
    elements = plan.block // (32 * warps)
    loads = re.findall(r"\bLDG\.E[.\w]*", sass)
    wide = [load for load in loads if ".128" in load]
    assert plan.single
    assert elements == 16 or case.columns == 16384 or name == "silu_mul-token"
    assert len(wide) == case.inputs * elements // 8
    gathered = elements if "gelu" in name else 0
    assert sum(".U16" in load for load in loads) == gathered
    assert not any(".64" in load for load in loads)
    codes = 0 if case.key is None else elements // 16
    if case.key == NVFP4:
        assert "STG.E.64" in sass
        codes = 0
    raw = 0 if case.raw is None else elements // 8
    added = elements // 8 if getattr(case.semantics, "residual", False) else 0
    assert len(re.findall(r"\bSTG\.E\.128", sass)) == codes + raw + added


@each(EVERY)
def test_casts_are_the_hardware_s(name, architecture):
    """To bfloat16 by a conversion, or within a product of bfloat16 (see below)."""
    ptx, key = compiled(name, architecture).asm["ptx"], EVERY[name].key
    assert re.search(r"cvt\.rn\.bf16|(mul|fma)\.rn\.bf16", ptx)
    if key == NVFP4:
        assert "cvt.rn.satfinite.e2m1x2.f32" in ptx
        assert re.search(r"F2FP\.\S*E2M1", sass_of(name, architecture))
    elif key is not None:
        assert "cvt.rn.satfinite.e4m3x2.f32" in ptx
        assert re.search(r"F2FP\.\S*E4M3", sass_of(name, architecture))


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


@each(EVERY)
def test_arithmetic_is_ieee(name, architecture):
    """No flushed subnormals, no approximations, and no product fused but those asked for."""
    ptx = compiled(name, architecture).asm["ptx"]
    assert ".ftz" not in ptx
    assert ".approx" not in ptx
    assert "div.full" not in ptx
    assert not re.search(r"\b(mul|add|sub)\.f(32|64)", ptx), "an operation that ptxas may contract"
    assert "fma.rn.f64" not in ptx
    if name in CASES:
        fused = len(re.findall(r"fma\.rn\.f32\s", ptx))
        fused += 2 * len(re.findall(r"fma\.rn\.f32x2\s", ptx))
        plan, warps = plan_of(name)
        silu = getattr(EVERY[name].semantics, "activation", None) == "silu"
        assert fused == (FMA_IN_SILU * plan.block // (32 * warps) if silu else 0)


@each(ABSORBED)
def test_shrinks_are_products_of_bf16_in_tensor_cores(name, architecture):
    sass, lora = sass_of(name, architecture), EVERY[name].lora
    products = re.findall(r"\bHMMA\.16816\.F32\.BF16", sass)
    plan, _ = plan_of(name)
    assert len(products) % (lora.consumers * plan.pieces) == 0
    assert len(re.findall(r"\bHMMA\.", sass)) == len(products) > 0
    # A, asynchronously or not; of many tokens the activation too.
    assert re.search(r"\b(LDG|LDGSTS)\.E[.\w]*\.128", sass)


@pytest.mark.parametrize("lora", [Lora(1, 16, 1), Lora(3, 64, 16)], ids=str)
def test_partial_sums_are_added_by_a_second_kernel(lora):
    case = Case(SILU_MUL, FP8_STATIC_TENSOR, lora=lora)
    _, second = launches(case)
    assert len(launches(ABSORBED["one-chunk-after-the-other"])) == 1
    kernel = compile_launch(second, 90)
    usage = read_code(kernel, "cuobjdump", "--dump-resource-usage")
    assert "STACK:0" in usage
    ptx = kernel.asm["ptx"]
    assert "add.rn.f32" in ptx
    assert "atom." not in ptx
    assert "red." not in ptx


def instructions(kernel) -> list[str]:
    return re.findall(r"/\*[0-9a-f]{4,}\*/\s+(\S.*?;)", read_code(kernel, "nvdisasm", "-c"))


def test_without_raw_the_machine_code_is_what_it_would_be(tmp_path, monkeypatch):
    """Equal to the same kernel with the raw rows cut out of its source."""
    cut = re.sub(
        r"    if targets\.raw is not None:\n        store_raw\(.*?\)\n",
        "",
        Path(tiles.__file__).read_text(),
    )
    assert "store_raw(" not in cut
    package = tiles.__package__
    sources = {
        "cut_tiles": cut,
        "cut_activation": Path(activation.__file__)
        .read_text()
        .replace("from .tiles import", "from .cut_tiles import"),
    }
    for name, text in sources.items():
        path = tmp_path / f"{name}.py"
        path.write_text(text)
        spec = importlib.util.spec_from_file_location(f"{package}.{name}", path)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, f"{package}.{name}", module)
        spec.loader.exec_module(module)
    for case in (CASES["silu_mul-static"], ABSORBED["decode"]):
        without = compile_launch(launches(case, module)[0], 90)
        code = instructions(without)
        assert len(code) > 100
        assert code == instructions(compile_launch(launches(case)[0], 90))


def test_sm_89_has_no_e2m1():
    """Why `TritonProducer` refuses NVFP4 there."""
    with pytest.raises(Exception, match="e2m1"):
        compile_launch(launches(CASES["silu_mul-nvfp4"])[0], 89)


@pytest.mark.parametrize(
    ("size", "route", "most"),
    [(96, Route.FUSED, 1024), (2048, Route.DUAL, 1024), (256, Route.ABSORBED, 128)],
)
def test_groups_that_no_tile_holds_are_refused(size, route, most):
    key = replace(FP8_DYNAMIC_GROUP128, granularity=Granularity("group", size))
    platform = Platform("cuda", (9, 0), "2.11.0", "3.6.0", None)
    lora = {"rank": 8, "lora_dtype": torch.bfloat16}
    request = ProducerRequest(SILU_MUL, key, route, torch.bfloat16, 4096, platform, **lora)
    assert TritonActivation().supports(request).reason == (
        f"the triton kernels take groups of a power of two up to {most} columns, the key's have "
        f"{size}"
    )
    assert TritonActivation().supports(replace(request, key=FP8_DYNAMIC_GROUP128)).ok
