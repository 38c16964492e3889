"""Requests of a group have aligned sets of ranks of their own, and come to where they are to be."""

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_cluster.policies.sequence_parallel.sets import Seat, aligned_sets, launches, seat

NUM_RANKS = st.sampled_from([1, 2, 4, 6, 8, 16])
# a decision or the end of a step: what each request is to have then, and which step ends
EVENTS = st.lists(
    st.tuples(st.booleans(), st.lists(st.integers(0, 4), min_size=6, max_size=6)), max_size=30
)


def test_sets_of_a_degree_begin_at_its_multiples() -> None:
    assert aligned_sets(4, [2, 1, 4, 2]) == (
        *(range(rank, rank + 1) for rank in range(4)),
        range(2),
        range(2, 4),
        range(4),
    )
    assert aligned_sets(6, [4]) == (range(4),)


@pytest.mark.parametrize("degree", [0, -1, 3, 8])
def test_a_degree_is_a_power_of_two_of_as_many_ranks(degree: int) -> None:
    with pytest.raises(ValueError, match=f"at most 4 ranks; given {degree}"):
        aligned_sets(4, [1, degree])


def test_more_ranks_than_there_are_are_refused() -> None:
    with pytest.raises(ValueError, match="more than 4 ranks"):
        seat([Seat(0, 4), Seat(1, 1)], 4)


def test_a_request_stays_where_it_is() -> None:
    seats = [Seat(0, 2), Seat(1, 2, range(2)), Seat(2, 4, range(4, 8))]
    assert seat(seats, 8) == (range(2, 4), range(2), range(4, 8))


def test_it_shrinks_into_what_it_has_and_grows_around_it() -> None:
    assert seat([Seat(0, 2, range(4, 8)), Seat(1, 4)], 8) == (range(4, 6), range(4))
    assert seat([Seat(0, 4, range(6, 7))], 8) == (range(4, 8),)


def test_it_grows_elsewhere_before_it_displaces_one_that_may_stay() -> None:
    alone = [Seat(0, 2, range(1, 2)), Seat(1, 1)]
    assert seat(alone, 4) == (range(2), range(2, 3))
    beside = [Seat(0, 2, range(1, 2)), Seat(1, 1, range(1))]
    assert seat(beside, 4) == (range(2, 4), range(1))


def test_it_moves_where_a_larger_one_or_an_equal_one_has_its_ranks() -> None:
    assert seat([Seat(0, 4), Seat(1, 1, range(1))], 6) == (range(4), range(4, 5))
    assert seat([Seat(0, 2, range(2)), Seat(1, 2, range(2))], 4) == (range(2), range(2, 4))


def test_new_ones_prefer_idle_ranks() -> None:
    ending = Seat(0, 0, range(4), is_stepping=True)
    assert seat([ending, Seat(1, 2)], 8) == (None, range(4, 6))


def test_one_whose_ranks_are_taken_steps_where_it_was_unless_others_are_to_have_that() -> None:
    busy = Seat(0, 2, range(2, 4), is_stepping=True)
    grows = Seat(1, 4, range(2))
    assert launches([busy, grows], [range(4, 6), range(4)]) == ((1, range(2)),)
    waiting = Seat(2, 2)
    targets = [range(2), range(4, 8), range(2, 4)]
    assert launches([busy, grows, waiting], targets) == ((1, range(4, 8)),)
    assert launches([busy, replace(grows, held=range(1))], [range(1), range(2, 4)]) == ()


def test_of_two_that_were_on_the_same_ranks_one_steps_there_meanwhile() -> None:
    busy = Seat(0, 0, range(4, 8), is_stepping=True)
    both = [Seat(1, 2, range(2)), Seat(2, 2, range(2))]
    targets = [None, range(4, 6), range(6, 8)]
    assert launches([busy, *both], targets) == ((1, range(2)),)


def test_one_that_is_to_have_nothing_waits() -> None:
    assert launches([Seat(0, 0, range(2))], [None]) == ()


@given(NUM_RANKS, st.lists(st.tuples(st.integers(0, 4), st.integers(0, 99), st.booleans())))
def test_all_that_fit_by_their_number_have_aligned_ranks_of_their_own(
    num_ranks: int, drawn: list[tuple[int, int, bool]]
) -> None:
    places = aligned_sets(num_ranks, [one for one in (1, 2, 4, 8, 16) if one <= num_ranks])
    degrees = fitting([level for level, _, _ in drawn], num_ranks)
    seats = [
        Seat(number, degree, places[place % len(places)] if place % 3 else None, is_stepping)
        for number, (degree, (_, place, is_stepping)) in enumerate(zip(degrees, drawn, strict=True))
    ]
    targets = seat(seats, num_ranks)
    assert [len(one or ()) for one in targets] == degrees
    assert all(one is None or one in places for one in targets)
    assert_disjoint([one for one in targets if one])


@given(NUM_RANKS, EVENTS, st.randoms(use_true_random=False))
def test_steps_never_overlap_and_each_comes_to_its_ranks_once_decisions_stop(
    num_ranks: int, events: list[tuple[bool, list[int]]], random: Random
) -> None:
    group = Group(num_ranks)
    for decides, drawn in events:
        if decides:
            group.decide(fitting(drawn, num_ranks))
        else:
            group.end_steps([index for index, level in enumerate(drawn) if level % 2])
    # each step in flight ends twice at most, in any order
    for _ in range(2):
        order = list(range(6))
        random.shuffle(order)
        for index in order:
            group.end_steps([index])
    for one, target in zip(group.seats, group.targets, strict=True):
        if target is None:
            assert not one.is_stepping
        else:
            assert one.is_stepping
            assert one.held == target


class Group:
    """Six requests on ranks: what a head does with the decisions."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.seats = [Seat(number, 0) for number in range(6)]
        self.targets: list[range | None] = [None] * 6

    def decide(self, degrees: list[int]) -> None:
        self.seats = [
            replace(one, degree=degree) for one, degree in zip(self.seats, degrees, strict=True)
        ]
        self.targets = list(seat(self.seats, self.num_ranks))
        self._launch()

    def end_steps(self, indices: list[int]) -> None:
        for index in indices:
            self.seats[index] = replace(self.seats[index], is_stepping=False)
        self._launch()

    def _launch(self) -> None:
        for index, ranks in launches(self.seats, self.targets):
            assert not self.seats[index].is_stepping
            self.seats[index] = replace(self.seats[index], held=ranks, is_stepping=True)
        assert_disjoint([one.held for one in self.seats if one.is_stepping and one.held])


def fitting(levels: list[int], num_ranks: int) -> list[int]:
    """Degrees of levels, 0 where they do not fit behind the ones before."""
    degrees: list[int] = []
    for level in levels:
        degree = 2**level // 2
        degrees.append(degree if sum(degrees) + degree <= num_ranks else 0)
    return degrees


def assert_disjoint(sets: list[range]) -> None:
    ranks = [rank for one in sets for rank in one]
    assert len(set(ranks)) == len(ranks)
