"""Batches of mixed sizes grow for as long as nobody in time is made late."""

import math
import random

from hypothesis import given
from hypothesis import strategies as st

from ray_cluster.policies.costs.cost_model import step_s, work_of
from ray_cluster.policies.steps.mixed_batching import mixed_batches, num_batches
from ray_cluster.policies.steps.step_policy import StepDecision, StepView
from ray_cluster.policies.types import RequestView, RowView, StepCost
from tests.fakes import request_view
from tests.policies import waiting_rows
from tests.policies.waiting_rows import SIZES, Limits, Schedule, arrivals, check_waits, limits

COST = StepCost(0.5, 1.0, per_squared_megapixel_s=0.25, per_further_size_s=0.1)


def sight_of(*requests: RequestView, max_batch: int = 4, now_s: float = 0.0) -> StepView:
    return StepView([RowView(one) for one in requests], COST, max_batch, now_s)


def batch(*requests: RequestView, max_batch: int = 4, now_s: float = 0.0) -> tuple[str, ...]:
    return mixed_batches(sight_of(*requests, max_batch=max_batch, now_s=now_s)).request_ids


def test_sizes_mix_up_to_the_cap_the_most_urgent_first() -> None:
    small = request_view("small", width_px=500, deadline_s=900.0)
    rows = [request_view(f"{n}", deadline_s=1000.0 + n) for n in range(5)]
    assert batch(*rows, small) == ("small", "0", "1", "2")
    assert batch() == ()


def test_who_would_make_an_urgent_row_late_waits() -> None:
    # 10 steps of 1.75 s alone, of 3 s and 4.25 s with others
    urgent = request_view("urgent", deadline_s=31.0)
    others = [request_view(f"{n}", deadline_s=1000.0) for n in range(3)]
    assert batch(urgent, *others) == ("urgent", "0")
    assert mixed_batches(sight_of(urgent, *others)).num_rounds == 1
    assert mixed_batches(sight_of(urgent, others[0])).num_rounds == 10


def test_who_cannot_be_in_time_any_more_holds_nobody_up_and_comes_last() -> None:
    hopeless = request_view("hopeless", deadline_s=10.0)
    rows = [request_view(f"{n}", deadline_s=1000.0) for n in range(3)]
    assert batch(hopeless, *rows) == ("0", "1", "2", "hopeless")
    assert batch(hopeless) == ("hopeless",)


@given(
    st.lists(
        st.tuples(st.sampled_from([256, 512, 1000]), st.integers(1, 20), st.floats(-5, 80)),
        min_size=1,
        max_size=8,
    ),
    st.integers(1, 6),
    st.integers(0, 99),
)
def test_nobody_in_the_batch_is_late_who_would_not_be_alone(
    states: list[tuple[int, int, float]], max_batch: int, seed: int
) -> None:
    requests = [
        request_view(f"{n}", width_px=side, height_px=side, num_steps=steps, deadline_s=deadline)
        for n, (side, steps, deadline) in enumerate(states)
    ]
    view = sight_of(*requests, max_batch=max_batch)
    decision = mixed_batches(view)
    chosen = [one for one in requests if one.request_id in decision.request_ids]
    assert 1 <= len(chosen) <= max_batch
    together_s = step_s(COST, work_of(chosen))
    for one in chosen:
        alone_s = step_s(COST, work_of([one]))
        if one.remaining_steps * alone_s <= one.deadline_s:
            assert one.remaining_steps * together_s <= one.deadline_s + 1e-9
    shuffled = random.Random(seed).sample(requests, len(requests))
    assert mixed_batches(sight_of(*shuffled, max_batch=max_batch)) == decision
    everybody = len(chosen) == len(requests)
    assert decision.num_rounds == (min(r.remaining_steps for r in chosen) if everybody else 1)


def test_an_infinite_deadline_bears_everything() -> None:
    rows = [request_view(f"{n}", deadline_s=math.inf) for n in range(3)]
    assert mixed_batches(sight_of(*rows)) == StepDecision(("0", "1", "2"), 10, step_s=4.25)


def test_sizes_share_the_memory_that_there_is() -> None:
    """Two large rows fill a batch, or four small ones, or one and two."""
    most = {SIZES[0]: 4, SIZES[2]: 2}
    names = [("l0", 2), ("s0", 0), ("s1", 0), ("s2", 0), ("l1", 2)]
    rows = [
        waiting_rows.row(name, size, deadline_s=1000.0 + n) for n, (name, size) in enumerate(names)
    ]
    assert mixed_batches(waiting_rows.sight_of(rows, most)).request_ids == ("l0", "s0", "s1")
    assert num_batches(waiting_rows.sight_of(rows, most)) == 2


def test_a_row_that_was_left_out_for_too_long_comes_first_whatever_it_costs() -> None:
    most = dict.fromkeys(SIZES, 2)
    # 10 steps of 0.91 s alone, and no longer
    urgent = waiting_rows.row("urgent", num_steps=10, deadline_s=9.3)

    def batch_after(waited_rounds: int) -> tuple[str, ...]:
        patient = waiting_rows.row("patient", 2, waited_rounds, deadline_s=1000.0)
        return mixed_batches(waiting_rows.sight_of([urgent, patient], most)).request_ids

    assert batch_after(1) == ("urgent",)
    assert batch_after(2) == ("patient",)


@given(arrivals, limits)
def test_every_row_steps_within_four_times_the_largest_number_of_batches_and_one(
    schedule: Schedule, most: Limits
) -> None:
    check_waits(mixed_batches, num_batches, schedule, most, bound=lambda number: 4 * number + 1)
