"""One endpoint before many replicas, by Ray Serve (the extra `ray`).

`build` makes an application for `serve run branchline.serving.ray:build model=FOLDER` and for
`serve.run`; `branchline serve MODEL --ray` deploys the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ...core.errors import ConfigError
from .config import FleetConfig

if TYPE_CHECKING:
    from ray.serve import Application

__all__ = ["FleetConfig", "build", "require_ray"]


def require_ray() -> None:
    """Refuse where Ray Serve is not installed.

    Raises:
        ConfigError: it is not.
    """
    if find_spec("ray") is None:
        raise ConfigError(
            "serving by Ray", "needs Ray Serve, which is not installed", "install branchline[ray]"
        )


def build(config: FleetConfig | Mapping[str, Any]) -> Application:
    """An application of Ray Serve: replicas, their table of adapters, and one endpoint.

    Args:
        config: of the fleet, or its fields; texts are read as they are on the command line.

    Raises:
        ConfigError: Ray Serve is not installed, or a setting cannot work.
    """
    require_ray()
    from .application import application

    fleet = config if isinstance(config, FleetConfig) else FleetConfig.checked(**config)
    return application(fleet)
