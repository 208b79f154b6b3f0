"""Proof on the user's own machine: every kernel that runs there against the oracle."""

from .cases import Case, arrangements, cases
from .report import Difference, Line, VerifyReport
from .run import verify, verify_all

__all__ = [
    "Case",
    "Difference",
    "Line",
    "VerifyReport",
    "arrangements",
    "cases",
    "verify",
    "verify_all",
]
