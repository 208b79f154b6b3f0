"""Wrapped models whose forwards are easy to get wrong, and the sites that are found in them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, NemotronConfig, NemotronForCausalLM

from branchline import wrap
from branchline.core.oracle import NormSemantics
from branchline.fusion.identify import all_encodings, same_bytes
from tests.fusion.blocks import (
    DTYPE,
    K,
    block,
    by_hand,
    clipped,
    limited,
    limited_after,
    multiplied,
)

# --- whole models ------------------------------------------------------------------------------
# Nothing is quantised here: a wrapped model must give the bytes of the plain one.


def example() -> torch.Tensor:
    return (torch.randn(2, 3, K, generator=torch.Generator().manual_seed(1)) * 10).to(DTYPE)


class Holder(nn.Module):
    """A model that calls a block: what a model itself computes is not recorded, its blocks are."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x, **arguments):
        return self.inner(x, **arguments)


def served_as_plain(module: nn.Module, **arguments: object) -> None:
    is_served_as_plain(module, **arguments)
    is_served_as_plain(Holder(module), **arguments)


def is_served_as_plain(module: nn.Module, **arguments: object) -> None:
    x = example()
    plain = module(x.clone(), **arguments)
    served = wrap(module, quant="none", max_loras=0, example={"x": x})
    assert torch.equal(served(x.clone(), **arguments), plain)
    module = served.unwrap()
    assert torch.equal(module(x.clone(), **arguments), plain)


def clamp_statement(self, x):
    gate, up = self.gate(x), self.up(x)
    up.clamp_(max=0.5)
    return self.down(self.act(gate) * up)


def scale_statement(self, x):
    h = self.act(self.up(x))
    h.mul_(4)
    return self.down(h)


def act_statement(self, x):
    h = self.up(x)
    self.relu_in_place(h)
    return self.down(h)


def function_statement(self, x):
    gate, up = self.gate(x), self.up(x)
    F.relu(up, inplace=True)
    return self.down(self.act(gate) * up)


def out_argument(self, x):
    gate, up = self.gate(x), self.up(x)
    h = torch.empty_like(gate)
    torch.mul(self.act(gate), up, out=h)
    return self.down(h)


def read_again_after_in_place(self, x):
    up = self.up(x)
    return self.down(self.relu_in_place(up)) + up[..., :K]


def asks_for_a_tensor(self, x):
    h = self.act(self.up(x))
    if isinstance(h, torch.Tensor):
        h = h * 3
    return self.down(h)


def optional_argument(self, x, scale=None):
    h = self.act(self.up(x))
    if scale is not None:
        h = h * scale
    return self.down(h)


def nested_container(self, x):
    return self.down(self.inner(x))


def three_dimensions(self, x):
    return self.down(F.silu(self.up(x)).transpose(1, 2).transpose(1, 2))


def matrix_product(self, x):
    return self.down(torch.matmul(self.up(x) @ self.gate(x).mT, self.up(x)))


def relu6_in_place(self, x):
    return self.down(F.relu6(self.up(x), inplace=True))


def broadcast_parameter(self, x):
    return self.down(self.act(self.up(x)) * self.offset)


def by_keyword(self, x):
    return self.down(input=self.act(self.up(x)))


def dtype_of_the_weight(self, x):
    return self.down(self.act(self.up(x)).to(self.down.weight.dtype))


def keeps_what_it_computed(self, x):
    self.last = self.act(self.up(x))
    return self.down(self.last)


def new_gelu(self, x):
    return self.down(self.new_gelu(self.up(x)))


def gated_custom(self, x):
    return self.down(self.up(x) * self.new_gelu(self.gate(x)))


EASY_TO_GET_WRONG = [
    limited,
    limited_after,
    multiplied,
    clipped,
    by_hand,
    new_gelu,
    gated_custom,
    clamp_statement,
    scale_statement,
    act_statement,
    function_statement,
    out_argument,
    read_again_after_in_place,
    asks_for_a_tensor,
    optional_argument,
    nested_container,
    three_dimensions,
    matrix_product,
    relu6_in_place,
    broadcast_parameter,
    by_keyword,
    dtype_of_the_weight,
    keeps_what_it_computed,
]


@pytest.mark.parametrize("forward", EASY_TO_GET_WRONG, ids=lambda f: f.__name__)
def test_a_wrapped_model_computes_what_it_did(forward):
    served_as_plain(block(forward))


def sites(forward) -> dict[str, str]:
    served = wrap(Holder(block(forward)), quant="none", max_loras=0, example={"x": example()})
    return {site.facts.name: str(site.facts.semantics) for site in served.discovery.sites}


