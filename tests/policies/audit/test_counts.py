"""The audit against what ran, and its numbers against a count of our own."""

from __future__ import annotations

import itertools

import pytest

from branchline import wrap
from branchline.policies.audit.report import AuditReport, SiteReport
from tests import models
from tests.moe import models as moe_models

POLICIES = ("dynamic", "static", "dual", "absorbed")
NAMES = ("attention", "mlp", "all")
BF16, FLOAT32 = 2, 4


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    """Adapters of one family by name; saved when first asked for."""
    root = tmp_path_factory.mktemp("adapters")

    def get(family: str) -> dict[str, str]:
        found = {}
        for index, targets in enumerate((*models.TARGETS[family], "all-linear")):
            folder = root / family / NAMES[index]
            if not folder.exists():
                model = models.build(family)
                models.save_adapter(model, folder, targets, rank=2 + 2 * index, seed=index)
            found[NAMES[index]] = str(folder)
        return found

    return get


def served_with(family: str, adapters, policy: str, **settings):
    served = wrap(models.build(family), policy=policy, **settings)
    for name, source in adapters(family).items():
        served.adapters.load(name, source)
    return served


def some_sets() -> list[tuple[str, ...]]:
    sizes = range(len(NAMES) + 1)
    return [chosen for size in sizes for chosen in itertools.combinations(NAMES, size)]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("family", models.CONFIGS)
def test_what_is_planned_is_what_runs(family, policy, adapters):
    served = served_with(family, adapters, policy)
    for chosen in some_sets():
        for site in served.discovery.sites:
            site.counters.reset()
        names = [*chosen, None]
        with served.adapters.rows(names):
            served(models.token_ids(len(names), 5))
        report = served.audit(adapter_sets=[chosen])
        for site in report.sites:
            (route,) = site.routes
            assert site.ran == site.planned
            assert set(site.ran) == {route.route}, (site.site, chosen)
            assert not site.mismatches


@pytest.mark.parametrize("family", ["llama", "nemotron"])
@pytest.mark.parametrize("device", ["cpu", "h200"])
def test_under_policy_auto_too(family, device, adapters):
    policy = f"auto:device={device}"
    served = served_with(family, adapters, policy)
    for chosen in some_sets():
        for site in served.discovery.sites:
            site.counters.reset()
        names = list(chosen) or [None]
        with served.adapters.rows(names):
            served(models.token_ids(len(names), 5))
        # Rows that are not packed count as one token each.
        report = served.audit(adapter_sets=[chosen], tokens=len(names))
        for site in report.sites:
            assert set(site.ran) == {site.routes[0].route}, (site.site, chosen)
            assert not site.mismatches


@pytest.mark.parametrize("kind", ["mixtral", "deepseek_v3"])
def test_between_experts_too(kind):
    served = wrap(moe_models.MODELS[kind](), policy="dynamic")
    served(moe_models.token_ids(2, 5))
    for site in served.audit(adapter_sets=[()]).sites:
        assert set(site.ran) == {site.routes[0].route}
        assert not site.mismatches


def test_what_runs_otherwise_is_a_mismatch():
    served = wrap(models.build("llama"))
    norm = served.model.model.layers[0].input_layernorm
    norm.variance_epsilon = 1e-2
    served(models.token_ids(2, 5))
    report = served.audit(adapter_sets=[()])
    sites = {site.site: site for site in report.sites}
    changed = sites["model.layers.0.input_layernorm"]
    assert changed.planned == {"fused": 1}
    assert changed.ran == {"unfused": 1}
    assert any("fused was planned for 1 calls, and ran in 0" in m for m in changed.mismatches)
    assert any("settings were changed" in m for m in changed.mismatches)
    assert not sites["model.layers.1.input_layernorm"].mismatches
    assert "what ran is not what was planned" in str(report)


# --- bytes ---------------------------------------------------------------------------------------


def fused_bytes(site: SiteReport) -> float:
    """Codes of one byte and a float32 scale a token: what `fp8-dynamic` takes."""
    return site.rows_per_token * (site.columns + FLOAT32)


def row_bytes(site: SiteReport) -> float:
    return site.rows_per_token * site.columns * BF16


def ranks_of(site: SiteReport, ranks: dict[str, int]) -> int:
    return sum(ranks.get(consumer.rpartition(".")[2], 0) for consumer in site.consumers)


def counted(site: SiteReport, ranks: dict[str, int]) -> dict[str, float]:
    """Bytes a token by route, of a batch in which every row has the adapter."""
    shrunk = ranks_of(site, ranks) * FLOAT32
    reads = row_bytes(site) if shrunk else 0
    return {
        "fused": fused_bytes(site),
        # Written, read by the quantiser, and read by the branch.
        "unfused": 2 * row_bytes(site) + fused_bytes(site) + reads + shrunk,
        "dual": fused_bytes(site) + 2 * reads + shrunk,
        "absorbed": fused_bytes(site) + shrunk,
    }


