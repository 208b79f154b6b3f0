"""Unquantised linears by the C kernels: what is asked for, what runs, and what comes back."""

from __future__ import annotations

import pytest
import torch

import branchline
from branchline.core.errors import ConfigError, KernelUnavailableError
from branchline.linear.kernels.float import FloatLinear
from branchline.linear.kernels.native_bf16 import NativeBf16Linear
from branchline.serving.serve_config import EngineConfig, ServeConfig
from tests.models import TARGETS, build, save_adapter, token_ids

HEAD = "lm_head"
DOWN = "model.layers.0.mlp.down_proj"


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


def kernels(served: branchline.ServedModel) -> dict[str, type]:
    return {layer.name: type(layer.kernel) for layer in served.registry}


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    """Up to a bfloat16 rounding or two of each layer."""
    assert got.shape == wanted.shape
    assert (got.float() - wanted.float()).abs().max() <= wanted.float().abs().max() * 2.0**-5


def test_only_a_server_asks_for_it_unasked():
    assert branchline.WrapConfig().float_kernel == "torch"
    assert EngineConfig().float_kernel == ServeConfig().float_kernel == "auto"
    assert set(kernels(branchline.wrap(build("llama"), quant="none")).values()) == {FloatLinear}
    with pytest.raises(ConfigError, match="float_kernel='fast'"):
        branchline.wrap(build("llama"), float_kernel="fast")


@pytest.mark.parametrize("family", sorted(TARGETS))
@pytest.mark.parametrize("quant", ["none", "fp8-dynamic"])
def test_a_wrapped_model_computes_the_same_and_comes_back_to_the_bit(family, quant):
    model = build(family)
    before, parameters = weights(model), dict(model.named_parameters())
    ids = token_ids(2, 7)
    plain = model(ids).logits
    wanted = branchline.wrap(model, quant=quant)
    expected = wanted(ids).logits
    wanted.unwrap()
    served = branchline.wrap(model, quant=quant, float_kernel="native")
    chosen = kernels(served)
    assert chosen[HEAD] is NativeBf16Linear
    assert FloatLinear not in chosen.values()
    if quant == "none":
        assert set(chosen.values()) == {NativeBf16Linear}
    assert_close(served(ids).logits, expected)
    back = served.unwrap()
    assert back is model
    assert torch.equal(back(ids).logits, plain)
    for name, value in weights(model).items():
        assert torch.equal(value.view(torch.uint8), before[name].view(torch.uint8)), name
    now = dict(model.named_parameters())
    assert {n: id(p) for n, p in now.items()} == {n: id(p) for n, p in parameters.items()}


def test_memory_is_not_doubled_and_a_tied_head_says_that_it_is():
    model = build("llama")
    head = model.lm_head.weight
    served = branchline.wrap(model, float_kernel="native")
    assert head.untyped_storage().nbytes() == 0
    assert served.registry.layers[HEAD].kernel.weight_bytes == 256 * 64 * 2
    tied = build("gemma3")
    table = tied.get_input_embeddings().weight
    assert tied.lm_head.weight is table
    before = table.clone()
    served = branchline.wrap(tied, float_kernel="native")
    assert torch.equal(tied.get_input_embeddings().weight, before)
    kernel = served.registry.layers[HEAD].kernel
    assert isinstance(kernel, NativeBf16Linear)
    assert kernel.weight_bytes == 2 * 256 * 64 * 2
    assert kernel.float_weight() is table


def test_the_audit_shows_it_and_why_it_was_not_taken():
    native = branchline.wrap(build("llama"), float_kernel="auto").audit()
    (found,) = [kernel for kernel in native.kernels if kernel.name == "native-bf16"]
    assert (found.linears, found.weight_bytes, found.rejected) == (1, 256 * 64 * 2, ())
    assert "native-bf16" in str(native)
    float32 = branchline.wrap(build("llama", torch.float32), float_kernel="auto").audit()
    (found,) = [kernel for kernel in float32.kernels if kernel.name == "float"]
    assert [r.kernel for r in found.rejected] == ["native-bf16"]
    assert "float32" in found.rejected[0].reason
    plain = branchline.wrap(build("llama")).audit()
    assert [k.rejected for k in plain.kernels if k.name == "float"] == [()]


