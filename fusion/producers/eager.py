"""The oracle as a producer: always right, never fast."""

from __future__ import annotations

import torch

from ...core.oracle import (
    ActivationSemantics,
    Semantics,
    activate,
    quantize_static,
    rms_norm,
)
from ...linear.contract import InputScale
from .base import ACCEPTED, ProducerRequest, StaticCodesProducer, Verdict


def eager_raw(semantics: Semantics, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """The raw activation by definition; inputs as for `Producer.produce`."""
    if isinstance(semantics, ActivationSemantics):
        return activate(semantics, *inputs)
    return rms_norm(semantics, *inputs)


class EagerProducer(StaticCodesProducer):
    """Activation, then quantisation, each a pass over memory: no fusion but in name."""

    name = "eager"
    emulated = True

    def supports(self, request: ProducerRequest) -> Verdict:
        return ACCEPTED

    def accepts(self, inputs: tuple[torch.Tensor, ...]) -> Verdict:
        return ACCEPTED

    def codes(
        self, semantics: Semantics, inputs: tuple[torch.Tensor, ...], scale: InputScale
    ) -> torch.Tensor:
        return quantize_static(eager_raw(semantics, inputs), scale.value).contiguous()


EAGER = EagerProducer()
