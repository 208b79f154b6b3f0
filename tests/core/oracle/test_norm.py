"""Norms against float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from branchline.core.oracle import NORM_ORDERS, NormSemantics, norm
from branchline.core.oracle.norm import scale_rows, statistics
from tests.core.oracle.formats import DTYPES, NAN, round_bf16, spread


def normed(semantics: NormSemantics, *inputs: torch.Tensor) -> torch.Tensor:
    return norm(semantics, inputs).out


# --- norms -------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["llama", "gemma"])
@pytest.mark.parametrize("columns", [1, 7, 64, 1000])
@pytest.mark.parametrize("magnitude", [1e-4, 1.0, 200.0], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_against_float64(order, columns, magnitude, dtype):
    generator = torch.Generator().manual_seed(columns)
    x = (torch.randn(6, columns, generator=generator) * magnitude).to(dtype)
    weight = (torch.rand(columns, generator=generator) * 2 - 0.5).to(dtype)
    out = normed(NormSemantics(order, 1e-5), x, weight)
    assert out.dtype == dtype
    wide, w = x.double().numpy(), weight.double().numpy()
    exact = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5)
    expected = exact * (1 + w) if order == "gemma" else exact * w
    eps = torch.finfo(dtype).eps
    roundings = 1 if order == "gemma" else 2
    tolerance = np.abs(expected) * (roundings * eps / 2 * 1.01 + 2.0**-21)
    tolerance += torch.finfo(dtype).tiny
    assert (np.abs(out.double().numpy() - expected) <= tolerance).all()


def test_llama_order_rounds_before_the_weight_and_gemma_does_not():
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(64, 256, generator=generator).bfloat16()
    weight = (torch.rand(256, generator=generator) + 0.5).bfloat16()
    wide, w = x.double().numpy(), weight.double().numpy()
    exact = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6)
    to_bf16 = np.vectorize(round_bf16)
    twice = to_bf16(to_bf16(exact) * w)
    once = to_bf16(exact * (1 + w))
    llama = normed(NormSemantics("llama", 1e-6), x, weight).double().numpy()
    gemma = normed(NormSemantics("gemma", 1e-6), x, weight).double().numpy()
    # float32 on the way moves the odd element over a rounding boundary.
    assert (llama == twice).mean() > 0.999
    assert (gemma == once).mean() > 0.999
    assert (to_bf16(exact * w) != twice).mean() > 0.05, "the probe tells nothing"


@pytest.mark.parametrize("order", NORM_ORDERS)
def test_norm_of_a_row_does_not_depend_on_the_batch_or_the_strides(order):
    semantics = NormSemantics(order, 1e-6)
    x = spread(9, 130)[:, :129].nan_to_num(1.0, 2.0, -2.0)
    weight = torch.linspace(0.5, 1.5, 129).bfloat16()
    whole = normed(semantics, x, weight)
    for row in range(9):
        assert torch.equal(normed(semantics, x[row : row + 1].contiguous(), weight)[0], whole[row])
    shuffled = torch.randperm(129, generator=torch.Generator().manual_seed(0))
    permuted = normed(semantics, x[:, shuffled].contiguous(), weight[shuffled])
    assert torch.equal(permuted, whole[:, shuffled])


def test_norm_of_zeros_is_zero_and_nan_stays_in_its_row():
    x = torch.zeros(3, 8, dtype=torch.bfloat16)
    x[1, 2] = NAN
    x[2] = 1.0
    out = normed(NormSemantics("llama", 1e-6), x, torch.ones(8, dtype=torch.bfloat16))
    assert not out[0].any()
    assert bool(out[1].isnan().all())
    assert bool((out[2] == 1).all())


# --- LayerNorm ----------------------------------------------------------------------------------


def layer_norm64(x: np.ndarray, weight: np.ndarray, bias: np.ndarray | float, eps: float):
    """In float64, and the size of what is added up on the way to each element."""
    mean = x.mean(-1, keepdims=True)
    inverse = 1 / np.sqrt(((x - mean) ** 2).mean(-1, keepdims=True) + eps)
    scaled = (x - mean) * inverse * weight
    return scaled + bias, (np.abs(x) + np.abs(mean)) * inverse * np.abs(weight) + np.abs(bias)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("order", ["layer_norm", "layer_norm_1p"])
@pytest.mark.parametrize("columns", [1, 7, 64, 1000])
@pytest.mark.parametrize("mean", [0.0, 40.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_layer_norm_against_float64(order, columns, mean, bias, dtype):
    generator = torch.Generator().manual_seed(columns)
    x = (torch.randn(6, columns, generator=generator) * 3 + mean).to(dtype)
    weight = (torch.rand(columns, generator=generator) * 2 - 0.5).to(dtype)
    shift = torch.randn(columns, generator=generator).to(dtype)
    semantics = NormSemantics(order, 1e-5, bias=bias)
    out = normed(semantics, x, weight, *([shift] if bias else []))
    assert out.dtype == dtype
    gain = weight + 1 if order == "layer_norm_1p" else weight
    offset = shift.double().numpy() if bias else 0.0
    expected, size = layer_norm64(x.double().numpy(), gain.double().numpy(), offset, 1e-5)
    info = torch.finfo(dtype)
    tolerance = np.abs(expected) * (info.eps / 2 * 1.01) + size * 2.0**-22 + info.tiny
    assert (np.abs(out.double().numpy() - expected) <= tolerance).all()


def test_one_plus_the_weight_is_rounded_in_layer_norm_1p():
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    weight = torch.full((64,), 2.0**-9, dtype=torch.bfloat16)
    # 1 + 2**-9 is no bfloat16: rounded it is one.
    plain = normed(NormSemantics("layer_norm", 1e-5), x, torch.ones_like(weight))
    assert torch.equal(normed(NormSemantics("layer_norm_1p", 1e-5), x, weight), plain)


def test_layer_norm_does_not_lose_a_small_spread_under_a_large_mean():
    x = (torch.arange(64) % 2 + 4096.0).float().expand(3, 64)
    out = normed(NormSemantics("layer_norm", 1e-12), x, torch.ones(64))
    assert torch.equal(out.abs(), torch.ones(3, 64))


def test_layer_norm_of_a_constant_row_is_the_bias():
    bias = torch.linspace(-1, 1, 8).bfloat16()
    x = torch.full((2, 8), 100.0).bfloat16()
    out = normed(NormSemantics("layer_norm", 1e-5, bias=True), x, torch.ones_like(bias), bias)
    assert torch.equal(out, bias.expand(2, 8))


@pytest.mark.parametrize("value", [NAN, float("inf")])
def test_what_is_not_finite_stays_in_its_row(value):
    x = torch.ones(2, 8, dtype=torch.bfloat16)
    x[0, 3] = value
    out = normed(NormSemantics("layer_norm", 1e-5), x, torch.ones(8, dtype=torch.bfloat16))
    assert bool(out[0].isnan().all())
    assert not out[1].any()


# --- the residual -------------------------------------------------------------------------------


@pytest.mark.parametrize("order", NORM_ORDERS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_residual_is_added_and_rounded_before_the_norm_and_returned(order, dtype):
    generator = torch.Generator().manual_seed(2)
    x, residual = (torch.randn(5, 33, generator=generator).to(dtype) for _ in range(2))
    weight, bias = (torch.randn(33, generator=generator).to(dtype) for _ in range(2))
    biased = order.startswith("layer_norm")
    vectors = (weight, bias) if biased else (weight,)
    plain = NormSemantics(order, 1e-5, bias=biased)
    with_residual = NormSemantics(order, 1e-5, bias=biased, residual=True)
    out, added = norm(with_residual, (x, residual, *vectors))
    expected = torch.from_numpy(x.float().numpy() + residual.float().numpy()).to(dtype)
    assert torch.equal(added, expected)
    assert torch.equal(out, normed(plain, added, *vectors))
    assert norm(plain, (x, *vectors)).residual is None


@pytest.mark.parametrize("order", NORM_ORDERS)
def test_a_norm_is_its_two_halves(order):
    x, weight = spread(5, 40), torch.linspace(0.5, 1.5, 40).bfloat16()
    semantics = NormSemantics(order, 1e-6)
    rows = statistics(semantics, x)
    assert rows.mean.shape == rows.inverse.shape == (5, 1)
    assert rows.mean.dtype == rows.inverse.dtype == torch.float32
    halves = scale_rows(semantics, x, rows, weight)
    assert torch.equal(halves.nan_to_num(9), normed(semantics, x, weight).nan_to_num(9))
