import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_cluster.policies.admission.admission import predict_s
from ray_cluster.policies.admission.load import load_of
from ray_cluster.policies.steps.previews import MAX_PREVIEWS, preview_steps
from ray_cluster.policies.types import StepCost
from tests.fakes import replica_view, request_view
from tests.policies.queues import ListQueue

counts = st.integers(0, MAX_PREVIEWS)


def test_previews_come_in_equal_distances() -> None:
    assert preview_steps(20, 3) == (5, 10, 15)
    assert preview_steps(30, 1) == (15,)
    assert preview_steps(20, 0) == ()


@pytest.mark.parametrize(("num_steps", "steps"), [(1, ()), (2, (1,)), (3, (1, 2)), (4, (1, 2, 3))])
def test_there_are_fewer_where_there_are_not_enough_steps(
    num_steps: int, steps: tuple[int, ...]
) -> None:
    assert preview_steps(num_steps, 3) == steps


@given(st.integers(1, 1000), counts)
def test_none_is_before_the_first_step_or_after_the_last(num_steps: int, count: int) -> None:
    steps = preview_steps(num_steps, count)
    assert list(steps) == sorted(set(steps))
    assert all(0 < step < num_steps for step in steps)
    assert len(steps) == min(count, num_steps - 1) or num_steps <= 2 * count


@given(st.integers(1, 200), counts, st.integers(0, 200))
def test_what_is_left_are_the_later_ones(num_steps: int, count: int, done: int) -> None:
    later = [step for step in preview_steps(num_steps, count) if step > done]
    request = request_view(num_steps=num_steps, num_previews=count, steps_done=done)
    assert request.previews_left == len(later)


def test_each_preview_still_to_come_is_a_decode_more() -> None:
    pixels = 1_000_000
    assert load_of(request_view()).decode_pixels == pixels
    assert load_of(request_view(num_previews=3)).decode_pixels == 4 * pixels
    assert load_of(request_view(num_previews=3, steps_done=5)).decode_pixels == 2 * pixels


def test_previews_are_charged_in_the_predicted_finish() -> None:
    cost = StepCost(0.1, 1.0, decode_per_megapixel_s=2.0)
    queue = ListQueue(replicas=[replica_view(step_cost=cost)])
    plain = predict_s([request_view()], queue, 0.0)
    assert predict_s([request_view(num_previews=2)], queue, 0.0) == pytest.approx(plain + 2 * 2.0)
