"""Custom ops, so that a compiled graph sees through sites and linears and bakes no route in.

A graph must not be compiled again when an adapter comes or goes.  So inside `torch.compile` a site
hands on a pair (codes, raw) of which this batch's plan says which one was written, and both the
site and the linear decide at run time, inside an opaque op.  The unwritten one costs an
allocation, no memory traffic.
"""

from __future__ import annotations

import itertools
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..core.quantized_activation import QuantizedActivation
from ..core.route import Route

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
    return _objects[handle]


@dataclass(eq=False)
class TracedActivation:
    """What a site hands to its linears inside a compiled graph.

    Attributes:
        raw: (..., K); written only if the plan of the running batch says unfused.
        codes: float8_e4m3fn (..., K); written only if it says otherwise.
        site: index of the site in the plan.
    """

    raw: torch.Tensor
    codes: torch.Tensor
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
        return _routed_linear_op(x.raw, x.codes, handle, x.site, out_features)
    return _routed_linear_op(x, None, handle, -1, out_features)


@torch.library.custom_op("branchline::routed_linear", mutates_args=())
def _routed_linear_op(
    raw: torch.Tensor, codes: torch.Tensor | None, handle: int, site: int, out_features: int
) -> torch.Tensor:
    layer: RoutedLinear = resolve(handle)
    if codes is None:
        return layer.run(raw)
    route = layer.current_routes()[site]
    if route == Route.UNFUSED:
        return layer.run(raw)
    contract = layer.kernel.contract
    assert contract.key is not None
    assert contract.scale is not None
    kept = raw if route == Route.DUAL else None
    return layer.run(
        QuantizedActivation(
            codes, contract.scale.value, raw.dtype, raw.shape, contract.key, kept, f"site {site}"
        )
    )


@_routed_linear_op.register_fake
def _(
    raw: torch.Tensor, codes: torch.Tensor | None, handle: int, site: int, out_features: int
) -> torch.Tensor:
    return raw.new_empty((*raw.shape[:-1], out_features))
