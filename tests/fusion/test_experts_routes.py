"""Routes inside of experts: who reads raw is decided pair by pair, and all routes agree."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

from branchline.core.route import Route
from branchline.fusion import probe as probes
from branchline.linear import outputs
from branchline.linear.batch import Batch, BatchScope
from tests.helpers import same_bytes
from tests.moe.world import NAMES, Products, World, ran, run_rows, with_adapters


@pytest.fixture
def nan_filled(monkeypatch):
    """Whatever a kernel leaves unwritten shows."""

    def filled(shape, dtype, device):
        out = torch.empty(shape, dtype=dtype, device=device)
        wide = dtype.is_floating_point and dtype.itemsize > 1
        return out.fill_(torch.nan) if wide else out

    monkeypatch.setattr(outputs, "empty", filled)


ROWS = [0, -1, 1, 2]


@cache
def unfused(kind: str) -> torch.Tensor:
    """What rows with and without adapters get where everything is raw."""
    world = World(kind, "fp8-block", "dynamic", torch.bfloat16)
    out, batch = run_rows(world, ROWS, 3)
    assert batch.plan.routes[world.experts.site.index] == Route.UNFUSED
    return out


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss", "nemotron_h"])
@pytest.mark.parametrize(
    ("policy", "route"),
    [("static", Route.UNFUSED), ("dual", Route.DUAL), ("absorbed", Route.ABSORBED)],
)
def test_all_routes_give_the_same_bytes(kind, policy, route, nan_filled):
    # GPT-OSS's gate is proved by its results on every encoding of a two-byte dtype.
    world = World(kind, "fp8-block", policy, torch.bfloat16)
    got, batch = run_rows(world, ROWS, 3)
    assert batch.plan.routes[world.experts.site.index] == route
    assert ran(world) == {route: 1}
    assert not world.experts.site.counters.fallbacks()
    assert bool(got.isfinite().all())
    assert same_bytes(got, unfused(kind))
    packed, _ = run_rows(world, ROWS, 3, packed=True)
    assert same_bytes(packed, unfused(kind))


def test_raw_is_written_for_pairs_of_adapters_alone(nan_filled):
    world = World("mixtral", "fp8-dynamic", "dual", torch.bfloat16)
    site, down = world.experts.site, world.experts.down
    seen = []
    original = Products.add

    def add(self, out, x, rows, place):
        if place == down.index:
            seen.append((x.raw().values.clone(), rows.slots(place).clone()))
        return original(self, out, x, rows, place)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Products, "add", add)
        run_rows(world, ROWS, 3)
    ((raw, slots),) = seen
    written = raw.isfinite().all(1)
    # Rows 0 and 2 have an adapter on the second projection: three tokens, two choices each.
    assert int(written.sum()) == 12
    assert torch.equal(written, slots >= 0)
    assert not bool(raw[~written].isfinite().any())
    assert site.counters.routes() == {Route.DUAL: 1}


@pytest.mark.parametrize("policy", ["dynamic", "dual", "absorbed"])
def test_rows_without_an_adapter_keep_the_bases_bytes(policy):
    world = World("mixtral", "fp8-block", policy, torch.bfloat16)
    base, _ = run_rows(world, [-1, -1, -1, -1], 3)
    mixed, _ = run_rows(world, ROWS, 3)
    assert same_bytes(mixed[3:6], base[3:6])
    for row in (0, 2, 3):
        assert not torch.equal(mixed[3 * row : 3 * row + 3], base[3 * row : 3 * row + 3])


def test_rows_that_are_not_the_batchs_are_refused():
    from branchline.core.errors import BatchError

    world = World("mixtral", "fp8-block")
    plan = world.planner.plan({})
    slots = torch.full((len(world.registry), 4), -1, dtype=torch.int32)
    x, (index, weights) = world.tokens(5), world.routing(5, 2)
    wanted = world.experts(x, index, weights)
    # Where no adapter of the batch has a branch, nobody has to know whose the rows are.
    with BatchScope(world.registry.owner, Batch(plan, 4, slots)):
        assert torch.equal(world.experts(x, index, weights), wanted)
    branched = Batch(replace(plan, branched=(True,) * len(plan.branched)), 4, slots)
    with BatchScope(world.registry.owner, branched), pytest.raises(BatchError, match="experts"):
        world.experts(x, index, weights)


# --- probes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["fp8-static", "fp8-block", "mxfp8"])
@pytest.mark.parametrize("policy", ["dual", "absorbed"])
def test_a_probe_compares_pairs(scheme, policy):
    world = World("mixtral", scheme, policy, torch.bfloat16)
    site = world.experts.site
    rows = probes.ProbeRows(4, 0)
    base = probes.probe_site(site, Batch(world.planner.plan({})), rows)
    assert base.differing == ()
    assert base.usual
    with_adapters(world)
    plan = world.planner.plan(NAMES)
    slots = torch.full((len(world.registry), 4), -1, dtype=torch.int32)
    slots[world.experts.down.index] = torch.tensor([0, -1, 1, -1])
    packed = Batch(plan, 16, slots.repeat_interleave(4, 1), packed=True)
    for batch in (Batch(plan, 4, slots), packed):
        found = probes.probe_site(site, batch, rows)
        assert found.differing == ()
        assert found.elements > base.elements / 2
    assert not site.counters.routes()


def test_a_probe_finds_what_differs(monkeypatch):
    world = World("mixtral", "fp8-block", "dual", torch.bfloat16)
    site = world.experts.site
    with_adapters(world)
    plan = world.planner.plan(NAMES)
    slots = torch.full((len(world.registry), 2), -1, dtype=torch.int32)
    slots[world.experts.down.index] = torch.tensor([0, -1])
    producer = type(plan.producers[site.index])
    right = producer.produce

    def produce(self, semantics, inputs, emission):
        made = right(self, semantics, inputs, emission)
        if made.activation.raw is not None:
            wanted = emission.raw.rows.nonzero()[-1]
            made.activation.raw.values[wanted] *= 2
        return made

    monkeypatch.setattr(producer, "produce", produce)
    found = probes.probe_site(site, Batch(plan, 2, slots), probes.ProbeRows(4, 0))
    assert {entry.what for entry in found.differing} == {"raw rows", "output"}
