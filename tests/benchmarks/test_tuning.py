"""Tuning chooses the best settings, and keeps what it does not search."""

from __future__ import annotations

from pathlib import Path

from benchmarks.policies.tune import (
    FOLDER,
    GRIDS,
    candidates_of,
    choose,
    family_names,
    group_searches,
    merged,
    rank,
    save_choices,
)
from ray_cluster.simulator.cascade.experiment import CascadeExperiment
from ray_cluster.simulator.control.autoscaling import AutoscalingExperiment
from ray_cluster.simulator.control.experiment import ControlExperiment, TunedSettings
from ray_cluster.simulator.experiment import load_choices
from ray_cluster.simulator.groups.experiment import SpCondition, TunedPolicy
from ray_cluster.simulator.groups.policies import planner_of
from tests.simulator.control_files import CASCADE, DAY
from tests.simulator.group_rules import sp_experiment

CELL = SpCondition("uniform", 12.0, 1.3)


def best(
    experiment: ControlExperiment, policy: str, *settings: dict[str, float]
) -> dict[str, float]:
    return min(settings, key=lambda one: rank(experiment, policy, [0], one))


def test_a_search_prefers_quality_among_settings_that_keep_deadlines() -> None:
    short = CascadeExperiment.model_validate({**CASCADE, "duration_s": 30})
    heavy = candidates_of(GRIDS["cascade/all-heavy"])
    assert best(short, "all-heavy", *heavy) == {"max_batch": 4.0}
    peaks = ({"peak_factor": 4.0}, {"peak_factor": 1.2})
    assert best(short, "static", *peaks) == {"peak_factor": 1.2}


def test_a_search_for_a_day_prefers_few_gpu_hours_where_enough_is_in_time() -> None:
    changes = {"duration_s": 200, "failure_every_s": None, "cv": 0}
    calm = AutoscalingExperiment.model_validate({**DAY, **changes})
    names = tuple(GRIDS["autoscaling/ongoing-requests"])
    # one request on each replica keeps all deadlines, and so many on one none
    many, few = (
        dict(zip(names, values, strict=True)) for values in ((60.0, 0.0, 0.0), (1.0, 0.0, 600.0))
    )
    assert best(calm, "ongoing-requests", many, few) == few


def test_defaults_are_the_first_candidates() -> None:
    kinds: tuple[type[ControlExperiment], ...] = (CascadeExperiment, AutoscalingExperiment)
    policies = {
        f"{name}/{one.name}": one
        for name, kind in zip(("cascade", "autoscaling"), kinds, strict=True)
        for one in kind.POLICIES
    }
    assert policies.keys() == GRIDS.keys()
    for name, policy in policies.items():
        assert candidates_of(GRIDS[name])[0] == dict(policy.defaults)


def test_what_is_published_could_be_chosen() -> None:
    for one in load_choices(FOLDER / "control_choices.json", TunedSettings, command=""):
        assert dict(one.settings) in candidates_of(GRIDS[f"{one.kind}/{one.policy}"])
    groups = load_choices(FOLDER / "sp_choices.json", TunedPolicy, command="")
    assert len(groups) == len(list(group_searches()))


def test_new_choices_replace_old_ones_in_the_order_of_all_searches() -> None:
    first, second, third = (name.split("/") for name in list(GRIDS)[:3])
    old = [TunedSettings(*name, {"a": 1.0}, "default") for name in (third, first)]
    new = [TunedSettings(*name, {"a": 2.0}, "search") for name in (second, third)]
    found = merged(old, new)
    assert [[one.kind, one.policy] for one in found] == [first, second, third]
    assert [one.chosen_by for one in found] == ["default", "search", "search"]


def test_candidates_are_the_degrees_in_time_and_one_less() -> None:
    experiment = sp_experiment(num_arrivals=20)
    tight = SpCondition("uniform", 12.0, 1.0)
    names = family_names(experiment, tight, "best_static")
    assert len(names) == 96 * 3
    assert "static/1-1-2-4/fcfs" in names
    assert "static/1-1-1-8/edf" not in names
    knapsack = family_names(experiment, tight, "best_knapsack")
    assert all(planner_of(name, experiment.menus()) for name in [*names, *knapsack])


def test_the_best_of_a_family_is_chosen_and_found_again_in_its_file(tmp_path: Path) -> None:
    experiment = sp_experiment(num_arrivals=10)
    chosen = choose(experiment, CELL, "best_fixed", [0])
    assert chosen.num_tried == 4
    assert 0 < chosen.attainment <= 100
    save_choices(tmp_path / "choices.json", [chosen])
    assert load_choices(tmp_path / "choices.json", TunedPolicy, command="") == [chosen]
