"""Finding activation sites in a module's own forward, from a traced graph (I3).

For every linear the module calls, the graph is walked back from the linear's input to the nearest
tensors that something else made: other linears, a chunk of one, an argument.  What lies between,
the cone, is run on probes to find out which activation it is.
"""

from __future__ import annotations

import inspect
import itertools
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.fx.node import map_aggregate
from torch.fx.proxy import TraceError

from ..linear.routed import RoutedLinear

_SPLITS = (torch.chunk, torch.split, torch.Tensor.chunk, torch.Tensor.split, operator.getitem)
_SPLIT_METHODS = ("chunk", "split", "tensor_split", "unbind")
_IN_PLACE_OPERATORS = frozenset(
    getattr(operator, f"i{name}")
    for name in "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift".split()
) | {operator.setitem}
# Everything fx raises for control flow, unsupported calls and the model's own shape checks.
_TRACE_ERRORS = (
    TraceError,
    TypeError,
    AttributeError,
    ValueError,
    KeyError,
    IndexError,
    NameError,
    RuntimeError,
    NotImplementedError,
    AssertionError,
)


@dataclass(frozen=True, eq=False)
class Cone:
    """What lies between the input of some linears and the tensors it is computed from.

    Attributes:
        consumers: the linears; more than one where they share their input.
        function: the cone as a module of `len(inputs)` tensors.
        root: the node that is the linears' input.
        inside: the nodes of the cone, in graph order.
        inputs: the nodes it is computed from, in the order of `function`'s arguments.
        modules: modules that the cone calls, by their name in the traced module.
        other_readers: users of the root besides the linears.
        numbers: what its code has in it: constants of the graph, settings of its modules.
        title: what to call it where no known name does: its last module, or its root.
    """

    consumers: tuple[RoutedLinear, ...]
    function: fx.GraphModule
    root: fx.Node
    inside: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    modules: Mapping[str, nn.Module]
    other_readers: tuple[str, ...]
    numbers: tuple[float, ...]
    title: str


@dataclass(frozen=True)
class Untraceable:
    """Why a linear has no cone."""

    layer: str
    reason: str


class _OwnForward(fx.Tracer):
    """Traces one module's forward and no child's."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


def trace_forward(module: nn.Module) -> fx.Graph | str:
    """The graph of `module.forward`, or why it cannot be traced; `module` is as it was.

    A trace runs the Python code of a forward once, so it holds for that one way through.  Refused
    is therefore what could go another way (a signature of more than one tensor, a forward patched
    onto the object) and what a graph of values does not show (writing in place, keeping state).
    """
    if "forward" in vars(module):
        return "cannot be traced: its forward was patched onto the object"
    parameters = list(inspect.signature(module.forward).parameters.values())
    if len(parameters) != 1 or parameters[0].kind != inspect.Parameter.POSITIONAL_OR_KEYWORD:
        return "cannot be traced: its forward takes more than one tensor"
    before = _state(module)
    try:
        graph = _OwnForward().trace(module)
    except _TRACE_ERRORS as error:
        lines = str(error).strip().splitlines() or [""]
        return f"cannot be traced: {type(error).__name__}: {lines[0]}"
    finally:
        changed = _restore(module, before)
    if changed:
        return f"cannot be traced: its forward changes {', '.join(changed)}"
    for node in graph.nodes:
        if _writes_in_place(module, node):
            return f"cannot be traced: {node.target} writes in place"
    return graph


def _state(module: nn.Module) -> dict[str, Any]:
    return {
        name: dict(value) if isinstance(value, dict) else value
        for name, value in vars(module).items()
    }


def _restore(module: nn.Module, before: dict[str, Any]) -> list[str]:
    """Undo what tracing set on the module; the names of what it was."""
    changed = []
    for name, value in list(vars(module).items()):
        old = before.get(name)
        if isinstance(value, dict) and isinstance(old, dict):
            for key in [k for k in value if k not in old or value[k] is not old[k]]:
                changed.append(str(key))
                del value[key]
            value.update({k: v for k, v in old.items() if k not in value})
        elif name not in before:
            changed.append(name)
            del vars(module)[name]
        elif value is not old:
            changed.append(name)
            vars(module)[name] = old
    return changed


def _writes_in_place(module: nn.Module, node: fx.Node) -> bool:
    if node.op == "call_module":
        return bool(getattr(module.get_submodule(str(node.target)), "inplace", False))
    if node.op not in ("call_function", "call_method"):
        return False
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    in_place_operator = node.target in _IN_PLACE_OPERATORS
    trailing = name.endswith("_") and not name.endswith("__")
    return (
        in_place_operator
        or trailing
        or bool(node.kwargs.get("inplace"))
        or node.kwargs.get("out") is not None
    )


def find_cones(module: nn.Module, graph: fx.Graph) -> list[Cone | Untraceable]:
    """The cones before the routed linears that `module` calls itself; reasons where one fails."""
    calls = [
        (node, module.get_submodule(str(node.target)))
        for node in graph.nodes
        if node.op == "call_module"
    ]
    failed: list[Cone | Untraceable] = []
    by_root: dict[fx.Node, list[tuple[fx.Node, RoutedLinear]]] = {}
    for node, layer in calls:
        if not isinstance(layer, RoutedLinear):
            continue
        root = node.args[0] if node.args else None
        if sum(other is layer for _, other in calls) > 1:
            failed.append(Untraceable(layer.name, "is called more than once in a forward"))
        elif len(node.args) != 1 or node.kwargs or not isinstance(root, fx.Node):
            failed.append(Untraceable(layer.name, "is not called with one tensor"))
        elif not _is_boundary(module, root):
            by_root.setdefault(root, []).append((node, layer))
    return [*failed, *(_cone(module, graph, root, users) for root, users in by_root.items())]


def _cone(
    module: nn.Module,
    graph: fx.Graph,
    root: fx.Node,
    consumers: list[tuple[fx.Node, RoutedLinear]],
) -> Cone:
    inside, inputs = _walk(module, graph, root)
    modules = {
        str(node.target): module.get_submodule(str(node.target))
        for node in inside
        if node.op == "call_module"
    }
    calls = [call for call, _ in consumers]
    others = [user for user in root.users if user not in calls]
    return Cone(
        tuple(layer for _, layer in consumers),
        _extract(module, inside, inputs, root),
        root,
        tuple(inside),
        tuple(inputs),
        modules,
        tuple(f"{user.op} {user.target}" for user in others),
        (*_constants(inside), *settings(modules.values())),
        _title(root, modules),
    )


def _constants(nodes: Iterable[fx.Node]) -> list[float]:
    """Every number among the arguments of `nodes`, those in lists and slices included."""
    found: list[float] = []

    def keep(argument: Any) -> Any:
        if _is_number(argument):
            found.append(float(argument))
        return argument

    for node in nodes:
        map_aggregate((node.args, node.kwargs), keep)
    return found


def holds_tensors(module: nn.Module) -> bool:
    """Whether it has weights or buffers, which a proof would not follow when they change."""
    tensors = itertools.chain(module.parameters(), module.buffers())
    return next(tensors, None) is not None


def settings(modules: Iterable[nn.Module]) -> list[float]:
    """The numbers that `modules`, and modules in them, have as attributes."""
    inner = (inner for module in modules for inner in module.modules())
    return [float(value) for module in inner for value in own_settings(module).values()]


def own_settings(module: nn.Module) -> dict[str, float]:
    """The numbers that `module` itself has as attributes."""
    return {name: value for name, value in vars(module).items() if _is_number(value)}


class Settings:
    """The numbers that a module has as attributes, kept to see in every forward that they hold.

    Args:
        module: whose.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._numbers = own_settings(module)
        self._seen = tuple(vars(module).values())

    def hold(self) -> bool:
        """Whether the numbers are what they were."""
        values = vars(self._module).values()
        # As long as every attribute is the same object, nothing has to be compared.
        if len(values) == len(self._seen) and all(map(operator.is_, values, self._seen)):
            return True
        if own_settings(self._module) != self._numbers:
            return False
        self._seen = tuple(values)
        return True


