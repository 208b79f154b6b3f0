"""Dual and absorbed producers: what comes beside the codes, and that the codes stay the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from branchline.core import FP8_DYNAMIC_TOKEN, FP8_STATIC_TENSOR
from branchline.core.oracle import ActivationSemantics, NormSemantics
from branchline.core.route import Route
from branchline.fusion.producers.base import Emission
from branchline.fusion.producers.eager import EAGER
from branchline.linear.outputs import RawRequest, Shrink
from branchline.linear.shrink import shrink

from .conftest import as_bytes, contract_for, same_bytes

SITES = [
    ActivationSemantics("relu2", gated=False),
    ActivationSemantics("silu", gated=True),
    ActivationSemantics("gelu_erf", gated=True),
    NormSemantics("llama", 1e-6),
    NormSemantics("layer_norm", 1e-6, residual=True),
]
RANKS = (1, 2, 4, 5, 8, 14, 16, 32, 64)


@pytest.fixture(params=SITES, ids=str)
def site(request):
    return request.param


@pytest.fixture
def inputs(random):
    def make(site, *shape: int) -> tuple[torch.Tensor, ...]:
        if isinstance(site, ActivationSemantics):
            return tuple(random(*shape) for _ in range(1 + site.gated))
        rest = (random(*shape),) if site.residual else ()
        return (random(*shape), *rest, random(shape[-1]))

    return make


def emission(backend, key, route: Route, **more) -> Emission:
    return Emission(contract_for(key, device=backend.device), route, "site", **more)


@pytest.mark.parametrize("wanted", ["0000", "1111", "0100", "1011"])
@pytest.mark.parametrize("compact", [False, True], ids=["in-place", "compact"])
def test_dual_writes_the_rows_that_are_asked_for(backend, site, inputs, key, wanted, compact):
    rows = torch.tensor([c == "1" for c in wanted], device=backend.device)
    given = inputs(site, 4, 3, 200)
    asked = emission(backend, key, Route.DUAL, raw=RawRequest(rows, compact))
    made = backend.produce(site, given, asked).activation
    expected = EAGER.produce(site, given, asked).activation
    same_bytes(made, expected)
    assert made.raw.compact == compact
    if compact:
        assert torch.equal(as_bytes(made.raw.values), as_bytes(expected.raw.values))
        return
    assert torch.equal(as_bytes(made.raw.values[rows]), as_bytes(expected.raw.values[rows]))
    others = made.raw.values[~rows].cpu().view(torch.uint8)
    assert (others == 0x7F).all(), "a row nobody asked for was written"


def test_dual_writes_all_rows_without_a_mask(backend, site, inputs, key):
    given = inputs(site, 5, 576)
    asked = emission(backend, key, Route.DUAL, raw=RawRequest())
    made = backend.produce(site, given, asked).activation
    expected = EAGER.produce(site, given, asked).activation
    same_bytes(made, expected)
    assert torch.equal(as_bytes(made.require_raw("x")), as_bytes(expected.require_raw("x")))


def request(backend, slots: list[int], ranks: list[int], columns: int, name="q", dtype=None):
    """A shrink whose padding and unused slots hold NaN, which may not be read."""
    generator = torch.Generator().manual_seed(len(ranks) + columns + len(name))
    width = max(ranks)
    a = torch.full((len(ranks), width, columns), torch.nan)
    for slot, rank in enumerate(ranks):
        if slot in slots:
            a[slot, :rank] = torch.randn(rank, columns, generator=generator) / columns**0.5
            a[slot, rank:] = 0
    return Shrink.stacked(
        name,
        a.to(dtype or torch.bfloat16).to(backend.device),
        torch.tensor(ranks, dtype=torch.int32, device=backend.device),
        torch.tensor(slots, dtype=torch.int32, device=backend.device),
        max((ranks[slot] for slot in slots if slot >= 0), default=0),
    )


def check_absorbed(backend, site, given, shrinks, key=FP8_STATIC_TENSOR) -> list[torch.Tensor]:
    asked = emission(backend, key, Route.ABSORBED, shrinks=shrinks)
    made = backend.produce(site, given, asked).activation
    assert made.raw is None
    raw = EAGER.produce(site, given, emission(backend, key, Route.DUAL, raw=RawRequest()))
    same_bytes(made, raw.activation)
    flat = raw.activation.raw.values.reshape(-1, given[0].shape[-1])
    out = []
    for wanted in shrinks:
        ours = made.shrunk_for(wanted.consumer)
        assert_close(ours, flat, wanted)
        if backend.name == "native":
            assert torch.equal(ours, shrink(flat, wanted)), "absorbed and separate differ"
        out.append(ours)
    return out


def assert_close(ours: torch.Tensor, flat: torch.Tensor, wanted: Shrink) -> None:
    """To float32 rounding of the float64 product; zeros where there is nothing."""
    tokens = flat.shape[0] // wanted.slots.shape[0]
    slots = wanted.slots.repeat_interleave(tokens).tolist()
    assert ours.shape == (flat.shape[0], wanted.width)
    for row, slot in enumerate(slots):
        rank = int(wanted.ranks[slot]) if slot >= 0 else 0
        assert (ours[row, rank:] == 0).all()
        if rank:
            a, x = wanted.a[int(wanted.starts[slot]) :][:rank].double(), flat[row].double()
            bound = (a.abs() @ x.abs()) * 2.0**-24 * (8 + flat.shape[1] ** 0.5)
            assert ((ours[row, :rank].double() - a @ x).abs() <= bound).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("rank", RANKS)
def test_ranks(backend, site, inputs, rank, dtype):
    given = inputs(site, 3, 2, 576)
    check_absorbed(backend, site, given, (request(backend, [0, -1, 0], [rank], 576, dtype=dtype),))


def test_several_ranks_and_consumers_in_one_batch(backend, site, inputs, key):
    slots = [3, -1, 0, 8, 2, 2, 6, -1, 5]
    shrinks = (
        request(backend, slots, list(RANKS), 1368, "q_proj"),
        # An adapter on q alone, as under grouped-query attention.
        request(backend, [-1, -1, 0, -1, 2, 2, -1, -1, -1], [4, 8, 16], 1368, "v_proj"),
    )
    check_absorbed(backend, site, inputs(site, 9, 2, 1368), shrinks, key)


@pytest.mark.parametrize("key", [FP8_STATIC_TENSOR, FP8_DYNAMIC_TOKEN], ids=str)
def test_shrunk_rows_do_not_depend_on_the_others(backend, site, inputs, key):
    given = inputs(site, 16, 1100)
    slots = [0, 1, -1, 2] * 4
    (together,) = check_absorbed(
        backend, site, given, (request(backend, slots, [16, 5, 64], 1100),), key
    )
    wanted = request(backend, slots, [16, 5, 64], 1100)
    for row in (0, 1, 3, 13):
        alone = tuple(x[row : row + 1] if x.dim() == 2 else x for x in given)
        single = replace(wanted, slots=wanted.slots[row : row + 1])
        (ours,) = check_absorbed(backend, site, alone, (single,), key)
        assert torch.equal(ours[0], together[row])


def test_nothing_to_absorb(backend, site, inputs):
    check_absorbed(backend, site, inputs(site, 4, 64), (request(backend, [-1] * 4, [8], 64),))
    check_absorbed(backend, site, inputs(site, 0, 64), (request(backend, [-1] * 4, [8], 64),))
