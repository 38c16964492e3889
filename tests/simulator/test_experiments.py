"""Experiments with a control loop compare policies on the same requests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ray_cluster.models.latency_profiles import load_profile
from ray_cluster.policies.baselines.fixed_cascades import FixedPlanner
from ray_cluster.policies.costs.latency import LatencyRow, OperationKey, SizeCount
from ray_cluster.policies.planning.plan import Plan, PoolPlan
from ray_cluster.policies.planning.planner import AllocationPlanner
from ray_cluster.simulator.cascade.experiment import SERVICE, CascadeExperiment
from ray_cluster.simulator.control.autoscaling import AutoscalingExperiment
from ray_cluster.simulator.control.cluster import options_of
from ray_cluster.simulator.control.course import Course
from ray_cluster.simulator.control.experiment import (
    ControlExperiment,
    ControlRow,
    run_planner,
    run_policy,
)
from tests.simulator.control_files import CASCADE, DAY


def cascade(**changes: Any) -> CascadeExperiment:
    return CascadeExperiment.model_validate({**CASCADE, **changes})


SHORT = cascade(duration_s=12.0)
HOUR = AutoscalingExperiment.model_validate({**DAY, "duration_s": 240})


def run(name: str, experiment: ControlExperiment, seed: int, **settings: float) -> ControlRow:
    chosen = {**experiment.policy(name).defaults, **settings}
    return run_policy(experiment, name, chosen, seed)


def course_of(row: ControlRow) -> Course:
    assert row.course is not None
    return row.course


def test_requests_depend_on_the_seed_alone() -> None:
    first, again, other = SHORT.requests(3), SHORT.requests(3), SHORT.requests(4)
    assert [(one.arrival_s, one.confidence) for one in first] == [
        (one.arrival_s, one.confidence) for one in again
    ]
    assert len(first) != len(other) or first[0].arrival_s != other[0].arrival_s


def test_confidences_have_the_published_distribution() -> None:
    found = [one.confidence for seed in range(4) for one in cascade(duration_s=350).requests(seed)]
    assert np.mean([one < 0.1 for one in found]) == pytest.approx(0.449, abs=0.01)
    assert np.mean([one < 0.3 for one in found]) == pytest.approx(0.788, abs=0.01)


@pytest.mark.parametrize("name", [one.name for one in CascadeExperiment.POLICIES])
def test_every_policy_runs_and_is_the_same_run_again(name: str) -> None:
    figures, again = (run(name, SHORT, 5).figures for _ in range(2))
    assert figures == again
    assert figures["num_requests"] == len(SHORT.requests(5))
    assert 0 <= figures["violations"] <= 1
    assert 16.79 <= figures["fid"] <= 22.77


def test_all_light_and_all_heavy_are_the_ends_of_the_table() -> None:
    light, heavy = (run(name, SHORT, 5).figures for name in ("all-light", "all-heavy"))
    assert (light["deferral"], light["fid"]) == (0, 22.77)
    assert (heavy["deferral"], heavy["fid"]) == (1, 18.55)
    assert light["violations"] < 0.01 < heavy["violations"]


def test_ours_keeps_deadlines_where_the_threshold_alone_does_not() -> None:
    # four times the demand that a cascade can serve
    crowded = cascade(duration_s=40.0, num_gpus=6, low_per_s=20.0, high_per_s=30.0)
    ours, theirs = (
        run(name, crowded, 1).figures["violations"] for name in ("allocation", "diffserve")
    )
    assert ours < 0.03
    assert ours < theirs


@pytest.mark.slow
def test_harder_prompts_than_known_are_calibrated_away() -> None:
    row = run("allocation", cascade(duration_s=90.0, confidence_power=2.0), 2)
    assert row.figures["violations"] < 0.01
    # the curve alone would defer most images: squares of confidences lie below its thresholds
    assert 0.3 < row.figures["deferral"] < 0.7


def test_without_answers_quality_is_that_of_the_light_model() -> None:
    nothing = FixedPlanner(Plan((PoolPlan("light", 0, 1), PoolPlan("heavy", 0, 1))))
    row = run_planner(SHORT, "nothing", nothing, 1)
    figures, course = row.figures, course_of(row)
    assert (figures["violations"], figures["deferral"], figures["fid"]) == (1, 0, 22.77)
    assert np.isnan(course.heavy_shares).all()
    assert (course.missed_shares[course.arrived[SERVICE] > 0] == 1).all()


def test_a_course_holds_every_request_in_the_bin_of_its_arrival() -> None:
    slow = cascade(duration_s=30.0, load_s=5.0)
    row = run("diffserve", slow, 5)
    course = course_of(row)
    arrivals_s = [one.arrival_s for one in slow.requests(5)]
    assert list(course.arrived) == [SERVICE]
    arrived, begins_s = course.arrived[SERVICE], course.by_bin(course.on_time).x
    assert arrived.tolist() == [
        sum(begin_s <= at_s < begin_s + 5 for at_s in arrivals_s) for begin_s in begins_s
    ]
    missed = 1 - course.on_time.sum() / arrived.sum()
    assert missed == pytest.approx(row.figures["violations"])
    shares = course.heavy_shares[course.answered > 0]
    assert shares.mean() == pytest.approx(row.figures["deferral"])
    # a round every 2 s from the beginning on, though loads came before
    assert course.waiting.x[:3] == [0, 2, 4]
    assert not any(one.confidences for state in course.states for one in state.services)


@pytest.mark.parametrize("name", [one.name for one in AutoscalingExperiment.POLICIES])
def test_days_with_failures_run_under_every_policy(name: str) -> None:
    figures = run(name, HOUR, 1).figures
    assert 0.8 < figures["attainment"] <= 1
    assert figures["worst"] <= figures["attainment"]
    # 12 GPUs for five minutes at most
    assert 0.15 < figures["gpu_hours"] < 12 * 300 / 3600


def test_a_day_without_failures_never_lacks_a_gpu() -> None:
    def least_working(**changes: Any) -> int:
        day = AutoscalingExperiment.model_validate({**DAY, **changes})
        states = course_of(run("ongoing-requests", day, 1)).states
        return min(sum(one.num_gpus for one in state.devices) for state in states)

    assert least_working(failure_every_s=None) == 12
    assert least_working(failure_every_s=300) < 12


def test_the_batching_gain_changes_batches_but_no_single_image() -> None:
    profile = load_profile("sd15-a100")
    usual, less, more = (options_of(profile, batching_gain=gain) for gain in (1.0, 0.7, 1.3))
    assert usual[0] == less[0] == more[0]
    assert [one.seconds for one in usual][2] == pytest.approx(3.68)
    assert more[2].seconds < usual[2].seconds < less[2].seconds
    seconds = [one.seconds for one in options_of(profile, batching_gain=3.0)]
    assert seconds == sorted(seconds)


def test_images_are_made_of_a_tables_steps_where_it_has_no_images() -> None:
    profile = load_profile("sdxl-h100")
    options = options_of(profile, 50, 1024)
    assert [(one.batch, round(one.seconds, 3)) for one in options][:2] == [(1, 2.88), (2, 3.766)]
    # a step of several sizes makes no batch of one
    key = OperationKey("step").of_sizes([SizeCount(1024, 1024, 2), SizeCount(2048, 2048)])
    mixed = LatencyRow(key, 9.0, "modelled", "made up here")
    with_mixed = replace(profile, rows=(mixed, *profile.rows))
    assert options_of(with_mixed, 50, 1024) == options
    with pytest.raises(ValueError, match="given 'sdxl-h100', which has no steps of 640 px"):
        options_of(profile, 50, 640)
    with pytest.raises(ValueError, match="has no whole images of one size"):
        options_of(profile)
    with pytest.raises(ValueError, match="each batch once"):
        options_of(load_profile("flux-h100-a"))


def test_planners_are_values() -> None:
    fleet = SHORT.setting().fleet
    assert AllocationPlanner(fleet) == AllocationPlanner(fleet)
