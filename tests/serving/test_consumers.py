"""Foreign readers: hooks, unknown linears, routers.  Never fused past them, and named."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import branchline
from branchline.core.errors import RawConsumerError
from branchline.fusion import Route
from tests.models import build, token_ids

IDS = token_ids(2, 9)
CALIBRATION = [token_ids(4, 12, seed=9)]


def site_plan(served, name: str):
    return {plan.site: plan for plan in served.planner.plan({}).sites}[name]


def keep(store: list[torch.Tensor]):
    def foreign_hook(module, args, output):
        store.append(args[0].clone())

    return foreign_hook


@pytest.mark.parametrize(
    ("module", "site"),
    [
        ("model.layers.0.mlp.down_proj", "model.layers.0.mlp.silu_mul"),
        ("model.layers.0.mlp.act_fn", "model.layers.0.mlp.silu_mul"),
        ("model.layers.0.mlp.gate_proj", "model.layers.0.post_attention_layernorm"),
        ("model.layers.0.mlp", "model.layers.0.post_attention_layernorm"),
        ("model.layers.0.self_attn.k_proj", "model.layers.0.input_layernorm"),
        ("model.layers.0.input_layernorm", "model.layers.0.input_layernorm"),
    ],
)
def test_a_hook_keeps_its_site_raw_and_is_named(llama, module, site):
    served = llama.wrap()
    expected = served(IDS).logits
    seen: list[torch.Tensor] = []
    handle = served.get_submodule("model." + module).register_forward_hook(keep(seen))
    plan = site_plan(served, site)
    assert plan.route == Route.UNFUSED
    assert "foreign_hook" in plan.reason
    assert module in plan.reason
    assert torch.equal(served(IDS).logits, expected)
    assert seen
    assert isinstance(seen[0], torch.Tensor)
    handle.remove()
    assert site_plan(served, site).route == Route.FUSED


def test_a_hook_that_was_there_before_wrapping_counts():
    model = build("llama")
    seen: list[torch.Tensor] = []
    handles = {
        site: model.get_submodule(module).register_forward_hook(keep(seen))
        for module, site in [
            ("model.layers.1.mlp", "model.layers.1.post_attention_layernorm"),
            ("model.layers.0.self_attn.q_proj", "model.layers.0.input_layernorm"),
        ]
    }
    served = branchline.wrap(model, quant="fp8-static", calibration=CALIBRATION)
    assert site_plan(served, "model.layers.0.post_attention_layernorm").route == Route.FUSED
    for site in handles:
        plan = site_plan(served, site)
        assert plan.route == Route.UNFUSED
        assert "foreign_hook" in plan.reason
        seen.clear()
        served(IDS)
        assert len(seen) == len(handles)
        assert all(isinstance(x, torch.Tensor) for x in seen)
    for site, handle in handles.items():
        handle.remove()
        assert site_plan(served, site).route == Route.FUSED
    seen.clear()
    served(IDS)
    assert not seen


def test_a_hook_on_every_module_counts(llama):
    served = llama.wrap()
    seen: list[torch.Tensor] = []
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, args, output: seen.append(args[0]) if args else None
    )
    try:
        served(IDS)
        plan = site_plan(served, "model.layers.0.input_layernorm")
    finally:
        handle.remove()
    assert plan.route == Route.UNFUSED
    assert "every module" in plan.reason
    assert all(isinstance(x, torch.Tensor) for x in seen)
    assert site_plan(served, "model.layers.0.input_layernorm").route == Route.FUSED


class LinearWithSideBranch(nn.Linear):
    """An unknown subclass that reads its input twice."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 0.5 * x.mean(-1, keepdim=True)


def test_an_unknown_linear_subclass_is_never_fed_codes():
    model = build("llama")
    old = model.model.layers[0].self_attn.k_proj
    new = LinearWithSideBranch(old.in_features, old.out_features, bias=False)
    new.weight = old.weight
    model.model.layers[0].self_attn.k_proj = new.to(old.weight.dtype)
    served = branchline.wrap(model, quant="fp8-static", calibration=CALIBRATION)
    plan = site_plan(served, "model.layers.0.input_layernorm")
    assert plan.route == Route.UNFUSED
    assert "LinearWithSideBranch" in plan.reason
    served(IDS)
    audit = served.audit()
    assert {entry.name for entry in audit.unwrapped} == {"model.layers.0.self_attn.k_proj"}
    assert "LinearWithSideBranch" in str(audit)


class Routed(nn.Module):
    """A block whose norm also feeds a router, by way of a view."""

    def __init__(self, mlp: nn.Module, hidden: int) -> None:
        super().__init__()
        self.mlp = mlp
        self.router = nn.Parameter(torch.randn(hidden, 2, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = (x.reshape(-1, x.shape[-1]) @ self.router).softmax(-1)[:, :1]
        return self.mlp(x) * weight.view(*x.shape[:-1], 1)


def test_a_router_behind_a_view_keeps_the_norm_raw():
    model = build("llama")
    model.model.layers[1].mlp = Routed(model.model.layers[1].mlp, 64)
    served = branchline.wrap(model, quant="fp8-static", calibration=CALIBRATION)
    plan = site_plan(served, "model.layers.1.post_attention_layernorm")
    assert plan.route == Route.UNFUSED
    assert "reshape" in plan.reason
    assert "model.layers.1.mlp (Routed)" in plan.reason
    assert site_plan(served, "model.layers.1.mlp.mlp.silu_mul").route == Route.FUSED
    served(IDS)


def test_a_reader_that_appears_later_is_refused_not_fed_codes(llama):
    served = llama.wrap()
    mlp = served.model.model.layers[0].mlp
    inner = mlp.forward

    readings = {"mean": lambda x: x.mean(), "data": lambda x: x.data.float().mean()}
    for name, reading in readings.items():
        mlp.forward = lambda x, reading=reading: inner(x) + reading(x)
        with pytest.raises(RawConsumerError, match="post_attention_layernorm") as caught:
            served(IDS)
        assert name in str(caught.value)


def test_hooks_see_no_probes():
    model = build("llama")
    seen: list[torch.Size] = []
    for name in ("model.layers.0.mlp.act_fn", "model.layers.0.input_layernorm", "model.norm"):
        model.get_submodule(name).register_forward_hook(lambda m, a, o: seen.append(a[0].shape))
    served = branchline.wrap(model, quant="fp8-static", calibration=CALIBRATION)
    assert set(seen) == {torch.Size((4, 12, 64)), torch.Size((4, 12, 128))}
    assert all(site.facts.semantics is not None for site in served.discovery.sites)


def test_hidden_states_and_attentions_can_be_asked_for(llama):
    served = llama.wrap()
    plain = served(IDS).logits
    out = served(IDS, output_hidden_states=True)
    assert torch.equal(out.logits, plain)
    assert all(isinstance(h, torch.Tensor) for h in out.hidden_states)
    # Layers + embedding.
    assert len(out.hidden_states) == 3
