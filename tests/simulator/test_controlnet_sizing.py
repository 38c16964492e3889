"""``plan size`` of ControlNets: the policy's answer, from a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.machine import ROOT
from ray_cluster.errors import ConfigError
from ray_cluster.simulator.controlnets.sizing import ControlNetSizingTask, plan_controlnets

EXAMPLE = ROOT / "benchmarks" / "policies" / "plans" / "controlnets.yaml"


def example(**changes: Any) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load(EXAMPLE.read_text(encoding="utf-8"))
    return content | changes


def plan(**changes: Any) -> Any:
    return plan_controlnets(example(**changes), Path("task.yaml"))


def test_the_file_says_what_the_policy_needs() -> None:
    problem = ControlNetSizingTask.model_validate(example()).problem()
    assert [one.per_s for one in problem.steps] == [pytest.approx(10), pytest.approx(30)]
    assert problem.per_s("edges") == pytest.approx(40)
    assert problem.memory_bytes == 10 * problem.controlnets[0].memory_bytes == 30 << 30


def test_long_steps_are_allowed_where_no_device_is_to_be_held() -> None:
    found = plan(most_step_s=0.2, num_bases=12)
    assert found.figures["replicas"] == {"edges": 0, "depth": 0}
    assert [row[1] for row in found.table.rows] == ["local", "local"]
    assert found.figures["shortage"] is None


def test_short_ones_take_services() -> None:
    found = plan()
    assert found.figures["shortage"] is None
    assert found.figures["longest_step_s"] <= 0.16
    modes = {row[0]: row[1] for row in found.table.rows}
    assert "service" in modes.values()
    assert found.figures["devices"] == sum(found.figures["replicas"].values())


def test_what_lacks_is_said() -> None:
    assert plan(num_devices=0, free_gib=0).figures["shortage"] == "memory"
    short = plan(num_devices=0)
    assert short.figures["shortage"] == "time"
    assert "more devices" in short.notes[-1]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"requests": [{"controlnets": ["edge"], "per_s": 1, "steps": 5}]}, "'edge'"),
        ({"controlnets": 2 * [{"name": "a", "step_s": 1, "memory_gib": 1}]}, "'a' twice"),
        ({"most_step_s": 0}, "most_step_s"),
        ({"most_steps": 1}, "most_steps"),
    ],
)
def test_errors_name_the_key(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        plan(**changes)
