"""Loads add up exactly, and priced they are the seconds that requests take."""

from functools import reduce
from operator import add

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_cluster.policies.load import NO_LOAD, amounts_of, load_of, load_s, prices_s
from ray_cluster.policies.types import RequestView, StepCost
from tests.fakes import request_view
from tests.policies.costs import alone_s, batch_s

requests = st.builds(
    request_view,
    width_px=st.sampled_from([64, 768, 2048]),
    height_px=st.sampled_from([64, 1024]),
    num_steps=st.integers(0, 50),
    uses_guidance=st.booleans(),
    num_previews=st.integers(0, 3),
    steps_done=st.integers(0, 5),
)
COST = StepCost(0.1, 1.0, 0.5, per_squared_megapixel_s=3.0)


@given(st.lists(requests, max_size=9))
def test_what_was_added_can_be_taken_away_again(group: list[RequestView]) -> None:
    loads = [load_of(one) for one in group]
    total = reduce(add, loads, NO_LOAD)
    assert total.num_requests == len(group)
    for load in loads:
        total -= load
    assert total == NO_LOAD


@given(st.lists(requests, max_size=9))
def test_a_sums_seconds_are_the_sum_of_seconds(group: list[RequestView]) -> None:
    total = reduce(add, map(load_of, group), NO_LOAD)
    assert load_s(COST, total) == pytest.approx(sum(alone_s(COST, one) for one in group))
    assert amounts_of(total) @ prices_s(COST) == pytest.approx(load_s(COST, total))


def test_a_load_in_figures() -> None:
    request = request_view(width_px=2000, height_px=1000, uses_guidance=True, steps_done=4)
    load = load_of(request)
    assert (load.steps, load.step_pixels, load.decode_pixels) == (6, 24_000_000, 2_000_000)
    assert load.step_squares == 6 * 2 * (2_000_000**2)
    assert load_s(COST, load) == pytest.approx(6 * (0.1 + 4 + 3 * 8) + 0.5 * 2)
    assert batch_s(COST, request, 3) == pytest.approx(6 * (0.1 + 3 * 4 + 3 * 3 * 8) + 0.5 * 2)
