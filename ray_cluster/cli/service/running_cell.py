"""A running service, for commands that reach its dispatcher through Ray."""

from __future__ import annotations

import logging
import shlex
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from ray_cluster.cell.live_settings import SettingsReport
from ray_cluster.cli.service.ray_messages import short_reason
from ray_cluster.compat import ray_addresses
from ray_cluster.deployments.dispatcher_handle import ask_dispatcher
from ray_cluster.deployments.service import add_pools, take_down
from ray_cluster.errors import ConfigError, RayClusterError

_ANSWER_S = 10.0
# of a command that started a Ray
_COMMAND_CHARS = 100


class NoService(RayClusterError):
    """No running service was found, or it does not answer."""


class RunningCell:
    """The service of a Ray cluster that this process is connected to."""

    # deploy the applications of new pools, and take those of removed ones down
    add = staticmethod(add_pools)
    remove = staticmethod(take_down)

    def report(self) -> SettingsReport:
        """Return the settings in force, and the version of each process."""
        report: SettingsReport = _ask("settings_report")
        return report

    def write(self, text: str) -> str:
        """Replace the watched file, and return the version that is in force then.

        Raises:
            ConfigError: it cannot be written, or is no valid configuration.
        """
        return str(_ask("write_settings", text))

    def state_by_application(self) -> dict[str, str]:
        """Return Serve's word for the state of each application that it has."""
        return {name: str(one.status.value) for name, one in _applications().items()}

    def num_replicas(self, application: str, deployment: str) -> int | None:
        """Return how many replicas of a deployment run or start; None without the deployment."""
        found = _applications().get(application)
        if found is None or deployment not in found.deployments:
            return None
        counts = found.deployments[deployment].replica_states
        return int(sum(count for state, count in counts.items() if state != "STOPPING"))

    def resources(self) -> dict[str, tuple[float, float]]:
        """Return what is free and what there is of each of the cluster's resources."""
        free, total = ray.available_resources(), ray.cluster_resources()
        return {name: (free.get(name, 0.0), number) for name, number in total.items()}

    def message_of(self, application: str) -> str:
        """Return what Serve says of an application and of its deployments."""
        found = _applications().get(application)
        if found is None:
            return ""
        messages = [found.message, *(one.message for one in found.deployments.values())]
        return "\n".join(str(one) for one in messages if one)


def _applications() -> dict[str, Any]:
    try:
        return dict(serve.status().applications)
    except (RayError, RayServeException) as error:
        raise NoService(f"Ray Serve does not answer ({short_reason(str(error))})") from error


def _ask(method: str, *args: object) -> Any:
    try:
        return ask_dispatcher(method, *args, timeout_s=_ANSWER_S)
    except (RayError, RayServeException, TimeoutError) as error:
        # Serve raises a type of its own that is also the dispatcher's
        if isinstance(error, ConfigError):
            raise ConfigError(str(error.args[-1] if error.args else error)) from None
        raise NoService(f"the dispatcher does not answer ({short_reason(str(error))})") from error


@contextmanager
def connected(address: str | None) -> Iterator[RunningCell]:
    """Connect to a Ray cluster for as long as the block lasts.

    Args:
        address: of its head; None or "auto" for the one that runs on this machine.

    Raises:
        NoService: there is none, there are several, or it has no service.
    """
    if address == "auto":
        address = None
    if address is not None:
        _check_listens(address)
    else:
        _check_is_one()
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    try:
        ray.init(address=address or "auto", log_to_driver=False, logging_level=logging.ERROR)
    # ray.init raises Exception itself where a cluster cannot be joined
    except Exception as error:
        raise NoService(
            f"no running Ray is reached ({address or 'on this machine'}): "
            f"{short_reason(str(error))}; 'ray-cluster serve' says the address of its own, "
            "--address takes it"
        ) from error
    try:
        yield RunningCell()
    finally:
        ray.shutdown()


def _check_is_one() -> None:
    """Refuse to choose among several Rays: the service of another might be changed."""
    # ray.init would take any of these for "auto"
    addresses = ray_addresses()
    if len(addresses) > 1:
        owners = _starters()
        listed = [f"{one} ({owners[one]})" if one in owners else one for one in addresses]
        raise NoService(
            f"{len(addresses)} Rays run on this machine: {', '.join(listed)}; say with --address "
            "or RAY_ADDRESS which one is meant ('ray-cluster serve' says the address of its own)"
        )


def _starters() -> dict[str, str]:
    """Return the command that started each Ray of this machine, and its folder, by address."""
    found = {}
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or [""]
        if Path(command[0]).name == "raylet":
            with suppress(psutil.Error):
                parent = process.parent()
                if parent is not None and (words := parent.cmdline()):
                    program = words[1:] if Path(words[0]).name.startswith("python") else words
                    text = shlex.join([Path(word).name for word in program])
                    address = _option(command, "--gcs-address")
                    found[address] = f"{text[:_COMMAND_CHARS]!r} in {parent.cwd()}"
    return found


def _option(command: Sequence[str], name: str) -> str:
    return next((word.partition("=")[2] for word in command if word.startswith(f"{name}=")), "")


def _check_listens(address: str) -> None:
    """Refuse an address at which nothing listens: Ray would try it for minutes."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_S).close()
    except (OSError, ValueError, OverflowError) as error:
        raise NoService(
            f"nothing answers at {address} ({error}); give --address as host:port, as 'serve' says "
            "it beside Ray"
        ) from None
