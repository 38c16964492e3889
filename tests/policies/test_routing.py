from dataclasses import replace
from functools import partial
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_cluster.policies.leasing.ordering import queue_key
from ray_cluster.policies.leasing.routing import (
    choose_leases,
    count_leases,
    soonest_first,
    works_of,
)
from ray_cluster.policies.types import ReplicaView, RequestView, StepCost
from tests.fakes import STEP_COST, replica_view, request_view
from tests.policies.costs import share_s
from tests.policies.queues import table_of

SLOW = StepCost(fixed_s=1.0, per_megapixel_s=10.0)


def leases_of(
    waits: list[RequestView], replica: ReplicaView, peers: list[ReplicaView]
) -> tuple[str, ...]:
    """What a replica leases of requests in any order, beside its peers."""
    queue = sorted(waits, key=queue_key)
    # the one that polls is not always the first
    table = table_of([*peers[:1], replica, *peers[1:]])
    return choose_leases(queue, len(peers[:1]), table, 0.0).leased


def waiting(num: int, **changes: int) -> list[RequestView]:
    return [request_view(f"{index:02}", **changes) for index in range(num)]


def test_who_has_room_is_asked_by_when_it_would_end_the_request() -> None:
    views = [
        replica_view("late", leased_work_s=9999.0),
        replica_view("full", num_free=0),
        replica_view("slow", step_cost=SLOW),
        replica_view("soon", leased_work_s=1.0),
        replica_view("too", leased_work_s=1.0),
    ]
    asked = list(soonest_first(request_view("r"), table_of(views)))
    assert [views[row].replica_id for row in asked] == ["soon", "too", "slow", "late"]
    assert list(soonest_first(request_view("r"), table_of(views[1:2]))) == []


@given(st.lists(st.tuples(st.floats(0, 50), st.integers(0, 2)), min_size=1, max_size=6))
def test_who_is_asked_first_takes_the_request(states: list[tuple[float, int]]) -> None:
    views = [
        replica_view(f"{n}", leased_work_s=level, num_free=free)
        for n, (level, free) in enumerate(states)
    ]
    table, request = table_of(views), request_view("r")
    for row in list(soonest_first(request, table))[:1]:
        assert count_leases([request], row, table) == 1


def test_the_only_replica_takes_all_it_has_room_for_in_queue_order() -> None:
    requests = [*waiting(5), request_view("99", priority=1)]
    assert leases_of(requests, replica_view(), []) == ("99", "00", "01", "02")


def test_two_idle_replicas_take_half_each() -> None:
    assert leases_of(waiting(4), replica_view(), [replica_view("s")]) == ("00", "01")


def test_work_given_as_whole_seconds_counts_in_full() -> None:
    requests = waiting(4, num_steps=1)
    views = [replica_view(name, leased_work_s=0) for name in ("r", "s")]
    assert leases_of(requests, views[0], views[1:]) == ("00", "01")


def test_a_request_that_lies_by_less_than_half_above_the_fair_level_is_taken() -> None:
    # dealt out by steps: 2 and 9 here, 10 there; 2 + 10 is over 11, but not by half of 10
    requests = [request_view(f"{n}", num_steps=s) for n, s in enumerate((2, 10, 9))]
    assert leases_of(requests, replica_view(), [replica_view("s")]) == ("0", "1")


def test_of_an_odd_number_the_one_that_polls_first_takes_one_more() -> None:
    assert len(leases_of(waiting(3), replica_view(), [replica_view("s")])) == 2
    assert len(leases_of(waiting(1), replica_view(), [replica_view("s")])) == 1


def test_a_full_peer_blocks_nothing() -> None:
    full = replica_view("s", num_free=4, num_leased=4)
    drained = replica_view("t", num_free=0)
    assert len(leases_of(waiting(4), replica_view(), [full, drained])) == 4


def test_a_slow_peer_gets_its_small_share_and_leaves_the_rest() -> None:
    slow = replica_view("s", step_cost=SLOW)
    fast = replica_view("f", max_in_flight=20, num_free=20)
    assert len(leases_of(waiting(11), fast, [slow])) == 10
    assert len(leases_of(waiting(11), slow, [fast])) == 1


def test_a_slow_replica_leaves_a_request_to_a_fast_peer_with_room() -> None:
    slow, fast = replica_view("s", step_cost=SLOW), replica_view("f")
    assert leases_of(waiting(1), slow, [fast]) == ()
    assert leases_of(waiting(1), fast, [slow]) == ("00",)


def test_a_busy_replica_leaves_work_to_an_idle_peer() -> None:
    busy = replica_view("b", num_leased=2, num_free=2, leased_work_s=50.0)
    assert leases_of(waiting(4), busy, [replica_view("i")]) == ()


def test_a_share_counts_work_and_not_requests() -> None:
    requests = [request_view("00", num_steps=30), *waiting(4)[1:]]
    assert leases_of(requests, replica_view(), [replica_view("s")]) == ("00",)


@pytest.mark.parametrize("num_free", [0, 1, 3])
def test_never_more_than_there_is_room_for(num_free: int) -> None:
    assert len(leases_of(waiting(9), replica_view(num_free=num_free), [])) == num_free