@pytest.mark.parametrize("policy", POLICIES)
def test_bytes_are_those_of_a_count_from_shapes(policy, adapters):
    served = served_with("llama", adapters, policy)
    report = served.audit(adapter_sets=[(), ("mlp",)], tokens=32)
    ranks = {"gate_proj": 4, "down_proj": 4}
    for site in report.sites:
        base, adapted = site.routes
        assert base.bytes_per_token == counted(site, {})[base.route]
        assert adapted.bytes_per_token == counted(site, ranks)[adapted.route], site.site


def costs_of(report: AuditReport, name: str):
    (adapter,) = [a for a in report.adapters if a.name == name]
    return {cost.policy: cost for cost in adapter.costs}


def test_what_an_adapter_costs_is_the_sum_over_its_sites(adapters):
    served = served_with("llama", adapters, "dynamic")
    report = served.audit(policy=POLICIES)
    ranks = {"gate_proj": 4, "down_proj": 4}
    base = sum(counted(site, {})["fused"] for site in report.sites)
    costs = costs_of(report, "mlp")
    for policy, route in (("dynamic", "unfused"), ("dual", "dual"), ("absorbed", "absorbed")):
        total = sum(
            counted(site, ranks)[route if ranks_of(site, ranks) else "fused"]
            for site in report.sites
        )
        assert costs[policy].bytes_per_token == pytest.approx(total)
        assert costs[policy].extra_bytes_per_token == pytest.approx(total - base)
        assert costs[policy].extra_share == pytest.approx((total - base) / base)
    # Of two layers, the activation and the norm before the MLP.
    assert costs["dynamic"].sites_unfused == 4
    assert costs["dual"].sites_dual == 4
    assert costs["absorbed"].sites_absorbed == 4
    assert costs["static"].extra_bytes_per_token == pytest.approx(
        sum(row_bytes(s) + ranks_of(s, ranks) * FLOAT32 for s in report.sites if ranks_of(s, ranks))
    )


def test_advice_saves_what_it_says(adapters, tmp_path):
    served = served_with("llama", adapters, "dynamic")
    report = served.audit()
    (adapter,) = [a for a in report.adapters if a.name == "mlp"]
    without_down = next(a for a in adapter.advice if a.text.startswith("without down_proj"))
    assert without_down.sites == 2
    assert f"{100 * without_down.saved_share:.1f} %" in without_down.text
    # Trained without it, an adapter costs that much less.
    models.save_adapter(models.build("llama"), tmp_path, ["gate_proj"], rank=4, seed=0)
    served.adapters.load("less", tmp_path)
    more, less = (costs_of(served.audit(), n)["dynamic"] for n in ("mlp", "less"))
    saved = more.bytes_per_token - less.bytes_per_token
    assert saved / more.bytes_per_token == pytest.approx(without_down.saved_share)
    by_policy = next(a for a in adapter.advice if a.text.startswith("policy absorbed"))
    costs = costs_of(served.audit(policy=("dynamic", "absorbed")), "mlp")
    recovered = costs["dynamic"].bytes_per_token - costs["absorbed"].bytes_per_token
    assert by_policy.saved_share == pytest.approx(recovered / costs["dynamic"].bytes_per_token)


def test_shares_add_up_to_one(adapters):
    report = served_with("qwen3", adapters, "dynamic").audit()
    assert sum(site.share for site in report.sites) == pytest.approx(1.0)
    assert all(site.share > 0 for site in report.sites)


def test_rows_between_experts_count_for_each_choice():
    report = wrap(moe_models.MODELS["mixtral"]()).audit(adapter_sets=[()])
    between = [s for s in report.sites if "experts" in s.site]
    assert {site.rows_per_token for site in between} == {2}
    for site in between:
        assert site.routes[0].bytes_per_token == fused_bytes(site)


def test_a_set_spreads_rows_evenly(adapters):
    served = served_with("llama", adapters, "dynamic")
    report = served.audit(adapter_sets=[("attention", "mlp")], tokens=32)
    for site in report.sites:
        (route,) = site.routes
        if site.site.endswith("silu_mul"):
            # Half of the rows have the adapter that reads it.
            half = row_bytes(site) / 2 + 4 * FLOAT32 / 2
            assert route.bytes_per_token == 2 * row_bytes(site) + fused_bytes(site) + half


def test_times_follow_bytes_and_launches(adapters):
    served = served_with("llama", adapters, "dynamic")
    few, many = (served.audit(adapter_sets=[()], tokens=n) for n in (1, 4096))
    for one, other in zip(few.sites, many.sites, strict=True):
        # A launch costs the same for one token and for thousands.
        assert one.routes[0].seconds_per_token > other.routes[0].seconds_per_token
