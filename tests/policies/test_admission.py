import heapq
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_cluster.policies.admission.admission import (
    ClientView,
    admit,
    drain_s,
    predict_s,
)
from ray_cluster.policies.admission.fluid import PoolView, pool_of
from ray_cluster.policies.costs.cost_model import StepWork, step_s
from ray_cluster.policies.leasing.ordering import queue_key
from ray_cluster.policies.types import RequestView, StepCost
from tests.fakes import STEP_COST, replica_view, request_view
from tests.policies.costs import alone_s, batch_s, share_s
from tests.policies.queues import BATCH_S, SHARE_S, ListQueue, queue_of


class StartingQueue(ListQueue):
    """A queue whose model's first replica is there after 12 s."""

    def pool(self, model: str) -> PoolView | None:
        found = super().pool(model)
        return None if found is None else replace(found, starts_in_s=12.0)


def group_of(num: int, **changes: float) -> list[RequestView]:
    return [request_view(f"new{index}", **changes) for index in range(num)]


def test_an_idle_replica_takes_a_request_for_its_own_duration() -> None:
    assert admit(group_of(1), queue_of()).predicted_s == pytest.approx(11.0)


def test_who_finds_no_slot_waits_for_departures_at_the_pace_of_full_batches() -> None:
    # two of the six step at once: five must leave before there is a slot
    queue = queue_of(num_waiting=4, num_in_progress=2)
    assert admit(group_of(1), queue).predicted_s == pytest.approx(5 * SHARE_S + BATCH_S)
    # of two replicas with two slots each, three must leave, and they leave twice as fast
    twice = replace(queue, replicas=(*queue.replicas, replica_view("s")))
    assert admit(group_of(1), twice).predicted_s == pytest.approx(3 * SHARE_S / 2 + BATCH_S)


def test_who_finds_a_slot_takes_the_time_of_its_batch_and_no_more() -> None:
    replicas = tuple(replica_view(name, max_batch=4) for name in ("r", "s"))
    for num_ahead, num_in_batch in ((0, 1), (1, 1), (2, 2), (3, 2), (6, 4), (7, 4)):
        queue = queue_of(num_in_progress=num_ahead, replicas=replicas)
        wanted_s = batch_s(STEP_COST, request_view(), num_in_batch)
        assert admit(group_of(1), queue).predicted_s == pytest.approx(wanted_s)


def test_the_rest_of_the_group_is_ahead_of_its_last() -> None:
    assert admit(group_of(3), queue_of()).predicted_s == pytest.approx(SHARE_S + BATCH_S)


def test_what_orders_after_the_group_does_not_delay_it() -> None:
    queue = queue_of(num_waiting=6)
    assert admit(group_of(1, priority=1), queue).predicted_s == pytest.approx(11.0)


def test_other_models_neither_delay_the_group_nor_fill_its_queue() -> None:
    queue = queue_of(max_waiting=4)
    others = [request_view(f"o{index}", model="other") for index in range(4)]
    replicas = (*queue.replicas, replica_view("o", model="other", num_free=0))
    assert admit(group_of(1), replace(queue, in_progress=others)).predicted_s == pytest.approx(11.0)
    full = replace(queue, waits=others, replicas=replicas)
    assert admit(group_of(1), full).predicted_s == pytest.approx(11.0)
    assert admit([request_view(model="other")], full).reason == "queue_full"


def test_all_of_a_group_is_refused_when_one_does_not_fit() -> None:
    offer = admit(group_of(2), queue_of(num_waiting=7))
    assert (offer.accepted, offer.reason) == (False, "queue_full")
    assert admit(group_of(1), queue_of(num_waiting=7)).accepted


def test_the_wait_is_that_of_the_departures_that_make_room() -> None:
    full = queue_of(num_waiting=8, num_in_progress=4)
    waits_s = [admit(group_of(num), full).retry_after_s for num in range(1, 5)]
    assert waits_s == pytest.approx([SHARE_S, 2 * SHARE_S, 3 * SHARE_S, 4 * SHARE_S])


