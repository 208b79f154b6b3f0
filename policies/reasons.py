"""Why a site takes its route, as a word that rules and programs can rely on."""

from __future__ import annotations

from enum import StrEnum

from ..core.route import Route
from ..linear.registry import RawReader


class ReasonCode(StrEnum):
    """The reason of a route; the text beside it says more and may change.

    `planned`: a producer writes codes.  Of unfused sites: `adapter`, `hook` or `unknown-consumer`
    reads the activation raw; `changed-input`: an adapter changes it before the linears;
    `unknown-semantics`: nothing known equals what the site computes; `no-quantised-input`: a
    consumer takes no codes; `consumers-disagree`: they take different ones; `no-producer`: none
    serves the site here; `emulated`: what the policy preferred would only be emulated here;
    `out-of-service`: a self-check withdrew it; `policy`: the policy chose so
    though nobody reads raw.
    """

    PLANNED = "planned"
    ADAPTER = "adapter"
    HOOK = "hook"
    UNKNOWN_CONSUMER = "unknown-consumer"
    CHANGED_INPUT = "changed-input"
    UNKNOWN_SEMANTICS = "unknown-semantics"
    NO_QUANTISED_INPUT = "no-quantised-input"
    CONSUMERS_DISAGREE = "consumers-disagree"
    NO_PRODUCER = "no-producer"
    EMULATED = "emulated"
    OUT_OF_SERVICE = "out-of-service"
    POLICY = "policy"


def code_of(route: Route, readers: tuple[RawReader, ...]) -> ReasonCode:
    """The code of a site that could be fused.

    Args:
        route: that it takes.
        readers: who reads its output raw.
    """
    if route != Route.UNFUSED:
        return ReasonCode.PLANNED
    kinds = {reader.kind for reader in readers}
    for kind, code in (("unknown", ReasonCode.UNKNOWN_CONSUMER), ("hook", ReasonCode.HOOK)):
        if kind in kinds:
            return code
    if any(reader.changes_input for reader in readers):
        return ReasonCode.CHANGED_INPUT
    return ReasonCode.ADAPTER if readers else ReasonCode.POLICY
