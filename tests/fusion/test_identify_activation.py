"""Which activation a function computes is proved by running it; near-misses must not pass (I4)."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.activations import ACT2FN

from branchline.core.oracle import ACTIVATIONS, ActivationSemantics, activate
from branchline.fusion.identify import all_encodings, identify_activation, same_bytes

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = [BF16, FP16, FP32]


def in_turn(names: Iterable[str], dtypes: list[torch.dtype]) -> list[tuple[str, torch.dtype]]:
    """Every name with one of the dtypes, and every dtype with about as many names.

    What is compared is the same code for each: a name in every dtype shows no more of it.
    """
    return [(name, dtypes[place % len(dtypes)]) for place, name in enumerate(names)]


# Written as models write them, not taken from the package.
MODEL_CODE = {
    "identity": lambda x: x,
    "relu": lambda x: torch.clamp(x, min=0) if x.dtype == FP32 else torch.relu(x),
    "relu2": lambda x: torch.square(F.relu(x)),
    "silu": nn.SiLU(),
    "gelu_tanh": nn.GELU(approximate="tanh"),
    "gelu_erf": nn.GELU(),
}


def found(
    function, arity: int, dtype: torch.dtype, numbers: Iterable[float] = ()
) -> ActivationSemantics | None:
    finding, order = identify_activation(function, arity, dtype, numbers=numbers)
    if finding.semantics is None:
        assert finding.reason
        assert order == ()
        return None
    assert sorted(order) == list(range(arity))
    assert finding.reason == ""
    return finding.semantics


def test_every_known_activation_is_written_down_here():
    assert set(MODEL_CODE) == set(ACTIVATIONS)


def _differs(name: str, dtype: torch.dtype) -> bool:
    """Whether torch's own code gives some encodings other bytes than the definition."""
    x = all_encodings(dtype)
    expected = activate(ActivationSemantics(name, gated=False), x)
    return not bool(same_bytes(MODEL_CODE[name](x.clone()), expected).all())


