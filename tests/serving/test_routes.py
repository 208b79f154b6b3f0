"""Routes change nothing but speed: equality between policies, isolation of rows, counters."""

from __future__ import annotations

import itertools

import pytest
import torch

from branchline.fusion import Route
from tests.models import token_ids

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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_static_and_dynamic_give_the_same_bytes(family, dtype):
    ids = token_ids(3, 9)
    dynamic = family.served(dtype)
    static = family.served(dtype, policy="static", calibration=dynamic.calibration)
    fused = 0
    for names in BATCHES:
        with dynamic.adapters.rows(names), static.adapters.rows(names):
            assert_same_bytes(dynamic(ids).logits, static(ids).logits)
        fused += sum(entry.get(Route.FUSED, 0) for entry in routes_ran(dynamic).values())
        assert all(Route.FUSED not in entry for entry in routes_ran(static).values())
    # GPT-2 has LayerNorms and its own GELU: no producer yet, and the audit says so.
    assert fused > 0 or family.name == "gpt2"


@pytest.mark.parametrize("quant", ["fp8-static", "fp8-dynamic"])
def test_a_row_does_not_depend_on_its_neighbours(family, quant):
    served = family.served(quant=quant)
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
