"""Whether the ports of a configuration are held by a service of ours that runs already."""

from __future__ import annotations

import httpx

from ray_cluster.cli.report import base_url, url_of
from ray_cluster.config.loading import ClusterConfig

_ANSWER_S = 3.0
# as the API's own description and Ray's page name themselves
_API_TITLE = "ray-cluster"
_DASHBOARD_TITLE = "<title>Ray Dashboard</title>"
_RAY_METRIC = "\nray_"


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
