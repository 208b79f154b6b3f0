"""A choice among implementations, as values with reasons."""

from __future__ import annotations

from typing import NamedTuple


class Verdict(NamedTuple):
    """A predicate's answer: never a bare False."""

    ok: bool
    reason: str = ""


ACCEPTED = Verdict(True)


class Rejection(NamedTuple):
    """A candidate that was not chosen, and why."""

    name: str
    reason: str
