"""Ray Serve's scale endpoint: starts and stops replicas of applications, and replaces none.

It is the dashboard's, and acts only on applications that were deployed for an external scaler, as
all of this service's workers are. It asks for Ray's token where the cluster has one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.parse import quote
from urllib.request import Request, urlopen

import ray
from ray.exceptions import RayError

from ray_cluster.compat import dashboard_headers
from ray_cluster.config.kinds import WORKER_DEPLOYMENTS
from ray_cluster.control.cell_fleet import HUNDRED
from ray_cluster.errors import RayClusterError

_TIMEOUT_S = 10.0
# what Ray calls the devices of pools
_RESOURCES = {"cpu": "CPU", "cuda": "GPU"}
_WITHOUT = "control.scaling: policy does without the dashboard"


class NotScaled(RayClusterError):
    """Ray Serve refused to scale an application; the message says why."""


@dataclass(frozen=True, slots=True)
class Scaled:
    """The deployment of an application of workers.

    Attributes:
        num_replicas: that Serve is to keep.
        details: what Serve says of it.
    """

    application: str
    name: str
    num_replicas: int
    details: Mapping[str, Any]


def worker_deployments(applications: Mapping[str, Any]) -> list[Scaled]:
    """Return those of workers among the applications that Serve describes."""
    return [
        Scaled(application, name, int(details["target_num_replicas"]), details)
        for application, found in applications.items()
        for name, details in found["deployments"].items()
        if name in WORKER_DEPLOYMENTS
    ]


def cluster_supply() -> Mapping[str, int]:
    """Return the hundredths of each device in the Ray cluster.

    Raises:
        NotScaled: Ray does not answer.
    """
    try:
        total = ray.cluster_resources()
    except RayError as error:
        raise NotScaled(f"Ray does not say what devices it has: {error}") from error
    return {
        device: math.floor(HUNDRED * total.get(name, 0.0)) for device, name in _RESOURCES.items()
    }


class ServeScaler:
    """Scales the workers of a cell.

    Args:
        url: returns where Ray's dashboard is; None while nobody says.
    """

    def __init__(self, url: Callable[[], str | None]) -> None:
        self._url = url
        self._deployments: dict[str, str] = {}

    def targets(self) -> Mapping[str, int]:
        """Return how many replicas Serve is to keep, by application of workers."""
        found = worker_deployments(self._call("/api/serve/applications/")["applications"])
        self._deployments = {one.application: one.name for one in found}
        return {one.application: one.num_replicas for one in found}

    def scale(self, pool: str, num_replicas: int) -> None:
        """Have so many replicas, soon.

        Raises:
            NotScaled: Serve refuses it or has no such application, or the dashboard is silent.
        """
        deployment = self._deployments.get(pool)
        if deployment is None:
            raise NotScaled(f"Ray Serve has no application {pool}: deploy it first")
        path = f"/api/v1/applications/{quote(pool)}/deployments/{deployment}/scale"
        self._call(path, {"target_num_replicas": num_replicas})

    def supply(self) -> Mapping[str, int]:
        """Return the hundredths of each device in the Ray cluster."""
        return cluster_supply()

    def _call(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        url = self._url()
        if url is None:
            raise NotScaled(f"Ray's dashboard is not there, or has not started yet; {_WITHOUT}")
        headers = {"Content-Type": "application/json", **dashboard_headers()}
        data = None if body is None else json.dumps(body).encode()
        # a URL of this cluster, and never a file
        request = Request(f"http://{url}{path}", data, headers)
        try:
            with urlopen(request, timeout=_TIMEOUT_S) as answer:
                return json.loads(answer.read())
        except HTTPError as error:
            reason = error.read().decode(errors="replace")[:300]
            hint = f"; {_WITHOUT}" if error.code in (401, 403) else ""
            raise NotScaled(f"Ray's dashboard answered {error.code}: {reason}{hint}") from error
        except OSError as error:
            raise NotScaled(
                f"Ray's dashboard at {url} does not answer: {error}; {_WITHOUT}"
            ) from error
        except (HTTPException, ValueError) as error:
            raise NotScaled(f"Ray's dashboard answered, but not as it should: {error!r}") from error
