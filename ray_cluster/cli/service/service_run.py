"""One life of the service: check, start, report, watch, drain, stop."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from functools import partial
from typing import TYPE_CHECKING

import httpx

from ray_cluster.cli.output import command, stderr, stdout, warn
from ray_cluster.cli.progress import StateScreen
from ray_cluster.cli.service.lasting_output import lasting_output
from ray_cluster.cli.service.model_plans import check_gpus
from ray_cluster.cli.service.ports import check_ports
from ray_cluster.cli.service.ray_messages import RayMessages, busy_words
from ray_cluster.cli.service.report import base_url, open_service_warnings, print_report
from ray_cluster.cli.service.served_file import ServedFile
from ray_cluster.cli.service.signals import StopSignals
from ray_cluster.config.loading import ClusterConfig
from ray_cluster.config.sections.pools import PoolConfig
from ray_cluster.deployments.serve.ray_environment import apply_ray_environment
from ray_cluster.engine.controlnets.checks import check_controlnet
from ray_cluster.engine.files.folders import resolve_folder
from ray_cluster.engine.scorers.checks import check_scorer
from ray_cluster.errors import RayClusterError
from ray_cluster.models.local import check_models
from ray_cluster.models.weight_files import check_files

if TYPE_CHECKING:
    from ray_cluster.cli.service.ray_service import RayService

_READY_S = 30.0
# each look takes Serve and this process some 50 ms of CPU time
_WATCH_S = 10.0
# for images that are being made when a signal comes
_DRAIN_S = 10.0
_POLL_S = 0.2
# in which gateways pass on the end of their calls
_ANSWER_S = 1.0


def run_service(config: ClusterConfig, served: ServedFile, *, quiet: bool) -> None:
    """Run the service of a configuration until SIGINT, SIGTERM or SIGHUP.

    Args:
        served: the file that it is from, which is watched for settings.

    Raises:
        RayClusterError: it cannot start, or Ray has died; what it started is gone by then.
    """
    check_models(config)
    check_ports(config)
    for message in open_service_warnings(config):
        warn(message)
    apply_ray_environment(config.ray)
    with (
        lasting_output(),
        StopSignals(with_hangup=True) as signals,
        suppress(KeyboardInterrupt),
        StateScreen(stderr(), quiet=quiet) as screen,
    ):
        screen.show("program", ", ".join(filter(None, ["importing", busy_words()])))
        from ray_cluster.cli.service.ray_service import RayService

        screen.show("program", "imported", is_done=True)
        signals.arm()
        service = RayService(config, served)
        with _closing(service, screen, signals, quiet=quiet):
            _start(service, screen, signals)
            screen.stop()
            for name, reason in service.left_out.items():
                warn(not_served(service.config.title(name), reason))
            if not quiet:
                print_report(
                    stdout(),
                    service.config,
                    service.loaded(),
                    service.replica_counts(),
                    dashboard_url=service.dashboard_url,
                    ray_address=service.address,
                    logs=service.log_folder,
                )
            with redirect_stdout(RayMessages()):
                _watch(service)


@contextmanager
def _closing(
    service: RayService, screen: StateScreen, signals: StopSignals, *, quiet: bool
) -> Iterator[None]:
    stopping = StateScreen(stderr(), quiet=quiet)
    try:
        yield
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


def not_served(worker: str, reason: str) -> str:
    """Say that the service runs without a pool or another worker, why, and what to do."""
    return (
        f"{worker} is NOT SERVED: {reason}. Mend that, then run '{command()} settings apply "
        "FILE' with this configuration"
    )


def _start(service: RayService, screen: StateScreen, signals: StopSignals) -> None:
    config = service.config
    if config.ray.address is None:
        screen.show("models", "checking files")
        for name, check in _checks(config).items():
            try:
                check()
            except RayClusterError as error:
                service.leave_out(name, str(error), screen.show)
        screen.show("models", "files are checked", is_done=True)
    screen.show("Ray", "starting")
    try:
        service.connect(screen.show)
    except SystemExit:
        # Ray's own handler of SIGTERM, which ray.init sets
        raise KeyboardInterrupt from None
    finally:
        signals.arm()
    screen.show("Ray", "running", is_done=True)
    service.deploy()
    service.wait_ready(screen.show)
    screen.show("API", "waiting for an answer")
    # not above: seconds of imports
    from ray_cluster.cell.live_settings import NO_KEY

    if NO_KEY in _wait_ready(config):
        # the report does not know of it: its examples would be refused
        warn(NO_KEY)
    screen.show("API", "ready", is_done=True)


def _checks(config: ClusterConfig) -> dict[str, Callable[[], object]]:
    """Return what checks the files of each pool and other worker, by name.

    All else of a model, such as its memory, is checked and planned by the replicas that load it.
    """
    return {
        **{pool.name: partial(_check_pool, pool) for pool in config.pools},
        **{
            one.name: partial(check_scorer, one.model, calibration=one.calibration)
            for one in config.discriminators
        },
        **{one.name: partial(check_controlnet, one, config) for one in config.controlnets},
    }


def _check_pool(pool: PoolConfig) -> None:
    # before anything is downloaded
    check_gpus(pool)
    check_files(resolve_folder(*pool.files))


def _wait_ready(config: ClusterConfig) -> list[str]:
    """Wait until the example calls of the report will work; return the service's warnings."""
    deadline_s = time.monotonic() + _READY_S
    url = f"{base_url(config.http)}/readyz"
    while time.monotonic() < deadline_s:
        with suppress(httpx.HTTPError):
            reply = httpx.get(url, timeout=5.0)
            if reply.status_code == httpx.codes.OK:
                return list(reply.json()["warnings"])
        time.sleep(0.2)
    warn(f"{url} does not say that it is ready, after {_READY_S:.0f} s of trying")
    return []


