"""Producers for activations, plain and gated: one kernel for all of them and all keys."""

from __future__ import annotations

import torch

from ...core.oracle import ActivationSemantics, Semantics
from ...linear import native
from ...linear.outputs import Outputs
from .kernel import NativeProducer, TritonProducer


class TritonActivation(TritonProducer):
    """One Triton kernel: reads bfloat16, writes codes, and what else the route asks for."""

    def launch(
        self, semantics: Semantics, inputs: tuple[torch.Tensor, ...], outputs: Outputs
    ) -> None:
        from ..kernels.activation import launch_activation

        assert isinstance(semantics, ActivationSemantics)
        launch_activation(semantics, inputs, outputs)


class NativeActivation(NativeProducer):
    """One pass in C: reads bfloat16, writes codes, and what else the route asks for."""

    def launch(
        self, semantics: Semantics, inputs: tuple[torch.Tensor, ...], outputs: Outputs
    ) -> None:
        assert isinstance(semantics, ActivationSemantics)
        native.activation(semantics, inputs, outputs)
