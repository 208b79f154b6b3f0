"""Cones of hand-written modules."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from branchline.fusion.identify import identify_activation
from branchline.fusion.trace import Cone, find_cones, replace_cones, trace_forward
from branchline.linear.kernels.float import FloatLinear
from branchline.linear.registry import LayerRegistry
from branchline.linear.routed import RoutedLinear
from tests.fusion.blocks import (
    DTYPE,
    K,
    block,
    by_hand,
    clipped,
    limited,
    limited_after,
    multiplied,
    shifted,
)


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
    finding, order = identify_activation(
        cone.function, len(cone.inputs), DTYPE, numbers=cone.numbers
    )
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


NUMBERS = {
    limited: ({2.0, -2.0}, "silu_mul[limit=2]"),
    limited_after: ({2.0, -2.0}, "custom"),
    multiplied: ({0.3}, "silu_mul[multiplier=0.3]"),
    clipped: ({1.5}, "silu[limit=1.5]"),
    by_hand: ({1.702}, "custom"),
}


@pytest.mark.parametrize("forward", NUMBERS, ids=lambda f: f.__name__)
def test_numbers_in_the_code_of_a_cone_are_found_and_what_they_mean_proved(forward):
    numbers, text = NUMBERS[forward]
    cone = the_cone(forward)
    assert numbers <= set(cone.numbers)
    # What follows the linear is no part of the cone.
    assert 0.7 not in cone.numbers
    assert semantics(cone)[0].startswith(text)


def test_a_limit_of_up_stays_beside_a_table():
    finding, _ = identify_activation(
        (cone := the_cone(limited_after)).function, 2, DTYPE, numbers=cone.numbers
    )
    assert finding.semantics.custom
    assert finding.semantics.limit == 2.0


def test_an_offset_of_up_is_found_in_the_graph():
    cone = the_cone(shifted)
    assert {0.5, 2.0} <= set(cone.numbers)
    finding, _ = identify_activation(cone.function, 2, DTYPE, numbers=cone.numbers)
    assert finding.semantics.custom
    assert (finding.semantics.limit, finding.semantics.up_offset) == (2.0, 0.5)


def test_a_cone_is_called_by_its_last_module_or_else_its_root():
    assert the_cone(lambda self, x: self.down(self.drop(self.act(self.up(x))))).title == "act"
    assert the_cone(by_hand).title == "mul_1"


def test_a_module_with_a_buffer_is_no_part_of_a_cone():
    assert cones(lambda self, x: self.down(self.scaling(self.up(x)))) == []


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


def test_in_place_semantics_never_pass_as_another_activation():
    module = routed(block(lambda self, x: self.down(F.relu6(self.up(x), inplace=True))))
    assert "in place" in trace_forward(module)
