"""Producers: kernels that emit quantised codes straight from the op before a linear."""

from ..core.oracle import ActivationSemantics, NormSemantics, quantize
from ..core.quantized_activation import QuantizedActivation, as_quantized_activation
from ..core.route import Route
from . import producers as _registrations  # noqa: F401  (importing it registers the producers)
from .discover import Discovery, Unsited, discover
from .functional import maybe_fused_act_quant
from .producers.base import Producer, ProducerRequest, Verdict
from .registry import REGISTRY, ProducerRegistry, Rejection, Selection
from .site import Site, SiteFacts

__all__ = [
    "REGISTRY",
    "ActivationSemantics",
    "Discovery",
    "NormSemantics",
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
    "as_quantized_activation",
    "discover",
    "maybe_fused_act_quant",
    "quantize",
]
