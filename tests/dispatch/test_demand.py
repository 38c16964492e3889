"""What the controller sees of calls: accepted ones, and of refused ones a client's share."""

from __future__ import annotations

from typing import Any

import pytest

from ray_cluster.config.loading import ClusterConfig
from ray_cluster.config.sections.cell_wide import DispatchConfig, LimitsConfig
from ray_cluster.config.sections.controlnets import ControlNetConfig
from ray_cluster.config.settings import settings_of
from ray_cluster.dispatch.core import DispatchCore
from ray_cluster.dispatch.reports.demand import DemandCounts
from ray_cluster.requests import AddOns, BlobRef, ControlNetUse, Failure, ImageRequest
from tests.fakes import finished, image_request, poll_of, registration

EDGES = AddOns(controls=(ControlNetUse("edges", BlobRef("0" * 64, 1)),))
LANE = "control:edges"


def make_core(max_replicas: int | None = 2, **limits: Any) -> DispatchCore:
    """A core of one replica of a model, whose typical image is ten steps without guidance."""
    limits = {"max_queued_images": 4, "max_queue_s": 1e6, **limits}
    pool = {"name": "p", "model": "shapes-sd", "served_as": "m", "max_replicas": max_replicas}
    pool["defaults"] = {"guidance_scale": 1.0}
    config = ClusterConfig.model_validate({"pools": [pool], "limits": limits})
    core = DispatchCore(
        config=DispatchConfig(), limits=LimitsConfig(**limits), epoch=1, configured=["m"]
    )
    core.apply(settings_of(config), 0.0)
    core.controls.apply([ControlNetConfig(name="edges", model="m", bases=("m",), mode="local")])
    core.register(registration("r"), 0.0)
    return core


def counts(core: DispatchCore) -> DemandCounts:
    return core.snapshot(0.0).demand


def flood(core: DispatchCore, client: str, now_s: float, num: int = 50, **changes: Any) -> None:
    for number in range(num):
        name = f"{client}{now_s}-{number}"
        core.offer([image_request(name, **changes)], now_s, client=client)


def test_accepted_images_count_by_their_work_and_steps_by_their_number() -> None:
    core = make_core()
    core.offer([image_request("a"), image_request("b")], 0.0)
    core.offer([image_request("c", num_steps=30, add_ons=EDGES)], 0.0)
    found = counts(core)
    assert found.accepted["m"] == pytest.approx(5.0, rel=0.1)
    assert found.accepted[LANE] == 30
    assert not found.unmet


def test_a_flood_of_images_of_one_step_is_little_demand() -> None:
    core = make_core(max_queued_images=100)
    flood(core, "a", 0.0, num=100, num_steps=1)
    assert counts(core).accepted["m"] == pytest.approx(10.0, rel=0.2)


@pytest.mark.parametrize(
    "changes",
    [
        # not even an idle service makes it in time
        {"slo_s": 1e-3, "when_late": "refuse"},
        {"model": "unknown"},
    ],
)
def test_what_cannot_be_made_is_no_demand(changes: dict[str, Any]) -> None:
    core = make_core()
    flood(core, "a", 0.0, **{"add_ons": EDGES, "num_steps": 1000, **changes})
    assert (dict(counts(core).accepted), dict(counts(core).unmet)) == ({}, {})


def test_what_meets_a_bound_of_its_client_is_no_demand() -> None:
    limits = {"max_attached_images_per_client": 2, "max_images_per_request": 2}
    core = make_core(max_queued_images=100, **limits)
    flood(core, "a", 0.0)
    assert counts(core).accepted["m"] == pytest.approx(2.0)
    assert not counts(core).unmet


def test_refused_calls_ask_for_no_more_than_all_replicas_that_may_be_could_make() -> None:
    core = make_core(max_replicas=2)
    for second in range(100):
        flood(core, "a", float(second))
    # a full batch of two makes an image of ten steps in half a second or more
    assert 200 < counts(core).unmet["m"] < 2 * 110 * 2
    assert LANE not in counts(core).unmet


def test_without_a_bound_they_ask_for_twice_the_replicas_and_one() -> None:
    many, few = make_core(max_replicas=None), make_core(max_replicas=3)
    for core in (many, few):
        for second in range(20):
            flood(core, "a", float(second))
    assert counts(many).unmet == counts(few).unmet


