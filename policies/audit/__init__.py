"""The audit: for every site who consumes it, its route for each adapter set, why, and its cost."""

from typing import TYPE_CHECKING

from ...core.lazy import lazy_exports

if TYPE_CHECKING:
    from .build import audit
    from .report import AuditReport, RouteReport, SiteReport

__all__ = ["AuditReport", "RouteReport", "SiteReport", "audit"]

__getattr__ = lazy_exports(
    __name__,
    {
        "AuditReport": "report",
        "RouteReport": "report",
        "SiteReport": "report",
        "audit": "build",
    },
)
