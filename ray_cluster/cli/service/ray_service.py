"""The service on Ray, as ``serve`` needs it; :mod:`ray_cluster.cli.service.running_cell` has the
rest."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil
import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from ray_cluster.cli.output import command
from ray_cluster.cli.service.ports import port_problem, ray_listeners
from ray_cluster.cli.service.ray_messages import (
    StartWatch,
    own_error,
    seconds_since_start,
    short_reason,
    start_failure,
)
from ray_cluster.cli.service.served_file import ServedFile
from ray_cluster.config.loading import ClusterConfig
from ray_cluster.config.slices import front_arguments
from ray_cluster.deployments.dispatcher_handle import ask_dispatcher
from ray_cluster.deployments.serve.deploy_file import FRONT
from ray_cluster.deployments.service import (
    ApplicationState,
    Owned,
    application_states,
    deploy,
    start_ray,
    stop,
)
from ray_cluster.errors import ConfigError, RayClusterError
from ray_cluster.models.local import check_models
from ray_cluster.protocol.leases import Registration

# a model that is downloaded by its replicas may take its time
_START_S = 3600.0
# since the program began: Ray gives up after 30 to 90 s, and whoever waits wants to know
_TRY_AGAIN_S = 90.0
_EXIT_S = 10.0
_ANSWER_S = 5.0
_POLL_S = 0.2
_SILENT = (RayError, RayServeException, TimeoutError)


class ServiceFailed(RayClusterError):
    """The service could not start, or Ray has died."""


class RayService:
    """One deployed configuration, and the local Ray if there was none to connect to.

    Serve's and Ray's own messages do not reach the terminal: what matters of them is raised.

    Args:
        served: the file that the configuration is from; None if none is watched.

    Attributes:
        config: as of the last :meth:`refresh`.
        has_run: whether all applications have been ready: before, nothing can be in flight.
        left_out: why a pool is not served, by name.
    """

    def __init__(self, config: ClusterConfig, served: ServedFile | None = None) -> None:
        self.config = config
        self.has_run = False
        self.left_out: dict[str, str] = {}
        self._served = served
        self._owned: Owned = "applications"
        self._is_deployed = False
        # as last seen; each look costs Serve's controller and this process some milliseconds
        self._seen: list[ApplicationState] = []
        logging.getLogger("ray.serve").setLevel(logging.WARNING)

    def connect(self, show: Callable[..., None]) -> None:
        """Start a local Ray, or connect to the configured one.

        A local one that does not start is cleared away and started once more, as its processes may
        be late; not where this program has been starting for long already: a machine that busy has
        no time for a second one. ``show(name, state)`` is called with what it waits for.

        Raises:
            ServiceFailed: it cannot be started or reached.
        """
        if self.config.ray.address is not None:
            self._connect(show)
            return
        # should ray.init be interrupted, what it has started must go
        self._owned = "ray"
        try:
            self._connect(show)
        except ServiceFailed as failed:
            if self._port_problem() is not None or seconds_since_start() > _TRY_AGAIN_S:
                raise
            show("Ray", f"starting again: {failed}")
            self._connect(show)

    def _connect(self, show: Callable[..., None]) -> None:
        """Try once; of what fails nothing is left."""
        address = self.config.ray.address
        watch = StartWatch(partial(show, "Ray"))
        try:
            # one machine is every kind of node
            named = [one.node_resource for one in self.config.workers]
            named += [self.config.dispatch.front_resource, self.config.loras.node_resource]
            with watch:
                is_ours = start_ray(self.config.ray, filter(None, named))
            self._owned = "ray" if is_ours else "applications"
            serve.status()
        except RayServeException:
            if self._owned != "ray":
                self._owned = "serve"
        # nothing narrower holds: ray.init raises Exception itself, not a kind of it, when a node or
        # its dashboard starts too slowly (ray/_private/node.py and services.py)
        except Exception as error:
            if address is None:
                ray.shutdown()
                _end(watch.started())
                reason = start_failure(error, self._port_problem())
            else:
                reason = short_reason(str(error))
            raise ServiceFailed(
                f"Ray cannot be started or reached ({address or 'on this machine'}): {reason}; "
                f"'{command()} doctor' tells more"
            ) from error

    def _port_problem(self) -> str | None:
        """Return why one of Ray's own listeners cannot listen, if that is so."""
        found = (port_problem(one) for one in ray_listeners(self.config))
        return next(filter(None, found), None)

    def leave_out(self, pool: str, reason: str, show: Callable[..., None]) -> None:
        """Go on without a pool; ``show(name, state, is_done=)`` is called for it.

        Raises:
            ServiceFailed: no other pool is left.
        """
        self.left_out[pool] = reason
        show(self.config.title(pool), "not served", is_done=True)
        if self._is_deployed:
            # Serve would try again and again
            serve.delete(pool, _blocking=False)
        if all(one.name in self.left_out for one in self.config.pools):
            reasons = [
                why if len(self.left_out) == 1 or name in why else f"{name}: {why}"
                for name, why in self.left_out.items()
            ]
            raise ServiceFailed("; ".join(reasons))

    def deploy(self) -> None:
        """Hand all applications to Serve, without waiting for them."""
        self._is_deployed = True
        served = self._served
        front = front_arguments(self.config) if served is None else served.front(self.config)
        deploy(self.config.without(self.left_out), front)

    def refresh(self) -> None:
        """Read the file again for pools that were added or removed; a refused file is ignored.

        The dispatcher is told which pools have no application: only Serve knows.
        """
        if self.has_run:
            self._report_undeployed()
        if self._served is None:
            return
        with suppress(ConfigError):
            config = self._served.load()
            if config != self.config:
                # as the dispatcher does, which refuses the file otherwise
                check_models(config)
                self.config = config

    def _report_undeployed(self) -> None:
        workers = {one.name for one in self.config.workers}
        absent = tuple(one.name for one in self._seen if one.name in workers and not one.is_known)
        if absent:
            with suppress(*_SILENT, ConnectionError):
                ask_dispatcher("note_undeployed", absent, timeout_s=_ANSWER_S)

    def wait_ready(self, show: Callable[..., None]) -> None:
        """Wait until every application has a first replica, but for pools that cannot have one.

        These are left out. Further replicas may start yet; one that dies meanwhile is Serve's to
        replace.

        ``show(name, state, is_done=)`` is called for each.

        Raises:
            ServiceFailed: the front or all pools cannot run, or it takes too long; the message is
                the model's own where there is one.
        """
        deadline_s = time.monotonic() + _START_S
        waiting, ready = {FRONT}, set[str]()
        while waiting:
            states = self.application_states()
            ready.update(row.name for row in states if row.is_ready)
            for row in states:
                reason = None if row.name in ready else _failure(row)
                if reason is None or row.has_replica:
                    show(row.name, row.words, is_done=row.is_ready)
                elif row.name == FRONT:
                    raise ServiceFailed(f"{FRONT}: {reason}; the logs are in {self.log_folder}")
                else:
                    self.leave_out(row.name, reason, show)
            waiting = {row.name for row in states if _failure(row) is None} - ready
            if waiting and time.monotonic() > deadline_s:
                raise ServiceFailed(f"{sorted(waiting)} did not start within {_START_S:.0f} s")
            time.sleep(_POLL_S if waiting else 0)
        self.has_run = True
        self._report_undeployed()

    def application_states(self) -> list[ApplicationState]:
        """Return the state of each application; ServiceFailed if Ray has died.

        A pool that is left out is not among them, unless it was deployed since.
        """
        try:
            self._seen = application_states(self.config)
        except (RayError, RayServeException, ConnectionError) as error:
            raise ServiceFailed(
                f"Ray does not answer any more ({short_reason(str(error))})"
            ) from error
        return [row for row in self._seen if row.name not in self.left_out or row.has_replica]

    def replica_counts(self) -> Mapping[str, Mapping[str, int]]:
        """Return the running replicas by application and deployment."""
        return {row.name: row.num_running for row in self.application_states()}

    def loaded(self) -> Mapping[str, Registration]:
        """Return what the replicas of each pool have registered as; nothing of a silent cell."""
        try:
            found = ask_dispatcher("registrations", timeout_s=_ANSWER_S)
        except _SILENT:
            return {}
        return {one.pool: one for one in found}

    def close_admission(self) -> None:
        """Have the dispatcher refuse new images; without an answer from it nothing changes."""
        if self._is_deployed:
            with suppress(*_SILENT):
                ask_dispatcher("close_admission", timeout_s=_ANSWER_S)

    def end_attached(self) -> None:
        """Have the dispatcher end the calls that clients wait for, likewise."""
        with suppress(*_SILENT):
            ask_dispatcher("end_attached", timeout_s=_ANSWER_S)

    def num_in_flight(self) -> int | None:
        """Return the images that wait or are being made; None if the dispatcher is silent."""
        try:
            snapshot = ask_dispatcher("snapshot", timeout_s=_ANSWER_S)
        except _SILENT:
            return None
        return int(snapshot.num_waiting + snapshot.num_leased)

    @property
    def address(self) -> str:
        """Of the Ray cluster."""
        return str(ray.get_runtime_context().gcs_address)

    @property
    def dashboard_url(self) -> str | None:
        """Where Ray's dashboard is, if it was started here."""
        settings = self.config.ray
        if self._owned != "ray" or not settings.include_dashboard:
            return None
        return f"http://{settings.dashboard_host}:{settings.dashboard_port}"

    @property
    def log_folder(self) -> str:
        """Folder of the logs of Ray, Serve and the replicas."""
        context = ray.get_runtime_context()
        return str(Path(context.get_temp_dir()) / context.get_session_name() / "logs")

    def close(self, show: Callable[..., None]) -> None:
        """Take the applications down, then the Ray that was started here, and all its processes.

        ``show(name, state, is_done=)`` is called for each thing that stops.
        """

        def on_change(name: str, state: str) -> None:
            show(name, state, is_done=state == "stopped")

        owns_ray = self._owned == "ray"
        processes = psutil.Process().children(recursive=True) if owns_ray else []
        self.refresh()
        try:
            # in a Ray of our own, replicas that never ran have no lease to release
            must_delete = self.has_run or (self._is_deployed and not owns_ray)
            if must_delete and ray.is_initialized():
                stop(self.config, owned=self._owned, on_change=on_change)
        except (*_SILENT, ConnectionError) as error:
            logging.getLogger(__name__).warning(
                "the applications could not be stopped: %s", short_reason(str(error))
            )
        finally:
            if owns_ray:
                on_change("Ray", "stopping")
            ray.shutdown()
            psutil.wait_procs(processes, timeout=_EXIT_S)
            _end(processes)
            if owns_ray:
                on_change("Ray", "stopped")


def _end(processes: Sequence[psutil.Process]) -> None:
    """Kill processes, and wait until they are gone."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=_EXIT_S)


def _failure(row: ApplicationState) -> str | None:
    """Return why an application cannot run; None while it does or may yet."""
    if row.is_ready:
        return None
    # of the model itself: Serve would try again and again
    if (reason := own_error(row.details)) is not None:
        return reason
    return short_reason(row.details) if row.state == "failed" else None
