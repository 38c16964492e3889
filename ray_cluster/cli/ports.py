"""Whether the ports that a service needs are free, and who has them."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from ray_cluster.config.loading import ClusterConfig
from ray_cluster.errors import ConfigError

# a raylet's command line has thousands
_SHOWN_CHARS = 200


@dataclass(frozen=True, slots=True)
class Listener:
    """An address that the service wants to listen on.

    Attributes:
        purpose: what it is for.
        key: where the configuration sets the port.
        option: the option of ``serve`` that sets it, if there is one.
    """

    purpose: str
    host: str
    port: int
    key: str
    option: str | None = None

    @property
    def change(self) -> str:
        """What to change for another port."""
        return f"{self.option} or {self.key}" if self.option else self.key


def wanted_listeners(config: ClusterConfig) -> Iterator[Listener]:
    """Yield what a service on this machine listens on; nothing when Ray runs elsewhere."""
    if config.ray.address is not None:
        return
    http, ray = config.http, config.ray
    yield Listener("the API", http.host, http.port, "http.port", "--port")
    if ray.include_dashboard:
        yield Listener(
            "Ray's dashboard",
            ray.dashboard_host,
            ray.dashboard_port,
            "ray.dashboard_port",
            "--dashboard-port",
        )
    if ray.metrics_port is not None:
        # Ray binds it on every address of the machine
        yield Listener("Ray's metrics", "0.0.0.0", ray.metrics_port, "ray.metrics_port")


def check_ports(config: ClusterConfig) -> None:
    """Raise :class:`ConfigError` for the first port that the service cannot listen on."""
    seen: dict[int, str] = {}
    for listener in wanted_listeners(config):
        if listener.port in seen:
            raise ConfigError(
                f"{listener.purpose} and {seen[listener.port]} cannot both have port "
                f"{listener.port}; choose another with {listener.change}"
            )
        seen[listener.port] = listener.purpose
        problem = port_problem(listener)
        if problem is not None:
            raise ConfigError(problem)


def port_problem(listener: Listener) -> str | None:
    """Return why nothing can listen there, with what to change; None if it can."""
    where = f"{listener.host}:{listener.port}"
    change = listener.change
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            listener.host, listener.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            # a bound socket that nobody listens on yet is taken all the same
            probe.listen(1)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return (
                f"{listener.purpose} cannot listen on {where}: the port is taken by "
                f"{_holder(listener.port)}; stop that, or choose another port with {change}"
            )
        if error.errno == errno.EACCES:
            return (
                f"{listener.purpose} cannot listen on {where}: ports below 1024 need the "
                f"administrator; choose another with {change}"
            )
        return (
            f"{listener.purpose} cannot listen on {where} ({error.strerror}): "
            "give an address of this machine, such as 127.0.0.1"
        )
    return None


def _holder(port: int) -> str:
    """Name the process that listens on a port, as far as this user may see it."""
    try:
        connections = psutil.net_connections("tcp")
        for connection in connections:
            if connection.status != psutil.CONN_LISTEN or not connection.laddr:
                continue
            if connection.laddr.port == port and connection.pid is not None:
                return _named(psutil.Process(connection.pid))
    except psutil.Error:
        return "a process that this user may not see"
    return "another process"


def _named(process: psutil.Process) -> str:
    """Name a process; one of a running service as that service, which is what can be stopped."""
    for one in (process, *process.parents()):
        if any(Path(word).name == "ray-cluster" for word in one.cmdline()[:2]):
            return f"a running ray-cluster (process {one.pid})"
    return f"process {process.pid} ({_shown(process.cmdline()) or process.name()})"


def _shown(command: Sequence[str]) -> str:
    """Return a command line without the blanks that Ray pads its own with, or its beginning."""
    text = " ".join(" ".join(command).split())
    return text if len(text) <= _SHOWN_CHARS else f"{text[: _SHOWN_CHARS - 4]} ..."
