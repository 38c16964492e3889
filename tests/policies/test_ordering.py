from hypothesis import given
from hypothesis import strategies as st

from ray_cluster.policies.leasing.ordering import queue_key
from tests.fakes import request_view

fields = st.fixed_dictionaries(
    {
        "priority": st.integers(-2, 2),
        "deadline_s": st.sampled_from([1.0, 2.0, 3.0]),
        "arrival_s": st.sampled_from([0.0, 0.5]),
        "steps_done": st.integers(0, 10),
    }
)


def test_priority_comes_before_deadline_before_arrival_before_id() -> None:
    ordered = [
        request_view("z", priority=1, deadline_s=9.0, arrival_s=9.0),
        request_view("y", deadline_s=1.0, arrival_s=9.0),
        request_view("x", deadline_s=2.0, arrival_s=0.0),
        request_view("a", deadline_s=2.0, arrival_s=1.0),
        request_view("b", deadline_s=2.0, arrival_s=1.0),
    ]
    mixed = [ordered[index] for index in (3, 1, 4, 0, 2)]
    assert sorted(mixed, key=queue_key) == ordered


@given(fields)
def test_progress_does_not_change_the_place(values: dict[str, float]) -> None:
    fresh = {**values, "steps_done": 0}
    assert queue_key(request_view(**values)) == queue_key(request_view(**fresh))


@given(fields, fields)
def test_no_two_requests_share_a_place(one: dict[str, float], other: dict[str, float]) -> None:
    assert queue_key(request_view("a", **one)) != queue_key(request_view("b", **other))
