"""Experiments with a control loop compare policies on the same requests."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from ray_cluster.models.profiles import load_profile
from ray_cluster.policies.baselines.fixed_cascades import FixedPlanner
from ray_cluster.policies.latency import LatencyRow, OperationKey, SizeCount
from ray_cluster.policies.planner import AllocationPlanner
from ray_cluster.simulator import autoscaling_policies, cascade_policies
from ray_cluster.simulator.autoscaling_experiment import AutoscalingExperiment
from ray_cluster.simulator.batch_tables import image_options, step_options
from ray_cluster.simulator.cascade_experiment import (
    CASCADE_FID,
    SERVICE,
    CascadeExperiment,
    CascadeRow,
    run_cascade,
    two_pools,
)
from ray_cluster.simulator.comparison import Comparison
from ray_cluster.simulator.control_experiment import Settings, policy_named
from ray_cluster.simulator.intervals import Mean
from tests.simulator.control_files import CASCADE, DAY


def cascade(**changes: Any) -> CascadeExperiment:
    return CascadeExperiment.model_validate({**CASCADE, **changes})


SHORT = cascade(duration_s=30.0)
HOUR = AutoscalingExperiment.model_validate(DAY)


def run(
    name: str, experiment: CascadeExperiment, seed: int, settings: Settings | None = None
) -> CascadeRow:
    policy = policy_named(cascade_policies.POLICIES, name)
    chosen = settings or policy.candidates[0]
    return cascade_policies.run_one(experiment, policy, chosen, seed).row


def test_requests_depend_on_the_seed_alone() -> None:
    first, again, other = SHORT.jobs(3), SHORT.jobs(3), SHORT.jobs(4)
    assert [(one.arrival_s, one.confidence) for one in first] == [
        (one.arrival_s, one.confidence) for one in again
    ]
    assert len(first) != len(other) or first[0].arrival_s != other[0].arrival_s


def test_confidences_have_the_published_distribution() -> None:
    found = [job.confidence for seed in range(4) for job in cascade(duration_s=350).jobs(seed)]
    assert np.mean([one < 0.1 for one in found]) == pytest.approx(0.449, abs=0.01)
    assert np.mean([one < 0.3 for one in found]) == pytest.approx(0.788, abs=0.01)


@pytest.mark.parametrize("name", [one.name for one in cascade_policies.POLICIES])
def test_every_policy_runs_and_is_the_same_run_again(name: str) -> None:
    row, again = (run(name, SHORT, 5) for _ in range(2))
    assert row == again
    assert row.num_requests == len(SHORT.jobs(5))
    assert 0 <= row.violations <= 1
    assert 16.79 <= row.fid <= 22.77


def test_all_light_and_all_heavy_are_the_ends_of_the_table() -> None:
    light, heavy = (run(name, SHORT, 5) for name in ("all-light", "all-heavy"))
    assert (light.deferral, light.fid) == (0, CASCADE_FID.score_at(0))
    assert (heavy.deferral, heavy.fid) == (1, CASCADE_FID.score_at(1))
    assert light.violations < 0.01 < heavy.violations


def test_ours_keeps_deadlines_where_the_threshold_alone_does_not() -> None:
    # four times the demand that a cascade has room for
    crowded = cascade(duration_s=60.0, num_gpus=6, low_per_s=20.0, high_per_s=30.0)
    ours, theirs = run("allocation", crowded, 1, (0.6, 0.95)), run("diffserve", crowded, 1)
    assert ours.violations < 0.03
    assert ours.violations < theirs.violations


def test_harder_prompts_than_known_are_calibrated_away() -> None:
    row = run("allocation", cascade(duration_s=150.0, confidence_power=2.0), 2)
    assert row.violations < 0.01
    # the curve alone would defer most images: squares of confidences lie below its thresholds
    assert 0.3 < row.deferral < 0.65


def test_where_nobody_is_answered_quality_is_that_of_the_light_model() -> None:
    nobody = two_pools(0, 0, light_batch=1, heavy_batch=1)
    found = run_cascade(SHORT, "nobody", FixedPlanner(nobody), 1, nobody)
    assert (found.row.violations, found.row.deferral, found.row.fid) == (1, 0, 22.77)
    assert found.course is not None
    assert np.isnan(found.course.heavy_shares).all()
    assert (found.course.missed_shares[found.course.arrived[0][1] > 0] == 1).all()


def test_a_course_holds_every_request_in_the_bin_of_its_arrival() -> None:
    policy = policy_named(cascade_policies.POLICIES, "diffserve")
    slow = cascade(duration_s=60.0, load_s=5.0)
    found = cascade_policies.run_one(slow, policy, policy.candidates[0], 5)
    row, course = found.row, found.course
    assert course is not None
    arrivals_s = [job.arrival_s for job in slow.jobs(5)]
    ((service, arrived),) = course.arrived
    assert service == SERVICE
    assert arrived.tolist() == [
        sum(begin_s <= at_s < begin_s + 5 for at_s in arrivals_s) for begin_s in course.begins_s
    ]
    assert 1 - course.on_time.sum() / arrived.sum() == pytest.approx(row.violations)
    shares = course.heavy_shares[course.answered > 0]
    assert shares.mean() == pytest.approx(row.deferral)
    # a round every 2 s from the beginning on, though loads came before
    assert course.times_s[:3] == [0, 2, 4]
    assert not any(one.confidences for state in course.states for one in state.services)


def test_a_search_prefers_quality_among_settings_that_keep_deadlines() -> None:
    heavy = policy_named(cascade_policies.POLICIES, "all-heavy")
    assert cascade_policies.search(SHORT, heavy, [0]) == (4.0,)
    peak = policy_named(cascade_policies.POLICIES, "static")
    found = cascade_policies.search(SHORT, replace(peak, candidates=((4.0,), (1.2,))), [0])
    assert found == (1.2,)


@pytest.mark.parametrize("policy", autoscaling_policies.POLICIES, ids=lambda one: one.name)
def test_days_with_failures_run_under_every_policy(
    policy: autoscaling_policies.AutoscalingPolicy,
) -> None:
    row = autoscaling_policies.run_one(HOUR, policy, policy.candidates[0], 1).row
    assert 0.8 < row.attainment <= 1
    assert row.worst <= row.attainment
    # 12 GPUs for five minutes at most
    assert 0.15 < row.gpu_hours < 12 * 300 / 3600


def test_a_day_without_failures_never_lacks_a_gpu() -> None:
    def least_working(**changes: Any) -> int:
        day = AutoscalingExperiment.model_validate({**DAY, **changes})
        policy = autoscaling_policies.POLICIES[1]
        course = autoscaling_policies.run_one(day, policy, policy.candidates[0], 1).course
        assert course is not None
        return min(sum(one.num_gpus for one in state.devices) for state in course.states)

    assert least_working(failure_every_s=None) == 12
    assert least_working(failure_every_s=300) < 12


def test_a_search_for_a_day_prefers_few_gpu_hours_where_enough_is_in_time() -> None:
    policy = policy_named(autoscaling_policies.POLICIES, "ongoing-requests")
    calm = AutoscalingExperiment.model_validate(
        {**DAY, "duration_s": 200, "failure_every_s": None, "cv": 0}
    )
    # one request on each replica keeps all deadlines, and so many on one none
    few = replace(policy, candidates=((60.0, 0.0, 0.0), (1.0, 0.0, 600.0)))
    assert autoscaling_policies.search(calm, few, [0]) == (1.0, 0.0, 600.0)


def test_the_batching_gain_changes_batches_but_no_single_image() -> None:
    profile = load_profile("sd15-a100")
    usual, less, more = (image_options(profile, gain) for gain in (1.0, 0.7, 1.3))
    assert usual[0] == less[0] == more[0]
    assert [one.seconds for one in usual][2] == pytest.approx(3.68)
    assert more[2].seconds < usual[2].seconds < less[2].seconds
    seconds = [one.seconds for one in image_options(profile, 3.0)]
    assert seconds == sorted(seconds)


def test_images_are_made_of_a_tables_steps_where_it_has_no_images() -> None:
    profile = load_profile("sdxl-h100")
    options = step_options(profile, steps=50, side_px=1024)
    assert [(one.batch, round(one.seconds, 3)) for one in options][:2] == [(1, 2.88), (2, 3.766)]
    # a step of several sizes makes no batch of one
    key = OperationKey("step").of_sizes([SizeCount(1024, 1024, 2), SizeCount(2048, 2048)])
    mixed = LatencyRow(key, 9.0, "modelled", "made up here")
    with_mixed = replace(profile, rows=(mixed, *profile.rows))
    assert step_options(with_mixed, steps=50, side_px=1024) == options
    with pytest.raises(ValueError, match="given 'sdxl-h100', which has no steps of 640 px"):
        step_options(profile, steps=50, side_px=640)
    with pytest.raises(ValueError, match="has no whole images of one size"):
        image_options(profile)
    with pytest.raises(ValueError, match="each batch once"):
        image_options(load_profile("flux-h100-a"))


@dataclass(frozen=True)
class Value:
    policy: str
    seed: int
    value: float


def test_pairing_removes_what_seeds_have_in_common_and_needs_the_same_seeds() -> None:
    rows = [Value("first", seed, 100.0 * seed + 1) for seed in range(10)]
    rows += [Value("second", seed, 100.0 * seed) for seed in reversed(range(10))]
    found = Comparison(tuple(rows)).differences("value")
    assert found == {"second": Mean(1.0, 0.0, 10)}
    with pytest.raises(ValueError, match="not the same seeds"):
        Comparison(tuple(rows[:-1])).differences("value")


def test_planners_are_values() -> None:
    fleet = SHORT.fleet()
    assert AllocationPlanner(fleet) == AllocationPlanner(fleet)
