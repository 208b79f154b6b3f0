"""Where an adapter's weights lie: in a slot on the device, in host memory, or only on disk."""

from .eviction import Eviction
from .limits import TierLimits

__all__ = ["Eviction", "TierLimits"]
