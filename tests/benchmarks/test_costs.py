"""What policies cost can be measured, in part and at any size."""

import logging

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.harness import Study
from benchmarks.policies.costs import (
    CELLS,
    CLUSTERS,
    CROWD_SIZES,
    CROWDS,
    GROUP_GPUS,
    POLICIES,
    Crowd,
    draw_group,
    measure,
)
from benchmarks.policies.problems import LARGEST, ClusterSize, draw_problem
from ray_cluster.models.latency_profiles import load_profile
from ray_cluster.simulator.groups.workload import menus_of


def test_a_quick_run_measures_every_decision() -> None:
    study = Study(quick=True)
    measure(study)
    # others in this process want to hear of things
    assert logging.root.manager.disable == logging.NOTSET
    decisions, hours = study.found["tables"].values()
    assert all(0 < row["p50_ms"] <= row["p99_ms"] <= row["max_ms"] for row in decisions)
    assert {row["decision"] for row in decisions} == {
        *("report", "poll", "offer", "offer with a deadline"),
        *POLICIES,
        "allocation",
    }
    assert [row["gpus"] for row in hours] == [1, 4]
    assert all(row["cpu_s"] > 0 and row["requests"] for row in hours)


def test_all_scales_end_where_the_aims_are() -> None:
    assert CELLS[-1] == (1024, 10_000)
    assert max(CROWD_SIZES) == CROWD_SIZES[-1] == (GROUP_GPUS, 64)
    assert (CLUSTERS[0].gpus, CLUSTERS[-1]) == (1, LARGEST)


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


@given(st.integers(0, 50), st.sampled_from(CLUSTERS))
def test_clusters_that_are_planned_have_the_gpus_and_pools_that_they_say(
    seed: int, size: ClusterSize
) -> None:
    problem = draw_problem(seed, size=size)
    assert sum(one.num_gpus for one in problem.supplies) == size.gpus
    # a pool of the heavy model is on another type of GPU, of which a small cluster has one
    assert len(problem.pools) == size.pools or len(problem.supplies) < 2
