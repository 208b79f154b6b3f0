"""Unquantised experts by the C kernels: what is asked for, what runs, rows, and what comes back."""

from __future__ import annotations

import copy

import pytest
import torch

import branchline
from branchline.core.errors import KernelUnavailableError
from branchline.fusion.experts import RoutedExperts
from branchline.linear.experts.kernels.each import FloatExperts
from branchline.linear.experts.kernels.native_bf16 import NativeBf16Experts
from branchline.linear.experts.layer import ExpertsLinear
from tests.helpers import same_bytes
from tests.moe.adapters import BOTH, save
from tests.moe.models import MODELS, build, token_ids

IDS = token_ids(2, 9)


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


def projections(served: branchline.ServedModel) -> list[ExpertsLinear]:
    return [layer for layer in served.registry if isinstance(layer, ExpertsLinear)]


def experts_of(served: branchline.ServedModel) -> RoutedExperts:
    return next(m for m in served.model.modules() if isinstance(m, RoutedExperts))


@pytest.mark.parametrize("kind", sorted(MODELS))
def test_every_layout_is_served_and_comes_back_to_the_bit(kind):
    model = MODELS[kind]()
    state, parameters = copy.deepcopy(model.state_dict()), dict(model.named_parameters())
    strides = {name: parameter.stride() for name, parameter in parameters.items()}
    ours = branchline.wrap(model, quant="none", float_kernel="native")
    layers = projections(ours)
    assert layers
    assert {type(layer.kernel) for layer in layers} == {NativeBf16Experts}
    logits = ours(IDS).logits
    for layer in layers:
        name = layer.name.rpartition(".")[2]
        assert layer.original.get_parameter(name).untyped_storage().nbytes() == 0
        # Panels of 64 channels, which these shapes fill: no byte lies twice.
        size = layer.experts * layer.in_features * layer.out_features * 2
        assert layer.kernel.weight_bytes == size
    assert ours.unwrap() is model
    assert {n: id(p) for n, p in model.named_parameters()} == {
        n: id(p) for n, p in parameters.items()
    }
    for name, value in model.state_dict().items():
        assert same_bytes(value, state[name]), name
    assert {n: p.stride() for n, p in model.named_parameters()} == strides
    # Each layer's rounding differs from torch's; a router may choose otherwise for a near tie.
    theirs = model(IDS).logits.float()
    assert (logits.float() - theirs).norm() <= 0.03 * theirs.norm()


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
def test_a_row_has_the_same_bytes_among_any_number_of_tokens(kind):
    """I7, of unquantised experts; torch's matmuls do not promise it."""
    served = branchline.wrap(MODELS[kind](), quant="none", float_kernel="native")
    experts = experts_of(served)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(67, experts.form.hidden, generator=generator).bfloat16()
    weights, index = torch.rand(67, 4, generator=generator).topk(2, -1)
    whole = experts(x, index, weights)
    for begin, end in ((0, 1), (3, 4), (5, 22), (30, 67)):
        some = slice(begin, end)
        assert same_bytes(experts(x[some], index[some], weights[some]), whole[some])


def test_the_audit_shows_it_and_why_it_was_not_taken():
    report = branchline.wrap(MODELS["mixtral"](), quant="none", float_kernel="auto").audit()
    (found,) = [kernel for kernel in report.kernels if kernel.experts]
    assert (found.name, found.linears, found.rejected) == ("native-bf16", 4, ())
    float32 = build("mixtral", dtype=torch.float32)
    report = branchline.wrap(float32, quant="none", float_kernel="auto").audit()
    (found,) = [kernel for kernel in report.kernels if kernel.experts]
    assert found.name == "float"
    assert [r.kernel for r in found.rejected] == ["native-bf16"]
    assert "float32" in found.rejected[0].reason
    plain = branchline.wrap(MODELS["mixtral"](), quant="none").audit()
    (found,) = [kernel for kernel in plain.kernels if kernel.experts]
    assert (found.name, found.rejected) == ("float", ())


def test_native_experts_that_cannot_be_served_are_refused_by_name():
    model = build("mixtral", dtype=torch.float32)
    experts, wanted = model.model.layers[0].mlp.experts, model(IDS).logits
    settings = {"quantize_lm_head": True, "ignore": ["*.experts.down_proj"]}
    with pytest.raises(
        KernelUnavailableError, match=r"layers\.0\.mlp\.experts\.down_proj.*float32.*auto"
    ):
        branchline.wrap(model, quant="fp8-dynamic", float_kernel="native", **settings)
    assert model.model.layers[0].mlp.experts is experts
    assert same_bytes(model(IDS).logits, wanted)


def test_experts_left_unquantised_beside_quantised_ones():
    served = branchline.wrap(
        MODELS["mixtral"](), ignore=["*.experts.down_proj"], float_kernel="native"
    )
    experts = experts_of(served)
    assert experts.up.kernel.contract.key is not None
    assert isinstance(experts.down.kernel, NativeBf16Experts)
    assert torch.isfinite(served(IDS).logits).all()
    model = served.unwrap()
    assert same_bytes(
        model.model.layers[0].mlp.experts.down_proj,
        MODELS["mixtral"]().model.layers[0].mlp.experts.down_proj,
    )


def test_weights_that_two_modules_have_stay_and_count_twice():
    model = MODELS["mixtral"]()
    first, second = (layer.mlp.experts for layer in model.model.layers)
    second.down_proj = first.down_proj
    wanted = model(IDS).logits.float()
    served = branchline.wrap(model, quant="none", float_kernel="native")
    size = first.down_proj.nbytes
    assert size > 0
    downs = [layer for layer in projections(served) if layer.name.endswith("down_proj")]
    assert [layer.kernel.weight_bytes for layer in downs] == [2 * size, 2 * size]
    assert (served(IDS).logits.float() - wanted).norm() <= 0.03 * wanted.norm()
    assert served.unwrap().model.layers[0].mlp.experts.down_proj is second.down_proj


def test_adapters_rows_and_base_rows_keep_their_bytes(tmp_path):
    folder = save(tmp_path, "mixtral", BOTH, ["q_proj"])
    outs = {}
    for choice in ("torch", "native"):
        served = branchline.wrap(
            MODELS["mixtral"](), quant="none", max_loras=2, float_kernel=choice
        )
        served.adapters.load("one", folder)
        outs[choice] = served(IDS, adapter_names=["one", None]).logits.float()
        base = served(IDS).logits.float()
        assert torch.equal(outs[choice][1], base[1])
        assert (outs[choice][0] - base[0]).norm() > 0.05 * base[0].norm()
    error = (outs["native"] - outs["torch"]).norm()
    assert error <= 0.05 * outs["torch"].norm()


def test_float_is_only_what_torch_multiplies():
    served = branchline.wrap(MODELS["mixtral"](), quant="none")
    assert {type(layer.kernel) for layer in projections(served)} == {FloatExperts}
