"""What cascades measure, promise and tell others: rates, drift, arrivals, held polls."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ray_cluster.dispatch.core import DispatchCore
from ray_cluster.dispatch.service import DispatchService
from ray_cluster.policies.types import StepCost
from tests.dispatch.cascade_core import (
    CONFIG,
    deferred,
    lease,
    made,
    make_core,
    only,
    routed,
    scored,
    scorer,
    up_to_score,
)
from tests.dispatch.virtual_service import held, now
from tests.fakes import image_request, poll_of, registration, run_virtually, some_settings


def test_a_wanted_deferral_rate_follows_the_latest_confidences() -> None:
    core = make_core(threshold=None, deferral_rate=0.25, window=20)
    (view,) = core.snapshot(0.0).cascades
    # by the calibrated curve, of uniform confidences
    assert view.threshold == pytest.approx(0.25, abs=0.06)
    assert view.drift is None
    for number in range(20):
        score = up_to_score(core, routed(f"r{number}"), float(number))
        confidence = 0.8 + 0.01 * number
        core.report("s0", [scored(score, confidence)], number + 1.0)
        core.poll(poll_of("h"), number + 1.0)
        core.abort([f"r{number}"])
    (view,) = core.snapshot(0.0).cascades
    assert view.threshold == pytest.approx(0.85)
    assert view.deferral_rate == pytest.approx(0.25)
    # all are above 0.8, of which a fifth was expected there
    assert view.drift == pytest.approx(0.8, abs=0.02)


def test_what_is_in_force_counts_what_was_made_of_each_reason() -> None:
    core = make_core()
    for number, confidence in enumerate((0.9, 0.7, 0.1)):
        score = up_to_score(core, routed(f"r{number}"), float(number))
        core.report("s0", [scored(score, confidence)], number + 0.5)
    heavy = lease(core, "h", 3.0)
    core.report("h", [made(heavy, b"heavy")], 4.0)
    (found,) = core.cascades.in_force()
    assert (found.name, found.threshold) == ("auto", 0.6)
    assert found.images == {"confident": 2, "deferred": 1}


def test_a_cascade_that_is_removed_still_decides_over_what_it_began() -> None:
    core = make_core()
    score = up_to_score(core, routed())
    core.apply(some_settings(), 1.0)
    assert core.snapshot(1.0).cascades == ()
    answer = only(core.report("s0", [scored(score, 0.9)], 1.5)[0]).cascade
    assert answer is not None
    assert (answer.reason, answer.threshold) == ("confident", 0.6)


def test_deferred_images_count_as_arrivals_of_the_heavy_model() -> None:
    core = make_core(max_queued=64)
    before = core.queue.forecast_view([heavy_view(core)], 0.0)
    assert before is not None
    assert not before.later
    for number in range(10):
        deferred(core, routed(f"r{number}", slo_s=900.0), 2.0 * number)
        core.report("h", [made(lease(core, "h", 2.0 * number + 1.5))], 2.0 * number + 1.6)
    after = core.queue.forecast_view([heavy_view(core)], 20.0)
    assert after is not None
    assert len(after.later) == 10
    assert after.later_every_s == pytest.approx(2.0, rel=0.2)


def heavy_view(core: DispatchCore) -> Any:
    return image_request("new", "heavy").view(arrival_s=0.0, deadline_s=60.0)


def test_what_is_promised_leaves_time_for_the_score() -> None:
    core = make_core()
    core.unregister("s0", 0.0)
    slow = replace(scorer(), step_cost=StepCost(fixed_s=5.0, per_megapixel_s=0.0))
    core.register(slow, 0.0)
    tight = {"slo_s": 5.1, "when_late": "refuse"}
    assert core.offer([routed("a", **tight)], 0.0).reason == "too_late"
    assert core.offer([routed("b", **{**tight, "slo_s": 6.5})], 0.0).accepted


def test_an_event_that_scores_what_has_no_cascade_is_stale() -> None:
    core = make_core()
    core.offer([image_request("a", "heavy")], 0.0)
    held = lease(core, "h", 0.0)
    assert core.report("h", [scored(held, 0.5)], 1.0) == ((), ("a",))


def test_whoever_does_the_next_stage_hears_of_it_at_once() -> None:
    async def main() -> None:
        core = make_core(scorers=0)
        service = DispatchService(core, config=CONFIG, clock=now)
        epochs = [await service.register(one) for one in (scorer(), registration("h", "heavy"))]
        assert epochs == [1, 1]
        judging, heavy = (
            await held(service.poll(poll_of("s0"))),
            await held(service.poll(poll_of("h"))),
        )
        assert (await service.offer([routed()])).accepted
        [light] = (await service.poll(poll_of("l"))).leases
        await service.report("l", [made(light)])
        [score] = (await judging).leases
        await service.report("s0", [scored(score, 0.1)])
        assert [lease.request.request_id for lease in (await heavy).leases] == ["a"]
        # in no time
        assert now() == 0.0
        await service.close()

    run_virtually(main())
