"""The branch of an adapter on experts, pair by pair, and what a rank of a group keeps of one."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from branchline.adapters.experts import ExpertsBranch
from branchline.adapters.shards import own_share
from branchline.adapters.slots import SlotClasses
from branchline.adapters.weights import AdapterWeights, ExpertsWeights
from branchline.linear.batch import BarePlan, Batch
from branchline.linear.branching import BranchInput
from branchline.linear.experts import ExpertsLinear, PairRows, Pairs
from branchline.linear.experts.kernels.each import FloatExperts
from branchline.linear.experts.shard import ExpertsShard
from branchline.linear.registry import LayerRegistry
from tests.moe.adapters import delta

# --- the branch --------------------------------------------------------------------------------


def filled(dtype: torch.dtype, ranks: tuple[int, ...] = (4, 8)) -> tuple[ExpertsBranch, list]:
    generator = torch.Generator().manual_seed(5)
    branch = ExpertsBranch("experts", SlotClasses(ranks), 3, 32, 16, dtype, torch.device("cpu"))
    held = []
    for slot, rank in enumerate((3, 8)):
        number = 3 if slot else 1
        a = torch.randn(3, rank, 32, generator=generator)
        b = torch.randn(number, 16, rank, generator=generator)
        held.append(ExpertsWeights(a, b, 0.5 + slot))
        branch.write(slot, held[-1])
    return branch, held


def rows_of(index: torch.Tensor, slots: list[int], *, partial: bool = False) -> PairRows:
    by_place = torch.tensor([slots], dtype=torch.int32)
    batch = Batch(BarePlan((), (True,), (1,), (8,)), len(slots), by_place)
    return PairRows(batch, Pairs.of(index, 3, partial=partial))


@pytest.mark.parametrize("partial", [False, True])
def test_pairs_get_the_product_of_their_expert_and_adapter(partial):
    branch, held = filled(torch.float32)
    index = torch.tensor([[0, 2], [1, 0], [2, 1], [0, 1]])
    if partial:
        index[0, 1] = -1
        index[3, 0] = 7
    rows = rows_of(index, [1, -1, 0, 1], partial=partial)
    pairs, x = rows.pairs, torch.randn(8, 32)
    out = torch.randn(8, 16)
    added = branch.add(out.clone(), BranchInput(x, "experts"), rows, 0)
    for at in range(8):
        token, expert = int(pairs.token[at]), int(pairs.expert[at])
        slot = [1, -1, 0, 1][token]
        if slot < 0 or expert == 3:
            assert torch.equal(added[at], out[at])
            continue
        parts = held[slot]
        b = parts.b[expert if parts.b.shape[0] > 1 else 0]
        wanted = out[at] + parts.scaling * (x[at] @ parts.a[expert].T) @ b.T
        torch.testing.assert_close(added[at], wanted, atol=1e-5, rtol=1e-5)
    branch.clear(1)
    cleared = branch.add(out.clone(), BranchInput(x, "experts"), rows, 0)
    of_slot = torch.isin(pairs.token, torch.tensor([0, 3]))
    assert torch.equal(cleared[of_slot], out[of_slot])
    assert torch.equal(cleared[~of_slot], added[~of_slot])


def test_a_lower_rank_leaves_nothing_of_a_higher_one():
    branch, held = filled(torch.bfloat16, ranks=(8, 8))
    rows = rows_of(torch.tensor([[0], [1], [2]]), [1, 1, 1])
    x, out = torch.randn(3, 32).bfloat16(), torch.zeros(3, 16).bfloat16()
    branch.write(1, held[0])
    reused = branch.add(out.clone(), BranchInput(x, "experts"), rows, 0)
    fresh, _ = filled(torch.bfloat16, ranks=(8, 8))
    of_first = rows_of(torch.tensor([[0], [1], [2]]), [0, 0, 0])
    assert torch.equal(reused, fresh.add(out.clone(), BranchInput(x, "experts"), of_first, 0))
    assert branch.nbytes == 2 * 8 * 3 * (32 + 16) * 2


# --- ranks -------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [False, True])
def test_ranks_keep_the_products_of_their_own_experts(shared):
    generator = torch.Generator().manual_seed(5)
    a = torch.randn(1 if shared else 6, 4, 32, generator=generator)
    parts = ExpertsWeights(a, torch.randn(6, 16, 4, generator=generator), 0.5)
    whole = AdapterWeights("memory", "digest", {}, experts={"experts": parts})
    kernel = FloatExperts(torch.zeros(2, 16, 32), None)
    kept = []
    for rank in range(3):
        layer = ExpertsLinear(
            "experts",
            0,
            kernel,
            LayerRegistry(),
            torch.float32,
            torch.device("cpu"),
            by_token=True,
        )
        assert own_share("a", whole, {"experts": layer}) is whole
        # Nothing is exchanged here.
        layer.shard = ExpertsShard(rank, 2, cast("Any", None))
        own = own_share("a", whole, {"experts": layer})
        assert own.digest == whole.digest
        kept.append(delta(own.experts["experts"], 2))
    torch.testing.assert_close(torch.cat(kept), delta(parts, 6))
