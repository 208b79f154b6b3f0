"""Calls of the C kernels, with tensors."""

from __future__ import annotations

import ctypes
import math
from functools import lru_cache

import torch

from ..core import native
from ..core.native import (
    ActivationKind,
    ActivationSource,
    Epilogue,
    LowRank,
    NormOrder,
    NormSource,
    Output,
)
from ..core.oracle import ActivationSemantics, NormSemantics, quantize_static
from ..core.oracle.activation import unary_table
from ..core.oracle.norm import name_inputs
from ..core.quant_key import ScaleFormat, ScaleLayout
from .contract import InputContract
from .outputs import Outputs, Shrink, empty, new_outputs
from .rows import as_rows, rows_of

_CPU = torch.device("cpu")
#: Activations that kernels compute, at more than the cost of a lookup.
_DEAR = ("silu",)
#: How many elements it takes for a table of codes to pay.
_CODE_TABLE_ELEMENTS = 32768
_NO_KEY = InputContract(None)


def computes(*activations: torch.Tensor) -> bool:
    """Whether the C kernels are there and can read these (..., K) tensors."""
    return native.load().available and all(
        x.dtype == torch.bfloat16 and x.device.type == "cpu" and as_rows(x) is not None
        for x in activations
    )


def activation(
    semantics: ActivationSemantics, inputs: tuple[torch.Tensor, ...], outputs: Outputs
) -> None:
    """Fill `outputs` with what `semantics` makes of (x,) or (gate, up).

    Args:
        semantics: what to compute.
        inputs: bfloat16 on the CPU, as `computes` accepts them, of one shape.
        outputs: where to.

    Raises:
        MemoryError: there is no memory for scratch buffers.
    """
    gate = inputs[0]
    source = ActivationSource(gate=gate.data_ptr(), gate_stride=rows_of(gate).stride)
    source.up_limit = math.inf
    codes = _code_table(semantics, outputs)
    if codes is None and _is_computed(semantics):
        source.kind = ActivationKind[semantics.activation.upper()]
    else:
        source.kind = ActivationKind.TABLE
        source.table = unary_table(semantics, gate.dtype, _CPU).data_ptr()
        source.code_table = None if codes is None else codes.data_ptr()
    if semantics.gated:
        up = inputs[1]
        source.up, source.up_stride = up.data_ptr(), rows_of(up).stride
        if semantics.limit is not None:
            source.up_limit = torch.tensor(semantics.limit, dtype=up.dtype).item()
        if semantics.up_offset is not None:
            source.up_offset = semantics.up_offset
    _call("bl_activation", source, outputs)


def _code_table(semantics: ActivationSemantics, outputs: Outputs) -> torch.Tensor | None:
    """Static codes for every encoding of the gate, where looking them up costs least; else None.

    Values that are computed with less effort than a lookup are not looked up.  Nor are few: each
    scale has its own table, which no cache holds yet.
    """
    key, scale = outputs.contract.key, outputs.contract.scale
    if semantics.gated or key is None or not key.static or scale is None:
        return None
    if outputs.rows * outputs.columns < _CODE_TABLE_ELEMENTS:
        return None
    if _is_computed(semantics) and semantics.activation not in _DEAR:
        return None
    return _codes_of_encodings(semantics, scale.number)


# 64 KiB each; the caller holds the table until its kernel has returned.
@lru_cache(maxsize=512)
def _codes_of_encodings(semantics: ActivationSemantics, scale: float) -> torch.Tensor:
    values = unary_table(semantics, torch.bfloat16, _CPU)
    return quantize_static(values, torch.tensor([scale]))


def _is_computed(semantics: ActivationSemantics) -> bool:
    parameters = (semantics.limit, semantics.multiplier, semantics.up_offset)
    return not semantics.tabled and all(value is None for value in parameters)


def norm(
    semantics: NormSemantics, inputs: tuple[torch.Tensor, ...], outputs: Outputs
) -> torch.Tensor | None:
    """Fill `outputs` with the norm of (x, [residual,] weight, [bias]).

    Args:
        semantics: what to compute.
        inputs: bfloat16 on the CPU; activations as `computes` accepts them, the rest contiguous.
        outputs: where to.

    Returns:
        the new residual, contiguous, where one is added; else None.

    Raises:
        MemoryError: there is no memory for scratch buffers.
    """
    x, residual, weight, bias = name_inputs(semantics, inputs)
    source = NormSource(
        order=NormOrder[semantics.order.upper()],
        eps=semantics.eps,
        x=x.data_ptr(),
        x_stride=rows_of(x).stride,
        weight=weight.data_ptr(),
        bias=None if bias is None else bias.data_ptr(),
    )
    added = None
    if residual is not None:
        added = empty(x.shape, x.dtype, x.device)
        source.residual, source.residual_stride = residual.data_ptr(), rows_of(residual).stride
        source.new_residual, source.new_residual_stride = added.data_ptr(), outputs.columns
    _call("bl_norm", source, outputs)
    return added


