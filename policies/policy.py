"""Fusion policies, by one import: what they are, our own, and how they are found by name."""

from .auto import AutoPolicy
from .base import Policy, RouteChoice, SiteState, allowed_routes
from .own import AbsorbedPolicy, DualPolicy, DynamicPolicy, StaticPolicy
from .plugins import make_policy, policy_names

__all__ = [
    "AbsorbedPolicy",
    "AutoPolicy",
    "DualPolicy",
    "DynamicPolicy",
    "Policy",
    "RouteChoice",
    "SiteState",
    "StaticPolicy",
    "allowed_routes",
    "make_policy",
    "policy_names",
]
