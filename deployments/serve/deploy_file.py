"""A configuration as Ray Serve's own config file, for ``serve deploy`` and KubeRay.

Its arguments hold no settings, so that a deployment after a change of settings replaces nothing.
Nor do they hold numbers of processes: a change of one starts or stops some and replaces none.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ray_cluster.config.arguments import (
    controller_arguments,
    controlnet_arguments,
    front_arguments,
    lora_store_arguments,
    scorer_arguments,
    worker_arguments,
)
from ray_cluster.config.loading import ClusterConfig
from ray_cluster.config.sections.cascades import DiscriminatorConfig
from ray_cluster.config.sections.controller import ControlArguments
from ray_cluster.config.sections.controlnets import ControlNetConfig
from ray_cluster.config.sections.pools import PoolConfig

FRONT = "front"
GATEWAY = "Gateway"
WORKER = "BaseModel"
SCORER = "Discriminator"
CONTROL = "ControlNet"
LORAS = "loras"
CONTROLLER = "controller"
CONTROLLER_DEPLOYMENT = "Controller"
STORE = "LoraStore"

DEPLOYMENT_OF = {PoolConfig: WORKER, DiscriminatorConfig: SCORER, ControlNetConfig: CONTROL}
"""The deployment of each kind of worker."""

PLAN_SCALING = "ray_cluster.deployments.serve.plan_scaling:PlanScaling"
"""The autoscaling policy of workers where ``control.scaling`` is ``policy``."""

_BUILDER = "ray_cluster.deployments.app:build_app"
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
            *([_lora_store(config)] if config.loras.num_stores else []),
            *([_controller(config)] if config.control.enabled else []),
            *(_pool(config, pool.name) for pool in config.pools),
            *(_discriminator(config, one.name) for one in config.discriminators),
            *(_controlnet(config, one.name) for one in config.controlnets if one.is_service),
        ],
    }


def replica_options(control: ControlArguments, num_replicas: int) -> dict[str, Any]:
    """Return the options of a worker's deployment that say how many replicas it has.

    Args:
        num_replicas: at the start.
    """
    if not control.scales_by_policy:
        return {"num_replicas": num_replicas}
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
        "import_path": _BUILDER,
        # API keys of this environment belong in no file
        "args": {"front": arguments.model_dump(mode="json", exclude={"api_keys"})},
        "deployments": [{"name": GATEWAY, "num_replicas": config.http.num_gateways}],
    }


def _pool(config: ClusterConfig, name: str) -> dict[str, Any]:
    arguments = {"worker": worker_arguments(config, name).model_dump(mode="json")}
    replicas = replica_options(config.control, config.pool(name).replicas)
    return _worker(name, arguments, WORKER, replicas)


def _discriminator(config: ClusterConfig, name: str) -> dict[str, Any]:
    arguments = {"scorer": scorer_arguments(config, name).model_dump(mode="json")}
    replicas = replica_options(config.control, config.discriminator(name).replicas)
    return _worker(name, arguments, SCORER, replicas)


def _controlnet(config: ClusterConfig, name: str) -> dict[str, Any]:
    arguments = {"controlnet": controlnet_arguments(config, name).model_dump(mode="json")}
    replicas = replica_options(config.control, config.controlnet(name).replicas)
    return _worker(name, arguments, CONTROL, replicas)


def _lora_store(config: ClusterConfig) -> dict[str, Any]:
    arguments = {"lora_store": lora_store_arguments(config).model_dump(mode="json")}
    return _worker(LORAS, arguments, STORE, {"num_replicas": config.loras.num_stores})


def _controller(config: ClusterConfig) -> dict[str, Any]:
    arguments = controller_arguments(config).model_dump(mode="json")
    return {
        "name": CONTROLLER,
        "route_prefix": None,
        "import_path": _BUILDER,
        "args": {"controller": arguments},
        "deployments": [{"name": CONTROLLER_DEPLOYMENT, "num_replicas": 1}],
    }


def _worker(
    name: str, arguments: dict[str, Any], deployment: str, replicas: dict[str, Any]
) -> dict[str, Any]:
    return {
        "name": name,
        "route_prefix": None,
        "import_path": _BUILDER,
        # whoever sets replica counts from outside Serve; never beside an autoscaling policy
        "external_scaler_enabled": "autoscaling_config" not in replicas,
        "args": arguments,
        "deployments": [{"name": deployment, **replicas}],
    }