def shrink(rows: torch.Tensor, request: Shrink) -> torch.Tensor:
    """Each of `rows` (M, K) times its request's A: float32 (M, width).

    Args:
        rows: as `shrinks` accepts them.
        request: what to multiply them with.

    Raises:
        ContractError: rows that do not belong to the requests in turn, or other columns.
        MemoryError: there is no memory for scratch buffers.
    """
    (out,) = new_outputs(rows, _NO_KEY, request.consumer, shrinks=(request,)).shrunk
    # Where there is no slot or no rank, nothing is written.
    out.zero_()
    stack = LowRank(
        a=request.a.data_ptr(),
        dtype=native.LORA_DTYPES[request.a.dtype],
        starts=request.starts.data_ptr(),
        ranks=request.ranks.data_ptr(),
        columns=rows.shape[1],
        width=request.width,
    )
    call = native.low_rank_call(
        ctypes.addressof(stack),
        (rows.data_ptr(), rows.dtype, rows_of(rows).stride),
        request.slots,
        (0, torch.float32, 0),
        product=out.data_ptr(),
    )
    if rows.shape[0]:
        native.load().call("bl_low_rank", call, 1, rows.shape[0], native.threads())
    return out


def shrinks(rows: torch.Tensor, a: torch.Tensor) -> bool:
    """Whether the C kernels are there and multiply rows and matrices of these dtypes."""
    known = rows.dtype in native.LORA_DTYPES and a.dtype in native.LORA_DTYPES
    on_cpu = rows.device.type == "cpu" and as_rows(rows) is not None
    return known and on_cpu and native.load().available


def decode_fp8(codes: torch.Tensor) -> torch.Tensor:
    """float32 values of e4m3fn codes (rows, K) on the CPU, no scale applied."""
    out = torch.empty(codes.shape, dtype=torch.float32)
    native.load().call(
        "bl_fp8_decode",
        codes.data_ptr(),
        codes.stride(0),
        out.data_ptr(),
        out.stride(0),
        *codes.shape,
        native.threads(),
    )
    return out


def _call(name: str, source: ActivationSource | NormSource, outputs: Outputs) -> None:
    # Structures hold addresses only: what they point into lives here until the call ends.
    output = _output(outputs)
    if outputs.shrinks:
        shrinks = _shrinks(outputs)
        output.shrinks, output.shrink_count = shrinks, len(shrinks)
    native.load().call(
        name,
        ctypes.byref(source),
        ctypes.byref(output),
        outputs.rows,
        outputs.columns,
        native.threads(),
    )


def _output(outputs: Outputs) -> Output:
    output = Output.from_buffer_copy(_template(outputs.contract))
    output.requests = outputs.requests
    if outputs.codes is not None:
        _place_codes(output, outputs)
    if outputs.raw is not None:
        output.raw, output.raw_stride = outputs.raw.values.data_ptr(), outputs.columns
        if outputs.raw_map is not None:
            output.raw_map = outputs.raw_map.data_ptr()
    return output


@lru_cache(maxsize=4096)
def _template(contract: InputContract) -> Output:
    """What is the same in all calls for one consumer."""
    output, key = Output(), contract.key
    if key is None:
        return output
    output.epilogue = Epilogue[key.epilogue.upper()]
    if contract.scale is not None:
        output.inv_scale = contract.scale.reciprocal
    if contract.global_scale is not None:
        output.global_scale = contract.global_scale.number
    output.group = key.granularity.size
    output.ue8m0 = key.scale_format == ScaleFormat.UE8M0
    output.scale_dtype = native.SCALE_DTYPES[key.scale_dtype]
    output.swizzled = key.layout == ScaleLayout.SWIZZLE_128X4
    return output


def _place_codes(output: Output, outputs: Outputs) -> None:
    key, codes, scale = outputs.contract.key, outputs.codes, outputs.scale
    assert key is not None
    assert codes is not None
    assert scale is not None
    output.codes, output.codes_stride = codes.data_ptr(), codes.shape[-1]
    output.code_rows = outputs.rows if key.row_multiple == 1 else codes.shape[0]
    if key.static:
        return
    output.scale = scale.data_ptr()
    output.scale_rows, output.scale_groups = scale.shape[:-1].numel(), scale.shape[-1]
    column_major = key.layout == ScaleLayout.COLUMN_MAJOR
    output.scale_row_stride = 1 if column_major else output.scale_groups
    output.scale_group_stride = output.scale_rows if column_major else 1


def _shrinks(outputs: Outputs) -> ctypes.Array[native.ShrinkOutput]:
    array = (native.ShrinkOutput * len(outputs.shrinks))()
    for entry, request, out in zip(array, outputs.shrinks, outputs.shrunk, strict=True):
        a = request.a
        entry.a, entry.a_dtype = a.data_ptr(), native.LORA_DTYPES[a.dtype]
        entry.row_stride, entry.starts = a.stride(0), request.starts.data_ptr()
        entry.ranks, entry.slots = request.ranks.data_ptr(), request.slots.data_ptr()
        entry.width, entry.out, entry.out_stride = request.width, out.data_ptr(), out.stride(0)
    return array
