"""Adapters: reading PEFT folders, the branches they add, and the manager that swaps them."""

from .base import BaseFacts, TargetLayer
from .manager import AdapterManager
from .mixture import Mixture
from .version import AdapterInfo
from .weights import AdapterWeights, LayerWeights, LowRank

__all__ = [
    "AdapterInfo",
    "AdapterManager",
    "AdapterWeights",
    "BaseFacts",
    "LayerWeights",
    "LowRank",
    "Mixture",
    "TargetLayer",
]
