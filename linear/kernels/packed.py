"""FP8 and bfloat16 weights as the C matmul reads them, and its calls."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import torch
import torch.nn.functional as F

from ...core import native
from ...core.native import PANEL, InputKind, Matmul, WeightKind
from ...core.quant_key import QuantKey
from ..outputs import empty
from ..quantized_weight import QuantizedWeight
from ..rows import as_rows, rows_of
from .reference import BLOCK, block_columns

_KINDS = {
    torch.float8_e4m3fn: InputKind.E4M3,
    torch.bfloat16: InputKind.BF16,
    torch.float32: InputKind.F32,
}


class Packed:
    """A weight in panels of `PANEL` output channels, and its calls."""

    _out_features: int
    #: What is the same in all calls; it holds addresses, so whoever makes it keeps the tensors.
    _template: Matmul

    @cached_property
    def _constants(self) -> tuple[int, ...]:
        """The fields of all calls that lie between those of the input and those of the output."""
        names = [field[0] for field in Matmul._fields_]
        constant = names[names.index("x_group") : names.index("out")]
        return tuple(getattr(self._template, name) or 0 for name in constant)

    def call(self, x: PackedInput, dtype: torch.dtype) -> tuple[tuple[int, ...], torch.Tensor]:
        """The fields of a struct bl_matmul, and where its (M, N) go: bfloat16 or float32."""
        columns, channels = self._template.columns, self._out_features
        out = empty((x.rows.number, channels), dtype, x.values.device)
        to = out.data_ptr(), dtype == torch.bfloat16, channels
        return (x.rows.number, columns, channels, *x.fields, *self._constants, *to), out


class PackedBfloat16(Packed):
    """One bfloat16 weight in panels of `PANEL` output channels, two bytes an element.

    Args:
        weight: bfloat16 (N, K), K at least 1, on the CPU.
        bias: (N,), or None.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._out_features, columns = weight.shape
        self._halves = pack_halves(weight)
        self._bias = None if bias is None else padded_bias(bias, self._out_features)
        call = Matmul(columns=columns, out_features=self._out_features, block=BLOCK)
        call.weight, call.weight_kind = self._halves.data_ptr(), WeightKind.BF16
        call.bias = None if self._bias is None else self._bias.data_ptr()
        call.out_stride = self._out_features
        self._template = call

    @property
    def nbytes(self) -> int:
        """Bytes in memory, bias excluded."""
        return self._halves.numel() * 2

    def unpacked(self) -> torch.Tensor:
        """The weight as it was, to the bit: bfloat16 (N, K), contiguous, a copy."""
        return unpack_halves(self._halves, self._out_features, self._template.columns)


class PackedWeight(Packed):
    """One FP8 weight in panels of `PANEL` output channels, a byte an element.

    Args:
        weight: codes without NaN, of a scheme that `packing_refusal` has nothing against.
        bias: float32 (N,), or None.
        key: of the input, or None for unquantised activations.
    """

    def __init__(
        self, weight: QuantizedWeight, bias: torch.Tensor | None, key: QuantKey | None
    ) -> None:
        self._source = without_codes(weight)
        self._out_features = weight.out_features
        self._codes = pack_codes(weight.codes)
        self._scale = pack_scale(weight)
        self._bias = None if bias is None else padded_bias(bias, self._out_features)
        self._template = codes_template(weight, key, self._codes, self._scale, self._bias)

    @property
    def nbytes(self) -> int:
        """Bytes in memory, scales included and bias excluded."""
        return self._codes.numel() + self._scale.numel() * 4 + self._source.nbytes

    def unpacked(self) -> QuantizedWeight:
        """The weight as it was."""
        return replace(self._source, codes=unpack_codes(self._codes, self._out_features))


class PackedInput:
    """What packed weights are multiplied with.

    Args:
        values: (..., K), codes or unquantised activations, on the CPU.
        scale: (1,), or (..., groups), of codes; else None.
    """

    __slots__ = ("fields", "rows", "scale", "values")

    def __init__(self, values: torch.Tensor, scale: torch.Tensor | None) -> None:
        rows = as_rows(values)
        if rows is None:
            values = values.contiguous()
            rows = rows_of(values)
        self.values, self.rows = values, rows
        scale_at = scale_stride = 0
        if scale is not None:
            scale = scale.float().contiguous()
            scale_at = scale.data_ptr()
            scale_stride = 0 if scale.numel() == 1 else scale.shape[-1]
        self.scale = scale
        #: Of a struct bl_matmul, from `x` on.
        self.fields = (
            values.data_ptr(), _KINDS[values.dtype], rows.stride, 0, scale_at, scale_stride,
        )  # fmt: skip

    def place_in(self, call: Matmul) -> None:
        """Let `call` read these rows."""
        call.x, call.x_kind, call.x_stride, _, scale, call.x_scale_stride = self.fields
        call.x_scale = scale or None


