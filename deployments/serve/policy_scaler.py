"""Scales workers through their autoscaling policy: it reads what is planned, see `plan_scaling`.

It asks Serve's controller itself what is in force, as the dashboard does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import ray
from ray.exceptions import RayError

from ray_cluster.compat import serve_controller
from ray_cluster.deployments.serve.deploy_file import PLAN_SCALING
from ray_cluster.deployments.serve.serve_scaler import NotScaled, cluster_supply, worker_deployments

_TIMEOUT_S = 10.0


class PolicyScaler:
    """Scales the workers of a cell.

    Args:
        applications: returns what Serve says of them, by name.
        write: hands a count to the policy of an application.
    """

    def __init__(
        self,
        applications: Callable[[], Mapping[str, Any]],
        write: Callable[[str, int], None],
    ) -> None:
        self._applications = applications
        self._write = write
        self._has_policy: dict[str, bool] = {}

    def targets(self) -> Mapping[str, int]:
        """Return how many replicas Serve is to keep, by application of workers."""
        found = worker_deployments(self._applications())
        self._has_policy = {one.application: _has_policy(one.details) for one in found}
        return {one.application: one.num_replicas for one in found}

    def scale(self, pool: str, num_replicas: int) -> None:
        """Have so many replicas, soon: the policy reads it within a second.

        Raises:
            NotScaled: there is no such application, it has no policy, or the store is silent.
        """
        if pool not in self._has_policy:
            raise NotScaled(f"Ray Serve has no application {pool}: deploy it first")
        if not self._has_policy[pool]:
            raise NotScaled(
                f"the application {pool} was deployed without the policy that reads the plan: "
                "deploy it again with control.enabled: true and control.scaling: policy"
            )
        try:
            self._write(pool, num_replicas)
        except RayError as error:
            raise NotScaled(f"Ray's key-value store does not answer: {error}") from error

    def supply(self) -> Mapping[str, int]:
        """Return the hundredths of each device in the Ray cluster."""
        return cluster_supply()


def _has_policy(details: Mapping[str, Any]) -> bool:
    scaling = details["deployment_config"].get("autoscaling_config") or {}
    return bool(scaling.get("policy", {}).get("policy_function") == PLAN_SCALING)


def serve_applications() -> Mapping[str, Any]:
    """Return the details of all applications, from Serve's controller.

    Raises:
        NotScaled: it does not answer.
    """
    try:
        call: Any = serve_controller().get_serve_instance_details.remote()
        details: Mapping[str, Any] = ray.get(call, timeout=_TIMEOUT_S)
    # Ray raises ValueError for an actor that is not there
    except (RayError, ValueError) as error:
        raise NotScaled(f"Ray Serve's controller does not answer: {error}") from error
    applications: Mapping[str, Any] = details["applications"]
    return applications
