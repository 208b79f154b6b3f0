"""Stable identifiers of why a site takes the route it takes; rules and tools name them."""

from __future__ import annotations

from enum import StrEnum

from ..core.route import Route
from ..linear.registry import RawReader


class ReasonCode(StrEnum):
    """Why a site takes its route; the text beside it says more, and may change.

    Attributes:
        FREE: nobody reads raw: fused.
        RAW_READER: an adapter's branch reads the raw activation.
        CHANGED_INPUT: an adapter changes what the linears read before they multiply it.
        HOOK: a forward hook reads it.
        UNKNOWN_CONSUMER: something else reads it that is no known linear.
        NO_SEMANTICS: nothing known equals what the site computes.
        NO_QUANTISED_INPUT: a consumer's kernel takes no codes.
        CONSUMERS_DISAGREE: the consumers take different codes.
        NO_PRODUCER: no producer can make the codes here.
        EMULATED: the route that the policy wanted is only emulated here.
        OUT_OF_SERVICE: a producer was withdrawn, because it gave other numbers.
        POLICY: the policy preferred it, though another route was allowed.
    """

    FREE = "free"
    RAW_READER = "raw-reader"
    CHANGED_INPUT = "changed-input"
    HOOK = "hook"
    UNKNOWN_CONSUMER = "unknown-consumer"
    NO_SEMANTICS = "no-semantics"
    NO_QUANTISED_INPUT = "no-quantised-input"
    CONSUMERS_DISAGREE = "consumers-disagree"
    NO_PRODUCER = "no-producer"
    EMULATED = "emulated"
    OUT_OF_SERVICE = "out-of-service"
    POLICY = "policy"


def code_of_readers(readers: tuple[RawReader, ...], route: Route) -> ReasonCode:
    """The code of a route that a policy chose, where producers were possible; pure.

    Args:
        readers: who reads the site's output raw.
        route: what was chosen.
    """
    kinds = {reader.kind for reader in readers}
    if "unknown" in kinds:
        return ReasonCode.UNKNOWN_CONSUMER
    if "hook" in kinds:
        return ReasonCode.HOOK
    if any(reader.changes_input for reader in readers):
        return ReasonCode.CHANGED_INPUT
    if readers:
        return ReasonCode.RAW_READER
    return ReasonCode.FREE if route == Route.FUSED else ReasonCode.POLICY
