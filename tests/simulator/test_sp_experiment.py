"""Experiments run every policy on the same requests, and compare them seed by seed."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ray_cluster.models.profiles import load_profile
from ray_cluster.simulator.choice_files import save_choices
from ray_cluster.simulator.sp_compare import class_attainment, mean_attainment, paired_gain
from ray_cluster.simulator.sp_experiment import (
    Choices,
    SpCondition,
    SpExperiment,
    SpRow,
    run_unit,
    units_of,
    workload_of,
)
from ray_cluster.simulator.sp_policies import knapsack_names, planner_of, static_names
from ray_cluster.simulator.sp_tuning import (
    BEST_STATIC,
    candidates_of,
    choose,
    load_choices,
)
from ray_cluster.simulator.sp_workload import FLUX_CLASSES, draw_count, menus_of, size_mix

PROFILE_A, PROFILE_B = load_profile("flux-h100-a"), load_profile("flux-h100-b")
CELL = SpCondition("uniform", 12.0, 1.3)
SMALL = SpExperiment(
    mixes=("uniform",), rates_per_min=(12.0,), scales=(1.3,), seeds=(0, 1), num_arrivals=50
)


def rows_of(experiment: SpExperiment, choices: Choices) -> list[SpRow]:
    return [row for unit in units_of(experiment, choices) for row in run_unit(unit)]


def test_menus_are_the_tables_seconds_per_step() -> None:
    menus = menus_of(PROFILE_A, FLUX_CLASSES, num_gpus=8)
    assert menus["2048"].degrees == (1, 2, 4, 8)
    assert menus["2048"].step_s[-1] == pytest.approx(4.9 / 50)
    assert menus["256"].tail_s == 0
    assert menus_of(PROFILE_B, FLUX_CLASSES, num_gpus=4)["1024"].degrees == (1, 2, 4)
    assert menus_of(PROFILE_B, FLUX_CLASSES, num_gpus=8)["2048"].tail_s == 0.25


def test_a_skewed_mix_has_the_published_shares() -> None:
    shares = np.array([one.share for one in size_mix("skewed", PROFILE_A, FLUX_CLASSES).kinds])
    assert shares / shares.sum() == pytest.approx([0.167, 0.175, 0.211, 0.447], abs=0.001)
    assert {one.share for one in size_mix("uniform", PROFILE_A, FLUX_CLASSES).kinds} == {1.0}


def test_as_many_requests_come_as_are_asked_for_at_the_rate() -> None:
    mix = size_mix("uniform", PROFILE_A, FLUX_CLASSES)
    drawn = draw_count(mix, 0.2, 3000, seed=1, cv=1.0)
    assert len(drawn) == 3000
    assert drawn[-1].arrival_s == pytest.approx(3000 / 0.2, rel=0.05)
    assert draw_count(mix, 0.2, 300, seed=1, cv=1.5)[-1].arrival_s != drawn[299].arrival_s


def test_deadlines_scale_and_noise_and_error_keep_to_their_side() -> None:
    _, plain = workload_of(SMALL, CELL, seed=0)
    _, wider = workload_of(SMALL, replace(CELL, scale=1.5), seed=0)
    for one, other in zip(plain, wider, strict=True):
        slo_s = one.deadline_s - one.arrival_s
        assert (other.deadline_s - other.arrival_s) / slo_s == pytest.approx(1.5 / 1.3)
    menus, noisy = workload_of(replace(SMALL, step_noise=0.02, time_error=0.1), CELL, seed=0)
    for one in noisy:
        assert one.true_step_s == menus[one.menu.slo_class].step_s
        assert one.menu.step_s != one.true_step_s
        assert one.pace[-1] == pytest.approx(one.num_steps, rel=0.02)
        assert one.pace[-1] != one.num_steps


def test_rows_come_for_every_policy_cell_and_seed_and_depend_on_the_seed_alone() -> None:
    experiment = replace(SMALL, policies=("rounds/most", "widest", "mine", "bound"))
    rows = rows_of(experiment, {("mine", CELL): "static/8-8-8-8/edf"})
    assert [(one.policy, one.seed) for one in rows] == [
        (policy, seed) for seed in (0, 1) for policy in experiment.policies
    ]
    assert rows == rows_of(experiment, {("mine", CELL): "static/8-8-8-8/edf"})
    assert all(0 < one.attainment <= 1 for one in rows)
    assert rows[0].attainment <= rows[3].attainment
    assert {name for name, _ in rows[0].attainment_by_class} == {"256", "512", "1024", "2048"}


def test_a_policy_that_is_not_chosen_and_has_no_such_name_is_refused() -> None:
    with pytest.raises(ValueError, match="there is no policy 'mine'"):
        rows_of(replace(SMALL, policies=("mine",)), {})
    menus = menus_of(PROFILE_A, FLUX_CLASSES, num_gpus=8)
    wrong = ("static/8-8/edf", "static/8-8-8-8/lifo", "static/8-8-8-0/edf", "fixed/x", "fixed")
    for name in (*wrong, "fixed/0", "knapsack/1/soon", "knapsack/0/grid"):
        with pytest.raises(ValueError, match="policy"):
            planner_of(name, menus)


def test_differences_are_paired_and_seeds_that_lack_a_cell_are_left_out() -> None:
    other = replace(CELL, scale=1.5)
    levels = {0: 0.5, 1: 0.7, 2: 0.9}
    rows = [SpRow("b", CELL, seed, level) for seed, level in levels.items()]
    rows += [
        SpRow("a", CELL, seed, level + 0.02 + seed % 2 / 100) for seed, level in levels.items()
    ]
    rows += [SpRow("a", other, 0, 1.0)]
    gain = paired_gain(rows, "a", "b", [CELL])
    assert gain.value == pytest.approx(0.07 / 3)
    # Student's t for three values: 4.30 standard errors
    assert gain.half_width == pytest.approx(0.04303 / 3, abs=1e-5)
    assert mean_attainment(rows, "a", [CELL, other]).num == 1
    assert mean_attainment(rows, "a", [CELL, other]).value == pytest.approx(0.76)


def test_a_class_counts_in_the_seeds_in_which_it_came() -> None:
    rows = [
        SpRow("a", CELL, 0, 0.5, (("256", 1.0), ("2048", 0.0))),
        SpRow("a", CELL, 1, 0.5, (("256", 0.5),)),
        SpRow("b", CELL, 1, 0.5, (("256", 0.0),)),
    ]
    means = class_attainment(rows, "a", CELL)
    assert (means["256"].value, means["256"].num) == (0.75, 2)
    assert (means["2048"].value, means["2048"].num) == (0.0, 1)


def test_candidates_are_the_degrees_in_time_and_one_less() -> None:
    experiment = replace(SMALL, num_arrivals=40)
    names = candidates_of(experiment, replace(CELL, scale=1.0), BEST_STATIC)
    assert len(names) == 96 * 3
    assert "static/1-1-2-4/fcfs" in names
    assert "static/1-1-1-8/edf" not in names
    menus = menus_of(PROFILE_A, FLUX_CLASSES, num_gpus=8)
    assert all(planner_of(name, menus) for name in [*names, *knapsack_names()])
    assert len(static_names(menus, dict.fromkeys(menus, 100.0))) == 256 * 3


def test_choices_are_found_again_in_their_file(tmp_path: Path) -> None:
    experiment = replace(SMALL, seeds=(0,), num_arrivals=10)
    chosen = choose(experiment, CELL, "best_fixed")
    assert chosen.num_tried == 4
    save_choices(tmp_path / "choices.json", [chosen])
    assert load_choices(tmp_path / "choices.json", "flux-h100-a") == {
        ("best_fixed", CELL): chosen.policy
    }
    assert load_choices(tmp_path / "choices.json", "flux-h100-b") == {}
    (row,) = rows_of(replace(experiment, policies=(chosen.policy,)), {})
    assert chosen.attainment == pytest.approx(100 * row.attainment)
