"""What every other folder stands on: errors, the quantisation contract, the oracle, the platform.

Arrows point down only (serving, policies, adapters, fusion, linear, core), and a linear quantises
plain input by the same definition as a producer does.  That definition therefore lies below both.
"""

from .errors import BranchlineError
from .oracle import ACTIVATIONS, quantize
from .platform import Platform, detect_platform
from .quant_key import (
    FP8_DYNAMIC_GROUP128,
    FP8_DYNAMIC_GROUP128_UE8M0,
    FP8_DYNAMIC_TOKEN,
    FP8_DYNAMIC_TOKEN_UE8M0,
    FP8_STATIC_TENSOR,
    KEYS,
    MXFP8,
    NVFP4,
    Granularity,
    QuantKey,
    ScaleFormat,
    ScaleLayout,
)
from .quantized_activation import QuantizedActivation, as_quantized_activation
from .scheme import SCHEMES, LinearScheme, WeightScheme

__all__ = [
    "ACTIVATIONS",
    "FP8_DYNAMIC_GROUP128",
    "FP8_DYNAMIC_GROUP128_UE8M0",
    "FP8_DYNAMIC_TOKEN",
    "FP8_DYNAMIC_TOKEN_UE8M0",
    "FP8_STATIC_TENSOR",
    "KEYS",
    "MXFP8",
    "NVFP4",
    "SCHEMES",
    "BranchlineError",
    "Granularity",
    "LinearScheme",
    "Platform",
    "QuantKey",
    "QuantizedActivation",
    "ScaleFormat",
    "ScaleLayout",
    "WeightScheme",
    "as_quantized_activation",
    "detect_platform",
    "quantize",
]