@pytest.mark.parametrize(
    ("forward", "name", "text"),
    [
        (limited, "silu_mul[limit=2]", "silu_mul[limit=2]"),
        (multiplied, "silu_mul[multiplier=0.3]", "silu_mul[multiplier=0.3]"),
        (limited_after, "act_mul", "custom-"),
        (new_gelu, "new_gelu", "custom-"),
        (gated_custom, "new_gelu_mul", "custom-"),
        (by_hand, "mul_1", "custom-"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_sites_have_names_that_can_be_read(forward, name, text):
    ((found, semantics),) = sites(forward).items()
    assert found == f"inner.{name}"
    assert semantics.startswith(text)
    assert sites(forward) == {found: semantics}, "not the same each time"


def packed_gelu(self, x):
    gate, up = self.gate_up(x).chunk(2, dim=-1)
    return self.down(self.gelu(gate) * up)


def test_a_site_computes_gelu_by_its_definition_wherever_its_input_lies():
    # torch's own GELU of a half of a packed tensor differs on some encodings.
    served = wrap(Holder(block(packed_gelu)), quant="none", max_loras=0, example={"x": example()})
    (site,) = served.discovery.sites
    gate = all_encodings(DTYPE).view(256, 256)
    strided = torch.cat([gate, gate], -1)[:, 256:]
    up = torch.ones_like(gate)
    assert str(site.facts.semantics) == "gelu_erf_mul"
    assert bool(same_bytes(site.compute_raw(strided, up), site.compute_raw(gate, up)).all())


@pytest.mark.parametrize(
    ("forward", "change"),
    [
        (limited, lambda module: setattr(module, "limit", 0.1)),
        (multiplied, lambda module: setattr(module, "factor", 3.0)),
        (clipped, lambda module: setattr(module.clipped, "top", 0.1)),
    ],
    ids=lambda value: getattr(value, "__name__", "change"),
)
def test_a_setting_that_changes_after_wrapping_is_obeyed(forward, change):
    module = block(forward)
    served = wrap(Holder(module), quant="none", max_loras=0, example={"x": example()})
    x = example()
    before = served(x)
    change(module)
    after = served(x)
    assert not torch.equal(after, before)
    (site,) = served.discovery.sites
    assert any("settings" in reason for reason in site.counters.fallbacks())
    assert torch.equal(served.unwrap()(x), after)


def test_an_optional_argument_is_still_obeyed():
    served_as_plain(block(optional_argument), scale=3.0)


def test_what_a_forward_keeps_is_what_it_computed():
    module = block(keeps_what_it_computed)
    served = wrap(module, quant="none", max_loras=0, example={"x": example()})
    x = example() * 2
    served(x)
    assert isinstance(module.last, torch.Tensor)
    assert torch.equal(module.last, F.silu(module.up(x)))


def test_a_forward_that_was_patched_on_the_object_is_kept():
    module = block(lambda self, x: self.down(self.act(self.up(x))))
    plain = module.forward
    module.forward = patched = lambda x: plain(x) * 2
    served_as_plain(module)
    assert vars(module)["forward"] is patched


def test_a_model_of_nothing_but_linears_wraps():
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(K, K), nn.Linear(K, K)

        def forward(self, x):
            return self.down(F.silu(self.up(x)))

    served_as_plain(Bare().to(DTYPE).eval())


# --- models of transformers ---------------------------------------------------------------------

TINY = {"vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def gpt2() -> nn.Module:
    return GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=2, n_positions=32, **TINY))


def nemotron() -> nn.Module:
    return NemotronForCausalLM(
        NemotronConfig(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            **TINY,
        )
    )


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (
            gpt2,
            {
                "transformer.h.0.mlp.act": "custom",
                "transformer.h.0.ln_1": "layer_norm",
                "transformer.h.0.ln_2": "layer_norm",
            },
        ),
        (
            nemotron,
            {
                "model.layers.0.mlp.relu2": "relu2",
                "model.layers.0.input_layernorm": "layer_norm[1p]",
                "model.layers.0.post_attention_layernorm": "layer_norm[1p]",
            },
        ),
    ],
    ids=["gpt2", "nemotron"],
)
def test_models_with_layer_norms_and_their_own_activations(make, expected):
    torch.manual_seed(0)
    model = make().to(DTYPE).eval()
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if name.endswith(".bias") or "ln_" in name or "norm" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator).to(DTYPE) / 4
    ids = torch.randint(3, 64, (2, 7), generator=generator)
    plain = model(ids).logits
    served = wrap(model, quant="none", max_loras=0, example={"input_ids": ids})
    found = {site.facts.name: site.facts.semantics for site in served.discovery.sites}
    assert {name: s.family for name, s in found.items()} == expected
    assert all(s.bias for s in found.values() if isinstance(s, NormSemantics))
    # The model's own float32 sums differ in their last bits.
    assert (served(ids).logits - plain).abs().max() <= 0.02 * plain.abs().max()
