"""One life of the service: check, start, report, watch, stop."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import httpx

from ray_cluster.cli.drain import drain
from ray_cluster.cli.output import stderr, stdout, warn
from ray_cluster.cli.plans import PlannedModel, PlansInBackground
from ray_cluster.cli.ports import check_ports
from ray_cluster.cli.ray_messages import RayMessages
from ray_cluster.cli.report import base_url, open_service_warnings, print_report
from ray_cluster.cli.served_file import ServedFile
from ray_cluster.cli.signals import StopSignals
from ray_cluster.cli.state_screen import StateScreen
from ray_cluster.config.loading import ClusterConfig
from ray_cluster.deployments.ray_environment import apply_ray_environment
from ray_cluster.engine.folders import resolve_folder

if TYPE_CHECKING:
    from ray_cluster.cli.ray_service import RayService

_READY_S = 30.0
_WATCH_S = 2.0


@dataclass(frozen=True, slots=True)
class _Run:
    """What is run, and how much is said of it."""

    config: ClusterConfig
    served: ServedFile
    quiet: bool


def run_service(config: ClusterConfig, served: ServedFile, *, quiet: bool) -> None:
    """Run the service of a configuration until SIGINT or SIGTERM.

    Args:
        served: the file that it is from, which is watched for settings.

    Raises:
        RayClusterError: it cannot start, or Ray has died; what it started is gone by then.
    """
    check_ports(config)
    for message in open_service_warnings(config):
        warn(message)
    apply_ray_environment(config.ray)
    with (
        StopSignals() as signals,
        suppress(KeyboardInterrupt),
        StateScreen(stderr(), quiet=quiet) as screen,
        _closing(_Run(config, served, quiet), screen, signals) as service,
    ):
        planned = _start(service, screen, signals)
        screen.stop()
        if not quiet:
            _report(service, planned)
        with redirect_stdout(RayMessages()):
            _watch(service)


@contextmanager
def _closing(run: _Run, screen: StateScreen, signals: StopSignals) -> Iterator[RayService]:
    screen.show("program", "importing")
    from ray_cluster.cli.ray_service import RayService

    screen.show("program", "imported", is_done=True)
    signals.arm()
    service = RayService(run.config, run.served)
    stopping = StateScreen(stderr(), quiet=run.quiet)
    try:
        yield service
    except KeyboardInterrupt:
        screen.stop()
        stopping.start()
        drain(service, stopping.show)
        raise
    finally:
        # from here on everything is bounded in time
        signals.ignore()
        screen.stop()
        stopping.start()
        service.close(stopping.show)
        stopping.stop()


def _start(
    service: RayService, screen: StateScreen, signals: StopSignals
) -> Sequence[PlannedModel]:
    config = service.config
    pools = config.pools if config.ray.address is None else ()
    screen.show("models", "checking files")
    for pool in pools:
        resolve_folder(pool.model)
    screen.show("models", "planning memory")
    # only here: two threads that import diffusers at once break its lazy modules
    plans = PlansInBackground(pools)
    screen.show("Ray", "starting")
    try:
        service.connect()
    except SystemExit:
        # Ray's own handler of SIGTERM, which ray.init sets
        raise KeyboardInterrupt from None
    finally:
        signals.arm()
    screen.show("Ray", "running", is_done=True)
    planned = plans.result()
    screen.show("models", "can be loaded", is_done=True)
    service.deploy()
    service.wait_running(screen.show)
    screen.show("API", "waiting for an answer")
    _wait_ready(config)
    screen.show("API", "ready", is_done=True)
    return planned


def _wait_ready(config: ClusterConfig) -> None:
    """Wait until the example calls of the report will work."""
    deadline_s = time.monotonic() + _READY_S
    url = f"{base_url(config.http)}/readyz"
    while time.monotonic() < deadline_s:
        with suppress(httpx.HTTPError):
            if httpx.get(url, timeout=5.0).status_code == httpx.codes.OK:
                return
        time.sleep(0.2)
    warn(f"{url} does not say that it is ready, after {_READY_S:.0f} s of trying")


def _report(service: RayService, planned: Sequence[PlannedModel]) -> None:
    print_report(
        stdout(),
        service.config,
        planned,
        service.replica_counts(),
        dashboard_url=service.dashboard_url,
        ray_address=service.address,
        logs=service.log_folder,
    )


def _watch(service: RayService) -> None:
    """Say when an application fails or recovers, until a signal comes."""
    known: dict[str, str] = {}
    while True:
        service.refresh()
        for row in service.application_states():
            if known.get(row.name, "running") != row.state:
                warn(f"{row.name} is {row.state}: {row.message}".strip(": "))
            known[row.name] = row.state
        time.sleep(_WATCH_S)