def test_departures_are_those_of_one_model() -> None:
    replicas = (replica_view(num_free=0), replica_view("o", model="other", num_free=0))
    waits = [request_view(f"{model}{i}", model=model) for model in ("m", "other") for i in range(2)]
    queue = replace(queue_of(replicas=replicas, max_waiting=4), waits=waits)
    found = [drain_s(num, "m", queue) for num in range(1, 4)]
    assert found == pytest.approx([SHARE_S, 2 * SHARE_S, math.inf])


def test_there_is_no_wait_when_a_replica_is_about_to_take_from_the_queue() -> None:
    queue = queue_of(num_waiting=8, replicas=(replica_view(num_free=2),))
    assert admit(group_of(2), queue).retry_after_s == 0
    assert admit(group_of(3), queue).retry_after_s > 0


def test_a_group_above_the_bound_never_fits() -> None:
    offer = admit(group_of(9), queue_of())
    assert (offer.reason, offer.retry_after_s) == ("never_fits", math.inf)


def test_a_model_without_any_replica_is_not_ready_or_unknown() -> None:
    assert admit([request_view(model="cold")], queue_of()).reason == "model_not_ready"
    assert admit([request_view(model="what")], queue_of()).reason == "unknown_model"


def test_a_queue_of_a_model_that_nobody_serves_never_drains() -> None:
    queue = replace(queue_of(), waits=[request_view(model="gone")])
    assert drain_s(1, "gone", queue) == math.inf


def test_nothing_leaves_the_queue_before_a_first_replica_is_there() -> None:
    full = queue_of(num_waiting=8, num_in_progress=4)
    starting = StartingQueue(full.waits, full.in_progress, full.replicas, full.max_waiting)
    assert drain_s(2, "m", starting) == pytest.approx(12.0 + drain_s(2, "m", full))


def test_an_empty_group_is_accepted() -> None:
    assert admit([], queue_of()).accepted


steps = st.integers(0, 20)
loads = st.lists(st.tuples(steps, st.integers(-1, 1)), max_size=12)


def requests_of(prefix: str, load: list[tuple[int, int]]) -> list[RequestView]:
    return [
        request_view(f"{prefix}{index}", num_steps=num_steps, priority=priority)
        for index, (num_steps, priority) in enumerate(load)
    ]


@given(loads, loads, st.integers(1, 4), st.integers(1, 3))
def test_the_prediction_is_monotone_in_load_and_in_replicas(
    waiting: list[tuple[int, int]], running: list[tuple[int, int]], num: int, num_replicas: int
) -> None:
    replicas = [replica_view(f"r{index}") for index in range(num_replicas)]
    queue = ListQueue(requests_of("w", waiting), requests_of("p", running), replicas, 100)
    here_s = predict_s(group_of(num), queue, 0.0)
    assert predict_s(group_of(num + 1), queue, 0.0) >= here_s
    for more in (
        replace(queue, waits=[*queue.waits, request_view("x", arrival_s=-1.0)]),
        replace(queue, in_progress=[*queue.in_progress, request_view("x")]),
    ):
        assert predict_s(group_of(num), more, 0.0) >= here_s
    more = replace(queue, replicas=[*replicas, replica_view("another")])
    assert predict_s(group_of(num), more, 0.0) <= here_s + 1e-9


@given(loads.filter(bool), loads, st.integers(0, 3))
def test_the_wait_is_monotone_in_what_must_leave(
    waiting: list[tuple[int, int]], running: list[tuple[int, int]], num_free: int
) -> None:
    replica = replica_view(num_free=num_free)
    queue = ListQueue(requests_of("w", waiting), requests_of("p", running), [replica], 100)
    waits_s = [drain_s(num, "m", queue) for num in range(1, len(waiting) + 1)]
    assert waits_s == sorted(waits_s)
    assert all(wait_s >= 0 for wait_s in waits_s)


