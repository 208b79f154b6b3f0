"""Quantised checkpoints: what their metadata and tensors say of each linear."""

from .layer import KV_CACHE_SCALES, TensorHeader
from .metadata import CheckpointQuant, read_metadata
from .resolve import ResolvedQuant

__all__ = [
    "KV_CACHE_SCALES",
    "CheckpointQuant",
    "ResolvedQuant",
    "TensorHeader",
    "read_metadata",
]
