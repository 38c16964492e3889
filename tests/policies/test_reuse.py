"""Which steps are full, and which blocks which rows recompute."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_cluster.policies.steps.reuse import ActivePatches, ReuseMap, ReuseSchedule


@given(st.integers(0, 9), st.integers(1, 9), st.integers(1, 60))
def test_every_so_many_steps_one_is_full_and_is_kept_if_another_takes_from_it(
    num_outer: int, interval: int, num_steps: int
) -> None:
    schedule = ReuseSchedule(num_outer, interval)
    full: list[int] = []
    for index in range(num_steps):
        if schedule.is_full(index, full[-1] if full else None):
            full.append(index)
    assert full == list(range(0, num_steps, interval))
    assert len(full) == schedule.num_full(num_steps)
    for index in full:
        takes = index + 1 < num_steps and index + 1 not in full
        assert schedule.is_kept(index, num_steps) == takes


def test_a_schedule_is_read_back_from_its_name() -> None:
    for schedule in (ReuseSchedule(0, 2), ReuseSchedule(12, 30)):
        assert ReuseSchedule.parse(str(schedule)) == schedule


@pytest.mark.parametrize("text", ["outer2", "outer2-every1", "outer-1-every2", " outer2-every3"])
def test_what_names_no_schedule_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no reuse schedule; write outerN-everyM"):
        ReuseSchedule.parse(text)


@pytest.mark.parametrize(("name", "value"), [("num_outer", -1), ("interval", 0)])
def test_numbers_that_make_no_schedule_are_refused(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"{name} must be at least .*, given {value}"):
        ReuseSchedule(**({"num_outer": 1, "interval": 2} | {name: value}))


def test_the_rings_of_a_row_that_reuses_are_the_outer_ones() -> None:
    reuse_map = ReuseMap((None, 2, 0))
    assert [reuse_map.is_active(ring) for ring in range(4)] == [
        (True, True, True),
        (True, True, False),
        (True, True, False),
        (True, False, False),
    ]


def test_within_its_cut_a_row_is_computed_in_its_active_patches_alone() -> None:
    some, none = ActivePatches(4, (True, False)), ActivePatches(4, (False, False))
    reuse_map = ReuseMap((None, 1, 1, 1), (None, some, none, None))
    assert reuse_map.is_active(1) == (True, True, True, True)
    assert reuse_map.is_partial(1) == (False, False, False, False)
    assert reuse_map.is_active(2) == (True, True, False, False)
    assert reuse_map.is_partial(2) == (False, True, False, False)
