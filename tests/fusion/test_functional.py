from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from branchline import maybe_fused_act_quant
from branchline.core.quant_key import FP8_DYNAMIC_TOKEN, FP8_STATIC_TENSOR
from branchline.core.quantized_activation import QuantizedActivation
from branchline.linear.batch import BarePlan, Batch, BatchScope
from branchline.linear.contract import InputContract, InputScale
from branchline.linear.kernels.emulated import EmulatedLinear
from branchline.linear.kernels.float import FloatLinear
from branchline.linear.parts import Part
from branchline.linear.quantized_weight import QuantizedWeight
from branchline.linear.registry import LayerRegistry
from branchline.linear.routed import RoutedLinear

K, N = 32, 8


def wrapped(key=FP8_STATIC_TENSOR, dtype: torch.dtype = torch.bfloat16):
    registry = LayerRegistry()
    if key is None:
        kernel = FloatLinear(nn.Linear(K, N, dtype=dtype))
    else:
        weight = torch.randn(N, K, generator=torch.Generator().manual_seed(0))
        scale = InputScale.checked(0.02, "down") if key.static else None
        kernel = EmulatedLinear(
            QuantizedWeight.from_float(weight, "down"), None, InputContract(key, scale)
        )
    layer = RoutedLinear("down", 0, kernel, registry, dtype, torch.device("cpu"))
    registry.add(layer)
    return layer, registry


def tensors(shape=(2, 5, K), dtype: torch.dtype = torch.bfloat16):
    generator = torch.Generator().manual_seed(4)
    gate = torch.randn(shape, generator=generator) * 3
    up = torch.randn(shape, generator=generator) * 3
    gate.view(-1)[:4] = torch.tensor([float("inf"), float("nan"), -0.0, -6e-8])
    return gate.to(dtype), up.to(dtype)


def same_output(layer: RoutedLinear, fused, raw: torch.Tensor) -> None:
    assert torch.equal(layer(fused).nan_to_num(999), layer(raw).nan_to_num(999))


ACTS = [nn.SiLU(), F.silu, nn.GELU(approximate="tanh"), F.relu, torch.relu, nn.Identity()]


@pytest.mark.parametrize("act", ACTS, ids=lambda f: getattr(f, "__name__", str(f)))
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("shape", [(2, 5, K), (7, K), (0, K), (1, K)], ids=str)
def test_same_bytes_after_the_linear_fused_or_not(act, gated, shape):
    layer, _ = wrapped()
    gate = (torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 3).bfloat16()
    up = gate.flip(-1)
    out = maybe_fused_act_quant(act, (gate, up) if gated else gate, layer)
    same_output(layer, out, act(gate) * up if gated else act(gate))


def relu2(x: torch.Tensor) -> torch.Tensor:
    return F.relu(x).square()


@pytest.mark.parametrize("key", [FP8_STATIC_TENSOR, FP8_DYNAMIC_TOKEN], ids=str)
@pytest.mark.parametrize("gated", [False, True])
def test_fused_where_nothing_reads_raw(gated, key):
    layer, _ = wrapped(key)
    gate, up = tensors()
    act = nn.SiLU() if gated else relu2
    out = maybe_fused_act_quant(act, (gate, up) if gated else gate, layer)
    assert isinstance(out, QuantizedActivation)
    assert out.raw is None
    assert out.quant_key == key
    if key.static:
        assert torch.equal(out.scale, layer.kernel.contract.scale.value)
    assert out.shape == gate.shape
    assert out.dtype == gate.dtype
    assert "silu_mul" in out.producer or not gated
    same_output(layer, out, act(gate) * up if gated else act(gate))


def plan(branched: bool) -> BarePlan:
    return BarePlan((), (branched,), (int(branched) * Part.PLAIN,))


def test_raw_where_a_branch_is_live():
    layer, registry = wrapped()
    gate, up = tensors()
    slots = torch.tensor([[0, -1]], dtype=torch.int32)
    with BatchScope(registry.owner, Batch(plan(True), 2, slots)):
        out = maybe_fused_act_quant(F.silu, (gate, up), layer)
        assert isinstance(out, torch.Tensor)
        assert torch.equal(out.nan_to_num(9), (F.silu(gate) * up).nan_to_num(9))
    with BatchScope(registry.owner, Batch(plan(False), 2, slots.fill_(-1))):
        assert isinstance(maybe_fused_act_quant(F.silu, (gate, up), layer), QuantizedActivation)


def test_raw_while_a_hook_is_on_the_linear():
    layer, _ = wrapped()
    pair = tensors()
    seen = []
    with layer.register_forward_pre_hook(lambda module, args: seen.append(args[0])):
        layer(maybe_fused_act_quant(F.silu, pair, layer))
    assert isinstance(seen[0], torch.Tensor)
    assert isinstance(maybe_fused_act_quant(F.silu, pair, layer), QuantizedActivation)


def test_raw_while_a_global_hook_is_there():
    layer, _ = wrapped()
    with nn.modules.module.register_module_forward_hook(lambda *_: None):
        assert isinstance(maybe_fused_act_quant(F.silu, tensors(), layer), torch.Tensor)


