"""Emulated matmul of codes: exact arithmetic in float32, on any device, for every scheme.

The weights are kept as float32 values on their grid, beside the codes: it computes what a tensor
core computes up to the order of accumulation, and takes five bytes an element.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from ...core.platform import Platform
from ...core.quant_key import ScaleFormat
from ...core.quantized_activation import QuantizedActivation
from ...core.selection import ACCEPTED, Verdict
from ..quantized_weight import QuantizedWeight, code_values, spread_rows
from .base import CodesKernel, LinearConfig

#: Scales of few bits: a code times one of them is exact in float32.
_EXACT = (ScaleFormat.UE8M0, ScaleFormat.E4M3)


class EmulatedLinear(CodesKernel):
    """Codes times codes, accumulated in float32."""

    name = "emulated"
    emulated = True

    @classmethod
    def is_supported(cls, platform: Platform) -> Verdict:
        return ACCEPTED

    @classmethod
    def can_implement(cls, config: LinearConfig) -> Verdict:
        key, weight = config.scheme.input, config.scheme.weight
        if key is None:
            return Verdict(False, "it multiplies codes, and this linear's input stays unquantised")
        if key.code_dtype != weight.code_dtype:
            return Verdict(False, f"weights of {weight} do not go with inputs of {key}")
        return ACCEPTED

    def _take(self, weight: QuantizedWeight) -> None:
        scheme, scale = weight.scheme, weight.scale.float()
        self._source = weight
        values = weight.values()
        self._final = weight.global_scale
        self._blocks: torch.Tensor | None = None
        if not scheme.blockwise:
            self._final = scale.reshape(1, -1)
        elif scheme.scale_format in _EXACT:
            values = values * weight.spread(scale)
        else:
            self._blocks = spread_rows(scale, scheme.rows, self.out_features).t().contiguous()
        self._weight_t = values.t()

    @property
    def weight_bytes(self) -> int:
        return self._weight_t.numel() * 4 + self._source.nbytes

    def quantized_weight(self) -> QuantizedWeight:
        return self._source

    def multiply(self, x: QuantizedActivation) -> torch.Tensor:
        key = x.quant_key
        values = code_values(x.codes.reshape(-1, x.codes.shape[-1]))[:, : self.in_features]
        scale = x.scale.float()
        scale = scale.reshape(-1, scale.shape[-1])
        group, final = key.granularity.size, x.global_scale
        row_blocks = None
        if not group:
            final = scale
        elif key.scale_format in _EXACT:
            values = values * scale.repeat_interleave(group, 1)[:, : self.in_features]
        else:
            row_blocks = scale
        # Autocast would round the products to half precision.
        with torch.autocast(values.device.type, enabled=False):
            out = self._product(values, row_blocks, group)
        factor = _times(final, self._final)
        if factor is not None:
            out *= factor
        if self._bias is not None:
            out += self._bias
        return out.to(x.orig_dtype).reshape(*x.orig_shape[:-1], self.out_features)

    def _product(
        self, values: torch.Tensor, row_blocks: torch.Tensor | None, group: int
    ) -> torch.Tensor:
        """(M, N): the sum over all columns, block scales applied."""
        columns = self._source.scheme.columns
        if row_blocks is None and self._blocks is None:
            return values @ self._weight_t
        step = min(
            size
            for size, blocks in ((group, row_blocks), (columns, self._blocks))
            if blocks is not None
        )
        total = values.new_zeros(values.shape[0], self.out_features)
        edges = [*range(0, self.in_features, step), self.in_features]
        for start, stop in pairwise(edges):
            rows = None if row_blocks is None else row_blocks[:, start // group, None]
            blocks = None if self._blocks is None else self._blocks[start // columns]
            # Both scales at once: the sum times one of them could overflow.
            factor = _times(rows, blocks)
            assert factor is not None
            total += (values[:, start:stop] @ self._weight_t[start:stop]) * factor
        return total


def _times(a: torch.Tensor | None, b: torch.Tensor | None) -> torch.Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    return a * b
