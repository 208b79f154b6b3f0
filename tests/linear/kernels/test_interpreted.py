"""The Triton matmuls in Triton's interpreter: every key they take, odd shapes, views, NaN."""

from __future__ import annotations

import pytest
import torch

from branchline.core.errors import KernelUnavailableError
from branchline.core.platform import detect_platform
from branchline.core.scheme import SCHEMES, LinearScheme, WeightScheme
from branchline.linear.contract import InputContract
from branchline.linear.kernels.base import LinearConfig
from branchline.linear.kernels.reference import matmul
from branchline.linear.kernels.selection import select_kernel
from branchline.linear.kernels.triton import fp8
from branchline.linear.kernels.triton.fp8 import TritonBlockScaledLinear, TritonRowwiseLinear
from branchline.linear.kernels.triton.plan import PLANS, plan_matmul
from branchline.linear.quantized_weight import QuantizedWeight
from tests.interpreted import quick_interpreter
from tests.linear.kernels.cases import (
    BLOCKS,
    NAME,
    ROWWISE,
    activation,
    assert_close,
    assert_same,
    codes_for,
    pair,
)

pytestmark = pytest.mark.triton_interpreted

GROUP = SCHEMES["fp8-block"].input
BLOCKWISE = BLOCKS | {
    "channel-group": LinearScheme(WeightScheme(1, 128), GROUP),
    "32-rows": LinearScheme(WeightScheme(32, 128), GROUP),
}
EVERY = {name: (TritonRowwiseLinear, scheme) for name, scheme in ROWWISE.items()} | {
    name: (TritonBlockScaledLinear, scheme) for name, scheme in BLOCKWISE.items()
}
MAIN = ("fp8-static", "fp8-dynamic", "fp8-block")
ROWS = (0, 1, 3, 17, 65)


def each(names=tuple(EVERY)):
    return pytest.mark.parametrize(("cls", "scheme"), [EVERY[n] for n in names], ids=names)


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch):
    """An element that no kernel writes is a NaN."""

    def unwritten(shape, dtype, device):
        return torch.full(shape, torch.nan, dtype=dtype, device=device)

    monkeypatch.setattr(fp8, "empty", unwritten)
    with quick_interpreter(monkeypatch):
        yield


# --- results -----------------------------------------------------------------------------------


@each(MAIN)
@pytest.mark.parametrize("k", [64, 128, 192, 576])
@pytest.mark.parametrize("n", [64, 128, 192, 576])
def test_shapes(cls, scheme, n, k):
    both = pair(cls, scheme, n, k, torch.bfloat16 if n == 192 else None)
    for rows in ROWS if n == 128 else (17,):
        x = activation(rows, k)
        assert_close(both, x, both.kernel.apply(x, NAME))


@each()
@pytest.mark.parametrize(("n", "k"), [(1, 1), (77, 200), (130, 129)])
def test_every_key_at_odd_sizes(cls, scheme, n, k):
    both = pair(cls, scheme, n, k, torch.float32)
    for rows in (1, 5, 66):
        x = activation(rows, k)
        assert_close(both, x, both.kernel.apply(x, NAME))


@each()
@pytest.mark.parametrize("shape", [(200,), (2, 3, 200), (2, 0, 200), (0, 200), (1, 1, 200)])
def test_codes_and_raw_input_give_the_same_bytes(cls, scheme, shape):
    both = pair(cls, scheme, 70, 200, torch.bfloat16)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        x = activation(*shape, dtype=dtype)
        out = both.kernel.apply(x, NAME)
        assert out.shape == (*shape[:-1], 70)
        assert_same(out, both.kernel.apply(codes_for(x, both.kernel), NAME))
        assert_close(both, x, out)


@each(MAIN)
def test_against_the_definition(cls, scheme):
    both = pair(cls, scheme, 40, 300, torch.bfloat16)
    x = activation(4, 300, dtype=torch.float32)
    wanted = matmul(codes_for(x, both.emulated), both.weight, both.kernel.bias())
    out = both.kernel.apply(x, NAME)
    assert torch.allclose(out, wanted, rtol=1e-5, atol=1e-4)


