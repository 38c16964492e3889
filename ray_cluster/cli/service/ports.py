"""Whether the ports that a service needs are free, and who has them."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from ray_cluster.cli.service.report import base_url, url_of
from ray_cluster.config.loading import ClusterConfig
from ray_cluster.errors import ConfigError

# a raylet's command line has thousands
_SHOWN_CHARS = 200
_ANSWER_S = 10.0
# as the API's own description and Ray's page name themselves
_API_TITLE = "ray-cluster"
_DASHBOARD_TITLE = "<title>Ray Dashboard</title>"
_RAY_METRIC = "\nray_"


@dataclass(frozen=True, slots=True)
class Listener:
    """An address that the service wants to listen on.

    Attributes:
        change: the option and the key that set the port.
    """

    purpose: str
    host: str
    port: int
    change: str


def wanted_listeners(config: ClusterConfig) -> Iterator[Listener]:
    """Yield what a service on this machine listens on; nothing when Ray runs elsewhere."""
    if config.ray.address is not None:
        return
    yield Listener("the API", config.http.host, config.http.port, "--port or http.port")
    yield from ray_listeners(config)


def ray_listeners(config: ClusterConfig) -> Iterator[Listener]:
    """Yield what a Ray that is started here listens on at ports of the configuration."""
    ray = config.ray
    if ray.include_dashboard:
        change = "--dashboard-port or ray.dashboard_port"
        yield Listener("Ray's dashboard", ray.dashboard_host, ray.dashboard_port, change)
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
    cannot = f"{listener.purpose} cannot listen on {listener.host}:{listener.port}"
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
                f"{cannot}: the port is taken by {_holder(listener.port)}; stop that, or choose "
                f"another port with {listener.change}"
            )
        if error.errno == errno.EACCES:
            return (
                f"{cannot}: ports below 1024 need the administrator; choose another with "
                f"{listener.change}"
            )
        return f"{cannot} ({error.strerror}): give an address of this machine, such as 127.0.0.1"
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
    # without the blanks that Ray pads its own with
    text = " ".join(" ".join(process.cmdline()).split())
    if len(text) > _SHOWN_CHARS:
        text = f"{text[: _SHOWN_CHARS - 4]} ..."
    return f"process {process.pid} ({text or process.name()})"


def running_ports(config: ClusterConfig) -> set[int]:
    """Return those of the configuration's ports at which a running ray-cluster answers."""
    api = _get(f"{base_url(config.http)}/openapi.json")
    if api is None or not _is_ours(api):
        return set()
    ports = {config.http.port}
    # a dashboard alone may be another Ray's
    page = _get(f"{url_of(config.ray.dashboard_host, config.ray.dashboard_port)}/")
    if page is not None and _DASHBOARD_TITLE in page.text:
        ports.add(config.ray.dashboard_port)
    metrics_port = config.ray.metrics_port
    if metrics_port is not None:
        page = _get(f"{url_of('127.0.0.1', metrics_port)}/metrics")
        if page is not None and _RAY_METRIC in page.text:
            ports.add(metrics_port)
    return ports


def _is_ours(reply: httpx.Response) -> bool:
    try:
        return bool(reply.json()["info"]["title"] == _API_TITLE)
    except (ValueError, LookupError, TypeError):
        return False


def _get(url: str) -> httpx.Response | None:
    try:
        # not through the proxy that the environment may name
        return httpx.get(url, timeout=_ANSWER_S, trust_env=False)
    except httpx.HTTPError:
        return None
