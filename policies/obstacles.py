"""Why some sites can never be fused."""

from __future__ import annotations

from typing import NamedTuple

from ..fusion.site import Site
from ..linear.contract import InputContract
from .reasons import ReasonCode


class Obstacle(NamedTuple):
    """Why a site can never be fused."""

    code: ReasonCode
    reason: str


def obstacle_of(site: Site) -> Obstacle | None:
    """Why the site can never be fused, whatever adapters are live; None if it can."""
    facts = site.facts
    if facts.semantics is None:
        return Obstacle(ReasonCode.UNKNOWN_SEMANTICS, facts.reason)
    if facts.other_readers:
        reason = f"also read by {', '.join(facts.other_readers)}"
        return Obstacle(ReasonCode.UNKNOWN_CONSUMER, reason)
    contracts = [layer.kernel.contract for layer in site.layers]
    if any(contract.key is None for contract in contracts):
        names = [
            f"{layer.name} (kernel {layer.kernel.name})"
            for layer in site.layers
            if layer.kernel.contract.key is None
        ]
        reason = f"takes no quantised input: {', '.join(names)}"
        return Obstacle(ReasonCode.NO_QUANTISED_INPUT, reason)
    for layer, contract in zip(site.layers, contracts, strict=True):
        if not contracts[0].same_input(contract):
            reason = (
                f"consumers disagree: {site.layers[0].name} takes {_describe(contracts[0])}, "
                f"{layer.name} takes {_describe(contract)}"
            )
            return Obstacle(ReasonCode.CONSUMERS_DISAGREE, reason)
    return None


def _describe(contract: InputContract) -> str:
    if contract.scale is None:
        return str(contract.key)
    return f"{contract.key} with scale {contract.scale.number:g}"
