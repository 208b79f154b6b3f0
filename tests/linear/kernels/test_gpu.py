"""Every matmul that this device has, against the emulated one on the same device."""

from __future__ import annotations

import pytest
import torch

from branchline.core.platform import detect_platform
from branchline.core.scheme import SCHEMES, LinearScheme, WeightScheme
from branchline.linear.kernels.base import LinearConfig
from branchline.linear.kernels.torch_scaled import TorchScaledLinear
from branchline.linear.kernels.triton.fp8 import TritonBlockScaledLinear, TritonRowwiseLinear
from tests.linear.kernels.cases import (
    BLOCKS,
    MICROSCALED,
    NAME,
    ROWWISE,
    activation,
    assert_close,
    assert_same,
    codes_for,
    pair,
)

pytestmark = pytest.mark.gpu

SCHEMES_OF = {
    TorchScaledLinear: ROWWISE | BLOCKS | MICROSCALED,
    TritonRowwiseLinear: ROWWISE,
    TritonBlockScaledLinear: BLOCKS
    | {"channel-group": LinearScheme(WeightScheme(1, 128), SCHEMES["fp8-block"].input)},
}
SIZES = [(256, 384), (4096, 4096), (512, 11264)]
ODD = [(576, 576), (100, 77), (1, 1), (130, 4100)]
ROWS = (0, 1, 3, 17, 65, 200, 1030)
#: Hopper adds FP8 products with 14 bits or so, 128 columns at a time.
ACCUMULATION = 2.0**-10


def each(*kernels):
    found = [(cls, name) for cls in kernels for name in SCHEMES_OF[cls]]
    return pytest.mark.parametrize(
        ("cls", "name"), found, ids=[f"{cls.name}-{name}" for cls, name in found]
    )


def built(cls, name: str, n: int, k: int, bias=None):
    scheme = SCHEMES_OF[cls][name]
    verdict = cls.serves(LinearConfig(k, n, scheme), detect_platform("cuda"))
    if not verdict.ok:
        pytest.skip(verdict.reason)
    return pair(cls, scheme, n, k, bias, device="cuda")


@each(*SCHEMES_OF)
@pytest.mark.parametrize(("n", "k"), SIZES)
@pytest.mark.parametrize("bias", [None, torch.bfloat16, torch.float32])
def test_against_the_emulated_kernel(cls, name, n, k, bias):
    both = built(cls, name, n, k, bias)
    for rows in ROWS:
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            x = activation(rows, k, dtype=dtype, device="cuda")
            out = both.kernel.apply(x, NAME)
            assert_close(both, x, out, ACCUMULATION)
            assert_same(out, both.kernel.apply(codes_for(x, both.kernel), NAME))


@each(TritonRowwiseLinear, TritonBlockScaledLinear)
@pytest.mark.parametrize(("n", "k"), ODD)
def test_odd_sizes(cls, name, n, k):
    both = built(cls, name, n, k, torch.float32)
    for rows in ROWS:
        x = activation(rows, k, device="cuda")
        assert_close(both, x, both.kernel.apply(x, NAME), ACCUMULATION)


@each(TritonRowwiseLinear, TritonBlockScaledLinear)
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (100, 300)])
def test_a_row_s_bytes_do_not_depend_on_how_many_there_are(cls, name, n, k):
    both = built(cls, name, n, k, torch.bfloat16)
    x = activation(1030, k, device="cuda")
    whole = both.kernel.apply(x, NAME)
    for rows in (1, 2, 16, 17, 64, 65, 128, 129, 1029):
        assert_same(both.kernel.apply(x[-rows:], NAME), whole[-rows:])
    # What the neighbours hold does not show either.
    x[::2] = torch.nan
    assert_same(both.kernel.apply(x, NAME)[1::2], whole[1::2])


@each(*SCHEMES_OF)
def test_the_weight_comes_back_to_the_bit(cls, name):
    both = built(cls, name, 384, 640)
    back = both.kernel.quantized_weight()
    assert_same(back.codes, both.weight.codes)
    assert_same(back.scale, both.weight.scale)


@each(TritonRowwiseLinear, TritonBlockScaledLinear)
def test_nan_reaches_its_row_only(cls, name):
    both = built(cls, name, 256, 384)
    x = activation(70, 384, device="cuda")
    x[3, 200] = torch.nan
    out = both.kernel.apply(x, NAME)
    assert out[3].isnan().all()
    assert out[4:].isfinite().all()
    assert out[:3].isfinite().all()
