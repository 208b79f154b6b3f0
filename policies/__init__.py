"""Policies: which route each site takes, the frozen plan, and the audit of both."""

from .audit import AuditReport, audit
from .plan import Plan, SitePlan
from .planner import Planner
from .policy import Policy, RouteChoice, SiteState, make_policy

__all__ = [
    "AuditReport",
    "Plan",
    "Planner",
    "Policy",
    "RouteChoice",
    "SitePlan",
    "SiteState",
    "audit",
    "make_policy",
]
