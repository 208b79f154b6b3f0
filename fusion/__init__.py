"""Producers: kernels that emit quantised codes straight from the op before a linear."""

from ..core.oracle import ActivationSemantics, NormSemantics, quantize
from ..core.quantized_activation import QuantizedActivation, as_quantized_activation
from ..core.route import Route
from ..core.selection import Rejection, Verdict
from . import ops
from .discover import Discovery, Unsited, discover
from .functional import maybe_fused_act_quant
from .producers.base import Emission, Produced, Producer, ProducerRequest
from .registry import REGISTRY, ProducerRegistry, Selection
from .site import Site, SiteFacts
from .verify import VerifyReport, verify

__all__ = [
    "REGISTRY",
    "ActivationSemantics",
    "Discovery",
    "Emission",
    "NormSemantics",
    "Produced",
    "Producer",
    "ProducerRegistry",
    "ProducerRequest",
    "QuantizedActivation",
    "Rejection",
    "Route",
    "Selection",
    "Site",
    "SiteFacts",
    "Unsited",
    "Verdict",
    "VerifyReport",
    "as_quantized_activation",
    "discover",
    "maybe_fused_act_quant",
    "ops",
    "quantize",
    "verify",
]
