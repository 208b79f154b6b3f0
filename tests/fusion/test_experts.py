"""Experts against transformers' own, by form, scheme and routing; and what changes later."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from branchline.core.route import Route
from branchline.core.scheme import SCHEMES
from branchline.linear.contract import InputContract
from branchline.linear.quantized_weight import code_values
from branchline.linear.quantizers import quantize_input
from tests.helpers import same_bytes
from tests.moe.models import MODELS
from tests.moe.world import World, ran, untouched

KINDS = list(MODELS)
QUANTIZED = [name for name in SCHEMES if SCHEMES[name].input is not None]


class OnGrid(TorchFunctionMode):
    """Rounds what is multiplied with one weight, as its kernel would."""

    def __init__(self, weight: torch.Tensor, contract: InputContract) -> None:
        super().__init__()
        self._storage = weight.untyped_storage().data_ptr()
        self._contract = contract
        self.seen = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in (F.linear, torch.Tensor.matmul, torch.Tensor.__matmul__):
            x, weight, *others = args
            if weight.untyped_storage().data_ptr() == self._storage:
                self.seen += 1
                args = (on_grid(x, self._contract), weight, *others)
        return func(*args, **(kwargs or {}))


def on_grid(x: torch.Tensor, contract: InputContract) -> torch.Tensor:
    """What the codes of `x` (M, K) stand for."""
    assert contract.key is not None
    plain = InputContract(contract.key.plain(), contract.scale, contract.global_scale)
    made = quantize_input(x, plain, "a test")
    values = code_values(made.codes)[:, : x.shape[1]]
    scale = made.scale.float()
    if made.global_scale is not None:
        scale = scale * made.global_scale.float()
    if scale.dim() == 2 and scale.shape[1] > 1:
        scale = scale.repeat_interleave(-(-x.shape[1] // scale.shape[1]), 1)[:, : x.shape[1]]
    return (values * scale).to(x.dtype)


def eager(world: World, x, index, weights) -> torch.Tensor:
    """transformers' eager experts on what our codes stand for."""
    routed, form = world.experts, world.experts.form
    double = copy.deepcopy(world.original)
    for layer, projection in ((routed.up, form.up_name), (routed.down, form.down_name)):
        values = layer.kernel.dequantized()
        if form.interleaved and projection == form.up_name:
            values = torch.stack(values.chunk(2, 1), 2).flatten(1, 2)
        values = values.mT.contiguous() if form.transposed else values
        setattr(double, projection, nn.Parameter(values.to(x.dtype)))
    forward = type(double).forward.__wrapped__
    if routed.up.kernel.contract.key is not None:
        x = on_grid(x, routed.up.kernel.contract)
    contract = routed.down.kernel.contract
    if contract.key is None:
        return forward(double, x, index, weights)
    with OnGrid(double.down_proj, contract) as grid:
        out = forward(double, x, index, weights)
    assert grid.seen or not len(x)
    return out


def close(ours: torch.Tensor, wanted: torch.Tensor, share: float) -> bool:
    assert ours.shape == wanted.shape
    largest = wanted.abs().max().item() if wanted.numel() else 0.0
    return bool(((ours - wanted).abs() <= share * largest).all())


# --- equal to transformers ---------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_unquantised_experts_are_the_eager_ones(kind):
    world = untouched(kind)
    x, (index, weights) = world.tokens(11), world.routing(11, 2)
    assert close(world.experts(x, index, weights), eager(world, x, index, weights), 1e-5)


@pytest.mark.parametrize("scheme", [*QUANTIZED, "fp8-weight-only"])
@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss", "nemotron_h"])
def test_quantised_experts_are_the_eager_ones_on_the_codes_values(kind, scheme):
    world = untouched(kind, scheme)
    x, (index, weights) = world.tokens(11), world.routing(11, 2)
    ours = world.experts(x, index, weights)
    # A sum in another order may move an activation to the next code: a sixteenth of one column.
    assert close(ours, eager(world, x, index, weights), 0.01)
    assert not close(ours, torch.zeros_like(ours), 0.5)


