"""What a producer is: a kernel with a predicate, and the value that its choice is made from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ...core.oracle import Semantics
from ...core.platform import Platform
from ...core.quant_key import QuantKey
from ...core.route import Route
from ...linear.contract import InputScale


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
        self, semantics: Semantics, inputs: tuple[torch.Tensor, ...], scale: InputScale
    ) -> torch.Tensor:
        """The codes.

        Args:
            semantics: what to compute.
            inputs: (x,) for a unary activation, (gate, up) for a gated one, (x, weight) for a
                norm; activations are (..., K).
            scale: the static input scale of the consumers.

        Returns:
            float8_e4m3fn codes (..., K), contiguous.
        """