#: On most CPUs torch's float16 GELU differs from its own float32 one, rounded, on 403 encodings: it
#: is rightly not taken for it.
NOT_THE_SAME = {("gelu_erf", FP16)} if _differs("gelu_erf", FP16) else set()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MODEL_CODE)
def test_unary(name, dtype):
    expected = ActivationSemantics(name, gated=False)
    assert found(MODEL_CODE[name], 1, dtype) == (
        None if (name, dtype) in NOT_THE_SAME else expected
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("swapped", [False, True], ids=["gate-up", "up-gate"])
@pytest.mark.parametrize("name", MODEL_CODE)
def test_gated_in_both_orders_of_arguments(name, swapped, dtype):
    act = MODEL_CODE[name]
    function = (lambda up, gate: act(gate) * up) if swapped else (lambda gate, up: up * act(gate))
    finding, order = identify_activation(function, 2, dtype)
    if (name, dtype) in NOT_THE_SAME:
        assert finding.semantics is None
        return
    assert finding.semantics == ActivationSemantics(name, gated=True)
    # identity * up is the same in either order.
    assert order == ((1, 0) if swapped and name != "identity" else (0, 1))


def quick_gelu(x):
    return x * torch.sigmoid(1.702 * x)


def new_gelu(x):
    return 0.5 * x * (1.0 + torch.tanh(0.7978845608028654 * (x + 0.044715 * x.pow(3))))


# --- without a name -----------------------------------------------------------------------------


def is_a_table_of(function, dtype: torch.dtype, numbers: Iterable[float] = ()) -> bool:
    """Whether `function` is found to be a custom activation, with its own bytes."""
    semantics = found(function, 1, dtype, numbers)
    if semantics is None or not semantics.custom:
        return False
    x = all_encodings(dtype)
    return bool(same_bytes(activate(semantics, x), function(x.clone())).all())


ELEMENTWISE = {
    "silu clamped above": lambda x: F.silu(x).clamp(max=7.0),
    "silu of clamped": lambda x: F.silu(x.clamp(max=7.0)),
    "silu clamped far out": lambda x: F.silu(x).clamp(max=60000.0),
    "silu clamped below": lambda x: F.silu(x).clamp(min=-0.25),
    "silu times 1.01": lambda x: F.silu(x) * 1.01,
    "silu plus tiny": lambda x: F.silu(x) + 1e-5,
    "silu without nan": lambda x: torch.nan_to_num(F.silu(x)),
    "quick gelu": quick_gelu,
    "new gelu": new_gelu,
    "leaky relu": lambda x: F.leaky_relu(x, 1e-4),
    "relu6": F.relu6,
    "relu2 clamped": lambda x: F.relu(x).square().clamp(max=torch.finfo(x.dtype).max),
    "relu2 halved": lambda x: F.relu(x).square() / 2,
    "square": torch.square,
    "elu": F.elu,
    "abs": torch.abs,
    "negated": lambda x: -x,
    "zeros": torch.zeros_like,
    "hardswish": F.hardswish,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "softplus": F.softplus,
    "one encoding off": lambda x: torch.where(x == 1.5, F.silu(x) * 2, F.silu(x)),
}


@pytest.mark.parametrize(
    ("name", "dtype"), [*in_turn(ELEMENTWISE, [BF16, FP16]), ("quick gelu", BF16)]
)
def test_any_function_of_single_elements_is_its_table(name, dtype):
    assert is_a_table_of(ELEMENTWISE[name], dtype)


@pytest.mark.parametrize("name", list(ELEMENTWISE)[::3])
def test_in_float32_there_are_known_names_only(name):
    assert found(ELEMENTWISE[name], 1, FP32) is None


@pytest.mark.parametrize("name", list(ELEMENTWISE)[::2])
def test_gated_without_a_name(name):
    act = ELEMENTWISE[name]
    finding, order = identify_activation(lambda up, gate: act(gate) * up, 2, BF16)
    if name == "negated":
        # Minus commutes: either argument can be the gate.
        order = (1, 0)
    assert order == (1, 0)
    assert finding.semantics.custom
    assert finding.semantics.gated
    generator = torch.Generator().manual_seed(5)
    gate, up = (torch.randn(33, 7, generator=generator).bfloat16() * 9 for _ in range(2))
    assert bool(same_bytes(activate(finding.semantics, gate, up), act(gate) * up).all())


#: In bfloat16 their bytes depend on where an element lies, or they have weights.
NO_TABLE = {"gelu", "gelu_10", "gelu_pytorch_tanh", "prelu", "xielu"}


@pytest.mark.parametrize("name", sorted({*ACT2FN} - NO_TABLE))
def test_activations_of_transformers(name):
    act = ACT2FN[name]
    semantics = found(act, 1, BF16)
    assert semantics is not None
    x = all_encodings(BF16)
    assert bool(same_bytes(activate(semantics, x), act(x.clone())).all())


@pytest.mark.parametrize(
    ("name", "known"), [("gelu", "gelu_erf"), ("gelu_pytorch_tanh", "gelu_tanh")]
)
def test_a_known_activation_stays_known_where_torch_is_of_two_minds(name, known):
    assert found(ACT2FN[name], 1, BF16) == ActivationSemantics(known, gated=False)


def test_the_same_function_has_the_same_name_each_time():
    assert found(quick_gelu, 1, BF16) == found(lambda x: quick_gelu(x), 1, BF16)
    assert str(found(quick_gelu, 1, BF16)) == str(found(quick_gelu, 1, BF16))


def at_the_end(x):
    """Other bytes in the last, unvectorised elements."""
    out = F.silu(x).flatten()
    out[out.numel() // 16 * 16 :] += 1
    return out.view(x.shape)


def at_odd_strides(x):
    return F.silu(x) * 1.5 if x.is_contiguous() else F.silu(x)


class Counting(nn.Module):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return F.silu(x) if self.calls % 2 else F.relu(x)


class Wearing(Counting):
    def forward(self, x):
        self.calls += 1
        return x * (1 + self.calls / 16)


NOT_ELEMENTWISE = {
    "mean free": lambda x: x - x.mean(),
    "mean of numbers": lambda x: x - x.nanmean(),
    "softmax": lambda x: x.softmax(-1),
    "softmax of dimension 0": lambda x: x.softmax(0),
    "cumsum": lambda x: x.cumsum(-1),
    "layer norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "largest": lambda x: x * (x.nan_to_num(0, 0, 0).amax() > 4),
    "nan anywhere": lambda x: torch.where(x.isnan().any(), F.silu(x), F.relu(x)),
    "own gelu of nan": lambda x: torch.where(x.isnan().any(), F.silu(x), torch.tanh(x)),
    "reversed": lambda x: F.silu(x).flip(-1),
    "of the neighbour": lambda x: torch.tanh(x.roll(1, -1)),
    "by position": lambda x: torch.tanh(x) * (torch.arange(x.shape[-1]) % 2).to(x.dtype),
    "by shape": lambda x: torch.tanh(x) / x.dim(),
    "by count": lambda x: torch.tanh(x) / (x.numel() % 7 + 1),
    "by stride": at_odd_strides,
    "by the tail": at_the_end,
    "another dtype": lambda x: F.silu(x).double(),
    "half of it": lambda x: F.silu(x)[..., : x.shape[-1] // 2],
    "dropout": lambda x: F.dropout(x, 0.1, training=True),
    "rare dropout": lambda x: F.dropout(torch.tanh(x), 1e-4, training=True),
    "noise": lambda x: torch.tanh(x) + torch.randn_like(x),
    "alternating": Counting(),
    "wearing": Wearing(),
    "batch norm": nn.BatchNorm1d(128),
}


@pytest.mark.parametrize(("name", "dtype"), in_turn(NOT_ELEMENTWISE, DTYPES))
def test_what_is_no_function_of_single_elements_is_refused(name, dtype):
    torch.manual_seed(0)
    assert found(NOT_ELEMENTWISE[name], 1, dtype) is None
    gated = identify_activation(lambda g, u: NOT_ELEMENTWISE[name](g) * u, 2, dtype)[0]
    assert gated.semantics is None


def test_the_reason_tells_a_place_from_a_function():
    assert "other bytes elsewhere" in identify_activation(ACT2FN["gelu_10"], 1, BF16)[0].reason
    reason = identify_activation(at_odd_strides, 1, BF16)[0].reason
    assert "other bytes elsewhere" in reason
    assert "float32" in identify_activation(quick_gelu, 1, FP32)[0].reason


def test_a_factor_of_1_0001_shows_in_what_holds_it():
    factor = torch.tensor(1.0001)
    assert found(lambda x: F.silu(x) * 1.0001, 1, FP32) is None
    semantics = found(lambda x: (F.silu(x.float()) * factor).to(x.dtype), 1, FP16)
    assert semantics.custom


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_relu2_with_a_clamp_at_1e38_is_no_relu2(dtype):
    semantics = found(lambda x: F.relu(x).square().clamp(max=1e38), 1, dtype)
    assert semantics is None if dtype == FP32 else semantics.custom


def test_tanh_and_erf_are_told_apart_and_so_is_gelu_by_hand():
    assert found(lambda x: F.gelu(x, approximate="tanh"), 1, BF16).activation == "gelu_tanh"
    assert found(new_gelu, 1, BF16).custom


# --- limits and multipliers ---------------------------------------------------------------------


def clamped(gate, up, limit, act=F.silu):
    return act(gate.clamp(max=limit)) * up.clamp(min=-limit, max=limit)


@pytest.mark.parametrize(
    ("limit", "dtype"), [(0.3, BF16), (7.0, FP16), (7.1, FP32), (7.1, BF16), (1000.0, FP16)]
)
def test_a_limit_is_found_among_the_numbers(limit, dtype):
    def function(gate, up):
        return clamped(gate, up, limit)

    expected = ActivationSemantics("silu", True, limit)
    assert found(function, 2, dtype, (0.5, limit, -1.0)) == expected
    assert found(lambda x: F.silu(x.clamp(max=limit)), 1, dtype, (limit,)) == ActivationSemantics(
        "silu", False, limit
    )


@pytest.mark.parametrize("near", [6.96875, 7.03125])
def test_a_limit_next_to_the_right_one_is_not_taken(near):
    for dtype in DTYPES:
        assert found(lambda g, u: clamped(g, u, 7.0), 2, dtype, (near,)) in (None,)


@pytest.mark.parametrize(
    ("factor", "dtype"), [(0.3, FP16), (0.8838834764831845, BF16), (-2.0, FP32), (-2.0, BF16)]
)
def test_a_multiplier_of_the_gate_is_found_among_the_numbers(factor, dtype):
    def falcon(gate, up):
        return up * F.silu(gate * factor)

    expected = ActivationSemantics("silu", True, None, factor)
    assert found(falcon, 2, dtype, (factor, 2.0, 7.0)) == expected


@pytest.mark.parametrize("dtype", DTYPES)
def test_limit_and_multiplier_together(dtype):
    def function(gate, up):
        return clamped(gate * 0.3, up, 5.0, torch.relu)

    numbers = (5.0, 0.3)
    assert found(function, 2, dtype, numbers) == ActivationSemantics("relu", True, 5.0, 0.3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_the_numbers_a_multiplier_is_part_of_the_table(dtype):
    semantics = found(lambda g, u: u * F.silu(g * 0.3), 2, dtype)
    assert semantics is None if dtype == FP32 else semantics.custom


HALF_LIMITS = {
    "after the activation": lambda g, u: F.silu(g).clamp(max=2.0) * u.clamp(-2.0, 2.0),
    "of up alone": lambda g, u: F.silu(g) * u.clamp(-2.0, 2.0),
    "around a table": lambda g, u: quick_gelu(g.clamp(max=2.0)) * u.clamp(-2.0, 2.0),
}


@pytest.mark.parametrize("name", HALF_LIMITS)
def test_other_clamps_of_the_gate_are_its_table_and_up_keeps_its_limit(name):
    semantics = found(HALF_LIMITS[name], 2, BF16, (2.0, 1.702))
    assert semantics.custom
    assert semantics.limit == 2.0
    gate = all_encodings(BF16)
    up = gate.roll(20000)
    assert bool(same_bytes(activate(semantics, gate, up), HALF_LIMITS[name](gate, up)).all())


@pytest.mark.parametrize("limit", [7.0, 16.0])
def test_a_clamp_after_silu_is_one_before_it_where_bfloat16_does_not_tell(limit):
    # silu(7) rounds to 7.
    def step(gate, up):
        return F.silu(gate).clamp(max=limit) * up.clamp(min=-limit, max=limit)

    assert found(step, 2, BF16, (limit,)) == ActivationSemantics("silu", True, limit)


def test_a_clamp_of_the_gate_alone_is_its_table_without_a_limit():
    semantics = found(lambda g, u: F.silu(g.clamp(max=7.0)) * u, 2, BF16, (7.0,))
    assert semantics.custom
    assert semantics.limit is None


# --- offsets of up -------------------------------------------------------------------------------


def swish(gate, alpha):
    return gate * torch.sigmoid(gate * alpha)


def gpt_oss(gate, up):
    gate, up = gate.clamp(max=7.0), up.clamp(min=-7.0, max=7.0)
    return (up + 1) * swish(gate, 1.702)


@pytest.mark.parametrize(
    ("swapped", "dtype"), [(False, BF16), (True, FP16)], ids=["gate-up", "up-gate"]
)
def test_an_offset_of_up_stays_beside_a_table_and_a_limit(swapped, dtype):
    numbers = (1.702, 7.0, 32.0, 2880.0)
    function = (lambda up, gate: gpt_oss(gate, up)) if swapped else gpt_oss
    finding, order = identify_activation(function, 2, dtype, numbers=numbers)
    assert order == ((1, 0) if swapped else (0, 1))
    semantics = finding.semantics
    assert semantics.custom
    assert (semantics.limit, semantics.up_offset) == (7.0, 1.0)
    gate = all_encodings(dtype)
    for up in (gate.roll(20000), gate.flip(0)):
        assert bool(same_bytes(activate(semantics, gate, up), gpt_oss(gate, up)).all())


@pytest.mark.parametrize(("offset", "dtype"), [(1.0, FP32), (1.0, BF16), (0.3, BF16), (-2.0, FP16)])
def test_an_offset_is_found_among_the_numbers_and_one_without_them(offset, dtype):
    def function(gate, up):
        return (up.clamp(-5.0, 5.0) + offset) * torch.relu(gate.clamp(max=5.0))

    numbers = (5.0,) if offset == 1.0 else (offset, 5.0)
    # Torch rounds what it adds to the dtype, on a CPU.
    added = torch.tensor(offset, dtype=dtype).item()
    expected = ActivationSemantics("relu", True, 5.0, up_offset=added)
    assert found(function, 2, dtype, numbers) == expected
    assert found(lambda g, u: F.silu(g) * (u + offset), 2, dtype, numbers) == (
        ActivationSemantics("silu", True, up_offset=added)
    )


def test_an_offset_that_its_limit_hides_is_not_found():
    def function(gate, up):
        return F.silu(gate) * (up.clamp(-0.5, 0.5) + 1)

    assert found(function, 2, BF16, (0.5,)) is None


ODD_NUMBERS = (float("nan"), float("inf"), -float("inf"), 1e300, -7.0, 0.0, 1.0, 3.4e38, 1e-300)


@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_that_can_be_no_limit_do_no_harm(dtype):
    assert found(nn.SiLU(), 1, dtype, ODD_NUMBERS) == ActivationSemantics("silu", False)
    assert found(lambda g, u: clamped(g, u, 7.0), 2, dtype, (*ODD_NUMBERS, 7.0)) == (
        ActivationSemantics("silu", True, 7.0)
    )


# --- gated near-misses --------------------------------------------------------------------------

GATED_NEAR_MISSES = {
    "limit on up, unknown": lambda g, u: F.silu(g) * u.clamp(-7, 7),
    "limit on up above": lambda g, u: F.silu(g) * u.clamp(max=5.0),
    "limit of another size on up": lambda g, u: F.silu(g.clamp(max=5.0)) * u.clamp(-6, 6),
    "up plus another number": lambda g, u: F.silu(g) * (u + 2.5),
    "up plus one, unrounded": lambda g, u: (F.silu(g) * (u.double() + 1)).to(g.dtype),
    "up plus one, as a sum": lambda g, u: F.silu(g) * u + F.silu(g),
    "up plus one, clamped": lambda g, u: F.silu(g) * (u + 1).clamp(-5, 5),
    "up plus nearly one": lambda g, u: F.silu(g) * (u + (1 - 2.0**-6)),
    "plus one": lambda g, u: F.silu(g) * u + 1,
    "sum": lambda g, u: F.silu(g) + u,
    "act after": lambda g, u: F.silu(g * u),
    "act on both": lambda g, u: F.silu(g) * F.silu(u),
    "only gate": lambda g, u: F.silu(g),
    "clamped product": lambda g, u: (F.silu(g) * u).clamp(-60000, 60000),
    "doubled product": lambda g, u: F.silu(g) * u * 2,
    "one rounding": lambda g, u: (F.silu(g.float()) * u.float()).to(g.dtype),
    "of the neighbour": lambda g, u: F.silu(g) * u.roll(1, -1),
    "up of the neighbour in rows": lambda g, u: quick_gelu(g) * u.roll(1, 0),
}


@pytest.mark.parametrize(
    ("name", "dtype"), [*in_turn(GATED_NEAR_MISSES, DTYPES), ("one rounding", FP32)]
)
def test_gated_near_misses_are_refused(name, dtype):
    semantics = found(GATED_NEAR_MISSES[name], 2, dtype, (5.0,))
    if dtype == FP32 and name == "one rounding":
        # In float32 it is the same function.
        assert semantics == ActivationSemantics("silu", gated=True)
        return
    assert semantics is None


@pytest.mark.parametrize("arity", [0, 3, 4])
def test_other_numbers_of_arguments_are_refused_without_running(arity):
    def explode(*_):
        raise AssertionError("was run")

    finding, order = identify_activation(explode, arity, BF16)
    assert finding.semantics is None
    assert str(arity) in finding.reason
    assert order == ()


# --- functions that are no elementwise functions of fresh tensors ------------------------------

IN_PLACE = {
    "relu6": lambda x: F.relu6(x, inplace=True),
    "hardtanh": lambda x: F.hardtanh(x, -2, 2, inplace=True),
    "clamped relu": lambda x: x.clamp_(0, 4),
    "leaky relu": lambda x: F.leaky_relu(x, 0.01, inplace=True),
    "doubling": lambda x: x.mul_(2),
}


@pytest.mark.parametrize(("name", "dtype"), in_turn(IN_PLACE, DTYPES))
def test_a_function_that_writes_its_input_spoils_no_probe(name, dtype):
    assert found(IN_PLACE[name], 1, dtype) is None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["relu", "silu"])
def test_a_known_activation_in_place_is_that_one_or_refused(name, dtype):
    in_place = {"relu": nn.ReLU(inplace=True), "silu": nn.SiLU(inplace=True)}[name]
    assert found(in_place, 1, dtype) in (None, ActivationSemantics(name, gated=False))


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_gated_in_place_is_proved_on_whole_probes(dtype):
    # The clamp is out of the reach of probes that an earlier candidate has clamped already.
    assert found(lambda g, u: F.silu(g.clamp_(max=7)) * u, 2, dtype, (7.0,)) is None
    assert found(lambda g, u: F.relu6(g, inplace=True) * u, 2, dtype) is None


RAISING = {
    "transposed": lambda x: F.silu(x).transpose(1, 2),
    "matrix product": lambda x: x @ x.mT,
    "heads": lambda x: x.view(2, 3, 4, 5),
    "weights of another width": nn.Sequential(nn.Linear(16, 16, dtype=BF16), nn.SiLU()),
    "no tensor": lambda x: (x, x),
    "type error": lambda x: x + None,
}


@pytest.mark.parametrize("name", RAISING)
def test_a_function_that_fails_on_the_probe_is_refused_not_fatal(name):
    assert found(RAISING[name], 1, BF16) is None


def test_a_gated_function_that_fails_on_the_probe_is_refused_not_fatal():
    assert found(lambda a, b: torch.matmul(a, b.mT), 2, BF16) is None


SHAPES_MATTER = {
    "flattened": lambda x: F.silu(x).flatten(),
    "transposed ends": lambda x: F.silu(x).transpose(0, -1),
    "reversed rows": lambda x: F.silu(x).flip(0) if x.dim() > 1 else F.silu(x),
    "halved batches": lambda x: F.silu(x) / x.dim(),
}


@pytest.mark.parametrize("name", SHAPES_MATTER)
def test_what_equals_an_activation_on_vectors_only_is_refused(name):
    assert found(SHAPES_MATTER[name], 1, BF16) is None


# --- helpers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_all_encodings_are_all(dtype):
    assert all_encodings(dtype).view(torch.int16).unique().numel() == 65536


def test_same_bytes_tells_zeros_apart_and_joins_nans():
    a = torch.tensor([0.0, 1.0, float("nan"), float("inf")])
    b = torch.tensor([-0.0, 1.0, float("-nan"), float("inf")])
    assert same_bytes(a, b).tolist() == [False, True, True, True]
    assert not same_bytes(a, a.double()).any()
    assert not same_bytes(a, a[:2]).any()
