"""Norms: every compiled producer against the oracle, for all orders and keys."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from branchline.core import MXFP8
from branchline.core.oracle import NORM_ORDERS, NormSemantics
from branchline.core.quant_key import ScaleLayout

ALL = [
    NormSemantics(order, 1e-5, bias, residual)
    for order, residual in itertools.product(NORM_ORDERS, (False, True))
    for bias in ((False, True) if order.startswith("layer_norm") else (False,))
]
SHAPES = [(1, 1), (5, 5120), (3, 576), (3, 1368), (2, 3420), (9, 1), (2, 3, 70), (0, 64), (64,)]


def name(semantics: NormSemantics) -> str:
    return f"{semantics}{'-bias' if semantics.bias else ''}"


@pytest.fixture(params=ALL, ids=name)
def semantics(request):
    return request.param


@pytest.fixture
def inputs(random):
    """`inputs(semantics, x)`: everything that goes with x."""

    def make(semantics: NormSemantics, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        columns = x.shape[-1]
        return (
            x,
            *([random(*x.shape)] if semantics.residual else []),
            random(columns),
            *([random(columns)] if semantics.bias else []),
        )

    return make


def test_all_encodings(backend, encodings, semantics, inputs):
    """A row holds all mantissas of one sign and few exponents, infinities and NaNs among them."""
    x = encodings.view(-1, 128).to(backend.device)
    for scale in (1e-3, 0.0371, 1.0):
        backend.check(semantics, *inputs(semantics, x), scale=scale)


def test_all_weights(backend, encodings, semantics, random):
    rest = [random(1, 65536)] if semantics.residual else []
    bias = [random(65536)] if semantics.bias else []
    backend.check(semantics, random(1, 65536), *rest, encodings.to(backend.device), *bias)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(backend, semantics, random, inputs, shape):
    backend.check(semantics, *inputs(semantics, random(*shape)))


def test_keys(backend, semantics, random, inputs, key):
    backend.check(semantics, *inputs(semantics, random(5, 576)), key=key)


def test_a_layout(backend, semantics, random, inputs):
    key = replace(MXFP8, layout=ScaleLayout.SWIZZLE_128X4, row_multiple=128)
    backend.check(semantics, *inputs(semantics, random(3, 5, 576)), key=key)


def test_special_values(backend, semantics, awkward, inputs, key):
    backend.check(semantics, *inputs(semantics, awkward), key=key)


def test_rows_with_a_large_mean_and_a_small_spread(backend, semantics, random, inputs):
    x = (random(9, 1368).float() * 0.01 + 100).bfloat16()
    backend.check(semantics, *inputs(semantics, x))


@pytest.mark.parametrize("eps", [1e-6, 1e-12, 0.0, 0.1])
def test_epsilons(backend, semantics, random, inputs, eps):
    x = random(4, 576)
    x[1] = 0
    x[2] *= 1e-20
    x[3, 5] = torch.nan
    chosen = replace(semantics, eps=eps)
    backend.check(chosen, *inputs(chosen, x))


def test_orders_differ(backend, random):
    """The inputs separate ``w * round(x)`` from ``round(x * (1 + w))``, and 1 + w from w."""
    x, weight = random(4, 576), random(576)
    codes = [
        backend.check(NormSemantics(order, 1e-5), x, w).codes.view(torch.uint8)
        for order, w in (
            ("llama", weight),
            ("gemma", weight - 1),
            ("layer_norm", weight),
            ("layer_norm_1p", weight - 1),
        )
    ]
    for ours, theirs in itertools.combinations(codes, 2):
        assert not torch.equal(ours, theirs)


def test_views(backend, semantics, random, inputs):
    x = random(6, 4, 200)
    for view in (x[::2, 0], x[:, 1, 3:150], x[2], x[0, 0].expand(5, 200)):
        backend.check(semantics, *inputs(semantics, view))


def test_refused_inputs(backend, random):
    llama = NormSemantics("llama", 1e-5)
    x, weight = random(6, 4, 200), random(200)
    turned = x.transpose(0, 1)
    for given, gain, reason in (
        (turned, weight, f"with strides {turned.stride()}"),
        (x, weight.float(), "the activation is bfloat16, the norm weight is float32"),
        (x, weight[:10], "the activation has 200 columns, the norm weight is (10,)"),
        (x[..., :100], weight[::2], "read a contiguous norm weight, its stride is not 1"),
        (x, weight.to("meta"), "the norm weight is on meta"),
        (x.float(), weight, "compute bfloat16, the input is float32"),
    ):
        verdict = backend.accepts(llama, given, gain)
        assert not verdict.ok
        assert reason.replace("the input is", "the activation is") in verdict.reason


def test_a_row_does_not_depend_on_its_neighbours(backend, semantics, random, inputs):
    given = inputs(semantics, random(37, 1368))
    together = backend.check(semantics, *given).codes.view(torch.uint8)
    for row in (0, 17, 36):
        alone = tuple(x[row : row + 1] if x.dim() == 2 else x for x in given)
        codes = backend.check(semantics, *alone).codes.view(torch.uint8)
        assert torch.equal(codes[0], together[row])
