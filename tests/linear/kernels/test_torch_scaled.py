"""torch's scaled matmul: the arguments it is called with, and its results where a CPU has them.

torch runs scales a tensor and a row on the CPU as well.  For the other recipes the arguments are
checked by torch itself (on fake tensors) and then read back, as its documentation lays them out.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import ScalingType, SwizzleType

from branchline.core.errors import KernelUnavailableError, QuantKeyMismatchError, ScaleError
from branchline.core.oracle import fp4_values, quantize
from branchline.core.scheme import PER_CHANNEL, SCHEMES
from branchline.linear.contract import InputContract
from branchline.linear.kernels.torch_scaled import TorchScaledLinear
from branchline.linear.quantized_weight import QuantizedWeight
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
    round_up,
)

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
LAID_OUT = BLOCKS | MICROSCALED
SHAPES = [(0, 256), (1, 256), (2, 3, 256), (131, 256), (2, 0, 256), (256,)]


def unswizzled(scale: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Scale (r, g) of tiles of 128 rows and 4 groups, by the formula of the documentation."""
    wide = round_up(columns, 4)
    assert scale.numel() == round_up(rows, 128) * wide
    flat = scale.float().flatten()
    r, g = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    tile = (r // 128) * (wide // 4) + g // 4
    return flat[tile * 512 + (r % 32) * 16 + (r % 128 // 32) * 4 + g % 4]


def dequantized(codes, scales, recipe, swizzle) -> torch.Tensor:
    """float64 (rows, K) of what one side of the call stands for."""
    fp4 = codes.dtype == torch.float4_e2m1fn_x2
    values = fp4_values(codes.contiguous()) if fp4 else codes.float()
    rows, columns = values.shape
    match recipe:
        case [ScalingType.BlockWise1x128]:
            assert scales[0].stride() in ((1, rows), (1, 1))
            spread = scales[0].repeat_interleave(128, 1)
        case [ScalingType.BlockWise128x128]:
            (scale,) = scales
            assert scale.shape[0] % 4 == 0
            assert scale.stride(0) == 1
            spread = scale.t()[:, : columns // 128]
            spread = spread.repeat_interleave(128, 0).repeat_interleave(128, 1)
        case [ScalingType.BlockWise1x32] | [ScalingType.BlockWise1x16, ScalingType.TensorWise]:
            assert swizzle[0] == SwizzleType.SWIZZLE_32_4_4
            size = 16 if fp4 else 32
            spread = unswizzled(scales[0], rows, columns // size).repeat_interleave(size, 1)
            if fp4:
                spread = spread * scales[1]
        case _:
            raise AssertionError(f"no such recipe: {recipe}")
    return values.double() * spread.double()


@pytest.fixture
def calls(monkeypatch):
    """`scaled_mm` as its documentation has it; returns the keyword arguments of every call."""
    library, made = F.scaled_mm, []

    def scaled_mm(a, b, scale_a, recipe_a, scale_b, recipe_b, swizzle_a, swizzle_b, **more):
        given = (a, b, scale_a, recipe_a, scale_b, recipe_b, swizzle_a, swizzle_b)
        with FakeTensorMode() as mode:
            faked = torch.utils._pytree.tree_map_only(torch.Tensor, mode.from_tensor, given)
            checked = library(*faked, **{**more, "bias": None})
        made.append(more)
        left = dequantized(a, scale_a, recipe_a, swizzle_a)
        out = left @ dequantized(b.t(), scale_b, recipe_b, swizzle_b).T
        assert checked.shape == out.shape
        return out.to(more["output_dtype"])

    monkeypatch.setattr(F, "scaled_mm", scaled_mm)
    return made


# --- a scale a tensor or a row -----------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scheme", ROWWISE.values(), ids=list(ROWWISE))
@pytest.mark.parametrize("bias", [None, torch.bfloat16, torch.float32])
def test_rows_against_the_emulated_kernel(scheme, bias, dtype):
    both = pair(TorchScaledLinear, scheme, 48, 256, bias)
    for shape in SHAPES:
        x = activation(*shape, dtype=dtype)
        out = both.kernel.apply(x, NAME)
        assert_close(both, x, out)
        assert_same(out, both.kernel.apply(codes_for(x, both.kernel), NAME))


@pytest.mark.parametrize("scheme", ROWWISE.values(), ids=list(ROWWISE))
def test_bfloat16_is_rounded_once_by_the_library(scheme, monkeypatch):
    library, dtypes, biases = F.scaled_mm, [], []

    def scaled_mm(*given, output_dtype, bias=None):
        dtypes.append(output_dtype)
        biases.append(bias)
        return library(*given, output_dtype=output_dtype, bias=bias)

    monkeypatch.setattr(F, "scaled_mm", scaled_mm)
    exact, other = (pair(TorchScaledLinear, scheme, 16, 64, d) for d in DTYPES[::2])
    for both, dtype in ((exact, torch.bfloat16), (exact, torch.float16), (other, torch.bfloat16)):
        both.kernel.apply(activation(3, 64, dtype=dtype), NAME)
    # A bias that bfloat16 cannot hold is added in float32.
    assert dtypes == [torch.bfloat16, torch.float32, torch.float32]
    assert [b is None for b in biases] == [False, True, True]
    assert biases[0].dtype == torch.bfloat16


# --- block scales ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scheme", LAID_OUT.values(), ids=list(LAID_OUT))
def test_laid_out_scales_are_read_back(calls, scheme, dtype):
    for n, k, bias in ((128, 128, None), (384, 256, torch.float32), (256, 640, None)):
        both, first = pair(TorchScaledLinear, scheme, n, k, bias), len(calls)
        for shape in ((1, k), (2, 3, k), (131, k), (0, k), (k,)) if k == 256 else ((131, k),):
            x = activation(*shape, dtype=dtype)
            out = both.kernel.apply(x, NAME)
            assert_close(both, x, out)
            assert_same(out, both.kernel.apply(codes_for(x, both.kernel), NAME))
        # Only a product that needs nothing more is rounded by the library.
        rounded = {call["output_dtype"] == torch.bfloat16 for call in calls[first:]}
        assert rounded == {dtype == torch.bfloat16 and bias is None}
    assert all(call["bias"] is None for call in calls)


@pytest.mark.parametrize(("n", "k"), [(16, 32), (144, 96), (272, 352)])
@pytest.mark.parametrize("scheme", MICROSCALED.values(), ids=list(MICROSCALED))
def test_sizes_that_the_tiles_pad(calls, scheme, n, k):
    both = pair(TorchScaledLinear, scheme, n, k)
    x = activation(5, k)
    assert_close(both, x, both.kernel.apply(x, NAME))
    assert len(calls) == 1


# --- what it keeps -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*ROWWISE, *LAID_OUT])
def test_the_weight_comes_back_to_the_bit(name):
    scheme = (ROWWISE | LAID_OUT)[name]
    both = pair(TorchScaledLinear, scheme, 384, 640)
    back = both.kernel.quantized_weight()
    assert_same(back.codes, both.weight.codes)
    assert_same(back.scale, both.weight.scale)
    assert back.scheme == both.weight.scheme
    assert back.in_features == 640
    assert back.global_scale is both.weight.global_scale
    # Padding of scales, and one repeated for every row, is all that is more.
    assert 0 <= both.kernel.weight_bytes - both.weight.nbytes <= 384 * 4 + 1024


def test_codes_and_scales_in_other_carriers():
    """Row scales and blocks may come as e8m0 bytes, MX scales as float32: they go back so."""
    for name, carrier in (("fp8-block-ue8m0", torch.float8_e8m0fnu), ("mxfp8", torch.float32)):
        weight = pair(TorchScaledLinear, SCHEMES[name], 256, 256).weight
        other = replace(weight, scale=weight.scale.to(carrier))
        key = SCHEMES[name].input
        back = TorchScaledLinear(other, None, InputContract(key)).quantized_weight()
        assert_same(back.scale, other.scale)


@pytest.mark.parametrize("scheme", ROWWISE.values(), ids=list(ROWWISE))
def test_strided_inputs_and_codes(scheme):
    both = pair(TorchScaledLinear, scheme, 32, 64)
    wide = activation(6, 4, 192)
    for view in (wide[:, ::2, :64], wide.transpose(0, 1)[..., 64:128], wide[..., ::3]):
        out = both.kernel.apply(view, NAME)
        assert_same(out, both.kernel.apply(view.contiguous(), NAME))
        made = codes_for(view, both.kernel)
        spread = made.codes.repeat_interleave(2, -1)[..., ::2]
        assert not spread.is_contiguous()
        object.__setattr__(made, "codes", spread)
        assert_same(both.kernel.apply(made, NAME), out)


def test_codes_of_the_plain_key_are_refused_where_it_takes_another():
    both = pair(TorchScaledLinear, SCHEMES["fp8-block"], 128, 128)
    plain = quantize(activation(4, 128), SCHEMES["fp8-block"].input, producer="somebody")
    with pytest.raises(QuantKeyMismatchError, match="column-major"):
        both.kernel.apply(plain, NAME)


def test_what_it_cannot_do_is_refused_when_it_is_built():
    weight = QuantizedWeight.from_float(torch.ones(16, 40), NAME, PER_CHANNEL)
    with pytest.raises(KernelUnavailableError, match="multiple of 16 as K, not 40"):
        TorchScaledLinear(weight, None, InputContract(SCHEMES["fp8-dynamic"].input))
    weight = QuantizedWeight.from_float(torch.ones(16, 64), NAME, PER_CHANNEL)
    with pytest.raises(ScaleError):
        TorchScaledLinear(weight, None, InputContract(SCHEMES["fp8-static"].input))
    with pytest.raises(KernelUnavailableError, match="fp8-channel x fp8-dynamic-group32"):
        TorchScaledLinear(weight, None, InputContract(SCHEMES["mxfp8"].input))
