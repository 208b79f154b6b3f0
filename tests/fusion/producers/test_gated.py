"""SiLU(gate) * up -> static FP8: every producer against the oracle."""

from __future__ import annotations

import pytest
import torch

from branchline.core.oracle import ActivationSemantics

SILU_MUL = ActivationSemantics("silu", gated=True)
INF, NAN = torch.inf, torch.nan
#: Signs, zeros, infinities, NaN, subnormals, the largest, and values that make every rounding tie.
UPS = [
    1.0, 0.0, INF, -1.0, -0.0, -INF, NAN, 1e-40, 2.0**-133, -1e-40, 2.0**-126, -(2.0**-126),
    3.3895313892515355e38, 1.0078125, 0.99609375, -3.3895313892515355e38, -3.171875, 1e-20, 448.0,
]  # fmt: skip
SHAPES = [(1, 1), (17, 5120), (5, 576), (3, 1368), (2, 3420), (9, 1), (2, 3, 70), (0, 64), (4, 0)]


def random(*shape: int, seed: int = 0, device: str = "cpu") -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return (torch.randn(shape, generator=generator) * 4).bfloat16().to(device)


def test_all_gates(backend, encodings):
    gate = encodings.to(backend.device)
    for up in backend.some(UPS):
        backend.check(SILU_MUL, 0.0371, gate, torch.full_like(gate, up))


def test_all_gates_and_scales(backend, encodings, scales):
    """Up is a shuffle of all encodings; for C also 1."""
    order = torch.randperm(65536, generator=torch.Generator().manual_seed(7))
    gate, up = encodings.to(backend.device), encodings[order].to(backend.device)
    for scale in scales:
        backend.check(SILU_MUL, scale, gate, up)
        if not backend.interpreted:
            backend.check(SILU_MUL, scale, gate, torch.ones_like(up))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(backend, shape):
    gate = random(*shape, device=backend.device)
    backend.check(SILU_MUL, 0.0371, gate, random(*shape, seed=1, device=backend.device))


def test_dense_random_pairs(backend):
    for seed, scale in enumerate(backend.some((0.0371, 0.011, 1.0))):
        gate = random(128, 10240, seed=seed, device=backend.device)
        up = random(128, 10240, seed=seed + 100, device=backend.device)
        backend.check(SILU_MUL, scale, gate, up)


def test_views(backend):
    both = random(6, 4, 400, device=backend.device)
    gate, up = both.chunk(2, dim=-1)
    backend.check(SILU_MUL, 0.5, gate, up)
    backend.check(SILU_MUL, 0.5, gate, up.contiguous())
    backend.check(SILU_MUL, 0.5, gate[::2, 0], up[1::2, 1])
    backend.check(SILU_MUL, 0.5, gate, up[0, 0].expand(6, 4, 200))


def test_refused_inputs(backend):
    gate = random(6, 4, 200, device=backend.device)
    turned = random(6, 200, 4, device=backend.device).transpose(1, 2)
    verdict = backend.accepts(SILU_MUL, gate, turned)
    assert f"with strides {turned.stride()}" in verdict.reason
    assert backend.accepts(SILU_MUL, turned, gate).reason == verdict.reason
    assert (
        backend.accepts(SILU_MUL, gate, gate[:, :1]).reason
        == "gate is (6, 4, 200), up is (6, 1, 200)"
    )
    assert backend.accepts(SILU_MUL, gate, gate.half()).reason.endswith(
        "compute bfloat16, the activation is float16"
    )
    assert (
        backend.accepts(SILU_MUL, gate, gate.to("meta")).reason
        == f"gate is on {gate.device}, up is on meta"
    )


def test_a_row_does_not_depend_on_its_neighbours(backend):
    gate = random(37, 1368, device=backend.device)
    up = random(37, 1368, seed=1, device=backend.device)
    together = backend.codes(SILU_MUL, 0.0371, gate, up)
    for row in (0, 17, 36):
        alone = backend.codes(SILU_MUL, 0.0371, gate[row : row + 1], up[row : row + 1])
        assert torch.equal(alone[0], together[row])
        assert torch.equal(backend.codes(SILU_MUL, 0.0371, gate[row:], up[row:])[0], together[row])


def test_where_the_exponential_overflows(backend):
    gate = torch.tensor([-88.5, -89.0, -INF, INF, NAN, 88.5, -0.0]).bfloat16().to(backend.device)
    codes = backend.check(SILU_MUL, 2.0**-125, gate, torch.ones_like(gate))
    assert codes[0] > 0x80, "one step earlier the quotient is a number"
    assert codes[1:].tolist() == [0x80, 0x7F, 0x7E, 0x7F, 0x7E, 0x80]
