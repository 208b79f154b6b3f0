"""Finding activation sites in a module's own forward, from a traced graph (I3).

For every linear the module calls, the graph is walked back from the linear's input to the nearest
tensors that something else made: other linears, a chunk of one, an argument.  What lies between,
the cone, is run on probes to find out which activation it is.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import fx, nn
from torch.fx.proxy import TraceError

from ..linear.routed import RoutedLinear

_SPLITS = (torch.chunk, torch.split, torch.Tensor.chunk, torch.Tensor.split, operator.getitem)
_SPLIT_METHODS = ("chunk", "split", "tensor_split", "unbind")
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
    """What lies between a linear's input and the tensors it is computed from.

    Attributes:
        consumer: the linear.
        function: the cone as a module of `len(inputs)` tensors.
        root: the node that is the linear's input.
        inputs: the nodes it is computed from, in the order of `function`'s arguments.
        modules: modules that the cone calls, by their name in the traced module.
        other_readers: users of the root besides the linear.
    """

    consumer: RoutedLinear
    function: fx.GraphModule
    root: fx.Node
    inputs: tuple[fx.Node, ...]
    modules: Mapping[str, nn.Module]
    other_readers: tuple[str, ...]


class _OwnForward(fx.Tracer):
    """Traces one module's forward and no child's."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


def trace_forward(module: nn.Module) -> fx.Graph | str:
    """The graph of `module.forward`, or why it cannot be traced."""
    kinds = {p.kind for p in inspect.signature(module.forward).parameters.values()}
    if kinds & {inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL}:
        return "cannot be traced: its forward takes *args or **kwargs"
    try:
        return _OwnForward().trace(module)
    except _TRACE_ERRORS as error:
        first_line = str(error).strip().splitlines()
        return f"cannot be traced: {type(error).__name__}: {first_line[0] if first_line else ''}"


def find_cones(module: nn.Module, graph: fx.Graph) -> list[Cone | str]:
    """The cones before the routed linears that `module` calls itself; reasons where one fails."""
    cones: list[Cone | str] = []
    calls = [
        (node, module.get_submodule(str(node.target)))
        for node in graph.nodes
        if node.op == "call_module"
    ]
    for node, layer in calls:
        if not isinstance(layer, RoutedLinear):
            continue
        if sum(other is layer for _, other in calls) > 1:
            cones.append(f"{layer.name} is called more than once")
        elif node.args and isinstance(node.args[0], fx.Node):
            cone = _cone(module, graph, node, layer)
            if cone is not None:
                cones.append(cone)
    return cones


def _cone(module: nn.Module, graph: fx.Graph, call: fx.Node, layer: RoutedLinear) -> Cone | None:
    root = call.args[0]
    assert isinstance(root, fx.Node)
    if _is_boundary(module, root):
        return None
    inside, inputs = _walk(module, graph, root)
    modules = {
        str(node.target): module.get_submodule(str(node.target))
        for node in inside
        if node.op == "call_module"
    }
    users = [user for user in root.users if user is not call]
    return Cone(
        layer,
        _extract(module, inside, inputs, root),
        root,
        tuple(inputs),
        modules,
        tuple(f"{user.op} {user.target}" for user in users),
    )


def _is_boundary(module: nn.Module, node: fx.Node) -> bool:
    if node.op in ("placeholder", "get_attr"):
        return True
    if node.op == "call_module":
        child = module.get_submodule(str(node.target))
        return isinstance(child, RoutedLinear) or next(child.parameters(), None) is not None
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
    module: nn.Module,
    graph: fx.Graph,
    sites: Mapping[fx.Node, tuple[nn.Module, tuple[fx.Node, ...]]],
) -> fx.GraphModule:
    """`module`'s forward with some cones computed by their sites.

    Args:
        module: the traced module; it is not changed.
        graph: its graph; it is not changed either.
        sites: root node of a cone -> its site, and the nodes that are the site's inputs.

    Returns:
        a module whose `forward` has the signature of `module.forward`.
    """
    new = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    children = dict(module.named_modules())
    for node in graph.nodes:
        if node in sites:
            name = f"branchline_site_{node.name}"
            site, inputs = sites[node]
            children[name] = site
            copies[node] = new.call_module(name, tuple(copies[n] for n in inputs))
        elif node.op == "output":
            new.output(fx.map_arg(node.args[0], lambda n: copies[n]))
        else:
            copies[node] = new.node_copy(node, lambda n: copies[n])
    attributes = {
        str(node.target): children.get(str(node.target)) or _attribute(module, str(node.target))
        for node in new.nodes
        if node.op in ("call_module", "get_attr")
    }
    replaced = fx.GraphModule(attributes, new)
    # The activation module of a replaced cone is still called, and its result dropped, until now.
    replaced.graph.eliminate_dead_code()
    replaced.recompile()
    return replaced


def _attribute(module: nn.Module, path: str) -> object:
    return operator.attrgetter(path)(module)
