"""The pools of low-rank matrices: rank classes, writing, clearing, and who multiplies."""

from __future__ import annotations

import pytest
import torch

from branchline.adapters.low_rank import LowRankSlots
from branchline.adapters.slots import SlotClasses
from branchline.adapters.weights import LowRank
from branchline.core.errors import RawConsumerError
from branchline.linear.branching import BranchInput
from branchline.linear.shrink import shrink

CPU = torch.device("cpu")


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def weights(rank: int, columns: int = 48, channels: int = 40, seed: int = 0) -> LowRank:
    a, b = random(rank, columns, seed=seed), random(channels, rank, seed=seed + 1)
    return LowRank(a / columns**0.5, b, 0.5)


def pools(dtype=torch.float32) -> LowRankSlots:
    """Slots of rank 4, 4, 16."""
    return LowRankSlots("q_proj", SlotClasses.of({16: 1, 4: 2}), 48, 40, dtype, CPU)


def slots_of(*slots: int) -> torch.Tensor:
    return torch.tensor(slots, dtype=torch.int32)


def test_a_high_rank_costs_low_ones_nothing():
    held = pools()
    assert held.a.shape == (4 + 4 + 16, 48)
    assert held.b.shape == (4 + 4 + 16, 40)
    assert held.nbytes == 24 * (48 + 40) * 4


def test_each_row_takes_its_own_slot():
    held = pools()
    given = {0: weights(4), 1: weights(3, seed=2), 2: weights(16, seed=4)}
    for slot, part in given.items():
        held.write(slot, part)
    x, out = random(8, 48, seed=6), random(8, 40, seed=7)
    slots = slots_of(2, -1, 1, 0)
    found = held.add(out.clone(), BranchInput(x, "q_proj"), slots)
    for row in range(8):
        slot = int(slots[row // 2])
        if slot < 0:
            assert torch.equal(found[row], out[row])
            continue
        part = given[slot]
        exact = out[row].double() + 0.5 * (x[row].double() @ part.a.double().mT) @ (
            part.b.double().mT
        )
        torch.testing.assert_close(found[row].double(), exact, rtol=1e-5, atol=1e-5)
    delta = held.expand(shrink(x, held.shrink_request(slots, 16)), slots)
    assert (delta[2:4] == 0).all()
    torch.testing.assert_close(out + delta, found, rtol=1e-5, atol=1e-5)


def test_what_a_slot_held_before_is_read_by_nobody():
    """Neither what was written, nor what lies beyond the rank; and no address changes."""
    held, fresh = pools(), pools()
    addresses = held.a.data_ptr(), held.b.data_ptr()
    held.write(2, weights(8))
    held.a.fill_(torch.nan)
    held.b.fill_(torch.nan)
    for pool in (held, fresh):
        pool.write(2, weights(5, seed=3))
    assert int(held.ranks[2]) == 5
    columns, channels = held.a.shape[1], held.b.shape[1]
    x, out = random(6, columns), random(6, channels, seed=1)
    slots = torch.tensor([2, -1, 2], dtype=torch.int32)
    found, wanted = (
        pool.add(out.clone(), BranchInput(x, "q_proj"), slots) for pool in (held, fresh)
    )
    assert torch.equal(found, wanted)
    held.clear(2)
    assert int(held.ranks[2]) == 0
    assert torch.equal(held.add(out.clone(), BranchInput(x, "q_proj"), slots), out)
    assert addresses == (held.a.data_ptr(), held.b.data_ptr())


def test_absorbed_rows_give_the_bytes_of_raw_ones():
    held = pools(torch.bfloat16)
    held.write(0, weights(4))
    held.write(2, weights(9, seed=2))
    x, out = random(6, 48).bfloat16(), random(6, 40, seed=1).bfloat16()
    slots = slots_of(2, 0, -1)
    raw = held.add(out.clone(), BranchInput(x, "q_proj"), slots)
    shrunk = shrink(x, held.shrink_request(slots, 9))
    assert torch.equal(held.kernel.expand(out.clone(), shrunk, slots), raw)


def test_what_a_kernel_refuses_is_computed_by_the_definition_and_counted():
    held = pools()
    held.write(0, weights(4))
    x, out = random(2, 48).double(), random(2, 40, seed=1).double()
    found = held.add(out, BranchInput(x, "q_proj"), slots_of(0, -1))
    assert found.dtype == torch.float64
    assert not torch.equal(found[0], out[0])
    assert torch.equal(found[1], out[1])
    if held.kernel.name != "eager":
        assert sum(held.fallbacks.values()) == 1
        assert "float64" in next(iter(held.fallbacks))


def test_gradients_are_still_recorded():
    held = pools()
    held.write(0, weights(4))
    x = random(2, 48)
    with torch.enable_grad():
        base = random(2, 40, seed=1).requires_grad_()
        held.add(base * 1.0, BranchInput(x, "q_proj"), slots_of(0, -1)).sum().backward()
    assert torch.equal(base.grad, torch.ones(2, 40))


def test_codes_without_raw_rows_are_refused():
    held, codes = pools(), torch.zeros(2, 48, dtype=torch.float8_e4m3fn)
    with pytest.raises(RawConsumerError, match="q_proj"):
        held.add(random(2, 40), BranchInput(codes, "q_proj"), slots_of(0, -1))
