"""Cones of hand-written modules, and wrapped models whose forwards are easy to get wrong."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from branchline import wrap
from branchline.fusion.identify import identify_activation
from branchline.fusion.trace import Cone, find_cones, replace_cones, trace_forward
from branchline.linear.kernels.float import FloatLinear
from branchline.linear.registry import LayerRegistry
from branchline.linear.routed import RoutedLinear

K = 16
DTYPE = torch.bfloat16


class Block(nn.Module):
    """Something to write forwards for."""

    def __init__(self) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.zeros(1))
        self.gate = nn.Linear(K, 2 * K)
        self.up = nn.Linear(K, 2 * K)
        self.gate_up = nn.Linear(K, 4 * K)
        self.down = nn.Linear(2 * K, K)
        self.other = nn.Linear(2 * K, K)
        self.act = nn.SiLU()
        self.drop = nn.Dropout(0.1)
        self.relu_in_place = nn.ReLU(inplace=True)
        self.inner = nn.Sequential(nn.Linear(K, 2 * K), nn.SiLU())


def block(forward) -> nn.Module:
    torch.manual_seed(0)
    return type("Written", (Block,), {"forward": forward})().to(DTYPE).eval()


def routed(module: nn.Module) -> nn.Module:
    registry = LayerRegistry()
    for name, child in list(module.named_modules()):
        if isinstance(child, nn.Linear):
            layer = RoutedLinear(
                name, len(registry), FloatLinear(child), registry, DTYPE, torch.device("cpu")
            )
            registry.add(layer)
            parent, _, own = name.rpartition(".")
            setattr(module.get_submodule(parent), own, layer)
    return module


def cones(forward) -> list[Cone | str]:
    module = routed(block(forward))
    graph = trace_forward(module)
    assert isinstance(graph, fx.Graph), graph
    return find_cones(module, graph)


def the_cone(forward) -> Cone:
    (cone,) = cones(forward)
    assert isinstance(cone, Cone)
    return cone


def semantics(cone: Cone) -> tuple[str, tuple[str, ...]]:
    finding, order = identify_activation(cone.function, len(cone.inputs), DTYPE)
    return str(finding.semantics), tuple(cone.inputs[i].name for i in order)


# --- cones -------------------------------------------------------------------------------------


def test_gated():
    cone = the_cone(lambda self, x: self.down(self.act(self.gate(x)) * self.up(x)))
    assert [layer.name for layer in cone.consumers] == ["down"]
    assert semantics(cone) == ("silu_mul", ("gate", "up"))
    assert cone.other_readers == ()
    assert set(cone.modules) == {"act"}


def test_gated_in_the_other_order():
    cone = the_cone(lambda self, x: self.down(self.up(x) * F.silu(self.gate(x))))
    assert semantics(cone) == ("silu_mul", ("gate", "up"))


@pytest.mark.parametrize("split", ["chunk", "torch.chunk", "split", "slices"])
def test_packed_gate_and_up(split):
    def forward(self, x):
        packed = self.gate_up(x)
        if split == "chunk":
            gate, up = packed.chunk(2, dim=-1)
        elif split == "torch.chunk":
            gate, up = torch.chunk(packed, 2, -1)
        elif split == "split":
            gate, up = packed.split(2 * K, dim=-1)
        else:
            gate, up = packed[..., : 2 * K], packed[..., 2 * K :]
        return self.down(F.silu(gate) * up)

    cone = the_cone(forward)
    assert semantics(cone)[0] == "silu_mul"
    assert len(cone.inputs) == 2


def test_unary_and_dropout_between():
    cone = the_cone(lambda self, x: self.down(self.drop(self.act(self.up(x)))))
    assert semantics(cone) == ("silu", ("up",))
    assert set(cone.modules) == {"act", "drop"}


def test_nothing_between_is_no_cone():
    assert cones(lambda self, x: self.down(self.up(x))) == []
    assert cones(lambda self, x: self.up(x)) == []


def test_three_inputs_are_all_found():
    cone = the_cone(lambda self, x: self.down(F.silu(self.gate(x)) * self.up(x) + self.offset))
    assert len(cone.inputs) == 3


def test_other_readers_of_the_activation_are_named():
    def forward(self, x):
        h = self.act(self.up(x))
        return self.down(h) + h.sum()

    cone = the_cone(forward)
    assert len(cone.other_readers) == 1
    assert "sum" in cone.other_readers[0]


def test_an_activation_that_is_returned_is_read_by_the_output():
    def forward(self, x):
        h = self.act(self.up(x))
        return self.down(h), h

    assert any("output" in reader for reader in the_cone(forward).other_readers)


def test_two_linears_on_one_activation_share_its_cone():
    def forward(self, x):
        h = self.act(self.up(x))
        return self.down(h) + self.other(h)

    (cone,) = cones(forward)
    assert [layer.name for layer in cone.consumers] == ["down", "other"]
    assert cone.other_readers == ()


def test_a_linear_called_twice_is_refused_by_name():
    def forward(self, x):
        return self.down(F.silu(self.up(x))) + self.down(F.silu(self.gate(x)))

    found = cones(forward)
    assert {entry.layer for entry in found} == {"down"}
    assert all("more than once" in entry.reason for entry in found)


@pytest.mark.parametrize(
    "forward",
    [
        lambda self, x: self.down(self.up(x)) if x.sum() > 0 else self.other(self.up(x)),
        lambda self, x: self.down(torch.stack([F.silu(h) for h in self.up(x)])),
        lambda self, x: self.down(F.silu(self.up(x))) if len(x) > 1 else x,
        lambda self, x: self.down(self.up(x).view(range(x))),
    ],
    ids=["value", "iteration", "length", "unknown"],
)
def test_control_flow_gives_a_reason(forward):
    reason = trace_forward(routed(block(forward)))
    assert isinstance(reason, str)
    assert reason.startswith("cannot be traced: ")
    assert "\n" not in reason
    assert len(reason) > len("cannot be traced: X: ")


def test_tracing_leaves_the_module_as_it_was():
    def forward(self, x):
        self.last = F.silu(self.up(x)) * torch.tensor(2.0, dtype=DTYPE)
        return self.down(self.last)

    module = routed(block(forward))
    before = set(vars(module))
    trace_forward(module)
    assert set(vars(module)) == before


# --- replacing ---------------------------------------------------------------------------------


class Recorded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inputs: tuple[torch.Tensor, ...] = ()

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        self.inputs = inputs
        return F.silu(inputs[0]) * inputs[1]


def test_a_replaced_cone_is_computed_by_its_site():
    module = routed(block(lambda self, x: self.down(F.silu(self.gate(x)) * self.up(x)) * 2.0))
    graph = trace_forward(module)
    assert isinstance(graph, fx.Graph)
    (cone,) = find_cones(module, graph)
    site = Recorded()
    gate_up = tuple(sorted(cone.inputs, key=lambda node: node.name))
    assert [node.name for node in gate_up] == ["gate", "up"]
    replaced = replace_cones(module, graph, [(cone, site, gate_up)])
    x = torch.randn(2, 3, K).to(DTYPE)
    assert torch.equal(replaced(x), module(x))
    assert {tuple(t.shape) for t in site.inputs} == {(2, 3, 2 * K)}
    assert "silu" not in replaced.code
    assert isinstance(trace_forward(module), fx.Graph), "the module itself was changed"


# --- whole models ------------------------------------------------------------------------------
# Nothing is quantised here: a wrapped model must give the bytes of the plain one.


def example() -> torch.Tensor:
    return (torch.randn(2, 3, K, generator=torch.Generator().manual_seed(1)) * 10).to(DTYPE)


def served_as_plain(module: nn.Module, **arguments: object) -> None:
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


EASY_TO_GET_WRONG = [
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


def test_in_place_semantics_never_pass_as_another_activation():
    module = routed(block(relu6_in_place))
    assert "in place" in trace_forward(module)
