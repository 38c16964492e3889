"""The simulated beside the live service: the same calls, and steps as fast as they were."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest

from benchmarks.harness import Study
from benchmarks.serving.controlnets import (
    FILE,
    KINDS,
    NETS,
    add_ons_of,
    drift_note,
    plan,
    tabulate,
)
from benchmarks.serving.services import Contender
from benchmarks.serving.simulated_controlnets import (
    MeasuredService,
    MeasuredSteps,
    PlannedCall,
    simulate,
    slowdown,
)
from ray_cluster.config.loading import load_config
from ray_cluster.config.yaml_files import read_mapping
from ray_cluster.policies.costs.cost_model import step_s, work_of
from ray_cluster.simulator.cell.cell import CellResult
from ray_cluster.simulator.controlnets.add_ons import Way

# 10 ms and 4 ms for each image; a ControlNet's answer comes at 1.5 of that, 3 ms later
ALONE = {0: MeasuredSteps(1.0, 0.014)}
TOGETHER = {0: MeasuredSteps(5.0, 0.03)}
HALF = Way().half_share


def answered(mean_batch: float) -> MeasuredSteps:
    plain_s = 0.01 + 0.004 * mean_batch
    return MeasuredSteps(mean_batch, (1 - HALF) * plain_s + 0.9 * plain_s + 0.003)


SERVICE = MeasuredService(
    side_px=64,
    num_steps=20,
    alone={**ALONE, 1: answered(1.0), 2: answered(1.0)},
    together={**TOGETHER, 1: answered(4.0), 2: answered(6.0)},
    decode_s=0.005,
    other_s=0.02,
)


def test_costs_are_those_of_the_steps_that_were_measured() -> None:
    for count in (1, 5):
        seconds = step_s(SERVICE.cost, work_of([SERVICE.view()] * count))
        assert seconds == pytest.approx(0.01 + 0.004 * count)
    add_ons = SERVICE.add_ons()
    assert add_ons.controlnet_share == pytest.approx(0.9)
    assert add_ons.way is not None
    assert add_ons.way.transport_s == pytest.approx(0.003)
    # one row's ControlNet makes a step longer by about half of it, and two do no more
    assert 0.3 < SERVICE.reported_share < 4


@pytest.mark.parametrize("controls", KINDS)
def test_an_image_alone_takes_what_was_measured(controls: tuple[str, ...]) -> None:
    result = simulate(SERVICE, [PlannedCall(1.0, controls, 60.0)], num_services=2, max_batch=8)
    number = min(1, len(controls))
    [fate] = result.fates
    took_s = fate.end_s - 1.0
    assert took_s == pytest.approx(0.02 + 20 * SERVICE.alone[number].step_s + 0.005)


def test_with_both_in_one_process_two_controlnets_take_longer_than_one() -> None:
    calls = [PlannedCall(1.0, NETS, 60.0)]
    apart, together = (
        simulate(SERVICE, calls, num_services=num, max_batch=8).fates[0].end_s for num in (2, 1)
    )
    assert together > apart + 0.2


def test_a_mix_that_was_slower_than_its_kinds_is_simulated_as_slow_as_it_was() -> None:
    def simulated(times: float) -> Callable[[Sequence[PlannedCall]], CellResult]:
        return partial(simulate, SERVICE.slowed(times), num_services=2, max_batch=8)

    by_kinds = slowdown(simulated(1.0), KINDS, 10.0)
    # twice as many images per second: half as slow
    assert slowdown(simulated(1.0), KINDS, 20.0) == pytest.approx(by_kinds / 2)
    assert slowdown(simulated(by_kinds), KINDS, 10.0) == pytest.approx(1.0, rel=0.02)


def test_calls_come_at_the_rate_and_are_of_all_kinds() -> None:
    planned = plan(400, 10.0, 2.0)
    assert planned[-1].at_s == pytest.approx(40, rel=0.2)
    assert {one.controls for one in planned} == set(KINDS)
    assert planned == plan(400, 10.0, 2.0)


def test_the_tables_tell_live_from_simulated() -> None:
    planned = plan(40, 10.0, 2.0)
    ended = [None if number < 4 else 1.0 if number < 30 else 3.0 for number in range(40)]
    study, equal = Study(quick=True), Study(quick=True)
    tabulate(study, SERVICE, planned, ended, [number < 30 for number in range(40)], 12.5)
    found = study.found
    row = found["tables"]["in time, by ControlNets of an image"][0]
    assert (row["calls"], row["live, %"], row["simulated, %"]) == (40, 65.0, 75.0)
    assert row["simulated less live, points"] == 10.0
    [aim] = found["aims"]
    assert aim["measured"] == pytest.approx(10.0)
    assert aim["interval"][0] < 10 < aim["interval"][1]
    tabulate(equal, SERVICE, planned, [1.0] * 40, [True] * 40, 12.5)
    assert equal.found["aims"][0]["verdict"] == "yes"


def test_a_machine_that_changes_its_speed_is_noted() -> None:
    slower = SERVICE._replace(
        alone={number: MeasuredSteps(1.0, 2 * one.step_s) for number, one in SERVICE.alone.items()},
        decode_s=0.015,
    )
    assert SERVICE.drift(SERVICE) == pytest.approx(1)
    assert SERVICE.drift(slower) == pytest.approx(2**0.5)
    mean = SERVICE.between(slower)
    assert mean.alone[1].step_s == pytest.approx(1.5 * SERVICE.alone[1].step_s)
    assert mean.together == SERVICE.together
    assert mean.decode_s == pytest.approx(0.01)
    assert drift_note(1.1).endswith("before")
    assert "says nothing" in drift_note(1.2)
    assert "says nothing" in drift_note(0.8)


def test_the_service_is_the_built_in_one(tmp_path: Path) -> None:
    config = load_config(Contender(change=add_ons_of).config(tmp_path, 18999))
    assert [one.name for one in config.controlnets] == list(NETS)
    assert all(one.is_service for one in config.controlnets)
    assert config.http.port == 18999
    assert config.pools == load_config(read_mapping(FILE, "configuration")).pools