def test_a_client_that_floods_counts_no_more_than_one_that_has_as_much_to_ask() -> None:
    core = make_core()
    flood(core, "honest", 0.0, num=5)
    before = counts(core).unmet["m"]
    for second in range(1, 61):
        flood(core, "flood", float(second))
        flood(core, "honest", float(second), num=1)
    both = counts(core).unmet["m"]
    alone = make_core()
    for second in range(1, 61):
        flood(alone, "flood", float(second))
    # the flood's half, and the single calls of the other
    assert both - before - 60 == pytest.approx(counts(alone).unmet["m"] / 2, rel=0.2)


def test_requests_that_are_cancelled_at_once_leave_a_clients_share() -> None:
    core = make_core()
    for number in range(1000):
        core.offer([image_request(f"x{number}", num_steps=1000, add_ons=EDGES)], 0.0, client="a")
        core.abort([f"x{number}"])
    assert counts(core).accepted[LANE] == 0
    assert counts(core).accepted["m"] == pytest.approx(0.0, abs=1e-6)
    assert not counts(core).unmet


def test_a_burst_that_is_cancelled_counts_once_however_often_it_is_sent() -> None:
    core = make_core(max_queued_images=100)
    read = [0.0]
    for turn in range(50):
        names = [f"{turn}-{number}" for number in range(100)]
        core.offer([image_request(name, add_ons=EDGES) for name in names], turn * 0.01, client="a")
        read.append(counts(core).accepted["m"])
        core.abort(names)
        read.append(counts(core).accepted["m"])
    assert read == sorted(read)
    assert read[-1] < 110
    # what another asks for counts at once
    core.offer([image_request("b")], 1.0, client="b")
    assert counts(core).accepted["m"] == pytest.approx(read[-1] + 1)


def test_a_client_does_not_owe_what_dies_with_its_model() -> None:
    core = make_core(max_queued_images=100)
    core.offer([image_request(f"a{number}") for number in range(50)], 0.0, client="a")
    core.unregister("r", 0.0)
    core.touch([f"a{number}" for number in range(50)], 500.0)
    core.offer([image_request("x")], 500.0, client="other")
    before = counts(core).accepted["m"]
    ended = core.expire(500.0)
    assert {one.kind for one in ended if isinstance(one, Failure)} == {"lost"}
    core.register(registration("r"), 500.0)
    core.offer([image_request("b")], 500.0, client="a")
    assert counts(core).accepted["m"] == pytest.approx(before + 1)


def test_a_client_owes_no_more_than_what_could_be_made_meanwhile() -> None:
    core = make_core(max_queued_images=100)
    for second in (0.0, 1000.0):
        names = [f"{second}-{number}" for number in range(50)]
        core.offer([image_request(name) for name in names], second, client="a")
        counts(core)
        core.abort(names)
    assert counts(core).accepted["m"] == pytest.approx(100.0)


def test_one_refused_call_counts_no_more_than_its_clients_share() -> None:
    core = make_core(max_queued_images=1)
    core.offer([image_request("a")], 0.0)
    for name in ("b", "c"):
        core.offer([image_request(name, num_steps=100_000)], 0.0, client="b")
    one = counts(core).unmet["m"]
    many = make_core(max_queued_images=1)
    many.offer([image_request("a")], 0.0)
    flood(many, "b", 0.0, num=1000)
    assert one == pytest.approx(counts(many).unmet["m"])


def test_what_was_made_stays_counted() -> None:
    core = make_core()
    core.offer([image_request("a")], 0.0)
    (lease,) = core.poll(poll_of(), 0.0).leases
    core.report("r", [finished(lease)], 1.0)
    core.offer([image_request("b")], 1.0)
    core.abort(["b"])
    assert counts(core).accepted["m"] == pytest.approx(1.0)


def test_clients_that_are_told_apart_are_bounded() -> None:
    core = make_core()
    for number in range(5000):
        core.offer([request_of(number)], 0.0, client=f"client {number}")
    demand = core._ledger.demand
    assert len(demand._clients["m"]) <= 1000


def request_of(number: int) -> ImageRequest:
    return image_request(f"q{number}")
