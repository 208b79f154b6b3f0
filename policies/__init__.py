"""Policies: which route each site takes, the frozen plan, and the audit of both."""

from .audit import AuditReport, audit
from .plan import Plan, SitePlan
from .planner import Planner
from .policy import Choice, Policy, SiteState, make_policy

__all__ = [
    "AuditReport",
    "Choice",
    "Plan",
    "Planner",
    "Policy",
    "SitePlan",
    "SiteState",
    "audit",
    "make_policy",
]
