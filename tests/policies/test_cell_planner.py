"""A cell's planner leaves a cascade as the settings have it, unless the load is too much."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import fmean

from ray_cluster.policies.allocation.problem import BatchOption
from ray_cluster.policies.cascade import DeferralCurve, QualityCurve, capped
from ray_cluster.policies.planning.cell_planner import CellPlanner, cell_planner, drain_s_of
from ray_cluster.policies.planning.cluster_state import (
    ClusterState,
    DeviceState,
    ModelState,
    PoolState,
    ServiceState,
)
from ray_cluster.policies.planning.fleet import (
    CascadeSpec,
    DeviceSpec,
    Fleet,
    PoolSpec,
    ServiceSpec,
)
from ray_cluster.policies.planning.plan import CascadePlan
from ray_cluster.policies.planning.planner import AllocationPlanner

CURVE = QualityCurve((0.0, 0.5, 1.0), (9.0, 5.0, 4.0))


def cascade_of(curve: QualityCurve, heavy_s: float) -> CellPlanner:
    """A planner of one replica of each model, of which the heavy one takes so long for an image."""
    pools = (
        PoolSpec("light", "l", "gpu", (BatchOption(1, 0.1),), max_replicas=1),
        PoolSpec("heavy", "h", "gpu", (BatchOption(1, heavy_s),), max_replicas=1),
    )
    cascade = CascadeSpec("h", curve, DeferralCurve((0.0, 1.0), (0.0, 1.0)))
    fleet = Fleet((DeviceSpec("gpu"),), pools, (ServiceSpec("s", "l", 20.0, cascade),))
    return CellPlanner(AllocationPlanner(fleet))


def state_at(now_s: float, per_s: int) -> ClusterState:
    """That cell, called so often all the time."""
    return ClusterState(
        now_s,
        (DeviceState("gpu", 2),),
        (PoolState("light", 1), PoolState("heavy", 1)),
        (),
        (ServiceState("s", round(per_s * now_s)),),
    )


def planned(curve: QualityCurve, per_s: int) -> CascadePlan:
    """The plan of a cascade that is called so often."""
    planner = cascade_of(curve, 1.0)
    memory = planner.begin(state_at(0.0, per_s))
    for number in range(1, 20):
        plan, memory = planner.plan(state_at(2.0 * number, per_s), memory)
    (found,) = plan.cascades
    return found


def rates(heavy_s: Callable[[int], float]) -> list[float]:
    """The deferral rates of thirty rounds in which the heavy model takes so long."""
    memory, found = cascade_of(CURVE, 1.0).begin(state_at(0.0, 2)), []
    for number in range(1, 31):
        planner = cascade_of(CURVE, heavy_s(number))
        plan, memory = planner.plan(state_at(2.0 * number, 2), memory)
        found.append(plan.cascades[0].deferral_rate)
    return found


def test_a_moment_in_which_images_are_slow_changes_a_plan_little() -> None:
    steady, uneven = rates(lambda _: 1.0), rates(lambda number: 0.6 if number % 2 else 1.4)
    assert max(abs(one - other) for one, other in zip(steady[10:], uneven[10:], strict=True)) < 0.08
    assert abs(fmean(steady[10:]) - fmean(uneven[10:])) < 0.03


def test_a_plan_follows_images_that_stay_slow() -> None:
    found = rates(lambda number: 1.0 if number <= 10 else 2.0)
    assert found[9] > 1.6 * found[-1] > 0
    # after two time constants of what is smoothed, it has nearly got there
    assert found[19] - found[-1] < 0.2 * (found[9] - found[-1])


def test_the_settings_threshold_holds_while_as_much_is_deferred_as_they_allow() -> None:
    found = planned(capped(CURVE, 0.3), per_s=1)
    assert (found.threshold, found.deferral_rate) == (math.inf, 0.3)


def test_a_threshold_is_planned_where_the_load_is_too_much() -> None:
    found = planned(capped(CURVE, 0.3), per_s=6)
    assert 0 < found.deferral_rate < 0.2
    assert 0 < found.threshold < 0.2
    # not so while nothing waits
    assert found.idle_threshold == math.inf


def test_a_threshold_is_planned_where_more_would_make_images_worse() -> None:
    found = planned(QualityCurve((0.0, 0.4, 1.0), (9.0, 5.0, 6.0)), per_s=1)
    assert found.deferral_rate == 0.4
    assert abs(found.threshold - 0.4) < 0.01
    assert found.idle_threshold == found.threshold


def test_a_curve_is_capped_between_its_points() -> None:
    curve = capped(CURVE, 0.25)
    assert curve.deferral_rates == (0.0, 0.25)
    assert curve.scores == (9.0, 7.0)
    assert capped(CURVE, 0.0).best_rate < 0.01
    assert capped(CURVE, 1.0) == CURVE


def counts(num_waiting: int, present: int, num_gpus: int = 4) -> int:
    """Replicas of a model of which nobody asks for more, by its queue."""
    pools = (PoolSpec("m", "m", "gpu", (BatchOption(1, 1.0),), min_replicas=1),)
    fleet = Fleet((DeviceSpec("gpu"),), pools, (ServiceSpec("m", "m", 60.0),))
    planner = CellPlanner(AllocationPlanner(fleet, drain_s=10.0))

    def state(now_s: float) -> ClusterState:
        return ClusterState(
            now_s,
            (DeviceState("gpu", num_gpus),),
            (PoolState("m", present),),
            (ModelState("m", num_waiting),),
            (ServiceState("m", 0),),
        )

    memory = planner.begin(state(0.0))
    for number in range(1, 4):
        plan, memory = planner.plan(state(2.0 * number), memory)
    return plan.pools[0].num_replicas


def test_a_replica_is_stopped_only_where_the_others_would_have_time_to_spare() -> None:
    # a queue of ten takes one replica ten seconds, and two where there is one
    assert [counts(number, present=1) for number in (4, 10, 11)] == [1, 1, 2]
    assert [counts(number, present=2) for number in (4, 7, 8, 10, 11)] == [1, 1, 2, 2, 2]
    # nothing is kept that there are no devices for
    assert counts(8, present=2, num_gpus=1) == 1


def test_a_planner_follows_the_settings_within_bounds() -> None:
    slow, fast = (
        cell_planner(Fleet((), (), ()), (), dwell_s=dwell_s, slo_s=slo_s).models
        for dwell_s, slo_s in ((300.0, 100.0), (0.0, 2.0))
    )
    assert (slow.smoothing.peak_s, slow.window_s, slow.drain_s) == (300.0, 600.0, 25.0)
    # one request in two dwell times
    assert slow.negligible_per_s == 1 / 600
    assert (fast.smoothing.peak_s, fast.window_s, fast.drain_s) == (10.0, 120.0, 10.0)
    assert drain_s_of(1e6) == 60.0


def test_fewest_replicas_that_do_not_fit_are_told() -> None:
    pools = (PoolSpec("big", "m", "gpu", (BatchOption(1, 1.0),), 100, min_replicas=3),)
    fleet = Fleet((DeviceSpec("gpu"),), pools, (ServiceSpec("m", "m", 60.0),))
    planner = CellPlanner(AllocationPlanner(fleet))

    def infeasible(num_gpus: int) -> str | None:
        state = ClusterState(
            2.0,
            (DeviceState("gpu", num_gpus),),
            (PoolState("big", 1),),
            (),
            (ServiceState("m", 0),),
        )
        return planner.plan(state, planner.begin(state))[0].infeasible

    assert infeasible(300) is None
    found = infeasible(275)
    assert found is not None
    assert "min_replicas of big is 3, and 2 fit" in found
    assert "100 of the 275 hundredths of gpu" in found
