"""The benchmark of groups through HTTP: its menu is the published one, and its parts agree."""

from __future__ import annotations

import math
import threading
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

import pytest

from benchmarks.groups import live
from benchmarks.groups.live import Ask, Over, Ready, Served, Unit, live_planner
from benchmarks.groups.policies import OURS, _compare, _units
from benchmarks.groups.published import CLASSES, NUM_STEPS, PROFILE, SCALE, step_times
from benchmarks.harness import Study
from ray_cluster.engine.stages import denoise_stage
from ray_cluster.models.latency_profiles import load_profile
from ray_cluster.policies.sequence_parallel.rounds import plan_round
from ray_cluster.policies.sequence_parallel.types import GroupRequest, GroupView
from ray_cluster.replica.group import builder

TIMES = step_times(1.0)


def test_images_last_as_long_as_published() -> None:
    images = {
        (one.key.width_px, one.key.sp_degree): one for one in load_profile(PROFILE).of("image")
    }
    for side_px in CLASSES:
        menu = TIMES.menu(side_px, 0.0)
        assert menu.degrees == (1, 2, 4)
        for degree, seconds in zip(menu.degrees, menu.step_s, strict=True):
            published_s = images[SCALE * side_px, degree].seconds
            assert NUM_STEPS * seconds == pytest.approx(published_s, rel=0.02)
    assert max(TIMES.errors.values()) < 0.02
    assert step_times(0.5).step_s(4, 64**2) == pytest.approx(TIMES.step_s(4, 64**2) / 2)


def test_policies_have_the_same_workloads() -> None:
    units = _units("skewed", (100, 101), 5)
    by_seed = {seed: {one.asks for one in units if one.seed == seed} for seed in (100, 101)}
    assert [len(one) for one in by_seed.values()] == [1, 1]
    assert by_seed[100] != by_seed[101]
    assert len({one.name for one in units}) * 2 == len(units)
    assert units[0].name == OURS


def test_rounds_on_a_grid_begin_at_its_edges_though_they_are_looked_at_later() -> None:
    planner = live_planner("knapsack/1/grid", TIMES)
    menu = TIMES.menu(32, 0.0)
    request = GroupRequest(0, menu, 10.0, 0.0, 1e3)
    view = GroupView(4, 0.4, (request,), 0.0, 0.0)
    first = planner(view)
    assert first.degrees == (0,)
    edge_s = first.look_again_s
    late = planner(replace(view, now_s=edge_s + 0.01, look_again_s=edge_s))
    assert late.degrees > (0,)
    assert late.look_again_s == pytest.approx(2 * edge_s)


def test_a_comparison_tells_who_was_on_time() -> None:
    unit = Unit("widest", "widest", 0, (Ask(0.0, 32), Ask(1.0, 256)))
    ours = unit._replace(name=OURS, policy=OURS)
    fixed = unit._replace(name="fixed/1", policy="fixed/1")
    served = [
        Served(unit, (1.0, None), {4: 10}),
        Served(ours, (1.0, 2.0), {4: 20}),
        Served(fixed, (1.0, None), {1: 10}),
    ]
    study = Study(quick=True)
    _compare(study, "attainment", served, TIMES, dict.fromkeys(CLASSES, 0.0), 1.0)
    found = {
        row["policy"]: (row["live %"], row["simulated %"], row["ours over it"]["value"])
        for row in study.found["tables"]["attainment"]
    }
    # the largest image on one rank takes three times as long as it may
    assert found == {
        "widest": (50, 100, 50),
        OURS: (100, 100, 0),
        "fixed/1": (50, 50, 50),
    }
    verdicts = {aim["name"]: aim["verdict"] for aim in study.found["aims"]}
    assert verdicts["ours over widest"] == "yes"
    assert verdicts["widest, live over simulated"] == "no"


@pytest.mark.slow
@pytest.mark.xdist_group("local")
@pytest.mark.timeout(600)
def test_a_service_of_paced_ranks_serves_policies_in_turn() -> None:
    # deadlines of minutes: the machine may be busy
    times, pace = step_times(0.1), 30.0
    asks = (Ask(0.0, 256), Ask(0.1, 32))
    units: Any = SimpleQueue()
    for policy in (OURS, "fixed/1"):
        units.put(Unit(policy, policy, 0, asks))
    units.put(None)
    found: Any = SimpleQueue()
    # patches what a group asks for, in this process
    serving = threading.Thread(target=live.run, args=(units, found, times, pace))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "plan_round", plan_round)
        patch.setattr(denoise_stage, "_IDLE_WAKE_S", denoise_stage._IDLE_WAKE_S)
        serving.start()
        ready, ours, fixed, over = (found.get(timeout=400) for _ in range(4))
        serving.join()
    assert isinstance(ready, Ready)
    assert all(ratio > 0.5 for ratio in ready.ratios.values())
    for one, degrees in ((ours, {1, 2, 4}), (fixed, {1})):
        assert isinstance(one, Served)
        large_s, small_s = one.seconds
        assert large_s is not None
        assert small_s is not None
        fastest_s = NUM_STEPS * times.step_s(max(one.steps_by_degree), 256**2)
        assert large_s > fastest_s
        assert sum(one.steps_by_degree.values()) == 2 * NUM_STEPS
        assert set(one.steps_by_degree) <= degrees
    assert isinstance(over, Over)
    assert all(math.isfinite(one) and one > 0 for one in over.real)
