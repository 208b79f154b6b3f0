"""RMSNorm -> static FP8, both rounding orders: every producer against the oracle."""

from __future__ import annotations

import pytest
import torch

from branchline.core.oracle import NormSemantics

SHAPES = [(1, 1), (5, 5120), (3, 576), (3, 1368), (2, 3420), (9, 1), (2, 3, 70), (0, 64), (4, 0)]


@pytest.fixture(params=["llama", "gemma"])
def order(request):
    return NormSemantics(request.param, 1e-5)


def random(*shape: int, seed: int = 0, device: str = "cpu") -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return (torch.randn(shape, generator=generator) * 3).bfloat16().to(device)


def test_all_encodings(backend, encodings, order, scales):
    """A row holds all mantissas of one sign and few exponents, infinities and NaNs among them."""
    columns = 1024 if backend.interpreted else 128
    x = encodings.view(-1, columns).to(backend.device)
    weight = random(columns, device=backend.device)
    for scale in backend.some(scales):
        backend.check(order, scale, x, weight)


def test_all_weights(backend, encodings, order, scales):
    x = random(1, 65536, device=backend.device)
    for scale in backend.some(scales):
        backend.check(order, scale, x, encodings.to(backend.device))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(backend, order, shape):
    x = random(*shape, device=backend.device)
    backend.check(order, 0.0371, x, random(shape[-1], seed=1, device=backend.device))


def test_large(backend, order):
    x = random(128, 10240, device=backend.device)
    backend.check(order, 0.0371, x, random(10240, seed=1, device=backend.device))


@pytest.mark.parametrize("eps", [1e-6, 1e-12, 0.0, 0.1])
def test_epsilon_and_zero_rows(backend, order, eps):
    x = random(4, 576, device=backend.device)
    x[1] = 0
    x[2] *= 1e-20
    x[3, 5] = torch.nan
    backend.check(NormSemantics(order.order, eps), 0.0371, x, random(576, device=backend.device))


def test_orders_differ(backend):
    """The probes separate ``w * round(x)`` from ``round(x * (1 + w))``."""
    x, weight = random(4, 576, device=backend.device), random(576, seed=1, device=backend.device)
    llama = backend.codes(NormSemantics("llama", 1e-5), 0.0371, x, weight)
    gemma = backend.codes(NormSemantics("gemma", 1e-5), 0.0371, x, weight - 1)
    assert not torch.equal(llama, gemma)


def test_views(backend, order):
    x, weight = random(6, 4, 200, device=backend.device), random(200, device=backend.device)
    backend.check(order, 0.5, x[::2, 0], weight)
    backend.check(order, 0.5, x[:, 1, 3:150], weight[3:150])
    backend.check(order, 0.5, x[2], weight)
    backend.check(order, 0.5, x[0, 0].expand(5, 200), weight)


def test_refused_inputs(backend, order):
    x, weight = random(6, 4, 200, device=backend.device), random(200, device=backend.device)
    turned = x.transpose(0, 1)
    assert f"with strides {turned.stride()}" in backend.accepts(order, turned, weight).reason
    assert (
        backend.accepts(order, x, weight.float()).reason
        == "the activation is bfloat16, the norm weight is float32"
    )
    assert (
        backend.accepts(order, x, weight[:10]).reason
        == "the activation has 200 columns, the norm weight is (10,)"
    )
    assert backend.accepts(order, x[..., :100], weight[::2]).reason.endswith(
        "read a contiguous norm weight, its stride is not 1"
    )
    assert (
        backend.accepts(order, x, weight.to("meta")).reason
        == f"the activation is on {x.device}, the norm weight is on meta"
    )
    assert backend.accepts(order, x.float(), weight).reason.endswith(
        "compute bfloat16, the activation is float32"
    )


def test_a_row_does_not_depend_on_its_neighbours(backend, order):
    x, weight = random(37, 1368, device=backend.device), random(1368, device=backend.device)
    together = backend.codes(order, 0.0371, x, weight)
    for row in (0, 17, 36):
        assert torch.equal(backend.codes(order, 0.0371, x[row : row + 1], weight)[0], together[row])
        assert torch.equal(backend.codes(order, 0.0371, x[row:], weight)[0], together[row])
