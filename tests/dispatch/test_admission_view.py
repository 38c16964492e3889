"""What admission sees of the core's books is what a recount finds, whatever happens to them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis.stateful import invariant

from ray_cluster.config.sections.cell_wide import DispatchConfig, LimitsConfig
from ray_cluster.dispatch.core import DispatchCore
from ray_cluster.policies.admission.forecast import MOST_REPLICAS, MOST_REQUESTS, forecast_s
from ray_cluster.policies.types import DegreeCost, GroupCost, StepCost
from tests.dispatch.test_machine import DispatchMachine
from tests.fakes import STEP_COST, image_request, poll_of, registration
from tests.policies.queues import ListQueue


class CountingMachine(DispatchMachine):
    """The random lives of :class:`DispatchMachine`, with a recount after every turn."""

    @invariant()
    def the_sums_that_admission_sees_are_those_of_a_recount(self) -> None:
        if not hasattr(self, "core"):
            return
        records = {
            one.view.request_id: one.view for r in self.core.replicas for one in r.held.values()
        }
        views = [
            self.requests[one].view(arrival_s=self.keys[one][2], deadline_s=self.keys[one][1])
            for one in self.waiting
        ]
        # what came back to the queue keeps the steps that are in the state store
        progress = self.core.progress([one.request_id for one in views], 0.0, predicts="no")
        views = [
            replace(one, steps_done=each.steps_done, num_passes=self.passes[one.request_id])
            for one, each in zip(views, progress, strict=True)
            if each is not None
        ]
        truth = ListQueue(
            waits=views,
            in_progress=list(records.values()),
            replicas=[one.view() for one in self.core.replicas],
        )
        queue = self.core.queue
        assert sorted(queue.waiting_models) == sorted({one.model for one in views})
        newcomers = [
            image_request("new", model).view(arrival_s=1e9, deadline_s=50.0) for model in "mn"
        ]
        for request in (*views, *records.values(), *newcomers):
            assert queue.ahead_of(request) == truth.ahead_of(request)
            assert queue.is_waiting(request) == truth.is_waiting(request)
        for model in "mn":
            assert queue.waiting(model) == truth.waiting(model)
            assert queue.num_free(model) == truth.num_free(model)
            live = truth.pool(model)
            assert queue.pool(model) == live or live is None


def test_so_many_requests_and_replicas_are_followed_and_no_more() -> None:
    limits = LimitsConfig(max_queued_images=1000)
    core = DispatchCore(config=DispatchConfig(), limits=limits, epoch=1)
    new = [image_request("new").view(arrival_s=0.0, deadline_s=9.0)]
    for number in range(MOST_REPLICAS):
        core.register(registration(f"r{number}"), 0.0)
    scene = core.queue.forecast_view(new, 0.0)
    assert scene is not None
    assert len(scene.replicas) == MOST_REPLICAS
    core.register(registration("one more"), 0.0)
    assert core.queue.forecast_view(new, 0.0) is None
    # both together would be too much for one decision
    core = DispatchCore(config=DispatchConfig(), limits=limits, epoch=1)
    for number in range(4):
        core.register(registration(f"r{number}"), 0.0)
    for number in range(MOST_REQUESTS):
        assert core.queue.forecast_view(new, 0.0) is not None
        core.offer([image_request(f"w{number}")], 0.0, client=None)
    assert core.queue.forecast_view(new, 0.0) is not None
    core.offer([image_request("one more")], 0.0, client=None)
    assert core.queue.forecast_view(new, 0.0) is None


TestCountingMachine = CountingMachine.TestCase
TestCountingMachine.settings = settings(stateful_step_count=40)


def test_a_pool_is_made_anew_when_a_replicas_cost_has_moved_by_more_than_two_percent() -> None:
    core = DispatchCore(config=DispatchConfig(), limits=LimitsConfig(), epoch=1)
    core.register(registration("r"), 0.0)
    core.register(registration("s"), 0.0)
    first = core.queue.pool("m")
    for factor, is_same in ((1.01, True), (1.03, False)):
        cost = replace(STEP_COST, fixed_s=STEP_COST.fixed_s * factor)
        core.poll(replace(poll_of("r"), step_cost=cost), 1.0)
        assert (core.queue.pool("m") is first) == is_same
    pool = core.queue.pool("m")
    assert pool is not None
    assert pool.slowest_cost.fixed_s == STEP_COST.fixed_s * 1.03


def test_the_last_replica_of_a_model_is_remembered_and_a_new_one_takes_its_place() -> None:
    core = DispatchCore(config=DispatchConfig(), limits=LimitsConfig(), epoch=1)
    assert core.queue.pool("m") is None
    for replica_id in ("r", "s"):
        core.register(registration(replica_id), 0.0)
    core.unregister("r", 1.0)
    alone = core.queue.pool("m")
    assert alone is not None
    assert alone.num_replicas == 1
    core.unregister("s", 1.0)
    assert core.queue.pool("m") == alone
    core.register(registration("t", max_batch=4), 2.0)
    pool = core.queue.pool("m")
    assert pool is not None
    assert (pool.num_replicas, pool.num_slots) == (1, 4)


def test_a_group_is_forecast_by_what_its_ranks_cost_as_it_last_reported() -> None:
    core = DispatchCore(config=DispatchConfig(), limits=LimitsConfig(), epoch=1)
    core.register(replace(registration("g"), group=group_of({1: 1.0, 2: 0.6})), 0.0)
    requests = [image_request(one) for one in "ab"]
    views = [one.view(arrival_s=0.0, deadline_s=99.0) for one in requests]

    def spans_s(num: int) -> list[float]:
        view = core.queue.forecast_view(views[:num], 0.0)
        assert view is not None
        ends_s = forecast_s(replace(view, queue=views[:num]))
        return [ends_s[one.request_id] - view.encode_s for one in views[:num]]

    assert spans_s(1) == pytest.approx([6.0])
    assert spans_s(2) == pytest.approx([10.0, 10.0])
    faster = group_of({1: 0.5, 2: 0.3})
    seats = {"img-1": (0, 1)}
    for poll in (replace(poll_of("g"), group=faster, seats=seats), poll_of("g")):
        core.poll(poll, 0.0)
        assert spans_s(1) == pytest.approx([3.0])
        assert [dict(one.seats) for one in core.replicas] == [poll.seats]
    assert spans_s(2) == pytest.approx([5.0, 5.0])


def group_of(steps_s: Mapping[int, float]) -> GroupCost:
    """Two ranks by their seconds of a step, whatever its size."""
    costs = tuple(DegreeCost(degree, StepCost(one, 0.0)) for degree, one in steps_s.items())
    return GroupCost(2, costs, token_px=16)
