"""The deployments of a fleet, as one application of Ray Serve."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ray import serve
from ray.serve import Application

from ..http.start import LoadedModel, base_names
from .config import FleetConfig
from .endpoint import Endpoint
from .fleet import Fleet
from .loader import FolderLoader
from .replica import FLEET, Replica

REPLICAS = "branchline-replica"
ENDPOINT = "branchline-endpoint"

# What a replica has lost, it is soon told again.
_HEALTH_SECONDS = 5.0
# A model that does not load now does not load at the tenth try either.
_START_TRIES = 2
# Deployments that compute nothing wait for no processor of their own.
_LIGHT = {"num_cpus": 0}
_MOST_CALLS = 10_000
# Replicas log every request themselves.
_QUIET = {"enable_access_log": False}

# Annotated as what decorates a function.
_deployment: Any = serve.deployment


def application(config: FleetConfig, load: Callable[[], LoadedModel] | None = None) -> Application:
    """The endpoint, with the replicas and the fleet's table behind it.

    Args:
        config: of the fleet.
        load: loads the model without adapters, in a replica; None loads from the folder.

    Raises:
        ConfigError: names that clash, or static scales without a file of them.
    """
    names = base_names(config, config.model)
    loader = FolderLoader(config) if load is None else load
    replicas = _deployment(Replica, name=REPLICAS, **_size(config), **_limits(config)).bind(
        config, names, loader
    )
    fleet = _deployment(
        Fleet,
        name=FLEET,
        num_replicas=1,
        ray_actor_options=_LIGHT,
        logging_config=_QUIET,
        max_ongoing_requests=_MOST_CALLS,
    ).bind(
        replicas,
        {module.name: module.path for module in config.modules},
        config.request_timeout,
    )
    endpoint: Any = serve.ingress()(Endpoint)
    return _deployment(
        endpoint,
        name=ENDPOINT,
        ray_actor_options=_LIGHT,
        logging_config=_QUIET,
        max_ongoing_requests=_MOST_CALLS,
        graceful_shutdown_timeout_s=config.shutdown_timeout,
    ).bind(config.model_copy(update={"api_key": (), "admin_key": ()}), names, replicas, fleet)


def _size(config: FleetConfig) -> dict[str, Any]:
    if config.ray_max_replicas is None:
        return {"num_replicas": config.ray_replicas}
    return {
        "autoscaling_config": {
            "min_replicas": config.ray_replicas,
            "initial_replicas": config.ray_replicas,
            "max_replicas": config.ray_max_replicas,
            # More than this on average, and forwards are full soon.
            "target_ongoing_requests": max(1.0, config.max_num_seqs / 2),
        }
    }


def _limits(config: FleetConfig) -> dict[str, Any]:
    return {
        "ray_actor_options": {"num_cpus": config.ray_cpus, "num_gpus": config.ray_gpus},
        # A replica that has as many as share a forward is not free.
        "max_ongoing_requests": config.max_num_seqs,
        "max_queued_requests": config.max_queue,
        "graceful_shutdown_timeout_s": config.shutdown_timeout,
        "health_check_period_s": _HEALTH_SECONDS,
        "max_constructor_retry_count": _START_TRIES,
        "logging_config": _QUIET,
    }