def test_where_enough_waits_for_every_place_each_replica_fills_its_own() -> None:
    slow, fast = replica_view("s", step_cost=SLOW), replica_view("f", num_free=3)
    assert len(leases_of(waiting(7), slow, [fast])) == 4
    assert len(leases_of(waiting(7), fast, [slow])) == 3
    # one fewer, and the slow one leaves its last place empty rather than a fast one
    assert len(leases_of(waiting(6), slow, [fast])) < 4


def test_requests_without_any_work_left_are_taken_too() -> None:
    assert len(leases_of(waiting(3, num_steps=0), replica_view(), [replica_view("s")])) == 3


terms_s = st.sampled_from([0.0, 0.001, 0.1, 3.0])
shares = st.sampled_from([0.0, 0.25])
costs = st.builds(
    StepCost,
    terms_s,
    terms_s,
    terms_s,
    per_squared_megapixel_s=terms_s,
    per_further_size_s=terms_s,
    control_share=shares,
    lora_share=shares,
    spared_share=shares,
)
replica_lists = st.lists(
    st.builds(
        lambda cost, batch, leased, free, work: replica_view(
            step_cost=cost, max_batch=batch, num_leased=leased, num_free=free, leased_work_s=work
        ),
        costs,
        st.integers(1, 4),
        st.integers(0, 4),
        st.integers(0, 5),
        st.floats(0, 100),
    ),
    min_size=1,
    max_size=4,
).map(lambda views: [replace(v, replica_id=f"r{i}") for i, v in enumerate(views)])
queues = st.lists(
    st.builds(
        partial(request_view, "00"),
        num_steps=st.integers(0, 30),
        priority=st.integers(0, 1),
        width_px=st.sampled_from([64, 1000]),
        uses_guidance=st.booleans(),
        num_previews=st.integers(0, 3),
        controls=st.sampled_from([(), ("c",)]),
        loras=st.sampled_from([(), ("a", "b")]),
        template=st.sampled_from([None, "t"]),
        mask_ratio=st.sampled_from([0.1, 1.0]),
    ),
    max_size=12,
).map(lambda views: [replace(v, request_id=f"{i:02}") for i, v in enumerate(views)])


@given(queues, replica_lists)
def test_the_work_of_all_on_all_is_each_ones_share(
    queue: list[RequestView], views: list[ReplicaView]
) -> None:
    works_s = works_of(queue, table_of(views))
    assert works_s.shape == (len(queue), len(views))
    for (row, request), (column, view) in product(enumerate(queue), enumerate(views)):
        share = share_s(view.step_cost, request, view.max_batch)
        assert works_s[row, column] == pytest.approx(share, rel=1e-12)


def after(view: ReplicaView, taken: list[RequestView]) -> ReplicaView:
    work_s = sum(share_s(view.step_cost, one, view.max_batch) for one in taken)
    return replace(
        view,
        num_leased=view.num_leased + len(taken),
        num_free=view.num_free - len(taken),
        leased_work_s=view.leased_work_s + work_s,
    )


@given(queues, replica_lists, st.randoms(use_true_random=False))
def test_polls_in_any_order_hand_out_the_queue_in_order_until_nobody_has_room(
    queue: list[RequestView], views: list[ReplicaView], random: object
) -> None:
    left = sorted(queue, key=queue_key)
    idle_rounds = 0
    while idle_rounds < 1:
        shuffled = list(range(len(views)))
        random.shuffle(shuffled)  # type: ignore[attr-defined]
        before = len(left)
        for index in shuffled:
            peers = [view for other, view in enumerate(views) if other != index]
            taken = leases_of(left, views[index], peers)
            assert len(taken) <= views[index].room
            assert taken == tuple(one.request_id for one in left[: len(taken)])
            views[index] = after(views[index], left[: len(taken)])
            left = left[len(taken) :]
        idle_rounds += len(left) == before
    assert not left or all(view.room == 0 for view in views)


@given(queues.filter(lambda q: len(q) <= 6), st.integers(2, 3), st.integers(0, 2))
def test_idle_equal_replicas_end_within_one_request_of_the_best_split(
    queue: list[RequestView], num_replicas: int, first: int
) -> None:
    views = [replica_view(f"r{i}", max_in_flight=9, num_free=9) for i in range(num_replicas)]
    work_s = [share_s(STEP_COST, one, 2) for one in queue]
    best_s = min(
        max(
            sum(w for w, where in zip(work_s, split, strict=True) if where == i)
            for i in range(num_replicas)
        )
        for split in product(range(num_replicas), repeat=len(queue))
    )
    left = sorted(queue, key=queue_key)
    # in each turn of all of them, whoever would end the first request leases it
    for turn in range(num_replicas * len(queue)):
        index = (first + turn) % num_replicas
        peers = [view for other, view in enumerate(views) if other != index]
        taken = leases_of(left, views[index], peers)
        views[index] = after(views[index], left[: len(taken)])
        left = left[len(taken) :]
    assert not left
    assert max(view.leased_work_s for view in views) <= best_s + max(work_s, default=0) + 1e-6
