"""Producers as functions: arguments checked, the registry asked, outputs as plain tensors.

What the custom ops of `fusion.ops` have in common.  Their arguments are what an op's schema can
hold (tensors, numbers, texts); here they become semantics, contracts and emissions.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ..core.errors import ConfigError, ContractError, KernelUnavailableError, ScaleError
from ..core.oracle import (
    ACTIVATIONS,
    ActivationSemantics,
    NormSemantics,
    Semantics,
)
from ..core.oracle.norm import name_inputs
from ..core.platform import Platform, detect_platform
from ..core.quant_key import QuantKey, ScaleLayout
from ..core.route import Route
from ..linear.contract import InputContract, InputScale
from ..linear.outputs import RawRequest, Shrink
from .producers.base import Emission, Producer, ProducerRequest
from .registry import REGISTRY

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
#: One-byte dtypes that compilers do not know: in and out of an op they are uint8.
_UNKNOWN_TO_COMPILERS = (torch.float8_e8m0fnu, torch.float4_e2m1fn_x2)

#: Checked scales by the tensor they came in, with its version: checking waits for the device.
_scales: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


class Scales(NamedTuple):
    """The scales that an op was handed: float32 (1,), or None where the key has none."""

    static: torch.Tensor | None
    global_: torch.Tensor | None


class Emitted(NamedTuple):
    """One call's outputs, none of which shares memory with an input or another call's.

    Attributes:
        codes: `key.code_shape`, contiguous; uint8 where compilers do not know the code dtype.
        scale: `key.scale_shape`, as the key lays it out; (1,) for a static key; uint8 likewise.
        raw: (..., K), or None.
        shrunk: float32 (M, width) for each consumer.
        residual: (..., K); (0,) where there is none.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    raw: torch.Tensor | None
    shrunk: list[torch.Tensor]
    residual: torch.Tensor


# --- what is known without values, checked while tracing too -----------------------------------


def activation_semantics(
    activation: str,
    gated: bool,
    limit: float | None,
    multiplier: float | None,
    up_offset: float | None,
) -> ActivationSemantics:
    """The semantics of an activation op.

    Raises:
        ConfigError: an unknown activation, a parameter that is not finite, or an offset without an
            `up`.
    """
    semantics = ActivationSemantics(activation, gated, limit, multiplier, up_offset)
    if activation not in ACTIVATIONS and not semantics.custom:
        raise ConfigError(
            f"activation {activation!r}",
            "is not known",
            f"use one of {', '.join(ACTIVATIONS)}, or a name that define_custom returned",
        )
    return semantics


def norm_semantics(order: str, eps: float, *, bias: bool, residual: bool) -> NormSemantics:
    """The semantics of a norm op.

    Raises:
        ConfigError: an unknown order, an epsilon that is none, or a bias where none is added.
    """
    semantics = NormSemantics(order, eps, bias, residual)
    if not 0.0 <= eps < math.inf:
        raise ConfigError(f"epsilon of {semantics}", f"is {eps}", "pass a finite number from 0 on")
    return semantics


def check_call(key: QuantKey, scales: Scales, activations: Mapping[str, torch.Tensor]) -> None:
    """What holds for every call of an op, checked without reading a value or a size.

    Raises:
        ScaleError: a scale that the key needs is missing, or one that it has not is given.
        ContractError: a dtype, or a number of dimensions, that no producer reads.
    """
    for what, scale, needed in (
        ("static", scales.static, key.static),
        ("global", scales.global_, key.global_scale),
    ):
        if needed != (scale is not None):
            fault = f"needs a {what} scale" if needed else f"has no {what} scale, one was given"
            raise ScaleError(f"key {key}", fault, "pass the scales that the key has, and no others")
    for what, x in activations.items():
        if x.dtype not in _DTYPES or x.dim() == 0:
            raise ContractError(
                what,
                f"is {x.dtype} of {x.dim()} dimensions",
                "pass (..., K) in bfloat16, float16 or float32",
            )
        # Column-major scales are those of rows and groups: there have to be rows.
        if x.dim() < 2 and key.layout == ScaleLayout.COLUMN_MAJOR:
            raise ContractError(what, f"is one row, the key is {key}", "pass (rows, K)")


# --- shapes, for tracing -----------------------------------------------------------------------


def room(x: torch.Tensor, key: QuantKey) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scale as an op emits them for an activation like `x` (..., K), unwritten."""
    shape = tuple(x.shape)
    codes = x.new_empty(key.code_shape(shape), dtype=_carried(key.code_dtype))
    sizes = key.scale_shape(shape)
    if key.layout == ScaleLayout.COLUMN_MAJOR:
        return codes, x.new_empty(sizes[::-1], dtype=_carried(key.scale_dtype)).t()
    return codes, x.new_empty(sizes, dtype=_carried(key.scale_dtype))


def shrunk_room(x: torch.Tensor, a: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Shrunk rows (M, width) for each of `a` (slots, width, K), unwritten."""
    rows = 1
    for size in x.shape[:-1]:
        rows = rows * size
    return [x.new_empty((rows, stack.shape[1]), dtype=torch.float32) for stack in a]


