"""The JSON schema of reports: versioned, shipped with the package, and reading reports by it."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ...core.errors import ConfigError
from .report import SCHEMA_VERSION, AuditReport

_PACKAGE = "branchline.policies.audit"
_REMEDY = "audit again with this version, and keep what `branchline audit --json` prints"


def schema() -> dict[str, Any]:
    """The JSON schema of this version's reports."""
    made = AuditReport.model_json_schema(mode="serialization")
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"branchline-audit-{SCHEMA_VERSION}",
        **made,
    }


def shipped_schema() -> dict[str, Any]:
    """The one that lies in the package, which tests compare with `schema`."""
    name = f"audit_v{SCHEMA_VERSION}.json"
    return json.loads((files(_PACKAGE) / "page_files" / name).read_text(encoding="utf-8"))


def read_report(path: Path) -> AuditReport:
    """A report that was saved as JSON.

    Raises:
        ConfigError: the file cannot be read, is no report, or of another version of the schema.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"report {str(path)!r}", f"cannot be read ({error})", _REMEDY) from error
    return parse_report(text, f"report {str(path)!r}")


def parse_report(text: str, subject: str) -> AuditReport:
    """A report in JSON.

    Args:
        text: of the report.
        subject: what messages call it.

    Raises:
        ConfigError: it is no report, or of another version of the schema.
    """
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(subject, f"is no JSON ({error})", _REMEDY) from error
    version = given.get("schema_version") if isinstance(given, dict) else None
    if version != SCHEMA_VERSION:
        reason = f"has schema version {version!r}, this version reads {SCHEMA_VERSION}"
        raise ConfigError(subject, reason, _REMEDY)
    try:
        return AuditReport.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(subject, f"is no report: {where}: {first['msg']}", _REMEDY) from error
