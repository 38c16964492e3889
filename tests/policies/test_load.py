"""Loads add up exactly, and priced they are the seconds that requests take."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_cluster.policies.admission.load import (
    NO_LOAD,
    NUM_AMOUNTS,
    amounts_of,
    load_of,
    load_s,
    priced_s,
    prices_s,
    row_pixels,
    total_load,
)
from ray_cluster.policies.costs.cost_model import alone_s, encode_s, own_s, step_s, work_of
from ray_cluster.policies.types import MOST_PASSES, RequestView, StepCost
from tests.fakes import request_view
from tests.policies.costs import batch_s

requests = st.builds(
    request_view,
    width_px=st.sampled_from([64, 768, 2048]),
    height_px=st.sampled_from([64, 1024]),
    num_steps=st.integers(0, 50),
    uses_guidance=st.booleans(),
    num_previews=st.integers(0, 3),
    steps_done=st.integers(0, 5),
    controls=st.sampled_from([(), ("c",), ("c", "d")]),
    loras=st.sampled_from([(), ("a",), ("a", "b")]),
    template=st.sampled_from([None, "t"]),
    mask_ratio=st.floats(0.01, 1.0),
    num_passes=st.integers(0, 9),
    num_inputs=st.integers(0, 2),
    reference_px=st.sampled_from([0, 512 * 384]),
)
COST = StepCost(0.1, 1.0, 0.5, per_squared_megapixel_s=3.0, encode_per_megapixel_s=0.25)
SHARES = replace(COST, control_share=0.5, lora_share=0.1, spared_share=0.75)
costs = st.sampled_from([COST, SHARES])


def plain(request: RequestView) -> RequestView:
    """The same request without add-ons and mask."""
    return replace(request, controls=(), loras=(), template=None, mask_ratio=1.0)


@given(st.lists(requests, max_size=9))
def test_what_was_added_can_be_taken_away_again(group: list[RequestView]) -> None:
    loads = [load_of(one) for one in group]
    total = total_load(group)
    assert total.num_requests == len(group)
    for load in loads:
        total = total.minus(load)
    assert total == NO_LOAD


@given(st.lists(requests, max_size=9), costs)
def test_a_sums_seconds_are_the_sum_of_seconds(group: list[RequestView], cost: StepCost) -> None:
    total = total_load(group)
    # by each request's steps, which know nothing of loads
    seconds = [
        one.remaining_steps * (cost.fixed_s + own_s(cost, one))
        + load_of(one).decode_pixels / 1e6 * cost.decode_per_megapixel_s
        + encode_s(cost, one)
        for one in group
    ]
    assert load_s(cost, total) == pytest.approx(sum(seconds))
    amounts = np.array([amounts_of(load_of(one)) for one in group]).reshape(-1, NUM_AMOUNTS).T
    assert priced_s(prices_s(cost), amounts) == pytest.approx(seconds)
    assert priced_s(prices_s(cost), amounts_of(total)) == pytest.approx(load_s(cost, total))


@given(requests, costs)
def test_an_edit_takes_longer_by_its_encoding_until_it_has_begun(
    request: RequestView, cost: StepCost
) -> None:
    edit, text = (replace(request, num_inputs=count) for count in (1, 0))
    more_s = 0.25 * request.width_px * request.height_px / 1e6
    begun = 0 if request.steps_done else 1
    assert alone_s(cost, edit) - alone_s(cost, text) == pytest.approx(begun * more_s)
    assert load_s(cost, load_of(edit)) - load_s(cost, load_of(text)) == pytest.approx(
        begun * more_s
    )


@given(st.lists(requests, min_size=1, max_size=9), costs)
def test_row_pixels_are_those_of_plain_rows_that_cost_as_much(
    group: list[RequestView], cost: StepCost
) -> None:
    amounts = np.array([amounts_of(load_of(one)) for one in group]).T
    pixels, squares = row_pixels(cost, amounts)
    rows_s = cost.per_megapixel_s * pixels / 1e6 + cost.per_squared_megapixel_s * squares / 1e12
    assert rows_s == pytest.approx([one.remaining_steps * own_s(cost, one) for one in group])


@given(requests, costs)
def test_add_ons_and_masks_change_the_work_by_their_shares(
    request: RequestView, cost: StepCost
) -> None:
    row_s = own_s(cost, plain(request))
    linear_s = own_s(replace(cost, per_squared_megapixel_s=0.0), plain(request))
    spared = 0.0 if request.template is None else 1 - request.mask_ratio
    # a mask is of the image alone, not of the pictures beside it
    spared *= request.width_px * request.height_px / request.row_px
    more_s = (
        len(request.controls) * cost.control_share * row_s
        + len(request.loras) * cost.lora_share * linear_s
        - cost.spared_share * spared * row_s
    )
    # masks are counted in whole pixels
    assert own_s(cost, request) == pytest.approx(row_s + more_s, rel=1e-3)
    assert step_s(cost, work_of([request] * 3)) == pytest.approx(
        cost.fixed_s + 3 * own_s(cost, request)
    )


@given(st.lists(requests, min_size=1, max_size=9))
def test_without_shares_add_ons_and_masks_change_nothing_to_the_last_digit(
    group: list[RequestView],
) -> None:
    for one in group:
        assert own_s(COST, one) == own_s(COST, plain(one))
        assert load_s(COST, load_of(one)) == load_s(COST, load_of(plain(one)))
    # nor do shares where nobody has add-ons
    plains = [plain(one) for one in group]
    amounts = np.array([amounts_of(load_of(one)) for one in plains]).T
    assert (priced_s(prices_s(SHARES), amounts) == priced_s(prices_s(COST), amounts)).all()
    assert step_s(SHARES, work_of(plains)) == step_s(COST, work_of(plains))
    assert load_s(SHARES, load_of(plains[0])) == load_s(COST, load_of(plains[0]))


@given(requests)
def test_who_needs_nothing_can_not_be_passed_over(request: RequestView) -> None:
    passes = load_of(request).passes
    assert passes == (max(0, MOST_PASSES - request.num_passes) if request.needs else 0)
    assert load_of(plain(request)).passes == 0
    assert load_of(plain(request)).is_plain


def test_a_load_in_figures() -> None:
    request = request_view(width_px=2000, height_px=1000, uses_guidance=True, steps_done=4)
    load = load_of(request)
    assert (load.steps, load.step_pixels, load.decode_pixels) == (6, 24_000_000, 2_000_000)
    assert load.step_squares == 6 * 2 * (2_000_000**2)
    assert load_s(COST, load) == pytest.approx(6 * (0.1 + 4 + 3 * 8) + 0.5 * 2)
    assert batch_s(COST, request, 3) == pytest.approx(6 * (0.1 + 3 * 4 + 3 * 3 * 8) + 0.5 * 2)
