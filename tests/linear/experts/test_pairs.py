"""Pairs, and what their experts made added up: the C kernels against the definition, to the bit."""

from __future__ import annotations

import pytest
import torch

from branchline.core import native as library
from branchline.core.errors import ContractError
from branchline.linear.experts import native, pairs
from branchline.linear.experts.pairs import Pairs, combine, combine_defined

ISAS = ("scalar", "avx2", "avx512", "amx")
FIELDS = ("order", "expert", "offsets", "token", "position")


@pytest.fixture(params=ISAS)
def isa(request):
    """Each instruction set that this processor has."""
    functions = library.load().functions
    functions.bl_set_isa(min(ISAS.index(request.param), functions.bl_best_isa()))
    yield request.param
    functions.bl_set_isa(functions.bl_best_isa())


@pytest.fixture(autouse=True)
def _buffers_full_of_ones(monkeypatch):
    def full(shape, dtype, device):
        room = torch.empty(shape, dtype=dtype, device=device)
        room.view(torch.uint8).fill_(0xFF)
        return room

    monkeypatch.setattr(native, "empty", full)


def choices(tokens: int, top_k: int, experts: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + tokens)
    return torch.rand(tokens, experts, generator=generator).topk(top_k).indices


def assert_equal(found: Pairs, wanted: Pairs) -> None:
    for name in FIELDS:
        ours, theirs = getattr(found, name), getattr(wanted, name)
        assert ours.dtype == theirs.dtype, name
        assert torch.equal(ours, theirs), name
    for name in ("tokens", "top_k", "experts", "partial", "bounds"):
        assert getattr(found, name) == getattr(wanted, name), name


# --- pairs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize(
    ("tokens", "top_k", "experts"), [(0, 2, 4), (1, 1, 1), (1, 2, 8), (33, 8, 8), (200, 4, 64)]
)
def test_sorted_as_defined(dtype, tokens, top_k, experts):
    index = choices(tokens, top_k, experts).to(dtype)
    assert native.sorts(index)
    for partial in (False, True):
        found = Pairs.of(index, experts, partial=partial)
        assert_equal(found, Pairs.defined(index, experts, partial=partial))
    assert_equal(Pairs.of(index.t().contiguous().t(), experts), Pairs.of(index, experts))


def test_what_the_fields_say():
    found = Pairs.of(torch.tensor([[2, 0], [2, 3], [0, 2]]), 4)
    assert found.order.tolist() == [1, 4, 0, 2, 5, 3]
    assert found.token.tolist() == [0, 2, 0, 1, 2, 1]
    assert found.position.tolist() == [2, 0, 3, 5, 1, 4]
    assert found.expert.tolist() == [0, 0, 2, 2, 2, 3]
    assert found.offsets.tolist() == [0, 2, 2, 5, 6]
    assert len(found) == 6


@pytest.mark.parametrize("seed", range(4))
def test_experts_that_are_elsewhere(seed):
    index = choices(50, 4, 16, seed) - 5
    index[3] = torch.tensor([-(2**40), 2**40, 6, 5])
    found = Pairs.of(index, 6, partial=True)
    assert_equal(found, Pairs.defined(index, 6, partial=True))
    assert found.bounds[-1] == int(((index >= 0) & (index < 6)).sum())


def test_wrong_choices_are_refused(monkeypatch):
    with pytest.raises(ContractError, match="expected"):
        Pairs.of(torch.tensor([1, 2]), 4)
    for available in (True, False):
        if not available:
            monkeypatch.setattr(native, "sorts", lambda index: False)
        for index in ([[0, 4]], [[-1, 0]]):
            with pytest.raises(ContractError, match="outside of 0 to 3"):
                Pairs.of(torch.tensor(index), 4)


def test_wrong_choices_add_nothing_where_they_cannot_be_looked_at(monkeypatch):
    assert not pairs.can_look(torch.zeros(2, 2, device="meta"))
    monkeypatch.setattr(native, "sorts", lambda index: False)
    monkeypatch.setattr(pairs, "can_look", lambda index: False)
    index = torch.tensor([[0, 4], [-1, 3], [2**40, -(2**40)]])
    found = Pairs.of(index, 4)
    assert found.partial
    assert_equal(found, Pairs.defined(index, 4, partial=True))
    assert found.expert.tolist() == [0, 3, 4, 4, 4, 4]
    assert found.bounds == (0, 1, 1, 1, 2)
    out = torch.tensor([[1.0], [2.0], [torch.nan], [torch.nan], [torch.nan], [torch.nan]])
    total = combine(out, torch.ones(3, 2), found)
    assert total.flatten().tolist() == [1.0, 2.0, 0.0]


