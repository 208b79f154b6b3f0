"""Every producer that can be compared with the oracle here, and what they are compared on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from branchline.core import FP8_STATIC_TENSOR, Platform, native
from branchline.core.oracle import NormSemantics, Semantics, activate, quantize_static, rms_norm
from branchline.core.route import Route
from branchline.fusion.producers import gated, norm, unary
from branchline.fusion.producers.base import Producer, ProducerRequest
from branchline.fusion.registry import REGISTRY
from branchline.linear.contract import InputScale

#: Those this processor has; a machine without the library fails here, for it has no compiler.
ISAS = ("scalar", "avx2", "avx512")[: native.load().functions.bl_best_isa() + 1]
SCALES = (2.0**-40, 1.3e-3, 0.0371, 1.0, 3.7, 449.3, 1e20)
NAN_CODE = 0x7F


@dataclass(frozen=True)
class Backend:
    """One implementation, by the name in the registry, and where its tensors lie."""

    name: str
    device: str
    interpreted: bool

    def producer(self, semantics: str) -> Producer:
        candidates = REGISTRY.entries()[(semantics, FP8_STATIC_TENSOR, Route.FUSED)]
        return next(candidate for candidate in candidates if candidate.name == self.name)

    def some(self, values: Sequence) -> Sequence:
        """All of them, or every third where a kernel is interpreted: it takes a second each."""
        return values[::3] if self.interpreted else values

    def accepts(self, semantics: Semantics, *inputs: torch.Tensor):
        return self.producer(str(semantics)).accepts(inputs)

    def codes(self, semantics: Semantics, scale: float, *inputs: torch.Tensor) -> torch.Tensor:
        verdict = self.accepts(semantics, *inputs)
        assert verdict.ok, verdict.reason
        checked = InputScale.checked(torch.tensor([scale], device=self.device), "test")
        codes = self.producer(str(semantics)).codes(semantics, inputs, checked)
        assert codes.dtype == torch.float8_e4m3fn
        assert codes.shape == inputs[0].shape
        assert codes.is_contiguous()
        return codes.view(torch.uint8).cpu()

    def check(self, semantics: Semantics, scale: float, *inputs: torch.Tensor) -> torch.Tensor:
        """Equal to the oracle, bit for bit; returns the codes."""
        codes = self.codes(semantics, scale, *inputs)
        wanted = oracle_codes(semantics, scale, *inputs)
        assert torch.equal(codes, wanted), f"{int((codes != wanted).sum())} codes differ"
        return codes


def oracle_codes(semantics: Semantics, scale: float, *inputs: torch.Tensor) -> torch.Tensor:
    inputs = tuple(x.cpu() for x in inputs)
    norm_site = isinstance(semantics, NormSemantics)
    raw = rms_norm(semantics, *inputs) if norm_site else activate(semantics, *inputs)
    return quantize_static(raw, torch.tensor([scale])).view(torch.uint8).contiguous()


@pytest.fixture(
    params=[
        *(pytest.param(f"native-{isa}", id=isa) for isa in ISAS),
        pytest.param("triton-cpu", id="interpreted", marks=pytest.mark.triton_interpreted),
        pytest.param("triton-cuda", id="cuda", marks=pytest.mark.gpu),
    ]
)
def backend(request):
    name, where = request.param.split("-")
    if name == "triton":
        with np.errstate(all="ignore"):  # the interpreter computes infinities and NaNs with NumPy
            yield Backend(name, where, interpreted=where == "cpu")
        return
    functions = native.load().functions
    assert functions.bl_set_isa(ISAS.index(where)) == 0
    yield Backend(name, "cpu", interpreted=False)
    functions.bl_set_isa(functions.bl_best_isa())


@pytest.fixture(autouse=True)
def _nan_filled_outputs(monkeypatch):
    """A byte that no kernel writes is then a NaN code, not yesterday's right answer."""

    def nan_filled(x: torch.Tensor) -> torch.Tensor:
        codes = torch.full(x.shape, NAN_CODE, dtype=torch.uint8, device=x.device)
        return codes.view(torch.float8_e4m3fn)

    for module in (unary, gated, norm):
        monkeypatch.setattr(module, "new_codes", nan_filled)


@pytest.fixture(scope="session")
def encodings():
    """All 65,536 bfloat16 values, NaNs of every payload included."""
    return torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


@pytest.fixture(scope="session")
def scales():
    """Tiny, large, one, and no powers of two."""
    return SCALES


@pytest.fixture
def reason():
    """Why a producer refuses a site: `reason("native", "relu2", dtype=...)`."""

    def ask(name: str, semantics: str, *, dtype=torch.bfloat16, **facts) -> str:
        platform = Platform(
            **{
                "device_type": "cpu",
                "capability": None,
                "torch_version": "2.11.0",
                "triton_version": "3.6.0",
                "native_isa": "avx2",
                **facts,
            }
        )
        request = ProducerRequest(semantics, FP8_STATIC_TENSOR, Route.FUSED, dtype, 64, platform)
        verdict = Backend(name, "cpu", False).producer(semantics).supports(request)
        assert verdict.ok == (not verdict.reason)
        return verdict.reason

    return ask
