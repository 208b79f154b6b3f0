"""Findings: what is wrong with an adapter, gathered first and raised as one error."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..core.errors import (
    AdapterCapacityError,
    AdapterError,
    AdapterFormatError,
    AdapterMismatchError,
    AdapterUnsupportedError,
)

MOST_LISTED = 10

# The error raised is of the first class found: damage explains more than a misfit, and a misfit
# more than a rank that is too high.
_SEVERITY: tuple[type[AdapterError], ...] = (
    AdapterFormatError,
    AdapterUnsupportedError,
    AdapterMismatchError,
    AdapterCapacityError,
)


@dataclass(frozen=True)
class Finding:
    """One thing that speaks against loading.

    Args:
        error: the class to raise if this is the gravest finding.
        text: what is wrong, naming both sides.
        remedy: what to do about it.
    """

    error: type[AdapterError]
    text: str
    remedy: str


def damaged(text: str, remedy: str = "save or copy the adapter again") -> Finding:
    """The files are damaged, incomplete or of another tool."""
    return Finding(AdapterFormatError, text, remedy)


def unsupported(text: str, remedy: str) -> Finding:
    """A feature that is not served."""
    return Finding(AdapterUnsupportedError, text, remedy)


def mismatch(text: str, remedy: str = "load it on the base model it was trained on") -> Finding:
    """The adapter is of another base model."""
    return Finding(AdapterMismatchError, text, remedy)


def listing(names: Iterable[str]) -> str:
    """Names in their given order, quoted, at most ten of them: "'a', 'b' and 3 more"."""
    quoted = [repr(name) for name in names]
    more = len(quoted) - MOST_LISTED
    return ", ".join(quoted[:MOST_LISTED]) + (f" and {more} more" if more > 0 else "")


def raise_findings(subject: str, findings: Sequence[Finding]) -> None:
    """Raise one error that lists the findings, or return if there are none.

    Raises:
        AdapterFormatError, AdapterUnsupportedError, AdapterMismatchError, AdapterCapacityError:
            the gravest class found (in this order).
    """
    if not findings:
        return
    ranked = sorted(findings, key=lambda finding: _SEVERITY.index(finding.error))
    shown = ranked[:MOST_LISTED]
    reason = " | ".join(finding.text for finding in shown)
    if len(findings) > 1:
        reason = f"{len(findings)} problems: {reason}"
    if len(findings) > len(shown):
        reason += f" | and {len(findings) - len(shown)} more"
    gravest = ranked[0].error
    remedies = dict.fromkeys(finding.remedy for finding in shown if finding.error is gravest)
    raise gravest(subject, reason, ", or ".join(remedies))
