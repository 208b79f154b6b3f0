"""The grouped Triton kernels, compiled ahead of time for every architecture.

What multiplies, adds and rounds is the same code as a linear's, whose machine code is read in full
in `tests/linear/kernels/test_aot.py`; here lies what is around it.
"""

from __future__ import annotations

import functools
import random
import re
from typing import NamedTuple

import pytest
import torch
from triton.runtime.jit import JITFunction

from branchline.linear.experts.kernels.triton.combine import combine
from branchline.linear.experts.kernels.triton.matmul import launch_grouped_matmul, plan_pairs
from branchline.linear.experts.pairs import Pairs
from branchline.linear.kernels.triton.plan import PLANS, STEP
from branchline.linear.kernels.triton.tile import Operand
from tests.aot import FP8_PRODUCTS, compile_launch, read_code, refuse_spills


class Case(NamedTuple):
    tokens: int
    architectures: tuple[int, ...]
    blockwise: bool = False
    by_token: bool = True
    bias: bool = False
    experts: int = 128
    channels: int = 1536
    columns: int = 4096
    top_k: int = 8


CASES = {
    "block-decode": Case(1, (89, 90, 100, 120), True),
    "block-few": Case(1024, (90,), True, by_token=False, experts=256),
    "block-many": Case(4096, (89, 90, 100, 120), True, bias=True),
    "row-decode": Case(4, (90, 120), by_token=False, bias=True),
    "row-many": Case(4096, (89, 100), experts=8, top_k=2),
}
ODD = {"odd": Case(9, (90,), True, bias=True, experts=5, channels=77, columns=999, top_k=1)}
EVERY = CASES | ODD
RUNS = [(name, sm) for name, case in EVERY.items() for sm in case.architectures]


def caught(launch) -> tuple:
    """What would be launched: kernel, arguments, options."""
    launches = []

    def catch(kernel, *args, grid, warmup, **options):
        launches.append((kernel, args, options))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "run", catch)
        launch()
    (launched,) = launches
    return launched


def launch_of(case: Case) -> tuple:
    experts, channels, columns = case.experts, case.channels, case.columns
    pairs = Pairs.of(torch.randint(experts, (case.tokens, case.top_k)), experts)
    rows = case.tokens if case.by_token else len(pairs)
    # Nothing reads them: only how their addresses are aligned counts.
    x = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    weight = torch.empty(experts, channels, columns, dtype=torch.float8_e4m3fn)
    if case.blockwise:
        groups = -(-columns // STEP)
        left = Operand(x, torch.empty(groups, len(pairs)).t(), 1, len(pairs))
        right = Operand(weight, torch.empty(experts, -(-channels // STEP), groups), groups, 1, STEP)
    else:
        left = Operand(x, torch.empty(len(pairs), 1), 1)
        right = Operand(weight, torch.empty(experts, channels, 1), 1)
    out = torch.empty(len(pairs), channels, dtype=torch.bfloat16)
    bias = torch.empty(experts, channels) if case.bias else None
    return caught(
        lambda: launch_grouped_matmul(
            left, right, bias, out, pairs, by_token=case.by_token, blockwise=case.blockwise
        )
    )


@functools.cache
def compiled(name: str, architecture: int):
    return compile_launch(launch_of(EVERY[name]), architecture)


@pytest.mark.parametrize(("name", "architecture"), RUNS)
def test_machine_code(name, architecture):
    kernel = compiled(name, architecture)
    refuse_spills(kernel, architecture)
    sass, ptx = read_code(kernel, "nvdisasm", "-c"), kernel.asm["ptx"]
    products = re.findall(FP8_PRODUCTS[architecture], sass)
    assert products
    assert len(re.findall(r"\b[A-Z]*MMA\b", sass)) == len(products)
    assert not re.search(r"\b(mul|add|sub)\.f32", ptx), "an operation that ptxas may contract"
    assert ".ftz" not in ptx
    assert ".approx" not in ptx
    if name in CASES:
        copies = re.findall(r"\bLDGSTS\.E[.\w]*", sass)
        assert copies
        assert all(copy.endswith(".128") for copy in copies)
        assert not re.search(r"\bLDG\.E\.U8\b", sass)
        assert "STG.E.128" in sass


@pytest.mark.parametrize("architecture", [89, 100])
@pytest.mark.parametrize("partial", [False, True])
def test_sums_of_choices_are_not_contracted(architecture, partial):
    pairs = Pairs.of(torch.randint(8, (4, 8)), 8, partial=partial)
    out = torch.empty(32, 2048, dtype=torch.bfloat16)
    launch = caught(lambda: combine(out, torch.empty(4, 8), pairs))
    kernel = compile_launch(launch, architecture)
    refuse_spills(kernel, architecture)
    assert not re.search(r"\bfma\.", kernel.asm["ptx"])
    sass = read_code(kernel, "nvdisasm", "-c")
    assert re.search(r"\bLDG\.E\.128\b", sass)
    assert "STG.E.128" in sass


def test_every_plan_of_whole_blocks_is_compiled():
    plans = {launch_of(case)[2]["PLAN"] for case in EVERY.values()}
    assert plans == set(PLANS)


def test_there_are_as_many_programs_as_tiles_whatever_was_chosen():
    """At most: how many there are, only the device knows."""
    chosen = random.Random(0)
    for _ in range(2000):
        experts, pairs = chosen.choice((1, 3, 8, 128)), chosen.choice((1, 2, 17, 300, 5000))
        plan, bound = plan_pairs(pairs, experts, 4096)
        skew = chosen.choice((1, 4))
        counts = [0] * experts
        for _ in range(min(pairs, 300)):
            counts[int(experts * chosen.random() ** skew)] += pairs // min(pairs, 300)
        counts[0] += pairs - sum(counts)
        assert sum(-(-count // plan.rows) for count in counts) <= bound
    # One pair for each of some experts is as bad as it gets.
    plan, bound = plan_pairs(8, 128, 4096)
    assert bound == 8
    assert plan_pairs(7, 3, 4096)[1] == (7 + 3 * (plan.rows - 1)) // plan.rows
