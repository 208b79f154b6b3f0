"""Linears: what they consume, how they multiply, and which of them carry adapter branches."""

from ..core.quant_key import (
    FP8_DYNAMIC_GROUP128,
    FP8_DYNAMIC_GROUP128_UE8M0,
    FP8_DYNAMIC_TOKEN,
    FP8_DYNAMIC_TOKEN_UE8M0,
    FP8_STATIC_TENSOR,
    MXFP8,
    NVFP4,
    Granularity,
    QuantKey,
    ScaleFormat,
    ScaleLayout,
)
from .batch import Batch, BatchScope, active_batch
from .branching import RowLayout
from .contract import InputContract, InputScale
from .registry import LayerRegistry, RawReader
from .routed import RoutedLinear

__all__ = [
    "FP8_DYNAMIC_GROUP128",
    "FP8_DYNAMIC_GROUP128_UE8M0",
    "FP8_DYNAMIC_TOKEN",
    "FP8_DYNAMIC_TOKEN_UE8M0",
    "FP8_STATIC_TENSOR",
    "MXFP8",
    "NVFP4",
    "Batch",
    "BatchScope",
    "Granularity",
    "InputContract",
    "InputScale",
    "LayerRegistry",
    "QuantKey",
    "RawReader",
    "RoutedLinear",
    "RowLayout",
    "ScaleFormat",
    "ScaleLayout",
    "active_batch",
]