def residual_room(x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
    """The new residual, unwritten; (0,) where there is none."""
    return x.new_empty((0,)) if residual is None else x.new_empty(tuple(x.shape))


def _carried(dtype: torch.dtype) -> torch.dtype:
    return torch.uint8 if dtype in _UNKNOWN_TO_COMPILERS else dtype


# --- calls -------------------------------------------------------------------------------------


def check_rows(rows: torch.Tensor, x: torch.Tensor, what: str) -> None:
    """Whether the rows of `x` (..., K) belong to the requests that `rows` (R,) lists, in turn.

    Raises:
        ContractError: not one dimension, another device, or R does not divide the rows.
    """
    number = x.shape[:-1].numel()
    requests = rows.shape[0] if rows.dim() == 1 else 0
    whole = number % requests == 0 if requests else rows.dim() == 1 and number == 0
    if not whole or rows.device != x.device:
        raise ContractError(
            what,
            f"have shape {tuple(rows.shape)} on {rows.device}, the activation has {number} rows "
            f"on {x.device}",
            "pass one element a request, each with the same number of rows",
        )


def raw_request(rows: torch.Tensor | None, x: torch.Tensor) -> RawRequest:
    """Raw rows in place, of the requests that `rows` (bool (R,)) asks for; None for all.

    Raises:
        ContractError: `rows` is not bool, or does not go with the rows of `x`.
    """
    if rows is None:
        return RawRequest()
    if rows.dtype != torch.bool:
        raise ContractError("rows", f"are {rows.dtype}", "pass bool (R,)")
    check_rows(rows, x, "rows")
    return RawRequest(rows)


def shrinks_of(
    x: torch.Tensor,
    a: Sequence[torch.Tensor],
    ranks: Sequence[torch.Tensor],
    slots: Sequence[torch.Tensor],
) -> tuple[Shrink, ...]:
    """What each consumer's branches multiply the activation `x` (..., K) with.

    Raises:
        ContractError: a list of another length, no consumer, or a tensor of another kind.
    """
    if not a or not len(a) == len(ranks) == len(slots):
        raise ContractError(
            "absorbed shrinks",
            f"are {len(a)} A, {len(ranks)} ranks and {len(slots)} slots",
            "pass one of each for every consumer, and one consumer at least",
        )
    return tuple(
        _shrink(f"consumer {index}", x, *tensors)
        for index, tensors in enumerate(zip(a, ranks, slots, strict=True))
    )


def _shrink(
    name: str, x: torch.Tensor, a: torch.Tensor, ranks: torch.Tensor, slots: torch.Tensor
) -> Shrink:
    fits = (
        a.dim() == 3
        and a.shape[2] == x.shape[-1]
        and a.is_contiguous()
        and a.dtype in _DTYPES
        and a.device == ranks.device == x.device
        and ranks.shape == a.shape[:1]
        and ranks.dtype == slots.dtype == torch.int32
    )
    if not fits:
        raise ContractError(
            f"A of {name}",
            f"is {a.dtype} {tuple(a.shape)} with {ranks.dtype} ranks {tuple(ranks.shape)} and "
            f"{slots.dtype} slots, for {x.shape[-1]} columns on {x.device}",
            "pass contiguous (slots, width, K), int32 ranks (slots,) and int32 slots (R,)",
        )
    check_rows(slots, x, f"slots of {name}")
    if x.device.type == "cpu":
        _check_values(name, a, ranks, slots)
    # The highest live rank is on the device: what a slot holds bounds it without a wait.
    return Shrink.stacked(name, a, ranks.contiguous(), slots.contiguous(), a.shape[1])


def _check_values(name: str, a: torch.Tensor, ranks: torch.Tensor, slots: torch.Tensor) -> None:
    """Kernels would read and write beyond the end; on a GPU looking would wait for the device."""
    for what, values, least, most in (
        ("ranks", ranks, 0, a.shape[1]),
        ("slots", slots, -1, a.shape[0] - 1),
    ):
        if values.numel() and not (least <= int(values.min()) and int(values.max()) <= most):
            raise ContractError(
                f"{what} of {name}",
                f"lie between {int(values.min())} and {int(values.max())}, A is {tuple(a.shape)}",
                f"pass {what} from {least} to {most}",
            )


def emit(
    semantics: Semantics,
    inputs: tuple[torch.Tensor, ...],
    key: QuantKey,
    scales: Scales,
    route: Route = Route.FUSED,
    *,
    raw: RawRequest | None = None,
    shrinks: tuple[Shrink, ...] = (),
) -> Emitted:
    """One call of the producer that the registry chooses for the tensors' device.

    Raises:
        KernelUnavailableError: no producer runs there, or the chosen one cannot read the tensors.
        ScaleError: a scale is not positive, not finite, or elsewhere.
        ContractError: inputs that do not fit each other.
    """
    _check_inputs(semantics, inputs)
    x = inputs[0]
    emission = Emission(_contract(key, scales, x.device), route, raw=raw, shrinks=shrinks)
    producer = _chosen(
        semantics,
        key,
        route,
        x.dtype,
        x.shape[-1],
        x.device,
        max((request.rank for request in shrinks), default=0),
        _lora_dtype(shrinks),
    )
    verdict = producer.accepts(semantics, inputs, emission)
    if not verdict.ok:
        raise KernelUnavailableError(
            f"{producer.name} producer of {semantics}",
            verdict.reason,
            "change what the reason names",
        )
    produced = producer.produce(semantics, inputs, emission)
    made = produced.activation
    scale = _bytes(made.scale)
    return Emitted(
        _own(_bytes(made.codes), inputs),
        # A static scale is kept for the next call, which may not see what a graph writes into it.
        scale.clone() if key.static else _laid_out(scale, key),
        None if made.raw is None else _only_asked(_own(made.raw.values, inputs), made.raw.rows),
        [] if made.shrunk is None else [made.shrunk[request.consumer] for request in shrinks],
        x.new_empty((0,)) if produced.residual is None else _own(produced.residual, inputs),
    )


def _check_inputs(semantics: Semantics, inputs: tuple[torch.Tensor, ...]) -> None:
    first = inputs[0]
    vectors: tuple[int, ...] = ()
    if isinstance(semantics, NormSemantics):
        named = name_inputs(semantics, inputs)
        vectors = tuple(id(v) for v in (named.weight, named.bias) if v is not None)
    for other in inputs[1:]:
        shape = first.shape[-1:] if id(other) in vectors else first.shape
        if (other.shape, other.dtype, other.device) != (shape, first.dtype, first.device):
            raise ContractError(
                f"an input of {semantics}",
                f"is {other.dtype} {tuple(other.shape)} on {other.device}, the first is "
                f"{first.dtype} {tuple(first.shape)} on {first.device}",
                "pass tensors of one dtype and device: (..., K), weights and biases (K,)",
            )


@functools.cache
def _platform(device: torch.device) -> Platform:
    return detect_platform(device)


# What was chosen stays chosen: registering appends, so nobody comes before it.  That nobody could
# be chosen is an exception, which is not kept.
@functools.lru_cache(maxsize=4096)
def _chosen(
    semantics: Semantics,
    key: QuantKey,
    route: Route,
    dtype: torch.dtype,
    columns: int,
    device: torch.device,
    rank: int,
    lora_dtype: torch.dtype | None,
) -> Producer:
    platform = _platform(device)
    request = ProducerRequest(semantics, key, route, dtype, columns, platform, rank, lora_dtype)
    selection = REGISTRY.select(request)
    if selection.producer is None:
        reasons = "; ".join(f"{r.name}: {r.reason}" for r in selection.rejected)
        raise KernelUnavailableError(
            f"{route} {semantics} -> {key} on {device}",
            reasons or selection.reason,
            "change what the reasons name",
        )
    return selection.producer


def _contract(key: QuantKey, scales: Scales, device: torch.device) -> InputContract:
    return InputContract(
        key,
        _checked(scales.static, "static scale", device),
        _checked(scales.global_, "global scale", device),
    )


def _checked(scale: torch.Tensor | None, what: str, device: torch.device) -> InputScale | None:
    if scale is None:
        return None
    if scale.dtype != torch.float32 or scale.device != device:
        raise ScaleError(
            what, f"is {scale.dtype} on {scale.device}", f"pass float32 (1,) on {device}"
        )
    # Without a version nothing says whether it was written to since.
    if scale.is_inference():
        return InputScale.checked(scale, what)
    kept = _scales.get(scale)
    if kept is None or kept[0] != scale._version:
        kept = _scales[scale] = (scale._version, InputScale.checked(scale, what))
    return kept[1]


def _lora_dtype(shrinks: tuple[Shrink, ...]) -> torch.dtype | None:
    dtypes = dict.fromkeys(request.a.dtype for request in shrinks)
    if len(dtypes) > 1:
        names = " and ".join(map(str, dtypes))
        raise ContractError("absorbed A matrices", f"are {names}", "pass all of one dtype")
    return next(iter(dtypes), None)


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.view(_carried(x.dtype))


def _laid_out(scale: torch.Tensor, key: QuantKey) -> torch.Tensor:
    return scale if key.layout == ScaleLayout.COLUMN_MAJOR else scale.contiguous()


def _own(x: torch.Tensor, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """`x`, contiguous, and no input of the op: a custom op may not hand those on."""
    storage = x.untyped_storage().data_ptr()
    shared = any(storage == given.untyped_storage().data_ptr() for given in inputs)
    return x.clone(memory_format=torch.contiguous_format) if shared else x.contiguous()


def _only_asked(raw: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    """Zeros where a producer wrote nothing: an op's outputs depend on its inputs alone."""
    if rows is None or not raw.numel():
        return raw
    raw.view(rows.shape[0], -1).masked_fill_(~rows.view(-1, 1), 0)
    return raw
