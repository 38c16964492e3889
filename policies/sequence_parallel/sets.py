"""Which ranks a request steps on: aligned sets, moved as little as may be.

A set of ``k`` ranks begins at a multiple of ``k``, so that sets of all sizes nest, and any degrees
that fit into a group by their number find places.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


def aligned_sets(num_ranks: int, degrees: Iterable[int]) -> tuple[range, ...]:
    """Return the sets of every degree, by degree and first rank.

    Raises:
        ValueError: a degree is no power of two, or above the number of ranks.
    """
    found = []
    for degree in sorted(set(degrees)):
        if degree < 1 or degree & (degree - 1) or degree > num_ranks:
            raise ValueError(
                f"a degree is a power of two of at most {num_ranks} ranks; given {degree}"
            )
        found += [
            range(first, first + degree) for first in range(0, num_ranks - degree + 1, degree)
        ]
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Seat:
    """A request of a group, between a decision and its next step boundary.

    Attributes:
        degree: ranks that it is to have from then on; 0 for none.
        held: the set that it steps on, or stepped on last.
        is_stepping: whether it steps now.
    """

    request_id: int
    degree: int
    held: range | None = None
    is_stepping: bool = False


def seat(seats: Sequence[Seat], num_ranks: int) -> tuple[range | None, ...]:
    """Return the set that each request is to step on next; None for those without any.

    Sets are taken by falling degree, so that all that fit by their number find one. A request stays
    where it is if its degree does. Else it takes the set that displaces the fewest of those; of
    several, a part of what it has or what is around that.

    Raises:
        ValueError: there are not so many ranks.
    """
    if sum(one.degree for one in seats) > num_ranks:
        raise ValueError(f"{[one.degree for one in seats]} are more than {num_ranks} ranks")
    busy = {rank for one in seats if one.is_stepping and one.held for rank in one.held}
    targets: list[range | None] = [None] * len(seats)
    taken: set[int] = set()
    wanted = [index for index, one in enumerate(seats) if one.degree]
    staying = {i: seats[i].held for i in wanted if len(seats[i].held or ()) == seats[i].degree}
    # of equal degrees, those that have a place choose first
    for index in sorted(wanted, key=lambda i: (-seats[i].degree, seats[i].held is None, i)):
        found = staying.pop(index, None)
        if found is None or not taken.isdisjoint(found):
            others = {rank for ranks in staying.values() for rank in ranks or ()}
            found = _best_free(seats[index], num_ranks, taken, others, busy)
        targets[index] = found
        taken.update(found)
    return tuple(targets)


def _best_free(
    one: Seat, num_ranks: int, taken: set[int], others: set[int], busy: set[int]
) -> range:
    held = set(one.held or ())
    free = [ranks for ranks in aligned_sets(num_ranks, [one.degree]) if taken.isdisjoint(ranks)]
    return min(
        free,
        key=lambda ranks: (
            len(others.intersection(ranks)),
            -len(held.intersection(ranks)),
            len((busy - held).intersection(ranks)),
            ranks.start,
        ),
    )


def launches(
    seats: Sequence[Seat], targets: Sequence[range | None]
) -> tuple[tuple[int, range], ...]:
    """Return which requests begin a step now, by index, and on which set.

    One begins where it is to step as soon as that is free. Until then it takes further steps where
    it was, unless others are to have ranks of that.
    """
    busy = {rank for one in seats if one.is_stepping and one.held for rank in one.held}
    found = []
    for index, (one, target) in enumerate(zip(seats, targets, strict=True)):
        if one.is_stepping or target is None:
            continue
        place = target
        if not busy.isdisjoint(target):
            others = {
                rank
                for other, ranks in enumerate(targets)
                if other != index and ranks is not None
                for rank in ranks
            }
            if one.held is None or not (busy | others).isdisjoint(one.held):
                continue
            place = one.held
        busy.update(place)
        found.append((index, place))
    return tuple(found)
