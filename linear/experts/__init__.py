"""Experts: grouped matmuls over (token, expert) pairs, and their layers."""

from .layer import ExpertsLinear, PairBranch
from .pairs import Pairs, combine
from .rows import PairRows
from .weight import ExpertsWeight

__all__ = ["ExpertsLinear", "ExpertsWeight", "PairBranch", "PairRows", "Pairs", "combine"]
