"""Rows stay those of their replicas, however these come and go."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_cluster.dispatch.workers.replica_rows import ReplicaRows
from ray_cluster.policies.leasing.routing import shared_prices
from ray_cluster.policies.types import ReplicaView, StepCost
from tests.fakes import replica_view

views = st.builds(
    lambda index, cost, leased, work, residents: replica_view(
        f"r{index}",
        step_cost=cost,
        num_leased=leased,
        leased_work_s=work,
        residents=frozenset(residents),
    ),
    st.integers(0, 12),
    st.builds(StepCost, *[st.floats(0, 9)] * 3, per_squared_megapixel_s=st.floats(0, 9)),
    st.integers(0, 4),
    st.floats(0, 100),
    st.sets(st.sampled_from("abc")),
)
turns = st.lists(st.tuples(views, st.booleans(), st.integers(0, 9)), max_size=60)


@given(turns)
def test_every_row_is_its_replicas(changes: list[tuple[ReplicaView, bool, int]]) -> None:
    rows, live = ReplicaRows(), dict[str, tuple[ReplicaView, int]]()
    for view, goes, heard_s in changes:
        name = view.replica_id
        if goes and name in live:
            rows.remove(name)
            del live[name]
            continue
        if name not in live:
            rows.add(name)
        rows.put(view)
        rows.hear(name, heard_s)
        live[name] = (view, heard_s)
    assert rows.num_free == sum(view.room for view, _ in live.values())
    holders: dict[str, set[int]] = {}
    for name, (view, _) in live.items():
        for one in view.residents:
            holders.setdefault(one, set()).add(rows.row_of(name))
    assert rows.holders == holders
    for name, (view, _) in live.items():
        row = rows.row_of(name)
        table = rows.table(5, None, polls=row)
        assert rows.id_of(row) == name
        assert len(table.rooms) == len(live)
        assert table.levels_s[row] == view.leased_work_s
        assert table.prices_s[row].tolist() == shared_prices(view).tolist()
        # it can count on itself, and on those heard of lately
        rooms = [
            one.room for other, (one, heard_s) in live.items() if other == name or heard_s >= 5
        ]
        assert int(table.rooms.sum()) == sum(rooms)
        assert int(table.rooms[row]) == view.room
        others = rows.table(5, None)
        assert int(others.rooms.sum()) == sum(
            one.room for one, heard_s in live.values() if heard_s >= 5
        )


def test_a_new_row_in_an_old_ones_place_has_no_room_until_it_is_put_in() -> None:
    rows = ReplicaRows()
    for name in ("a", "b"):
        rows.add(name)
        rows.put(replica_view(name))
    rows.remove("b")
    rows.add("c")
    assert rows.num_free == replica_view("a").room
    rows.put(replace(replica_view("c"), num_free=1))
    assert rows.num_free == replica_view("a").room + 1
    with pytest.raises(KeyError):
        rows.row_of("b")
