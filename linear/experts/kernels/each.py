"""Grouped matmuls by a kernel of one linear, expert after expert: the definition, for any scheme.

A pair's bytes are those of the linear's kernel, which for our own kernels do not depend on the
number of rows.  Library matmuls may round a row otherwise among other numbers of rows.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ....core.errors import ContractError
from ....core.quant_key import ScaleLayout
from ....core.quantized_activation import QuantizedActivation, as_quantized_activation
from ....core.selection import Verdict
from ...contract import InputContract
from ...kernels.emulated import EmulatedLinear
from ...kernels.w8a16 import W8A16Linear
from ...outputs import empty
from ...probing import is_probing
from ..pairs import Pairs
from ..weight import ExpertsWeight
from .base import GroupedConfig, GroupedKernel, LikeLinearKernel


class _EachExpert(LikeLinearKernel):
    """One kernel of a linear for each expert."""

    @classmethod
    def can_implement(cls, config: GroupedConfig) -> Verdict:
        verdict = super().can_implement(config)
        key = cls.linear.consumes(config.linear) if verdict.ok else None
        if key is not None and key != key.plain():
            return Verdict(False, f"rows of single experts cannot be cut out of {key}")
        return verdict

    def _take(self, weight: ExpertsWeight) -> None:
        biases = [None] * len(weight) if self._bias is None else list(self._bias)
        self._kernels = [
            self.linear(own, bias, self.contract)
            for own, bias in zip(weight.experts, biases, strict=True)
        ]

    @property
    def weight_bytes(self) -> int:
        return sum(kernel.weight_bytes for kernel in self._kernels)

    def quantized_weight(self) -> ExpertsWeight:
        return ExpertsWeight(tuple(kernel.quantized_weight() for kernel in self._kernels))

    def multiply(
        self, x: torch.Tensor | QuantizedActivation, pairs: Pairs, *, by_token: bool
    ) -> torch.Tensor:
        dtype = x.orig_dtype if isinstance(x, QuantizedActivation) else x.dtype
        out = empty((len(pairs), self.out_features), dtype, x.device)
        for expert, begin, end in groups(pairs):
            rows = pairs.token[begin:end] if by_token else slice(begin, end)
            own = _rows_of(x, rows)
            out[begin:end] = self._kernels[expert].apply(own, f"expert {expert}")
        return out


class EmulatedExperts(_EachExpert):
    """Codes times codes, accumulated in float32, on any device."""

    name = "emulated"
    emulated = True
    linear = EmulatedLinear


class W8A16Experts(_EachExpert):
    """Weights that are dequantised as they are used, times unquantised activations."""

    name = "w8a16"
    linear = W8A16Linear


class FloatExperts(GroupedKernel):
    """Unquantised weights, multiplied by torch expert after expert.

    Args:
        weight: (E, N, K), or a view of it; not copied.
        bias: (E, N), or None.
        interleaved: channels 0, 2, ... of `weight` and `bias` come first in the output, then 1, 3.
    """

    name = "float"

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, *, interleaved: bool = False
    ) -> None:
        self.contract = InputContract(key=None)
        self._weight = weight.detach()
        self._bias = None if bias is None else bias.detach()
        self._parts = (slice(0, None, 2), slice(1, None, 2)) if interleaved else (slice(None),)
        self.experts, self.out_features, self.in_features = weight.shape

    @property
    def weight_bytes(self) -> int:
        return self._weight.numel() * self._weight.element_size()

    def dequantized(self) -> torch.Tensor:
        parts = [self._weight[:, part] for part in self._parts]
        return torch.cat(parts, 1).to(torch.float32, copy=True)

    def bias(self) -> torch.Tensor | None:
        if self._bias is None:
            return None
        return torch.cat([self._bias[:, part] for part in self._parts], 1)

    def apply(
        self,
        x: torch.Tensor | QuantizedActivation,
        pairs: Pairs,
        consumer: str,
        *,
        by_token: bool,
    ) -> torch.Tensor:
        as_quantized_activation(x, None, consumer=consumer)
        assert isinstance(x, torch.Tensor)
        self.check_rows(x.shape, pairs, consumer, by_token=by_token)
        out = empty((len(pairs), self.out_features), x.dtype, x.device)
        width = self.out_features // len(self._parts)
        # Where a model is probed, other tokens may not show in a row: one at a time.
        step = 1 if is_probing() else max(len(pairs), 1)
        for expert, begin, end in groups(pairs):
            for first in range(begin, end, step):
                some = slice(first, min(first + step, end))
                rows = x[pairs.token[some]] if by_token else x[some]
                for column, part in enumerate(self._parts):
                    bias = None if self._bias is None else self._bias[expert, part]
                    product = F.linear(rows, self._weight[expert, part], bias)
                    out[some, column * width : (column + 1) * width] = product
        return out


def groups(pairs: Pairs) -> list[tuple[int, int, int]]:
    """(expert, begin, end) of each expert that some pair chose; waits for the device."""
    bounds = pairs.bounds
    return [
        (expert, bounds[expert], bounds[expert + 1])
        for expert in range(pairs.experts)
        if bounds[expert] < bounds[expert + 1]
    ]


def _rows_of(
    x: torch.Tensor | QuantizedActivation, rows: torch.Tensor | slice
) -> torch.Tensor | QuantizedActivation:
    if isinstance(x, torch.Tensor):
        return x[rows]
    key = x.quant_key
    if key.layout != ScaleLayout.ROW_MAJOR or key.row_multiple != 1:
        raise ContractError(
            f"codes for {key}",
            "cannot be cut into rows of single experts",
            "choose a kernel that takes all experts at once",
        )
    # As bytes: torch gathers no rows of one-byte floats.
    codes = _gathered(x.codes, rows)
    scale = x.scale if key.static else _gathered(x.scale, rows)
    return QuantizedActivation.unchecked(
        codes=codes,
        scale=scale,
        orig_dtype=x.orig_dtype,
        orig_shape=torch.Size((codes.shape[0], x.orig_shape[-1])),
        quant_key=key,
        raw=None,
        producer=x.producer,
        global_scale=x.global_scale,
        shrunk=None,
        shared_outputs=None,
    )


def _gathered(values: torch.Tensor, rows: torch.Tensor | slice) -> torch.Tensor:
    if values.element_size() > 1:
        return values[rows]
    return values.view(torch.uint8)[rows].view(values.dtype)
