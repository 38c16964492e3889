"""A last stage that works on the image, of whatever kind: every image goes through it, or none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest

from ray_cluster.dispatch.core import DispatchCore
from ray_cluster.dispatch.stages import RULES, KindRules
from ray_cluster.policies.types import StepCost
from ray_cluster.protocol.leases import Registration
from ray_cluster.requests import Failure, ImageRequest, OutputSpec
from tests.dispatch.cascade_core import (
    CONFIG,
    QUICK,
    lease,
    made,
    make_core,
    only,
    routed,
    scored,
    up_to_score,
)
from tests.fakes import failed, image_request

KIND: Any = "frame"
FRAMER = Registration("f", None, 4, 1, QUICK, kind=KIND, served_as="oak")


@pytest.fixture(autouse=True)
def framing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every request asks for one."""
    monkeypatch.setitem(cast(dict[str, KindRules], RULES), KIND, KindRules("image"))
    monkeypatch.setattr(ImageRequest, "last_stages", {KIND: "oak"})


def framing_core() -> DispatchCore:
    core = make_core()
    core.register(FRAMER, 0.0)
    return core


def to_the_frame(core: DispatchCore, **changes: Any) -> None:
    """Have the image of a model without a cascade made."""
    assert core.offer([image_request("a", "heavy", **changes)], 0.0).accepted
    first = lease(core, "h", 0.0)
    assert first.is_candidate
    assert core.report("h", [made(first, b"bare")], 1.0) == ((), ())


def test_the_image_of_one_model_goes_through_it() -> None:
    core = framing_core()
    to_the_frame(core)
    last = lease(core, "f", 1.5)
    assert (last.request.request_id, last.is_candidate, last.scored) == ("a", False, None)
    outcome = only(core.report("f", [made(last, b"framed")], 2.0)[0])
    assert (outcome.result.data, outcome.num_steps, outcome.attempts) == (b"framed", 10, 1)
    assert (outcome.cascade, outcome.elapsed_s, core.knows("a")) == (None, 2.0, False)
    assert core.snapshot(2.0).counters.made == {("heavy", "exact"): 1}


@pytest.mark.parametrize("confidence", [0.9, 0.1])
@pytest.mark.parametrize("heavy_fails", [False, True])
def test_in_a_cascade_so_does_the_one_that_answers(confidence: float, heavy_fails: bool) -> None:
    core = framing_core()
    score = up_to_score(core, routed())
    assert core.report("s0", [scored(score, confidence)], 1.5) == ((), ())
    if confidence == 0.1:
        heavy = lease(core, "h", 1.5)
        assert heavy.is_candidate
        report = failed(heavy) if heavy_fails else made(heavy, b"heavy")
        assert core.report("h", [report], 2.0) == ((), ())
    outcome = only(core.report("f", [made(lease(core, "f", 2.0), b"framed")], 2.5)[0])
    answer = outcome.cascade
    assert answer is not None
    expected = {
        (0.9, False): ("light", "confident"),
        (0.9, True): ("light", "confident"),
        (0.1, False): ("heavy", "deferred"),
        (0.1, True): ("light", "heavy_failed"),
    }[confidence, heavy_fails]
    assert (outcome.result.data, answer.stage, answer.reason) == (b"framed", *expected)
    assert outcome.num_steps == (2 if answer.stage == "light" else 10)


def test_its_loss_is_retried_and_its_failure_fails_the_request() -> None:
    core = framing_core()
    to_the_frame(core)
    lease(core, "f", 1.5)
    core.register(FRAMER, 2.0)
    (outcome,), _ = core.report("f", [failed(lease(core, "f", 2.0))], 2.5)
    assert isinstance(outcome, Failure)
    assert (outcome.kind, outcome.attempts) == ("error", 2)
    score = up_to_score(core, routed("b"), 3.0)
    core.report("s0", [scored(score, 0.9)], 4.5)
    for number in range(CONFIG.max_attempts):
        lease(core, "f", 5.0 + number)
        core.register(FRAMER, 5.0 + number)
    (lost,) = core.take_outcomes()
    assert isinstance(lost, Failure)
    assert lost.kind == "lost"


def test_what_it_works_on_is_left_in_the_store_for_deletion() -> None:
    core = framing_core()
    to_the_frame(core, output=OutputSpec(is_stored=True))
    outcome = only(core.report("f", [made(lease(core, "f", 1.5))], 2.0)[0])
    assert (outcome.is_candidate, core.take_unpublished()) == (False, ["a.candidate"])


def test_what_is_promised_leaves_time_for_it() -> None:
    core = framing_core()
    core.register(replace(FRAMER, step_cost=StepCost(fixed_s=5.0, per_megapixel_s=0.0)), 0.0)
    tight = {"slo_s": 5.5, "when_late": "refuse"}
    assert core.offer([image_request("a", "heavy", **tight)], 0.0).reason == "too_late"
    assert core.offer([image_request("b", "heavy", **{**tight, "slo_s": 8.0})], 0.0).accepted
    # ten steps of a tenth of a second are to be done by then
    assert lease(core, "h", 0.0).deadline_in_s == pytest.approx(3.0)
