"""How long a decision stays the answer is told rightly: single steps decide the same."""

from dataclasses import replace
from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st

from ray_cluster.policies.baselines.one_size_batches import one_size_batches
from ray_cluster.policies.costs.cost_model import step_s, work_of
from ray_cluster.policies.steps.mixed_batching import mixed_batches
from ray_cluster.policies.steps.step_policy import StepDecision, StepPolicy, StepView
from ray_cluster.policies.types import RowView, StepCost
from tests.fakes import request_view

COST = StepCost(0.25, 0.5)
states = st.lists(
    st.tuples(
        st.sampled_from([500, 1000]),
        st.integers(1, 12),
        st.sampled_from([3.0, 6.5, 20.0, 500.0]),
        st.integers(0, 6),
        st.integers(0, 1),
    ),
    min_size=1,
    max_size=7,
)


def rows_of(drawn: list[tuple[int, int, float, int, int]]) -> list[RowView]:
    return [
        RowView(
            request_view(
                f"{n}", width_px=width, num_steps=steps, deadline_s=deadline_s, priority=priority
            ),
            waited,
        )
        for n, (width, steps, deadline_s, waited, priority) in enumerate(drawn)
    ]


def stepped(rows: list[RowView], decision: StepDecision) -> list[RowView]:
    """The rows after one round, without those that have ended."""
    after = [
        RowView(replace(one.request, steps_done=one.request.steps_done + 1), 0)
        if one.request.request_id in decision.request_ids
        else RowView(one.request, one.waited_rounds + 1)
        for one in rows
    ]
    return [one for one in after if one.request.remaining_steps]


def test_nothing_to_step_is_no_decision() -> None:
    assert one_size_batches(StepView([], COST, 2, 0.0)) == StepDecision()


# of a step over what is expected
paces = st.lists(st.sampled_from([1.0, 0.7, 0.9, 1.1, 1.6]), min_size=12, max_size=12)


@given(states, st.integers(1, 7), st.sampled_from([one_size_batches, mixed_batches]), paces)
def test_a_decision_stays_the_answer_for_as_long_as_it_says(
    drawn: list[tuple[int, int, float, int, int]],
    max_batch: int,
    policy: StepPolicy,
    paces: list[float],
) -> None:
    rows = rows_of(drawn)
    decision = policy(StepView(rows, COST, max_batch, 0.0))
    assert decision.num_rounds >= 1
    chosen = [one.request for one in rows if one.request.request_id in decision.request_ids]
    each_s = step_s(COST, work_of(chosen))
    ends_s = list(accumulate(pace * each_s for pace in paces[: decision.num_rounds]))
    num_held = decision.num_held(0.0, ends_s)
    assert 1 <= num_held <= decision.num_rounds
    for now_s in [0.0, *ends_s[: num_held - 1]]:
        again = policy(StepView(rows, COST, max_batch, now_s))
        assert set(again.request_ids) == set(decision.request_ids)
        rows = stepped(rows, again)


def test_steps_that_take_as_long_as_expected_need_no_decision_between_them() -> None:
    rows = [request_view(name, num_steps=9, deadline_s=15.0) for name in "ab"]
    decision = mixed_batches(StepView([RowView(one) for one in rows], COST, 2, 0.0))
    assert decision.num_held(0.0, [1.25 * number for number in range(1, 10)]) == 9
    # 15 s are 3.75 s more than they need: none is as late before the last step but one
    assert decision.num_held(0.0, [1.75 * number for number in range(1, 10)]) == 8


def test_rows_that_all_step_together_go_on_until_the_first_ends() -> None:
    rows = [RowView(request_view("a", num_steps=9)), RowView(request_view("b", num_steps=4))]
    assert one_size_batches(StepView(rows, COST, 2, 0.0)).num_rounds == 4
