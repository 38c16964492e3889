"""A merged replica leases its set alone, within bounds, and learns when others wait for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from ray_cluster.policies.leasing.ordering import queue_key
from ray_cluster.policies.leasing.placement import (
    WINDOW,
    MergedReplica,
    Placement,
    Residency,
    place_merged,
)
from ray_cluster.policies.leasing.routing import ReplicaTable, choose_leases, soonest_first
from ray_cluster.policies.types import MOST_PASSES, RequestView
from tests.fakes import STEP_COST, replica_view, request_view
from tests.policies.queues import table_of

NOW_S = 0.0
RESIDENCY = Residency(STEP_COST, 4, {"lora:a": [0]})


def waiting(*sets: str, **changes: object) -> list[RequestView]:
    """Requests in the queue's order."""
    return [
        request_view(f"r{n}", lora_set=one, deadline_s=1e6 + n, **changes)
        for n, one in enumerate(sets)
    ]


def placed(
    queue: Sequence[RequestView], peers: Mapping[str, int], *, room: int = 2, num: int = 2
) -> Placement:
    return place_merged(queue, num, MergedReplica("a", room, peers), RESIDENCY, NOW_S)


def test_it_leases_its_set_alone_and_counts_who_is_passed_over() -> None:
    found = placed(waiting("b", "a", "", "a", "a"), {"": 1})
    assert found.leased == ("r1", "r3")
    assert sorted(found.passed) == ["r0", "r0", "r2"]
    # full, and the others have somebody who takes them
    assert not found.others_wait


def test_alone_in_its_pool_it_learns_of_whoever_waits() -> None:
    assert placed(waiting("a", "b"), {}).others_wait
    assert placed(waiting("a", ""), {"c": 4}).others_wait
    assert not placed(waiting("a", "a"), {}).others_wait
    # its peer has just that set
    assert not placed(waiting("a", "b"), {"b": 1}).others_wait


def test_free_slots_do_not_stay_empty_while_others_wait() -> None:
    queue = waiting("b")
    assert not placed(queue, {"": 1}).others_wait
    assert placed(queue, {"": 0}).others_wait
    # full with its own set, it leaves them to the peer, who has slots later
    assert not placed(waiting("a", "a", "b"), {"": 0}).others_wait


def test_who_was_passed_over_often_is_not_passed_over_again() -> None:
    fresh = waiting("b", *["a"] * (MOST_PASSES + 2))
    found = placed(fresh, {"": 0}, room=9, num=9)
    assert found.leased == tuple(f"r{n + 1}" for n in range(MOST_PASSES))
    assert found.others_wait
    tired = [replace(fresh[0], num_passes=MOST_PASSES), *fresh[1:]]
    assert placed(tired, {"": 5}) == Placement(others_wait=True)


def test_an_urgent_request_and_a_late_one_are_not_passed_over() -> None:
    [other, own] = waiting("b", "a")
    assert placed([replace(other, priority=1), own], {"": 5}) == Placement(others_wait=True)
    late = replace(other, deadline_s=NOW_S + 1.5 * RESIDENCY.remainder_s(other))
    assert placed([late, own], {"": 5}) == Placement(others_wait=True)
    soon = replace(other, deadline_s=NOW_S + 2.5 * RESIDENCY.remainder_s(other))
    assert placed([soon, own], {"": 5}).leased == ("r1",)


SETS = st.sampled_from(("", "a", "b"))


@given(
    queue=st.lists(st.tuples(SETS, st.integers(0, 1), st.integers(0, MOST_PASSES)), max_size=12),
    replicas=st.lists(st.tuples(SETS, st.integers(0, 4)), min_size=1, max_size=4),
)
def test_any_queue_ends_though_replicas_are_merged(
    queue: list[tuple[str, int, int]], replicas: list[tuple[str, int]]
) -> None:
    """Replicas that poll in turns, and give way when they are told to, leave no slot empty."""
    views = sorted(
        (
            request_view(f"r{n}", lora_set=one, priority=priority, num_passes=passes)
            for n, (one, priority, passes) in enumerate(queue)
        ),
        key=queue_key,
    )
    merged = [one for one, _ in replicas]
    rooms = [room for _, room in replicas]
    given_to: dict[str, int] = {}
    for _ in range(2 * len(replicas)):
        for row in range(len(replicas)):
            if rooms[row] == 0:
                continue
            base = table_of(
                [
                    replica_view(f"p{n}", max_in_flight=9, num_free=room)
                    for n, room in enumerate(rooms)
                ]
            )
            sets = tuple(merged) if any(merged) else ()
            table = ReplicaTable(base.levels_s, base.rooms, base.prices_s, RESIDENCY, sets)
            found = choose_leases(views, row, table, NOW_S)
            by_id = {one.request_id: one for one in views}
            assert len(found.leased) <= rooms[row]
            for one in found.leased:
                assert merged[row] in ("", by_id[one].lora_set)
                given_to[one] = row
            passed = set(found.passed)
            assert all(by_id[one].num_passes < MOST_PASSES for one in passed if merged[row])
            rooms[row] -= len(found.leased)
            views = [
                replace(one, num_passes=one.num_passes + found.passed.count(one.request_id))
                for one in views
                if one.request_id not in found.leased
            ]
            assert all(one.num_passes <= MOST_PASSES for one in views)
            if found.others_wait:
                assert merged[row]
                merged[row] = ""
    assert not views or not any(rooms)
    assert len(given_to) + len(views) == len(queue)


def test_a_replica_that_is_not_merged_does_not_count_on_those_that_are() -> None:
    views = [replica_view("m", num_free=8, max_in_flight=8), replica_view("u", num_free=2)]
    base = table_of(views)
    table = replace(base, residency=RESIDENCY, merged=("a", ""))
    queue = waiting("b", "b")
    assert choose_leases(queue, 1, table, NOW_S).leased == ("r0", "r1")
    # without the merge they would be dealt out
    assert len(choose_leases(queue, 1, replace(table, merged=()), NOW_S).leased) < 2


def test_merged_replicas_are_offered_last_what_they_cannot_make() -> None:
    views = [replica_view("m"), replica_view("u", leased_work_s=100.0), replica_view("n")]
    table = replace(table_of(views), residency=RESIDENCY, merged=("a", "", "b"))
    [other, own] = waiting("", "a")
    assert list(soonest_first(other, table)) == [1, 0, 2]
    assert list(soonest_first(own, table)) == [0, 1, 2]


def test_a_long_queue_is_looked_through_to_a_bound() -> None:
    queue = waiting(*["b"] * (WINDOW + 4), "a")
    assert placed(queue, {"": 5}).leased == ()
