"""The Triton producers against the eager one, bit for bit, in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from branchline.core.oracle import NormSemantics, Semantics
from branchline.core.quant_key import QuantKey
from branchline.core.quantized_activation import RawOutput
from branchline.fusion.producers.activation import TritonActivation
from branchline.fusion.producers.base import Emission, Produced
from branchline.fusion.producers.eager import EAGER
from branchline.fusion.producers.norm import TritonNorm
from branchline.linear.contract import InputContract, InputScale
from tests.helpers import every_encoding

_UNWRITTEN = 0xFF  # a NaN in every dtype that a kernel writes


def emission(key: QuantKey, *, scale: float = 0.0371, global_scale: float = 0.0123, **more):
    """What a consumer of `key` asks for."""
    return Emission(
        InputContract(
            key,
            InputScale.checked(scale, "test") if key.static else None,
            InputScale.checked(global_scale, "test") if key.global_scale else None,
        ),
        **more,
    )


def bits(x: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, every NaN of a wide dtype made the same."""
    if x.dtype.itemsize > 1 and x.dtype.is_floating_point:
        x = torch.where(x.isnan(), torch.full_like(x, torch.nan), x)
    return x.contiguous().view(torch.uint8)


def assert_same(got: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
    assert got.dtype == wanted.dtype, what
    assert got.shape == wanted.shape, what
    different = bits(got) != bits(wanted)
    assert not different.any(), f"{int(different.sum())} bytes of the {what} differ"


def _order(x: torch.Tensor) -> tuple[bool, bool]:
    return x.is_contiguous(), x.dim() < 2 or x.mT.is_contiguous()


def _assert_same_raw(got: RawOutput, wanted: RawOutput) -> None:
    assert got.compact == wanted.compact
    if got.rows is None or got.compact:
        assert_same(got.values, wanted.values, "raw rows")
        return
    requests, columns = got.rows.shape[0], got.values.shape[-1]
    have, want = (x.values.reshape(requests, -1, columns) for x in (got, wanted))
    assert_same(have[got.rows], want[got.rows], "raw rows")
    rest = have[~got.rows].contiguous().view(torch.uint8)
    assert (rest == _UNWRITTEN).all(), "a row that nobody asked for was written"


def triton_produce(semantics: Semantics, inputs, asked: Emission) -> Produced:
    producer = TritonNorm() if isinstance(semantics, NormSemantics) else TritonActivation()
    verdict = producer.accepts(semantics, inputs, asked)
    assert verdict.ok, verdict.reason
    return producer.produce(semantics, inputs, asked)


def check(semantics: Semantics, inputs, asked: Emission) -> Produced:
    """Equal to the eager producer, shrunk rows apart; returns what Triton produced."""
    got = triton_produce(semantics, inputs, asked)
    wanted = EAGER.produce(semantics, inputs, replace(asked, shrinks=()))
    assert_same(got.activation.codes, wanted.activation.codes, "codes")
    assert_same(got.activation.scale, wanted.activation.scale, "scales")
    assert _order(got.activation.scale) == _order(wanted.activation.scale)
    assert (got.residual is None) == (wanted.residual is None)
    if got.residual is not None:
        assert_same(got.residual, wanted.residual, "new residual")
    if asked.raw is not None:
        _assert_same_raw(got.activation.raw, wanted.activation.raw)
    return got


@pytest.fixture(name="check")
def _check():
    return check


@pytest.fixture(name="emission")
def _emission():
    return emission


@pytest.fixture(name="triton_produce")
def _triton_produce():
    return triton_produce


@pytest.fixture
def random():
    """`random(shape)`: normal, bfloat16, another tensor at every call."""
    generator = torch.Generator().manual_seed(0)

    def make(*shape: int, factor: float = 3.0) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * factor).bfloat16()

    return make


@pytest.fixture(scope="session")
def encodings():
    """All 65,536 bfloat16 values, NaNs of every payload included."""
    return every_encoding()


@pytest.fixture
def plan(monkeypatch):
    """`plan(PART=65536)`: other sizes than the GPU's, for the interpreter counts programs."""
    from branchline.fusion.kernels import plan

    def change(**sizes: int) -> None:
        for name, size in sizes.items():
            monkeypatch.setattr(plan, f"_{name}", size)

    return change


@pytest.fixture(autouse=True)
def _nan_filled_outputs(monkeypatch):
    """A byte that no kernel writes is then a NaN, not yesterday's right answer."""
    from branchline.fusion.kernels import launch, norm
    from branchline.linear import outputs

    def unwritten(shape, dtype, device):
        size = torch.Size(shape).numel() * dtype.itemsize
        filled = torch.full((size,), _UNWRITTEN, dtype=torch.uint8, device=device)
        return filled.view(dtype).view(shape)

    for module in (outputs, launch, norm):
        monkeypatch.setattr(module, "empty", unwritten)


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch):
    """NumPy is silent about infinities, and functions called by kernels are prepared once.

    The interpreter replaces `triton.language` anew at each such call, which takes longer than the
    function itself.  What the kernel's launch has replaced serves them as well.
    """
    from triton.runtime import interpreter

    prepared = set()

    def call(self, *args, **kwargs):
        if self.fn.__module__ not in prepared:
            interpreter._patch_lang(self.fn)
            prepared.add(self.fn.__module__)
        return self.rewrite()(*args, **kwargs)

    monkeypatch.setattr(interpreter.InterpretedFunction, "__call__", call)
    with np.errstate(all="ignore"):
        yield
