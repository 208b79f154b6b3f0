from __future__ import annotations

import copy
import dataclasses
import operator
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import branchline
from branchline.core.errors import (
    ContractError,
    MalformedActivationError,
    QuantKeyMismatchError,
    RawConsumerError,
)
from branchline.core.oracle import quantize
from branchline.core.quant_key import (
    FP8_DYNAMIC_GROUP128,
    FP8_DYNAMIC_TOKEN,
    FP8_STATIC_TENSOR,
    MXFP8,
    NVFP4,
    Granularity,
    QuantKey,
    ScaleFormat,
    ScaleLayout,
)
from branchline.core.quantized_activation import (
    QuantizedActivation,
    RawOutput,
    as_quantized_activation,
)

PRODUCER = "native silu_mul"


def static(shape=(2, 3, 8), raw: bool = False) -> QuantizedActivation:
    x = torch.linspace(-3, 3, int(np.prod(shape))).view(shape).to(torch.bfloat16)
    return quantize(
        x, FP8_STATIC_TENSOR, static_scale=torch.tensor([0.1]), raw=raw, producer=PRODUCER
    )


def fields(q: QuantizedActivation) -> dict:
    values = {f.name: getattr(q, f.name) for f in dataclasses.fields(q)}
    return {"data": values.pop("codes"), **values}


def rebuilt(q: QuantizedActivation, **changes: object) -> QuantizedActivation:
    return QuantizedActivation(**{**fields(q), **changes})


# --- construction ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"data": torch.zeros(2, 3, 8)}, "codes"),
        ({"data": torch.zeros(2, 3, 8, dtype=torch.uint8)}, "uint8"),
        ({"data": torch.zeros(2, 3, 7).to(torch.float8_e4m3fn)}, "codes"),
        ({"data": torch.zeros(6, 8).to(torch.float8_e4m3fn)}, "codes"),
        ({"data": torch.zeros(2, 3, 8).to(torch.float8_e4m3fnuz)}, "e4m3fnuz"),
        ({"data": torch.zeros(2, 3, 8).to(torch.float8_e5m2)}, "e5m2"),
        ({"scale": torch.ones(1, dtype=torch.float64)}, "scale"),
        ({"scale": torch.ones(1, dtype=torch.bfloat16)}, "scale"),
        ({"scale": torch.tensor(1.0)}, "scale"),
        ({"scale": torch.ones(2)}, "scale"),
        ({"scale": torch.ones(1, device="meta")}, "meta"),
        ({"raw": RawOutput(torch.zeros(2, 3, 8))}, "raw"),
        ({"raw": RawOutput(torch.zeros(2, 3, 4, dtype=torch.bfloat16))}, "raw"),
        ({"raw": RawOutput(torch.zeros(2, 3, 8, dtype=torch.bfloat16, device="meta"))}, "raw"),
        ({"raw": RawOutput(torch.zeros(6, 8, dtype=torch.bfloat16))}, "raw"),
        ({"raw": RawOutput(torch.zeros(2, 3, 8, dtype=torch.bfloat16), compact=True)}, "raw"),
        ({"raw": RawOutput(torch.zeros(3, 7, dtype=torch.bfloat16), compact=True)}, "raw"),
        ({"shrunk": {"down": torch.zeros(6, 4, dtype=torch.bfloat16)}}, "shrunk rows of down"),
        ({"shrunk": {"down": torch.zeros(5, 4)}}, "shrunk rows of down"),
        ({"shrunk": {"down": torch.zeros(2, 3, 4)}}, "shrunk rows of down"),
        ({"shrunk": {"down": torch.zeros(6, 4, device="meta")}}, "meta"),
        ({"orig_dtype": torch.int32}, "int32"),
        ({"orig_dtype": torch.float8_e4m3fn}, "float8_e4m3fn"),
        ({"orig_dtype": torch.bool}, "bool"),
        ({"orig_shape": (2, 3, 9)}, "codes"),
        ({"orig_shape": ()}, "dimension"),
        ({"global_scale": torch.ones(1)}, "global_scale"),
        ({"quant_key": FP8_DYNAMIC_TOKEN}, "scale"),
        ({"quant_key": MXFP8}, "scale"),
        ({"quant_key": NVFP4}, "codes"),
    ],
    ids=lambda value: str(list(value)) if isinstance(value, dict) else value,
)
def test_parts_that_do_not_fit_are_refused(change, word):
    with pytest.raises(MalformedActivationError, match=word) as caught:
        rebuilt(static(), **change)
    assert PRODUCER in str(caught.value)


