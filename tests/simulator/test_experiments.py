"""Experiments compare policies on the same requests, and figures come with intervals."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest

from ray_cluster.policies.planner import AllocationPlanner
from ray_cluster.profiles.files import load_profile
from ray_cluster.simulator import autoscaling_policies, cascade_policies
from ray_cluster.simulator.autoscaling_experiment import AutoscalingExperiment, Workload
from ray_cluster.simulator.cascade_experiment import CASCADE_FID, CascadeExperiment, batch_options
from ray_cluster.simulator.comparison import Comparison
from ray_cluster.simulator.intervals import Mean

SHORT = CascadeExperiment(duration_s=60.0)
HOUR = AutoscalingExperiment(
    sd15=Workload("sd15", 1.0, 4.0, 10.0, 8, 3),
    sdxl=Workload("sdxl", 0.3, 1.0, 15.0, 4, 2),
    duration_s=600.0,
)


def test_requests_depend_on_the_seed_alone() -> None:
    first, again, other = SHORT.jobs(3), SHORT.jobs(3), SHORT.jobs(4)
    assert [(one.arrival_s, one.confidence) for one in first] == [
        (one.arrival_s, one.confidence) for one in again
    ]
    assert len(first) != len(other) or first[0].arrival_s != other[0].arrival_s


def test_confidences_have_the_published_distribution() -> None:
    found = [job.confidence for seed in range(4) for job in CascadeExperiment().jobs(seed)]
    assert np.mean([one < 0.1 for one in found]) == pytest.approx(0.449, abs=0.01)
    assert np.mean([one < 0.3 for one in found]) == pytest.approx(0.788, abs=0.01)


@pytest.mark.parametrize("policy", [cascade_policies.OURS, *cascade_policies.BASELINES])
def test_every_policy_runs_and_is_the_same_run_again(
    policy: cascade_policies.CascadePolicy,
) -> None:
    rows = [cascade_policies.run_policy(SHORT, policy, policy.candidates[0], [5]) for _ in range(2)]
    assert rows[0] == rows[1]
    (row,) = rows[0]
    assert row.num_requests == len(SHORT.jobs(5))
    assert 0 <= row.violations <= 1
    assert 16.79 <= row.fid <= 22.77


def test_all_light_and_all_heavy_are_the_ends_of_the_table() -> None:
    light, heavy = (
        cascade_policies.run_policy(SHORT, policy, policy.candidates[0], [5])[0]
        for policy in cascade_policies.BASELINES[:2]
    )
    assert (light.deferral, light.fid) == (0, CASCADE_FID.score_at(0))
    assert (heavy.deferral, heavy.fid) == (1, CASCADE_FID.score_at(1))
    assert light.violations < 0.01 < heavy.violations


def test_ours_keeps_deadlines_where_the_threshold_alone_does_not() -> None:
    # four times the demand that a cascade has room for
    crowded = replace(SHORT, num_gpus=6, low_per_s=20.0, high_per_s=30.0)
    ours = cascade_policies.run_policy(crowded, cascade_policies.OURS, (0.6, 0.95), [1])[0]
    other = next(one for one in cascade_policies.BASELINES if "DiffServe" in one.name)
    theirs = cascade_policies.run_policy(crowded, other, other.candidates[0], [1])[0]
    assert ours.violations < 0.03
    assert ours.violations < theirs.violations


def test_harder_prompts_than_known_are_calibrated_away() -> None:
    harder = replace(CascadeExperiment(duration_s=150.0), confidence_power=2.0)
    ours = cascade_policies.OURS
    row = cascade_policies.run_policy(harder, ours, ours.candidates[0], [2])[0]
    assert row.violations < 0.01
    # the curve alone would defer most images: squares of confidences lie below its thresholds
    assert 0.3 < row.deferral < 0.65


def test_a_search_prefers_quality_among_settings_that_keep_deadlines() -> None:
    heavy = cascade_policies.BASELINES[1]
    assert cascade_policies.search(SHORT, heavy, [0]) == (4.0,)
    peak = next(one for one in cascade_policies.BASELINES if "peak" in one.name)
    found = cascade_policies.search(SHORT, replace(peak, candidates=((4.0,), (1.2,))), [0])
    assert found == (1.2,)


@pytest.mark.parametrize(
    "policy",
    [
        autoscaling_policies.OURS,
        autoscaling_policies.ONGOING_REQUESTS,
        autoscaling_policies.CLAIRVOYANT,
    ],
)
def test_days_with_failures_run_under_every_policy(
    policy: autoscaling_policies.AutoscalingPolicy,
) -> None:
    (row,) = autoscaling_policies.run_policy(HOUR, policy, policy.candidates[0], [1])
    assert 0.8 < row.attainment <= 1
    assert row.worst <= row.attainment
    # 12 GPUs for eleven minutes at most
    assert 0.3 < row.gpu_hours < 12 * 660 / 3600


def test_the_batching_gain_changes_batches_but_no_single_image() -> None:
    profile = load_profile("sd15-a100")
    usual, less, more = (batch_options(profile, gain) for gain in (1.0, 0.7, 1.3))
    assert usual[0] == less[0] == more[0]
    assert [one.seconds for one in usual][2] == pytest.approx(3.68)
    assert more[2].seconds < usual[2].seconds < less[2].seconds
    seconds = [one.seconds for one in batch_options(profile, 3.0)]
    assert seconds == sorted(seconds)


@dataclass(frozen=True)
class Figure:
    policy: str
    seed: int
    value: float


def test_pairing_removes_what_seeds_have_in_common_and_needs_the_same_seeds() -> None:
    rows = [Figure("ours", seed, 100.0 * seed + 1) for seed in range(10)]
    rows += [Figure("theirs", seed, 100.0 * seed) for seed in reversed(range(10))]
    found = Comparison(tuple(rows)).differences("value")
    assert found == {"theirs": Mean(1.0, 0.0, 10)}
    with pytest.raises(ValueError, match="not the same seeds"):
        Comparison(tuple(rows[:-1])).differences("value")


def test_a_comparison_has_a_row_per_policy_and_seed_and_differences_to_ours() -> None:
    settings = (("all light", (4.0,)),)
    found = cascade_policies.compare(SHORT, (1, 2), settings)
    assert found.policies == ("ours", "all light")
    assert [row.seed for row in found.rows] == [1, 2, 1, 2]
    gained = found.differences("fid")["all light"]
    estimates = found.estimates("fid")
    assert gained.value == pytest.approx(estimates["ours"].value - 22.77)
    assert gained.value < -5


def test_a_comparison_of_days_holds_every_policy() -> None:
    quarter = replace(HOUR, duration_s=200.0)
    found = autoscaling_policies.compare(quarter, (1,))
    assert len(found.policies) == len(found.rows) == 3


def test_planners_are_values() -> None:
    fleet = SHORT.fleet()
    assert AllocationPlanner(fleet) == AllocationPlanner(fleet)
