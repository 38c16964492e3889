"""Calls of a cascade that require the heavy model get no image that is known to be worse."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ray_cluster.dispatch.core import DispatchCore
from ray_cluster.requests import CascadeUse, Failure, ImageRequest
from tests.dispatch.cascade_core import (
    STAGE,
    deferred,
    lease,
    made,
    make_core,
    only,
    routed,
    score_of,
    scorer,
)
from tests.fakes import failed, registration


def required(request_id: str = "a", **changes: Any) -> ImageRequest:
    use = CascadeUse("auto", STAGE, requires_heavy=True)
    return replace(routed(request_id, **changes), cascade=use)


def by_heavy(core: DispatchCore, now_s: float) -> str:
    """Have the heavy model make the image; return why it did."""
    heavy = lease(core, "h", now_s)
    outcome = only(core.report("h", [made(heavy, b"heavy")], now_s + 1.0)[0])
    assert outcome.result.data == b"heavy"
    assert outcome.cascade is not None
    assert outcome.cascade.stage == "heavy"
    return outcome.cascade.reason


def test_a_confident_light_image_is_an_answer_all_the_same() -> None:
    outcome = only(score_of(make_core(), required(), 0.9))
    assert outcome.result.data == b"light"


def test_it_is_made_anew_however_late_that_is() -> None:
    answer = only(score_of(make_core(), routed(slo_s=1.6), 0.1)).cascade
    assert answer is not None
    assert answer.reason == "no_time"
    core = make_core()
    assert score_of(core, required(slo_s=1.6), 0.1) == ()
    assert core.expire(9.0) == ()
    core.register(registration("h", "heavy"), 9.5)
    assert by_heavy(core, 10.0) == "deferred"


def test_without_a_heavy_replica_it_waits_for_one() -> None:
    for request, answers in ((routed(), 1), (required(), 0)):
        core = make_core()
        core.unregister("h", 0.0)
        assert len(score_of(core, request, 0.1)) == answers
    for now_s in range(7, 90):
        core.touch(["a"], float(now_s))
        assert core.expire(float(now_s)) == ()
    core.register(registration("h", "heavy"), 90.0)
    assert by_heavy(core, 91.0) == "deferred"


def test_one_that_the_heavy_model_fails_on_has_failed() -> None:
    for request, is_light in ((routed(), True), (required(), False)):
        core = make_core()
        deferred(core, request)
        heavy = lease(core, "h", 2.0)
        [outcome] = core.report("h", [failed(heavy)], 3.0)[0]
        assert isinstance(outcome, Failure) != is_light


@pytest.mark.parametrize("when_unscored", ["light", "heavy"])
def test_one_that_nobody_scores_is_made_by_the_heavy_model(when_unscored: str) -> None:
    core = make_core(scorers=0, when_unscored=when_unscored)
    assert core.offer([required()], 0.0).accepted
    light = lease(core, "l", 0.0)
    assert core.report("l", [made(light, b"light")], 1.0)[0] == ()
    core.register(scorer(), 1.5)
    assert by_heavy(core, 2.0) == "scorer_away"
