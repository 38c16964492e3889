"""As many requests are kept as can be, and large ones where that costs none."""

import random
from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from ray_cluster.policies.sequence_parallel.admission import (
    best_plan,
    exchange_small,
    keep_most,
    least_gpu_s,
    within_demand,
)
from ray_cluster.policies.sequence_parallel.fluid import Work
from ray_cluster.policies.sequence_parallel.types import GroupRequest, menu_of
from tests.policies.groups import LARGE, MENUS, SMALL, request, requests_strategy, view
from tests.policies.groups import works_by_deadline as in_order

ONE_DEGREE = menu_of("one", {4: 1.0}, num_gpus=4)


def most_by_enumeration(works: list[Work], num_gpus: int = 4) -> int:
    """The largest number of works that some plan keeps, by trying every subset."""
    group = view(num_gpus=num_gpus)
    return next(
        count
        for count in range(len(works), -1, -1)
        for some in combinations(works, count)
        if best_plan(some, group).first_late is None
    )


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 20)), min_size=1, max_size=7))
def test_on_one_machine_no_subset_is_larger(items: list[tuple[int, int]]) -> None:
    works = in_order(
        [
            request(number, ONE_DEGREE, steps_left=steps, deadline_s=float(max(steps, due)))
            for number, (steps, due) in enumerate(items)
        ]
    )
    assert len(keep_most(works, view()).works) == most_by_enumeration(works)


@given(requests_strategy(6))
def test_what_is_kept_is_on_time_and_never_more_than_the_largest_subset(
    some: list[GroupRequest],
) -> None:
    works = in_order(some)
    kept = keep_most(works, view())
    assert best_plan(kept.works, view()).first_late is None
    assert kept.plan == best_plan(kept.works, view())
    assert 1 <= len(kept.works) <= most_by_enumeration(works)


def test_over_many_random_sets_hardly_a_request_less_is_kept_than_by_enumeration() -> None:
    rng = random.Random(4)
    kept = best = 0
    for _ in range(150):
        drawn = [
            (rng.choice(MENUS), rng.randint(1, 8), rng.uniform(1.0, 4.0))
            for _ in range(rng.randint(2, 6))
        ]
        works = in_order(
            [
                request(i, menu, steps_left=n, deadline_s=n * menu.fastest_s * slack + 1e-6)
                for i, (menu, n, slack) in enumerate(drawn)
            ]
        )
        kept += len(keep_most(works, view()).works)
        best += most_by_enumeration(works)
    assert 0.98 * best <= kept <= best


def test_of_a_crowd_hardly_less_is_kept_than_after_following_every_schedule() -> None:
    rng = random.Random(6)
    kept = every = 0
    for _ in range(30):
        drawn = [(rng.choice(MENUS[:2]), rng.randint(1, 8), rng.uniform(2, 9)) for _ in range(40)]
        works = in_order(
            [
                request(i, menu, steps_left=n, deadline_s=n * menu.fastest_s * slack)
                for i, (menu, n, slack) in enumerate(drawn)
            ]
        )
        most = keep_most(works, view())
        assert most.plan.first_late is None
        kept += len(most.works)
        every += _kept_one_by_one(works)
    assert 0.98 * every <= kept


def _kept_one_by_one(works: list[Work]) -> int:
    """The same rule without a look at demands first."""
    left = list(works)
    while (late := best_plan(left, view()).first_late) is not None:
        del left[max(range(late + 1), key=lambda number: (left[number].widest_gpu_s, number))]
    return len(left)


@given(requests_strategy(6))
def test_no_plan_keeps_a_set_whose_least_demand_does_not_exist(some: list[GroupRequest]) -> None:
    works = in_order(some)
    if len(within_demand(works, view())) < len(works):
        assert best_plan(works, view()).first_late is not None


@given(requests_strategy(1), st.floats(0.0, 1.0))
def test_the_least_gpu_seconds_are_those_of_a_whole_number_of_steps_at_two_degrees_or_less(
    some: list[GroupRequest], share: float
) -> None:
    (work,) = in_order(some)
    menu, slow = work.menu, work.steps * share
    for low, high in combinations(range(len(menu.degrees)), 2):
        times_s = slow * menu.step_s[low], (work.steps - slow) * menu.step_s[high]
        if sum(times_s) <= work.due_s:
            gpu_s = times_s[0] * menu.degrees[low] + times_s[1] * menu.degrees[high]
            assert least_gpu_s(work, 0.0) <= gpu_s + 1e-9


def crowd() -> list[Work]:
    """One large request in a hurry, and three small ones that together leave no time for it."""
    large = request(0, LARGE, steps_left=4, deadline_s=13.0)
    small = [request(i, SMALL, steps_left=6, deadline_s=6.0) for i in (1, 2, 3)]
    return in_order([large, *small])


def test_the_costliest_is_sacrificed_and_the_guard_only_exchanges_one_for_one() -> None:
    works = crowd()
    most = keep_most(works, view())
    assert sorted(work.row for work in most.works) == [1, 2, 3]
    assert exchange_small(most, works, view()) == most
    fewer = [work for work in works if work.row in {0, 1}]
    most = keep_most(fewer, view())
    assert [work.row for work in most.works] == [1]
    assert [work.row for work in exchange_small(most, fewer, view()).works] == [0]


@given(requests_strategy(6))
def test_the_guard_keeps_as_many_of_no_less_work_on_time(some: list[GroupRequest]) -> None:
    works = in_order(some)
    most = keep_most(works, view())
    exchanged = exchange_small(most, works, view())
    assert len(exchanged.works) == len(most.works)
    total = sum(work.menu.work for work in most.works)
    assert sum(work.menu.work for work in exchanged.works) >= total
    assert exchanged.plan.first_late is None
