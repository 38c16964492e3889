"""Experiments run every policy on the same requests, and compare them seed by seed."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ray_cluster.models.latency_profiles import load_profile
from ray_cluster.simulator.groups.experiment import SpCondition, run_unit, units_of
from ray_cluster.simulator.groups.policies import planner_of
from ray_cluster.simulator.groups.workload import draw_count, menus_of, size_mix
from tests.simulator.group_rules import sp_experiment

PROFILE_A, PROFILE_B = load_profile("flux-h100-a"), load_profile("flux-h100-b")
CELL = SpCondition("uniform", 12.0, 1.3)
SMALL = sp_experiment(num_arrivals=50)


def test_menus_are_the_tables_seconds_per_step() -> None:
    menus = menus_of(PROFILE_A, num_gpus=8)
    assert menus["2048"].degrees == (1, 2, 4, 8)
    assert menus["2048"].step_s[-1] == pytest.approx(4.9 / 50)
    assert menus["256"].tail_s == 0
    assert menus_of(PROFILE_B, num_gpus=4)["1024"].degrees == (1, 2, 4)
    assert menus_of(PROFILE_B, num_gpus=8)["2048"].tail_s == 0.25


def test_a_skewed_mix_has_the_published_shares() -> None:
    shares = np.array([one.share for one in size_mix("skewed", PROFILE_A).kinds])
    assert shares / shares.sum() == pytest.approx([0.167, 0.175, 0.211, 0.447], abs=0.001)
    assert {one.share for one in size_mix("uniform", PROFILE_A).kinds} == {1.0}


def test_as_many_requests_come_as_are_asked_for_at_the_rate() -> None:
    mix = size_mix("uniform", PROFILE_A)
    drawn = draw_count(mix, 0.2, 3000, seed=1, cv=1.0)
    assert len(drawn) == 3000
    assert drawn[-1].arrival_s == pytest.approx(3000 / 0.2, rel=0.05)
    assert draw_count(mix, 0.2, 300, seed=1, cv=1.5)[-1].arrival_s != drawn[299].arrival_s


def test_deadlines_scale_and_noise_and_error_keep_to_their_side() -> None:
    plain = SMALL.tasks(CELL, seed=0)
    wider = SMALL.tasks(replace(CELL, scale=1.5), seed=0)
    for one, other in zip(plain, wider, strict=True):
        slo_s = one.deadline_s - one.arrival_s
        assert (other.deadline_s - other.arrival_s) / slo_s == pytest.approx(1.5 / 1.3)
    experiment = sp_experiment(num_arrivals=50, step_noise=0.02, time_error=0.1)
    menus = experiment.menus()
    for one in experiment.tasks(CELL, seed=0):
        assert one.true_step_s == menus[one.menu.slo_class].step_s
        assert one.menu.step_s != one.true_step_s
        assert one.pace[-1] == pytest.approx(one.num_steps, rel=0.02)
        assert one.pace[-1] != one.num_steps


def test_rows_come_for_every_policy_and_seed_and_depend_on_the_seed_alone() -> None:
    policies = ("rounds/most", "widest", "static/8-8-8-8/edf", "bound")
    experiment = sp_experiment(num_arrivals=50, policies=policies)

    def rows() -> list[tuple[str, int, dict[str, float], dict[str, float]]]:
        found = [row for unit in units_of(experiment, Path()) for row in run_unit(unit)]
        return [(one.policy, one.seed, dict(one.figures), dict(one.by_class)) for one in found]

    found = rows()
    assert [one[:2] for one in found] == [(name, seed) for seed in (0, 1) for name in policies]
    assert found == rows()
    assert all(0 < figures["attainment"] <= 1 for _, _, figures, _ in found)
    assert found[0][2]["attainment"] <= found[3][2]["attainment"]
    assert set(found[0][3]) == {"256", "512", "1024", "2048"}


def test_a_policy_of_no_such_name_is_refused() -> None:
    menus = menus_of(PROFILE_A, num_gpus=8)
    wrong = ("mine", "static/8-8/edf", "static/8-8-8-8/lifo", "static/8-8-8-0/edf", "fixed/x")
    for name in (*wrong, "fixed", "fixed/0", "knapsack/1/soon", "knapsack/0/grid"):
        with pytest.raises(ValueError, match="policy"):
            planner_of(name, menus)
