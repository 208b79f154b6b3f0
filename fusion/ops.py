"""The producers as public custom ops, for graphs written or traced by hand.

Each op is one call of the producer that the registry chooses for the tensors' device and dtype: for
float16 and float32, and where there are no kernels, the eager one.  `torch.compile(fullgraph=True)`
and `torch.export` see through, with any number of rows.  They have no gradient: a backward pass
through one raises.

In all of them:

* activations are (..., K), in bfloat16, float16 or float32, M rows once flattened;
* `key` is the text of a `QuantKey` (``str(key)``, read by `core.quant_key.parse_key`);
* `static_scale` and `global_scale` are float32 (1,), given exactly where the key has them;
* codes and scales lie as the key says; float8_e8m0fnu and float4_e2m1fn_x2, which compilers do
  not know, travel as uint8: ``view`` them;
* the scale returned for a static key is a copy of `static_scale`.

Errors, while tracing as well where no values are needed:
    ConfigError: an unknown activation, order or key; a parameter out of its range.
    ScaleError: a scale is missing, too many, not positive or not finite.
    ContractError: tensors that do not fit each other.
    KernelUnavailableError: no producer serves this here, or the chosen one cannot read a tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..core.oracle import ActivationSemantics, NormSemantics
from ..core.quant_key import QuantKey, parse_key
from ..core.route import Route
from . import dispatch
from .dispatch import Scales
from .op_results import (
    AbsorbedQuantized,
    DualQuantized,
    NormAbsorbedQuantized,
    NormDualQuantized,
    NormQuantized,
    Quantized,
)

_Tensors = tuple[torch.Tensor, ...]


# --- activations -------------------------------------------------------------------------------


def act_quant(
    gate: torch.Tensor,
    up: torch.Tensor | None = None,
    *,
    activation: str,
    key: str,
    static_scale: torch.Tensor | None = None,
    global_scale: torch.Tensor | None = None,
    limit: float | None = None,
    multiplier: float | None = None,
    up_offset: float | None = None,
) -> Quantized:
    """``act(gate)``, or ``act(gate) * up``, quantised.

    Args:
        gate: (..., K).
        up: (..., K) for a gated activation; None for a plain one.
        activation: "silu", ...: a name of `ACTIVATIONS`.
        key: the text of what the consumer accepts.
        static_scale: float32 (1,), for a static key.
        global_scale: float32 (1,), for a key that has one.
        limit: as in `ActivationSemantics`.
        multiplier: as in `ActivationSemantics`.
        up_offset: as in `ActivationSemantics`.
    """
    return Quantized(
        *_act_quant(
            gate, up, static_scale, global_scale, activation, limit, multiplier, key, up_offset
        )
    )


def act_quant_dual(
    gate: torch.Tensor,
    up: torch.Tensor | None = None,
    *,
    activation: str,
    key: str,
    rows: torch.Tensor | None = None,
    static_scale: torch.Tensor | None = None,
    global_scale: torch.Tensor | None = None,
    limit: float | None = None,
    multiplier: float | None = None,
    up_offset: float | None = None,
) -> DualQuantized:
    """`act_quant` with the raw activation beside.

    Args:
        rows: bool (R,), which of the R requests that the M rows belong to in turn are asked for;
            None for all.  The others are zeros: a pass over `raw` that a site's own dual route,
            which leaves them unwritten, does not take.

    The other arguments are those of `act_quant`.
    """
    return DualQuantized(
        *_act_quant_dual(
            gate, up, static_scale, global_scale, activation, limit, multiplier, key, rows,
            up_offset,
        )
    )  # fmt: skip


def act_quant_absorbed(
    gate: torch.Tensor,
    up: torch.Tensor | None = None,
    *,
    activation: str,
    key: str,
    a: Sequence[torch.Tensor],
    ranks: Sequence[torch.Tensor],
    slots: Sequence[torch.Tensor],
    static_scale: torch.Tensor | None = None,
    global_scale: torch.Tensor | None = None,
    limit: float | None = None,
    multiplier: float | None = None,
    up_offset: float | None = None,
) -> AbsorbedQuantized:
    """`act_quant` with the product of each row and its request's A beside, for each consumer.

    Args:
        a: (slots, width, K) for each consumer, contiguous, all of one dtype; zeros beyond a
            slot's rank.  Widths up to `MAX_ABSORBED_RANK` are served.
        ranks: int32 (slots,) for each consumer.
        slots: int32 (R,) for each consumer: the slot of each request, -1 for none.

    The other arguments are those of `act_quant`.
    """
    return AbsorbedQuantized(
        *_act_quant_absorbed(
            gate, up, static_scale, global_scale, activation, limit, multiplier, key,
            list(a), list(ranks), list(slots), up_offset,
        )
    )  # fmt: skip


# The offset comes last and has a default, so that graphs exported before there was one still load.
def _activation(
    gate: torch.Tensor,
    up: torch.Tensor | None,
    scales: Scales,
    activation: str,
    limit: float | None,
    multiplier: float | None,
    key: str,
    up_offset: float | None,
) -> tuple[ActivationSemantics, _Tensors, QuantKey]:
    semantics = dispatch.activation_semantics(
        activation, up is not None, limit, multiplier, up_offset
    )
    parsed, named = parse_key(key), {"gate": gate}
    if up is not None:
        named["up"] = up
    dispatch.check_call(parsed, scales, named)
    return semantics, tuple(named.values()), parsed


@torch.library.custom_op("branchline::act_quant", mutates_args=())
def _act_quant(
    gate: torch.Tensor,
    up: torch.Tensor | None,
    static_scale: torch.Tensor | None,
    global_scale: torch.Tensor | None,
    activation: str,
    limit: float | None,
    multiplier: float | None,
    key: str,
    up_offset: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    scales = Scales(static_scale, global_scale)
    call = _activation(gate, up, scales, activation, limit, multiplier, key, up_offset)
    made = dispatch.emit(*call, scales)
    return made.codes, made.scale


@_act_quant.register_fake
def _(gate, up, static_scale, global_scale, activation, limit, multiplier, key, up_offset=None):
    scales = Scales(static_scale, global_scale)
    *_, parsed = _activation(gate, up, scales, activation, limit, multiplier, key, up_offset)
    return dispatch.room(gate, parsed)


@torch.library.custom_op("branchline::act_quant_dual", mutates_args=())
def _act_quant_dual(
    gate: torch.Tensor,
    up: torch.Tensor | None,
    static_scale: torch.Tensor | None,
    global_scale: torch.Tensor | None,
    activation: str,
    limit: float | None,
    multiplier: float | None,
    key: str,
    rows: torch.Tensor | None,
    up_offset: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    scales = Scales(static_scale, global_scale)
    call = _activation(gate, up, scales, activation, limit, multiplier, key, up_offset)
    made = dispatch.emit(*call, scales, Route.DUAL, raw=dispatch.raw_request(rows, gate))
    assert made.raw is not None
    return made.codes, made.scale, made.raw


@_act_quant_dual.register_fake
def _(
    gate, up, static_scale, global_scale, activation, limit, multiplier, key, rows, up_offset=None
):
    scales = Scales(static_scale, global_scale)
    *_, parsed = _activation(gate, up, scales, activation, limit, multiplier, key, up_offset)
    return *dispatch.room(gate, parsed), gate.new_empty(tuple(gate.shape))


@torch.library.custom_op("branchline::act_quant_absorbed", mutates_args=())
def _act_quant_absorbed(
    gate: torch.Tensor,
    up: torch.Tensor | None,
    static_scale: torch.Tensor | None,
    global_scale: torch.Tensor | None,
    activation: str,
    limit: float | None,
    multiplier: float | None,
    key: str,
    a: list[torch.Tensor],
    ranks: list[torch.Tensor],
    slots: list[torch.Tensor],
    up_offset: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    scales = Scales(static_scale, global_scale)
    call = _activation(gate, up, scales, activation, limit, multiplier, key, up_offset)
    shrinks = dispatch.shrinks_of(gate, a, ranks, slots)
    made = dispatch.emit(*call, scales, Route.ABSORBED, shrinks=shrinks)
    return made.codes, made.scale, made.shrunk


@_act_quant_absorbed.register_fake
def _(
    gate, up, static_scale, global_scale, activation, limit, multiplier, key, a, ranks, slots,
    up_offset=None,
):  # fmt: skip
    scales = Scales(static_scale, global_scale)
    *_, parsed = _activation(gate, up, scales, activation, limit, multiplier, key, up_offset)
    return *dispatch.room(gate, parsed), dispatch.shrunk_room(gate, a)


# --- norms -------------------------------------------------------------------------------------


def norm_quant(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    *,
    order: str,
    eps: float,
    key: str,
    static_scale: torch.Tensor | None = None,
    global_scale: torch.Tensor | None = None,
) -> NormQuantized:
    """The norm of `x`, or of ``round(x + residual)``, quantised.

    Args:
        x: (..., K).
        weight: (K,).
        bias: (K,), for a LayerNorm that has one.
        residual: (..., K); the sum is returned as the new residual.
        order: "llama", ...: one of `NORM_ORDERS`.
        eps: as in `NormSemantics`.
        key: the text of what the consumer accepts.
        static_scale: float32 (1,), for a static key.
        global_scale: float32 (1,), for a key that has one.
    """
    return NormQuantized(
        *_norm_quant(x, weight, bias, residual, static_scale, global_scale, order, eps, key)
    )


def norm_quant_dual(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    *,
    order: str,
    eps: float,
    key: str,
    rows: torch.Tensor | None = None,
    static_scale: torch.Tensor | None = None,
    global_scale: torch.Tensor | None = None,
) -> NormDualQuantized:
    """`norm_quant` with the raw activation beside; `rows` as for `act_quant_dual`."""
    return NormDualQuantized(
        *_norm_quant_dual(
            x, weight, bias, residual, static_scale, global_scale, order, eps, key, rows
        )
    )


def norm_quant_absorbed(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    *,
    order: str,
    eps: float,
    key: str,
    a: Sequence[torch.Tensor],
    ranks: Sequence[torch.Tensor],
    slots: Sequence[torch.Tensor],
    static_scale: torch.Tensor | None = None,
    global_scale: torch.Tensor | None = None,
) -> NormAbsorbedQuantized:
    """`norm_quant` with shrunk rows beside; `a`, `ranks`, `slots` as for `act_quant_absorbed`."""
    return NormAbsorbedQuantized(
        *_norm_quant_absorbed(
            x, weight, bias, residual, static_scale, global_scale, order, eps, key,
            list(a), list(ranks), list(slots),
        )
    )  # fmt: skip


def _norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    scales: Scales,
    order: str,
    eps: float,
    key: str,
) -> tuple[NormSemantics, _Tensors, QuantKey]:
    semantics = dispatch.norm_semantics(
        order, eps, bias=bias is not None, residual=residual is not None
    )
    parsed = parse_key(key)
    given = {"x": x, "residual": residual, "weight": weight, "bias": bias}
    named = {what: tensor for what, tensor in given.items() if tensor is not None}
    dispatch.check_call(parsed, scales, {"x": x})
    return semantics, tuple(named.values()), parsed


@torch.library.custom_op("branchline::norm_quant", mutates_args=())
def _norm_quant(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    static_scale: torch.Tensor | None,
    global_scale: torch.Tensor | None,
    order: str,
    eps: float,
    key: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    scales = Scales(static_scale, global_scale)
    made = dispatch.emit(*_norm(x, weight, bias, residual, scales, order, eps, key), scales)
    return made.codes, made.scale, made.residual


@_norm_quant.register_fake
def _(x, weight, bias, residual, static_scale, global_scale, order, eps, key):
    scales = Scales(static_scale, global_scale)
    *_, parsed = _norm(x, weight, bias, residual, scales, order, eps, key)
    return *dispatch.room(x, parsed), dispatch.residual_room(x, residual)


@torch.library.custom_op("branchline::norm_quant_dual", mutates_args=())
def _norm_quant_dual(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    static_scale: torch.Tensor | None,
    global_scale: torch.Tensor | None,
    order: str,
    eps: float,
    key: str,
    rows: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    scales = Scales(static_scale, global_scale)
    call = _norm(x, weight, bias, residual, scales, order, eps, key)
    made = dispatch.emit(*call, scales, Route.DUAL, raw=dispatch.raw_request(rows, x))
    assert made.raw is not None
    return made.codes, made.scale, made.raw, made.residual


@_norm_quant_dual.register_fake
def _(x, weight, bias, residual, static_scale, global_scale, order, eps, key, rows):
    scales = Scales(static_scale, global_scale)
    *_, parsed = _norm(x, weight, bias, residual, scales, order, eps, key)
    raw = x.new_empty(tuple(x.shape))
    return *dispatch.room(x, parsed), raw, dispatch.residual_room(x, residual)


@torch.library.custom_op("branchline::norm_quant_absorbed", mutates_args=())
def _norm_quant_absorbed(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    static_scale: torch.Tensor | None,
    global_scale: torch.Tensor | None,
    order: str,
    eps: float,
    key: str,
    a: list[torch.Tensor],
    ranks: list[torch.Tensor],
    slots: list[torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor], torch.Tensor]:
    scales = Scales(static_scale, global_scale)
    call = _norm(x, weight, bias, residual, scales, order, eps, key)
    shrinks = dispatch.shrinks_of(x, a, ranks, slots)
    made = dispatch.emit(*call, scales, Route.ABSORBED, shrinks=shrinks)
    return made.codes, made.scale, made.shrunk, made.residual


@_norm_quant_absorbed.register_fake
def _(x, weight, bias, residual, static_scale, global_scale, order, eps, key, a, ranks, slots):
    scales = Scales(static_scale, global_scale)
    *_, parsed = _norm(x, weight, bias, residual, scales, order, eps, key)
    shrunk = dispatch.shrunk_room(x, a)
    return *dispatch.room(x, parsed), shrunk, dispatch.residual_room(x, residual)