@pytest.mark.parametrize("shape", [(2, 300), (2, 3, 130), (128,)], ids=str)
def test_group_scales_must_cover_the_tail(shape):
    q = quantize(torch.randn(shape), FP8_DYNAMIC_GROUP128)
    assert q.scale.shape[-1] == -(-shape[-1] // 128)
    with pytest.raises(MalformedActivationError, match="scale"):
        rebuilt(q, scale=torch.ones(*shape[:-1], shape[-1] // 128 + 2))


def test_global_scale_must_be_there_when_the_key_says_so():
    q = quantize(torch.randn(2, 32), NVFP4, global_scale=torch.ones(1))
    with pytest.raises(MalformedActivationError, match="global_scale"):
        rebuilt(q, global_scale=None)


@pytest.mark.parametrize(
    "global_scale",
    [
        torch.ones(7),
        torch.ones(1, dtype=torch.int64),
        torch.ones(1, dtype=torch.float64),
        torch.ones(1, device="meta"),
    ],
    ids=["seven", "int64", "float64", "meta"],
)
def test_global_scale_is_checked_like_the_other_parts(global_scale):
    q = quantize(torch.randn(2, 32), NVFP4, global_scale=torch.ones(1))
    with pytest.raises(MalformedActivationError, match="global"):
        rebuilt(q, global_scale=global_scale)


def column_major() -> QuantKey:
    return QuantKey(
        torch.float8_e4m3fn,
        torch.float32,
        ScaleFormat.FLOAT32,
        Granularity("group", 128),
        static=False,
        layout=ScaleLayout.COLUMN_MAJOR,
    )


def test_column_major_scales_lie_in_columns():
    codes = torch.zeros(4, 384).to(torch.float8_e4m3fn)
    good = torch.ones(3, 4).mT
    q = QuantizedActivation(codes, good, torch.bfloat16, torch.Size((4, 384)), column_major())
    assert q.scale is good
    with pytest.raises(MalformedActivationError, match="column-major"):
        rebuilt(q, scale=torch.ones(4, 3))


@pytest.mark.parametrize("shape", [(256,), (2, 3, 256)], ids=str)
def test_column_major_scales_are_of_two_dimensions_whatever_the_activation(shape):
    codes = torch.zeros(shape).to(torch.float8_e4m3fn)
    rows = codes.shape[:-1].numel()
    scale = torch.ones(2, rows).mT
    q = QuantizedActivation(codes, scale, torch.bfloat16, codes.shape, column_major())
    assert q.scale is scale
    with pytest.raises(MalformedActivationError, match="scale"):
        rebuilt(q, scale=torch.ones(*shape[:-1], 2, 1))


@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(QuantizedActivation)])
def test_frozen(name):
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(static(), name, None)


def test_new_attributes_cannot_be_stuck_on():
    with pytest.raises(dataclasses.FrozenInstanceError):
        static().requires_grad = True


# --- metadata ----------------------------------------------------------------------------------


def test_metadata_is_that_of_the_activation_not_of_the_codes():
    q = quantize(torch.randn(2, 3, 17, dtype=torch.float16), NVFP4, global_scale=torch.ones(1))
    assert q.shape == torch.Size((2, 3, 17))
    assert isinstance(q.shape, torch.Size)
    assert q.dtype == torch.float16
    assert q.device == torch.device("cpu")
    assert q.ndim == q.dim() == 3
    assert q.size() == q.shape
    assert (q.size(-1), q.size(0)) == (17, 2)
    assert q.shape[:-1] == (2, 3)
    assert not isinstance(q, torch.Tensor)


def test_size_out_of_range_is_an_index_error():
    with pytest.raises(IndexError):
        static().size(3)


def test_repr_names_the_parts():
    text = repr(static(raw=True))
    for part in ("(2, 3, 8)", "bfloat16", "fp8-static-tensor", PRODUCER, "with raw"):
        assert part in text
    assert "no raw" in repr(static())
    assert str(static()) == repr(static())


def test_misspelt_attribute_is_an_attribute_error():
    with pytest.raises(AttributeError, match="shpae"):
        _ = static().shpae


# --- readers -----------------------------------------------------------------------------------

plain = torch.ones(2, 3, 8)

READERS = {
    # torch functions, with the activation anywhere among the arguments
    "torch.add": lambda q: torch.add(q, 1),
    "torch.mul": lambda q: torch.mul(plain, q),
    "torch.where": lambda q: torch.where(plain > 0, plain, q),
    "torch.cat": lambda q: torch.cat([plain, q], -1),
    "torch.stack": lambda q: torch.stack((q,)),
    "torch.einsum": lambda q: torch.einsum("abc,abc->a", plain, q),
    "torch.matmul": lambda q: torch.matmul(q, plain.mT),
    "out=": lambda q: torch.add(plain, 1, out=q),
    "keyword": lambda q: torch.add(input=plain, other=q),
    "torch.isnan": lambda q: torch.isnan(q),
    "torch.tensor": lambda q: torch.tensor(q),
    "torch.tensor of a list": lambda q: torch.tensor([q]),
    "torch.as_tensor": lambda q: torch.as_tensor(q),
    "torch.from_dlpack": lambda q: torch.from_dlpack(q),
    "torch.broadcast_tensors": lambda q: torch.broadcast_tensors(q, plain),
    "F.linear": lambda q: F.linear(q, torch.ones(4, 8)),
    "F.linear weight": lambda q: F.linear(torch.ones(2, 8), q),
    "F.silu": lambda q: F.silu(q),
    "F.gelu": lambda q: F.gelu(q, approximate="tanh"),
    "F.dropout": lambda q: F.dropout(q, training=False),
    "F.layer_norm": lambda q: F.layer_norm(q, (8,)),
    "F.pad": lambda q: F.pad(q, (0, 1)),
    "sdpa": lambda q: F.scaled_dot_product_attention(q, q, q),
    "torch.linalg": lambda q: torch.linalg.vector_norm(q),
    "torch.topk": lambda q: torch.topk(q, 2),
    # modules
    "nn.Linear": lambda q: nn.Linear(8, 4)(q),
    "nn.LayerNorm": lambda q: nn.LayerNorm(8)(q),
    "nn.Sequential": lambda q: nn.Sequential(nn.Identity(), nn.SiLU())(q),
    "nn.Embedding": lambda q: nn.Embedding(3, 4)(q),
    # methods and attributes
    ".float": lambda q: q.float(),
    ".to": lambda q: q.to(torch.float32),
    ".view": lambda q: q.view(-1),
    ".reshape": lambda q: q.reshape(-1, 8),
    ".sum": lambda q: q.sum(),
    ".T": lambda q: q.T,
    ".mT": lambda q: q.mT,
    ".contiguous": lambda q: q.contiguous(),
    ".clone": lambda q: q.clone(),
    ".detach": lambda q: q.detach(),
    ".numpy": lambda q: q.numpy(),
    ".tolist": lambda q: q.tolist(),
    ".item": lambda q: q.item(),
    ".cpu": lambda q: q.cpu(),
    ".untyped_storage": lambda q: q.untyped_storage(),
    ".data_ptr": lambda q: q.data_ptr(),
    "hasattr numpy": lambda q: hasattr(q, "numpy"),
    # in place
    ".add_": lambda q: q.add_(1),
    ".zero_": lambda q: q.zero_(),
    "into a tensor": lambda q: plain.clone().add_(q),
    "copy_": lambda q: plain.clone().copy_(q),
    "index_copy_": lambda q: plain.clone().index_copy_(0, torch.tensor([0]), q),
    "+=": lambda q: operator.iadd(q, 1),
    "*=": lambda q: operator.imul(q, 2),
    "-=": lambda q: operator.isub(q, 2),
    "/=": lambda q: operator.itruediv(q, 2),
    "tensor +=": lambda q: operator.iadd(plain.clone(), q),
    "q[0] =": lambda q: operator.setitem(q, 0, 1.0),
    "t[0] = q": lambda q: operator.setitem(plain.clone(), 0, q),
    "t[q]": lambda q: plain[q],
    # indexing, iteration, conversion
    "q[0]": lambda q: q[0],
    "q[..., :4]": lambda q: q[..., :4],
    "q[None]": lambda q: q[None],
    "iter": lambda q: list(q),
    "unpack": lambda q: (lambda a, b: a)(*q),
    "len": lambda q: len(q),
    "bool": lambda q: bool(q),
    "not": lambda q: not q,
    "if": lambda q: 1 if q else 2,
    "float": lambda q: float(q),
    "int": lambda q: int(q),
    "abs": lambda q: abs(q),
    "sum()": lambda q: sum([q]),
    "max()": lambda q: max(q, 1),
    "np.asarray": lambda q: np.asarray(q),
    "np.array of a list": lambda q: np.array([q]),
    "np.add": lambda q: np.add(np.ones(8), q),
    "np operator": lambda q: np.ones(8) * q,
    "deepcopy": lambda q: copy.deepcopy(q),
}

BINARY = (
    "add sub mul truediv floordiv mod pow matmul and_ or_ xor lshift rshift lt le gt ge eq ne"
).split()
for _name in BINARY:
    _operator = getattr(operator, _name)
    READERS[f"q {_name} 2"] = lambda q, f=_operator: f(q, 2)
    READERS[f"2 {_name} q"] = lambda q, f=_operator: f(2, q)
    READERS[f"q {_name} tensor"] = lambda q, f=_operator: f(q, plain)
    READERS[f"tensor {_name} q"] = lambda q, f=_operator: f(plain, q)
for _name in ("neg", "pos", "invert", "index"):
    READERS[f"operator {_name}"] = getattr(operator, _name)
READERS["divmod"] = lambda q: divmod(q, 2)
READERS["round"] = lambda q: round(q)
READERS["in"] = lambda q: 1.0 in q


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS.keys())
def test_whoever_reads_values_is_refused(reader):
    with pytest.raises(RawConsumerError) as caught:
        reader(static())
    text = str(caught.value)
    assert PRODUCER in text
    assert "reads the raw activation" in text
    assert caught.value.subject.split()[0]


