"""The cost model: bytes over bandwidth, plus launches."""

from __future__ import annotations

from dataclasses import dataclass

from ...core.devices import DeviceSpec, device_spec, nearest_spec
from ...core.platform import Platform
from ...core.route import Route
from ...fusion.traffic import SiteTraffic

#: Kernels of a site by route: the op and the quantiser apart, or one for both.
_LAUNCHES = {Route.UNFUSED: 2, Route.FUSED: 1, Route.DUAL: 1, Route.ABSORBED: 1}
_HALF = 2


@dataclass(frozen=True)
class CostModel:
    """What things cost on one device.

    Attributes:
        device: its constants.
        note: why they are no measured ones; empty where they are.
    """

    device: DeviceSpec
    note: str = ""

    def site_seconds(self, traffic: SiteTraffic, route: Route) -> float:
        """Seconds of a site in one batch, until codes and shrunk rows are there."""
        device = self.device
        launches = _LAUNCHES[route]
        if traffic.adapter_rows and route in (Route.UNFUSED, Route.DUAL):
            # The shrink is a kernel of its own.
            launches += 1
        return traffic.bytes_moved(route) / device.bandwidth + launches * device.launch_seconds

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


def cost_model_of(platform: Platform) -> CostModel:
    """The model of the device with these facts."""
    device = nearest_spec(platform)
    return CostModel(device, "not calibrated: datasheet numbers (run branchline calibrate)")


def cost_model_for(kind: str) -> CostModel:
    """The model of a device by its name.

    Raises:
        ConfigError: there is none.
    """
    return CostModel(device_spec(kind), "datasheet numbers")
