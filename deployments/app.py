"""The only place that binds deployments into applications.

One Serve application per worker of the configuration, one for the stores of LoRAs, one for the
controller, and one called ``front``. A worker is added by adding its application; nothing else is
touched. Each gets its own arguments and no settings, so that settings change without any of them
being deployed again.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError
from ray import serve
from ray.serve import Application, Deployment

from ray_cluster.config.kinds import KINDS, LORAS
from ray_cluster.config.loading import ClusterConfig, Document, load_config
from ray_cluster.config.section import Section
from ray_cluster.config.sections.cell_wide import LogsConfig
from ray_cluster.config.sections.pools import PoolConfig
from ray_cluster.config.slices import (
    FrontArguments,
    WorkerArguments,
    controller_arguments,
    front_arguments,
    worker_arguments,
)
from ray_cluster.config.validation_errors import describe
from ray_cluster.deployments.actors import serve_logging
from ray_cluster.deployments.controller import Controller
from ray_cluster.deployments.dispatcher import Dispatcher
from ray_cluster.deployments.dispatcher_handle import DISPATCHER
from ray_cluster.deployments.gateway import Gateway
from ray_cluster.deployments.ranks import bundle_of
from ray_cluster.deployments.serve.deploy_file import (
    CONTROLLER,
    CONTROLLER_DEPLOYMENT,
    FRONT,
    GATEWAY,
    worker_replicas,
)
from ray_cluster.deployments.serve.ray_environment import FRONT_ENVIRONMENT, MODEL_ENVIRONMENT
from ray_cluster.deployments.worker import WorkerDeployment
from ray_cluster.errors import ConfigError

# a replica releases its leases at a step boundary, well within this
_SHUTDOWN_S = 30.0
_HEALTH_PERIOD_S = 5.0
_HEALTH_TIMEOUT_S = 30.0
# calls are held open by design: Serve must neither queue nor refuse them
_UNBOUNDED = 100_000
# of a custom resource that only says where something may run
_RESOURCE_SHARE = 0.001
_ONE: Mapping[str, Any] = {"num_replicas": 1}

# what deploy files had, each for a kind of worker
_EARLIER = {"worker", "scorer", "controlnet", "lora_store"}

SectionT = TypeVar("SectionT", bound=Section)


def build_app(args: ClusterConfig | Mapping[str, Any] | str | Path) -> Application:
    """Return one application: ``front``, that of a worker, or the controller.

    Args:
        args: as ``ray-cluster config FILE --serve-deploy`` writes them, ``{"front": ...}``,
            ``{"worker": ...}`` or ``{"controller": ...}`` with the application's own arguments; or
            a mapping ``{"config": ..., "application": "front" or a name}``, of whose configuration
            (a mapping or a YAML path) the application's part is taken; or a configuration for
            ``front``. A path is watched for settings.

    Raises:
        ConfigError: the arguments are wrong, or the configuration has no such worker.
    """
    if isinstance(args, Mapping) and len(args) == 1:
        match args:
            case {"front": given}:
                return _front(_validated(FrontArguments, given), None, 1)
            case {"worker": given} if "kind" in given:
                return _worker(_validated(WorkerArguments, given), _ONE)
            case {"controller": given}:
                return _controller(_validated(Document, given))
        if set(args) & _EARLIER:
            raise ConfigError(
                "build_app got arguments of an earlier release: write the file again with "
                "'ray-cluster config FILE --serve-deploy'"
            )
    name, source = FRONT, args
    if isinstance(args, Mapping) and "config" in args:
        unknown = set(args) - {"config", "application"}
        if unknown:
            raise ConfigError(
                f"build_app got {sorted(unknown)}; allowed: 'config' and 'application'"
            )
        name, source = args.get("application", FRONT), args["config"]
    config = load_config(source)
    if name == CONTROLLER:
        return _controller(controller_arguments(config))
    if name != FRONT:
        return build_worker(config, name)
    path = source if isinstance(source, str | Path) else None
    folder = None if path is None else Path.cwd()
    return build_front(config, front_arguments(config, path, folder=folder))


def build_front(config: ClusterConfig, arguments: FrontArguments) -> Application:
    """Return the front of a cell; a configuration without a watched file is its settings."""
    given = config if arguments.settings is None else None
    return _front(arguments, given, config.http.num_gateways)


def build_worker(config: ClusterConfig, name: str) -> Application:
    """Return the application of a worker; ConfigError if there is none of that name."""
    return _worker(worker_arguments(config, name), worker_replicas(config, name))


def build_apps(config: ClusterConfig, arguments: FrontArguments) -> dict[str, Application]:
    """Return all applications of a cell by name, ``front`` first."""
    apps = {FRONT: build_front(config, arguments)}
    if config.loras.num_stores:
        apps[LORAS] = build_worker(config, LORAS)
    if config.control.enabled:
        apps[CONTROLLER] = _controller(controller_arguments(config))
    return apps | {one.name: build_worker(config, one.name) for one in config.workers}


def _validated(kind: type[SectionT], given: object) -> SectionT:
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        raise ConfigError(f"build_app: {describe(error, kind)}") from error


def _front(
    arguments: FrontArguments, config: ClusterConfig | None, num_gateways: int
) -> Application:
    options = _front_options(arguments)
    logs = arguments.logs
    dispatcher = _deployment(Dispatcher, DISPATCHER, _ONE, options, logs, shutdown_s=5.0)
    gateway = _deployment(Gateway, GATEWAY, {"num_replicas": num_gateways}, options, logs)
    # the dispatcher is bound into the gateway so that both are one application; calls go
    # through a handle by name, which outlives a dispatcher
    return gateway.bind(arguments, dispatcher.bind(arguments, config))


def _front_options(arguments: Document | None = None) -> dict[str, Any]:
    """Return the actor options of what computes nothing: on the front's nodes, if it has some."""
    options: dict[str, Any] = {"num_cpus": 0, "runtime_env": {"env_vars": FRONT_ENVIRONMENT}}
    return options if arguments is None else options | _only_on(arguments.dispatch.front_resource)