@pytest.mark.parametrize(
    ("reader", "name"),
    [
        (lambda q: F.linear(q, torch.ones(4, 8)), "linear"),
        (lambda q: torch.cat([plain, q]), "torch.cat"),
        (lambda q: q.float(), "torch.Tensor.float"),
        (lambda q: F.silu(q), "silu"),
        (lambda q: q[0], "__getitem__"),
        (lambda q: bool(q), "__bool__"),
        (lambda q: np.asarray(q), "__array__"),
        (lambda q: plain + q, "add"),
    ],
)
def test_the_reader_is_named(reader, name):
    with pytest.raises(RawConsumerError) as caught:
        reader(static())
    assert name in caught.value.subject
    assert "fp8-static-tensor" in caught.value.reason


def test_comparison_never_answers():
    # False from `x == 0` would be a silent answer about values that nobody read.
    for comparison in (operator.eq, operator.ne):
        for other in (0, static(), plain):
            with pytest.raises(RawConsumerError):
                comparison(static(), other)


def test_membership_among_other_things_is_by_identity():
    q = static()
    assert any(entry is q for entry in [plain, q])


def test_it_can_be_a_dictionary_key_by_identity():
    q = static()
    assert {q: 1}[q] == 1


@pytest.mark.parametrize("raw", [False, True])
def test_raw_beside_codes_does_not_open_the_door(raw):
    with pytest.raises(RawConsumerError):
        torch.relu(static(raw=raw))


