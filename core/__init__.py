"""What every other folder stands on: errors, the quantisation contract, the oracle, the platform.

Arrows point down only (serving, policies, adapters, fusion, linear, core), and a linear quantises
plain input by the same definition as a producer does.  That definition therefore lies below both.
"""

from typing import TYPE_CHECKING

from .lazy import lazy_exports

if TYPE_CHECKING:
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

__getattr__ = lazy_exports(
    __name__,
    {
        "ACTIVATIONS": "oracle",
        "BranchlineError": "errors",
        "FP8_DYNAMIC_GROUP128": "quant_key",
        "FP8_DYNAMIC_GROUP128_UE8M0": "quant_key",
        "FP8_DYNAMIC_TOKEN": "quant_key",
        "FP8_DYNAMIC_TOKEN_UE8M0": "quant_key",
        "FP8_STATIC_TENSOR": "quant_key",
        "Granularity": "quant_key",
        "KEYS": "quant_key",
        "LinearScheme": "scheme",
        "MXFP8": "quant_key",
        "NVFP4": "quant_key",
        "Platform": "platform",
        "QuantKey": "quant_key",
        "QuantizedActivation": "quantized_activation",
        "SCHEMES": "scheme",
        "ScaleFormat": "quant_key",
        "ScaleLayout": "quant_key",
        "WeightScheme": "scheme",
        "as_quantized_activation": "quantized_activation",
        "detect_platform": "platform",
        "quantize": "oracle",
    },
)
