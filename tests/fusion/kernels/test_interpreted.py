"""Codes, scales, raw rows and residuals of every family member, key, layout and shape."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from branchline.core.oracle import ACTIVATIONS, NORM_ORDERS, ActivationSemantics, NormSemantics
from branchline.core.oracle.activation import define_custom
from branchline.core.quant_key import (
    FP8_DYNAMIC_GROUP128,
    FP8_DYNAMIC_GROUP128_UE8M0,
    FP8_DYNAMIC_TOKEN,
    FP8_DYNAMIC_TOKEN_UE8M0,
    FP8_STATIC_TENSOR,
    KEYS,
    MXFP8,
    NVFP4,
    Granularity,
    ScaleLayout,
)
from branchline.core.route import Route
from branchline.linear.outputs import RawRequest

pytestmark = pytest.mark.triton_interpreted

SILU_MUL = ActivationSemantics("silu", gated=True)
IDENTITY = ActivationSemantics("identity", gated=False)
LLAMA = NormSemantics("llama", 1e-5)
INF, NAN = torch.inf, torch.nan
#: Everything about its scale that a norm or an activation decides.
ROW_KEYS = (FP8_STATIC_TENSOR, FP8_DYNAMIC_TOKEN, MXFP8)
ARRANGED = {
    "token-rows": replace(FP8_DYNAMIC_TOKEN, row_multiple=4),
    "static-rows": replace(FP8_STATIC_TENSOR, row_multiple=16),
    "column-major": replace(FP8_DYNAMIC_GROUP128, layout=ScaleLayout.COLUMN_MAJOR, row_multiple=4),
    "column-major-scales": replace(
        FP8_DYNAMIC_GROUP128_UE8M0, layout=ScaleLayout.COLUMN_MAJOR, scale_multiple=5
    ),
    "row-major-scales": replace(MXFP8, scale_multiple=16),
    "mx-float32": replace(MXFP8, scale_dtype=torch.float32, row_multiple=2),
    "group16": replace(FP8_DYNAMIC_GROUP128, granularity=Granularity("group", 16)),
    "group512": replace(FP8_DYNAMIC_GROUP128, granularity=Granularity("group", 512)),
}
SWIZZLED = {
    "mx": replace(MXFP8, layout=ScaleLayout.SWIZZLE_128X4),
    "nvfp4": replace(NVFP4, layout=ScaleLayout.SWIZZLE_128X4),
}


def raw_of(key):
    """Beside half of the keys, so that both kernels are seen."""
    return {"raw": RawRequest(), "route": Route.DUAL} if KEYS.index(key) % 2 else {}


def activations():
    for name in ACTIVATIONS:
        for gated in (False, True):
            yield ActivationSemantics(name, gated)
    yield ActivationSemantics("silu", gated=True, limit=3.3)
    yield ActivationSemantics("relu2", gated=False, multiplier=1.7)
    yield ActivationSemantics("identity", gated=True, limit=2.0, multiplier=0.3)
    yield ActivationSemantics("silu", gated=True, up_offset=-0.3)
    yield ActivationSemantics("gelu_erf", gated=True, limit=0.7, up_offset=1.0)
    yield ActivationSemantics("gelu_tanh", gated=True, limit=3.3, multiplier=1.7)


@pytest.mark.parametrize("semantics", list(activations()), ids=str)
def test_activations(check, emission, random, semantics):
    gate, up = random(2, 192), random(2, 192)
    for key in KEYS:
        check(semantics, (gate, up)[: 1 + semantics.gated], emission(key, **raw_of(key)))


def test_custom(check, emission, random, encodings):
    """A table may make something of zeros: columns that are not there must not take part."""
    name = define_custom((encodings.float().cos() + 3).bfloat16())
    for key in KEYS:
        check(ActivationSemantics(name, gated=False), (random(2, 70),), emission(key))


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_all_encodings(check, emission, encodings, plan, name):
    plan(PART=65536)
    up = encodings[torch.randperm(65536, generator=torch.Generator().manual_seed(7))]
    one = encodings[None]
    asked = emission(FP8_STATIC_TENSOR, raw=RawRequest(), route=Route.DUAL)
    check(ActivationSemantics(name, gated=False), (one,), asked)
    check(ActivationSemantics(name, gated=True), (one, up[None]), asked)
    check(ActivationSemantics(name, True, 7.0, 1.7, up_offset=1.0), (one, up[None]), asked)


@pytest.mark.parametrize("key", KEYS[1:], ids=str)
def test_all_encodings_quantised(check, emission, encodings, plan, key):
    plan(PART=65536, WIDEST=65536)
    check(IDENTITY, (encodings[None],), emission(key))
    for scale in (2.0**-126, 1e-20, 3e30):
        if key.global_scale:
            check(IDENTITY, (encodings[None],), emission(key, global_scale=scale))


@pytest.mark.parametrize("scale", [2.0**-40, 1.3e-3, 1.0, 449.3, 1e20])
def test_static_scales(check, emission, encodings, plan, scale):
    plan(PART=65536)
    check(IDENTITY, (encodings[None],), emission(FP8_STATIC_TENSOR, scale=scale))


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("order", NORM_ORDERS)
def test_norms(check, emission, random, order, residual):
    semantics = NormSemantics(order, 1e-5, order.startswith("layer_norm"), residual)
    inputs = [random(2, 192), random(192), random(192)]
    if residual:
        inputs.insert(1, random(2, 192))
    for key in KEYS:
        check(
            semantics,
            tuple(inputs[: 2 + residual + semantics.bias]),
            emission(key, **raw_of(key)),
        )
    if semantics.bias:
        check(replace(semantics, bias=False), tuple(inputs[:-1]), emission(KEYS[0]))


@pytest.mark.parametrize("order", NORM_ORDERS)
def test_norms_of_all_encodings(check, emission, encodings, random, order):
    """A row holds all mantissas of one sign and few exponents; weights are all there are."""
    x = encodings.view(16, 4096)[[0, 3, 7, 8, 15]]
    check(NormSemantics(order, 1e-5), (x, random(4096)), emission(FP8_STATIC_TENSOR))
    check(NormSemantics(order, 0.0), (x[:2] * 0, random(4096)), emission(FP8_DYNAMIC_TOKEN))
    check(
        NormSemantics(order, 1e-6), (random(1, 16384), encodings[::4].contiguous()), emission(MXFP8)
    )


@pytest.mark.parametrize("order", NORM_ORDERS)
def test_rows_wider_than_registers(check, emission, random, plan, order):
    """They are read again: the same bytes."""
    plan(WIDEST=256, LOOP_BLOCK=256)
    semantics = NormSemantics(order, 1e-5, residual=True)
    for key in (FP8_STATIC_TENSOR, FP8_DYNAMIC_TOKEN, NVFP4):
        inputs = (random(2, 700), random(2, 700), random(700))
        check(semantics, inputs, emission(key, raw=RawRequest(), route=Route.DUAL))
    check(SILU_MUL, (random(2, 700), random(2, 700)), emission(FP8_DYNAMIC_TOKEN))


@pytest.mark.parametrize("columns", [1, 16, 64, 128, 576, 1368, 3420, 5120, 10240])
def test_widths(check, emission, random, columns):
    for key in KEYS:
        check(SILU_MUL, (random(1, columns), random(1, columns)), emission(key, **raw_of(key)))
        if key in ROW_KEYS:
            check(LLAMA, (random(1, columns), random(columns)), emission(key))


@pytest.mark.parametrize("shape", [(0, 64), (4, 0), (17, 64), (2, 3, 70), (200,)], ids=str)
def test_shapes(check, emission, random, shape):
    for key in (FP8_STATIC_TENSOR, FP8_DYNAMIC_TOKEN_UE8M0, NVFP4):
        check(SILU_MUL, (random(*shape), random(*shape)), emission(key, **raw_of(key)))
        check(LLAMA, (random(*shape), random(shape[-1])), emission(key))


def test_views(check, emission, random):
    both = random(4, 2, 400)
    gate, up = both.chunk(2, dim=-1)
    for key in ROW_KEYS:
        check(SILU_MUL, (gate[:2], up[:2]), emission(key))
        check(SILU_MUL, (gate[::2, 0], up[1::2, 1]), emission(key))
        check(SILU_MUL, (gate[:, 1, 3:150], up[0, 0, 3:150].expand(4, 147)), emission(key))
        semantics = NormSemantics("gemma", 1e-5, residual=True)
        check(semantics, (gate[::2, 0], up[1::2, 1], both[0, 0, 200:]), emission(key))


@pytest.mark.parametrize("key", ARRANGED.values(), ids=list(ARRANGED))
def test_layouts(check, emission, random, key):
    for shape in ((3, 576), (4, 1368), (1, 1, 64)):
        asked = emission(key, raw=RawRequest(), route=Route.DUAL)
        check(SILU_MUL, (random(*shape), random(*shape)), asked)
        check(LLAMA, (random(*shape), random(shape[-1])), asked)


@pytest.mark.parametrize("key", SWIZZLED.values(), ids=list(SWIZZLED))
def test_swizzled(check, emission, random, key):
    rows = 131 if key.epilogue == "group" else 33
    check(IDENTITY, (random(rows, 200),), emission(key))
    check(LLAMA, (random(2, 100), random(100)), emission(key))
    check(IDENTITY, (random(0, 200),), emission(key))


@pytest.mark.parametrize("compact", [False, True])
def test_raw_rows(check, emission, random, compact):
    for wanted in ((True, False, True), (False, False, False), (True, True, True)):
        raw = RawRequest(torch.tensor(wanted), compact)
        asked = emission(FP8_DYNAMIC_GROUP128, raw=raw, route=Route.DUAL)
        for shape in ((3, 70), (6, 70), (3, 2, 70)):
            check(SILU_MUL, (random(*shape), random(*shape)), asked)
        asked = emission(FP8_DYNAMIC_TOKEN, raw=raw, route=Route.DUAL)
        check(LLAMA, (random(6, 70), random(70)), asked)


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_special_values(check, emission, key):
    rows = torch.tensor(
        [
            [0.0, -0.0, 448, 449, 464, 465, 480, -480, INF, -INF, NAN, -NAN, 1e-43, 6e-8, 1, -1],
            [0.0] * 16,
            [-0.0] * 16,
            [1e-43, -1e-43] * 8,
            [6e-8, -6e-8, 3e-8, 0] * 4,
            [INF, 1.0, -INF, 3e38] * 4,
            [NAN] * 16,
            [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5, 7],
        ]
    ).bfloat16()
    for scale in (1.0, 2.0**-6):
        asked = emission(key, scale=scale, global_scale=scale, raw=RawRequest(), route=Route.DUAL)
        check(IDENTITY, (rows,), asked)


def test_a_row_does_not_depend_on_its_neighbours(triton_produce, emission, random):
    x, weight = random(4, 200), random(200)
    for key in (FP8_DYNAMIC_TOKEN, NVFP4):
        for semantics, more in ((IDENTITY, ()), (LLAMA, (weight,))):
            together = triton_produce(semantics, (x, *more), emission(key)).activation
            alone = triton_produce(semantics, (x[2:3], *more), emission(key)).activation
            for name in ("codes", "scale"):
                left, right = (getattr(out, name).view(torch.uint8) for out in (together, alone))
                assert torch.equal(left[2:3], right)
