"""Every part an adapter may have on linears, served in mixed batches."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import branchline
from branchline.fusion import Route
from tests.helpers import same_bytes
from tests.models import build, token_ids
from tests.parts import ADAPTERS, QUERY, ROW_LENGTH, defined, served
from tests.reference import fake_quantized

BATCHES = [
    [None],
    *([name] for name in ADAPTERS),
    ["ia3", None],
    ["norms", "embedding"],
    ["lora", "ia3", "dora", None, "boft", "delta", "head"],
    ["gain", "embedding", "table", "norms", "gain", None, "lora"],
]


@pytest.fixture(scope="module")
def serve() -> Callable[..., branchline.ServedModel]:
    """Served models, made once for the same arguments; tests leave them as they were."""
    made: dict[tuple, branchline.ServedModel] = {}

    def make(quant: str, policy: str = "dynamic") -> branchline.ServedModel:
        if (quant, policy) not in made:
            made[quant, policy] = served(quant, policy=policy)
        return made[quant, policy]

    return make


# --- values ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("quant", "tolerance"), [("none", 1e-5), ("fp8-dynamic", 3e-2)], ids=["float", "fp8"]
)
def test_every_row_is_what_its_adapter_defines(serve, quant, tolerance):
    model = serve(quant)
    plain = build("llama", torch.float32)
    if quant != "none":
        plain = fake_quantized(plain, model)
    models = {name: defined(plain, weights) for name, weights in ADAPTERS.items()}
    models[None] = plain
    for names in BATCHES:
        ids = token_ids(len(names), ROW_LENGTH, seed=len(names))
        got = model(ids, adapter_names=names).logits
        for row, name in enumerate(names):
            wanted = models[name](ids[row : row + 1]).logits[0]
            error = (got[row] - wanted).norm() / wanted.norm()
            assert error <= tolerance, (names, name, float(error))


def test_adapters_differ_from_the_base_and_from_each_other(serve):
    model = serve("none")
    ids = token_ids(1, ROW_LENGTH)
    outputs = [model(ids, adapter_names=[name]).logits for name in (None, *ADAPTERS)]
    for index, one in enumerate(outputs):
        for other in outputs[:index]:
            assert (one - other).norm() > 0.02 * one.norm()


@pytest.mark.parametrize("quant", ["none", "fp8-dynamic"])
def test_rows_do_not_depend_on_their_neighbours(serve, quant):
    model = serve(quant)
    for names in BATCHES[-2:]:
        ids = token_ids(len(names), ROW_LENGTH, seed=3)
        together = model(ids, adapter_names=names).logits
        base = model(ids).logits
        for row, name in enumerate(names):
            lone = [name if other == row else None for other in range(len(names))]
            alone = model(ids, adapter_names=lone).logits
            assert same_bytes(together[row], alone[row]), (names, name)
            for other in range(len(names)):
                assert other == row or same_bytes(alone[other], base[other])


# --- routes ------------------------------------------------------------------------------------


def routes(model: branchline.ServedModel, name: str | None) -> dict[str, Route]:
    plan = model.planner.plan(model.adapters.live([name] if name else []))
    return {site.site: site.route for site in plan.sites if site.site.startswith("model.layers.0")}


ATTENTION, MIDDLE = "model.layers.0.input_layernorm", "model.layers.0.post_attention_layernorm"


@pytest.mark.parametrize("policy", ["dynamic", "dual", "absorbed"])
def test_what_an_adapter_does_decides_the_routes(serve, policy):
    model = serve("fp8-dynamic", policy)
    base = routes(model, None)
    assert set(base.values()) == {Route.FUSED}
    (down,) = base.keys() - {ATTENTION, MIDDLE}
    reading = {"dynamic": Route.UNFUSED, "dual": Route.DUAL, "absorbed": Route.ABSORBED}[policy]
    dense = Route.DUAL if policy == "absorbed" else reading
    for name, changed in {
        "lora": {ATTENTION: reading, down: reading},
        "ia3": {down: Route.UNFUSED},
        "dora": {ATTENTION: reading, MIDDLE: reading},
        "boft": {ATTENTION: Route.UNFUSED, down: Route.UNFUSED},
        "delta": {ATTENTION: dense, MIDDLE: dense},
        "head": {down: dense},
        "gain": {},
        "embedding": {},
        "norms": {ATTENTION: Route.UNFUSED},
    }.items():
        assert routes(model, name) == base | changed, name


def test_output_parts_run_fused_and_never_see_the_activation(serve, monkeypatch):
    model = serve("fp8-dynamic")
    ids = token_ids(3, ROW_LENGTH)
    sites = model.discovery.sites
    for site in sites:
        site.counters.reset()
        # A raw activation that anybody computed would show.
        monkeypatch.setattr(site, "_raw", lambda *inputs: torch.full_like(inputs[0], torch.nan))
    quantised = [site for site in sites if site.common_key() is not None]
    layer = model.registry.layers[QUERY.format(0)]
    live = model.adapters.live(["gain"])
    assert layer.branch is not None
    assert model.registry.branches(layer, live)
    assert model.registry.raw_readers(layer, live) == ()
    with model.adapters.rows(["gain", None, "gain"]):
        hidden = model.model.model.layers[0](
            torch.randn(3, ROW_LENGTH, 64),
            position_embeddings=(torch.ones(3, ROW_LENGTH, 16), torch.zeros(3, ROW_LENGTH, 16)),
        )
    assert torch.isfinite(hidden).all()
    ran = [site.counters.routes() for site in quantised if "layers.0" in site.facts.name]
    assert ran == [{Route.FUSED: 1}] * 3
    with model.adapters.rows(["gain", None, "ia3"]):
        model(ids)
    ran = [site.counters.routes() for site in quantised if "layers.1" in site.facts.name]
    assert {Route.UNFUSED: 1} in ran
    for site in sites:
        site.counters.reset()


@pytest.mark.parametrize("policy", ["static", "dual", "absorbed"])
def test_policies_agree_on_every_byte(serve, policy):
    wanted, model = serve("fp8-dynamic"), serve("fp8-dynamic", policy)
    for names in BATCHES[-2:]:
        ids = token_ids(len(names), ROW_LENGTH, seed=5)
        a = model(ids, adapter_names=names).logits
        assert same_bytes(a, wanted(ids, adapter_names=names).logits), names


def test_reasons_name_the_adapter(serve):
    model = serve("fp8-dynamic", "dual")
    for name, kind in (("ia3", "down_proj"), ("norms", "input_layernorm")):
        plan = model.planner.plan(model.adapters.live([name]))
        reasons = [site.reason for site in plan.sites if site.route == Route.UNFUSED]
        assert any(f"adapter '{name}'" in reason and kind in reason for reason in reasons)


# --- compiled ----------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["dynamic", "absorbed"])
def test_all_parts_compile_once(policy):
    model = branchline.wrap(
        build("llama", torch.float32), quant="fp8-dynamic", policy=policy, max_loras=4,
        max_lora_rank=8,
    )  # fmt: skip
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model.model, fullgraph=True, dynamic=True, backend=counter)
    ids = token_ids(3, ROW_LENGTH)
    frames = None
    for names in ([None] * 3, ["lora", None, "dora"], ["ia3", "norms", "table"], ["boft", "head"]):
        for name in filter(None, names):
            model.adapters.install(name, ADAPTERS[name])
        rows = [*names, None][:3]
        with model.adapters.rows(rows):
            assert torch.equal(compiled(ids).logits, model.model(ids).logits)
        for name in filter(None, names):
            model.adapters.unload(name)
        frames = frames or counter.frame_count
    assert counter.frame_count == frames
