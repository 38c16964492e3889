"""Places that change hands at the dispatcher, and requests that have waited too long."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_cluster.config.sections.cell_wide import DispatchConfig, LimitsConfig
from ray_cluster.dispatch.core import DispatchCore
from ray_cluster.policies.admission.preemption import MOST_PREEMPTIONS
from ray_cluster.policies.leasing.ordering import AGED_PRIORITY
from ray_cluster.policies.types import RequestView
from ray_cluster.protocol.leases import Lease, PollReply, Returned
from ray_cluster.requests import ImageRequest
from tests.fakes import finished, image_request, poll_of, registration

CONFIG = DispatchConfig(poll_s=1.0, replica_timeout_s=6.0, starvation_s=100.0)


def make_core(**changes: Any) -> DispatchCore:
    config = CONFIG.model_copy(update=changes)
    return DispatchCore(config=config, limits=LimitsConfig(max_queued_images=1000), epoch=1)


def view_at(request: ImageRequest, now_s: float) -> RequestView:
    return request.view(arrival_s=now_s, deadline_s=now_s + (request.slo_s or 0.0))


def returned(lease: Lease, steps_done: int) -> Returned:
    return Returned(lease.request.request_id, lease.fence, steps_done)


@pytest.fixture
def core() -> DispatchCore:
    """A core whose one replica of one place makes a long image."""
    core = make_core()
    core.register(registration(max_in_flight=1, max_batch=1), 0.0)
    core.offer([image_request("long", slo_s=1000.0, num_steps=500)], 0.0, client=None)
    return core


def lease_long(core: DispatchCore) -> Lease:
    (lease,) = core.poll(poll_of(num_free=1), 0.0).leases
    return lease


def poll(core: DispatchCore, now_s: float, num_free: int = 0, **steps_done: int) -> PollReply:
    return core.poll(poll_of(num_free=num_free, steps_done_by_id=steps_done), now_s)


def urgent(name: str = "new", slo_s: float = 5.0) -> Any:
    return image_request(name, slo_s=slo_s, num_steps=2, when_late="refuse")


def test_a_place_goes_to_who_needs_it_and_the_other_one_goes_on_later(core: DispatchCore) -> None:
    long = lease_long(core)
    poll(core, 1.0, long=10)
    assert core.offer([urgent()], 1.0, client=None).exchanges == (("long", "new"),)
    assert core.replicas.take_alerted() == {"r"}
    reply = core.answer("r", 1.0)
    assert reply.preempted == ("long",)
    assert [one.request.request_id for one in reply.leases] == ["new"]
    # said once, and both are held until the replica has handed the one back
    assert not poll(core, 1.2, long=11, new=0).leases
    assert core.snapshot(1.2).num_leased == 2
    core.report("r", [returned(long, 12)], 1.3)
    assert core.num_waiting == 1
    [progress] = core.progress(["long"], 1.3, predicts="no")
    assert progress is not None
    assert (progress.steps_done, progress.position) == (12, 0)
    assert not poll(core, 1.4, new=1).leases
    core.report("r", [finished(reply.leases[0])], 2.0)
    (again,) = poll(core, 2.0, num_free=1).leases
    assert (again.request.request_id, again.may_resume) == ("long", True)
    core.report("r", [finished(again)], 3.0)
    totals = core.snapshot(3.0).totals
    assert (totals["preempted"], totals["requeued"], totals["completed"]) == (1, 1, 2)
    assert "lost" not in totals


def test_nobody_gives_way_for_who_is_gone_nor_once_it_has_ended(core: DispatchCore) -> None:
    long = lease_long(core)
    core.offer([urgent()], 0.5, client=None)
    core.abort(["new"])
    assert core.answer("r", 0.6).preempted == ()
    # it can be asked for the next one
    assert core.offer([urgent("next")], 0.7, client=None).exchanges
    core.report("r", [finished(long)], 0.8)
    reply = poll(core, 0.8, num_free=1)
    assert reply.preempted == ()
    assert [one.request.request_id for one in reply.leases] == ["next"]
    assert "preempted" not in core.snapshot(0.8).totals


def test_who_gives_way_is_not_asked_a_second_time_and_not_too_often(core: DispatchCore) -> None:
    lease = lease_long(core)
    for number in range(MOST_PREEMPTIONS):
        assert core.offer([urgent(f"n{number}")], 0.0, client=None).exchanges
        # it waits as good as already
        assert core.offer([urgent("other")], 0.0, client=None).exchanges == ()
        core.abort(["other"])
        reply = core.answer("r", 0.0)
        core.report("r", [returned(lease, number + 1), finished(reply.leases[0])], 0.0)
        (lease,) = poll(core, 0.0, num_free=1).leases
        assert lease.request.request_id == "long"
    assert core.offer([urgent("last")], 0.0, client=None).reason == "too_late"


def test_an_answer_that_is_lost_is_given_again(core: DispatchCore) -> None:
    long = lease_long(core)
    core.offer([urgent(slo_s=8.0)], 0.0, client=None)
    assert core.answer("r", 0.0).preempted == ("long",)
    # it never came: the replica goes on as before, and is asked again after some polls
    told = {}
    for tenths in range(1, 40):
        reply = poll(core, tenths / 10, long=tenths)
        if reply.preempted:
            told[tenths / 10] = reply.preempted
    assert list(told.values()) == [("long",)]
    assert CONFIG.poll_s < next(iter(told)) < 3.0
    core.report("r", [returned(long, 30)], 4.0)
    assert [one.request.request_id for one in poll(core, 4.0, num_free=1).leases] == ["new"]
    # it has given way once, however often that was said
    assert core.snapshot(4.0).totals["preempted"] == 1


def test_nobody_gives_way_where_there_is_room_by_then() -> None:
    core = make_core()
    core.register(registration(max_in_flight=2, max_batch=1), 0.0)
    for name in ("v1", "v2"):
        core.offer([image_request(name, slo_s=1000.0, num_steps=500)], 0.0, client=None)
    leases = {one.request.request_id: one for one in poll(core, 0.0, num_free=2).leases}
    [(victim, _)] = core.offer([urgent()], 0.5, client=None).exchanges
    other = "v1" if victim == "v2" else "v2"
    core.report("r", [finished(leases[other])], 0.6)
    reply = poll(core, 0.6, num_free=1, **{victim: 3})
    assert reply.preempted == ()
    assert [one.request.request_id for one in reply.leases] == ["new"]
    # and it counts as staying
    scene = core.queue.forecast_view([view_at(urgent("next"), 0.7)], 0.7)
    assert scene is not None
    assert [one.request_id for one in scene.queue] == ["next"]
    assert "preempted" not in core.snapshot(0.7).totals


def test_nobody_overtakes_who_waits_before_him(core: DispatchCore) -> None:
    lease_long(core)
    core.offer([image_request("aged", priority=-9, slo_s=0.1, num_steps=5)], 0.0, client=None)
    poll(core, 150.0, long=10)
    offer = core.offer([image_request("new", slo_s=5.0, num_steps=2)], 150.0, client=None)
    assert (offer.accepted, offer.exchanges) == (True, ())


def test_requests_that_have_ended_are_forgotten_before_they_would_have_aged(
    core: DispatchCore,
) -> None:
    for number in range(3000):
        name = f"r{number}"
        core.offer([image_request(name, slo_s=86400.0)], 0.0, client=None)
        core.abort([name])
    assert len(core._ledger._ageing._instants) < 1100


def test_a_replica_that_dies_meanwhile_takes_nobody_with_it(core: DispatchCore) -> None:
    lease_long(core)
    core.offer([urgent()], 0.5, client=None)
    core.unregister("r", 0.6)
    core.register(registration(max_in_flight=1, max_batch=1), 0.7)
    (lease,) = poll(core, 0.7, num_free=1).leases
    assert lease.request.request_id == "new"
    # the one that was to give way can be asked again later
    core.report("r", [finished(lease)], 0.9)
    assert [one.request.request_id for one in poll(core, 0.9, num_free=1).leases] == ["long"]
    assert core.offer([urgent("later")], 1.0, client=None).exchanges


def test_nobody_gives_way_where_it_is_switched_off() -> None:
    core = make_core(preemption=False)
    core.register(registration(max_in_flight=1, max_batch=1), 0.0)
    core.offer([image_request("long", slo_s=1000.0, num_steps=500)], 0.0, client=None)
    lease_long(core)
    assert core.offer([urgent()], 0.5, client=None).reason == "too_late"


def test_a_low_priority_waits_for_the_higher_ones_until_it_ages() -> None:
    core = make_core()
    core.register(registration(max_in_flight=1, max_batch=1), 0.0)
    core.offer([image_request("low", priority=-5, slo_s=20.0)], 0.0, client=None)
    served, number, now_s = [], 0, 0.0
    while "low" not in served:
        assert now_s <= 100.0
        core.offer([image_request(f"high-{number}", priority=5, slo_s=20.0)], now_s, client=None)
        (lease,) = poll(core, now_s, num_free=1).leases
        served.append(lease.request.request_id)
        assert (lease.request.request_id == "low") == (now_s >= 100.0)
        core.report("r", [finished(lease)], now_s + 9.0)
        number, now_s = number + 1, now_s + 10.0


@given(
    st.lists(st.tuples(st.integers(-2, 2), st.floats(1, 300)), min_size=1, max_size=12),
    st.lists(st.tuples(st.integers(-2, 5), st.floats(1, 60)), min_size=80, max_size=80),
)
def test_who_has_aged_waits_for_those_alone_who_were_there(
    first: list[tuple[int, float]], later: list[tuple[int, float]]
) -> None:
    """However much comes, at whatever priority: the bound on any request's wait."""
    core = make_core(preemption=True)
    core.register(registration(max_in_flight=1, max_batch=1), 0.0)
    deadlines_s = {}
    for number, (priority, slo_s) in enumerate(first):
        core.offer([image_request(f"f{number}", priority=priority, slo_s=slo_s)], 0.0, client=None)
        deadlines_s[f"f{number}"] = slo_s
    now_s, leased_at, present_at = 0.0, {}, {}
    for number, (priority, slo_s) in enumerate(later):
        for name, deadline_s in deadlines_s.items():
            if name not in present_at and now_s >= max(100.0, deadline_s):
                present_at[name] = core.num_waiting
        core.offer(
            [image_request(f"l{number}", priority=priority, slo_s=slo_s)], now_s, client=None
        )
        (lease,) = poll(core, now_s, num_free=1).leases
        leased_at.setdefault(lease.request.request_id, number)
        for name, num_present in present_at.items():
            if name not in leased_at:
                # every lease since it aged went to one of those who were there
                present_at[name] = num_present - 1
                assert num_present - 1 >= 1, name
        core.report("r", [finished(lease)], now_s + 4.0)
        now_s += 5.0


def test_ageing_comes_never_before_the_deadline_and_only_once() -> None:
    core = make_core()
    core.register(registration(max_in_flight=1, max_batch=1), 0.0)
    core.offer([image_request("patient", priority=-1, slo_s=500.0)], 0.0, client=None)
    for now_s in (99.0, 101.0, 499.0):
        core.offer([image_request(f"at-{now_s}", slo_s=10.0)], now_s, client=None)
        (lease,) = poll(core, now_s, num_free=1).leases
        assert lease.request.request_id != "patient"
        core.report("r", [finished(lease)], now_s)
    core.offer([image_request("last", priority=100)], 500.0, client=None)
    assert AGED_PRIORITY > 100
    (lease,) = poll(core, 500.0, num_free=1).leases
    assert lease.request.request_id == "patient"
