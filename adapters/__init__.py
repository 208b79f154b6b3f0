"""Adapters: reading PEFT folders, the branches they add, and the manager that swaps them."""

from .manager import AdapterInfo, AdapterManager
from .source import AdapterWeights, BaseFacts, LoraWeights, TargetLayer

__all__ = [
    "AdapterInfo",
    "AdapterManager",
    "AdapterWeights",
    "BaseFacts",
    "LoraWeights",
    "TargetLayer",
]
