"""Routes change nothing but speed: equality between policies, isolation of rows, counters."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch

from branchline.core.errors import BatchError
from branchline.fusion import Route
from tests.models import TARGETS, save_adapter, token_ids

BATCHES = [
    [None, None, None],
    ["attn", None, None],
    ["mlp", "mlp", None],
    ["attn", "mlp", "all"],
]


def assert_same_bytes(a: torch.Tensor, b: torch.Tensor) -> None:
    assert a.dtype == b.dtype
    assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def routes_ran(model) -> dict[str, dict[Route, int]]:
    """Counters by the last part of a site's name, summed over layers, then reset."""
    out: dict[str, dict[Route, int]] = {}
    for site in model.discovery.sites:
        entry = out.setdefault(site.facts.name.rpartition(".")[2], {})
        for route, count in site.counters.routes().items():
            entry[route] = entry.get(route, 0) + count
        site.counters.reset()
    return out


#: Each family with each quantisation and each dtype; one family with all pairs of these.
SERVED_AS = [
    *((family, "fp8-static", torch.bfloat16) for family in sorted(TARGETS)),
    *((family, "fp8-dynamic", torch.float32) for family in sorted(TARGETS)),
    ("llama", "fp8-static", torch.float32),
    ("llama", "fp8-dynamic", torch.bfloat16),
]


@pytest.mark.parametrize(("family", "quant", "dtype"), SERVED_AS, indirect=["family"])
def test_all_policies_give_the_same_bytes(family, dtype, quant):
    ids = token_ids(3, 9)
    static = family.served(dtype, quant=quant, policy="static")
    wanted = []
    for names in BATCHES:
        with static.adapters.rows(names):
            wanted.append(static(ids).logits)
    assert set(total(routes_ran(static))) == {Route.UNFUSED}
    saved = {"calibration": static.calibration} if static.calibration else {}
    for policy, with_adapters in (
        ("dynamic", Route.UNFUSED),
        ("dual", Route.DUAL),
        ("absorbed", Route.ABSORBED),
    ):
        served = family.served(dtype, quant=quant, policy=policy, **saved)
        for names, logits in zip(BATCHES, wanted, strict=True):
            with served.adapters.rows(names):
                assert_same_bytes(served(ids).logits, logits)
            ran = total(routes_ran(served))
            assert set(ran) <= {Route.FUSED, with_adapters}, ran
            assert ran[Route.FUSED] > 0 or "all" in names
            assert bool(ran[with_adapters]) == any(names)
            assert not any(site.counters.fallbacks() for site in served.discovery.sites)


def test_a_row_mask_decides_which_raw_rows_are_written(llama):
    served = llama.served(policy="dual")
    site = next(s for s in served.discovery.sites if s.facts.kind == "norm")
    x = torch.randn(3, 5, 64).bfloat16()
    weight = torch.ones(64, dtype=torch.bfloat16)
    with served.adapters.rows(["mlp", "attn", None]) as batch:
        out = site(x, weight)
        assert out.raw.rows.tolist() == [False, True, False]
        assert not out.raw.compact
        assert site.emission(batch) is site.emission(batch)
        assert torch.equal(out.raw.values[1], site.compute_raw(x, weight)[1])


class OutputOnly:
    """A branch that wants its raw rows one after the other."""

    compact_raw = True
    join = None

    def __init__(self) -> None:
        self.seen = []

    def add(self, out, x, rows):
        self.seen.append(x.raw())
        return out

    def shrink_request(self, slots, rank):
        raise AssertionError("absorbs nothing")


def test_a_consumer_may_take_its_raw_rows_compacted(llama):
    served = llama.served(policy="dual")
    ids = token_ids(3, 9)
    layers = [served.registry.layers[f"model.layers.0.self_attn.{n}_proj"] for n in "qv"]
    branches = [OutputOnly() for _ in layers]
    for layer, branch in zip(layers, branches, strict=True):
        layer.branch = branch
    with served.adapters.rows(["mlp", "attn", None]):
        served(ids)
    for branch in branches:
        (raw,) = branch.seen
        assert raw.compact
        assert raw.rows.tolist() == [False, True, False]
        assert raw.values.shape == (9, 64)


@pytest.mark.parametrize("policy", ["dual", "absorbed"])
def test_ranks_beyond_64_are_served_dual(llama, policy, tmp_path):
    folder = save_adapter(llama.plain(), tmp_path, ["q_proj", "v_proj"], rank=65, seed=4)
    ids = token_ids(2, 9)
    static = llama.wrap(policy="static", max_lora_rank=80)
    served = llama.wrap(policy=policy, max_lora_rank=80, calibration=static.calibration)
    for model in (static, served):
        model.adapters.load("big", folder)
        model.adapters.load("small", llama.folders["attn"])
    routes = {}
    for names in (["big", None], ["small", None], ["small", "big"]):
        with static.adapters.rows(names), served.adapters.rows(names):
            assert_same_bytes(served(ids).logits, static(ids).logits)
        routes[names[-1] or names[0]] = set(routes_ran(served)["input_layernorm"])
    small = Route.ABSORBED if policy == "absorbed" else Route.DUAL
    assert routes == {"big": {Route.DUAL}, "small": {small}}
    text = str(served.audit())
    if policy == "absorbed":
        assert "ranks up to 64 are absorbed, the highest live rank is 65" in " ".join(text.split())


@pytest.mark.parametrize("policy", ["dual", "absorbed"])
def test_a_hook_beside_an_adapter_makes_its_site_raw(llama, policy):
    served = llama.served(policy=policy)
    ids = token_ids(2, 9)
    with served.adapters.rows(["attn", None]):
        wanted = served(ids).logits
    seen = []
    layer = served.registry.layers["model.layers.0.self_attn.k_proj"]
    with (
        layer.register_forward_pre_hook(lambda module, args: seen.append(args[0])),
        served.adapters.rows(["attn", None]),
    ):
        assert_same_bytes(served(ids).logits, wanted)
    assert isinstance(seen[0], torch.Tensor)


