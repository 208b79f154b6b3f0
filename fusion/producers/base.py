"""What a producer is: a kernel with a predicate, and the value that its choice is made from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch

from ...core.oracle import Semantics
from ...core.platform import Platform
from ...core.quant_key import QuantKey
from ...core.quantized_activation import QuantizedActivation
from ...core.route import Route
from ...core.selection import ACCEPTED, Verdict
from ...linear.contract import InputContract
from ...linear.outputs import RawRequest, Shrink

#: The highest rank that an absorbing kernel multiplies with in registers.
MAX_ABSORBED_RANK = 64


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
        rank: for ABSORBED, the highest rank that is live at the site.
        lora_dtype: for ABSORBED, the dtype of the A matrices.
    """

    semantics: Semantics
    key: QuantKey
    route: Route
    dtype: torch.dtype
    columns: int
    platform: Platform
    rank: int = 0
    lora_dtype: torch.dtype | None = None


@dataclass(frozen=True, eq=False)
class Emission:
    """What one call of a producer must emit.

    Attributes:
        contract: key and scales of the consumers.
        route: FUSED for codes alone.
        site: name of the site, for messages.
        raw: for DUAL, which raw rows, and where; otherwise None.
        shrinks: for ABSORBED, one for each consumer with a live branch; otherwise empty.
    """

    contract: InputContract
    route: Route = Route.FUSED
    site: str = ""
    raw: RawRequest | None = None
    shrinks: tuple[Shrink, ...] = ()


class Produced(NamedTuple):
    """What a call of a producer returns.

    Attributes:
        activation: what the consumers take.
        residual: the new residual (..., K) of a norm that adds one; else None.
    """

    activation: QuantizedActivation
    residual: torch.Tensor | None = None


def check_rank(request: ProducerRequest) -> Verdict:
    """Whether the live ranks can be absorbed at all; ask before anything else about the route."""
    if request.rank <= MAX_ABSORBED_RANK:
        return ACCEPTED
    return Verdict(
        False,
        f"ranks up to {MAX_ABSORBED_RANK} are absorbed, the highest live rank is {request.rank}",
    )


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
    def accepts(
        self, semantics: Semantics, inputs: tuple[torch.Tensor, ...], emission: Emission
    ) -> Verdict:
        """Whether it can read these tensors (strides, device); checked on every call."""

    @abstractmethod
    def produce(
        self, semantics: Semantics, inputs: tuple[torch.Tensor, ...], emission: Emission
    ) -> Produced:
        """What the consumers take: codes with their scale and, on some routes, more.

        Args:
            semantics: what to compute.
            inputs: (x,) for a unary activation, (gate, up) for a gated one, (x, [residual,]
                weight, [bias]) for a norm; activations are (..., K).
            emission: what to emit.
        """

    def title(self, semantics: Semantics, emission: Emission) -> str:
        """Who made the codes, for messages."""
        return _title(self.name, semantics, emission.site)


@lru_cache(maxsize=4096)
def _title(name: str, semantics: Semantics, site: str) -> str:
    return f"{name} {semantics} of {site}" if site else f"{name} {semantics}"