def test_what_is_forced_and_cannot_run_raises_and_leaves_the_model_alone():
    model = build("llama", torch.float32)
    before, names = weights(model), [type(module) for module in model.modules()]
    with pytest.raises(KernelUnavailableError, match=r"lm_head.*float32.*--float-kernel auto"):
        branchline.wrap(model, float_kernel="native")
    assert [type(module) for module in model.modules()] == names
    for name, value in weights(model).items():
        assert torch.equal(value, before[name])


def test_a_weight_that_the_model_reads_stays_with_it(monkeypatch):
    model = build("llama")
    forward = type(model.model).forward

    def reading(self, *args, **kwargs):
        self.layers[0].mlp.down_proj.weight.sum()
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(type(model.model), "forward", reading)
    served = branchline.wrap(model, quant="none", float_kernel="auto")
    kernel = served.registry.layers[DOWN].kernel
    assert isinstance(kernel, FloatLinear)
    assert "reads the weight itself" in kernel.rejected[0].reason
    assert kernels(served)[HEAD] is NativeBf16Linear
    served.unwrap()
    with pytest.raises(KernelUnavailableError, match="reads the weight itself"):
        branchline.wrap(model, quant="none", float_kernel="native")


@pytest.fixture
def adapters(tmp_path):
    model = build("llama")
    everywhere = [*TARGETS["llama"][0], *TARGETS["llama"][1], HEAD]
    return {
        name: save_adapter(model, tmp_path / name, everywhere, rank=rank, seed=rank)
        for name, rank in (("one", 4), ("two", 8))
    }


@pytest.mark.parametrize("policy", ["dynamic", "absorbed"])
def test_branches_read_raw_and_rows_keep_their_bytes(adapters, policy):
    ids = token_ids(3, 6)
    outs = {}
    for choice in ("torch", "native"):
        served = branchline.wrap(build("llama"), quant="none", policy=policy, float_kernel=choice)
        for name, folder in adapters.items():
            served.adapters.load(name, folder)
        outs[choice] = served(ids, adapter_names=["one", None, "two"]).logits
        base = served(ids).logits
        assert torch.equal(outs[choice][1], base[1])
        for row in (0, 2):
            assert (outs[choice][row].float() - base[row].float()).abs().max() > 0.01
    assert_close(outs["native"], outs["torch"])


def test_another_scheme_and_back(adapters):
    served = branchline.wrap(build("llama"), quant="none", float_kernel="native")
    ids = token_ids(2, 5)
    before = served(ids).logits
    served.requantize(DOWN, "none")
    assert torch.equal(served(ids).logits, before)
    weight = served.registry.layers[DOWN].kernel.unpacked()
    served.requantize(DOWN, "fp8-dynamic")
    layer = served.registry.layers[DOWN]
    # Its values are the model's again, for whoever quantises it next.
    assert torch.equal(layer.original.weight, weight)
    assert not torch.equal(served(ids).logits, before)
    served.requantize(DOWN, "none")
    assert isinstance(layer.kernel, NativeBf16Linear)
    assert torch.equal(served(ids).logits, before)
    model = served.unwrap()
    assert torch.equal(model.get_submodule(DOWN).weight, weight)


def test_a_failed_change_of_scheme_loses_nothing():
    served = branchline.wrap(
        build("llama"), quant="none", float_kernel="native", linear_kernel="native-fp8"
    )
    ids = token_ids(2, 5)
    before = served(ids).logits
    with pytest.raises(KernelUnavailableError, match="stays unquantised"):
        served.requantize(DOWN, "fp8-weight-only")
    assert torch.equal(served(ids).logits, before)
    kernel = served.registry.layers[DOWN].kernel
    assert isinstance(kernel, NativeBf16Linear)
    assert served.registry.layers[DOWN].original.weight.numel() == 0


def test_parameters_are_counted_as_before_the_wrap():
    counts = set()
    for choice in ("torch", "native"):
        served = branchline.wrap(build("llama"), quant="none", float_kernel=choice)
        counts.add(served.get_model_status().total_params)
    assert counts == {sum(p.numel() for p in build("llama").parameters())}


def test_a_compiled_graph_gives_the_same_bytes(adapters):
    torch._dynamo.reset()
    served = branchline.wrap(build("llama"), quant="none", float_kernel="native")
    served.adapters.load("one", adapters["one"])
    compiled = torch.compile(served.model, fullgraph=True, dynamic=True, backend="aot_eager")
    ids = token_ids(2, 7)
    for names in ([None, None], ["one", None]):
        with served.adapters.rows(names):
            assert torch.equal(compiled(ids).logits, served.model(ids).logits)
    torch._dynamo.reset()
