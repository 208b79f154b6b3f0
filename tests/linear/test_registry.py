from __future__ import annotations

import torch
from torch import nn

from branchline import wrap
from branchline.core.quant_key import FP8_DYNAMIC_TOKEN, FP8_STATIC_TENSOR
from branchline.linear.contract import InputContract, InputScale
from branchline.linear.hooks import hook_names, unwatch_hooks, watch_hooks
from branchline.linear.kernels.emulated import EmulatedLinear
from branchline.linear.kernels.float import FloatLinear
from branchline.linear.parts import Part
from branchline.linear.quantized_weight import QuantizedWeight
from branchline.linear.registry import Holder, Holding, LayerRegistry, RawReader, SharedInput
from branchline.linear.routed import RoutedLinear

K = 8


def fp8_kernel(scale: float | None = 0.5) -> EmulatedLinear:
    weight = QuantizedWeight.from_float(torch.eye(K), "eye")
    if scale is None:
        return EmulatedLinear(weight, None, InputContract(FP8_DYNAMIC_TOKEN))
    contract = InputContract(FP8_STATIC_TENSOR, InputScale.checked(scale, "eye"))
    return EmulatedLinear(weight, None, contract)


def registry_of(*names: str) -> LayerRegistry:
    registry = LayerRegistry()
    for index, name in enumerate(names):
        layer = RoutedLinear(
            name, index, fp8_kernel(), registry, torch.float32, torch.device("cpu")
        )
        registry.add(layer)
    return registry


class Told:
    """What a listener was told."""

    def __init__(self, registry: LayerRegistry) -> None:
        self.calls: list[tuple[int, str]] = []
        registry.listen(lambda epoch, reason: self.calls.append((epoch, reason)))


def reader(module, args, output=None) -> None:
    """A foreign hook that changes nothing."""


# --- epoch -------------------------------------------------------------------------------------


def on(*layers: str, name: str = "sql") -> Holding:
    return Holding(name, dict.fromkeys(layers, Holder()))


def test_a_change_of_adapters_advances_once_for_all_layers():
    registry = registry_of("q", "k")
    told = Told(registry)
    before = registry.epoch
    registry.set_holdings({1: on("q", "k")}, (), "adapter 'sql' was loaded")
    assert registry.epoch == before + 1
    assert told.calls == [(before + 1, "adapter 'sql' was loaded")]


def test_an_empty_change_is_told_too():
    registry = registry_of("q")
    told = Told(registry)
    registry.set_holdings({}, (), "nothing")
    assert len(told.calls) == 1


def test_a_listener_sees_the_new_state():
    registry = registry_of("q")
    seen = []
    registry.listen(lambda *_: seen.append(dict(registry.branches(registry.layers["q"]))))
    registry.set_holdings({7: on("q")}, (), "load")
    registry.set_holdings({}, {7}, "unload")
    assert seen == [{7: Holder()}, {}]


def test_every_listener_is_told():
    registry = registry_of("q")
    first, second = Told(registry), Told(registry)
    registry.advance("x")
    assert first.calls == second.calls == [(registry.epoch, "x")]


def test_hooks_on_a_layer_advance_the_epoch_as_they_come_and_go():
    registry = registry_of("q", "k")
    told = Told(registry)
    layer = registry.layers["q"]
    handles = [layer.register_forward_hook(reader), layer.register_forward_pre_hook(reader)]
    assert len(told.calls) == 2
    for handle in handles:
        handle.remove()
    assert len(told.calls) == 4
    assert [epoch for epoch, _ in told.calls] == sorted({epoch for epoch, _ in told.calls})
    assert all("q" in reason for _, reason in told.calls)
    handles[0].remove()
    assert len(told.calls) == 4


def test_hooks_removed_by_their_table_advance_the_epoch():
    registry = registry_of("q")
    layer = registry.layers["q"]
    for remove in (
        lambda table: table.clear(),
        lambda table: table.popitem(),
        lambda table: table.pop(next(iter(table))),
    ):
        layer.register_forward_hook(reader)
        before = registry.epoch
        remove(layer._forward_hooks)
        assert not registry.requires_unquantized_input(layer)
        assert registry.epoch > before


def test_a_new_base_kernel_advances_the_epoch():
    registry = registry_of("q")
    layer = registry.layers["q"]
    before = registry.epoch
    layer.kernel = fp8_kernel(0.25)
    assert registry.epoch > before, "re-quantising a layer left every plan as it was"


def test_a_copied_layer_does_not_advance_the_original():
    import copy

    module = nn.Linear(2, 2)
    calls = []
    watch_hooks(module, lambda: calls.append(1))
    clone = copy.deepcopy(module)
    clone.register_forward_hook(reader)
    assert calls == []
    assert hook_names(module) == ()


