"""The cost model: bytes over bandwidth plus launches, or what was measured where it was."""

from __future__ import annotations

from dataclasses import dataclass

from ...core.devices import DeviceSpec, device_spec, nearest_spec
from ...core.platform import Platform
from ...core.route import Route
from ...fusion.traffic import SiteTraffic
from .routes import RouteCost

#: Kernels of a site by route: the op and the quantiser apart, or one for both.
_LAUNCHES = {Route.UNFUSED: 2, Route.FUSED: 1, Route.DUAL: 1, Route.ABSORBED: 1}
_HALF = 2


@dataclass(frozen=True)
class CostModel:
    """What things cost on one device.

    Attributes:
        device: its constants.
        note: why they are no measured ones; empty where they are.
        routes: measured costs of routes; empty where costs are counted from bytes and launches.
    """

    device: DeviceSpec
    note: str = ""
    routes: tuple[RouteCost, ...] = ()

    def site_seconds(self, traffic: SiteTraffic, route: Route, kind: str = "activation") -> float:
        """Seconds of a site in one batch, until codes and shrunk rows are there.

        Args:
            traffic: of the site in the batch.
            route: that it takes.
            kind: of the site: "activation" or "norm".
        """
        measured = self._measured(traffic, route, kind)
        if measured is not None:
            return measured.seconds(traffic)
        device = self.device
        launches = _LAUNCHES[route]
        if traffic.adapter_rows and route in (Route.UNFUSED, Route.DUAL):
            # The shrink is a kernel of its own.
            launches += 1
        return traffic.bytes_moved(route) / device.bandwidth + launches * device.launch_seconds

    def _measured(self, traffic: SiteTraffic, route: Route, kind: str) -> RouteCost | None:
        """Of this kind and key; a key that was not measured costs what one alike does."""
        fitting = [cost for cost in self.routes if cost.route == str(route) and cost.kind == kind]
        key = str(traffic.key)
        for cost in fitting:
            if cost.key == key:
                return cost
        # Static scales need no pass over the row; all others do.
        static = "static" in key
        alike = [cost for cost in fitting if ("static" in cost.key) == static]
        return next(iter(alike or fitting), None)

    def linear_seconds(
        self, rows: int, in_features: int, out_features: int, bytes_per_weight: float = 1.0
    ) -> float:
        """Seconds of a base linear: what takes longer of reading its weight and multiplying."""
        device = self.device
        flops = device.fp8_flops if bytes_per_weight < _HALF else device.bf16_flops
        read = in_features * out_features * bytes_per_weight / device.bandwidth
        computed = 2 * rows * in_features * out_features / flops
        return max(read, computed) + device.launch_seconds

    def branch_seconds(self, rows: int, in_features: int, out_features: int, rank: int) -> float:
        """Seconds of a LoRA shrink and expand, the raw rows and the output read and written."""
        moved = _HALF * (rank * (in_features + out_features) + rows * (in_features + out_features))
        return moved / self.device.bandwidth + 2 * self.device.launch_seconds


def cost_model_for(kind: str) -> CostModel:
    """The model of a device by its name, from its datasheet.

    Raises:
        ConfigError: there is none.
    """
    return CostModel(device_spec(kind), "datasheet numbers")


def datasheet_model(platform: Platform, why: str) -> CostModel:
    """The model of the device with these facts, as long as nothing was measured there."""
    return CostModel(nearest_spec(platform), f"datasheet numbers: {why}")
