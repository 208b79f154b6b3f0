"""The weights of all experts of a projection as the C matmul reads them, and its calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from ....core import native
from ....core.errors import ContractError
from ....core.native import GroupedMatmul, Matmul, WeightKind
from ....core.quant_key import QuantKey
from ...kernels.packed import (
    PackedInput,
    codes_template,
    pack_codes,
    pack_halves,
    pack_scale,
    padded_bias,
    unpack_codes,
    unpack_halves,
    without_codes,
)
from ...kernels.reference import BLOCK
from ...outputs import empty
from ..pairs import Pairs
from ..weight import ExpertsWeight


class PackedExperts:
    """Weights in panels of `PANEL` output channels, expert after expert, and their calls."""

    _experts: int
    _out_features: int
    #: What is the same in all calls; it holds addresses, so whoever makes it keeps the tensors.
    _template: GroupedMatmul

    def multiply(
        self, x: PackedInput, pairs: Pairs, dtype: torch.dtype, *, by_token: bool
    ) -> torch.Tensor:
        """(P, N), by position; rows of pairs that nobody computes are not written.

        Args:
            x: (T, K) `by_token`, else (P, K), by position.
            pairs: who computes what.
            dtype: of the output: bfloat16 or float32.
            by_token: the row of a pair is its token's, else its position's.

        Raises:
            ContractError: pairs of another number of experts, or on another device.
            MemoryError: there is no memory for scratch buffers.
        """
        if pairs.experts != self._experts or pairs.offsets.device.type != "cpu":
            raise ContractError(
                f"pairs of {pairs.experts} experts on {pairs.offsets.device}",
                f"the weights are those of {self._experts} experts on the CPU",
                "hand the kernel the pairs of its own layer",
            )
        call = GroupedMatmul.from_buffer_copy(self._template)
        each = call.each
        x.place_in(each)
        if by_token:
            each.x_rows = pairs.token.data_ptr()
        call.offsets = pairs.offsets.data_ptr()
        out = empty((len(pairs), self._out_features), dtype, x.values.device)
        each.out, each.out_bf16 = out.data_ptr(), dtype == torch.bfloat16
        native.load().call("bl_grouped_matmul", call, native.threads())
        return out

    def _template_of(
        self, first: Matmul, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> GroupedMatmul:
        """Of the call for expert 0, with `weight` (E, ...) and `bias` (E, whole panels)."""
        call = GroupedMatmul(each=first, experts=self._experts)
        call.weight_bytes = weight[0].nbytes
        if bias is not None:
            call.each.bias, call.bias_stride = bias.data_ptr(), bias.shape[1]
        return call


class PackedExpertCodes(PackedExperts):
    """FP8 weights, a byte an element.

    Args:
        weight: codes without NaN, of a scheme that `packing_refusal` has nothing against.
        bias: float32 (E, N), or None.
        key: of the input, or None for unquantised activations.
    """

    def __init__(
        self, weight: ExpertsWeight, bias: torch.Tensor | None, key: QuantKey | None
    ) -> None:
        self._experts, self._out_features = len(weight), weight.out_features
        self._sources = tuple(without_codes(own) for own in weight.experts)
        experts = weight.experts
        self._codes = _stacked(lambda e: pack_codes(experts[e].codes), self._experts)
        self._scale = _stacked(lambda e: pack_scale(experts[e]), self._experts)
        self._bias = None if bias is None else padded_bias(bias, self._out_features)
        first = codes_template(experts[0], key, self._codes, self._scale, None)
        self._template = self._template_of(first, self._codes, self._bias)
        self._template.weight_scale_stride = self._scale[0].numel()

    @property
    def nbytes(self) -> int:
        """Bytes in memory, scales included and bias excluded."""
        sources = sum(source.nbytes for source in self._sources)
        return self._codes.numel() + self._scale.numel() * 4 + sources

    def unpacked(self) -> ExpertsWeight:
        """The weights as they were."""
        return ExpertsWeight(
            tuple(
                replace(source, codes=unpack_codes(codes, self._out_features))
                for source, codes in zip(self._sources, self._codes, strict=True)
            )
        )


class PackedExpertHalves(PackedExperts):
    """bfloat16 weights, two bytes an element.

    Args:
        weight: bfloat16 (E, N, K), E and K at least 1, on the CPU.
        bias: (E, N), or None.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._experts, self._out_features, columns = weight.shape
        self._halves = _stacked(lambda expert: pack_halves(weight[expert]), self._experts)
        self._bias = None if bias is None else padded_bias(bias, self._out_features)
        first = Matmul(columns=columns, out_features=self._out_features, block=BLOCK)
        first.weight, first.weight_kind = self._halves.data_ptr(), WeightKind.BF16
        first.out_stride = self._out_features
        self._template = self._template_of(first, self._halves, self._bias)

    @property
    def nbytes(self) -> int:
        """Bytes in memory, bias excluded."""
        return self._halves.numel() * 2

    def unpacked(self) -> torch.Tensor:
        """The weights as they were, to the bit: bfloat16 (E, N, K), contiguous, a copy."""
        columns = self._template.each.columns
        return torch.stack(
            [unpack_halves(own, self._out_features, columns) for own in self._halves]
        )


def _stacked(make: Callable[[int], torch.Tensor], number: int) -> torch.Tensor:
    """(number, ...): what `make` gives for each; never all of it twice."""
    first = make(0)
    made = first.new_empty((number, *first.shape))
    made[0] = first
    for index in range(1, number):
        made[index] = make(index)
    return made
