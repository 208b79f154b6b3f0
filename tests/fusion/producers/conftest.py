"""Every compiled producer that this machine runs, through the registry, against the oracle.

Triton's interpreter is slower by orders of magnitude: what it can show is in tests/fusion/kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from branchline.core import KEYS, QuantKey, native
from branchline.core.oracle import Semantics
from branchline.core.quantized_activation import QuantizedActivation
from branchline.core.route import Route
from branchline.fusion.producers.base import Emission, Produced, Producer
from branchline.fusion.producers.eager import EAGER
from branchline.fusion.registry import REGISTRY
from branchline.linear import native as native_calls
from branchline.linear import outputs
from branchline.linear.contract import InputContract, InputScale
from tests.helpers import every_encoding

#: Those this processor has; a machine without the library fails here, for it has no compiler.
ISAS = ("scalar", "avx2", "avx512", "amx")[: native.load().functions.bl_best_isa() + 1]
GLOBAL_SCALE = 2.7e-3


def contract_for(key: QuantKey, scale: float = 0.0371, device: str = "cpu") -> InputContract:
    """A consumer of `key`."""

    def checked(value: float) -> InputScale:
        return InputScale.checked(torch.tensor([value], device=device), "test")

    return InputContract(
        key,
        checked(scale) if key.static else None,
        checked(GLOBAL_SCALE) if key.global_scale else None,
    )


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """Comparable to the bit, whatever the dtype; of wide dtypes any NaN equals any other."""
    x = x.cpu().contiguous()
    if x.dtype.itemsize > 1 and x.dtype.is_floating_point:
        x = torch.where(x.isnan(), torch.full_like(x, torch.nan), x)
    return x.view(torch.uint8)


@dataclass(frozen=True)
class Backend:
    """One implementation, by the name in the registry, and where its tensors lie."""

    name: str
    device: str

    def producer(self, semantics: Semantics, key: QuantKey, route: Route) -> Producer:
        candidates = REGISTRY.candidates(semantics.family, key, route)
        return next(candidate for candidate in candidates if candidate.name == self.name)

    def accepts(self, semantics: Semantics, *inputs: torch.Tensor, key: QuantKey = KEYS[0]):
        emission = Emission(contract_for(key, device=self.device))
        return self.producer(semantics, key, Route.FUSED).accepts(semantics, inputs, emission)

    def produce(
        self, semantics: Semantics, inputs: tuple[torch.Tensor, ...], emission: Emission
    ) -> Produced:
        key = emission.contract.key
        assert key is not None
        producer = self.producer(semantics, key, emission.route)
        verdict = producer.accepts(semantics, inputs, emission)
        assert verdict.ok, verdict.reason
        return producer.produce(semantics, inputs, emission)

    def check(
        self,
        semantics: Semantics,
        *inputs: torch.Tensor,
        key: QuantKey = KEYS[0],
        scale: float = 0.0371,
    ) -> QuantizedActivation:
        """Codes, scales and the new residual equal the oracle's, bit for bit."""
        emission = Emission(contract_for(key, scale, self.device))
        made = self.produce(semantics, inputs, emission)
        # On the same device: torch itself gives relu(-0.0) another sign on a GPU.
        wanted = EAGER.produce(semantics, inputs, emission)
        same_bytes(made.activation, wanted.activation)
        if wanted.residual is not None:
            assert made.residual is not None
            assert torch.equal(as_bytes(made.residual), as_bytes(wanted.residual))
        return made.activation


def same_bytes(made: QuantizedActivation, wanted: QuantizedActivation) -> None:
    """Codes and scales, padding included, and their strides."""
    for what in ("codes", "scale"):
        ours, theirs = getattr(made, what), getattr(wanted, what)
        assert ours.shape == theirs.shape
        assert ours.dtype == theirs.dtype
        assert _steps(ours) == _steps(theirs)
        differ = as_bytes(ours) != as_bytes(theirs)
        assert not differ.any(), f"{int(differ.sum())} bytes of the {what} differ"


def _steps(x: torch.Tensor) -> list[int]:
    """The strides that matter."""
    if x.numel() == 0:
        return []
    return [step for size, step in zip(x.shape, x.stride(), strict=True) if size > 1]


@pytest.fixture(
    params=[
        *(pytest.param(f"native-{isa}", id=isa) for isa in ISAS),
        pytest.param("triton-cuda", id="cuda", marks=pytest.mark.gpu),
    ]
)
def backend(request):
    name, where = request.param.split("-")
    if name == "triton":
        yield Backend(name, where)
        return
    functions = native.load().functions
    assert functions.bl_set_isa(ISAS.index(where)) == 0
    yield Backend(name, "cpu")
    functions.bl_set_isa(functions.bl_best_isa())


@pytest.fixture(autouse=True)
def _nan_filled_outputs(monkeypatch):
    """A byte that no kernel writes is then a NaN code, not yesterday's right answer."""

    def nan_filled(shape, dtype, device):
        room = torch.empty(shape, dtype=dtype, device=device)
        if room.numel():
            room.view(torch.uint8).fill_(0x7F)
        return room

    monkeypatch.setattr(outputs, "empty", nan_filled)
    monkeypatch.setattr(native_calls, "empty", nan_filled)


@pytest.fixture(scope="session")
def encodings():
    """All 65,536 bfloat16 values, NaNs of every payload included."""
    return every_encoding()


@pytest.fixture(params=KEYS, ids=str)
def key(request):
    return request.param


#: What tells one rounding from another, and must not break a scale.
SPECIAL = (
    0.0, -0.0, 448.0, 449.0, 464.0, 465.0, 480.0, -480.0, torch.inf, -torch.inf, torch.nan, 1e-43,
    -1e-43, 6e-8, 1.0, -1.0, 2.0**-126, 2.0**-133, 3.3895313892515355e38, 0.99609375,
)  # fmt: skip


@pytest.fixture
def random(backend):
    """`random(*shape)`: bfloat16 of ordinary size on the backend's device."""
    generator = torch.Generator().manual_seed(0)

    def make(*shape: int, factor: float = 3.0) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * factor).bfloat16().to(backend.device)

    return make


@pytest.fixture
def awkward(backend):
    """Rows of zeros, tiny rows, rows with one special value each, and one of nothing else."""
    rows = torch.ones(len(SPECIAL) + 4, 192)
    for row, value in enumerate(SPECIAL):
        rows[row, 7 * row % 192] = value
    rows[-4:-1] = torch.tensor([[0.0], [1e-43], [6e-8]])
    rows[-1] = torch.tensor(SPECIAL).repeat(10)[:192]
    return rows.bfloat16().to(backend.device)
