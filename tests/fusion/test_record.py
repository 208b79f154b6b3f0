"""Readers are found by a recorded forward, not declared (I3)."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from branchline import wrap
from branchline.core.errors import WrapError
from branchline.fusion.record import Recording, record, row_layouts
from branchline.linear.branching import RowLayout
from branchline.linear.kernels.float import FloatLinear
from branchline.linear.registry import LayerRegistry
from branchline.linear.routed import RoutedLinear

K = 16


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, K))
        self.eps = 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, K))

    def forward(self, x):
        return F.linear(x, self.weight)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = Norm()
        self.q, self.k = nn.Linear(K, K), nn.Linear(K, K)
        self.router = Router()
        self.pass_on = nn.Identity()
        self.drop = nn.Dropout(0.5)


def model(forward) -> nn.Module:
    torch.manual_seed(0)
    return type("Written", (Model,), {"forward": forward})().to(torch.bfloat16).eval()


def routed(module: nn.Module) -> nn.Module:
    registry = LayerRegistry()
    for name, child in list(module.named_children()):
        if isinstance(child, nn.Linear):
            layer = RoutedLinear(
                name,
                len(registry),
                FloatLinear(child),
                registry,
                torch.bfloat16,
                torch.device("cpu"),
            )
            registry.add(layer)
            setattr(module, name, layer)
    return module


def example(rows: int = 2, tokens: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows * 10 + tokens)
    return torch.randn(rows, tokens, K, generator=generator).bfloat16()


def recorded(forward) -> Recording:
    return record(routed(model(forward)), {"x": example()})


def the_reading(forward):
    found = [r for r in recorded(forward).readings if r.origin == "norm"]
    assert len(found) == 1
    return found[0]


def normed(rest):
    return lambda self, x: rest(self, self.norm(x))


def test_linears_are_the_only_readers_of_a_plain_norm():
    reading = the_reading(normed(lambda self, h: self.q(h) + self.k(h)))
    assert [layer.name for layer in reading.linears] == ["q", "k"]
    assert reading.others == []
    assert {"q", "k"} <= set(reading.passed)


@pytest.mark.parametrize(
    ("rest", "word"),
    [
        (lambda self, h: self.q(h) + h.view(6, K).sum(), "view"),
        (lambda self, h: self.q(h) + self.router(h).sum(), "router"),
        (lambda self, h: self.q(h) + h, "add"),
        (lambda self, h: h + self.q(h), "add"),
        (lambda self, h: self.q(h) * h[:, :1], "getitem"),
        (lambda self, h: self.q(h) + sum(h).sum(), "unbind"),
        (lambda self, h: self.q(self.drop(h)), "drop"),
        (lambda self, h: self.q(h) + torch.cat([h, h]).sum(), "cat"),
        (lambda self, h: self.q(h) + h.float().sum(), "float"),
        (lambda self, h: self.q(h) + len(h), "len"),
        (lambda self, h: self.q(h) + float(h.detach()[0, 0, 0]), "detach"),
        (lambda self, h: self.q(h) + torch.ops.aten.relu(h), "relu"),
        (lambda self, h: (self.q(h), h), "output"),
        (lambda self, h: {"a": self.q(h), "b": [h]}, "output"),
    ],
)
def test_whoever_else_reads_is_named(rest, word):
    reading = the_reading(normed(rest))
    assert any(word in other for other in reading.others), reading.others


def test_reading_shape_or_dtype_is_no_reading():
    def rest(self, h):
        rows, tokens, _ = h.shape
        assert h.ndim == h.dim() == 3
        return self.q(h).view(rows, tokens, -1).to(h.dtype).to(h.device)[: h.size(0)]

    assert the_reading(normed(rest)).others == []


def test_ops_inside_of_the_norm_are_its_making():
    reading = the_reading(normed(lambda self, h: self.q(h)))
    assert reading.others == []
    assert reading.origin == "norm"


def test_a_module_that_hands_it_on_is_passed_not_reading():
    reading = the_reading(normed(lambda self, h: self.q(self.pass_on(h))))
    assert reading.origin == "norm"
    assert "pass_on" in reading.passed
    assert reading.others == []


def test_an_op_between_makes_another_tensor():
    recording = recorded(normed(lambda self, h: self.q(h * 2)))
    (reading,) = [r for r in recording.readings if r.linears]
    assert reading.origin == ""


def test_inputs_are_copies():
    x = example()
    recording = record(routed(model(lambda self, x: self.q(x))), {"x": x})
    before = recording.inputs["q"].clone()
    x.zero_()
    assert torch.equal(recording.inputs["q"], before)


def test_recording_leaves_no_hooks_also_where_the_model_fails():
    def forward(self, x):
        self.q(self.norm(x))
        raise RuntimeError("as planned")

    module = routed(model(forward))
    with pytest.raises(WrapError, match="as planned"):
        record(module, {"x": example()})
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in module.modules())


# --- rows --------------------------------------------------------------------------------------


def layout(forward, rows: int = 2, tokens: int = 3) -> RowLayout:
    module = routed(model(forward))
    inputs = {"x": example(rows, tokens)}
    return row_layouts(module, inputs, record(module, inputs))["q"]


@pytest.mark.parametrize("rows", [2, 3])
@pytest.mark.parametrize("tokens", [1, 3, 5])
def test_rows_first(rows, tokens):
    assert layout(lambda self, x: self.q(x), rows, tokens) == RowLayout.ROWS
    assert layout(lambda self, x: self.q(x[:, -1]), rows, tokens) == RowLayout.ROWS


def test_heads_after_the_rows():
    assert layout(lambda self, x: self.q(x.unsqueeze(1).expand(-1, 4, -1, -1))) == RowLayout.ROWS


@pytest.mark.parametrize("rows", [2, 3])
def test_flat(rows):
    assert layout(lambda self, x: self.q(x.reshape(-1, K)), rows, 5) == RowLayout.FLAT


@pytest.mark.parametrize(
    "forward",
    [
        lambda self, x: self.q(x.transpose(0, 1)),
        lambda self, x: self.q(x.transpose(0, 1).reshape(-1, K)),
        lambda self, x: self.q(x - x.mean(0)),
        lambda self, x: self.q(x.flip(0)),
        lambda self, x: self.q(torch.ones_like(x)),
        lambda self, x: self.q(x[:1]),
        lambda self, x: self.q(x[0, 0]),
        lambda self, x: self.q(x.sum(0)),
        lambda self, x: self.q(x.repeat(2, 1, 1)),
    ],
    ids=[
        "token-major",
        "token-major flat",
        "mixed rows",
        "reversed",
        "constant",
        "first row",
        "vector",
        "summed",
        "repeated",
    ],
)
@pytest.mark.parametrize("tokens", [2, 3])
def test_rows_that_are_not_kept_apart_are_unknown(forward, tokens):
    assert layout(forward, 2, tokens) == RowLayout.UNKNOWN


# --- what discovery makes of it ----------------------------------------------------------------


def served(forward, quant: str = "fp8-static"):
    x = example()
    return wrap(
        model(forward), quant=quant, max_loras=0, example={"x": x}, calibration=[{"x": x}],
    )  # fmt: skip


def both(self, x):
    h = self.norm(x)
    return self.q(h) + self.k(h)


def norm_site(of):
    (site,) = [site for site in of.discovery.sites if site.facts.name == "norm"]
    return site


def test_a_norm_site_feeds_all_its_linears():
    def forward(self, x):
        h = self.norm(x)
        return self.q(h) * self.k(h)

    site = norm_site(served(forward))
    assert site.facts.consumers == ("q", "k")
    assert site.facts.kind == "norm"
    assert site.facts.other_readers == ()


@pytest.mark.parametrize(
    ("rest", "word"),
    [
        (lambda self, h: self.q(h) + self.k(h) + h.view(2, 3, K), "view"),
        (lambda self, h: self.q(h) + self.k(h) + self.router(h).sum(), "router"),
        (lambda self, h: self.q(h) + self.k(h) + h, "add"),
        (lambda self, h: (self.q(h) + self.k(h), h), "output"),
    ],
)
def test_a_norm_that_others_read_is_unfused_and_computes(rest, word):
    found = served(normed(rest))
    (plan,) = found.planner.plan({}).sites
    assert str(plan.route) == "unfused"
    assert word in plan.reason
    assert found(example()) is not None


def test_a_norm_used_twice_never_hands_codes_to_the_second_use():
    def forward(self, x):
        h = self.norm(x)
        return self.norm(self.q(h) + self.k(h))

    out = served(forward)(example())
    assert isinstance(out, torch.Tensor)


class Gated(Norm):
    def forward(self, x, gate=None):
        out = super().forward(x)
        return out if gate is None else out * F.silu(gate)


class ByName(Norm):
    def forward(self, hidden_states):
        return super().forward(hidden_states)


@pytest.mark.parametrize(
    ("norm", "call"),
    [
        (Gated, lambda norm, x: norm(x, x)),
        (Gated, lambda norm, x: norm(x, gate=x)),
        (ByName, lambda norm, x: norm(hidden_states=x)),
    ],
    ids=["second argument", "second keyword", "keyword"],
)
def test_a_norm_that_is_called_in_another_way_still_computes(norm, call):
    def forward(self, x):
        h = call(self.norm, x)
        return self.q(h) + self.k(h)

    module = model(forward)
    module.norm = norm().to(torch.bfloat16)
    x = example()
    plain = module(x)
    got = wrap(module, quant="none", max_loras=0, example={"x": x})(x)
    assert torch.equal(got, plain)


def test_a_linear_under_two_names_is_served_under_both():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.offset = nn.Parameter(torch.zeros(1))
            self.a = nn.Linear(K, K)
            self.b = self.a

        def forward(self, x):
            return self.b(torch.tanh(self.a(x))) + self.offset

    module = Tied().to(torch.bfloat16).eval()
    found = wrap(module, quant="fp8-dynamic", max_loras=0, example={"x": example()})
    refused = {entry.name for entry in found.registry.unwrapped}
    assert module.a is module.b or refused & {"a", "b"}


def test_a_hook_on_a_norm_reads_it_and_its_handle_frees_it_again():
    found = served(both)
    seen = []

    def reader(module, args, output):
        seen.append(output)

    def route() -> str:
        (plan,) = found.planner.plan({}).sites
        return str(plan.route)

    assert route() == "fused"
    handle = found.model.norm.register_forward_hook(reader)
    assert route() == "unfused"
    found(example())
    assert isinstance(seen[0], torch.Tensor)
    handle.remove()
    assert route() == "fused"


def test_a_hook_from_before_wrapping_frees_its_norm_when_it_goes():
    x, module = example(), model(both)
    handle = module.norm.register_forward_hook(lambda *_: None)
    found = wrap(
        module, quant="fp8-static", max_loras=0, example={"x": x}, calibration=[{"x": x}],
    )  # fmt: skip
    (plan,) = found.planner.plan({}).sites
    assert str(plan.route) == "unfused"
    handle.remove()
    (plan,) = found.planner.plan({}).sites
    assert str(plan.route) == "fused"