def test_raw_is_handed_to_whoever_asks_by_name():
    q = static(raw=True)
    assert q.require_raw("adapter branch") is q.raw.values
    assert q.require_raw_rows("adapter branch") is q.raw
    for ask in (static().require_raw, static().require_raw_rows):
        with pytest.raises(RawConsumerError, match=r"adapter branch.*native silu_mul"):
            ask("adapter branch")


@pytest.mark.parametrize("compact", [False, True])
def test_some_raw_rows_are_for_whoever_asks_for_those_only(compact):
    values = torch.zeros((3, 8) if compact else (2, 3, 8), dtype=torch.bfloat16)
    q = rebuilt(static(), raw=RawOutput(values, torch.tensor([True, False]), compact))
    assert q.require_raw_rows("adapter branch").values is values
    with pytest.raises(RawConsumerError, match="raw rows of some adapters"):
        q.require_raw("a hook")


def test_shrunk_rows_are_those_of_one_linear():
    rows = torch.zeros(6, 4)
    q = rebuilt(static(), shrunk={"q_proj": rows, "k_proj": torch.zeros(6, 2)})
    assert q.shrunk_for("q_proj") is rows
    assert q.shrunk_for("v_proj") is None
    assert static().shrunk_for("q_proj") is None
    assert "q_proj, k_proj" in repr(q)
    with pytest.raises(RawConsumerError, match="LoRA products"):
        q.require_raw("a hook")


