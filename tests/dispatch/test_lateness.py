"""What the core does about requests that would be late."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from ray_cluster.config.sections.cell_wide import DispatchConfig, LimitsConfig
from ray_cluster.dispatch.core import DispatchCore
from ray_cluster.policies.admission.estimates import ERROR_WINDOW, PRIOR_RATIO
from ray_cluster.policies.fidelity import Terms
from ray_cluster.policies.types import Offer
from tests.fakes import finished, image_request, poll_of, registration


@pytest.fixture
def core() -> DispatchCore:
    core = DispatchCore(config=DispatchConfig(), limits=LimitsConfig(), epoch=1)
    core.register(registration(max_in_flight=1, max_batch=1), 0.0)
    return core


def make_one(core: DispatchCore, name: str, now_s: float, took_s: float) -> float:
    """Have a request made in so many seconds; returns what was predicted for it."""
    offer = core.offer([image_request(name)], now_s)
    (lease,) = core.poll(poll_of(num_free=1), now_s).leases
    core.report("r", [finished(lease)], now_s + took_s)
    return offer.predicted_s


def test_what_minds_being_late_is_refused_and_nothing_of_it_stays(core: DispatchCore) -> None:
    alone_s = core.offer([image_request("probe")], 0.0).predicted_s
    core.abort(["probe"])
    # due as early as the other one, so that it need not give way
    core.offer([image_request("a", slo_s=PRIOR_RATIO * alone_s)], 0.0)
    (lease,) = core.poll(poll_of(num_free=1), 0.0).leases
    strict = image_request("b", when_late="refuse", slo_s=PRIOR_RATIO * alone_s)
    offer = core.offer([strict], 0.0)
    assert (offer.accepted, offer.reason) == (False, "too_late")
    assert offer.retry_after_s == pytest.approx(PRIOR_RATIO * alone_s, rel=0.01)
    assert core.num_waiting == 0
    # the same request is let in once the other is done
    core.report("r", [finished(lease)], 1.0)
    assert core.offer([strict], 1.0).accepted


def test_promises_follow_how_long_requests_really_take(core: DispatchCore) -> None:
    now_s = 0.0
    predicted_s = make_one(core, "first", now_s, 0.1)
    for number in range(ERROR_WINDOW):
        now_s += 100.0
        make_one(core, f"{number}", now_s, 3 * predicted_s)
    assert core.queue.safety_factor("m", now_s, is_simulated=True) == pytest.approx(3)
    tight = image_request("tight", when_late="refuse", slo_s=2.9 * predicted_s)
    roomy = image_request("roomy", when_late="refuse", slo_s=3.1 * predicted_s)
    assert core.offer([tight], now_s).reason == "too_late"
    assert core.offer([roomy], now_s).accepted
    # predictions themselves are what they were: the allowance is on top
    assert core.offer([image_request("any")], now_s).predicted_s < 3 * predicted_s


def test_a_request_that_may_be_made_with_fewer_steps_is_leased_with_those(
    core: DispatchCore,
) -> None:
    full_s = core.offer([image_request("a")], 0.0).predicted_s
    core.abort(["a"])
    willing = image_request(
        "b", when_late="refuse", slo_s=0.6 * PRIOR_RATIO * full_s, terms=Terms("exact", 10, 3)
    )
    offer = core.offer([willing], 0.0)
    assert offer.accepted
    (num_steps,) = offer.num_steps
    assert 3 <= num_steps < 10
    (lease,) = core.poll(poll_of(num_free=1), 0.0).leases
    assert lease.request.num_steps == num_steps
    assert lease.request.request_id == "b"


@pytest.mark.parametrize("has_replica", [True, False])
def test_only_what_even_the_start_says_is_too_late_is_refused_for_good(
    core: DispatchCore, has_replica: bool
) -> None:
    start_s = core.offer([image_request("probe")], 0.0).predicted_s
    core.abort(["probe"])
    busy = registration().step_cost
    busy = replace(busy, fixed_s=30 * busy.fixed_s, per_megapixel_s=30 * busy.per_megapixel_s)
    core.poll(replace(poll_of(num_free=1), step_cost=busy), 1.0)
    if not has_replica:
        # it has to be loaded first: that is no idle service either
        core.unregister("r", 1.0)

    def given(slo_s: float) -> Offer:
        return core.offer([image_request("new", when_late="refuse", slo_s=slo_s)], 1.0)

    for share in (1.01, 10.0):
        offer = given(share * start_s)
        assert (offer.accepted, offer.reason) == (False, "too_late")
        assert 0 < offer.retry_after_s < math.inf
    never = given(0.99 * start_s)
    assert (never.reason, never.retry_after_s) == ("too_late", math.inf)
    # what it is said to take has nothing of the spell
    assert start_s <= never.predicted_s <= 2 * start_s


def test_a_busy_spell_is_forgotten_though_all_that_comes_after_it_is_refused(
    core: DispatchCore,
) -> None:
    now_s, predicted_s = 0.0, make_one(core, "first", 0.0, 0.1)
    for number in range(ERROR_WINDOW):
        make_one(core, f"{number}", now_s, 30 * predicted_s)
        now_s += 30 * predicted_s
    strict = image_request("new", when_late="refuse", slo_s=2 * predicted_s)
    assert 0 < core.offer([strict], now_s).retry_after_s < math.inf
    assert core.offer([strict], now_s + 600.0).accepted