def _watch(service: RayService) -> None:
    """Report when an application fails or recovers, until a signal comes."""
    # further replicas may be starting yet
    known: dict[str, str] = {row.name: row.state for row in service.application_states()}
    while True:
        for row in service.application_states():
            # what the file names, but nobody has deployed yet
            is_new = row.name not in known and row.state == "starting"
            if not is_new and known.get(row.name, "running") != row.state:
                verb = "has" if row.state == "failed" else "is"
                text = f"{row.name} {verb} {row.state}: {row.message}".strip(": ")
                if row.state == "failed":
                    warn(text)
                else:
                    stderr().print(text, markup=False)
            if not is_new:
                known[row.name] = row.state
        time.sleep(_WATCH_S)
        service.refresh()


def drain(service: RayService, show: Callable[..., None], *, limit_s: float = _DRAIN_S) -> None:
    """Close admission, and wait until nothing is in flight, at most ``limit_s``.

    ``show(name, state, is_done=)`` is called with what is waited for. A KeyboardInterrupt ends it.
    """
    if service.has_run:
        show("images", "closing admission")
    service.close_admission()
    if not service.has_run:
        return
    try:
        _wait(service, show, limit_s)
    except KeyboardInterrupt:
        show("images", "left as they are: jobs go on later")
        raise


def _wait(service: RayService, show: Callable[..., None], limit_s: float) -> None:
    deadline_s = time.monotonic() + limit_s
    while (num_images := service.num_in_flight()) != 0:
        if time.monotonic() > deadline_s:
            left = f"{_words(num_images)} left after {limit_s:.0f} s"
            show("images", f"{left}: open calls get a 503, jobs go on later")
            service.end_attached()
            time.sleep(_ANSWER_S)
            return
        show(
            "images",
            f"{_words(num_images)} being finished, at most {limit_s:.0f} s; Ctrl-C again leaves",
        )
        time.sleep(_POLL_S)
    show("images", "none in flight", is_done=True)


def _words(num_images: int | None) -> str:
    # silence is no proof that nothing is in flight
    return "an unknown number" if num_images is None else str(num_images)
