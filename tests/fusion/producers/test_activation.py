"""Activations: every compiled producer against the oracle, for all keys and routes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from branchline.core import FP8_DYNAMIC_GROUP128, FP8_STATIC_TENSOR, KEYS, MXFP8, NVFP4
from branchline.core.oracle import ACTIVATIONS, ActivationSemantics
from branchline.core.oracle.activation import define_custom
from branchline.core.quant_key import ScaleLayout

SILU_MUL = ActivationSemantics("silu", gated=True)
PLAIN = [ActivationSemantics(name, gated=False) for name in ACTIVATIONS]
GATED = [
    *(ActivationSemantics(name, gated=True) for name in ACTIVATIONS),
    ActivationSemantics("silu", True, limit=7.0),
    ActivationSemantics("silu", True, multiplier=0.37),
    ActivationSemantics("gelu_tanh", True, limit=1.5, multiplier=1.25),
    ActivationSemantics("silu", True, limit=7.0, up_offset=1.0),
    ActivationSemantics("identity", True, up_offset=-0.3),
]
LAYOUTS = [
    replace(FP8_STATIC_TENSOR, row_multiple=16),
    replace(FP8_DYNAMIC_GROUP128, layout=ScaleLayout.COLUMN_MAJOR),
    replace(FP8_DYNAMIC_GROUP128, layout=ScaleLayout.COLUMN_MAJOR, row_multiple=4),
    replace(FP8_DYNAMIC_GROUP128, scale_multiple=4),
    replace(MXFP8, layout=ScaleLayout.SWIZZLE_128X4),
    replace(NVFP4, layout=ScaleLayout.SWIZZLE_128X4, row_multiple=128),
]


@pytest.mark.parametrize("semantics", PLAIN, ids=str)
def test_all_encodings(backend, encodings, semantics, key):
    backend.check(semantics, encodings.view(128, 512).to(backend.device), key=key)


@pytest.mark.parametrize("scale", [2.0**-40, 1.3e-3, 1.0, 3.7, 449.3, 1e20])
def test_all_encodings_at_every_scale(backend, encodings, scale):
    for semantics in PLAIN:
        backend.check(semantics, encodings.to(backend.device), scale=scale)


@pytest.mark.parametrize("semantics", GATED, ids=str)
def test_all_encodings_in_either_place(backend, encodings, semantics):
    order = torch.randperm(65536, generator=torch.Generator().manual_seed(7))
    gate, up = encodings.to(backend.device), encodings[order].to(backend.device)
    for scale in (1e-3, 0.0371, 1.0):
        backend.check(semantics, gate, up, scale=scale)
    backend.check(semantics, gate, torch.ones_like(up))


def test_a_custom_activation(backend, encodings, random, key):
    table = (encodings * torch.sigmoid(1.702 * encodings)).bfloat16()
    plain, gated = (ActivationSemantics(define_custom(table), gated) for gated in (False, True))
    backend.check(plain, random(5, 576), key=key)
    for semantics in (gated, replace(gated, limit=0.5, up_offset=1.0)):
        backend.check(semantics, random(5, 576), random(5, 576), key=key)


@pytest.mark.parametrize("columns", [1, 16, 64, 128, 192, 576, 1368, 3420, 5120, 10240])
def test_widths(backend, random, columns, key):
    backend.check(SILU_MUL, random(3, columns), random(3, columns), key=key)


@pytest.mark.parametrize("rows", [0, 1, 3, 17, 129, 300])
def test_row_counts(backend, random, rows, key):
    backend.check(SILU_MUL, random(rows, 192), random(rows, 192), key=key)


@pytest.mark.parametrize("shape", [(2, 3, 70), (2, 0, 64), (4, 0), (200,)], ids=str)
def test_shapes(backend, random, shape, key):
    backend.check(PLAIN[2], random(*shape), key=key)


@pytest.mark.parametrize("key", LAYOUTS, ids=str)
def test_layouts(backend, random, key):
    for shape in ((1, 64), (3, 5, 576), (130, 1368)):
        backend.check(SILU_MUL, random(*shape), random(*shape), key=key)


def test_special_values(backend, awkward, key):
    identity = ActivationSemantics("identity", gated=False)
    made = backend.check(identity, awkward, key=key, scale=1.0)
    scales = made.scale.float()
    assert torch.isfinite(scales).all()
    assert (scales > 0).all()
    if key.scale_format == "ue8m0":
        mantissas = torch.frexp(scales).mantissa
        assert (mantissas == 0.5).all()


def test_views(backend, random, key):
    both = random(6, 4, 400)
    gate, up = both.chunk(2, dim=-1)
    backend.check(SILU_MUL, gate, up, key=key)
    backend.check(SILU_MUL, gate, up.contiguous(), key=key)
    backend.check(SILU_MUL, gate[::2, 0], up[1::2, 1], key=key)
    backend.check(SILU_MUL, gate, up[0, 0].expand(6, 4, 200), key=key)


def test_refused_inputs(backend, random):
    gate = random(6, 4, 200)
    turned = random(6, 200, 4).transpose(1, 2)
    verdict = backend.accepts(SILU_MUL, gate, turned)
    assert not verdict.ok
    assert f"with strides {turned.stride()}" in verdict.reason
    for up, reason in (
        (gate[:3], "gate is (6, 4, 200), up is (3, 4, 200)"),
        (gate.float(), "compute bfloat16, the activation is float32"),
        (gate.to("meta"), "up is on meta"),
    ):
        assert reason in backend.accepts(SILU_MUL, gate, up).reason


def test_a_row_does_not_depend_on_its_neighbours_or_their_number(backend, random, key):
    gate, up = random(37, 1368), random(37, 1368)
    together = backend.check(SILU_MUL, gate, up, key=key)
    for row in (0, 17, 36):
        alone = backend.check(SILU_MUL, gate[row : row + 1], up[row : row + 1], key=key)
        ours, theirs = (x.codes.view(torch.uint8) for x in (alone, together))
        assert torch.equal(ours[0], theirs[row])
        if not key.static:
            ours, theirs = (x.scale.view(torch.uint8) for x in (alone, together))
            assert torch.equal(ours[0], theirs[row])


def test_all_keys_are_here():
    assert {key.plain() for key in LAYOUTS} <= set(KEYS)
