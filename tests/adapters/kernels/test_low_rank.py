"""The C kernels against float64 and against themselves, on every instruction set."""

from __future__ import annotations

import itertools

import pytest
import torch

from branchline.adapters.kernels.base import LowRankCall, LowRankStack
from branchline.adapters.kernels.eager import EagerLowRank
from branchline.adapters.kernels.native import NativeLowRank
from branchline.core import native as library
from tests.adapters.kernels.cases import BF16, F16, F32, bits, random, slots_of, stack_of, wanted

ISAS = ("scalar", "avx2", "avx512", "amx")[: library.load().functions.bl_best_isa() + 1]


def each_isa():
    functions = library.load().functions
    for index, isa in enumerate(ISAS):
        functions.bl_set_isa(index)
        yield isa
    functions.bl_set_isa(ISAS.index(library.load().isa))


def check(stack: LowRankStack, out, x, slots) -> torch.Tensor:
    """All instruction sets agree with one another, and with float64; so does the definition."""
    exact, bound = wanted(stack, out, x, slots)
    kernel, first = NativeLowRank(stack), None
    untouched = (slots < 0).repeat_interleave(out.shape[0] // max(slots.shape[0], 1))
    for isa in each_isa():
        assert kernel.accepts(out, x).ok
        found = kernel.add(out.clone(), x, slots)
        assert ((found.double() - exact).abs() <= bound).all(), isa
        assert torch.equal(bits(found[untouched]), bits(out[untouched])), isa
        first = found if first is None else first
        assert torch.equal(bits(found), bits(first)), isa
    eager = EagerLowRank(stack).add(out.clone(), x, slots)
    assert ((eager.double() - exact).abs() <= bound).all()
    assert torch.equal(bits(eager[untouched]), bits(out[untouched]))
    assert first is not None
    return first


@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
@pytest.mark.parametrize("activation", [BF16, F16, F32], ids=str)
def test_dtypes(activation, dtype):
    ranks = (1, 2, 3, 5, 8, 15, 16, 33, 64)
    stack = stack_of(ranks, 100, 77, dtype)
    slots = slots_of(8, -1, *range(9), 3, 3, -1, 8)
    rows = 3 * slots.shape[0]
    x, out = random(rows, 100, seed=1).to(activation), random(rows, 77, seed=2).to(activation)
    check(stack, out, x, slots)


def test_dtypes_of_input_and_output_may_differ():
    stack, slots = stack_of((4, 8), 48, 40), slots_of(0, 1, -1, 1)
    for x_dtype, out_dtype in itertools.product((BF16, F16, F32), repeat=2):
        check(stack, random(4, 40).to(out_dtype), random(4, 48, seed=1).to(x_dtype), slots)


@pytest.mark.parametrize("rank", [1, 7, 64, 200, 256])
@pytest.mark.parametrize(("columns", "channels"), [(1, 1), (33, 130), (1500, 64), (2050, 17)])
def test_shapes(rank, columns, channels):
    stack = stack_of((rank, 2), columns, channels, BF16)
    for rows in (1, 2, 5, 9):
        x, out = random(rows, columns).bfloat16(), random(rows, channels, seed=1).bfloat16()
        check(stack, out, x, slots_of(0))
    x, out = random(2, 3, columns).bfloat16(), random(6, channels, seed=1).bfloat16()
    check(stack, out, x, slots_of(1, 0))


def test_nothing():
    stack = stack_of((4,), 8, 8)
    check(stack, random(0, 8), random(0, 8), slots_of())
    check(stack, random(3, 8), random(3, 8), slots_of(-1, -1, -1))
    check(stack_of((4,), 0, 8), random(2, 8), random(2, 0), slots_of(0, -1))
    empty = stack_of((0, 4), 8, 8)
    check(empty, random(2, 8), random(2, 8), slots_of(0, 0))


def test_what_nobody_reads_may_be_anything():
    """Rows without a slot, other slots, and what a slot holds beyond its rank."""
    stack = stack_of((4, 8, 16), 40, 40)
    stack.a[int(stack.starts[2]) :] = torch.nan
    x, out = random(4, 40), random(4, 40, seed=1)
    x[2], out[2, 3], out[2, 4] = torch.nan, torch.inf, -0.0
    check(
        stack,
        torch.where(out.isfinite(), out, 1.0),
        torch.where(x.isnan(), 0.0, x),
        slots_of(0, 1, -1, 0),
    )
    found = NativeLowRank(stack).add(out.clone(), x, slots_of(0, 1, -1, 0))
    assert torch.equal(bits(found[2]), bits(out[2]))
    assert found[[0, 1, 3]].isfinite().all()


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_strides(dtype):
    stack, slots = stack_of((4, 8), 48, 40, dtype), slots_of(0, 1, -1, 1)
    x, out = random(8, 60).to(dtype), random(8, 50, seed=1).to(dtype)
    whole = NativeLowRank(stack).add(out[:, :40].clone(), x[:, :48].contiguous(), slots)
    for view in (x[:, :48], x[:, :48].mT.contiguous().mT):
        into = out.clone()
        assert torch.equal(NativeLowRank(stack).add(into[:, :40], view, slots), whole)
        assert torch.equal(into[:, 40:], out[:, 40:]), "a neighbour was written"


@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
def test_neighbours_do_not_show(dtype):
    """A row's bytes are the same alone, in any batch, in any order and on any thread count."""
    generator = torch.Generator().manual_seed(3)
    stack = stack_of((16, 5, 64, 1), 1100, 200, dtype)
    slots = torch.randint(-1, 4, (80,), generator=generator).to(torch.int32)
    x, out = random(80, 1100).to(dtype), random(80, 200, seed=1).to(dtype)
    order, kernel = torch.randperm(80, generator=generator), NativeLowRank(stack)
    for _ in each_isa():
        whole = kernel.add(out.clone(), x, slots)
        assert torch.equal(kernel.add(out[order], x[order], slots[order]), whole[order])
        for count in (1, 2, 3, 6, 20):
            part = kernel.add(out[-count:].clone(), x[-count:], slots[-count:])
            assert torch.equal(part, whole[-count:])
        one = kernel.add(out.clone(), x, slots[7:8])
        assert torch.equal(one[7], whole[7])


@pytest.mark.parametrize("threads", [0, 1, 2, 5])
@pytest.mark.parametrize("rows", [1, 4, 160])
def test_threads_do_not_show(monkeypatch, threads, rows):
    stack = stack_of((16, 8), 3000, 1600)
    slots = slots_of(*(number % 3 - 1 for number in range(rows))) if rows > 1 else slots_of(0)
    x, out = random(rows, 3000), random(rows, 1600, seed=1)
    alone = NativeLowRank(stack).add(out.clone(), x, slots)
    monkeypatch.setattr(library, "threads", lambda: threads)
    assert torch.equal(NativeLowRank(stack).add(out.clone(), x, slots), alone)


@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
def test_special_values_stay_where_they_are(dtype):
    stack = stack_of((16,), 70, 90, dtype)
    x, out = random(9, 70).to(dtype), random(9, 90, seed=1).to(dtype)
    x[2, 3], x[5, 69], out[7, 11], out[7, 85] = torch.nan, torch.inf, -torch.inf, torch.nan
    for _ in each_isa():
        odd = ~NativeLowRank(stack).add(out.clone(), x, slots_of(0)).isfinite()
        assert odd[[2, 5]].all()
        assert odd[7].nonzero().flatten().tolist() == [11, 85]
        assert int(odd.sum()) == 2 * 90 + 2


def test_what_is_refused_has_a_reason():
    kernel = NativeLowRank(stack_of((4,), 8, 8))
    x = random(2, 8)
    assert "not float64 in" in kernel.accepts(x, x.double()).reason
    assert "not float32 in and float64 out" in kernel.accepts(x.double(), x).reason
    assert "strides (1, 2)" in kernel.accepts(random(2, 8).t().contiguous().t(), x).reason
    with torch.enable_grad():
        assert "gradients" in kernel.accepts(x.clone().requires_grad_(), x).reason


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("rows", [1, 2, 64])
def test_linears_together(monkeypatch, threads, rows):
    """Siblings of one call: other channels, ranks, slots and dtypes; one that was shrunk before."""
    monkeypatch.setattr(library, "threads", lambda: threads)
    x, calls, alone = random(rows, 1100), [], []
    for number, (ranks, channels) in enumerate(
        (((16, 8), 512), ((4, 64), 40), ((1, 1), 1), ((0, 33), 1600))
    ):
        kernel = NativeLowRank(stack_of(ranks, 1100, channels, (F32, BF16)[number % 2]))
        slots = slots_of(*((row + number) % 3 - 1 for row in range(rows)))
        out, source = random(rows, channels, seed=number), x
        if number == 1:
            source = random(rows, kernel.stack.width, seed=9)
        calls.append(LowRankCall(kernel, out, source, slots, number == 1))
        one = kernel.expand if number == 1 else kernel.add
        alone.append(one(out.clone(), source, slots))
    for _ in each_isa():
        for kind in (NativeLowRank, EagerLowRank):
            kernels = [kind(call.kernel.stack) for call in calls]
            given = [
                LowRankCall(kernel, call.out.clone(), call.source, call.slots, call.shrunk)
                for kernel, call in zip(kernels, calls, strict=True)
            ]
            for found, expected in zip(kind.run(given), alone, strict=True):
                if kind is NativeLowRank:
                    assert torch.equal(bits(found), bits(expected))
                else:
                    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