@given(
    st.lists(
        st.tuples(
            st.builds(StepCost, *[st.floats(0.01, 1), *[st.floats(0.1, 9)] * 3]),
            st.integers(1, 8),
        ),
        min_size=1,
    ),
    st.integers(1, 20),
)
def test_the_pooled_cost_is_at_most_optimistic_and_exact_for_equal_replicas(
    costs: list[tuple[StepCost, int]], num_steps: int
) -> None:
    request = request_view(num_steps=num_steps)
    replicas = [
        replica_view(f"r{i}", step_cost=cost, max_batch=batch)
        for i, (cost, batch) in enumerate(costs)
    ]
    shares_s = [share_s(one.step_cost, request, one.max_batch) for one in replicas]
    true_s = 1 / sum(1 / one for one in shares_s)
    assert alone_s(pool_of(replicas).shared_cost, request) <= true_s * (1 + 1e-9)
    alike = pool_of([replicas[0]] * 3)
    assert alone_s(alike.shared_cost, request) == pytest.approx(shares_s[0] / 3)
    assert alone_s(alike.slowest_cost, request) == alone_s(replicas[0].step_cost, request)
    assert (alike.num_replicas, alike.num_slots) == (3, 3 * replicas[0].max_batch)


@given(st.integers(1, 9), st.sampled_from([64, 500, 2000]), st.booleans())
def test_what_waits_ahead_counts_with_all_its_terms(
    num_ahead: int, side: int, uses_guidance: bool
) -> None:
    cost = StepCost(0.1, 1.0, 0.5, per_squared_megapixel_s=3.0)
    changes = {"width_px": side, "height_px": side, "uses_guidance": uses_guidance}
    ahead = [request_view(f"{i:02}", **changes) for i in range(num_ahead)]
    last = request_view("99", **changes)
    replica = replica_view(step_cost=cost, max_batch=1)
    predicted_s = predict_s([last], ListQueue(ahead, [], [replica], 100), 0.0)
    # one slot: all of them must leave it first
    assert predicted_s == pytest.approx((num_ahead + 1) * alone_s(cost, last))


@given(
    st.lists(st.integers(1, 20), min_size=1, max_size=40),
    st.integers(1, 3),
    st.integers(1, 6),
)
def test_the_prediction_is_within_two_batches_of_a_replay(
    all_steps: list[int], num_replicas: int, max_batch: int
) -> None:
    replicas = [replica_view(f"r{i}", max_batch=max_batch) for i in range(num_replicas)]
    group = [
        request_view(f"{i:02}", num_steps=num, arrival_s=float(i))
        for i, num in enumerate(all_steps)
    ]
    predicted_s = predict_s(group[-1:], ListQueue(group[:-1], [], replicas, 100), 0.0)
    replayed_s = replay(group, num_replicas, max_batch)
    longest_s = max(batch_s(STEP_COST, request, max_batch) for request in group)
    assert abs(predicted_s - replayed_s) <= 2 * longest_s


def replay(requests: list[RequestView], num_replicas: int, max_batch: int) -> float:
    """When the last request is done if replicas step batches and refill them in queue order."""
    queue = sorted(requests, key=queue_key)
    last = queue[-1].request_id
    boundaries: list[tuple[float, int]] = [(0.0, index) for index in range(num_replicas)]
    batches: list[list[list[str | int]]] = [[] for _ in range(num_replicas)]
    while True:
        now_s, index = heapq.heappop(boundaries)
        if [last, 0] in batches[index]:
            return now_s
        batch = [row for row in batches[index] if row[1]]
        # deal out one at a time, as the fair share does while replicas have room
        while queue and len(batch) < max_batch:
            if batch and any(t <= now_s and not batches[i] for t, i in boundaries):
                break
            request = queue.pop(0)
            batch.append([request.request_id, request.num_steps])
        batches[index] = batch
        if batch:
            for row in batch:
                row[1] = int(row[1]) - 1
            heapq.heappush(
                boundaries, (now_s + step_s(STEP_COST, StepWork(len(batch), len(batch))), index)
            )


def test_a_client_waits_until_enough_of_its_own_have_ended() -> None:
    queue = queue_of(num_waiting=2, num_in_progress=2)
    in_flight = [*queue.in_progress, *queue.waits]
    client = ClientView(in_flight, max_in_flight=4)
    one, two = (admit(group_of(num), queue, client) for num in (1, 2))
    assert {one.reason, two.reason} == {"client_limit"}
    assert one.limit == 4
    # what is in progress ends before what waits
    assert 0 < one.retry_after_s <= two.retry_after_s < predict_s(group_of(1), queue, 0.0)
    assert admit(group_of(1), queue, ClientView(in_flight, max_in_flight=5)).accepted
    assert admit(group_of(1), queue, ClientView([], max_in_flight=1)).accepted
