"""Producers for gated activations: SiLU(gate) * up to static FP8."""

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

NATIVE_SILU = 2  # enum bl_activation


@producer("silu_mul", FP8_STATIC_TENSOR)
class TritonSiluMul(TritonProducer):
    """One Triton kernel: reads bfloat16, writes codes."""

    def codes(
        self, semantics: Semantics, inputs: tuple[torch.Tensor, ...], scale: InputScale
    ) -> torch.Tensor:
        """The codes, (..., K)."""
        from ..kernels.gated import silu_mul_e4m3

        gate, up = inputs
        codes = new_codes(gate)
        of_gate, of_up = flattened(rows_of(gate), rows_of(up))
        with torch.cuda.device_of(gate):
            silu_mul_e4m3(
                gate,
                up,
                scale.value,
                codes,
                of_gate.number,
                of_gate.columns,
                (of_gate.stride, of_up.stride),
            )
        return codes


@producer("silu_mul", FP8_STATIC_TENSOR)
class NativeSiluMul(NativeProducer):
    """One pass in C: reads bfloat16, writes codes."""

    def codes(
        self, semantics: Semantics, inputs: tuple[torch.Tensor, ...], scale: InputScale
    ) -> torch.Tensor:
        """The codes, (..., K)."""
        gate, up = inputs
        codes = new_codes(gate)
        number, columns, stride = rows_of(gate)
        native.load().call(
            "bl_act_static", NATIVE_SILU, gate.data_ptr(), stride, up.data_ptr(),
            rows_of(up).stride, codes.data_ptr(), columns, number, columns, scale.reciprocal,
            native.threads(),
        )  # fmt: skip
        return codes


producer("silu_mul", FP8_STATIC_TENSOR)(EagerProducer)