def test_identity_module_only_hands_it_on():
    q = static()
    assert nn.Identity()(q) is q


# --- the consumers' entry ----------------------------------------------------------------------


def test_consumer_gets_the_object_itself():
    q = static()
    assert as_quantized_activation(q, FP8_STATIC_TENSOR) is q


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("key", [None, FP8_STATIC_TENSOR])
def test_plain_tensor_is_none(dtype, key):
    assert as_quantized_activation(torch.ones(2, 3, dtype=dtype), key) is None


def test_an_equal_key_is_enough():
    q = static()
    assert as_quantized_activation(q, dataclasses.replace(FP8_STATIC_TENSOR)) is q


@pytest.mark.parametrize("raw", [False, True])
def test_codes_for_another_key(raw):
    with pytest.raises(QuantKeyMismatchError) as caught:
        as_quantized_activation(static(raw=raw), FP8_DYNAMIC_TOKEN, consumer="layers.0.down_proj")
    for part in ("layers.0.down_proj", "fp8-dynamic-token", "fp8-static-tensor", PRODUCER):
        assert part in str(caught.value)
    assert isinstance(caught.value, ContractError)


def test_a_consumer_that_takes_none():
    with pytest.raises(RawConsumerError, match=r"lm_head.*native silu_mul"):
        as_quantized_activation(static(), None, consumer="lm_head")


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.float8_e4m3fnuz,
        torch.uint8,
        torch.float4_e2m1fn_x2,
    ],
)
@pytest.mark.parametrize("key", [None, FP8_STATIC_TENSOR])
def test_bare_codes_are_refused_by_name(dtype, key):
    codes = torch.zeros(2, 8, dtype=torch.uint8).view(dtype)
    with pytest.raises(RawConsumerError, match="scale") as caught:
        as_quantized_activation(codes, key, consumer="q_proj")
    assert str(dtype) in str(caught.value)
    assert "q_proj" in str(caught.value)


# --- without asserts ---------------------------------------------------------------------------

OPTIMISED = """
    import sys, types

    # Only the contract: the package's own __init__ imports all of transformers, uncompiled here.
    package = types.ModuleType("branchline")
    package.__path__ = [sys.argv[1]]
    sys.modules["branchline"] = package

    import torch
    from branchline.core import FP8_DYNAMIC_TOKEN, FP8_STATIC_TENSOR, NVFP4, quantize
    from branchline.core import as_quantized_activation
    from branchline.core.errors import (
        MalformedActivationError, QuantKeyMismatchError, RawConsumerError, ScaleError,
    )
    from branchline.core.quantized_activation import QuantizedActivation

    if __debug__:
        raise SystemExit("this script is meant to run without asserts")
    x = torch.ones(2, 8)
    q = quantize(x, FP8_STATIC_TENSOR, static_scale=torch.ones(1))
    cases = [
        (RawConsumerError, lambda: torch.relu(q)),
        (RawConsumerError, lambda: q + 1),
        (RawConsumerError, lambda: x + q),
        (RawConsumerError, lambda: torch.cat([x, q])),
        (RawConsumerError, lambda: bool(q)),
        (RawConsumerError, lambda: as_quantized_activation(q, None)),
        (RawConsumerError, lambda: as_quantized_activation(q.codes, FP8_STATIC_TENSOR)),
        (RawConsumerError, lambda: q.require_raw("branch")),
        (QuantKeyMismatchError, lambda: as_quantized_activation(q, FP8_DYNAMIC_TOKEN)),
        (MalformedActivationError, lambda: QuantizedActivation(
            x, torch.ones(1), x.dtype, x.shape, FP8_STATIC_TENSOR)),
        (ScaleError, lambda: quantize(x, FP8_STATIC_TENSOR)),
        (ScaleError, lambda: quantize(x, NVFP4)),
    ]
    for position, (error, case) in enumerate(cases):
        try:
            result = case()
        except error:
            continue
        raise SystemExit(f"case {position} returned {result!r}")
    print("refused", len(cases))
"""


def test_typed_errors_survive_python_without_asserts(tmp_path):
    root = Path(branchline.__file__).parent
    done = subprocess.run(
        [sys.executable, "-O", "-c", textwrap.dedent(OPTIMISED), str(root)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["refused", "12"]
