"""A request's menu is what a step of it alone costs on so many ranks, in the faster way."""

import pytest

from ray_cluster.policies.costs.cost_model import step_s, work_of
from ray_cluster.policies.sequence_parallel.menus import is_apart, menu_of_request
from ray_cluster.policies.types import DegreeCost, GroupCost, StepCost
from tests.fakes import request_view

ONE = StepCost(0.01, 0.4, decode_per_megapixel_s=0.5)
# more ranks cost more at each step, and less for each pixel
TWO = DegreeCost(2, StepCost(0.03, 0.2), apart=StepCost(0.02, 0.21))
FOUR = DegreeCost(4, StepCost(0.05, 0.1))
GROUP = GroupCost(4, (DegreeCost(1, ONE), TWO, FOUR), token_px=16)


def test_a_step_costs_what_it_costs_alone_at_each_degree_that_pays() -> None:
    large = menu_of_request(request_view(), GROUP)
    assert large.degrees == (1, 2, 4)
    assert large.step_s == pytest.approx((0.41, 0.23, 0.15))
    small = menu_of_request(request_view(width_px=64, height_px=64), GROUP)
    assert small.degrees == (1,)


def test_a_guided_request_takes_the_faster_way() -> None:
    guided = request_view(uses_guidance=True)
    assert menu_of_request(guided, GROUP).step_s == pytest.approx((0.81, 0.43, 0.25))
    assert not is_apart(guided, TWO)
    small = request_view(uses_guidance=True, width_px=500)
    assert menu_of_request(small, GROUP).step_s[1] == pytest.approx(0.02 + 0.21)
    assert is_apart(small, TWO)
    assert not is_apart(request_view(width_px=500), TWO)
    assert not is_apart(small, FOUR)


def test_the_tail_is_the_decoding_and_work_is_of_all_steps() -> None:
    menu = menu_of_request(request_view(num_steps=20), GROUP)
    assert menu.tail_s == pytest.approx(0.5)
    assert menu.work == pytest.approx(20.0)
    assert menu.slo_class == "1000x1000"


def test_an_image_has_no_more_ranks_than_tokens() -> None:
    free = GroupCost(4, tuple(DegreeCost(k, StepCost(1 / k, 0.0)) for k in (1, 2, 4)), token_px=16)
    degrees = [
        menu_of_request(request_view(width_px=width, height_px=16), free).degrees
        for width in (16, 32, 48, 64)
    ]
    assert degrees == [(1,), (1, 2), (1, 2), (1, 2, 4)]


def test_add_ons_cost_their_share_at_each_degree() -> None:
    cost = StepCost(0.01, 0.4, control_share=0.5)
    group = GroupCost(1, (DegreeCost(1, cost),), token_px=16)
    request = request_view(controls=("canny",))
    (found,) = menu_of_request(request, group).step_s
    assert found == pytest.approx(step_s(cost, work_of([request])))
    assert found == pytest.approx(0.01 + 0.4 * 1.5)