def test_a_handle_from_before_still_removes_its_hook():
    module = nn.SiLU()
    handle = module.register_forward_hook(reader)
    watch_hooks(module, lambda: None)
    assert hook_names(module) == ("reader",)
    handle.remove()
    assert hook_names(module) == ()


def test_a_handle_from_meanwhile_still_removes_its_hook_afterwards():
    module = nn.SiLU()
    watch_hooks(module, lambda: None)
    handle = module.register_forward_hook(reader)
    unwatch_hooks(module)
    handle.remove()
    assert hook_names(module) == ()


def test_watching_keeps_the_hooks_that_were_there():
    module = nn.SiLU()
    seen = []
    module.register_forward_hook(lambda *_: seen.append(1))
    watch_hooks(module, lambda: None)
    watch_hooks(module, lambda: None)
    module(torch.ones(1))
    unwatch_hooks(module)
    module(torch.ones(1))
    assert seen == [1, 1]


# --- raw readers (I2) --------------------------------------------------------------------------


def test_live_sets_decide():
    registry = registry_of("q")
    layer = registry.layers["q"]
    registry.set_holdings({1: on("q"), 2: on("q", name="chat")}, (), "load")
    branch = {n: RawReader("branch", n, "q") for n in ("sql", "chat")}
    assert registry.raw_readers(layer, {1}) == (branch["sql"],)
    assert registry.raw_readers(layer, [2]) == (branch["chat"],)
    assert registry.raw_readers(layer, {3}) == ()
    assert registry.branches(layer, {1, 3}).keys() == {1}
    assert registry.raw_readers(layer, ()) == ()
    assert set(registry.raw_readers(layer)) == set(branch.values())
    assert registry.requires_unquantized_input(layer)
    assert not registry.requires_unquantized_input(layer, ())


def test_quant_key_is_that_of_the_complete_layer():
    registry = registry_of("q")
    layer = registry.layers["q"]
    assert registry.get_input_quant_key(layer) == FP8_STATIC_TENSOR
    registry.set_holdings({1: on("q")}, (), "load")
    assert registry.get_input_quant_key(layer) is None
    assert registry.get_input_quant_key(layer, {1}) is None
    assert registry.get_input_quant_key(layer, {2}) == FP8_STATIC_TENSOR
    assert registry.get_input_quant_key(layer, ()) == FP8_STATIC_TENSOR
    registry.set_holdings({}, {1}, "unload")
    assert registry.get_input_quant_key(layer) == FP8_STATIC_TENSOR
    assert layer.kernel.contract.scale.number == 0.5


def test_an_unquantised_base_takes_no_codes():
    registry = registry_of("q")
    layer = registry.layers["q"]
    layer.kernel = FloatLinear(nn.Linear(K, K))
    assert registry.get_input_quant_key(layer) is None
    assert layer.kernel.contract.key is None


def test_a_swap_replaces_holders():
    registry = registry_of("q")
    layer = registry.layers["q"]
    registry.set_holdings({1: on("q")}, (), "load")
    registry.set_holdings({2: on("q")}, {1}, "swap")
    assert dict(registry.branches(layer)) == {2: Holder()}
    assert not registry.requires_unquantized_input(layer, {1})


def test_holders_are_copied_and_read_only():
    registry = registry_of("q")
    layer = registry.layers["q"]
    given = {1: on("q")}
    registry.set_holdings(given, (), "load")
    given.clear()
    assert dict(registry.branches(layer)) == {1: Holder()}
    for mapping in (registry.branches(layer), registry.layers):
        try:
            mapping[5] = "x"
        except TypeError:
            continue
        raise AssertionError("the registry's tables can be changed from outside")


def test_shared_input_makes_one_reader_count_for_all():
    registry = registry_of("q", "k", "v", "o")
    others = [RawReader("unknown", "aten.view", "norm")]
    registry.share_input(SharedInput(("q", "k", "v"), lambda: tuple(others)))
    q, o = registry.layers["q"], registry.layers["o"]
    assert registry.raw_readers(q, ()) == tuple(others)
    others.clear()
    assert registry.raw_readers(q, ()) == ()
    registry.set_holdings({1: on("v")}, (), "load")
    assert registry.raw_readers(q, {1}) == (RawReader("branch", "sql", "v"),)
    assert registry.get_input_quant_key(q, {1}) is None
    assert registry.get_input_quant_key(q, {9}) == FP8_STATIC_TENSOR
    assert registry.raw_readers(o) == ()
    handle = registry.layers["k"].register_forward_pre_hook(reader)
    assert registry.raw_readers(q, ()) == (RawReader("hook", "reader", "k"),)
    handle.remove()
    assert registry.raw_readers(q, ()) == ()


