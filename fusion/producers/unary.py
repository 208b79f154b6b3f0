"""Producers for unary activations: ReLU² to static FP8."""

from __future__ import annotations

import torch

from ...core import native
from ...core.oracle import Semantics
from ...core.quant_key import FP8_STATIC_TENSOR
from ...linear.contract import InputScale
from ..registry import producer
from .backends import NativeProducer, TritonProducer
from .eager import EagerProducer
from .rows import flattened, new_codes, rows_of

NATIVE_RELU2 = 1  # enum bl_activation


@producer("relu2", FP8_STATIC_TENSOR)
class TritonRelu2(TritonProducer):
    """One Triton kernel: reads bfloat16, writes codes."""

    def codes(
        self, semantics: Semantics, inputs: tuple[torch.Tensor, ...], scale: InputScale
    ) -> torch.Tensor:
        """The codes, (..., K)."""
        from ..kernels.unary import relu2_e4m3

        (x,) = inputs
        codes = new_codes(x)
        (rows,) = flattened(rows_of(x))
        with torch.cuda.device_of(x):
            relu2_e4m3(x, scale.value, codes, *rows)
        return codes


@producer("relu2", FP8_STATIC_TENSOR)
class NativeRelu2(NativeProducer):
    """One pass in C: reads bfloat16, writes codes."""

    def codes(
        self, semantics: Semantics, inputs: tuple[torch.Tensor, ...], scale: InputScale
    ) -> torch.Tensor:
        """The codes, (..., K)."""
        (x,) = inputs
        codes = new_codes(x)
        number, columns, stride = rows_of(x)
        native.load().call(
            "bl_act_static", NATIVE_RELU2, x.data_ptr(), stride, None, 0, codes.data_ptr(), columns,
            number, columns, scale.reciprocal, native.threads(),
        )  # fmt: skip
        return codes


producer("relu2", FP8_STATIC_TENSOR)(EagerProducer)
