"""The service on Ray, as ``serve`` needs it; :mod:`ray_cluster.cli.running_cell` has the rest."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ApplicationStatusOverview

from ray_cluster.cli.commands import command
from ray_cluster.cli.failure_text import own_error, short_reason
from ray_cluster.cli.served_file import ServedFile
from ray_cluster.config.arguments import front_arguments
from ray_cluster.config.loading import ClusterConfig
from ray_cluster.deployments.deploy_file import FRONT
from ray_cluster.deployments.links import DISPATCHER
from ray_cluster.deployments.service import (
    ApplicationState,
    Owned,
    StartFailed,
    application_states,
    deploy,
    start_ray,
    stop,
    wait_running,
)
from ray_cluster.errors import ConfigError, RayClusterError

# a model that is downloaded by its replicas may take its time
_START_S = 3600.0
_LEAVE_S = 10.0
_ANSWER_S = 5.0


class ServiceFailed(RayClusterError):
    """The service could not start, or Ray has died."""


class RayService:
    """One deployed configuration, and the local Ray if there was none to connect to.

    Serve's and Ray's own messages do not reach the terminal: what matters of them is raised.

    Args:
        served: the file that the configuration is from; None if none is watched.

    Attributes:
        config: at the last look, see :meth:`refresh`.
    """

    def __init__(self, config: ClusterConfig, served: ServedFile | None = None) -> None:
        self.config = config
        self._served = served
        self._owns_ray = False
        self._owns_serve = False
        self._is_deployed = False
        self._has_run = False
        logging.getLogger("ray.serve").setLevel(logging.WARNING)

    def connect(self) -> None:
        """Start a local Ray, or connect to the configured one."""
        # should ray.init be interrupted, what it has started must go
        self._owns_ray = self.config.ray.address is None
        try:
            self._owns_ray = start_ray(self.config.ray)
            serve.status()
        except RayServeException:
            self._owns_serve = True
        # nothing narrower holds: ray.init raises Exception itself, not a kind of it, when a node or
        # its dashboard starts too slowly (ray/_private/node.py and services.py)
        except Exception as error:
            where = self.config.ray.address or "on this machine"
            raise ServiceFailed(
                f"Ray cannot be started or reached ({where}): {short_reason(str(error))}; "
                f"'{command()} doctor' tells more"
            ) from error

    def deploy(self) -> None:
        """Hand all applications to Serve, without waiting for them."""
        self._is_deployed = True
        served = self._served
        front = front_arguments(self.config) if served is None else served.front(self.config)
        deploy(self.config, front)

    def refresh(self) -> None:
        """Take note of pools that were added or removed since; a broken file changes nothing."""
        if self._served is not None:
            with suppress(ConfigError):
                self.config = self._served.load()

    @property
    def address(self) -> str:
        """Of the Ray cluster."""
        return str(ray.get_runtime_context().gcs_address)

    def wait_running(self, show: Callable[..., None]) -> None:
        """Wait until every application runs; ``show(name, state, is_done=)`` hears of each.

        Raises:
            ServiceFailed: one cannot; the message is the model's own where there is one.
        """

        def on_change(states: list[ApplicationState]) -> None:
            applications = serve.status().applications
            for row in states:
                status = applications.get(row.name)
                _raise_own_error(row.name, status)
                show(row.name, _progress(status, row.state), is_done=row.state == "running")

        try:
            wait_running(self.config, timeout_s=_START_S, on_change=on_change)
            self._has_run = True
        except StartFailed as error:
            raise ServiceFailed(
                f"{short_reason(str(error))}; the logs are in {self.log_folder}"
            ) from error

    def application_states(self) -> list[ApplicationState]:
        """Return where each application stands; ServiceFailed if Ray has died."""
        try:
            return application_states(self.config)
        except (RayError, RayServeException, ConnectionError) as error:
            raise ServiceFailed(
                f"Ray does not answer any more ({short_reason(str(error))})"
            ) from error

    def replica_counts(self) -> Mapping[str, Mapping[str, int]]:
        """Return the running replicas by application and deployment."""
        applications = serve.status().applications
        names = [row.name for row in self.application_states()]
        return {
            name: {
                deployment: _num_running(status.replica_states)
                for deployment, status in applications[name].deployments.items()
            }
            for name in names
            if name in applications
        }

    def close_admission(self) -> None:
        """Have the dispatcher refuse new images; without an answer from it nothing changes."""
        if self._is_deployed:
            self._tell_dispatcher("close_admission")

    def end_attached(self) -> None:
        """Have the dispatcher end what clients wait for, likewise."""
        self._tell_dispatcher("end_attached")

    @staticmethod
    def _tell_dispatcher(method: str) -> None:
        with suppress(RayError, RayServeException, TimeoutError):
            handle = serve.get_deployment_handle(DISPATCHER, FRONT)
            getattr(handle, method).remote().result(timeout_s=_ANSWER_S)

    def num_in_flight(self) -> int | None:
        """Return the images that wait or are being made; None if the dispatcher does not say."""
        try:
            handle = serve.get_deployment_handle(DISPATCHER, FRONT)
            snapshot = handle.snapshot.remote().result(timeout_s=_ANSWER_S)
        except (RayError, RayServeException, TimeoutError):
            return None
        return int(snapshot.num_waiting + snapshot.num_leased)

    @property
    def has_run(self) -> bool:
        """Whether all applications have run: before, nothing can be in flight."""
        return self._has_run

    @property
    def dashboard_url(self) -> str | None:
        """Where Ray's dashboard is, if it was started here."""
        settings = self.config.ray
        if not self._owns_ray or not settings.include_dashboard:
            return None
        return f"http://{settings.dashboard_host}:{settings.dashboard_port}"

    @property
    def log_folder(self) -> str:
        """Folder of the logs of Ray, Serve and the replicas."""
        context = ray.get_runtime_context()
        return str(Path(context.get_temp_dir()) / context.get_session_name() / "logs")

    def close(self, show: Callable[..., None]) -> None:
        """Take the applications down, then the Ray that was started here, and all its processes.

        ``show(name, state, is_done=)`` hears of each thing that stops.
        """

        def on_change(name: str, state: str) -> None:
            show(name, state, is_done=state == "stopped")

        processes = psutil.Process().children(recursive=True) if self._owns_ray else []
        self.refresh()
        try:
            # in a Ray of our own, replicas that never ran have nothing to hand back
            must_delete = self._has_run or (self._is_deployed and not self._owns_ray)
            if must_delete and ray.is_initialized():
                stop(self.config, owned=self._owned, on_change=on_change)
        except (RayError, RayServeException, ConnectionError, TimeoutError) as error:
            logging.getLogger(__name__).warning(
                "the applications could not be stopped: %s", short_reason(str(error))
            )
        finally:
            if self._owns_ray:
                on_change("Ray", "stopping")
            ray.shutdown()
            _end(processes)
            if self._owns_ray:
                on_change("Ray", "stopped")

    @property
    def _owned(self) -> Owned:
        if self._owns_ray:
            return "ray"
        return "serve" if self._owns_serve else "applications"


def _raise_own_error(name: str, status: ApplicationStatusOverview | None) -> None:
    """Raise what the model itself says against being served: Serve would try again and again."""
    if status is None:
        return
    messages = [status.message, *(item.message for item in status.deployments.values())]
    for message in messages:
        reason = own_error(message)
        if reason is not None:
            raise ServiceFailed(reason if name in reason else f"{name}: {reason}")


def _progress(status: ApplicationStatusOverview | None, state: str) -> str:
    if status is None or state == "running":
        return state
    counts = [item.replica_states for item in status.deployments.values()]
    running = sum(_num_running(count) for count in counts)
    total = sum(sum(count.values()) for count in counts)
    return f"{state}, {running} of {total} replicas" if total else state


def _num_running(count_by_state: Mapping[Any, int]) -> int:
    return sum(count for state, count in count_by_state.items() if state == "RUNNING")


def _end(processes: list[psutil.Process]) -> None:
    """Wait for processes to end by themselves, then end them."""
    _, alive = psutil.wait_procs(processes, timeout=_LEAVE_S)
    for process in alive:
        process.kill()
    psutil.wait_procs(alive, timeout=_LEAVE_S)
