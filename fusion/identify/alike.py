"""One proof for the layers of a model that are alike: cones of the same graph and settings.

A proof runs a function on every encoding, which takes longer than the rest of what is found out
about a layer.  Layers differ in their weights, and an activation has none, so that most cones of a
model are the same function; what cannot be seen to be the same is proved by itself.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Hashable
from typing import Any

import torch
from torch import fx, nn
from torch.fx.node import map_aggregate

from ...linear.routed import RoutedLinear
from ..trace import Cone
from .activation import identify_activation
from .finding import Finding

# What modules compute with besides numbers; compared by what they are, not by what they look like.
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, type)
# Of `nn.Module` itself: its hooks, and tables of what is compared by itself.
_HOOKS = tuple(name for name in vars(nn.Module()) if "hook" in name)
_TABLES = ("_modules", "_parameters", "_buffers")

_Proof = tuple[Finding, tuple[int, ...]]


class _UnlikeError(Exception):
    """Something that nothing else can be seen to be the same as."""


class Proofs:
    """What cones were found to compute, while a model is looked through."""

    def __init__(self) -> None:
        self._known: dict[Hashable, _Proof] = {}

    def of(self, cone: Cone, layer: RoutedLinear) -> _Proof:
        """What `cone` computes, and the order of its inputs as (gate, up).

        Args:
            cone: before `layer`.
            layer: says in which dtype and where it runs.

        Returns:
            as `identify_activation`.
        """
        arity = len(cone.inputs)
        try:
            key = (_graph(cone.function), arity, layer.dtype, layer.device, cone.numbers)
            found = self._known.get(key)
        except (_UnlikeError, TypeError):
            # A TypeError is of something in it that has no hash.
            key = found = None
        if found is None:
            found = identify_activation(
                cone.function.forward, arity, layer.dtype, layer.device, cone.numbers
            )
            if key is not None:
                self._known[key] = found
        return found


def _graph(function: fx.GraphModule) -> Hashable:
    """What `function` computes: its calls, their arguments, and the modules that it calls.

    Raises:
        _UnlikeError: it holds what cannot be compared.
    """
    places = {node: place for place, node in enumerate(function.graph.nodes)}

    def told(argument: Any) -> Any:
        if isinstance(argument, fx.Node):
            return ("node", places[argument])
        return _value(argument)

    return tuple(
        (
            node.op,
            _module(function.get_submodule(str(node.target)))
            if node.op == "call_module"
            else node.target,
            _frozen(map_aggregate(node.args, told)),
            _frozen(map_aggregate(node.kwargs, told)),
        )
        for node in places
    )


def _module(module: nn.Module) -> Hashable:
    """All that a forward of a module without weights may read of it."""
    values = vars(module)
    if any(values[name] for name in _HOOKS) or any(values[name] for name in _TABLES[1:]):
        raise _UnlikeError
    own = {n: v for n, v in values.items() if n not in _HOOKS and n not in _TABLES}
    settings = tuple((name, _value(value)) for name, value in sorted(own.items()))
    inner = tuple((name, child and _module(child)) for name, child in module.named_children())
    return type(module), settings, inner


def _value(value: Any) -> Hashable:
    if isinstance(value, _PLAIN):
        # 1, 1.0 and True are equal, and so are the zeros.
        return type(value), repr(value) if isinstance(value, float | complex) else value
    if isinstance(value, _FUNCTIONS):
        return value
    if type(value) is functools.partial:
        given = tuple((name, _value(v)) for name, v in sorted(value.keywords.items()))
        return functools.partial, _value(value.func), tuple(map(_value, value.args)), given
    if isinstance(value, tuple | list | dict | set | frozenset) and not value:
        return type(value)
    raise _UnlikeError


def _frozen(arguments: Any) -> Hashable:
    if isinstance(arguments, dict):
        return tuple((name, _frozen(value)) for name, value in arguments.items())
    if isinstance(arguments, tuple | list):
        return tuple(_frozen(value) for value in arguments)
    if isinstance(arguments, slice):
        return ("slice", arguments.start, arguments.stop, arguments.step)
    return arguments