def test_the_parts_of_a_branch_say_whether_it_reads_raw():
    registry = registry_of("q")
    layer = registry.layers["q"]
    for parts, reads_raw, changes_input in (
        (Part.GAIN | Part.SHIFT, False, False),
        (Part.PLAIN, True, False),
        (Part.LOW_RANK | Part.GAIN, True, False),
        (Part.DELTA, True, False),
        (Part.WEIGHT | Part.SHIFT, True, False),
        (Part.IN_SCALE, True, True),
        (Part.ROTATION | Part.GAIN, True, True),
    ):
        registry.set_holdings({1: Holding("x", {"q": Holder(parts)})}, (), "load")
        reader = RawReader("branch", "x", "q", changes_input=changes_input)
        assert registry.raw_readers(layer, {1}) == ((reader,) if reads_raw else ())


class OtherPlace:
    """A norm, as far as the registry knows one."""

    def __init__(self, name: str, index: int) -> None:
        self.name, self.index, self.branch = name, index, None


def test_own_weights_of_the_maker_keep_its_output_raw():
    registry = registry_of("q", "k")
    norm = OtherPlace("norm", 2)
    registry.add_place(norm)
    registry.share_input(SharedInput(("q",), lambda: (), "norm"))
    assert list(registry.places.values()) == [*registry, norm]
    registry.set_holdings({1: Holding("ln", {"norm": Holder(Part.OWN)})}, (), "load")
    reader = RawReader("branch", "ln", "norm", changes_input=True)
    q, k = registry
    assert registry.raw_readers(q, {1}) == (reader,)
    assert registry.raw_readers(q, {2}) == ()
    assert registry.raw_readers(k, {1}) == ()
    assert registry.branches(norm, {1}) == {1: Holder(Part.OWN)}


def test_hooks_follow_their_handles():
    registry = registry_of("q")
    layer = registry.layers["q"]
    for register in (
        lambda: layer.register_forward_hook(reader),
        lambda: layer.register_forward_pre_hook(reader),
        lambda: layer.register_forward_hook(reader, prepend=True, with_kwargs=True),
        lambda: layer.register_forward_hook(reader, always_call=True),
    ):
        assert not registry.requires_unquantized_input(layer, ())
        with register():
            assert registry.requires_unquantized_input(layer, ())
            assert registry.get_input_quant_key(layer, ()) is None
            assert layer.reads_raw()
        assert not layer.reads_raw()
    assert registry.get_input_quant_key(layer, ()) == FP8_STATIC_TENSOR


def test_global_hooks_read_every_layer():
    registry = registry_of("q", "k")
    for register in (
        nn.modules.module.register_module_forward_hook,
        nn.modules.module.register_module_forward_pre_hook,
    ):
        with register(reader):
            for layer in registry:
                (found,) = registry.raw_readers(layer, ())
                assert (found.kind, found.name) == ("hook", "reader")
                assert layer.reads_raw()
        assert not any(registry.requires_unquantized_input(layer) for layer in registry)


def test_readers_print_by_name():
    assert str(RawReader("branch", "sql", "q")) == "adapter 'sql' on q"
    assert str(RawReader("hook", "f", "q")) == "forward hook 'f' on q"
    assert "'x' on q" in str(RawReader("unknown", "x", "q"))


def test_iteration_is_in_order_and_owners_differ():
    registry = registry_of("q", "k", "v")
    assert [layer.name for layer in registry] == ["q", "k", "v"]
    assert [layer.index for layer in registry] == [0, 1, 2]
    assert len(registry) == 3
    assert registry.owner != LayerRegistry().owner
    assert registry.current_batch().plan.branched == (False,) * 3


# --- what was on a linear before it was wrapped ------------------------------------------------


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.zeros(1))
        self.up = nn.Linear(K, 2 * K)
        self.act = nn.SiLU()
        self.down = nn.Linear(2 * K, K)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.act(self.up(x))) + self.offset


def test_a_hook_from_before_is_not_dropped_in_silence():
    model = Tiny().to(torch.bfloat16).eval()
    x = torch.arange(2 * 3 * K).view(2, 3, K).to(torch.bfloat16)
    seen = []
    model.up.register_forward_hook(lambda *_: seen.append(1))
    served = wrap(model, quant="fp8-dynamic", max_loras=0, example={"x": x})
    seen.clear()
    served(x)
    unwrapped = [entry.name for entry in served.registry.unwrapped]
    assert seen or "up" in unwrapped, "the hook is gone, and nobody was told"