def test_other_dtypes_are_sorted_by_torch():
    index = choices(9, 2, 4).to(torch.int16)
    assert not native.sorts(index)
    assert_equal(Pairs.of(index, 4), Pairs.of(index.long(), 4))


# --- combine ----------------------------------------------------------------------------------


def bits(x: torch.Tensor) -> torch.Tensor:
    """All NaN alike: their payloads are nobody's business."""
    return torch.where(x.isnan(), torch.nan, x).view(torch.int32)


def made_for(found: Pairs, columns: int, dtype: torch.dtype, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(len(found), columns, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("columns", [1, 15, 64, 72, 333])
def test_combined_as_defined(isa, dtype, columns):
    for tokens, top_k in ((0, 2), (1, 1), (1, 2), (5, 8), (40, 3)):
        found = Pairs.of(choices(tokens, top_k, 8), 8)
        out = made_for(found, columns, dtype)
        for weight_dtype in (torch.float32, torch.bfloat16, torch.float16):
            weights = torch.rand(tokens, top_k).to(weight_dtype)
            assert native.combines(out, weights)
            wanted = combine_defined(out, weights, found)
            ours = combine(out, weights, found)
            assert ours.dtype == wanted.dtype == torch.float32
            assert torch.equal(bits(ours), bits(wanted))


def test_special_values(isa):
    found = Pairs.of(choices(12, 2, 4), 4)
    out = made_for(found, 70, torch.float32)
    out[3, 5], out[7, 60], out[2, 69], out[4] = torch.nan, torch.inf, -torch.inf, -0.0
    weights = torch.rand(12, 2)
    weights[1, 0], weights[5, 1], weights[6] = torch.inf, torch.nan, -0.0
    wanted = combine_defined(out, weights, found)
    assert torch.equal(bits(combine(out, weights, found)), bits(wanted))


def test_what_nobody_computed_is_not_read(isa):
    index = choices(30, 3, 12) - 3
    found = Pairs.of(index, 6, partial=True)
    out = made_for(found, 75, torch.bfloat16)
    out[found.bounds[-1] :] = torch.nan
    weights = torch.rand(30, 3)
    total = combine(out, weights, found)
    assert bool(total.isfinite().all())
    assert torch.equal(bits(total), bits(combine_defined(out, weights, found)))
    elsewhere = ((index < 0) | (index >= 6)).all(1)
    assert bool(elsewhere.any())
    assert bool((total[elsewhere] == 0).all())


def test_views_and_threads_do_not_show(monkeypatch):
    found = Pairs.of(choices(300, 2, 4), 4)
    room = made_for(found, 1000, torch.bfloat16)
    out, weights = room[:, 100:700], torch.rand(2, 300).t()
    wanted = combine_defined(out, weights, found)
    for threads in (1, 2, 3):
        monkeypatch.setattr(library, "threads", lambda count=threads: count)
        assert torch.equal(bits(combine(out, weights, found)), bits(wanted))


def test_a_token_has_the_same_bytes_among_any_others():
    index, weights = choices(40, 2, 6), torch.rand(40, 2)
    by_pair = torch.randn(40, 2, 90).bfloat16()
    whole = Pairs.of(index, 6)
    total = combine(by_pair.flatten(0, 1)[whole.order], weights, whole)
    for chosen in ([7], [3, 3, 39], list(range(0, 40, 3))):
        some = Pairs.of(index[chosen], 6)
        part = combine(by_pair[chosen].flatten(0, 1)[some.order], weights[chosen], some)
        assert torch.equal(bits(part), bits(total[chosen]))


def test_wrong_shapes_are_refused():
    found = Pairs.of(choices(5, 2, 4), 4)
    out, weights = made_for(found, 8, torch.bfloat16), torch.rand(5, 2)
    for wrong in ((out[1:], weights), (out, weights[1:]), (out, weights[:, :1]), (out[0], weights)):
        with pytest.raises(ContractError, match="5 tokens"):
            pairs.combine(*wrong, found)
