"""The Triton matmul, compiled ahead of time for every architecture that it is chosen on.

What no interpreter shows: which instructions multiply, that each step's sum leaves the tensor
core, that nothing spills, and that codes are read 16 bytes at a time.
"""

from __future__ import annotations

import functools
import re
from typing import NamedTuple

import pytest
import torch
from triton.runtime.jit import JITFunction

from branchline.linear.kernels.triton.matmul import Operand, launch_matmul
from branchline.linear.kernels.triton.plan import PLANS, STEP
from tests.aot import FP8_PRODUCTS, compile_launch, read_code, refuse_spills

ARCHITECTURES = (89, 90, 100, 120)


class Case(NamedTuple):
    rows: int
    blockwise: bool = False
    columns: int = 4096
    channels: int = 4096
    dtype: torch.dtype = torch.bfloat16
    bias: bool = False
    block_rows: int = 128
    architectures: tuple[int, ...] = (90,)


ALIGNED = {
    "block-decode": Case(1, True, architectures=ARCHITECTURES),
    "block-few": Case(64, True, architectures=(90, 120)),
    "block-many": Case(4096, True, bias=True, architectures=ARCHITECTURES),
    "row-decode": Case(1, architectures=(89, 90, 100)),
    "row-few": Case(60),
    "row-many": Case(4096, architectures=ARCHITECTURES),
    "channel-blocks": Case(4096, True, block_rows=1, architectures=(89,)),
    "row-float32": Case(300, dtype=torch.float32, bias=True, architectures=(90, 120)),
}
ODD = {
    "odd-sizes": Case(1000, True, 77, 999, bias=True, architectures=(89, 100)),
    "one-column": Case(17, columns=1, channels=1, bias=True),
}
EVERY = ALIGNED | ODD


def each(cases: dict[str, Case]):
    pairs = [(name, sm) for name, case in cases.items() for sm in case.architectures]
    return pytest.mark.parametrize(("name", "architecture"), pairs)


def launch_of(case: Case) -> tuple:
    """What would be launched: kernel, arguments, options."""
    caught = []

    def catch(kernel, *args, grid, warmup, **options):
        caught.append((kernel, args, options))

    rows, channels, columns = case.rows, case.channels, case.columns
    x, w = (torch.zeros(n, columns).to(torch.float8_e4m3fn) for n in (rows, channels))
    if case.blockwise:
        groups = -(-columns // STEP)
        blocks = torch.zeros(-(-channels // case.block_rows), groups)
        left = Operand(x, torch.zeros(groups, rows).t(), 1, rows)
        right = Operand(w, blocks, groups, 1, case.block_rows)
    else:
        left, right = Operand(x, torch.zeros(rows, 1), 1), Operand(w, torch.zeros(channels, 1), 1)
    out = torch.zeros(rows, channels, dtype=case.dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "run", catch)
        bias = torch.zeros(channels) if case.bias else None
        launch_matmul(left, right, bias, out, blockwise=case.blockwise)
    (launched,) = caught
    return launched


@functools.cache
def compiled(name: str, architecture: int):
    return compile_launch(launch_of(EVERY[name]), architecture)


@functools.cache
def read(name: str, architecture: int, tool: str, *options: str) -> str:
    return read_code(compiled(name, architecture), tool, *options)


def sass_of(name: str, architecture: int) -> str:
    return read(name, architecture, "nvdisasm", "-c")


def elements(name: str) -> int:
    """Of a tile, for each thread."""
    plan = launch_of(EVERY[name])[2]["PLAN"]
    return plan.rows * plan.channels // (32 * plan.warps)


@each(EVERY)
def test_nothing_spills(name, architecture):
    refuse_spills(compiled(name, architecture), architecture)


@each(EVERY)
def test_tensor_cores_multiply_fp8_by_one_kind_of_instruction(name, architecture):
    sass = sass_of(name, architecture)
    assert re.search(FP8_PRODUCTS[architecture], sass)
    assert not re.search(r"\b[HIDF]MMA\.", sass)
    assert len(re.findall(r"\b[A-Z]*MMA\b", sass)) == len(
        re.findall(FP8_PRODUCTS[architecture], sass)
    )


@each(EVERY)
def test_each_step_s_sum_is_added_in_float32(name, architecture):
    """By one addition, or product and addition, an element: in Hopper's FP8 sums bits get lost."""
    case, ptx = EVERY[name], compiled(name, architecture).asm["ptx"]
    fused, added = (
        len(re.findall(rf"{op}\.rn\.f32\s", ptx)) + 2 * len(re.findall(rf"{op}\.rn\.f32x2\s", ptx))
        for op in ("fma", "add")
    )
    added -= elements(name) * case.bias
    steps, rest = (fused, added) if case.blockwise else (added, fused)
    # Once in the loop, and where the compiler takes the last step out of it, once behind.
    assert steps in (elements(name), 2 * elements(name))
    assert rest == 0
    assert not re.search(r"\b(mul|add|sub)\.f32", ptx), "an operation that ptxas may contract"
    assert ".ftz" not in ptx
    assert ".approx" not in ptx


@each(ALIGNED)
def test_codes_are_read_16_bytes_at_a_time(name, architecture):
    sass = sass_of(name, architecture)
    copies = re.findall(r"\bLDGSTS\.E[.\w]*", sass)
    assert copies
    assert all(copy.endswith(".128") for copy in copies)
    assert not re.search(r"\bLDG\.E\.U8\b", sass)
    assert "STG.E.128" in sass


def test_every_plan_is_compiled():
    for blockwise in (True, False):
        cases = [case for case in EVERY.values() if case.blockwise == blockwise]
        assert {launch_of(case)[2]["PLAN"] for case in cases} == set(PLANS)
