"""One proof for cones that are the same function, and one each for those that are not."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from transformers.activations import ACT2FN

from branchline.fusion.identify import alike
from branchline.fusion.identify.alike import Proofs
from branchline.fusion.trace import Cone, find_cones, trace_forward
from branchline.linear.routed import RoutedLinear
from tests.fusion.blocks import block
from tests.fusion.test_trace import routed


class Powered(nn.Module):
    """Its attributes say what it computes."""

    def __init__(self, power: object = 2, *, hidden: object = None) -> None:
        super().__init__()
        self.power = power
        self.hidden = hidden

    def forward(self, x):
        return F.relu(x) ** self.power


class Poking(nn.Module):
    """It asks the object that it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.config = object()

    def forward(self, x):
        return F.silu(x)


def with_act(act: nn.Module):
    """A block whose activation is `act`."""

    def forward(self, x):
        return self.down(self.act(self.up(x)))

    made = block(forward)
    made.act = act
    return made


def cone_of(module: nn.Module) -> Cone:
    graph = trace_forward(routed(module))
    assert isinstance(graph, fx.Graph), graph
    (cone,) = find_cones(module, graph)
    assert isinstance(cone, Cone)
    return cone


@pytest.fixture
def proved(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """What was proved."""
    calls: list[tuple] = []
    real = alike.identify_activation

    def watched(function, *rest):
        calls.append(rest)
        return real(function, *rest)

    monkeypatch.setattr(alike, "identify_activation", watched)
    return calls


def found(proofs: Proofs, module: nn.Module) -> str:
    cone = cone_of(module)
    layer = cone.consumers[0]
    assert isinstance(layer, RoutedLinear)
    finding, _ = proofs.of(cone, layer)
    return str(finding.semantics or finding.reason)


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_pytorch_tanh", "relu2", "gelu_new"])
def test_layers_that_are_alike_are_proved_once(proved, name):
    proofs = Proofs()
    first, second = (found(proofs, with_act(ACT2FN[name])) for _ in range(2))
    assert first == second
    assert len(proved) == 1


def test_nothing_is_kept_longer_than_a_look_through_one_model(proved):
    for _ in range(2):
        assert found(Proofs(), with_act(nn.SiLU())) == "silu"
    assert len(proved) == 2


def written(limit: float, slope: float):
    def forward(self, x):
        return self.down(F.leaky_relu(self.up(x).clamp(max=limit), slope))

    return block(forward)


DIFFERENT = {
    "another module": lambda: (with_act(nn.SiLU()), with_act(nn.ReLU())),
    "another setting": lambda: (with_act(Powered(2)), with_act(Powered(3))),
    "an integer and a float": lambda: (with_act(Powered(2)), with_act(Powered(2.0))),
    "the other zero": lambda: (with_act(Powered(hidden=0.0)), with_act(Powered(hidden=-0.0))),
    "another function": lambda: (
        with_act(Powered(hidden=F.relu)),
        with_act(Powered(hidden=F.silu)),
    ),
    "another argument of a function": lambda: (
        with_act(nn.GELU()),
        with_act(nn.GELU(approximate="tanh")),
    ),
    "another argument of a partial": lambda: (
        with_act(Powered(hidden=functools.partial(F.gelu, approximate="none"))),
        with_act(Powered(hidden=functools.partial(F.gelu, approximate="tanh"))),
    ),
    "an inner module": lambda: (
        with_act(nn.Sequential(nn.SiLU(), nn.Identity())),
        with_act(nn.Sequential(nn.ReLU(), nn.Identity())),
    ),
    "a number in the code": lambda: (written(7.0, 0.1), written(6.0, 0.1)),
    "another number in the code": lambda: (written(7.0, 0.1), written(7.0, 0.2)),
    "training": lambda: (with_act(nn.Dropout(0.5).eval()), with_act(nn.Dropout(0.5).train())),
}


@pytest.mark.parametrize("which", DIFFERENT)
def test_what_differs_is_proved_by_itself(proved, which):
    proofs = Proofs()
    for module in DIFFERENT[which]():
        found(proofs, module)
    assert len(proved) == 2


def hooked() -> nn.Module:
    act = nn.SiLU()
    act.register_forward_hook(lambda module, inputs, output: None)
    return with_act(act)


def patched() -> nn.Module:
    act = nn.SiLU()
    act.forward = functools.partial(F.silu, inplace=False)
    return with_act(act)


UNLIKE = {
    "holds an object": lambda: with_act(Poking()),
    "holds a list": lambda: with_act(Powered(hidden=[1, 2])),
    "has a hook": hooked,
}


@pytest.mark.parametrize("which", UNLIKE)
def test_what_cannot_be_seen_to_be_the_same_is_proved_each_time(proved, which):
    proofs = Proofs()
    for _ in range(2):
        found(proofs, UNLIKE[which]())
    assert len(proved) == 2


def test_another_dtype_is_proved_by_itself(proved):
    proofs = Proofs()
    cone = cone_of(with_act(nn.SiLU()))
    (layer,) = cone.consumers
    assert str(proofs.of(cone, layer)[0].semantics) == "silu"
    layer.dtype = torch.float16
    assert str(proofs.of(cone, layer)[0].semantics) == "silu"
    assert [dtype for _, dtype, *_ in proved] == [torch.bfloat16, torch.float16]


def test_a_patched_forward_is_told_from_the_class_s(proved):
    proofs = Proofs()
    assert found(proofs, with_act(nn.SiLU())) == "silu"
    assert found(proofs, patched()) == "silu"
    assert len(proved) == 2
