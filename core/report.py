"""The base of all documents that are told as JSON: audits, listings, reports."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class ReportPart(BaseModel):
    """A report, or a part of one; frozen."""

    model_config = ConfigDict(frozen=True)
