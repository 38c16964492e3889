"""The fewest GPUs of a cascade are found, and why there are not fewer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from ray_cluster.policies.planning.cluster_state import ClusterState, PoolState
from ray_cluster.simulator.control.course import Course
from ray_cluster.simulator.control.experiment import ControlRow
from ray_cluster.simulator.sizing import CascadeSizingTask, Search, Tried, size_cascade


def task(**changes: Any) -> CascadeSizingTask:
    return CascadeSizingTask.model_validate({"kind": "cascade", "name": "small", **changes})


def course(num_gpus: int) -> Course:
    """Most requests come in the second bin; the round after it sees one light replica."""
    arrived = {"images": np.array([10.0, 30.0, 20.0])}
    counts = np.array([10.0, 30.0, 20.0])
    states = tuple(
        ClusterState(
            now_s, (), (PoolState("light", light), PoolState("heavy", num_gpus - light)), (), ()
        )
        for now_s, light in ((4.0, 3), (9.0, 2), (10.0, 1), (14.0, 4))
    )
    return Course(5.0, arrived, counts, counts, counts, states)


def sized(
    task: CascadeSizingTask, violations: Callable[[int], float], fid: Callable[[int], float]
) -> Search[Tried]:
    """Size a cascade with something that stands for the simulation."""

    def run(parts: Sequence[Any], _label: str) -> list[ControlRow]:
        num = parts[0].args[0].num_gpus
        figures = {"violations": violations(num), "fid": fid(num)}
        seen = ControlRow("allocation", 0, figures, course=course(num))
        return [seen, ControlRow("allocation", 1, figures)]

    return size_cascade(task, task.tuned(), run)


def test_deadlines_or_quality_bind_and_the_number_below_says_which() -> None:
    late = sized(task(worst_quality=17), lambda n: 0.2 / n, lambda _: 16.9)
    assert (late.found, late.binds) == (10, "deadlines")
    assert 9 in late.tried
    assert late.shown is not None
    assert late.shown.at_peak == {"light": 1, "heavy": 9}
    poor = sized(task(worst_quality=17), lambda n: 0.1 / n, lambda n: 18 - 0.1 * n)
    assert (poor.found, poor.binds) == (10, "quality")
    assert poor.shown is not None
    assert poor.shown.quality.value == pytest.approx(17)
    content = sized(task(), lambda n: 0.1 / n, lambda n: 18 - 0.1 * n)
    assert content.found == 5


def test_throughput_binds_where_the_least_is_enough() -> None:
    found = sized(task(), lambda _: 0.0, lambda _: 16.9)
    # 18/s on average of at best 48.1 ms each, less what may be late, and one for the heavy model
    assert (found.least, found.found, found.binds) == (2, 2, "throughput")
    busy = task(low_per_s=100, high_per_s=200)
    assert busy.least_gpus == 1 + 8
    assert sized(busy, lambda _: 0.0, lambda _: 16.9).found == 9


def test_where_no_number_is_enough_the_most_is_shown() -> None:
    found = sized(task(most_gpus=20), lambda _: 0.5, lambda _: 16.9)
    assert (found.found, found.binds) == (None, "deadlines")
    assert found.shown is found.tried[20]
    few = sized(task(most_gpus=4, low_per_s=100, high_per_s=200), lambda _: 0.0, lambda _: 16.9)
    assert (few.found, few.binds, few.shown) == (None, "throughput", None)


def test_the_number_that_is_looked_for_is_not_given() -> None:
    with pytest.raises(ValidationError, match="num_gpus is what is looked for"):
        task(num_gpus=16)
