"""Producers for norms: RMSNorm, in both rounding orders, to static FP8."""

from __future__ import annotations

import torch

from ...core import native
from ...core.oracle import NormSemantics, Semantics
from ...core.quant_key import FP8_STATIC_TENSOR
from ...linear.contract import InputScale
from ..registry import producer
from .backends import KernelProducer, NativeProducer, TritonProducer
from .base import Verdict
from .eager import EagerProducer
from .rows import check_activations, check_weight, new_codes, rows_of

NATIVE_ORDERS = {"llama": 0, "gemma": 1}  # enum bl_norm_order


class _NormInputs(KernelProducer):
    """The check of (x, weight)."""

    def accepts_tensors(self, inputs: tuple[torch.Tensor, ...]) -> Verdict:
        """Rows, and a weight of their width."""
        x, weight = inputs
        verdict = check_activations(self.kernels, (x,))
        return check_weight(self.kernels, x, weight) if verdict.ok else verdict


@producer("rms_norm[llama]", FP8_STATIC_TENSOR)
@producer("rms_norm[gemma]", FP8_STATIC_TENSOR)
class TritonRmsNorm(_NormInputs, TritonProducer):
    """One Triton kernel: reads bfloat16, writes codes."""

    def codes(
        self, semantics: Semantics, inputs: tuple[torch.Tensor, ...], scale: InputScale
    ) -> torch.Tensor:
        """The codes, (..., K)."""
        from ..kernels.norm import rms_norm_e4m3

        assert isinstance(semantics, NormSemantics)
        x, weight = inputs
        codes = new_codes(x)
        gemma = semantics.order == "gemma"
        with torch.cuda.device_of(x):
            rms_norm_e4m3(
                x, weight, scale.value, codes, *rows_of(x), eps=semantics.eps, gemma=gemma
            )
        return codes


@producer("rms_norm[llama]", FP8_STATIC_TENSOR)
@producer("rms_norm[gemma]", FP8_STATIC_TENSOR)
class NativeRmsNorm(_NormInputs, NativeProducer):
    """Two passes in C, the second from the cache: reads bfloat16, writes codes."""

    def codes(
        self, semantics: Semantics, inputs: tuple[torch.Tensor, ...], scale: InputScale
    ) -> torch.Tensor:
        """The codes, (..., K)."""
        assert isinstance(semantics, NormSemantics)
        x, weight = inputs
        codes = new_codes(x)
        number, columns, stride = rows_of(x)
        native.load().call(
            "bl_rms_norm_static", NATIVE_ORDERS[semantics.order], x.data_ptr(), stride,
            weight.data_ptr(), codes.data_ptr(), columns, None, 0, number, columns, semantics.eps,
            scale.reciprocal, native.threads(),
        )  # fmt: skip
        return codes


producer("rms_norm[llama]", FP8_STATIC_TENSOR)(EagerProducer)
producer("rms_norm[gemma]", FP8_STATIC_TENSOR)(EagerProducer)
