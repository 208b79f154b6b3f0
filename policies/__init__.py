"""Policies: which route each site takes, the frozen plan, and the audit of both."""

from typing import TYPE_CHECKING

from ..core.lazy import lazy_exports

if TYPE_CHECKING:
    from .audit import AuditReport
    from .plan import Plan, SitePlan
    from .planner import Planner
    from .policy import Policy, RouteChoice, SiteState, allowed_routes, make_policy, policy_names

__all__ = [
    "AuditReport",
    "Plan",
    "Planner",
    "Policy",
    "RouteChoice",
    "SitePlan",
    "SiteState",
    "allowed_routes",
    "make_policy",
    "policy_names",
]

__getattr__ = lazy_exports(
    __name__,
    {
        "AuditReport": "audit",
        "Plan": "plan",
        "Planner": "planner",
        "Policy": "policy",
        "RouteChoice": "policy",
        "SitePlan": "plan",
        "SiteState": "policy",
        "allowed_routes": "policy",
        "make_policy": "policy",
        "policy_names": "policy",
    },
)
