"""Sites inside a compiled graph: one opaque op that emits everything any route may emit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..core.quant_key import QuantKey, ScaleLayout
from ..core.quantized_activation import QuantizedActivation, RawOutput
from ..core.route import Route
from ..linear import ops
from ..linear.batch import Batch

if TYPE_CHECKING:
    from .site import Site


def traced_site(
    site: Site, inputs: tuple[torch.Tensor, ...]
) -> torch.Tensor | ops.TracedActivation:
    """The traced form of `Site.forward`."""
    # Whoever else reads it, a router say, takes a tensor: no plan fuses such a site.
    if site.common_key() is None or site.facts.other_readers:
        return _site_raw_op(list(inputs), site.handle)
    raw, codes, scale, shrunk, route = _site_op(list(inputs), site.handle)
    return ops.TracedActivation(raw, codes, scale, shrunk, route, site.handle)


@torch.library.custom_op("branchline::site", mutates_args=())
def _site_op(
    inputs: list[torch.Tensor], handle: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(raw, codes, scale, shrunk, route): what the route emits; the rest is left unwritten."""
    site: Site = ops.resolve(handle)
    out = site(*inputs)
    raw, codes, scale, shrunk, route = _room(site, inputs[0])
    if not isinstance(out, QuantizedActivation):
        route.fill_(Route.UNFUSED)
        # A custom op may not hand its input on.
        return _own(out), codes, scale, shrunk, route
    # Of what it emitted: another plan may be in force by now.
    route.fill_(Route.ABSORBED if out.shrunk else Route.FUSED if out.raw is None else Route.DUAL)
    if out.raw is not None:
        raw = _in_place(out.raw, raw)
    for consumer, rows in (out.shrunk or {}).items():
        shrunk[_place(site, consumer)].copy_(rows)
    # A static scale is the consumers' own, which a graph may not be handed.
    scale = out.scale.clone() if out.quant_key.static else _as_bytes(out.scale)
    return raw, _as_bytes(out.codes), scale, shrunk, route


@_site_op.register_fake
def _(
    inputs: list[torch.Tensor], handle: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return _room(ops.resolve(handle), inputs[0])


@torch.library.custom_op("branchline::site_raw", mutates_args=())
def _site_raw_op(inputs: list[torch.Tensor], handle: int) -> torch.Tensor:
    return _own(ops.resolve(handle)(*inputs))


@_site_raw_op.register_fake
def _(inputs: list[torch.Tensor], handle: int) -> torch.Tensor:
    return torch.empty_like(inputs[0], memory_format=torch.contiguous_format)


def _own(x: torch.Tensor) -> torch.Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def _room(
    site: Site, x: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Room for every output of `site`, unwritten."""
    key = site.contract.key
    assert key is not None
    shape = tuple(x.shape)
    rows = 1
    for size in shape[:-1]:
        rows = rows * size
    scale_shape = key.scale_shape(shape)
    if key.layout == ScaleLayout.COLUMN_MAJOR:
        scale = _bytes(x, scale_shape[::-1], key.scale_dtype).t()
    else:
        scale = _bytes(x, scale_shape, key.scale_dtype)
    return (
        x.new_empty(shape),
        _bytes(x, key.code_shape(shape), key.code_dtype),
        scale,
        x.new_empty((len(site.layers), rows, site.shrink_width), dtype=torch.float32),
        torch.empty((), dtype=torch.int64, device="cpu"),
    )


def _in_place(made: RawOutput, room: torch.Tensor) -> torch.Tensor:
    """Raw rows where a graph expects them: it cannot know how many a compact tensor has."""
    if not made.compact or made.rows is None:
        return made.values
    by_request = room.view(made.rows.shape[0], -1, room.shape[-1])
    by_request[made.rows] = made.values.view(-1, *by_request.shape[1:])
    return room


def _bytes(x: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Compilers know few of the one-byte dtypes: in a graph they are all uint8."""
    return x.new_empty(shape, dtype=torch.uint8 if dtype.itemsize == 1 else dtype)


def _as_bytes(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x


def _place(site: Site, consumer: str) -> int:
    return [layer.name for layer in site.layers].index(consumer)


def received(
    traced: ops.TracedActivation, site: Site, batch: Batch
) -> torch.Tensor | QuantizedActivation:
    """What the consumers take of a site's outputs: the counterpart of `_site_op`."""
    route = Route(int(traced.route))
    if route == Route.UNFUSED:
        return traced.raw
    contract, raw, absorbed = site.contract, None, {}
    if route != Route.FUSED:
        emission = site.emission(batch)
        contract = emission.contract
        if emission.raw is not None:
            raw = RawOutput(traced.raw, emission.raw.rows)
        absorbed = {s.consumer: traced.shrunk[_place(site, s.consumer)] for s in emission.shrinks}
    key = contract.key
    assert isinstance(key, QuantKey)
    return QuantizedActivation(
        traced.codes.view(key.code_dtype),
        traced.scale.view(key.scale_dtype),
        traced.raw.dtype,
        traced.raw.shape,
        key,
        raw,
        f"site {site.facts.name}",
        None if contract.global_scale is None else contract.global_scale.value,
        absorbed or None,
    )