@each(MAIN)
def test_strided_inputs(cls, scheme):
    both = pair(cls, scheme, 48, 130)
    wide = activation(6, 4, 390)
    for view in (wide[:, ::2, :130], wide.transpose(0, 1)[..., 130:260], wide[..., ::3]):
        assert_same(
            both.kernel.apply(view, NAME), both.kernel.apply(view.contiguous(), NAME)
        )  # fmt: skip


@each(MAIN)
def test_nan_and_infinity(cls, scheme):
    both = pair(cls, scheme, 33, 130)
    x = activation(4, 130)
    # Behind the last column of row 2 lies the first of row 3.
    x[0, 7], x[1, 128], x[3, 0] = torch.inf, torch.nan, torch.nan
    out = both.kernel.apply(x, NAME)
    assert out[[1, 3]].isnan().all()
    assert out[2].isfinite().all()
    # Under a dynamic scale of the largest number, those beside it may overflow.
    assert not out[0].isnan().any()


@each(MAIN)
@pytest.mark.parametrize("k", [304, 300])
def test_a_row_s_bytes_do_not_depend_on_how_many_there_are(cls, scheme, k):
    """Every plan, with numbers whose sums are exact in any order: NumPy's is not the hardware's."""
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.randint(-2, 3, (size, k), generator=generator) for size in (100, 140))
    weight[:, ::100] = x[:, ::100] = 2  # then every code is a multiple of 224
    weight = QuantizedWeight.from_float(weight.float(), NAME, scheme.weight)
    contract = pair(cls, scheme, 100, k).kernel.contract
    kernel, x = cls(weight, torch.linspace(-1, 1, 100), contract), x.bfloat16() * 0.37
    whole = kernel.apply(x, NAME)
    for rows in (1, 16, 17, 64, 65):
        assert_same(kernel.apply(x[-rows:], NAME), whole[-rows:])


# --- what it keeps, and where it runs ----------------------------------------------------------


@each()
def test_the_weight_comes_back_to_the_bit(cls, scheme):
    both = pair(cls, scheme, 130, 260)
    back = both.kernel.quantized_weight()
    assert_same(back.codes, both.weight.codes)
    assert_same(back.scale, both.weight.scale)
    assert both.kernel.weight_bytes == both.weight.nbytes


def test_scales_in_one_byte_are_served_from_a_copy():
    weight = pair(TritonBlockScaledLinear, SCHEMES["fp8-block-ue8m0"], 256, 256).weight
    bytes_ = QuantizedWeight(
        weight.codes, weight.scale.to(torch.float8_e8m0fnu), weight.scheme, 256
    )
    contract = InputContract(
        TritonBlockScaledLinear.consumes(LinearConfig(256, 256, SCHEMES["fp8-block-ue8m0"]))
    )
    kernel = TritonBlockScaledLinear(bytes_, None, contract)
    assert_same(kernel.quantized_weight().scale, bytes_.scale)
    assert kernel.weight_bytes == 256 * 256 + 4 + 16
    x = activation(3, 256)
    assert_same(
        kernel.apply(x, NAME), TritonBlockScaledLinear(weight, None, contract).apply(x, NAME)
    )


def test_chosen_in_the_interpreter():
    here = detect_platform("cpu")
    assert here.interpreted
    for name in MAIN:
        chosen = select_kernel(LinearConfig(70, 50, SCHEMES[name]), here).kernel
        assert chosen is EVERY[name][0]


def test_empty_weights_are_left_to_others():
    weight = QuantizedWeight.from_float(torch.ones(4, 0), NAME)
    with pytest.raises(KernelUnavailableError, match="nothing to multiply"):
        TritonRowwiseLinear(weight, None, InputContract(SCHEMES["fp8-dynamic"].input))


def test_plans_fit_every_device():
    assert all(plan.shared_bytes <= 99 * 1024 for plan in PLANS)
    # Else the instructions would be others for few rows than for many.
    assert all(plan.channels >= 64 for plan in PLANS)
    rows = (1, 16, 17, 64, 65, 140)
    assert {plan_matmul(n, k) for n in rows for k in (304, 300)} == set(PLANS)
    assert len({plan_matmul(n, 300) for n in rows}) == 1
