"""The public custom ops: what torch's own checker, compiler and exporter say, and their errors."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from branchline.core.errors import (
    BranchlineError,
    ConfigError,
    ContractError,
    KernelUnavailableError,
    ScaleError,
)
from branchline.core.oracle import ActivationSemantics, NormSemantics
from branchline.core.quant_key import (
    FP8_DYNAMIC_GROUP128,
    FP8_DYNAMIC_TOKEN,
    FP8_STATIC_TENSOR,
    KEYS,
    MXFP8,
    NVFP4,
    ScaleLayout,
)
from branchline.fusion import Emission, ops
from branchline.fusion.producers.eager import EAGER
from branchline.linear.contract import InputContract, InputScale
from branchline.linear.outputs import RawRequest, Shrink

K = 160
OPS = torch.ops.branchline
LAID_OUT = [
    dataclasses.replace(
        FP8_DYNAMIC_GROUP128, layout=ScaleLayout.COLUMN_MAJOR, row_multiple=4, scale_multiple=4
    ),
    dataclasses.replace(MXFP8, layout=ScaleLayout.COLUMN_MAJOR),
    dataclasses.replace(MXFP8, row_multiple=16, scale_multiple=4),
    dataclasses.replace(NVFP4, layout=ScaleLayout.SWIZZLE_128X4),
    dataclasses.replace(FP8_STATIC_TENSOR, row_multiple=16),
]
ALL_KEYS = [*KEYS, *LAID_OUT]
#: For torch's own tools, which take seconds a key.
SOME_KEYS = [FP8_STATIC_TENSOR, FP8_DYNAMIC_TOKEN, *LAID_OUT[:4]]
UNKNOWN_TO_COMPILERS = (torch.float8_e8m0fnu, torch.float4_e2m1fn_x2)
each_key = pytest.mark.parametrize("key", ALL_KEYS, ids=str)
some_keys = pytest.mark.parametrize("key", SOME_KEYS, ids=str)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


def scales_of(key) -> dict[str, torch.Tensor | None]:
    return {
        "static_scale": torch.tensor([0.0371]) if key.static else None,
        "global_scale": torch.tensor([0.0123]) if key.global_scale else None,
    }


def contract_of(key) -> InputContract:
    scales = {
        name: None if value is None else InputScale.checked(value, "test")
        for name, value in scales_of(key).items()
    }
    return InputContract(key, scales["static_scale"], scales["global_scale"])


GATE, UP = random(4, 3, K), random(4, 3, K, seed=1)
WEIGHT, BIAS = random(K, seed=2), random(K, seed=3)
ROWS = torch.tensor([True, False, True, False])
A = [random(3, 8, K, seed=4), random(3, 16, K, seed=5)]
RANKS = [torch.full((3,), width, dtype=torch.int32) for width in (8, 16)]
SLOTS = [torch.tensor(slots, dtype=torch.int32) for slots in ([0, -1, 2, 1], [-1, 1, 1, 0])]
SHRINKS = tuple(
    Shrink.stacked(f"consumer {index}", a, ranks, slots, a.shape[1])
    for index, (a, ranks, slots) in enumerate(zip(A, RANKS, SLOTS, strict=True))
)
ABSORBED = {"a": A, "ranks": RANKS, "slots": SLOTS}


def same(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    if wanted.dtype in UNKNOWN_TO_COMPILERS:
        assert got.dtype == torch.uint8
        wanted = wanted.view(torch.uint8)
    same_kind = (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[got.element_size()]
    return same_kind and torch.equal(got.view(integers), wanted.view(integers))


# --- torch's own checker -----------------------------------------------------------------------


def opcheck(op, *arguments) -> None:
    results = torch.library.opcheck(op.default, arguments)
    assert set(results.values()) == {"SUCCESS"}


@some_keys
def test_opcheck_of_activations(key):
    scales = scales_of(key).values()
    settings = ("silu", 7.0, None, str(key))
    opcheck(OPS.act_quant, GATE, None, *scales, "relu2", None, None, str(key))
    opcheck(OPS.act_quant_dual, GATE, UP, *scales, *settings, ROWS, 1.0)
    opcheck(OPS.act_quant_absorbed, GATE, UP, *scales, *settings, A, RANKS, SLOTS, 1.0)


@some_keys
def test_opcheck_of_norms(key):
    scales = scales_of(key).values()
    opcheck(OPS.norm_quant, GATE, WEIGHT, BIAS, None, *scales, "layer_norm", 1e-5, str(key))
    added = (GATE, WEIGHT, None, UP, *scales, "llama", 1e-6, str(key))
    opcheck(OPS.norm_quant_dual, *added, ROWS)
    opcheck(OPS.norm_quant_absorbed, *added, A, RANKS, SLOTS)


def test_opcheck_of_other_dtypes_and_of_an_op_that_hands_nothing_on():
    # The identity of float32 is its input: an op must not return it.
    x = random(4, K, dtype=torch.float32)
    rows = torch.ones(4, dtype=torch.bool)
    for given in (rows, None):
        arguments = (x, None, None, None, "identity", None, None, str(FP8_DYNAMIC_TOKEN), given)
        opcheck(OPS.act_quant_dual, *arguments)
    before = x.clone()
    ops.act_quant_dual(x, activation="identity", key="fp8-dynamic-token", rows=~rows)
    assert torch.equal(x, before)


# --- values ------------------------------------------------------------------------------------


@each_key
@pytest.mark.parametrize("gated", [False, True])
def test_activations_equal_the_eager_producer(key, gated):
    gate = GATE.clone()
    gate[1, 1, :5] = torch.tensor([math.nan, math.inf, -math.inf, -0.0, 1e-40])
    up = UP if gated else None
    offset = 1.0 if gated else None
    semantics = ActivationSemantics("silu", gated, limit=3.0, multiplier=1.5, up_offset=offset)
    inputs = (gate, up) if gated else (gate,)
    emission = Emission(contract_of(key), raw=RawRequest(), shrinks=SHRINKS)
    wanted = EAGER.produce(semantics, inputs, emission).activation
    settings = {
        "activation": "silu",
        "key": str(key),
        "limit": 3.0,
        "multiplier": 1.5,
        "up_offset": offset,
        **scales_of(key),
    }
    fused = ops.act_quant(gate, up, **settings)
    dual = ops.act_quant_dual(gate, up, rows=ROWS, **settings)
    absorbed = ops.act_quant_absorbed(gate, up, **ABSORBED, **settings)
    for made in (fused, dual, absorbed):
        assert same(made.codes, wanted.codes)
        assert same(made.scale, wanted.scale)
    assert torch.equal(dual.raw[ROWS].nan_to_num(), wanted.raw.values[ROWS].nan_to_num())
    assert not dual.raw[~ROWS].any()
    whole = ops.act_quant_dual(gate, up, **settings).raw
    assert torch.equal(whole.nan_to_num(), wanted.raw.values.nan_to_num())
    for name, rows in zip(wanted.shrunk, absorbed.shrunk, strict=True):
        torch.testing.assert_close(rows, wanted.shrunk[name], equal_nan=True)


@each_key
@pytest.mark.parametrize("residual", [None, UP], ids=["alone", "added"])
@pytest.mark.parametrize("order", ["llama", "layer_norm"])
def test_norms_equal_the_eager_producer(key, order, residual):
    bias = BIAS if order == "layer_norm" else None
    semantics = NormSemantics(order, 1e-5, bias is not None, residual is not None)
    inputs = tuple(x for x in (GATE, residual, WEIGHT, bias) if x is not None)
    emission = Emission(contract_of(key), raw=RawRequest(), shrinks=SHRINKS)
    wanted = EAGER.produce(semantics, inputs, emission)
    given = (GATE, WEIGHT, bias, residual)
    settings = {"order": order, "eps": 1e-5, "key": str(key), **scales_of(key)}
    fused = ops.norm_quant(*given, **settings)
    dual = ops.norm_quant_dual(*given, rows=ROWS, **settings)
    absorbed = ops.norm_quant_absorbed(*given, **ABSORBED, **settings)
    for made in (fused, dual, absorbed):
        assert same(made.codes, wanted.activation.codes)
        assert same(made.scale, wanted.activation.scale)
        if residual is None:
            assert made.residual.shape == (0,)
        else:
            assert same(made.residual, wanted.residual)
    assert same(dual.raw[ROWS], wanted.activation.raw.values[ROWS])
    assert not dual.raw[~ROWS].any()
    for name, rows in zip(wanted.activation.shrunk, absorbed.shrunk, strict=True):
        torch.testing.assert_close(rows, wanted.activation.shrunk[name])


def test_a_scale_that_was_written_to_is_read_again():
    scale = torch.tensor([0.5])
    settings = {"activation": "relu", "key": "fp8-static-tensor", "static_scale": scale}
    before = ops.act_quant(GATE, **settings)
    assert same(ops.act_quant(GATE, **settings).codes, before.codes)
    before.scale.fill_(9.0)
    assert ops.act_quant(GATE, **settings).scale.item() == 0.5
    scale.fill_(2.0)
    after = ops.act_quant(GATE, **settings)
    assert after.scale.item() == 2.0
    assert not same(after.codes, before.codes)


@pytest.mark.parametrize("rows", [0, 1])
def test_few_rows(rows):
    x = random(rows, K)
    made = ops.act_quant(x, activation="silu", key="fp8-dynamic-group128")
    assert made.codes.shape == (rows, K)
    assert made.scale.shape == (rows, 2)


# --- compilers ---------------------------------------------------------------------------------


class Block(torch.nn.Module):
    """One op of each kind, with work before and after for the compiler to rearrange."""

    def __init__(self, key) -> None:
        super().__init__()
        self.key = str(key)
        self.weight = torch.nn.Parameter(WEIGHT, requires_grad=False)
        for name, scale in scales_of(key).items():
            self.register_buffer(name, scale)

    def forward(self, x: torch.Tensor, y: torch.Tensor):
        scales = {
            "key": self.key,
            "static_scale": self.static_scale,
            "global_scale": self.global_scale,
        }
        normed = ops.norm_quant_dual(
            x * 2, self.weight, residual=y, order="llama", eps=1e-6, **scales
        )
        fused = ops.act_quant(normed.raw + 1, normed.residual, activation="silu", **scales)
        absorbed = ops.act_quant_absorbed(
            normed.raw, activation="relu2", a=A, ranks=RANKS, slots=[s[:1] for s in SLOTS], **scales
        )
        shrunk = absorbed.shrunk[0] + 1
        return normed.codes, normed.scale, fused.codes, fused.scale, absorbed.codes, shrunk


@some_keys
def test_one_graph_for_any_number_of_rows(key):
    torch._dynamo.reset()
    block, counter = Block(key), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend=counter)
    for rows in (2, 7, 131):
        x, y = random(rows, K), random(rows, K, seed=1)
        made = compiled(x, y)
        assert all(map(same, made, block(x, y)))
        assert [t.stride() for t in made] == [t.stride() for t in block(x, y)]
    assert counter.frame_count == 1


@some_keys
def test_export_keeps_the_ops_and_the_number_of_rows_open(key):
    block, rows = Block(key), torch.export.Dim("rows", min=2, max=4096)
    example = random(4, K), random(4, K, seed=1)
    exported = torch.export.export(block, example, dynamic_shapes=({0: rows}, {0: rows}))
    code = exported.graph_module.code
    for name in ("norm_quant_dual", "act_quant", "act_quant_absorbed"):
        assert f"torch.ops.branchline.{name}.default" in code
    other = random(133, K), random(133, K, seed=1)
    assert all(map(same, exported.module()(*other), block(*other)))


# --- what is refused ---------------------------------------------------------------------------

TOKEN = {"activation": "silu", "key": "fp8-dynamic-token"}
STATIC = {"activation": "silu", "key": "fp8-static-tensor"}
LLAMA = {"order": "llama", "eps": 1e-6, "key": "fp8-dynamic-token"}
ONE = torch.ones(1)


def act(*inputs, **settings):
    return lambda: ops.act_quant(*inputs, **settings)


def absorbed(**changes):
    return lambda: ops.act_quant_absorbed(GATE, **{**ABSORBED, **changes}, **TOKEN)


REFUSED = {
    "key": (act(GATE, activation="silu", key="fp7"), ConfigError, "fp8-static-tensor"),
    "activation": (act(GATE, activation="swish", key="fp8-dynamic-token"), ConfigError, "silu"),
    "custom": (act(GATE, activation="custom-no", key="fp8-dynamic-token"), ConfigError, "custom"),
    "limit": (act(GATE, limit=math.nan, **TOKEN), ConfigError, "finite"),
    "multiplier": (act(GATE, multiplier=math.inf, **TOKEN), ConfigError, "finite"),
    "offset": (act(GATE, up_offset=1.0, **TOKEN), ConfigError, "has not"),
    "no scale": (act(GATE, **STATIC), ScaleError, "needs a static"),
    "scale too many": (act(GATE, static_scale=ONE, **TOKEN), ScaleError, "no static"),
    "global too many": (act(GATE, global_scale=ONE, **TOKEN), ScaleError, "no global"),
    "scale of zero": (act(GATE, static_scale=ONE * 0, **STATIC), ScaleError, "positive"),
    "scale dtype": (act(GATE, static_scale=ONE.double(), **STATIC), ScaleError, "float64"),
    "dtype": (act(GATE.int(), **TOKEN), ContractError, "int32"),
    "codes": (act(GATE.to(torch.float8_e4m3fn), **TOKEN), ContractError, "float8"),
    "scalar": (act(torch.tensor(1.0), **TOKEN), ContractError, "0 dimensions"),
    "one row": (
        act(WEIGHT, activation="silu", key="fp8-dynamic-group128-column-major"),
        ContractError,
        "one row",
    ),
    "up shape": (act(GATE, UP[:2], **TOKEN), ContractError, "2, 3, 160"),
    "up dtype": (act(GATE, UP.float(), **TOKEN), ContractError, "float32"),
    "order": (
        lambda: ops.norm_quant(GATE, WEIGHT, order="t5", eps=0.0, key="fp8-dynamic-token"),
        ConfigError,
        "llama",
    ),
    "epsilon": (
        lambda: ops.norm_quant(GATE, WEIGHT, order="llama", eps=-1.0, key="fp8-dynamic-token"),
        ConfigError,
        "-1.0",
    ),
    "bias": (lambda: ops.norm_quant(GATE, WEIGHT, BIAS, **LLAMA), ConfigError, "bias"),
    "weight": (lambda: ops.norm_quant(GATE, WEIGHT[:-1], **LLAMA), ContractError, "159"),
    "rows dtype": (
        lambda: ops.act_quant_dual(GATE, rows=ROWS.int(), **TOKEN),
        ContractError,
        "bool",
    ),
    "rows number": (
        lambda: ops.act_quant_dual(GATE, rows=torch.ones(5, dtype=torch.bool), **TOKEN),
        ContractError,
        "12 rows",
    ),
    "lists": (absorbed(ranks=RANKS[:1]), ContractError, "1 ranks"),
    "no consumer": (absorbed(a=[], ranks=[], slots=[]), ContractError, "one consumer"),
    "columns": (absorbed(a=[x[..., :-1].contiguous() for x in A]), ContractError, "160"),
    "strides": (absorbed(a=[x.mT.contiguous().mT for x in A]), ContractError, "contiguous"),
    "slots dtype": (absorbed(slots=[s.long() for s in SLOTS]), ContractError, "int32"),
    "mixed dtypes": (absorbed(a=[A[0], A[1].float()]), ContractError, "one dtype"),
    "rank": (
        absorbed(a=[random(3, 128, K)] * 2, ranks=[RANKS[0] * 16] * 2),
        KernelUnavailableError,
        "128",
    ),
}


@pytest.mark.parametrize(("call", "error", "text"), REFUSED.values(), ids=REFUSED)
def test_refused_by_name(call, error, text):
    with pytest.raises(error, match=text) as caught:
        call()
    assert isinstance(caught.value, BranchlineError)
    assert all((caught.value.subject, caught.value.reason, caught.value.remedy))


@pytest.mark.parametrize("what", ["key", "activation", "no scale", "order", "dtype"])
def test_refused_while_tracing_too(what):
    call, error, text = REFUSED[what]
    with (
        torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True),
        pytest.raises(error, match=text),
    ):
        call()


def test_tensors_that_the_chosen_kernel_cannot_read_are_refused(monkeypatch):
    """Never another producer in silence: the one that was chosen says why it cannot."""
    from branchline.core.selection import Verdict
    from branchline.fusion import dispatch

    class Picky(type(EAGER)):
        name = "picky"

        def accepts(self, semantics, inputs, emission):
            return Verdict(False, "reads no Tuesdays")

    monkeypatch.setattr(dispatch, "_chosen", lambda *_: Picky())
    with pytest.raises(KernelUnavailableError, match=r"picky.*Tuesdays"):
        ops.act_quant(GATE, **TOKEN)


@pytest.mark.parametrize(
    ("ranks", "slots", "reason"),
    [
        ([4, 99], [0, 1, -1], "ranks of consumer 0.*between 4 and 99"),
        ([4, -1], [0, 1, -1], "ranks of consumer 0"),
        ([4, 4], [0, 2, -1], "slots of consumer 0.*between -1 and 2"),
        ([4, 4], [0, 1, -2], "slots of consumer 0"),
    ],
)
def test_what_kernels_would_read_beyond_the_end_is_refused(ranks, slots, reason):
    x = torch.randn(3, 64).bfloat16()
    with pytest.raises(ContractError, match=reason):
        ops.act_quant_absorbed(
            x,
            activation="relu2",
            key="fp8-dynamic-token",
            a=[torch.zeros(2, 16, 64, dtype=torch.bfloat16)],
            ranks=[torch.tensor(ranks, dtype=torch.int32)],
            slots=[torch.tensor(slots, dtype=torch.int32)],
        )
