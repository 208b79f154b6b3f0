"""The Triton kernels in the interpreter, against float64 and against themselves."""

from __future__ import annotations

import itertools

import pytest
import torch

from branchline.adapters.kernels.base import LowRankCall
from branchline.adapters.kernels.triton import kernels
from branchline.adapters.kernels.triton.low_rank import TritonLowRank
from tests.adapters.kernels.cases import BF16, F16, F32, bits, random, slots_of, stack_of, wanted

pytestmark = pytest.mark.triton_interpreted


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    """Several blocks of columns and channels, and several of ranks."""
    monkeypatch.setattr(kernels, "_MOST_RANKS", 16)
    monkeypatch.setattr(kernels, "_EXPAND_CHANNELS", 32)


def check(stack, out, x, slots) -> torch.Tensor:
    exact, bound = wanted(stack, out, x, slots)
    kernel = TritonLowRank(stack)
    assert kernel.accepts(out, x).ok
    found = kernel.add(out.clone(), x, slots)
    assert ((found.double() - exact).abs() <= bound).all()
    untouched = (slots < 0).repeat_interleave(out.shape[0] // max(slots.shape[0], 1))
    assert torch.equal(bits(found[untouched]), bits(out[untouched]))
    return found


@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
@pytest.mark.parametrize("activation", [BF16, F16, F32], ids=str)
def test_dtypes(activation, dtype):
    stack = stack_of((1, 5, 16, 33), 150, 77, dtype)
    slots = slots_of(3, -1, 0, 1, 2, -1, 3)
    x, out = random(14, 150, seed=1).to(activation), random(14, 77, seed=2).to(activation)
    check(stack, out, x, slots)


def test_dtypes_of_input_and_output_may_differ():
    stack, slots = stack_of((4, 8), 48, 40), slots_of(0, 1, -1, 1)
    for x_dtype, out_dtype in itertools.product((BF16, F32), repeat=2):
        check(stack, random(4, 40).to(out_dtype), random(4, 48, seed=1).to(x_dtype), slots)


@pytest.mark.parametrize("rank", [1, 17, 256])
@pytest.mark.parametrize(("columns", "channels"), [(1, 1), (33, 40)])
def test_shapes(rank, columns, channels):
    stack = stack_of((rank, 2), columns, channels, BF16)
    x, out = random(2, 17, columns).bfloat16(), random(34, channels, seed=1).bfloat16()
    check(stack, out, x, slots_of(1, 0))


def test_nothing():
    stack = stack_of((4, 0), 8, 8)
    check(stack, random(0, 8), random(0, 8), slots_of())
    check(stack, random(3, 8), random(3, 8), slots_of(-1, 1, -1))
    check(stack_of((4,), 0, 8), random(2, 8), random(2, 0), slots_of(0, -1))


def test_strides():
    stack, slots = stack_of((4, 8), 48, 40), slots_of(0, 1, -1, 1)
    x, out = random(8, 60), random(8, 50, seed=1)
    whole = TritonLowRank(stack).add(out[:, :40].clone(), x[:, :48].contiguous(), slots)
    into = out.clone()
    assert torch.equal(TritonLowRank(stack).add(into[:, :40], x[:, :48], slots), whole)
    assert torch.equal(into[:, 40:], out[:, 40:]), "a neighbour was written"


def test_neighbours_and_the_number_of_rows_do_not_show():
    stack = stack_of((16, 5), 300, 50, BF16)
    x, out = random(34, 300).bfloat16(), random(34, 50, seed=1).bfloat16()
    kernel = TritonLowRank(stack)
    whole = kernel.add(out.clone(), x, slots_of(0, 1))
    x[:16], out[:16] = torch.nan, torch.nan
    after = kernel.add(out.clone(), x, slots_of(-1, 1))
    assert torch.equal(after[17:], whole[17:])
    for count in (1, 3):
        part = kernel.add(out[-count:].clone(), x[-count:], slots_of(*[1] * count))
        assert torch.equal(part, whole[-count:])


def test_linears_together(monkeypatch):
    """Siblings of one launch: other channels, ranks and slots; one that was shrunk before."""
    monkeypatch.setattr(kernels, "_PIECE", 64)
    for rows in (1, 6, 40):
        x, calls, alone = random(rows, 150).bfloat16(), [], []
        for number, (ranks, channels) in enumerate(
            (((16, 8), 70), ((4, 16), 40), ((1, 1), 1), ((0, 3), 33))
        ):
            kernel = TritonLowRank(stack_of(ranks, 150, channels, BF16, rooms=(16, 16)))
            slots = slots_of(*((row + number) % 3 - 1 for row in range(min(rows, 6))))
            if rows == 40:
                slots = slots_of(0, 1, -1, 1)
            out, source = random(rows, channels, seed=number).bfloat16(), x
            if number == 1:
                source = random(rows, kernel.stack.width, seed=9)
            calls.append(LowRankCall(kernel, out.clone(), source, slots, number == 1))
            one = kernel.expand if number == 1 else kernel.add
            alone.append(one(out.clone(), source, slots))
        for found, expected in zip(TritonLowRank.run(calls), alone, strict=True):
            assert torch.equal(bits(found), bits(expected))


def test_columns_in_pieces(monkeypatch):
    """The sums of pieces of the columns, added in their order: of one row and of many."""
    monkeypatch.setattr(kernels, "_PIECE", 32)
    for columns in (31, 32, 33, 96, 200):
        stack = stack_of((5, 16), columns, 40)
        x, out = random(6, columns, seed=1), random(6, 40, seed=2)
        whole = check(stack, out, x, slots_of(0, 1, -1, 1, 0, 0))
        one = check(stack, out[3:4], x[3:4], slots_of(1))
        assert torch.equal(bits(one[0]), bits(whole[3]))
