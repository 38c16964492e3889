"""The fewest replicas that are enough, and why fewer are not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_cluster.errors import ConfigError
from ray_cluster.simulator.results import Row
from ray_cluster.simulator.sizing import SizingTask, size_device

TASK: dict[str, Any] = {
    "name": "t",
    "devices": [{"profile": "sdxl-h100"}],
    "sizes": [{"width": 512, "height": 512}],
    "rate_per_s": 8,
    "slo_s": 8,
    "attainment": 0.95,
    "duration_s": 40,
    "num_seeds": 2,
}


def task_of(**changes: Any) -> SizingTask:
    return SizingTask.model_validate({**TASK, **changes})


def really(parts: Sequence[Callable[[], Any]], _label: str) -> list[Any]:
    return [part() for part in parts]


def attained(share: float) -> list[Row]:
    return [Row("deadline", 0, {"attainment": share})]


@given(st.integers(1, 60), st.integers(1, 60), st.integers(0, 2))
def test_the_fewest_that_is_enough_is_found_and_none_below_it_is_missed(
    needed: int, most: int, saved_by_evenness: int
) -> None:
    tried: list[int] = []

    def evaluate(parts: Sequence[Any], _label: str) -> list[Row]:
        (experiment, _, _), enough = parts[0].args, needed
        if experiment.cv == 0:
            enough -= saved_by_evenness
        else:
            tried.append(experiment.replicas)
        return attained(1.0 if experiment.replicas >= enough else 0.5)

    task = task_of(rate_per_s=0.5, most_replicas=most)
    sizing = size_device(task, task.devices[0], evaluate)
    assert sizing.least == 1
    assert sizing.found == (needed if needed <= most else None)
    if needed == 1:
        assert (sizing.binds, sizing.evenly) == ("throughput", 1)
        return
    evenly = max(1, needed - saved_by_evenness)
    assert sizing.evenly == (evenly if evenly <= most else None)
    if needed <= most:
        assert sizing.binds == ("bursts" if needed - evenly >= evenly - 1 else "batches")
    assert len(set(tried)) == len(tried) <= 16


def test_the_simulation_confirms_what_is_found() -> None:
    task = task_of()
    sizing = size_device(task, task.devices[0], really)
    assert sizing.found is not None
    assert sizing.shown is not None
    assert sizing.shown.value >= 0.95
    assert sizing.found >= sizing.least >= 2
    if sizing.found > sizing.least:
        assert dict(sizing.tried)[sizing.found - 1].value < 0.95


def test_a_deadline_shorter_than_an_image_takes_is_met_by_no_number() -> None:
    task = task_of(slo_s=2.0)
    sizing = size_device(task, task.devices[0], really)
    assert (sizing.found, sizing.binds, sizing.least) == (None, "latency", 0)
    # a twentieth of the requests may be late
    rare = [{"width": 256, "height": 256}, {"width": 1024, "height": 1024, "share": 0.04}]
    task = task_of(sizes=rare, slo_s=2.8, rate_per_s=1)
    assert size_device(task, task.devices[0], really).binds != "latency"


def test_more_than_there_may_be_is_said_without_a_simulation() -> None:
    task = task_of(rate_per_s=500, most_replicas=20)

    def never(_parts: Sequence[Any], label: str) -> list[Row]:
        raise AssertionError(label)

    sizing = size_device(task, task.devices[0], never)
    assert (sizing.found, sizing.binds) == (None, "throughput")
    assert sizing.least > 20


def test_a_profile_without_steps_on_one_device_cannot_be_used() -> None:
    task = task_of(devices=[{"profile": "flux-h100-a"}])
    with pytest.raises(ConfigError, match=r"flux-h100-a.*has no steps"):
        size_device(task, task.devices[0], really)


def test_of_a_trace_the_bound_is_its_work_over_the_time_that_there_is(tmp_path: Path) -> None:
    rows = [f"{n * 0.05},m,512,512,50,1" for n in range(400)]
    (tmp_path / "t.csv").write_text("\n".join(["arrival_s,model,width,height,steps,slo_s", *rows]))
    task = SizingTask.model_validate({"name": "t", "devices": TASK["devices"], "trace": "t.csv"})
    tried: list[int] = []

    def evaluate(parts: Sequence[Any], _label: str) -> list[Row]:
        tried.append(parts[0].args[0].replicas)
        return attained(1.0)

    # an image takes 2.4 s alone
    sizing = size_device(task, task.devices[0], evaluate, tmp_path)
    assert (sizing.binds, tried) == ("latency", [])
    patient = task.model_copy(update={"trace": "patient.csv"})
    (tmp_path / "patient.csv").write_text((tmp_path / "t.csv").read_text().replace(",1", ",10"))
    sizing = size_device(patient, task.devices[0], evaluate, tmp_path)
    assert tried == [sizing.least]
    drawn = task_of(rate_per_s=20 * 20 / 30, attainment=0.99, steps=50, slo_s=10)
    same = size_device(drawn, drawn.devices[0], evaluate)
    assert abs(sizing.least - same.least) <= 1
