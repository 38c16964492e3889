"""ControlNets on devices of their own work beside the base's first half."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_cluster.policies.costs.cost_model import step_s, work_of
from ray_cluster.policies.types import RequestView, StepCost
from ray_cluster.simulator.cell.cell import CellResult, CellSpec, PoolSpec
from ray_cluster.simulator.cell.experiment import CellExperiment, CellRun
from ray_cluster.simulator.cell.runs import run_cell
from ray_cluster.simulator.controlnets.add_ons import AddOnCost, Way
from ray_cluster.simulator.controlnets.services import ControlNetServices, ServiceSpec
from ray_cluster.simulator.events import EventQueue
from ray_cluster.simulator.noise import Hardware
from ray_cluster.simulator.workload import Arrival
from tests.examples import a_few
from tests.fakes import request_view
from tests.simulator.checked import Overseer, simulate
from tests.simulator.test_cell_experiment import SMALL, reported, small

COST = StepCost(fixed_s=0.06, per_megapixel_s=0.1)
STEP_S = 0.16
AWAY = AddOnCost(
    controlnet_share=0.5,
    controlnet_fetch_s=0.0,
    lora_fetch_s=0.4,
    way=Way(half_share=0.4, transport_s=0.01),
)


def arrival(at_s: float, *controlnets: str, slo_s: float = 1e4, steps: int = 10) -> Arrival:
    return Arrival(
        at_s, "m", 1000, 1000, steps, uses_guidance=False, slo_s=slo_s, controlnets=controlnets
    )


def spec_of(add_ons: AddOnCost = AWAY, *, bases: int = 1, devices: int = 1) -> CellSpec:
    pool = PoolSpec("p", "m", bases, Hardware(COST, add_ons=add_ons), max_batch=3, max_in_flight=4)
    services = ServiceSpec(devices, COST, add_ons, max_batch=4)
    return CellSpec((pool,), services=services if add_ons.way else None)


def took_s(result: CellResult) -> list[float]:
    return [fate.end_s - fate.arrival.arrival_s for fate in result.fates]


@pytest.mark.parametrize("share", [0.1, 0.35, 0.5, 1.2])
def test_a_step_takes_the_longer_of_both_and_the_second_half(share: float) -> None:
    result, _ = simulate(spec_of(replace(AWAY, controlnet_share=share)), [arrival(1.0, "x")])
    step_s = max(0.4 * STEP_S, share * STEP_S + 0.01) + 0.6 * STEP_S
    assert took_s(result) == pytest.approx([10 * step_s])
    assert result.busy_s_by_replica["controlnets-0"] == pytest.approx(10 * share * STEP_S)


def test_two_controlnets_of_a_row_share_a_device_or_have_one_each() -> None:
    for devices, num_calls in ((1, 2), (2, 1)):
        result, _ = simulate(spec_of(devices=devices), [arrival(1.0, "x", "y")])
        step_s = num_calls * 0.5 * STEP_S + 0.01 + 0.6 * STEP_S
        assert took_s(result) == pytest.approx([10 * step_s])


@pytest.mark.parametrize("count", [1, 7])
def test_services_that_take_no_time_change_nothing(count: int) -> None:
    free = replace(AWAY, controlnet_share=0.0, way=Way(half_share=0.4))
    workload = [arrival(0.3 * number, "x", "y", slo_s=6.0 + number % 3) for number in range(count)]
    plain = [replace(one, controlnets=()) for one in workload]
    found, there = simulate(spec_of(free), workload)
    expected, without = simulate(spec_of(free), plain)
    assert took_s(found) == pytest.approx(took_s(expected))
    assert there.steps_by_id == without.steps_by_id


def test_rows_of_several_bases_are_computed_together() -> None:
    """Both ask in the same instant, and wait for one call of two rows."""
    result, _ = simulate(spec_of(bases=2), [arrival(1.0, "x"), arrival(1.0, "x")])
    together_s = 0.5 * (0.06 + 0.2)
    assert took_s(result) == pytest.approx([10 * (together_s + 0.01 + 0.6 * STEP_S)] * 2)


def test_peers_go_on_without_a_row_whose_residuals_are_late() -> None:
    """The device fetches the ControlNet for 3 s; afterwards it is as fast as the first half."""
    slow = replace(AWAY, controlnet_share=0.1, controlnet_fetch_s=3.0)
    result, seen = simulate(spec_of(slow), [arrival(1.0), arrival(1.0, "x")])
    peer, late = took_s(result)
    # a step alone, then one from which the row is cut after the first half; it repeats that step
    both_s = step_s(COST, work_of([view(), view()]))
    assert peer == pytest.approx(STEP_S + 0.4 * both_s + 0.6 * STEP_S + 8 * STEP_S)
    assert late == pytest.approx(STEP_S + 3.0 + 0.016 + 0.01 + 10 * STEP_S)
    assert seen.steps_by_id == {"0": 10, "1": 10}


def view(name: str = "a", **changes: float) -> RequestView:
    return replace(
        request_view(name), width_px=1000, height_px=1000, uses_guidance=False, **changes
    )


def answered(
    asks: Sequence[tuple[float, str, RequestView]], add_ons: AddOnCost
) -> dict[str, float]:
    """Return when each of some asks of one device is answered, by request."""
    events, found = EventQueue(), dict[str, float]()
    services = ControlNetServices(ServiceSpec(1, COST, add_ons, max_batch=2), events)
    for at_s, net, one in asks:
        events.at(
            at_s,
            lambda net=net, one=one: services.ask(  # type: ignore[misc]
                net, one, lambda: found.__setitem__(one.request_id, events.now_s)
            ),
        )
    events.run()
    return found


def test_the_most_urgent_row_is_computed_first_with_others_of_its_controlnet() -> None:
    add_ons = replace(AWAY, way=Way())
    one_s, two_s = 0.5 * STEP_S, 0.5 * (0.06 + 0.2)
    found = answered(
        [
            (0.0, "x", view("first", deadline_s=9.0)),
            # they wait for the first
            (0.01, "y", view("third", deadline_s=5.0)),
            (0.01, "x", view("fourth", deadline_s=7.0)),
            (0.02, "x", view("second", deadline_s=3.0)),
            (0.03, "x", view("last", deadline_s=8.0)),
        ],
        add_ons,
    )
    assert found == pytest.approx(
        {
            "first": one_s,
            "second": one_s + two_s,
            "fourth": one_s + two_s,
            "third": 2 * one_s + two_s,
            "last": 3 * one_s + two_s,
        }
    )


def test_a_controlnet_that_is_not_kept_is_fetched_while_others_compute() -> None:
    add_ons = replace(AWAY, controlnet_fetch_s=1.0, num_kept=1, way=Way())
    found = answered([(0.0, "x", view("a")), (1.0, "y", view("b")), (1.5, "x", view("c"))], add_ons)
    half_s = 0.5 * STEP_S
    # the last one comes back to what was dropped for the second
    assert found == pytest.approx({"a": 1 + half_s, "b": 2 + half_s, "c": 3 + half_s})


workloads = st.lists(
    st.builds(
        lambda at_s, nets, slo_s, steps: arrival(at_s, *nets, slo_s=slo_s, steps=steps),
        st.floats(0, 10).map(lambda value: round(value, 2)),
        st.lists(st.sampled_from("xyz"), max_size=3, unique=True),
        st.sampled_from([1.0, 4.0, 60.0]),
        st.integers(1, 8),
    ),
    min_size=1,
    max_size=20,
)


@a_few  # each is a simulated run
@given(
    workloads,
    st.integers(1, 3),
    st.integers(1, 2),
    st.sampled_from([0.05, 0.5, 3.0]),
    st.sampled_from(["accept", "refuse"]),
    st.sampled_from([float("inf"), 15.0]),
)
def test_nothing_is_lost_and_every_step_is_taken_once(
    workload: list[Arrival], bases: int, devices: int, share: float, when_late: str, mtbf_s: float
) -> None:
    add_ons = replace(AWAY, controlnet_share=share, controlnet_fetch_s=0.3, num_kept=1)
    spec = spec_of(add_ons, bases=bases, devices=devices)
    pools = tuple(replace(pool, mtbf_s=mtbf_s) for pool in spec.pools)
    # laws are checked within
    simulate(
        replace(spec, pools=pools, when_late=when_late, has_preemption=True),  # type: ignore[arg-type]
        workload,
    )


def test_an_experiment_compares_both_at_equally_many_devices() -> None:
    experiment = small(
        policies=["deadline", "deadline/services/1", "deadline/open/services/1"],
        add_ons="service-a",
        rates_per_s=[0.5],
        num_seeds=1,
        duration_s=40,
    )
    report = reported(experiment)
    done, gains, *_ = report.tables
    assert list(done.columns[1:]) == list(experiment.policies)
    assert len(gains.columns) == 3
    assert sum("Refusals of deadline" in table.title for table in report.tables) == 2
    # one device is left for the base; without anything for the other to do it is as one replica
    alone = small(policies=["deadline"], replicas=1, rates_per_s=[3])
    split = small(policies=["deadline/services/1"], rates_per_s=[3])
    lone, beside = (run_cell(one, CellRun(one.policies[0], 3.0, 0)).met for one in (alone, split))
    assert lone == beside


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"policies": ["deadline/services/2"]}, "at least one must be left for the base"),
        ({"policies": ["deadline/services/0"]}, "there is no policy"),
        ({"policies": ["fcfs/services/1"]}, "there is no policy"),
        ({"policies": ["deadline/services/x"]}, "there is no policy"),
        (
            {
                "policies": ["deadline/services/1"],
                "pools": [{"profile": "sdxl-h100", "replicas": 2}],
            },
            "with pools; allowed only",
        ),
    ],
)
def test_services_that_cannot_be_are_refused(changes: dict[str, object], why: str) -> None:
    given = {**SMALL, **changes}
    if "pools" in changes:
        given = {
            key: value
            for key, value in given.items()
            if key not in ("profile", "replicas", "max_batch")
        }
    with pytest.raises(ValueError, match=why):
        CellExperiment.model_validate(given)


def test_a_run_repeats_itself() -> None:
    workload = [arrival(0.1 * number, *"xyz"[: number % 4], slo_s=5.0) for number in range(30)]
    spec = spec_of(replace(AWAY, controlnet_fetch_s=0.5), bases=2, devices=2)
    first, second = (simulate(spec, workload)[0] for _ in range(2))
    assert [one.end_s for one in first.fates] == [one.end_s for one in second.fates]
    assert isinstance(simulate(spec, workload)[1], Overseer)
