"""How long a decision stays the answer is told rightly: single steps decide the same."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from ray_cluster.policies.baselines.one_size_batches import one_size_batches
from ray_cluster.policies.steps.step_policy import StepDecision, StepView
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


@given(states, st.integers(1, 3))
def test_a_decision_stays_the_answer_for_as_long_as_it_says(
    drawn: list[tuple[int, int, float, int, int]], max_batch: int
) -> None:
    rows, now_s = rows_of(drawn), 0.0
    decision = one_size_batches(StepView(rows, COST, max_batch, now_s))
    assert decision.num_rounds >= 1
    view = StepView(rows, COST, max_batch, now_s)
    each_s = view.batch_s(decision.request_ids)
    for _ in range(decision.num_rounds):
        again = one_size_batches(StepView(rows, COST, max_batch, now_s))
        assert set(again.request_ids) == set(decision.request_ids)
        rows, now_s = stepped(rows, again), now_s + each_s


def test_rows_that_all_step_together_go_on_until_the_first_ends() -> None:
    rows = [RowView(request_view("a", num_steps=9)), RowView(request_view("b", num_steps=4))]
    assert one_size_batches(StepView(rows, COST, 2, 0.0)).num_rounds == 4
