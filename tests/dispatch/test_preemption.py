"""Places that change hands at the dispatcher, and requests that have waited too long."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_cluster.config import DispatchConfig, LimitsConfig
from ray_cluster.dispatch.core import DispatchCore
from ray_cluster.leases import Lease, PollReply, Returned
from ray_cluster.policies.ordering import AGED_PRIORITY
from tests.fakes import finished, image_request, poll_of, registration

CONFIG = DispatchConfig(poll_s=1.0, replica_timeout_s=6.0, starvation_s=100.0)


def make_core(**changes: Any) -> DispatchCore:
    config = CONFIG.model_copy(update=changes)
    return DispatchCore(config=config, limits=LimitsConfig(max_queued_images=1000), epoch=1)


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
    [progress] = core.progress(["long"], 1.3, predicts=False)
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
    for number in range(2):
        assert core.offer([urgent(f"n{number}")], 0.0, client=None).exchanges
        # it waits as good as already
        assert core.offer([urgent("other")], 0.0, client=None).exchanges == ()
        core.abort(["other"])
        reply = core.answer("r", 0.0)
        core.report("r", [returned(lease, number + 1), finished(reply.leases[0])], 0.0)
        (lease,) = poll(core, 0.0, num_free=1).leases
        assert lease.request.request_id == "long"
    assert core.offer([urgent("third")], 0.0, client=None).reason == "too_late"


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


@settings(max_examples=60, deadline=None)
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
