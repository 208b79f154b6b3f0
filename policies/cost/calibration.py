"""Measured costs of a device: their file, where it lies, and whether it still holds."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from platformdirs import user_cache_path
from pydantic import ValidationError

from ...core.devices import DeviceSpec, nearest_spec
from ...core.errors import CalibrationError
from ...core.fingerprint import DeviceFingerprint, fingerprint_of
from ...core.platform import Platform
from ...core.report import ReportPart
from .model import CostModel, datasheet_model
from .routes import RouteCost

_REMEDY = "run branchline calibrate"


class DeviceCosts(ReportPart):
    """What `branchline calibrate` measured.

    Attributes:
        version: of this format.
        device_type: "cpu" or "cuda".
        fingerprint: of what it was measured on.
        bandwidth: that the fused producer reaches on a large activation, bytes a second.
        launch_seconds: of its smallest call.
        routes: costs of all routes.
        median_error: of the fitted costs against the measured times, relative, the median.
        seconds: that measuring took.
    """

    version: Literal[1] = 1
    device_type: str
    fingerprint: DeviceFingerprint
    bandwidth: float
    launch_seconds: float
    routes: tuple[RouteCost, ...]
    median_error: float
    seconds: float

    def save(self, file: Path) -> None:
        """Write it, whole or not at all.

        Raises:
            CalibrationError: the file cannot be written.
        """
        beside = file.with_name(f"{file.name}.{os.getpid()}.part")
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            beside.write_text(self.model_dump_json(indent=2), encoding="utf-8")
            beside.replace(file)
        except OSError as error:
            raise CalibrationError(
                f"calibration {file}",
                f"cannot be written: {error.strerror}",
                "name another file with --out, or set XDG_CACHE_HOME to a folder of yours",
            ) from error

    @classmethod
    def load(cls, file: Path) -> DeviceCosts:
        """Read it.

        Raises:
            CalibrationError: there is none, or it is damaged.
        """
        try:
            return cls.model_validate_json(file.read_bytes())
        except OSError as error:
            reason = f"cannot be read: {error.strerror}"
            raise CalibrationError(f"calibration {file}", reason, _REMEDY) from error
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "the document"
            reason = f"is no calibration: {where}: {first['msg']}"
            raise CalibrationError(f"calibration {file}", reason, _REMEDY) from error

    def model(self, platform: Platform) -> CostModel:
        """The costs of the device with these facts, which is the one that was measured."""
        spec: DeviceSpec = replace(
            nearest_spec(platform),
            bandwidth=self.bandwidth,
            launch_seconds=self.launch_seconds,
            measured=True,
            fingerprint=self.fingerprint.digest,
        )
        return CostModel(spec, routes=self.routes)


def calibration_file(device_type: str) -> Path:
    """Where the calibration of this machine's CPU, or GPU, lies in the cache folder."""
    return user_cache_path("branchline") / "calibration" / f"{device_type}.json"


@dataclass(frozen=True)
class StoredCosts:
    """What the stored calibration of a device comes to.

    Attributes:
        model: the costs; None where there is no calibration, or it holds no longer.
        reason: why `model` is None, and what to do; empty otherwise.
    """

    model: CostModel | None
    reason: str = ""

    @classmethod
    def find(cls, platform: Platform, file: str | None = None) -> StoredCosts:
        """Those of the device with these facts, which is here.

        Args:
            platform: of the device.
            file: in the place of the one in the cache folder.

        Raises:
            CalibrationError: `file` is given, and is absent or damaged.
        """
        path = calibration_file(platform.device_type) if file is None else Path(file)
        if file is None and not path.is_file():
            return cls(None, f"no calibration of this device, {_REMEDY}")
        try:
            found = DeviceCosts.load(path)
        except CalibrationError as error:
            if file is not None:
                raise
            # It is a cache: another version's file, or half of one, is as good as none.
            return cls(None, str(error))
        return cls.judged(found, fingerprint_of(platform), platform)

    @classmethod
    def judged(cls, found: DeviceCosts, here: DeviceFingerprint, platform: Platform) -> StoredCosts:
        """Whether a calibration holds on a device; pure."""
        stale = found.fingerprint.differences(here)
        if stale:
            return cls(None, f"the calibration is stale ({'; '.join(stale)}), {_REMEDY}")
        return cls(found.model(platform))


def cost_model_of(platform: Platform) -> CostModel:
    """The model of the device with these facts: as measured, where a calibration of it holds."""
    stored = StoredCosts.find(platform)
    return stored.model or datasheet_model(platform, stored.reason)
