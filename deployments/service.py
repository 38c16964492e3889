"""Starts the whole service from a configuration, on a local Ray or in a running cluster."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import ray
from ray import serve
from ray.serve import Application
from ray.serve.config import HTTPOptions, ProxyLocation
from ray.serve.schema import ApplicationStatusOverview

from ray_cluster.config.kinds import LORAS, WORKER_DEPLOYMENTS
from ray_cluster.config.loading import ClusterConfig
from ray_cluster.config.sections.cell_wide import RayConfig
from ray_cluster.config.slices import FrontArguments
from ray_cluster.deployments.actors import serve_logging
from ray_cluster.deployments.app import build_apps, build_worker
from ray_cluster.deployments.serve.deploy_file import CONTROLLER, FRONT
from ray_cluster.process.sessions import OwnSessions

_POLL_S = 0.2
_DELETE_S = 40.0

# what a process has started, and so stops: the applications alone, or more
Owned = Literal["applications", "serve", "ray"]


@dataclass(frozen=True, slots=True)
class ApplicationState:
    """One application as Serve sees it.

    Attributes:
        message: what Serve says of it, if anything.
        details: that, and what it says of its deployments.
        num_running: running replicas by deployment.
        num_replicas: replicas in any state.
        is_known: whether Serve has such an application.
    """

    name: str
    state: Literal["starting", "running", "failed"] = "starting"
    message: str = ""
    details: str = ""
    num_running: Mapping[str, int] = field(default_factory=dict)
    num_replicas: int = 0
    is_known: bool = True

    @property
    def has_replica(self) -> bool:
        """Whether a replica of a worker runs."""
        return any(self.num_running.get(one, 0) > 0 for one in WORKER_DEPLOYMENTS)

    @property
    def is_ready(self) -> bool:
        """Whether it serves: a replica of each deployment runs, or none is wanted."""
        return self.state == "running" or (
            bool(self.num_running) and min(self.num_running.values()) > 0
        )

    @property
    def words(self) -> str:
        """The state, and how many replicas run already."""
        if self.state == "running" or not self.num_replicas:
            return self.state
        running = sum(self.num_running.values())
        return f"{self.state}, {running} of {self.num_replicas} replicas"


def start_ray(config: RayConfig, custom_resources: Iterable[str] = ()) -> bool:
    """Connect to Ray, or start a local one; returns whether it was started here.

    Args:
        custom_resources: that the one node of a local one has.
    """
    if ray.is_initialized():
        return False
    if config.address is not None:
        ray.init(address=config.address, log_to_driver=False, logging_level=logging.ERROR)
        return False
    # a signal to our group is for this process, which drains while Ray still runs
    with OwnSessions():
        ray.init(
            address="local",
            num_cpus=config.num_cpus,
            resources=dict.fromkeys(custom_resources, 1.0),
            object_store_memory=config.object_store_mib << 20,
            include_dashboard=config.include_dashboard,
            dashboard_host=config.dashboard_host,
            dashboard_port=config.dashboard_port,
            log_to_driver=False,
            logging_level=logging.ERROR,
            configure_logging=True,
            _temp_dir=config.temp_dir,
            _metrics_export_port=config.metrics_port,
        )
    return True


def deploy(config: ClusterConfig, arguments: FrontArguments) -> None:
    """Start Serve's proxy and deploy every application without waiting for them."""
    serve.start(
        proxy_location=ProxyLocation.EveryNode,
        http_options=HTTPOptions(
            host=config.http.host,
            port=config.http.port,
            keep_alive_timeout_s=config.http.keep_alive_s,
        ),
        logging_config=serve_logging(config.logs.model_copy(update={"level": "warning"})),
    )
    _run(config, build_apps(config, arguments))


def add_pools(config: ClusterConfig, names: Collection[str]) -> None:
    """Deploy workers that do not run yet, and leave all others alone."""
    _run(config, {name: build_worker(config, name) for name in names})


def _run(config: ClusterConfig, applications: Mapping[str, Application]) -> None:
    unscaled = {FRONT, CONTROLLER}
    if config.control.scales_by_policy:
        unscaled.update(one.name for one in config.workers)
    targets = [
        serve.RunTarget(
            target=application,
            name=name,
            route_prefix="/" if name == FRONT else None,
            # whoever sets replica counts from outside Serve; never beside an autoscaling policy
            external_scaler_enabled=name not in unscaled,
        )
        for name, application in applications.items()
    ]
    serve.run_many(
        targets, wait_for_ingress_deployment_creation=False, wait_for_applications_running=False
    )


def application_states(config: ClusterConfig) -> list[ApplicationState]:
    """Return the state of each application of the configuration."""
    known = serve.status().applications
    names = (FRONT, *_worker_names(config))
    return [
        _state_of(name, known[name]) if name in known else ApplicationState(name, is_known=False)
        for name in names
    ]


def _worker_names(config: ClusterConfig) -> list[str]:
    """Return the applications beside ``front``; first the controller, which scales the others."""
    return [
        *[CONTROLLER] * config.control.enabled,
        *(one.name for one in config.workers),
        *[LORAS] * bool(config.loras.num_stores),
    ]


def _state_of(name: str, status: ApplicationStatusOverview) -> ApplicationState:
    state: Literal["starting", "running", "failed"] = "starting"
    if status.status == "RUNNING":
        state = "running"
    elif status.status in {"DEPLOY_FAILED", "UNHEALTHY"}:
        state = "failed"
    deployments = status.deployments
    return ApplicationState(
        name,
        state,
        status.message,
        details="\n".join([status.message, *(one.message for one in deployments.values())]),
        num_running={
            deployment: sum(n for state, n in one.replica_states.items() if state == "RUNNING")
            for deployment, one in deployments.items()
        },
        num_replicas=sum(sum(one.replica_states.values()) for one in deployments.values()),
    )


def stop(
    config: ClusterConfig,
    *,
    owned: Owned,
    on_change: Callable[[str, str], None] = lambda _name, _state: None,
) -> None:
    """Take the applications down, and what else was started here with them.

    Workers go first: their replicas release leases to a dispatcher that is still there, and the API
    still says why it accepts no more. ``front`` goes last; with a Ray of our own it ends with that,
    so that no caller ever meets a proxy without an application.

    Args:
        owned: the outermost of what was started here.
        on_change: called with name and state of each thing that stops.
    """
    take_down(_worker_names(config), on_change)
    if owned == "ray":
        # not serve.shutdown: the controller would die in its own call, which Ray reports as failed
        on_change("Ray", "stopping")
        ray.shutdown()
        return
    take_down([FRONT], on_change)
    if owned == "serve":
        serve.shutdown()


def take_down(
    names: Collection[str], on_change: Callable[[str, str], None] = lambda _name, _state: None
) -> None:
    """Take applications down; wait for that, but not for ever."""
    for name in names:
        serve.delete(name, _blocking=False)
    deadline_s = time.monotonic() + _DELETE_S
    left = set(names)
    while left and time.monotonic() < deadline_s:
        known = serve.status().applications
        for name in names:
            if name in known:
                on_change(name, "its replicas release their leases")
            elif name in left:
                left.remove(name)
                on_change(name, "stopped")
        if left:
            time.sleep(_POLL_S)