def test_raw_while_a_hook_is_on_the_activation():
    layer, _ = wrapped()
    act = nn.SiLU()
    maybe_fused_act_quant(act, tensors(), layer)
    seen = []
    with act.register_forward_hook(lambda module, args, output: seen.append(output)):
        out = maybe_fused_act_quant(act, tensors(), layer)
    assert isinstance(out, torch.Tensor)
    assert len(seen) == 1


def test_raw_for_a_linear_that_takes_no_codes():
    layer, _ = wrapped(None)
    gate, up = tensors()
    out = maybe_fused_act_quant(F.silu, (gate, up), layer)
    assert torch.equal(out.nan_to_num(9), (F.silu(gate) * up).nan_to_num(9))


CUSTOM = {
    "quick gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "clamped": lambda x: F.silu(x).clamp(max=7),
    "mish": nn.Mish(),
}
REFUSED = {
    "relu6 in place": lambda x: F.relu6(x, inplace=True),
    "clamped in place": lambda x: F.silu(x.clamp_(max=1)),
    "softmax": lambda x: x.softmax(-1),
    "with weights": nn.PReLU(dtype=torch.bfloat16),
}


@pytest.mark.parametrize("name", CUSTOM)
@pytest.mark.parametrize("gated", [False, True])
def test_an_activation_without_a_name_is_fused_by_its_table(name, gated):
    layer, _ = wrapped()
    gate, up = tensors()
    out = maybe_fused_act_quant(CUSTOM[name], (gate, up) if gated else gate, layer)
    assert isinstance(out, QuantizedActivation)
    same_output(layer, out, CUSTOM[name](gate) * up if gated else CUSTOM[name](gate))


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("gated", [False, True])
def test_what_is_no_activation_falls_back_to_itself(name, gated):
    layer, _ = wrapped()
    gate, up = tensors()
    out = maybe_fused_act_quant(REFUSED[name], (gate.clone(), up) if gated else gate.clone(), layer)
    expected = REFUSED[name](gate.clone())
    expected = expected * up if gated else expected
    assert isinstance(out, torch.Tensor)
    assert torch.equal(out.nan_to_num(9), expected.nan_to_num(9))


def test_strided_halves_of_a_packed_projection():
    layer, _ = wrapped()
    packed = torch.randn(3, 4, 2 * K, generator=torch.Generator().manual_seed(8)).bfloat16()
    gate, up = packed.chunk(2, -1)
    out = maybe_fused_act_quant(nn.SiLU(), (gate, up), layer)
    assert isinstance(out, QuantizedActivation)
    same_output(layer, out, F.silu(gate) * up)


@pytest.mark.parametrize("shape", [(2, 5, 1), (5, K), (1, 1, K)], ids=str)
def test_a_broadcast_factor_gives_the_same_bytes(shape):
    layer, _ = wrapped()
    gate, _ = tensors()
    up = torch.linspace(-2, 2, torch.Size(shape).numel()).view(shape).bfloat16()
    for pair in ((gate, up), (up, gate)):
        out = maybe_fused_act_quant(nn.SiLU(), pair, layer)
        same_output(layer, out, F.silu(pair[0]) * pair[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_factor_of_another_dtype_gives_what_the_plain_product_gives(dtype):
    layer, _ = wrapped()
    gate, up = tensors()
    out = maybe_fused_act_quant(nn.SiLU(), (gate, up.to(dtype)), layer)
    raw = F.silu(gate) * up.to(dtype)
    assert out.dtype == raw.dtype
    same_output(layer, out, raw)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_dtypes_give_the_same_bytes(dtype):
    layer, _ = wrapped(dtype=dtype)
    gate, up = tensors(dtype=dtype)
    same_output(layer, maybe_fused_act_quant(F.silu, (gate, up), layer), F.silu(gate) * up)


class Limited(nn.Module):
    limit = None

    def forward(self, x):
        out = F.silu(x)
        return out if self.limit is None else out.clamp(max=self.limit)


def test_an_activation_that_changed_since_its_proof_is_not_trusted():
    layer, _ = wrapped()
    gate, up = tensors()
    act = Limited()
    maybe_fused_act_quant(act, (gate, up), layer)
    act.limit = 0.5
    same_output(layer, maybe_fused_act_quant(act, (gate, up), layer), act(gate) * up)


def test_the_proof_is_run_once_for_an_object():
    layer, _ = wrapped()
    pair = tensors()
    calls = []

    def act(x):
        calls.append(x.shape)
        return F.silu(x)

    maybe_fused_act_quant(act, pair, layer)
    before = len(calls)
    maybe_fused_act_quant(act, pair, layer)
    assert before > 0
    assert len(calls) == before


def test_more_than_a_pair_is_refused():
    layer, _ = wrapped()
    gate, up = tensors()
    with pytest.raises((TypeError, ValueError)):
        maybe_fused_act_quant(F.silu, (gate, up, up), layer)
