"""Batches that nobody joins, and sizes that take turns."""

from hypothesis import given
from hypothesis import strategies as st

from ray_cluster.policies.baselines.image_batches import (
    FixedBatches,
    InTimeBatches,
    mix_as_they_come,
    take_turns_by_size,
)
from ray_cluster.policies.steps.step_policy import StepDecision, StepPolicy, StepView
from ray_cluster.policies.types import RowView, StepCost
from tests.fakes import request_view


def row(
    name: str, width: int = 512, arrival_s: float = 0.0, done: int = 0, waited: int = 0
) -> RowView:
    request = request_view(name, width_px=width, arrival_s=arrival_s, steps_done=done)
    return RowView(request, waited)


def due(name: str, deadline_s: float, done: int = 0) -> RowView:
    return RowView(request_view(name, deadline_s=deadline_s, steps_done=done))


def decide(policy: StepPolicy, *rows: RowView, now_s: float = 0.0, cap: int = 4) -> StepDecision:
    return policy(StepView(rows, StepCost(1.0, 1.0), cap, now_s))


def test_one_image_is_made_after_the_other_as_they_came() -> None:
    one = FixedBatches(1)
    rows = [row("b", arrival_s=1.0), row("a", arrival_s=2.0)]
    assert decide(one, *rows) == StepDecision(("b",), 10)
    # an earlier one that comes later waits for its end
    assert decide(one, row("b", arrival_s=1.0, done=3), row("x")) == StepDecision(("b",), 7)


def test_a_batch_holds_the_size_of_the_first_and_nobody_joins_it() -> None:
    three = FixedBatches(3)
    rows = [row(f"{n}", width=[512, 768][n % 2], arrival_s=float(n)) for n in range(6)]
    assert decide(three, *rows).request_ids == ("0", "2", "4")
    begun = [row("0", done=2), row("2", done=2), row("late", arrival_s=9.0)]
    assert decide(three, *begun) == StepDecision(("0", "2"), 8)


def test_a_batch_that_is_not_full_waits_for_more_of_its_size_but_not_longer_than_it_may() -> None:
    patient = FixedBatches(2, wait_s=5.0)
    rows = [row("a", arrival_s=1.0), row("b", width=768, arrival_s=2.0)]
    assert decide(patient, *rows, now_s=3.0) == StepDecision(idle_until_s=6.0)
    assert decide(patient, *rows, now_s=6.0).request_ids == ("a",)
    assert decide(patient, *rows, row("c", arrival_s=3.0), now_s=3.0).request_ids == ("a", "c")


def test_sizes_take_turns_and_all_rows_of_a_size_step_together() -> None:
    small = [row("a"), row("b", arrival_s=1.0)]
    assert decide(take_turns_by_size, *small, row("x", width=768, waited=1)).request_ids == ("x",)
    late = [row("a", waited=1), row("b", arrival_s=1.0, waited=1)]
    assert decide(take_turns_by_size, *late, row("x", width=768)) == StepDecision(("a", "b"))
    assert decide(take_turns_by_size, *small) == StepDecision(("a", "b"), 10)
    assert decide(take_turns_by_size, *small, cap=1) == StepDecision(("a",))


def test_all_sizes_together_step_as_they_came_up_to_the_cap() -> None:
    rows = [row(f"{n}", width=[512, 768][n % 2], arrival_s=9.0 - n, done=n) for n in range(3)]
    assert decide(mix_as_they_come, *rows) == StepDecision(("2", "1", "0"), 8)
    assert decide(mix_as_they_come, *rows, cap=2) == StepDecision(("2", "1"), 8)
    assert decide(mix_as_they_come) == StepDecision()


def test_who_would_be_late_in_a_batch_is_given_up_before_it_begins() -> None:
    in_time = InTimeBatches(batch_s=float)
    rows = [due("c", 13.0), due("a", 11.5), due("b", 13.0)]
    # three of them take 3 s, which is too long for the first alone
    assert decide(in_time, *rows, now_s=10.0) == StepDecision(dropped=("a",))
    assert decide(in_time, *rows[::2], now_s=10.0) == StepDecision(("b", "c"), 10)
    # what has begun goes on to its end
    begun = [due("b", 11.0, done=4), due("c", 11.0, done=4)]
    assert decide(in_time, *begun, due("late", 99.0), now_s=12.0) == StepDecision(("b", "c"), 6)


@given(st.lists(st.floats(0, 9), min_size=1, max_size=8))
def test_no_more_are_given_up_than_must_be_and_the_rest_is_in_time(
    deadlines_s: list[float],
) -> None:
    rows = [due(f"{number}", deadline_s) for number, deadline_s in enumerate(deadlines_s)]
    decision = decide(InTimeBatches(batch_s=float), *rows)
    urgent_s = sorted(deadlines_s)
    fewest = next(num for num in range(9) if all(s >= len(rows) - num for s in urgent_s[num:]))
    assert len(decision.dropped) == fewest
    assert len(decision.request_ids) == (0 if fewest else len(rows))
    late = {row.request.deadline_s for row in rows if row.request.request_id in decision.dropped}
    assert late == set(urgent_s[:fewest])
