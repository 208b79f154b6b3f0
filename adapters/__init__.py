"""Adapters: reading PEFT folders, the branches they add, and the manager that swaps them."""

from typing import TYPE_CHECKING

from ..core.lazy import lazy_exports

if TYPE_CHECKING:
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

__getattr__ = lazy_exports(
    __name__,
    {
        "AdapterInfo": "version",
        "AdapterManager": "manager",
        "AdapterWeights": "weights",
        "BaseFacts": "base",
        "LayerWeights": "weights",
        "LowRank": "weights",
        "Mixture": "mixture",
        "TargetLayer": "base",
    },
)
