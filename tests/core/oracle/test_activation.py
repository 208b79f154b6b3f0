"""Activations against float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from branchline.core.errors import ConfigError
from branchline.core.oracle import ACTIVATIONS, ActivationSemantics, NormSemantics, activate
from branchline.core.oracle.activation import define_custom, unary_table
from tests.core.oracle.formats import DTYPES, INF, NAN, f32, round_bf16, spread
from tests.helpers import every_encoding

# --- activations -------------------------------------------------------------------------------


def gelu_tanh(x: float) -> float:
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    return 0.5 * x * (1 + math.tanh(inner))


REFERENCE = {
    "identity": lambda x: x,
    "relu": lambda x: max(x, 0.0),
    "relu2": lambda x: max(x, 0.0) ** 2,
    "silu": lambda x: x / (1 + math.exp(-x)) if x > -700 else 0.0,
    "gelu_tanh": gelu_tanh,
    "gelu_erf": lambda x: 0.5 * x * math.erfc(-x / math.sqrt(2)),
}


def finite_range(dtype: torch.dtype) -> torch.Tensor:
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    x = x.view(torch.bfloat16 if dtype == torch.float32 else dtype)[::5].to(dtype)
    return x[x.abs() < 3e4]


def test_every_activation_has_a_reference():
    assert set(REFERENCE) == set(ACTIVATIONS)


@pytest.mark.parametrize("name", REFERENCE)
@pytest.mark.parametrize("dtype", DTYPES)
def test_activation_is_within_half_an_ulp_of_float64(name, dtype):
    x = finite_range(dtype)
    out = activate(ActivationSemantics(name, gated=False), x)
    assert out.dtype == dtype
    exact = torch.tensor([REFERENCE[name](v) for v in x.double().tolist()], dtype=torch.float64)
    info = torch.finfo(dtype)
    # float32 arithmetic on the way is allowed a few float32 ulps (absolute near gelu's cancelling
    # tail), the boundary itself half an ulp.
    binade = 2.0 ** exact.abs().clamp(min=info.tiny).log2().floor()
    half_ulp = 0.5 * info.eps * binade
    on_the_way = 8 * 2.0**-24 * exact.abs() + 2.0**-22 * x.double().abs().clamp(max=8)
    if dtype == torch.float32:
        on_the_way += 4 * 2.0**-24 * exact.abs()
    finite = exact.abs() < info.max
    assert bool(((out.double() - exact).abs() <= half_ulp + on_the_way)[finite].all())


@pytest.mark.parametrize("name", ["identity", "relu", "relu2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_exact_activations_are_rounded_once_to_even(name, dtype):
    x = finite_range(dtype)
    exact = np.array([REFERENCE[name](v) for v in x.double().tolist()])
    # float32 holds the square of either dtype, so the rounding is the only one.
    expected = torch.from_numpy(exact.astype(np.float32)).to(dtype)
    assert torch.equal(activate(ActivationSemantics(name, gated=False), x), expected)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_special_values(name):
    x = torch.tensor([NAN, INF, 0.0], dtype=torch.bfloat16)
    out = activate(ActivationSemantics(name, gated=False), x)
    assert out[0].isnan()
    # torch's own vectorised erf makes a NaN of an infinity, and so does the model's module.
    assert out[1] == INF or (name == "gelu_erf" and out[1].isnan())
    assert out[2] == 0


def test_gated_activation_rounds_twice():
    generator = torch.Generator().manual_seed(3)
    gate = (torch.randn(4000, generator=generator) * 4).bfloat16()
    up = (torch.randn(4000, generator=generator) * 4).bfloat16()
    out = activate(ActivationSemantics("relu2", gated=True), gate, up).double().tolist()
    once = 0
    for g, u, value in zip(gate.double().tolist(), up.double().tolist(), out, strict=True):
        square = f32(max(g, 0.0) ** 2)
        assert value == round_bf16(round_bf16(square) * u)
        once += value != round_bf16(square * u)
    assert once > 100, "the probe does not tell one rounding from two"


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_is_the_rounded_unary_times_up(name, dtype):
    gate, up = spread(40, 33, dtype=dtype, seed=1), spread(40, 33, dtype=dtype, seed=2)
    unary = activate(ActivationSemantics(name, gated=False), gate)
    gated = activate(ActivationSemantics(name, gated=True), gate, up)
    with np.errstate(all="ignore"):
        product = unary.float().numpy() * up.float().numpy()
    expected = torch.from_numpy(product).to(dtype)
    assert gated.dtype == dtype
    assert torch.equal(gated.isnan(), expected.isnan())
    known = ~expected.isnan()
    assert torch.equal(gated[known], expected[known])


def test_semantics_print_as_registry_names():
    assert str(ActivationSemantics("silu", gated=True)) == "silu_mul"
    assert str(ActivationSemantics("silu", gated=False)) == "silu"
    assert str(ActivationSemantics("silu", True, 7.0, 0.5)) == "silu_mul[limit=7, multiplier=0.5]"
    shifted = ActivationSemantics("silu", True, 7.0, 0.5, 1.0)
    assert str(shifted) == "silu_mul[limit=7, multiplier=0.5, up_offset=1]"
    assert shifted.family == "silu_mul"
    assert str(NormSemantics("gemma", 1e-6)) == "rms_norm[gemma]"
    assert str(NormSemantics("layer_norm_1p", 1e-6, residual=True)) == "add_layer_norm[1p]"


# --- one definition wherever an element lies ----------------------------------------------------


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    equal = a.contiguous().view(torch.int16) == b.contiguous().view(torch.int16)
    return bool((equal | (a.isnan() & b.isnan())).all())


def arrangements(x: torch.Tensor):
    """The same 65,536 values elsewhere, and how to find each again."""
    yield x.view(2, 128, 256), lambda y: y.flatten()
    yield torch.stack([x, x.flip(0)], -1)[:, 0], lambda y: y
    yield x.view(256, 256).t(), lambda y: y.t().flatten()
    yield torch.cat([x.view(64, -1), x.view(64, -1)], -1)[:, 1024:], lambda y: y.flatten()


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_bytes_do_not_depend_on_the_place(name, dtype):
    # torch's own GELU gives some encodings other bytes in strided and in short tensors.
    x = every_encoding(dtype)
    semantics = ActivationSemantics(name, gated=False)
    whole = activate(semantics, x)
    for moved, back in arrangements(x):
        assert same(back(activate(semantics, moved)), whole)
    pieces = [activate(semantics, piece) for piece in x.split(7)]
    assert same(torch.cat(pieces), whole)


@pytest.mark.parametrize("name", ["gelu_tanh", "gelu_erf"])
def test_gated_gelu_of_a_packed_half_has_the_bytes_of_the_whole(name):
    packed = spread(31, 2 * 33, seed=4)
    gate, up = packed.chunk(2, -1)
    semantics = ActivationSemantics(name, gated=True)
    assert same(
        activate(semantics, gate, up), activate(semantics, gate.contiguous(), up.contiguous())
    )


# --- limits and multipliers ---------------------------------------------------------------------


def silu(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.silu(x.float()).to(x.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("limit", [0.7, 7.0, 1000.0])
def test_a_limit_clamps_the_gate_above_and_up_on_both_sides(limit, dtype):
    gate, up = spread(40, 33, dtype=dtype, seed=1), spread(40, 33, dtype=dtype, seed=2)
    rounded = torch.tensor(limit, dtype=dtype)
    out = activate(ActivationSemantics("silu", True, limit), gate, up)
    clamped = torch.minimum(gate, rounded), torch.maximum(torch.minimum(up, rounded), -rounded)
    expected = (silu(clamped[0]).float() * clamped[1].float()).to(dtype)
    assert torch.equal(out.nan_to_num(9), expected.nan_to_num(9))
    unary = activate(ActivationSemantics("silu", False, limit), gate)
    assert torch.equal(unary.nan_to_num(9), silu(clamped[0]).nan_to_num(9))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_a_multiplier_is_rounded_before_the_limit_and_the_activation(name, dtype):
    gate = spread(40, 32, dtype=dtype, seed=1)
    out = activate(ActivationSemantics(name, False, 2.5, 0.3), gate)
    before = (gate.float() * np.float32(0.3)).to(dtype)
    expected = activate(ActivationSemantics(name, False), before.clamp(max=2.5))
    assert torch.equal(out.nan_to_num(9), expected.nan_to_num(9))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("limit", "offset"), [(None, 1.0), (7.0, 1.0), (0.7, 0.3), (2.5, -2.0)])
def test_an_offset_is_added_to_the_clamped_up_and_rounded_before_the_product(limit, offset, dtype):
    gate, up = spread(40, 33, dtype=dtype, seed=1), spread(40, 33, dtype=dtype, seed=2)
    out = activate(ActivationSemantics("relu", True, limit, up_offset=offset), gate, up)
    bound = torch.inf if limit is None else torch.tensor(limit, dtype=dtype).item()
    with np.errstate(all="ignore"):
        shifted = up.clamp(-bound, bound).float().numpy() + np.float32(offset)
        shifted = torch.from_numpy(shifted).to(dtype).float().numpy()
        side = gate.clamp(max=bound).relu().float().numpy()
        # In the other order of factors than the oracle's: only which NaN comes out could differ.
        expected = torch.from_numpy(shifted * side).to(dtype)
    assert torch.equal(out.nan_to_num(9), expected.nan_to_num(9))
    assert torch.equal(out.signbit() & ~out.isnan(), expected.signbit() & ~expected.isnan())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_order_of_a_product_s_factors_does_not_show(dtype):
    x = every_encoding(dtype)
    for partner in (x.roll(20011), x.flip(0), x.clamp(-7, 7) + 1):
        assert same(x * partner, partner * x)


def test_an_offset_needs_an_up_and_is_neither_zero_nor_without_bounds():
    with pytest.raises(ConfigError, match="has not"):
        ActivationSemantics("silu", False, up_offset=1.0)
    for offset in (0.0, -0.0, 2.0**-15, -1e5, math.inf, NAN):
        with pytest.raises(ConfigError, match="up_offset"):
            ActivationSemantics("silu", True, up_offset=offset)


# --- custom activations -------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_custom_activation_is_its_table(dtype):
    table = torch.nn.functional.mish(every_encoding(dtype))
    name = define_custom(table)
    gate = spread(7, 33, dtype=dtype, seed=3)[:, ::2]
    out = activate(ActivationSemantics(name, gated=False), gate)
    assert same(out, table[gate.contiguous().view(torch.int16).long() & 0xFFFF])


def test_the_same_table_has_the_same_name_and_another_one_another():
    x = every_encoding(torch.bfloat16)
    name = define_custom(x)
    assert define_custom(x.clone()) == name
    assert define_custom(-x) != name
    assert define_custom(x.view(torch.float16)) != name
    assert ActivationSemantics(name, True).family == "custom_mul"


def test_a_defined_table_does_not_change_with_the_tensor_it_was_made_from():
    values = every_encoding(torch.bfloat16).clone()
    name = define_custom(values)
    values.zero_()
    x = torch.ones(3, dtype=torch.bfloat16)
    assert torch.equal(activate(ActivationSemantics(name, False), x), x)


def test_the_limit_of_a_custom_activation_is_that_of_up_alone():
    name = define_custom(every_encoding(torch.bfloat16))
    gate, up = spread(9, 33, seed=1), spread(9, 33, seed=2)
    out = activate(ActivationSemantics(name, True, 7.0), gate, up)
    expected = (gate.float() * up.clamp(-7, 7).float()).bfloat16()
    assert same(out, expected)
    table = unary_table(ActivationSemantics(name, True, 7.0), torch.bfloat16, torch.device("cpu"))
    assert same(table, every_encoding(torch.bfloat16))


def test_what_a_custom_table_holds_already_is_no_parameter():
    name = define_custom(every_encoding(torch.bfloat16))
    with pytest.raises(ConfigError, match="multiplier"):
        ActivationSemantics(name, True, None, 0.5)
    with pytest.raises(ConfigError, match="limit"):
        ActivationSemantics(name, False, 7.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_custom_activation_is_refused_for_another_dtype(dtype):
    semantics = ActivationSemantics(define_custom(every_encoding(torch.bfloat16)), gated=False)
    with pytest.raises(ConfigError, match="bfloat16"):
        activate(semantics, torch.ones(3, dtype=dtype))


def test_a_custom_name_that_nobody_defined_is_refused():
    with pytest.raises(ConfigError, match="no dtype in this process"):
        activate(ActivationSemantics("custom-0", False), torch.ones(2, dtype=torch.bfloat16))
