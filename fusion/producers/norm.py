"""Producers for norms, with and without a residual: one kernel for all orders and all keys."""

from __future__ import annotations

import torch

from ...core.oracle import NormSemantics, Semantics
from ...linear import native
from ...linear.outputs import Outputs
from .kernel import NativeProducer, TritonProducer


class TritonNorm(TritonProducer):
    """One Triton kernel: reads bfloat16 once, writes codes, and what else the route asks for."""

    def launch(
        self, semantics: Semantics, inputs: tuple[torch.Tensor, ...], outputs: Outputs
    ) -> torch.Tensor | None:
        from ..kernels.norm import launch_norm

        assert isinstance(semantics, NormSemantics)
        return launch_norm(semantics, inputs, outputs)


class NativeNorm(NativeProducer):
    """Rows in C, read again from the cache: reads bfloat16, writes codes, and what else the route
    asks for.
    """

    def launch(
        self, semantics: Semantics, inputs: tuple[torch.Tensor, ...], outputs: Outputs
    ) -> torch.Tensor | None:
        assert isinstance(semantics, NormSemantics)
        return native.norm(semantics, inputs, outputs)
