"""Adapters: reading PEFT folders, the branches they add, and the manager that swaps them."""

from .manager import AdapterManager
from .source import AdapterWeights, BaseFacts, LoraWeights, TargetLayer
from .version import AdapterInfo

__all__ = [
    "AdapterInfo",
    "AdapterManager",
    "AdapterWeights",
    "BaseFacts",
    "LoraWeights",
    "TargetLayer",
]
