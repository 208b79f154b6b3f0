"""Producers, one module for each kind of site; `fusion.registry` enters them."""

from collections.abc import Mapping

from ...core.oracle import ACTIVATIONS, NORM_ORDERS, NormSemantics
from ...core.quant_key import KEYS
from ...core.route import Route
from .activation import NativeActivation, TritonActivation
from .base import Producer
from .eager import EagerProducer
from .norm import NativeNorm, TritonNorm

#: What a site's semantics can be called, and who serves it, in order of preference.
FAMILIES: Mapping[str, tuple[type[Producer], ...]] = {
    f"{name}{suffix}": (TritonActivation, NativeActivation, EagerProducer)
    for name in (*ACTIVATIONS, "custom")
    for suffix in ("", "_mul")
} | {
    NormSemantics(order, 0.0).family: (TritonNorm, NativeNorm, EagerProducer)
    for order in NORM_ORDERS
}

#: Routes that a producer serves, and keys that it emits.
ENTRIES = [
    (family, key, route)
    for family in FAMILIES
    for key in KEYS
    for route in (Route.FUSED, Route.DUAL, Route.ABSORBED)
]
