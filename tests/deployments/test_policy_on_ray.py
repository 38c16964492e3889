"""The autoscaling policy in Serve itself, on a Ray without a dashboard."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import ray
from ray import serve
from ray.serve.config import ProxyLocation

from ray_cluster.config.sections.controller import ControlConfig
from ray_cluster.deployments.serve.deploy_file import replica_options
from ray_cluster.deployments.serve.plan_scaling import write_planned
from ray_cluster.deployments.serve.policy_scaler import PolicyScaler, serve_applications

PATIENCE_S = 60.0


class Idle:
    """A worker that does nothing."""


@pytest.fixture
def scaler() -> Iterator[PolicyScaler]:
    ray.init(
        address="local",
        num_cpus=2,
        object_store_memory=100 << 20,
        include_dashboard=False,
        log_to_driver=False,
    )
    try:
        serve.start(proxy_location=ProxyLocation.Disabled)
        yield PolicyScaler(serve_applications, write_planned)
        serve.shutdown()
    finally:
        ray.shutdown()


def deploy(num_replicas: int) -> None:
    options = replica_options(ControlConfig(enabled=True, scaling="policy"), num_replicas)
    actor = {"num_cpus": 0}
    worker = serve.deployment(name="BaseModel", ray_actor_options=actor, **options)(Idle)
    serve.run(worker.bind(), name="sd", route_prefix=None)


def wait_for(scaler: PolicyScaler, num_replicas: int) -> None:
    """Wait until Serve keeps so many replicas, and until they run."""
    end_s, running = time.monotonic() + PATIENCE_S, -1
    while (scaler.targets()["sd"], running) != (num_replicas, num_replicas):
        assert time.monotonic() < end_s, str(serve.status())
        time.sleep(0.1)
        states = serve.status().applications["sd"].deployments["BaseModel"].replica_states
        running = states.get("RUNNING", 0)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_serve_keeps_the_planned_replicas(scaler: PolicyScaler) -> None:
    # of a service that ran earlier
    write_planned("sd", 7)
    deploy(1)
    wait_for(scaler, 1)
    for num_replicas in (3, 0, 2):
        scaler.scale("sd", num_replicas)
        wait_for(scaler, num_replicas)
    # a deployment brings its own number, until the next round plans
    deploy(1)
    wait_for(scaler, 1)
    scaler.scale("sd", 2)
    wait_for(scaler, 2)
    assert scaler.supply()["cpu"] == 200
