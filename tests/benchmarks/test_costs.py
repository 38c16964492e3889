"""What policies cost can be measured, in part and at any size."""

import json
import logging
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.policies.costs.__main__ import PARTS, main
from benchmarks.policies.costs.allocation import planning_round
from benchmarks.policies.costs.problems import LARGEST, draw_problem
from benchmarks.policies.costs.rounds import CROWDS, OURS, POLICIES, Crowd, draw_group
from benchmarks.policies.costs.samples import DecisionCost
from benchmarks.policies.costs.settings import GROUP_GPUS, ClusterSize, CostSettings, quick_costs
from ray_cluster.models.latency_profiles import load_profile
from ray_cluster.simulator.groups.workload import menus_of


def test_a_quick_run_measures_every_part_and_writes_what_it_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "new" / "costs.json"
    main(["--quick", "--out", str(path)])
    shown = capsys.readouterr().out
    result = json.loads(path.read_text())
    assert result["quick"]
    assert result["machine"]["cores"]
    assert list(result["parts"]) == list(PARTS)
    decisions = [
        row
        for part in ("dispatch", "rounds", "allocation", "control")
        for row in result["parts"][part]
    ]
    assert all(0 < row["p50_ms"] <= row["p99_ms"] <= row["max_ms"] for row in decisions)
    assert {row["decision"] for row in decisions} == {
        *("report", "poll", "offer", "offer with a deadline"),
        *POLICIES,
        *("allocation", "planning round", "control round"),
    }
    assert all(row["cpu_s"] > 0 and row["requests"] for row in result["parts"]["hours"])
    for title in ("Dispatch decisions", "Rounds of", "Allocations", "is simulated", "quick run"):
        assert title in shown
    assert str(path) in shown.replace("\n", "")


def test_one_part_alone_is_measured(tmp_path: Path) -> None:
    path = tmp_path / "hours.json"
    main(["--quick", "--only", "hours", "--out", str(path)])
    # others in this process want to hear of things
    assert logging.root.manager.disable == logging.NOTSET
    (rows,) = json.loads(path.read_text())["parts"].values()
    sizes = quick_costs()
    assert [row["gpus"] for row in rows] == [*sizes.hours, *(8 * one for one in sizes.groups)]
    with pytest.raises(SystemExit):
        main(["--only", "nothing"])


def test_all_scales_go_from_one_to_a_thousand_and_end_where_the_aims_are() -> None:
    settings = CostSettings()
    assert (settings.cells[0][0], settings.cells[-1]) == (1, (1024, 10_000))
    assert max(settings.crowds) == (GROUP_GPUS, 64)
    assert settings.clusters[0].gpus == 1
    assert settings.clusters[-1] == LARGEST
    assert (settings.hours[0], settings.hours[-1]) == (1, 1024)
    assert (settings.groups[0], GROUP_GPUS * settings.groups[-1]) == (1, 1024)


@pytest.mark.parametrize("num_gpus", [1, 2, 8])
@pytest.mark.parametrize("crowd", CROWDS, ids=[crowd.name for crowd in CROWDS])
def test_groups_that_are_timed_hold_no_more_gpus_than_there_are(
    crowd: Crowd, num_gpus: int
) -> None:
    menus = menus_of(load_profile("flux-h100-a"), num_gpus=num_gpus)
    group = draw_group(crowd, menus, 20, np.random.default_rng(1), num_gpus=num_gpus)
    assert len(group.requests) == 20
    assert 0 < sum(one.degree for one in group.requests) <= num_gpus
    assert {int(one.menu.slo_class) for one in group.requests} <= set(crowd.sides_px)


@given(st.integers(0, 50), st.sampled_from(CostSettings().clusters))
def test_clusters_that_are_planned_have_the_gpus_and_pools_that_they_say(
    seed: int, size: ClusterSize
) -> None:
    problem = draw_problem(seed, size=size)
    assert sum(one.num_gpus for one in problem.supplies) == size.gpus
    # a pool of the heavy model is on another type of GPU, of which a small cluster has one
    assert len(problem.pools) == size.pools or len(problem.supplies) < 2
    planner, before, after = planning_round(problem)
    plan, _ = planner.plan(after, planner.begin(before))
    assert {one.pool for one in plan.pools} == {one.name for one in problem.pools}


def test_an_aim_is_for_the_slowest_of_all_or_of_99_in_100() -> None:
    cost = DecisionCost(OURS[0], 8, "", 64, 100, 0.5, p99_ms=0.9, max_ms=2.0)
    assert cost.is_met is None
    aims = {(1.0, False): True, (1.0, True): False, (2.0, True): True, (0.8, False): False}
    for (aim_ms, of_all), is_met in aims.items():
        one = DecisionCost(OURS[0], 8, "", 64, 100, 0.5, 0.9, 2.0, aim_ms=aim_ms, of_all=of_all)
        assert one.is_met is is_met
