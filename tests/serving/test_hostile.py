"""Ways to get a silently wrong answer that a hostile reader found; each stays closed."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import branchline
from branchline.core import errors
from branchline.linear import RowLayout
from tests.models import build, token_ids
from tests.serving.test_routes import assert_same_bytes

IDS = token_ids(2, 7)
CALIBRATION = [token_ids(4, 12, seed=9)]


def test_streams_in_turn_are_refused_not_mixed(llama):
    served = llama.served()

    def stream(name):
        with served.adapters.rows([name, name]):
            while True:
                yield served(IDS).logits

    base = served(IDS).logits
    first = stream("attn")
    expected = next(first)
    with pytest.raises(errors.BatchError, match="another rows"):
        next(stream("mlp"))
    assert torch.equal(next(first), expected)
    first.close()
    assert torch.equal(served(IDS).logits, base)


def test_an_ended_batch_serves_nobody(llama):
    served = llama.served()
    block = served.adapters.rows(["attn", "attn"])
    batch = block.__enter__()
    # As if the block had been left in another thread.
    batch.ended.set()
    with pytest.raises(errors.BatchError, match="ended"):
        served(IDS)
    block.__exit__(None, None, None)
    served(IDS)


def test_per_call_names_override_a_block(llama):
    served = llama.served()
    with served.adapters.rows(["mlp", "mlp"]):
        expected = served(IDS).logits
        other = served(IDS, adapter_names=["attn", "attn"]).logits
        assert torch.equal(served(IDS).logits, expected)
    with served.adapters.rows(["attn", "attn"]):
        assert torch.equal(served(IDS).logits, other)


@pytest.mark.parametrize(
    "name",
    ["generate_batch", "save_pretrained", "state_dict", "add_adapter", "init_continuous_batching"],
)
def test_what_would_pass_by_the_routes_is_refused(llama, name):
    served = llama.wrap()
    with pytest.raises(errors.ConfigError, match=name):
        getattr(served, name)("x")
    with pytest.raises(errors.ConfigError, match="copying"):
        copy.deepcopy(served)


def test_an_activation_that_changes_after_wrapping_counts(llama):
    served = llama.served()
    before = served(IDS).logits
    mlp = served.model.model.layers[0].mlp
    mlp.act_fn = nn.ReLU()
    changed = served(IDS).logits
    assert not torch.equal(changed, before)
    with served.adapters.rows([None, "mlp"]):
        assert_same_bytes(served(IDS).logits[0], changed[0])
    site = next(s for s in served.discovery.sites if s.facts.name.endswith("0.mlp.silu_mul"))
    assert "replaced" in next(iter(site.counters.fallbacks()))


def test_an_epsilon_that_changes_after_wrapping_counts(llama):
    served = llama.wrap()
    before = served(IDS).logits
    served.model.model.layers[0].input_layernorm.variance_epsilon = 10.0
    assert not torch.equal(served(IDS).logits, before)


def test_a_hook_inside_of_a_batch_is_called(llama):
    served = llama.served()
    seen = []
    with served.adapters.rows([None, None]):
        expected = served(IDS).logits
        act = served.model.model.layers[0].mlp.act_fn
        handle = act.register_forward_hook(lambda m, a, o: seen.append(a[0].shape))
        assert torch.equal(served(IDS).logits, expected)
    handle.remove()
    assert len(seen) == 1


def test_inference_mode_is_no_trap(llama):
    with torch.inference_mode():
        served = llama.wrap()
        served.adapters.load("a", llama.folders["attn"])
    served.adapters.load("b", llama.folders["mlp"])
    with torch.inference_mode(), served.adapters.rows(["a", "b"]):
        inside = served(IDS).logits.clone()
    with served.adapters.rows(["a", "b"]):
        assert torch.equal(served(IDS).logits, inside)
    served.adapters.unload("a")
    served.adapters.unload("b")
    assert served.adapters.list() == ()


@pytest.mark.parametrize("quant", ["none", "fp8-static", "fp8-dynamic"])
def test_autocast_changes_no_byte(llama, quant):
    served = llama.served(quant=quant)
    with served.adapters.rows(["all", None]):
        plain = served(IDS).logits
        with torch.autocast("cpu", torch.bfloat16):
            assert_same_bytes(served(IDS).logits, plain)


def test_a_spent_model_refuses(llama):
    served = llama.served()
    with served.adapters.rows(["attn", None]):
        served.adapters.unload("attn")
        with pytest.raises(errors.ConfigError, match="in flight"):
            served.unwrap()
    served.unwrap()
    for use in (
        lambda: served(IDS),
        lambda: served(IDS, adapter_names=["mlp", None]),
        lambda: served.adapters.load("x", llama.folders["attn"]),
    ):
        with pytest.raises(errors.ConfigError, match="unwrapped"):
            use()


def test_the_inner_model_checks_the_rows_too(llama):
    served = llama.served()
    with served.adapters.rows(["attn"] * 3), pytest.raises(errors.BatchError, match="2 rows"):
        served.model(IDS)


def test_hidden_states_asked_for_by_the_config():
    model = build("llama")
    model.config.output_hidden_states = True
    served = branchline.wrap(model, quant="fp8-static", calibration=CALIBRATION)
    assert len(served(IDS).hidden_states) == 3


def test_a_norm_that_was_patched_keeps_its_patch():
    model = build("llama")
    norm = model.model.layers[0].input_layernorm
    calls = []
    own = norm.forward
    norm.forward = lambda x: (calls.append(1), own(x))[1]
    served = branchline.wrap(model, quant="fp8-static", calibration=CALIBRATION)
    calls.clear()
    served(IDS)
    assert calls == [1]
    served.unwrap()(IDS)
    assert calls == [1, 1]


def test_injected_adapters_without_a_peft_model_are_refused(llama):
    from tests.reference import with_adapters

    inner = with_adapters(llama.plain(), llama.folders).get_base_model()
    with pytest.raises(errors.WrapError, match="injected"):
        branchline.wrap(inner)


class Experts(nn.Module):
    """Two linears over the tokens that a router gives them."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.mlp = mlp
        self.expert = nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, x.shape[-1])
        chosen = torch.zeros(flat.shape[0], dtype=torch.bool)
        chosen[0] = chosen[-1] = True
        out = torch.zeros_like(flat)
        out[chosen] = self.expert(flat[chosen])
        return self.mlp(x) + out.view_as(x)


def test_an_expert_that_sees_as_many_tokens_as_rows_is_no_row_keeper():
    model = build("llama")
    model.model.layers[0].mlp = Experts(model.model.layers[0].mlp)
    served = branchline.wrap(model, quant="none")
    assert served.registry.layers["model.layers.0.mlp.expert"].row_layout == RowLayout.UNKNOWN
