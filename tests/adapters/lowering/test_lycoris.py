"""LoHa and LoKr: products of products."""

import peft
import pytest
import torch
from peft.tuners.lokr.layer import factorization

from branchline.adapters.lowering import loha, lokr
from branchline.adapters.lowering.base import BaseLinear
from tests.adapters.lowering.peft_linear import Adapted, linear

SHAPES = [(32, 24), (64, 64), (30, 49)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("rank", "max_rank"), [(1, 256), (3, 256), (3, 8), (8, 256)])
def test_loha(shape, bias, rank, max_rank):
    adapted = Adapted(peft.LoHaConfig(r=rank, alpha=5), linear(*shape, bias))
    base = adapted.base(max_rank=max_rank)
    parts = loha.lower(adapted.tensors, loha.LoHaSettings(rank, 5), base)
    adapted.expect(parts)
    width = sum(shape) * rank**2
    if rank**2 <= max_rank and width < shape[0] * shape[1]:
        assert parts.shrink_rank == rank**2
    else:
        assert parts.delta is not None
        assert parts.low_rank is None


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rank", [1, 2, 16])
@pytest.mark.parametrize("decompose_both", [False, True])
@pytest.mark.parametrize("factor", [-1, 2, 4, 100])
def test_lokr(shape, rank, decompose_both, factor):
    options = {"decompose_both": decompose_both, "decompose_factor": factor}
    adapted = Adapted(peft.LoKrConfig(r=rank, alpha=5, **options), linear(*shape))
    settings = lokr.LoKrSettings(rank, 5, **options)
    adapted.expect(lokr.lower(adapted.tensors, settings, adapted.base()))


def test_lokr_is_a_thin_product_where_a_factor_is_thin():
    adapted = Adapted(peft.LoKrConfig(r=1, alpha=5, decompose_both=True), linear(64, 64))
    settings = lokr.LoKrSettings(1, 5, decompose_both=True)
    assert lokr.lower(adapted.tensors, settings, adapted.base()).shrink_rank == 1
    assert lokr.lower(adapted.tensors, settings, adapted.base(max_rank=0)).delta is not None


def test_lokr_takes_the_thinner_way_through_a_whole_factor():
    # w1 is 2 by 8: through its rows, the product has the rank 2 * 1, not 8 * 1.
    tensors = {
        "lokr_w1": torch.randn(2, 8),
        "lokr_w2_a": torch.randn(31, 1),
        "lokr_w2_b": torch.randn(1, 8),
    }
    base = BaseLinear("proj", 64, 62)
    parts = lokr.lower(tensors, lokr.LoKrSettings(1, 1), base)
    delta = torch.kron(tensors["lokr_w1"], tensors["lokr_w2_a"] @ tensors["lokr_w2_b"])
    assert parts.rank == 2
    torch.testing.assert_close(parts.low_rank.b @ parts.low_rank.a, delta)


def test_sizes_are_split_as_peft_splits_them():
    for size in [*range(1, 200), 768, 1000, 4096, 11008, 14336]:
        for factor in (-1, 1, 2, 3, 4, 5, 8, 16, 31, 64, 300):
            assert lokr.factorise(size, factor) == factorization(size, factor), (size, factor)