@pytest.mark.parametrize("top_k", [1, 2, 8])
@pytest.mark.parametrize("scheme", [None, "fp8-block"])
def test_any_number_of_choices(top_k, scheme):
    world = untouched("deepseek_v3", scheme)
    x, (index, weights) = world.tokens(9), world.routing(9, top_k)
    ours = world.experts(x, index, weights)
    assert close(ours, eager(world, x, index, weights), 0.01 if scheme else 1e-5)


@pytest.mark.parametrize("scheme", [None, "fp8-dynamic", "fp8-block"])
@pytest.mark.parametrize("tokens", [0, 1, 40])
def test_experts_without_a_token_and_all_tokens_on_one(scheme, tokens):
    world = untouched("mixtral", scheme)
    x = world.tokens(tokens)
    index, weights = torch.full((tokens, 1), 2), torch.rand(tokens, 1)
    ours = world.experts(x, index, weights)
    assert ours.shape == x.shape
    assert close(ours, eager(world, x, index, weights), 0.01 if scheme else 1e-5)


def test_a_row_has_the_same_bytes_whoever_shares_its_experts():
    world = World("mixtral", "fp8-block", dtype=torch.bfloat16)
    x, (index, weights) = world.tokens(33), world.routing(33, 2)
    together = world.experts(x, index, weights)
    for row in (0, 7, 32):
        alone = world.experts(x[row : row + 1], index[row : row + 1], weights[row : row + 1])
        assert same_bytes(alone[0], together[row])


# --- what changes after wrapping ---------------------------------------------------------------


def test_an_activation_that_is_replaced_later_is_computed_as_it_is_then():
    world = World("mixtral", "fp8-dynamic")
    x, (index, weights) = world.tokens(5), world.routing(5, 2)
    before = world.experts(x, index, weights)
    assert ran(world) == {Route.FUSED: 1}
    world.experts.act_fn = nn.Tanh()
    after = world.experts(x, index, weights)
    assert ran(world) == {Route.FUSED: 1, Route.UNFUSED: 1}
    assert not same_bytes(before, after)
    assert isinstance(world.original.act_fn, nn.Tanh)
    assert close(after, eager(world, x, index, weights), 0.01)


def test_a_limit_that_is_changed_later_counts():
    world = World("gpt_oss", "fp8-dynamic", dtype=torch.bfloat16)
    x, (index, weights) = world.tokens(5) * 8, world.routing(5, 2)
    before = world.experts(x, index, weights)
    world.experts.limit = 0.25
    assert world.original.limit == 0.25
    after = world.experts(x, index, weights)
    assert not same_bytes(before, after)
    assert close(after, eager(world, x, index, weights), 0.03)
    assert world.experts.site.counters.fallbacks() == {
        "the settings of the experts were changed after wrapping": 1
    }


def test_what_model_code_asks_of_its_experts():
    world = World("gpt_oss", "fp8-dynamic")
    assert world.experts.num_experts == 4
    assert world.experts.alpha == world.original.alpha
    assert not hasattr(world.experts, "no_such_setting")


@pytest.mark.parametrize("place", ["act_fn", "down_proj", "gate_up_proj", ""])
def test_a_foreign_hook_sees_raw_activations(place):
    world = World("mixtral", "fp8-dynamic")
    x, (index, weights) = world.tokens(5), world.routing(5, 2)
    before = world.experts(x, index, weights)
    seen = []
    hook = lambda module, args, output: seen.append(args[0])  # noqa: E731
    handle = world.experts.get_submodule(place).register_forward_hook(hook)
    hooked = world.experts(x, index, weights)
    handle.remove()
    after = world.experts(x, index, weights)
    assert len(seen) == 1
    assert seen[0].dtype == torch.float32
    assert same_bytes(before, hooked)
    assert same_bytes(before, after)
    expected = (
        {Route.FUSED: 3} if place in ("", "gate_up_proj") else {Route.FUSED: 2, Route.UNFUSED: 1}
    )
    assert ran(world) == expected
