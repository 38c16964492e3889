"""The policy that keeps the planned replicas, and the scaler that writes for it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import RaySystemError
from ray.serve.autoscaling_policy import _apply_autoscaling_config
from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy

from ray_cluster.config.sections.controller import ControlConfig
from ray_cluster.deployments.serve import plan_scaling
from ray_cluster.deployments.serve.deploy_file import PLAN_SCALING, replica_options
from ray_cluster.deployments.serve.plan_scaling import (
    PlannedCount,
    PlanScaling,
    read_planned,
    write_planned,
)
from ray_cluster.deployments.serve.policy_scaler import PolicyScaler
from ray_cluster.deployments.serve.serve_scaler import NotScaled
from tests.fakes import FakeClock

UNPICKLED = """
import sys
from types import SimpleNamespace
sys.modules["ray_cluster"] = None
from ray import cloudpickle
kind = cloudpickle.loads(open("policy", "rb").read())
given = SimpleNamespace(app_name="sd", target_num_replicas=3)
print(kind(lambda _: None, lambda act: act())(given))
"""
BY_POLICY = ControlConfig(enabled=True, scaling="policy")


@dataclass
class Store:
    """What is written, by key, as Ray's client offers it."""

    rows: dict[bytes, bytes] = field(default_factory=dict)
    is_silent: bool = False
    num_reads: int = 0

    def internal_kv_put(
        self, key: bytes, value: bytes, overwrite: bool, namespace: bytes, timeout: float
    ) -> int:
        self._answer(namespace)
        self.rows[key] = value
        return 0

    def internal_kv_get(self, key: bytes, namespace: bytes, timeout: float) -> bytes | None:
        self.num_reads += 1
        self._answer(namespace)
        return self.rows.get(key)

    def _answer(self, namespace: bytes) -> None:
        assert namespace == b"ray_cluster"
        if self.is_silent:
            raise RaySystemError("the GCS is away")


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    found = Store()
    monkeypatch.setattr(plan_scaling, "internal_kv_get_gcs_client", lambda: found)
    return found


def at_once(act: Callable[[], None]) -> None:
    act()


def context(target: int, *, running: int | None = None) -> AutoscalingContext:
    options = replica_options(BY_POLICY, 1)["autoscaling_config"]
    return AutoscalingContext(
        deployment_id=None,
        deployment_name="BaseModel",
        app_name="sd",
        current_num_replicas=target if running is None else running,
        target_num_replicas=target,
        running_replicas=[],
        total_num_requests=0.0,
        total_queued_requests=0.0,
        aggregated_metrics=None,
        raw_metrics=None,
        capacity_adjusted_min_replicas=0,
        capacity_adjusted_max_replicas=10_000,
        policy_state={},
        last_scale_up_time=None,
        last_scale_down_time=None,
        current_time=None,
        config=AutoscalingConfig(**options),
    )


class Deployed:
    """A deployment whose replicas the policy sets, with the delays that Serve applies."""

    def __init__(self, target: int = 1) -> None:
        self.clock = FakeClock()
        self.target = target
        policy = PlanScaling(read_planned, at_once, self.clock)
        self._policy = _apply_autoscaling_config(policy.__call__)

    def after(self, seconds: float, *, num_calls: int = 1) -> int:
        self.clock.advance(seconds)
        for _ in range(num_calls):
            self.target, _ = self._policy(context(self.target))
        return self.target


def test_without_a_plan_the_replicas_stay_as_configured(store: Store) -> None:
    one = Deployed(3)
    assert [one.after(1) for _ in range(3)] == [3, 3, 3]
    write_planned("another", 7)
    assert one.after(1) == 3
    assert set(store.rows) == {b"replicas/another"}


@pytest.mark.usefixtures("store")
def test_a_planned_count_is_kept_and_may_be_none() -> None:
    one = Deployed(1)
    one.after(0)
    write_planned("sd", 4)
    assert one.after(1) == 4
    write_planned("sd", 0)
    # Serve itself stops the last replica one call later
    assert one.after(1, num_calls=2) == 0
    assert one.after(60) == 0
    write_planned("sd", 2)
    assert one.after(1) == 2


