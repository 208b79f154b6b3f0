"""Custom ops, so that a compiled graph sees through sites and linears and bakes no route in.

A graph must not be compiled again when an adapter comes or goes.  So inside `torch.compile` a site
hands on room for everything that any route emits, of which this batch's plan says what was
written, and both the site and the linear decide at run time, inside an opaque op.  What stays
unwritten costs an allocation, no memory traffic.
"""

from __future__ import annotations

import itertools
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..core.quantized_activation import QuantizedActivation

if TYPE_CHECKING:
    from .routed import RoutedLinear

_objects: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_handles = itertools.count(1)


def register(target: Any) -> int:
    """A handle by which an op finds `target`; the table holds no reference to it."""
    handle = next(_handles)
    _objects[handle] = target
    return handle


def resolve(handle: int) -> Any:
    """The object behind a handle of this process."""
    # A graph may hold a symbol in its place, where it was traced for several layers.
    return _objects[int(handle)]


@dataclass(eq=False)
class TracedActivation:
    """What a site hands to its linears inside a compiled graph; its batch's route says what of it
    was written.

    Attributes:
        raw: (..., K): all rows (unfused), those of adapters (dual), or none.
        codes: uint8, as the key of the consumers lays codes out.
        scale: as the key lays scales out; uint8 where they are one byte each.
        shrunk: float32 (consumers, M, width), for an absorbed route.
        route: int64 (), on the CPU: the route that the site took.
        site: handle of the site.
    """

    raw: torch.Tensor
    codes: torch.Tensor
    scale: torch.Tensor
    shrunk: torch.Tensor
    route: torch.Tensor
    site: int

    @property
    def shape(self) -> torch.Size:
        """Shape of the activation."""
        return self.raw.shape

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the activation."""
        return self.raw.dtype


def routed_linear(
    x: torch.Tensor | QuantizedActivation | TracedActivation, handle: int, out_features: int
) -> torch.Tensor:
    """The traced form of `RoutedLinear.forward`."""
    if isinstance(x, TracedActivation):
        parts = [x.codes, x.scale, x.shrunk, x.route]
        return _routed_linear_op(x.raw, parts, handle, x.site, out_features)
    return _routed_linear_op(x, [], handle, 0, out_features)


@torch.library.custom_op("branchline::routed_linear", mutates_args=())
def _routed_linear_op(
    raw: torch.Tensor, parts: list[torch.Tensor], handle: int, site: int, out_features: int
) -> torch.Tensor:
    layer: RoutedLinear = resolve(handle)
    if not parts:
        return layer.run(raw)
    codes, scale, shrunk, route = parts
    traced = TracedActivation(raw, codes, scale, shrunk, route, site)
    return layer.run(resolve(site).received(traced))


@_routed_linear_op.register_fake
def _(
    raw: torch.Tensor, parts: list[torch.Tensor], handle: int, site: int, out_features: int
) -> torch.Tensor:
    return raw.new_empty((*raw.shape[:-1], out_features))


@torch.library.custom_op("branchline::routed_experts", mutates_args=())
def routed_experts(
    x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, handle: int
) -> torch.Tensor:
    """The traced form of the experts' forward: (T, H), like `x`."""
    return resolve(handle).run(x, index, weights)


@routed_experts.register_fake
def _(x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, handle: int) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.custom_op("branchline::entered", mutates_args=())
def entered(x: torch.Tensor, handle: int) -> torch.Tensor:
    """A copy of `x`, (R, T, ...), made where the object behind `handle` has seen its shape.

    What a graph computes of the copy is computed after that.
    """
    resolve(handle).see(x)
    return x.clone()


@entered.register_fake
def _(x: torch.Tensor, handle: int) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("branchline::routed_module", mutates_args=())
def routed_module(x: torch.Tensor, handle: int) -> torch.Tensor:
    """The traced form of `ModulePlace.__call__`: (..., what the module makes of `x`)."""
    return resolve(handle).run(x)


@routed_module.register_fake
def _(x: torch.Tensor, handle: int) -> torch.Tensor:
    return resolve(handle).made_like(x)