def multiply(x: PackedInput, weights: Sequence[Packed], dtype: torch.dtype) -> list[torch.Tensor]:
    """(M, N) of each of at most `MATMULS` weights, in one call: bfloat16 or float32.

    Raises:
        MemoryError: there is no memory for scratch buffers.
    """
    assert len(weights) <= native.MATMULS
    # The calls hold addresses only: outputs and inputs live here until they are done.
    if len(weights) == 1:
        fields, out = weights[0].call(x, dtype)
        outs = [out]
    else:
        calls, outs = zip(*(weight.call(x, dtype) for weight in weights), strict=True)
        fields = itertools.chain.from_iterable(calls)
    packed = native.matmul_packer(len(weights))(*fields)
    native.load().call("bl_matmul", packed, len(weights), native.threads())
    return list(outs)


def codes_template(
    weight: QuantizedWeight,
    key: QuantKey | None,
    codes: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
) -> Matmul:
    """What is the same in all calls for `weight`, packed as `codes`, `scale` and `bias`."""
    scheme, group = weight.scheme, key.granularity.size if key is not None else 0
    call = Matmul(columns=weight.in_features, out_features=weight.out_features)
    call.x_group, call.weight_group = group, scheme.columns
    call.weight_each_channel = scheme.rows == 1
    call.block = block_columns(scheme.columns, group)
    call.weight, call.weight_kind = codes.data_ptr(), WeightKind.E4M3
    call.weight_scale = scale.data_ptr()
    call.bias = None if bias is None else bias.data_ptr()
    call.out_stride = weight.out_features
    return call


def packing_refusal(weight_rows: int, *groups: int) -> str | None:
    """Why scales that change every `weight_rows` channels and `groups` columns cannot be packed."""
    if weight_rows > 1 and weight_rows % PANEL:
        return f"weight blocks have {weight_rows} rows, the C kernels take multiples of {PANEL}"
    for size in groups:
        if size and size not in (32, 64) and size % BLOCK:
            return f"groups have {size} columns, the C kernels take 32, 64 and multiples of {BLOCK}"
    return None


def pack_codes(codes: torch.Tensor) -> torch.Tensor:
    """FP8 (N, K) as uint8 (panels, K, PANEL), rows of zeros behind the last.

    Element 2 * i of a panel's input is channel i, element 2 * i + 1 channel i + PANEL / 2: a word's
    two halves then are two vectors of neighbouring channels.
    """
    rows = F.pad(codes.view(torch.uint8), (0, 0, 0, -codes.shape[0] % PANEL))
    halves = rows.view(-1, 2, PANEL // 2, codes.shape[1])
    return halves.permute(0, 3, 2, 1).contiguous().flatten(2)


def unpack_codes(packed: torch.Tensor, out_features: int) -> torch.Tensor:
    """The inverse of `pack_codes`: float8_e4m3fn (N, K), contiguous."""
    panels, columns, _ = packed.shape
    rows = packed.view(panels, columns, PANEL // 2, 2).permute(0, 3, 2, 1)
    rows = rows.reshape(panels * PANEL, columns)[:out_features]
    return rows.contiguous().view(torch.float8_e4m3fn)


def pack_halves(weight: torch.Tensor) -> torch.Tensor:
    """bfloat16 (N, K) as int16 (panels, pairs of inputs, PANEL, 2), zeros behind the last of both.

    As integers, so that no copy of a NaN changes its payload.
    """
    padding = (0, weight.shape[1] % 2, 0, -weight.shape[0] % PANEL)
    rows = F.pad(weight.view(torch.int16), padding)
    return rows.view(-1, PANEL, rows.shape[1] // 2, 2).transpose(1, 2).contiguous()


def unpack_halves(packed: torch.Tensor, out_features: int, columns: int) -> torch.Tensor:
    """The inverse of `pack_halves`: bfloat16 (N, K), contiguous."""
    rows = packed.transpose(1, 2).reshape(packed.shape[0] * PANEL, -1)
    return rows[:out_features, :columns].contiguous().view(torch.bfloat16)


def pack_scale(weight: QuantizedWeight) -> torch.Tensor:
    """Scales as the C matmul reads them: float32, contiguous, as long as whole panels.

    Returns:
        (panels * PANEL,) of a scheme with one scale a channel or less; else (panels, groups), or
        (panels, groups, PANEL) where each channel has its own.
    """
    scheme, scale, out_features = weight.scheme, weight.scales(), weight.out_features
    padding = -out_features % PANEL
    if not scheme.blockwise:
        return F.pad(scale.reshape(-1).expand(out_features), (0, padding)).contiguous()
    if scheme.rows == 1:
        panels = F.pad(scale, (0, 0, 0, padding)).unflatten(0, (-1, PANEL))
        return panels.transpose(1, 2).contiguous()
    panels = (out_features + padding) // PANEL
    return scale.repeat_interleave(scheme.rows // PANEL, 0)[:panels].contiguous()


def without_codes(weight: QuantizedWeight) -> QuantizedWeight:
    """Scales and shapes alone.

    The empty codes are no view: one would keep all of them.
    """
    return replace(weight, codes=torch.empty_like(weight.codes[:, :0]))


def padded_bias(bias: torch.Tensor, out_features: int) -> torch.Tensor:
    """float32 (..., whole panels) of (..., N)."""
    return F.pad(bias.detach().float(), (0, -out_features % PANEL))