def _is_number(value: object) -> bool:
    # A float holds no larger integers.
    return isinstance(value, float) or (type(value) is int and abs(value) < 2**64)


def _title(root: fx.Node, modules: Mapping[str, nn.Module]) -> str:
    makers = [name for name, m in modules.items() if not isinstance(m, nn.Dropout | nn.Identity)]
    return makers[-1] if makers else root.name


def _is_boundary(module: nn.Module, node: fx.Node) -> bool:
    if node.op in ("placeholder", "get_attr"):
        return True
    if node.op == "call_module":
        child = module.get_submodule(str(node.target))
        holds_linears = any(isinstance(inner, RoutedLinear) for inner in child.modules())
        return holds_linears or holds_tensors(child)
    if node.op == "call_method":
        return node.target in _SPLIT_METHODS
    return node.target in _SPLITS


def _walk(module: nn.Module, graph: fx.Graph, root: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
    """Nodes of the cone in graph order, and the boundary nodes they read."""
    inside: set[fx.Node] = set()
    inputs: list[fx.Node] = []
    stack = [root]
    while stack:
        node = stack.pop()
        if node in inside or node in inputs:
            continue
        if _is_boundary(module, node):
            inputs.append(node)
            continue
        inside.add(node)
        stack.extend(node.all_input_nodes)
    return [node for node in graph.nodes if node in inside], inputs


def _extract(
    module: nn.Module, inside: list[fx.Node], inputs: list[fx.Node], root: fx.Node
) -> fx.GraphModule:
    graph = fx.Graph()
    copies = {node: graph.placeholder(f"x{i}") for i, node in enumerate(inputs)}
    for node in inside:
        copies[node] = graph.node_copy(node, lambda n: copies[n])
    graph.output(copies[root])
    return fx.GraphModule(module, graph)


def replace_cones(
    module: nn.Module, graph: fx.Graph, sites: Sequence[tuple[Cone, nn.Module, Sequence[fx.Node]]]
) -> fx.GraphModule:
    """`module`'s forward with some cones computed by their sites.

    Args:
        module: the traced module; it is not changed.
        graph: its graph; it is not changed either.
        sites: cones, their sites, and the nodes that are each site's inputs.

    Returns:
        a module whose `forward` has the signature of `module.forward`.
    """
    by_root = {cone.root: (site, inputs) for cone, site, inputs in sites}
    new = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    children = dict(module.named_modules())
    for node in graph.nodes:
        if node in by_root:
            site, inputs = by_root[node]
            name = f"branchline_site_{node.name}"
            children[name] = site
            copies[node] = new.call_module(name, tuple(copies[n] for n in inputs))
        elif node.op == "output":
            new.output(fx.map_arg(node.args[0], lambda n: copies[n]))
        else:
            copies[node] = new.node_copy(node, lambda n: copies[n])
    # What the site computes now; a node that something else reads as well stays.
    for cone, _, _ in sites:
        for node in reversed(cone.inside):
            if node is not cone.root and not copies[node].users:
                new.erase_node(copies[node])
    attributes = {
        str(node.target): children.get(str(node.target)) or _attribute(module, str(node.target))
        for node in new.nodes
        if node.op in ("call_module", "get_attr")
    }
    return fx.GraphModule(attributes, new)


def _attribute(module: nn.Module, path: str) -> object:
    return operator.attrgetter(path)(module)
