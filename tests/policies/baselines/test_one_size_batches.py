from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from ray_cluster.policies.baselines.one_size_batches import num_batches, one_size_batches
from ray_cluster.policies.steps.step_policy import StepDecision
from ray_cluster.policies.types import RowView
from tests.policies.waiting_rows import (
    SIZES,
    Limits,
    Schedule,
    arrivals,
    check_waits,
    limits,
    row,
    sight_of,
)

LIMITS = dict.fromkeys(SIZES, 2)


def choose(*rows: RowView, now_s: float = 0.0) -> StepDecision:
    return one_size_batches(sight_of(rows, LIMITS, now_s))


def test_without_rows_there_is_no_batch() -> None:
    assert choose() == StepDecision()


def test_a_batch_holds_one_size_and_no_more_than_its_limit() -> None:
    decision = choose(row("a"), row("b", size=1), row("c"), row("d"))
    assert decision.request_ids == ("a", "c")


def test_the_size_of_the_most_urgent_row_goes_next() -> None:
    assert choose(row("a"), row("b"), row("c", size=1, priority=1)).request_ids == ("c",)
    assert choose(row("a"), row("b"), row("c", size=1, deadline_s=9.0)).request_ids == ("c",)


def test_a_row_past_its_deadline_lets_others_of_its_priority_go_first() -> None:
    late, timely = row("late", deadline_s=5.0), row("timely", size=1)
    assert choose(late, timely, now_s=4.0).request_ids == ("late",)
    assert choose(late, timely, now_s=6.0).request_ids == ("timely",)
    late = row("late", deadline_s=5.0, priority=1)
    assert choose(late, timely, now_s=6.0).request_ids == ("late",)


def test_a_row_that_was_passed_over_for_too_long_comes_first() -> None:
    urgent = row("urgent", priority=9)
    assert choose(urgent, row("patient", size=1, waited_rounds=3)).request_ids == ("urgent",)
    assert choose(urgent, row("overdue", size=1, waited_rounds=4)).request_ids == ("overdue",)


def test_a_limit_below_one_still_steps_one_row() -> None:
    view = sight_of([row("a"), row("b")], {SIZES[0]: 0})
    assert one_size_batches(view).request_ids == ("a",)


rows = st.lists(
    st.tuples(st.integers(0, 3), st.integers(-2, 2), st.floats(0, 100), st.integers(0, 30)),
    min_size=1,
    max_size=20,
).map(
    lambda items: [
        row(f"{i:02}", size, waited, priority=priority, deadline_s=deadline_s)
        for i, (size, priority, deadline_s, waited) in enumerate(items)
    ]
)


@given(rows, st.randoms(use_true_random=False))
def test_the_choice_does_not_depend_on_the_order_of_the_rows(
    some: list[RowView], random: object
) -> None:
    shuffled = list(some)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert choose(*some, now_s=50.0) == choose(*shuffled, now_s=50.0)


def rows_alike(rows: list[RowView], decision: StepDecision) -> list[RowView]:
    """The rows of the size of a batch."""
    first = decision.request_ids[0]
    size = next(one.request.size_px for one in rows if one.request.request_id == first)
    return [one for one in rows if one.request.size_px == size]


@given(rows)
def test_a_batch_is_as_full_as_it_can_be(some: list[RowView]) -> None:
    decision = choose(*some, now_s=50.0)
    alike = rows_alike(some, decision)
    assert len(decision.request_ids) == min(len(alike), 2)
    assert len(set(decision.request_ids)) == len(decision.request_ids)


@given(rows)
def test_among_rows_that_waited_no_longer_nobody_more_urgent_is_left_out(
    some: list[RowView],
) -> None:
    some = [replace(one, waited_rounds=0) for one in some]
    decision = choose(*some)
    chosen = {one for one in some if one.request.request_id in decision.request_ids}
    lowest = min(one.request.priority for one in chosen)
    alike = rows_alike(some, decision)
    assert all(one.request.priority <= lowest for one in alike if one not in chosen)
    highest = max(one.request.priority for one in chosen)
    assert all(one.request.priority <= highest for one in some)


@given(arrivals, limits)
def test_every_row_steps_within_three_times_the_largest_number_of_batches(
    schedule: Schedule, most: Limits
) -> None:
    check_waits(one_size_batches, num_batches, schedule, most, bound=lambda batches: 3 * batches)
