"""What experts compute is proved by running them; what is not proved stays the model's own."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from branchline.core.platform import detect_platform
from branchline.fusion.experts import RoutedExperts
from branchline.linear.registry import LayerRegistry
from branchline.serving.experts import ModelExperts
from tests.helpers import same_bytes
from tests.moe.models import MODELS, build, token_ids

KINDS = list(MODELS)


def patched(kind: str, forward) -> tuple[nn.Module, type]:
    """A model whose experts inherit the flags and compute something else."""
    model = build(kind)
    found = next(m for m in model.modules() if hasattr(m, "is_transposed"))
    kind = type(found)
    own = type("Own", (kind,), {"forward": forward(kind.forward)})
    for module in model.modules():
        if type(module) is kind:
            module.__class__ = own
    return model, own


def jittered(forward):
    def run(self, x, index, weights):
        return forward(self, x * torch.empty_like(x).uniform_(0.99, 1.01), index, weights)

    return run


def scaled(forward):
    return lambda self, x, index, weights: forward(self, x, index, weights) * 1.001


def squared_weights(forward):
    return lambda self, x, index, weights: forward(self, x, index, weights * weights)


def ups_first(forward):
    def run(self, x, index, weights):
        out = torch.zeros_like(x)
        for token, choices in enumerate(index.tolist()):
            for choice, expert in enumerate(choices):
                up, gate = F.linear(x[token], self.gate_up_proj[expert]).chunk(2, -1)
                own = F.linear(self.act_fn(gate) * up, self.down_proj[expert])
                out[token] += own * weights[token, choice]
        return out

    return run


def one_token_only(forward):
    return lambda self, x, index, weights: forward(self, x, index, weights) * (2 - (len(x) > 1))


def failing(forward):
    def run(self, x, index, weights):
        raise ValueError("not today")

    return run


def routed(model: nn.Module) -> tuple[list[RoutedExperts], LayerRegistry]:
    registry = LayerRegistry()
    with ExitStack() as undo:
        experts = ModelExperts(model, registry, undo, None, {})
        experts.route(detect_platform(torch.device("cpu")))
        return [m for m in model.modules() if isinstance(m, RoutedExperts)], registry


@pytest.mark.parametrize(
    "forward", [jittered, scaled, squared_weights, ups_first, one_token_only, failing]
)
def test_experts_that_compute_something_else_stay_the_models_own(forward):
    model, own = patched("mixtral", forward)
    found, registry = routed(model)
    assert not found
    assert not len(registry)
    assert [entry.name for entry in registry.unwrapped] == [
        "model.layers.0.mlp.experts",
        "model.layers.1.mlp.experts",
    ]
    assert all("Own" in entry.reason for entry in registry.unwrapped)
    assert sum(isinstance(m, own) for m in model.modules()) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_forward_of_its_own_that_computes_the_same_is_served(kind):
    model, _ = patched(kind, lambda forward: lambda self, *given: forward(self, *given))
    found, registry = routed(model)
    assert found
    assert not registry.unwrapped


def test_the_proof_leaves_the_module_and_its_hooks_alone():
    model = build("qwen3_moe")
    experts = next(m for m in model.modules() if hasattr(m, "is_transposed"))
    seen = []
    experts.act_fn.register_forward_hook(lambda *given: seen.append(given))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    before = torch.random.get_rng_state()
    routed(model)
    assert not seen
    assert torch.equal(before, torch.random.get_rng_state())
    assert all(same_bytes(value, state[name]) for name, value in model.state_dict().items())


def test_an_implementation_that_somebody_registered_is_run(monkeypatch):
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    def doubled(self, x, index, weights):
        return 2 * type(self).forward.__wrapped__(self, x, index, weights)

    def same(self, x, index, weights):
        return type(self).forward.__wrapped__(self, x, index, weights)

    for function, served in ((doubled, False), (same, True)):
        monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS._local_mapping, "mine", function)
        model = build("mixtral")
        model.config._experts_implementation = "mine"
        found, registry = routed(model)
        assert bool(found) == served
        assert bool(registry.unwrapped) != served


def test_a_norm_behind_the_experts():
    from transformers.integrations.moe import use_experts_implementation
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    class Normed(MixtralExperts):
        def __init__(self, config) -> None:
            super().__init__(config)
            self.post_expert_norm = nn.RMSNorm(config.hidden_size)

        def forward(self, x, index, weights):
            out = torch.zeros_like(x)
            for token, choices in enumerate(index.tolist()):
                for choice, expert in enumerate(choices):
                    gate, up = F.linear(x[token], self.gate_up_proj[expert]).chunk(2, -1)
                    own = F.linear(self.act_fn(gate) * up, self.down_proj[expert])
                    out[token] += self.post_expert_norm(own) * weights[token, choice]
            return out

    normed = use_experts_implementation(Normed, has_post_expert_norm=True)
    model = build("mixtral", dtype=torch.float32)
    for layer in model.model.layers:
        own = normed(model.config)
        own.load_state_dict(layer.mlp.experts.state_dict(), strict=False)
        nn.init.normal_(own.post_expert_norm.weight)
        layer.mlp.experts = own
    ids = token_ids(2, 6)
    model.config._experts_implementation = "eager"
    wanted = model(ids).logits
    found, registry = routed(model)
    assert len(found) == 2
    assert not registry.unwrapped
    registry.serve_base_batches_from(registry._bare_batch)
    for layer, experts in zip(model.model.layers, found, strict=True):
        layer.mlp.experts = experts
    assert torch.allclose(model(ids).logits, wanted, rtol=1e-4, atol=1e-4)
