"""Policy `auto`: for each site and class of batches, the allowed route that costs least."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache

from ..core.platform import Platform
from ..core.route import Route
from .base import Policy, RouteChoice, SiteState, allowed_routes
from .cost.calibration import StoredCosts
from .cost.model import CostModel, cost_model_for
from .own import DynamicPolicy

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class AutoPolicy(Policy):
    """The cheapest allowed route by the costs of the device.

    Attributes:
        calibration: file that `branchline calibrate` wrote; None for the one in the cache folder.
        device: take the datasheet of this device (`DEVICE_KINDS`) in the place of a calibration.
    """

    name = "auto"
    by_batch = True

    calibration: str | None = None
    device: str | None = None

    def choose(self, state: SiteState) -> tuple[RouteChoice, ...]:
        return _as_dynamic(state, "auto is not bound to a device")

    def bound(self, platform: Platform) -> Policy:
        """With the costs of this device; as `dynamic`, with the reason, where they are not known.

        Raises:
            ConfigError: `device` is unknown, or `calibration` is absent or damaged.
        """
        if self.device is not None:
            return CheapestPolicy(cost_model_for(self.device))
        stored = StoredCosts.find(platform, self.calibration)
        if stored.model is None:
            _warn_once(stored.reason)
            return UncalibratedPolicy(stored.reason)
        return CheapestPolicy(stored.model)


@dataclass(frozen=True)
class UncalibratedPolicy(Policy):
    """`auto` where nothing is known of the device: as `dynamic`."""

    name = "auto"

    reason: str

    def choose(self, state: SiteState) -> tuple[RouteChoice, ...]:
        return _as_dynamic(state, f"auto chooses as dynamic: {self.reason}")


@dataclass(frozen=True)
class CheapestPolicy(Policy):
    """`auto` with the costs of a device."""

    name = "auto"
    by_batch = True

    costs: CostModel

    def choose(self, state: SiteState) -> tuple[RouteChoice, ...]:
        if state.traffic is None or state.batch is None:
            return _as_dynamic(state, "auto was asked about no batch")
        allowed = allowed_routes(state.raw_readers)
        if len(allowed) == 1:
            return DynamicPolicy().choose(state)
        seconds = {
            route: self.costs.site_seconds(state.traffic, route, state.kind) for route in allowed
        }
        # Equal costs: less memory traffic first, which the higher number has.
        ordered = sorted(seconds, key=lambda route: (seconds[route], -route))
        return tuple(
            RouteChoice(route, _reason(ordered[at:], seconds, str(state.batch)))
            for at, route in enumerate(ordered)
        )


@cache
def _warn_once(reason: str) -> None:
    _logger.warning("policy auto chooses as dynamic: %s", reason)


def _reason(ordered: list[Route], seconds: dict[Route, float], batch: str) -> str:
    chosen, *others = (f"{route} {seconds[route] * 1e6:.3g} us" for route in ordered)
    against = f"; {', '.join(others)}" if others else ""
    return f"{chosen.replace(' ', ': ', 1)}{against} at {batch}"


def _as_dynamic(state: SiteState, why: str) -> tuple[RouteChoice, ...]:
    return tuple(
        RouteChoice(choice.route, f"{choice.reason} ({why})")
        for choice in DynamicPolicy().choose(state)
    )
