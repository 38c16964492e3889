"""Which steps are full, and which blocks which rows recompute."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_cluster.policies.reuse import ActivePatches, ReuseMap, ReuseProgress, ReuseSchedule

schedules = st.builds(
    ReuseSchedule, st.integers(0, 9), st.integers(1, 9), st.integers(1, 9), st.integers(0, 9)
)


def full_steps(schedule: ReuseSchedule, num_steps: int) -> tuple[int, ...]:
    found: list[int] = []
    for index in range(num_steps):
        if schedule.is_full(ReuseProgress(index, num_steps, found[-1] if found else None)):
            found.append(index)
    return tuple(found)


def test_full_steps_are_the_first_every_so_many_and_the_last() -> None:
    assert full_steps(ReuseSchedule(2, 3), 10) == (0, 3, 6, 9)
    assert full_steps(ReuseSchedule(2, 3, num_first=2), 10) == (0, 1, 4, 7)
    assert full_steps(ReuseSchedule(2, 4, num_last=2), 10) == (0, 4, 8, 9)
    assert full_steps(ReuseSchedule(2, 1), 4) == (0, 1, 2, 3)


@given(schedules, st.integers(1, 60))
def test_every_step_that_reuses_has_a_full_one_shortly_before_it(
    schedule: ReuseSchedule, num_steps: int
) -> None:
    full = full_steps(schedule, num_steps)
    assert full[0] == 0
    for index in range(num_steps):
        last = max(one for one in full if one <= index)
        assert index - last < schedule.interval
        if index < schedule.num_first or index >= num_steps - schedule.num_last:
            assert index in full


@given(schedules, st.integers(1, 60))
def test_what_no_later_step_takes_is_not_kept(schedule: ReuseSchedule, num_steps: int) -> None:
    full = full_steps(schedule, num_steps)
    for last, index in zip((None, *full), full, strict=False):
        kept = schedule.is_kept(ReuseProgress(index, num_steps, last))
        assert kept == (index + 1 < num_steps and index + 1 not in full)


def test_a_threshold_makes_a_step_full_once_the_estimate_has_drifted_too_far() -> None:
    schedule = ReuseSchedule(2, 10, max_drift=0.1)
    assert not schedule.is_full(ReuseProgress(5, 20, 3, drift=0.1))
    assert schedule.is_full(ReuseProgress(5, 20, 3, drift=0.11))
    assert schedule.is_full(ReuseProgress(13, 20, 3, drift=0.0))


@pytest.mark.parametrize(
    ("name", "value"), [("num_outer", -1), ("interval", 0), ("num_first", 0), ("num_last", -1)]
)
def test_numbers_that_make_no_schedule_are_refused(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"{name} must be at least .*, given {value}"):
        ReuseSchedule(**({"num_outer": 1, "interval": 2} | {name: value}))
    with pytest.raises(ValueError, match="max_drift must be positive or None, given 0"):
        ReuseSchedule(1, 2, max_drift=0)


def test_the_rings_of_a_row_that_reuses_are_the_outer_ones() -> None:
    reuse_map = ReuseMap((None, 2, 0))
    assert [reuse_map.is_active(ring) for ring in range(4)] == [
        (True, True, True),
        (True, True, False),
        (True, True, False),
        (True, False, False),
    ]


def test_the_patches_that_moved_most_are_active() -> None:
    schedule = ReuseSchedule(0, 2, active_share=0.5, patch_size=8)
    found = schedule.most_moved([0.1, 0.4, 0.2, 0.4, 0.0])
    # half of five, rounded up; of equal ones the first
    assert found == ActivePatches(8, (False, True, True, True, False))
    few = ReuseSchedule(0, 2, active_share=0.2)
    assert few.most_moved([0.4, 0.4, 0.1]).is_active == (True, False, False)
    assert not ReuseSchedule(0, 2).is_by_patch


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_a_share_of_patches_is_between_none_and_all(share: float) -> None:
    with pytest.raises(ValueError, match="active_share must be from 0 to 1"):
        ReuseSchedule(0, 2, active_share=share)


def test_within_its_cut_a_row_is_computed_in_its_active_patches_alone() -> None:
    some, none = ActivePatches(4, (True, False)), ActivePatches(4, (False, False))
    reuse_map = ReuseMap((None, 1, 1, 1), (None, some, none, None))
    assert reuse_map.is_active(1) == (True, True, True, True)
    assert reuse_map.is_partial(1) == (False, False, False, False)
    assert reuse_map.is_active(2) == (True, True, False, False)
    assert reuse_map.is_partial(2) == (False, True, False, False)