@pytest.mark.usefixtures("store")
def test_a_plan_of_an_earlier_deployment_counts_no_more() -> None:
    write_planned("sd", 5)
    one = Deployed(1)
    assert [one.after(1) for _ in range(3)] == [1, 1, 1]
    # the very same count, planned anew
    write_planned("sd", 5)
    assert one.after(1) == 5


def test_a_silent_store_keeps_the_last_plan_and_is_not_asked_all_the_time(store: Store) -> None:
    one = Deployed(1)
    one.after(0)
    write_planned("sd", 2)
    one.after(1)
    store.is_silent = True
    before = store.num_reads
    assert [one.after(0.1) for _ in range(20)] == [2] * 20
    assert store.num_reads == before + 1
    store.is_silent = False
    write_planned("sd", 3)
    assert one.after(10) == 3
    store.rows.clear()
    assert one.after(1) == 3


UNREADABLE = ["", "[]", "3", '{"num_replicas": 3}', '{"num_replicas": "many", "mark": ""}', "\xff"]


@pytest.mark.parametrize("text", UNREADABLE)
def test_what_cannot_be_read_is_no_plan(store: Store, text: str) -> None:
    one = Deployed(2)
    one.after(0)
    store.rows[b"replicas/sd"] = text.encode("latin-1")
    assert [one.after(10) for _ in range(3)] == [2, 2, 2]


def test_serve_never_waits_for_a_reading() -> None:
    started: list[Callable[[], None]] = []
    clock = FakeClock()
    policy = PlanScaling(lambda _: PlannedCount(9, "x"), started.append, clock)
    for _ in range(10):
        assert policy(context(1)) == (1, {})
        clock.advance(60)
    assert len(started) == 1


def test_serve_goes_on_without_threads() -> None:
    def refuse(act: Callable[[], None]) -> None:
        raise RuntimeError("can't start new thread")

    policy = PlanScaling(lambda _: None, refuse, FakeClock())
    assert policy(context(1)) == (1, {})
    assert policy(context(2)) == (2, {})


def test_serves_controller_runs_it_without_this_package(tmp_path: Path) -> None:
    pickled = AutoscalingPolicy(policy_function=PLAN_SCALING).get_serialized_policy_def()
    (tmp_path / "policy").write_bytes(pickled)
    command = [sys.executable, "-c", UNPICKLED]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False
    )
    assert (done.stdout, done.returncode) == ("(3, {})\n", 0), done.stderr


def details(target: int, policy: str | None) -> dict[str, Any]:
    scaling = None if policy is None else {"policy": {"policy_function": policy}}
    config = {"num_replicas": target, "autoscaling_config": scaling}
    return {"target_num_replicas": target, "deployment_config": config}


APPLICATIONS = {
    "front": {"deployments": {"Gateway": details(2, None)}},
    "sd": {"deployments": {"BaseModel": details(3, PLAN_SCALING)}},
    "judge": {"deployments": {"Discriminator": details(1, None)}},
}


def test_the_scaler_reports_what_serve_keeps_and_writes_what_is_planned(store: Store) -> None:
    scaler = PolicyScaler(lambda: APPLICATIONS, write_planned)
    assert scaler.targets() == {"sd": 3, "judge": 1}
    scaler.scale("sd", 4)
    [(key, value)] = store.rows.items()
    assert key == b"replicas/sd"
    assert json.loads(value)["num_replicas"] == 4


def test_what_cannot_be_scaled_is_said(store: Store) -> None:
    scaler = PolicyScaler(lambda: APPLICATIONS, write_planned)
    scaler.targets()
    with pytest.raises(NotScaled, match="no application front: deploy it"):
        scaler.scale("front", 4)
    with pytest.raises(NotScaled, match=r"judge was deployed without .* control\.scaling: policy"):
        scaler.scale("judge", 4)
    store.is_silent = True
    with pytest.raises(NotScaled, match="store does not answer"):
        scaler.scale("sd", 4)
