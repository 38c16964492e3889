"""A configuration as Ray Serve's own config file, for ``serve deploy`` and KubeRay.

Its arguments hold no settings, so that a deployment after a change of settings replaces nothing.
Nor do they hold numbers of processes: a change of one starts or stops some and replaces none.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ray_cluster.config.kinds import LORAS
from ray_cluster.config.loading import ClusterConfig
from ray_cluster.config.sections.controller import ControlConfig
from ray_cluster.config.slices import (
    as_json,
    controller_arguments,
    front_arguments,
    worker_arguments,
)

FRONT = "front"
GATEWAY = "Gateway"
CONTROLLER = "controller"
CONTROLLER_DEPLOYMENT = "Controller"

PLAN_SCALING = "ray_cluster.deployments.serve.plan_scaling:PlanScaling"
"""The autoscaling policy of workers where ``control.scaling`` is ``policy``."""

SURGE_PERCENT = 1
"""Replicas beside those that are replaced: Serve rounds up, so one at a time up to a hundred."""

BUILDER = "ray_cluster.deployments.app:build_app"
# Serve must have one; what bounds a plan are the settings
_MOST_REPLICAS = 10_000


def serve_config(
    config: ClusterConfig, settings: Path, folder: Path | None = None
) -> dict[str, Any]:
    """Return the content of the file.

    Args:
        settings: path of the watched file where the dispatcher runs.
        folder: where relative paths of storage started; None where there are none.
    """
    http = config.http
    return {
        "proxy_location": "EveryNode",
        "http_options": {
            "host": http.host,
            "port": http.port,
            "keep_alive_timeout_s": http.keep_alive_s,
        },
        "applications": [
            _front(config, settings, folder),
            *([_worker(config, LORAS)] if config.loras.num_stores else []),
            *([_controller(config)] if config.control.enabled else []),
            *(_worker(config, one.name) for one in config.workers),
        ],
    }


def worker_replicas(config: ClusterConfig, name: str) -> dict[str, Any]:
    """Return the options of a worker's deployment that say how many replicas it has, and when."""
    worker = config.find(name)
    if worker is None:
        # no plan counts the stores of LoRAs
        return {"num_replicas": config.loras.num_stores}
    surge = {"max_surge_percent": SURGE_PERCENT} if worker.surge else {}
    return replica_options(config.control, worker.replicas) | surge


def replica_options(control: ControlConfig, num_replicas: int) -> dict[str, Any]:
    """Return the options of a worker's deployment that say how many replicas it has.

    Args:
        num_replicas: at the start.
    """
    if not control.scales_by_policy:
        return {"num_replicas": num_replicas}
    return scaled_by_policy(num_replicas)


def scaled_by_policy(num_replicas: int) -> dict[str, Any]:
    """Return these options where an autoscaling policy sets the count."""
    return {
        "num_replicas": "auto",
        "autoscaling_config": {
            "initial_replicas": num_replicas,
            "min_replicas": 0,
            "max_replicas": _MOST_REPLICAS,
            # the planner has its own dwell time
            "upscale_delay_s": 0.0,
            "downscale_delay_s": 0.0,
            # no number in here: a change of it would replace all replicas
            "policy": {"policy_function": PLAN_SCALING},
        },
    }


def _front(config: ClusterConfig, settings: Path, folder: Path | None) -> dict[str, Any]:
    arguments = front_arguments(config, settings, folder=folder)
    return {
        "name": FRONT,
        "route_prefix": "/",
        "import_path": BUILDER,
        "args": {"front": as_json(arguments)},
        "deployments": [{"name": GATEWAY, "num_replicas": config.http.num_gateways}],
    }


def _controller(config: ClusterConfig) -> dict[str, Any]:
    return {
        "name": CONTROLLER,
        "route_prefix": None,
        "import_path": BUILDER,
        "args": {"controller": as_json(controller_arguments(config))},
        "deployments": [{"name": CONTROLLER_DEPLOYMENT, "num_replicas": 1}],
    }


def _worker(config: ClusterConfig, name: str) -> dict[str, Any]:
    arguments, replicas = worker_arguments(config, name), worker_replicas(config, name)
    return {
        "name": name,
        "route_prefix": None,
        "import_path": BUILDER,
        # whoever sets replica counts from outside Serve; never beside an autoscaling policy
        "external_scaler_enabled": "autoscaling_config" not in replicas,
        "args": {"worker": as_json(arguments)},
        "deployments": [{"name": arguments.deployment, **replicas}],
    }
