"""Tensor parallelism inside a replica: models that transformers split over the ranks of a group."""

from .lockstep import LockstepAdapters
from .split import SplitModel

__all__ = ["LockstepAdapters", "SplitModel"]
