"""The only place that binds deployments into applications.

One Serve application per pool and one called ``front``. A pool is added by adding its
application; nothing else is touched.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ray import serve
from ray.serve import Application

from ray_cluster.config.loading import ClusterConfig, load_config
from ray_cluster.config.pools import PoolConfig
from ray_cluster.deployments.actor_logs import serve_logging
from ray_cluster.deployments.base_model import BaseModel
from ray_cluster.deployments.dispatcher import Dispatcher
from ray_cluster.deployments.gateway import Gateway
from ray_cluster.deployments.links import DISPATCHER, FRONT
from ray_cluster.deployments.ray_environment import FRONT_ENVIRONMENT, MODEL_ENVIRONMENT
from ray_cluster.errors import ConfigError

# a replica hands its rows back at a step boundary, well within this
_SHUTDOWN_S = 30.0
_HEALTH_PERIOD_S = 5.0
_HEALTH_TIMEOUT_S = 30.0
# calls are held open by design: Serve must neither queue nor refuse them
_UNBOUNDED = 100_000


def build_app(args: ClusterConfig | Mapping[str, Any] | str | Path) -> Application:
    """Return one application: ``front``, or a pool.

    Args:
        args: a configuration (object, mapping or YAML path) for ``front``; or, as Serve's config
            files give it, a mapping ``{"config": ..., "application": "front" or a pool's name}``.

    Raises:
        ConfigError: the configuration is wrong or has no such pool.
    """
    name = FRONT
    source: Any = args
    if isinstance(args, Mapping) and "config" in args:
        unknown = set(args) - {"config", "application"}
        if unknown:
            raise ConfigError(
                f"build_app got {sorted(unknown)}; allowed: 'config' and 'application'"
            )
        name, source = args.get("application", FRONT), args["config"]
    config = load_config(source)
    return _front(config) if name == FRONT else _pool(config, config.pool(name))


def build_apps(config: ClusterConfig) -> dict[str, Application]:
    """Return all applications of a cell by name, ``front`` first."""
    return {FRONT: _front(config)} | {pool.name: _pool(config, pool) for pool in config.pools}


def _front(config: ClusterConfig) -> Application:
    dispatcher = serve.deployment(
        name=DISPATCHER,
        num_replicas=1,
        ray_actor_options={"num_cpus": 0, "runtime_env": {"env_vars": FRONT_ENVIRONMENT}},
        max_ongoing_requests=_UNBOUNDED,
        logging_config=serve_logging(config.logs),
        health_check_period_s=_HEALTH_PERIOD_S,
        health_check_timeout_s=_HEALTH_TIMEOUT_S,
        graceful_shutdown_timeout_s=5.0,
    )(Dispatcher)
    gateway = serve.deployment(
        name="Gateway",
        num_replicas=config.http.num_gateways,
        ray_actor_options={"num_cpus": 0, "runtime_env": {"env_vars": FRONT_ENVIRONMENT}},
        max_ongoing_requests=_UNBOUNDED,
        logging_config=serve_logging(config.logs),
        health_check_timeout_s=_HEALTH_TIMEOUT_S,
        graceful_shutdown_timeout_s=_SHUTDOWN_S,
    )(Gateway)
    # the dispatcher is bound into the gateway so that both are one application; calls go
    # through a handle by name, which outlives a dispatcher
    return gateway.bind(config, dispatcher.bind(config))


def _pool(config: ClusterConfig, pool: PoolConfig) -> Application:
    deployment = serve.deployment(
        name="BaseModel",
        num_replicas=pool.replicas,
        ray_actor_options={
            "num_cpus": pool.num_cpus,
            "num_gpus": pool.num_gpus,
            "runtime_env": {"env_vars": MODEL_ENVIRONMENT},
        },
        max_ongoing_requests=_UNBOUNDED,
        logging_config=serve_logging(config.logs),
        health_check_period_s=_HEALTH_PERIOD_S,
        health_check_timeout_s=_HEALTH_TIMEOUT_S,
        graceful_shutdown_timeout_s=_SHUTDOWN_S,
    )(BaseModel)
    return deployment.bind(config, pool)