def test_routes_may_not_run_under_another_number_of_rows(llama):
    for policy in ("dual", "absorbed"):
        served = llama.served(policy=policy)
        layer = served.model.model.layers[0]
        with (
            served.adapters.rows(["attn", None]),
            pytest.raises(BatchError, match="names 2 rows"),
        ):
            layer.input_layernorm(torch.randn(3, 5, 64).bfloat16())


def total(ran: dict[str, dict[Route, int]]) -> Counter[Route]:
    out: Counter[Route] = Counter()
    for entry in ran.values():
        out.update(entry)
    return out


@pytest.mark.parametrize("policy", ["dynamic", "dual", "absorbed"])
@pytest.mark.parametrize("quant", ["fp8-static", "fp8-dynamic"])
def test_a_row_does_not_depend_on_its_neighbours(family, quant, policy):
    served = family.served(quant=quant, policy=policy)
    row = token_ids(1, 9, seed=5)
    seen: dict[str | None, torch.Tensor] = {}
    for name, neighbours in itertools.product(
        [None, "attn", "mlp", "all"], [(None, None), ("attn", "mlp"), ("all", "all")]
    ):
        others = token_ids(2, 9, seed=len("".join(map(str, neighbours))))
        ids = torch.cat([others[:1], row, others[1:]])
        with served.adapters.rows([neighbours[0], name, neighbours[1]]):
            logits = served(ids).logits[1]
        assert_same_bytes(logits, seen.setdefault(name, logits))


def test_base_rows_get_the_base_bytes(family):
    ids = token_ids(3, 9)
    bare = family.wrap()
    base = bare(ids).logits
    served = family.served(calibration=bare.calibration)
    assert_same_bytes(served(ids).logits, base)
    with served.adapters.rows(["all", None, "attn"]):
        assert_same_bytes(served(ids).logits[1], base[1])


def test_a_row_alone_agrees_to_float_tolerance(family):
    served = family.served(torch.float32)
    ids = token_ids(3, 9)
    names = ["attn", None, "all"]
    with served.adapters.rows(names):
        together = served(ids).logits
    for i, name in enumerate(names):
        with served.adapters.rows([name]):
            alone = served(ids[i : i + 1]).logits[0]
        error = (alone - together[i]).abs()
        assert error.mean() < 2e-3 * together.std()


def test_the_capability_follows_what_is_live(llama):
    served = llama.wrap()
    ids = token_ids(2, 9)
    layers = 2
    all_fused = {
        "silu_mul": {Route.FUSED: layers},
        "input_layernorm": {Route.FUSED: layers},
        "post_attention_layernorm": {Route.FUSED: layers},
    }
    served(ids)
    assert routes_ran(served) == all_fused
    served.adapters.load("attn", llama.folders["attn"])
    with served.adapters.rows(["attn", None]):
        served(ids)
    assert routes_ran(served) == all_fused | {"input_layernorm": {Route.UNFUSED: layers}}
    # Loaded, but not in this batch.
    with served.adapters.rows([None, None]):
        served(ids)
    served(ids)
    assert routes_ran(served) == {name: {Route.FUSED: 2 * layers} for name in all_fused}
    served.adapters.unload("attn")
    served(ids)
    assert routes_ran(served) == all_fused


def test_requires_unquantized_input_follows_loads(llama):
    served = llama.wrap()
    registry = served.registry
    layer = registry.layers["model.layers.0.self_attn.k_proj"]
    key = layer.kernel.contract.key
    assert registry.get_input_quant_key(layer) == key
    before = registry.epoch
    served.adapters.load("attn", llama.folders["attn"])
    assert registry.epoch > before
    # The adapter is on q_proj and v_proj; k_proj shares their input.
    assert registry.requires_unquantized_input(layer)
    assert registry.get_input_quant_key(layer) is None
    assert registry.get_input_quant_key(layer, live=()) == key
    down = registry.layers["model.layers.0.mlp.down_proj"]
    assert not registry.requires_unquantized_input(down)
    served.adapters.unload("attn")
    assert registry.get_input_quant_key(layer) == key


def test_audit_says_what_ran(llama):
    served = llama.served()
    with served.adapters.rows(["attn", None]):
        served(token_ids(2, 9))
    report = served.audit()
    assert report.adapter_sets == ((), ("attn",), ("mlp",), ("all",), ("all", "attn", "mlp"))
    for site in report.sites:
        routes = {route.adapters: route for route in site.routes}
        assert routes[()].route == "fused"
        assert site.ran == {routes[("attn",)].route: 1}
        assert not site.fallbacks
        if site.site.endswith("input_layernorm") or "all" in routes[("all",)].blame:
            assert routes[("all",)].route == "unfused"
    text = str(report)
    assert "adapter attn" in text
    assert "silu_mul" in text


def test_shared_scale_or_unfused(llama):
    calibrated = llama.wrap().calibration
    amax = dict(calibrated.input_amax)
    amax["model.layers.0.self_attn.k_proj"] *= 2
    served = llama.wrap(calibration=type(calibrated)(amax, 100.0, 1))
    plans = {plan.site: plan for plan in served.planner.plan({}).sites}
    plan = plans["model.layers.0.input_layernorm"]
    assert plan.route == Route.UNFUSED
    assert "q_proj" in plan.reason
    assert "k_proj" in plan.reason
    assert "consumers disagree" in plan.reason
    assert plans["model.layers.1.input_layernorm"].route == Route.FUSED
