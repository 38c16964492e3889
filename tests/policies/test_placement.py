"""Placement by residents keeps to its bounds, and without residents it is the queue's order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_cluster.policies.admission.load import load_of, load_s
from ray_cluster.policies.leasing.ordering import queue_key
from ray_cluster.policies.leasing.placement import WINDOW, Placement, Residency, passed_over, place
from ray_cluster.policies.leasing.routing import (
    ReplicaTable,
    choose_leases,
    fair_level_s,
    soonest_first,
    works_of,
)
from ray_cluster.policies.types import (
    MOST_PASSES,
    ReplicaView,
    RequestView,
    lora_resident,
    template_resident,
)
from tests.fakes import STEP_COST, replica_view, request_view
from tests.policies.queues import table_of
from tests.policies.test_routing import replica_lists

NUM_REPLICAS = 3
HERE, THERE = 0, 1
NOW_S = 10.0


def old_prefix(queue: Sequence[RequestView], row: int, table: ReplicaTable) -> tuple[str, ...]:
    """What a replica leased before anything was resident anywhere: the first so many."""
    room = int(table.rooms[row])
    if len(queue) >= int(table.rooms.sum()):
        return tuple(one.request_id for one in queue[:room])
    works_s = works_of(queue[:], table)
    fair_s = fair_level_s(works_s, row, table)
    level_s, count = float(table.levels_s[row]), 0
    for work_s in works_s[:room, row].tolist():
        if level_s + work_s / 2 > fair_s:
            break
        level_s += work_s
        count += 1
    return tuple(one.request_id for one in queue[: min(count, len(queue))])


def residency_of(*residents: set[str]) -> Residency:
    """Replicas, the first one in row 0, with LoRAs by name."""
    holders: dict[str, set[int]] = {}
    for row, names in enumerate(residents):
        for name in names:
            holders.setdefault(lora_resident(name), set()).add(row)
    return Residency(STEP_COST, 2, holders)


def wants(request_id: str, *loras: str, **changes: float) -> RequestView:
    return request_view(request_id, loras=loras, **{"deadline_s": 1e6, **changes})


A_HERE_B_THERE = residency_of({"a"}, {"b"})

names = st.sampled_from("abcd")
requests = st.builds(
    request_view,
    num_steps=st.integers(1, 30),
    priority=st.sampled_from([0, 0, 0, 1]),
    deadline_s=st.floats(0.0, 400.0),
    width_px=st.sampled_from([200, 1000]),
    loras=st.lists(names, max_size=2, unique=True).map(tuple),
    num_passes=st.integers(0, MOST_PASSES + 1),
)
queues = st.lists(requests, max_size=30).map(
    lambda found: sorted(
        [replace(one, request_id=f"{n:02}") for n, one in enumerate(found)], key=queue_key
    )
)
residencies = st.lists(st.sets(names), min_size=NUM_REPLICAS, max_size=NUM_REPLICAS).map(
    lambda sets: residency_of(*sets)
)
rows = st.integers(0, NUM_REPLICAS - 1)


@given(queues, replica_lists, st.data())
def test_without_residents_or_add_ons_the_leases_are_the_first_ones(
    queue: list[RequestView], views: list[ReplicaView], data: st.DataObject
) -> None:
    table = table_of(views)
    row = data.draw(st.integers(0, len(views) - 1))
    plain = [replace(one, loras=()) for one in queue]
    # add-ons without residents, residents without add-ons, neither
    for waits, residency in (
        (queue, None),
        (queue, residency_of()),
        (plain, data.draw(residencies)),
        (plain, None),
    ):
        found = choose_leases(waits, row, replace(table, residency=residency), NOW_S)
        assert found == Placement(old_prefix(waits, row, table))


@given(queues, residencies, rows, st.integers(0, 6))
def test_every_pass_is_for_a_request_that_has_all_it_needs_here_and_harms_nobody(
    queue: list[RequestView], residency: Residency, row: int, num_leases: int
) -> None:
    placed = place(queue, num_leases, row, residency, NOW_S)
    # no slot stays empty, and nobody is leased twice
    assert len(placed.leased) == min(num_leases, len(queue)) == len(set(placed.leased))
    left, passed = {one.request_id: one for one in queue}, []
    for request_id in placed.leased:
        leased = left.pop(request_id)
        before = [one for one in left.values() if queue_key(one) < queue_key(leased)]
        for one in before:
            passed.append(one.request_id)
            assert one.priority == leased.priority
            assert one.num_passes < MOST_PASSES
            lacks = [need for need in one.needs if row not in residency.holders.get(need, ())]
            assert any(residency.holders.get(need) for need in lacks)
            slack_s = one.deadline_s - NOW_S - residency.remainder_s(one)
            assert slack_s >= residency.remainder_s(leased)
            left[one.request_id] = passed_over(one)
        assert len(before) < WINDOW
        if before:
            assert all(row in residency.holders[need] for need in leased.needs)
    assert placed.passed == tuple(passed)


@given(queues, residencies, rows, st.integers(0, 6))
def test_leases_at_once_are_those_one_after_the_other(
    queue: list[RequestView], residency: Residency, row: int, num_leases: int
) -> None:
    """So the forecast, which fills one slot at a time, answers as the dispatcher does."""
    placed = place(queue, num_leases, row, residency, NOW_S)
    left, leased, passed = list(queue), [], []
    for _ in range(min(num_leases, len(queue))):
        one = place(left, 1, row, residency, NOW_S)
        leased += one.leased
        passed += one.passed
        left = [
            passed_over(each) if each.request_id in one.passed else each
            for each in left
            if each.request_id not in one.leased
        ]
    assert (tuple(leased), tuple(passed)) == (placed.leased, placed.passed)


def test_a_request_whose_adapter_is_on_a_peer_is_passed_over_for_one_that_has_its_own_here() -> (
    None
):
    queue = [wants("1", "b"), wants("2", "b"), wants("3", "a")]
    assert place(queue, 1, HERE, A_HERE_B_THERE, NOW_S) == Placement(("3",), ("1", "2"))
    assert place(queue, 1, THERE, A_HERE_B_THERE, NOW_S) == Placement(("1",))
    # nobody is left who has more here: the queue's order holds
    assert place(queue, 2, HERE, A_HERE_B_THERE, NOW_S) == Placement(("3", "1"), ("1", "2"))
    assert place(queue[:2], 1, HERE, A_HERE_B_THERE, NOW_S) == Placement(("1",))


def test_a_template_counts_as_an_adapter_does() -> None:
    holders = {template_resident("x"): {HERE}, template_resident("y"): {THERE}}
    queue = [wants("1", template="y"), wants("2", template="x")]
    assert place(queue, 1, HERE, Residency(STEP_COST, 2, holders), NOW_S).leased == ("2",)


def test_what_has_to_be_fetched_anywhere_is_leased_in_its_turn() -> None:
    queue = [wants("1", "new"), wants("2", "a")]
    assert place(queue, 1, HERE, A_HERE_B_THERE, NOW_S) == Placement(("1",))
    # it blocks those that could be passed over before it
    queue = [wants("1", "b"), wants("2", "new"), wants("3", "a")]
    assert place(queue, 1, HERE, A_HERE_B_THERE, NOW_S) == Placement(("1",))


def test_who_needs_nothing_is_never_passed_over_and_may_come_before_who_is_at_home_elsewhere() -> (
    None
):
    queue = [wants("1"), wants("2", "a")]
    assert place(queue, 1, HERE, A_HERE_B_THERE, NOW_S) == Placement(("1",))
    queue = [wants("1", "b"), wants("2")]
    assert place(queue, 1, HERE, A_HERE_B_THERE, NOW_S) == Placement(("2",), ("1",))


@pytest.mark.parametrize(("late_s", "first"), [(0.0, "2"), (0.1, "1")])
def test_nobody_is_passed_over_who_could_not_begin_when_the_other_one_ends(
    late_s: float, first: str
) -> None:
    # 10 steps of 2.1 s in a batch of two, and 5 of the other
    deadline_s = NOW_S + 21.0 + 10.5 - late_s
    queue = [wants("1", "b", deadline_s=deadline_s), wants("2", "a", num_steps=5)]
    assert place(queue, 1, HERE, A_HERE_B_THERE, NOW_S).leased == (first,)


def test_nobody_is_passed_over_for_a_lower_priority() -> None:
    queue = [wants("1", "b", priority=1), wants("2", "a")]
    assert place(queue, 1, HERE, A_HERE_B_THERE, NOW_S).leased == ("1",)


def test_an_endless_flow_of_others_leases_first_no_more_than_the_bound() -> None:
    strange, num_before = wants("s", "b", arrival_s=-1.0), 0
    while True:
        queue = [strange, *(wants(f"{num_before}-{n}", "a") for n in range(3))]
        placed = place(queue, 1, HERE, A_HERE_B_THERE, NOW_S)
        if placed.leased == ("s",):
            break
        num_before += 1
        strange = passed_over(strange)
    assert num_before == MOST_PASSES


@given(queues, st.lists(rows, min_size=1, max_size=20), residencies, st.integers(1, 3))
def test_over_many_polls_nobody_sees_more_later_requests_go_first_than_the_bound(
    queue: list[RequestView], polls: list[int], residency: Residency, num_leases: int
) -> None:
    left = {one.request_id: replace(one, num_passes=0) for one in queue}
    overtaken: Counter[str] = Counter()
    turn = 0
    while left:
        placed = place(list(left.values()), num_leases, polls[turn % len(polls)], residency, NOW_S)
        for request_id in placed.passed:
            left[request_id] = passed_over(left[request_id])
        for request_id in placed.leased:
            leased = left.pop(request_id)
            overtaken.update(
                one.request_id for one in left.values() if queue_key(one) < queue_key(leased)
            )
        turn += 1
    assert turn == -(-len(queue) // num_leases)
    assert max(overtaken.values(), default=0) <= MOST_PASSES


def test_a_long_queue_is_looked_at_in_part() -> None:
    looked_at: list[int] = []

    class Watched(list[RequestView]):
        def __getitem__(self, part: object) -> object:  # type: ignore[override]
            found = super().__getitem__(part)  # type: ignore[call-overload]
            looked_at.append(len(found))
            return found

    far = [wants(f"{n}", "b") for n in range(1000)]
    near = [*far[: WINDOW - 1], wants("near", "a"), *far]
    for queue, leased in ((far, "0"), (near, "near"), ([*far[:WINDOW], *near], "0")):
        assert place(Watched(queue), 1, HERE, A_HERE_B_THERE, NOW_S).leased == (leased,)
    assert looked_at == [WINDOW] * 3


def test_a_remainder_is_a_full_batch_of_its_like() -> None:
    request = request_view(uses_guidance=True, steps_done=4, loras=("a",), controls=("c",))
    cost = replace(STEP_COST, decode_per_megapixel_s=0.5, control_share=0.4, lora_share=0.1)
    load = load_of(request)
    batch = load._replace(
        **{
            name: 3 * getattr(load, name)
            for name in ("step_pixels", "control_pixels", "lora_pixels")
        },
    )
    assert Residency(cost, 3).remainder_s(request) == pytest.approx(load_s(cost, batch))


def test_of_those_that_would_end_a_request_at_once_who_has_its_adapters_is_asked_first() -> None:
    views = [replica_view(f"{n}") for n in range(4)]
    views.append(replica_view("full", num_free=0))
    views.append(replica_view("soon", max_batch=4))
    holders = {lora_resident("a"): {1, 2, 4}, lora_resident("b"): {2, 4}}
    table = replace(table_of(views), residency=Residency(STEP_COST, 2, holders))
    assert list(soonest_first(wants("r", "a", "b"), table)) == [5, 2, 1, 0, 3]
    assert list(soonest_first(wants("r"), table)) == [5, 0, 1, 2, 3]