def _only_on(resource: str | None) -> dict[str, Any]:
    """Return the actor options of what runs on nodes with a custom resource alone."""
    return {} if resource is None else {"resources": {resource: _RESOURCE_SHARE}}


def _worker(arguments: WorkerArguments, replicas: Mapping[str, Any]) -> Application:
    row = KINDS[arguments.kind]
    options, bundles = _front_options(), list[dict[str, float]]()
    if row.is_light:
        options |= _only_on(arguments.loras.node_resource)
    if not row.is_light:
        own = arguments.own
        place = _only_on(own.node_resource)
        options = {
            "num_cpus": own.num_cpus,
            "num_gpus": own.hardware.num_gpus,
            "runtime_env": {"env_vars": MODEL_ENVIRONMENT},
            **place,
        }
        if isinstance(own, PoolConfig) and own.is_group:
            # the head itself computes nothing
            options |= {"num_cpus": 0, "num_gpus": 0, "resources": {}}
            bundles = [bundle_of(own) | place.get("resources", {})] * own.ranks
    deployment = _deployment(
        WorkerDeployment, arguments.deployment, replicas, options, arguments.logs
    )
    if bundles:
        deployment = deployment.options(
            placement_group_bundles=bundles, placement_group_strategy="STRICT_PACK"
        )
    if row.is_light:
        deployment = deployment.options(max_replicas_per_node=1)
    return deployment.bind(arguments)


def _controller(arguments: Document) -> Application:
    options = _front_options(arguments)
    kind, name = Controller, CONTROLLER_DEPLOYMENT
    return _deployment(kind, name, _ONE, options, arguments.logs, shutdown_s=5.0).bind(arguments)


def _deployment(
    kind: type,
    name: str,
    replicas: Mapping[str, Any],
    options: dict[str, Any],
    logs: LogsConfig,
    *,
    shutdown_s: float = _SHUTDOWN_S,
) -> Deployment:
    return serve.deployment(
        name=name,
        **replicas,
        ray_actor_options=options,
        max_ongoing_requests=_UNBOUNDED,
        logging_config=serve_logging(logs),
        health_check_period_s=_HEALTH_PERIOD_S,
        health_check_timeout_s=_HEALTH_TIMEOUT_S,
        graceful_shutdown_timeout_s=shutdown_s,
    )(kind)
