"""ControlNets and LoRAs cost what was published, and are fetched where they are not kept."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ray_cluster.policies.costs.cost_model import step_s, work_of
from ray_cluster.policies.types import RequestView, StepCost
from ray_cluster.simulator.cell.cell import CellSpec, PoolSpec
from ray_cluster.simulator.cell.experiment import CellRun
from ray_cluster.simulator.cell.runs import Setting, run_cell
from ray_cluster.simulator.controlnets.add_ons import AddOnCost, AddOnStore, Way, reported_share
from ray_cluster.simulator.noise import Hardware
from ray_cluster.simulator.workload import Arrival
from tests.fakes import request_view
from tests.simulator.checked import simulate
from tests.simulator.test_cell_experiment import reported, small

COST = StepCost(fixed_s=0.05, per_megapixel_s=0.1)
ADDED = AddOnCost(controlnet_share=0.5, controlnet_fetch_s=3.0, lora_fetch_s=0.4, num_kept=2)


def arrival(
    at_s: float = 0.0, controlnets: tuple[str, ...] = (), loras: tuple[str, ...] = ()
) -> Arrival:
    size = 1000, 1000, 10
    return Arrival(at_s, "m", *size, uses_guidance=False, controlnets=controlnets, loras=loras)


def store_of(**arrivals: Arrival) -> AddOnStore:
    return AddOnStore(ADDED, arrivals.__getitem__)


def view(*controls: str) -> RequestView:
    return request_view("a", controls=controls)


def test_images_with_controlnets_take_what_was_published() -> None:
    share = AddOnCost().controlnet_share
    # H800, 1024 px: without, with one, with three
    assert 2.88 * (1 + 3 * share) == pytest.approx(7.09)
    assert 2.88 * (1 + share) == pytest.approx(4.26, rel=0.01)
    # a ControlNet takes 1.1 of the first half of a step
    assert 1.1 * Way().half_share == pytest.approx(share)


@pytest.mark.parametrize(("count", "tolerance"), [(1, 1e-9), (4, 0.05)])
def test_replicas_report_what_steps_with_controlnets_take_more(
    count: int, tolerance: float
) -> None:
    plain = [request_view("a")] * count
    rows = [replace(one, controls=("x",)) for one in plain]
    alone_s, beside = step_s(COST, work_of(plain)), 0.5 * step_s(COST, work_of(plain))

    def told_s(cost: AddOnCost) -> float:
        share = reported_share(COST, cost, plain[:1], count)
        return step_s(replace(COST, control_share=share), work_of(rows))

    assert told_s(ADDED) == pytest.approx(alone_s + beside, rel=tolerance)
    away = replace(ADDED, way=Way(half_share=0.4, transport_s=0.01))
    assert told_s(away) == pytest.approx(alone_s + beside + 0.01 - 0.4 * alone_s, rel=tolerance)
    hidden = replace(ADDED, way=Way(half_share=0.6))
    assert reported_share(COST, hidden, plain[:1], count) == 0


def test_rows_with_the_same_controlnet_go_through_it_together() -> None:
    store = store_of()
    one, two = (step_s(COST, work_of([view()] * num)) for num in (1, 2))
    assert store.step_s(COST, [view("x"), view("x", "y"), view()]) == pytest.approx(
        0.5 * two + 0.5 * one
    )
    assert store.step_s(COST, [view()]) == 0
    elsewhere = AddOnStore(replace(ADDED, way=Way()), {}.__getitem__)
    assert elsewhere.step_s(COST, [view("x")]) == 0


def test_what_is_lacking_is_fetched_one_after_the_other_and_what_is_kept_is_not() -> None:
    store = store_of(
        a=arrival(loras=("x", "y")),
        b=arrival(loras=("y",)),
        c=arrival(loras=("z",)),
        d=arrival(loras=("x",)),
        e=arrival(controlnets=("n",), loras=("x",)),
        f=arrival(),
    )
    assert store.ready_s("a", 10.0) == pytest.approx(10.8)
    # on its way
    assert store.ready_s("b", 10.1) == pytest.approx(10.8)
    assert store.ready_s("b", 11.0) == 11.0
    assert store.ready_s("c", 11.0) == pytest.approx(11.4)
    # two are kept, and x was used before both
    assert store.ready_s("d", 20.0) == pytest.approx(20.4)
    assert store.ready_s("e", 20.1) == pytest.approx(23.4)
    assert store.ready_s("f", 20.1) == 20.1
    # ControlNets elsewhere are not fetched here
    away = AddOnStore(replace(ADDED, way=Way()), lambda _: arrival(0.0, ("n",), ("x",)))
    assert away.ready_s("a", 1.0) == pytest.approx(1.4)


def test_an_image_waits_for_its_add_ons_and_its_controlnets_take_part_in_each_step() -> None:
    hardware = Hardware(COST, encode_s=0.1, add_ons=ADDED)
    spec = CellSpec((PoolSpec("p", "m", 1, hardware, max_batch=4, max_in_flight=4),))
    wanted = arrival(0.0, controlnets=("x",), loras=("y",))
    result, _ = simulate(spec, [wanted, arrival(20.0, controlnets=("x",)), arrival(40.0)])
    took_s = [fate.end_s - fate.arrival.arrival_s for fate in result.fates]
    assert took_s == pytest.approx([3.4 + 15 * 0.15, 0.1 + 15 * 0.15, 0.1 + 10 * 0.15])


def test_others_step_while_add_ons_are_fetched() -> None:
    hardware = Hardware(COST, add_ons=ADDED)
    spec = CellSpec((PoolSpec("p", "m", 1, hardware, max_batch=4, max_in_flight=4),))
    result, _ = simulate(spec, [arrival(0.0, controlnets=("x",)), arrival(0.1)])
    assert result.fates[1].end_s == pytest.approx(0.1 + 1.5)


def test_a_service_with_add_ons_attains_less_and_its_dispatcher_prices_them() -> None:
    changes = {"policies": ["deadline"], "rates_per_s": [5], "num_seeds": 1}
    plain = small(**changes)
    loaded = small(**changes, add_ons="service-a")
    run = CellRun("deadline", 5.0, 0)
    with_add_ons, without = (run_cell(one, run).figures["attainment"] for one in (loaded, plain))
    assert with_add_ons < without - 0.1
    setting = Setting.of(loaded)
    workload = setting.workload(5.0, 0)
    (pool,) = setting.spec("deadline", 0, workload).pools
    assert pool.reported_cost is not None
    assert pool.reported_cost.fixed_s == pool.hardware.cost.fixed_s
    # small images alone have their ControlNets' fixed part too
    assert AddOnCost().controlnet_share < pool.reported_cost.control_share < 1.5


def test_the_report_says_who_has_add_ons_and_where_their_cost_is_from() -> None:
    report = reported(
        small(policies=["fcfs"], rates_per_s=[4], num_seeds=1, duration_s=60, add_ons="service-b")
    )
    assert "Add-ons cost what is published of SDXL" in report.what
    nets, loras = report.tables[-1].rows
    assert [len(nets), nets[0], loras[0]] == [5, "ControlNets", "LoRAs"]
    assert [float(one) for one in nets[1:]] == pytest.approx([1.9, 25.1, 69.9, 3.1], abs=6)
    assert sum(float(one) for one in loras[1:]) == pytest.approx(100, abs=0.2)
    plain = reported(small(policies=["fcfs"], rates_per_s=[2], num_seeds=1, duration_s=10))
    assert "Add-ons" not in plain.what
    assert "ControlNets" not in str(plain.tables)


def test_who_keeps_more_fetches_less() -> None:
    rows = [
        run_cell(
            small(policies=["fcfs"], add_ons="service-a", kept_add_ons=kept, slo_times_alone=4),
            CellRun("fcfs", 0.3, 0),
        )
        for kept in (0, 1000)
    ]
    assert rows[0].figures["attainment"] < rows[1].figures["attainment"]
