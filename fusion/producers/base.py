"""What a producer is: a kernel with a predicate, and the value that its choice is made from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ...core.oracle import Semantics
from ...core.platform import Platform
from ...core.quant_key import FP8_STATIC_TENSOR, QuantKey
from ...core.quantized_activation import QuantizedActivation
from ...core.route import Route
from ...linear.contract import InputContract, InputScale


class Verdict(NamedTuple):
    """A predicate's answer: never a bare False."""

    ok: bool
    reason: str = ""


ACCEPTED = Verdict(True)


@dataclass(frozen=True)
class ProducerRequest:
    """Everything a producer may be chosen by; plain data, so any machine can be imagined.

    Attributes:
        semantics: what the site computes.
        key: what its consumers accept.
        route: FUSED, DUAL or ABSORBED.
        dtype: dtype of the activation.
        columns: its last dimension.
        platform: facts about the device.
    """

    semantics: Semantics
    key: QuantKey
    route: Route
    dtype: torch.dtype
    columns: int
    platform: Platform


@dataclass(frozen=True, eq=False)
class Emission:
    """What one call of a producer must emit.

    Attributes:
        contract: key and scale of the consumers.
        route: FUSED for codes alone.
        site: name of the site, for messages.
    """

    contract: InputContract
    route: Route = Route.FUSED
    site: str = ""


class Producer(ABC):
    """One implementation of a fused activation (or norm) + quantisation.

    Attributes:
        name: "triton", "native", "eager": unique within one registry entry.
        emulated: true for one that saves no memory traffic; the audit says so (I14).
    """

    name: str
    emulated: bool = False

    @abstractmethod
    def supports(self, request: ProducerRequest) -> Verdict:
        """Whether this producer can serve every tensor of such a site; pure."""

    @abstractmethod
    def accepts(self, inputs: tuple[torch.Tensor, ...]) -> Verdict:
        """Whether it can read these tensors (strides, device); checked on every call."""

    @abstractmethod
    def produce(
        self, semantics: Semantics, inputs: tuple[torch.Tensor, ...], emission: Emission
    ) -> QuantizedActivation:
        """What the consumers take: codes with their scale and, on some routes, more.

        Args:
            semantics: what to compute.
            inputs: (x,) for a unary activation, (gate, up) for a gated one, (x, weight) for a
                norm; activations are (..., K).
            emission: what to emit.
        """


class StaticCodesProducer(Producer):
    """A producer of codes alone, under the consumers' static scale."""

    @abstractmethod
    def codes(
        self, semantics: Semantics, inputs: tuple[torch.Tensor, ...], scale: InputScale
    ) -> torch.Tensor:
        """The codes: float8_e4m3fn (..., K), contiguous; arguments as for `produce`."""

    def produce(
        self, semantics: Semantics, inputs: tuple[torch.Tensor, ...], emission: Emission
    ) -> QuantizedActivation:
        """The codes, with the scale they were made for."""
        subject = f"{self.name} {semantics}"
        scale = emission.contract.static_scale(subject)
        x = inputs[0]
        return QuantizedActivation(
            self.codes(semantics, inputs, scale),
            scale.value,
            x.dtype,
            x.shape,
            FP8_STATIC_TENSOR,
            producer=f"{subject} of {emission.site}" if emission.site else subject,
        )
