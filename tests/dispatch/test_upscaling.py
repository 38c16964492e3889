"""Upscaling as a stage: its time counts in admission, and what becomes of what nobody enlarges."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from ray_cluster.dispatch.core import DispatchCore
from ray_cluster.dispatch.records import Restored
from ray_cluster.protocol.outcomes import Completed
from ray_cluster.requests import Failure, ImageRequest, OutputSpec
from tests.dispatch.cascade_core import lease, made, only
from tests.dispatch.upscaling_core import (
    CONFIG,
    LANE,
    Worker,
    make_core,
    model,
    request,
    run,
    settings,
    upscaler,
)
from tests.fakes import failed, poll_of

# ten steps of a tenth of a second, and half a second more for the enlargement
MODEL_S, UPSCALE_S = 1.0, 0.5


def strict(slo_s: float, **changes: Any) -> ImageRequest:
    return request(slo_s=slo_s, when_late="refuse", **changes)


@pytest.mark.parametrize("factor", [1, 2, 4])
def test_a_deadline_that_leaves_no_time_for_it_is_refused(factor: int) -> None:
    core = make_core(model(), upscaler(image_s=UPSCALE_S))
    offer = core.offer([strict(1.3, factor=factor)], 0.0)
    assert (offer.accepted, offer.reason) == ((True, None) if factor == 1 else (False, "too_late"))
    if factor > 1:
        # what a caller is told that an idle service takes, to be safe
        assert offer.predicted_s == pytest.approx(1.25 * MODEL_S + UPSCALE_S, abs=0.1)


def test_an_accepted_one_keeps_its_deadline_and_its_model_is_told_an_earlier_one() -> None:
    core = make_core(model(), upscaler(image_s=UPSCALE_S))
    workers = [Worker(model()), Worker(upscaler(image_s=UPSCALE_S))]
    assert core.offer([strict(2.0)], 0.0).accepted
    workers[0].poll(core, 0.0)
    first = workers[0].lease
    assert first is not None
    assert first.deadline_in_s == pytest.approx(2.0 - UPSCALE_S)
    _, outcomes = run(core, workers, [], 2.5)
    [outcome] = outcomes.values()
    assert isinstance(outcome, Completed)
    assert (outcome.deadline_met, outcome.elapsed_s) == (True, pytest.approx(1.5))
    assert outcome.result.timing.total_s == pytest.approx(1.5)
    assert outcome.result.steps_by_degree == ((2, 10),)


@pytest.mark.parametrize("load", [0.7, 1.5])
@pytest.mark.parametrize("image_s", [0.2, 1.0])
def test_of_what_is_accepted_under_load_all_is_in_time(load: float, image_s: float) -> None:
    rng = random.Random(3)
    core = make_core(model(), upscaler(image_s=image_s))
    arrivals, now_s = [], 0.0
    for number in range(200):
        now_s += rng.expovariate(load / MODEL_S)
        factor = 1 + number % 2
        asked = request(f"{number}", factor, slo_s=4.0, when_late="refuse")
        arrivals.append((now_s, asked))
    workers = [Worker(model()), Worker(upscaler(image_s=image_s))]
    offers, outcomes = run(core, workers, arrivals, now_s + 30.0)
    accepted = {one for one, offer in offers.items() if offer.accepted}
    assert outcomes.keys() == accepted
    late = [
        one for one in outcomes.values() if not (isinstance(one, Completed) and one.deadline_met)
    ]
    assert not late


def test_images_of_one_call_wait_for_each_other_at_the_upscaler() -> None:
    together = replace(model(), max_in_flight=4, max_batch=4)
    core = make_core(together, upscaler(image_s=UPSCALE_S))
    call = [strict(2.5, request_id=f"{number}") for number in range(4)]
    # made in a second, and enlarged in two
    assert core.offer(call, 0.0).reason == "too_late"
    assert core.offer(call[:1], 0.0).accepted


def test_work_before_the_upscaler_is_no_reason_to_refuse_for_ever() -> None:
    core = make_core(model(), upscaler(image_s=3.0))
    workers = [Worker(model()), Worker(upscaler(image_s=3.0))]
    run(core, workers, [(0.0, request("a")), (0.0, request("b"))], 2.5)
    offer = core.offer([strict(6.0, request_id="c")], 2.5)
    assert offer.reason == "too_late"
    # about what the two before it still take there
    assert 1.0 < offer.retry_after_s < 6.0


def test_without_an_upscaler_a_call_is_refused_and_others_are_not() -> None:
    # one that is configured may never have come
    core = make_core(model())
    assert core.snapshot(0.0).warnings == (
        "no replica of the upscaler big lives; 0 images wait for one",
    )
    assert core.offer([request()], 0.0).reason == "stage_not_ready"
    assert core.offer([request("b", 1)], 0.0).accepted
    # one that died may come back soon
    core.register(upscaler(), 1.0)
    core.unregister("u", 2.0)
    assert core.offer([request("c")], 61.9).accepted
    assert core.offer([request("d")], 62.0).reason == "stage_not_ready"
    core.register(upscaler(), 63.0)
    assert core.offer([request("e")], 63.0).accepted


def to_the_upscaler(request_id: str, *, is_job: bool) -> DispatchCore:
    """Return a core where an image waits for the upscaler, which has died at 1 s."""
    core = make_core(model(), upscaler())
    client = None if is_job else "a"
    assert core.offer([request(request_id)], 0.0, client=client).accepted
    assert core.report("r", [made(lease(core, "r", 0.0))], 1.0) == ((), ())
    core.unregister("u", 1.0)
    return core


def test_a_call_that_waits_for_a_lost_upscaler_ends_and_says_why_and_a_job_waits() -> None:
    core = to_the_upscaler("call", is_job=False)
    core.touch(["call"], 60.0)
    assert core.expire(60.0) == ()
    core.touch(["call"], 61.0)
    (outcome,) = core.expire(61.0)
    assert isinstance(outcome, Failure)
    assert (outcome.kind, outcome.stage) == ("lost", "queue")
    assert outcome.message == "no replica of the upscaler big has lived for 60 s"
    assert core.take_unpublished() == ["call.candidate"]
    core = to_the_upscaler("job", is_job=True)
    assert core.expire(1000.0) == ()
    core.register(upscaler("v"), 1000.0)
    last = lease(core, "v", 1000.0)
    assert (last.request.request_id, last.source) == ("job", "job.candidate")
    assert only(core.report("v", [made(last)], 1001.0)[0]).result.data


def test_a_job_whose_upscaler_is_removed_is_enlarged_while_one_lives_and_ends_without() -> None:
    core = to_the_upscaler("job", is_job=True)
    core.register(upscaler("v"), 2.0)
    core.apply(settings(upscalers=()), 2.0)
    assert core.offer([request("new")], 2.0).reason == "stage_not_ready"
    assert core.expire(2.0) == ()
    core.unregister("v", 3.0)
    (outcome,) = core.expire(3.0)
    assert isinstance(outcome, Failure)
    assert (outcome.kind, outcome.message) == ("lost", "the upscaler big was removed")


def test_an_image_that_ends_every_upscaler_fails_in_words() -> None:
    core = to_the_upscaler("a", is_job=True)
    for number in range(CONFIG.max_attempts):
        core.register(upscaler(), 2.0 + number)
        lease(core, "u", 2.0 + number)
    core.unregister("u", 9.0)
    (outcome,) = core.take_outcomes()
    assert isinstance(outcome, Failure)
    assert (outcome.kind, outcome.stage) == ("lost", "replica")
    assert outcome.message == "2 replicas were lost while they worked on it"
    # the model has made it once
    assert outcome.attempts == CONFIG.max_attempts
    assert core.take_unpublished() == ["a.candidate"]
    assert (core.num_waiting, core.knows("a")) == (0, False)


def test_a_failed_enlargement_fails_its_request() -> None:
    core = to_the_upscaler("a", is_job=False)
    core.register(upscaler(), 2.0)
    (outcome,), _ = core.report("u", [failed(lease(core, "u", 2.0))], 2.5)
    assert isinstance(outcome, Failure)
    assert outcome.kind == "error"


@pytest.mark.parametrize("end", ["met", "late", "failed", "lost"])
def test_an_end_counts_under_the_model_and_its_size_whichever_stage_it_came_to(end: str) -> None:
    core = to_the_upscaler("a", is_job=False)
    if end == "lost":
        core.touch(["a"], 61.0)
        core.expire(61.0)
    else:
        core.register(upscaler(), 2.0)
        last, end_s = lease(core, "u", 2.0), 99.0 if end == "late" else 3.0
        core.report("u", [failed(last) if end == "failed" else made(last)], end_s)
    counters = core.snapshot(99.0).counters
    is_met, is_made = end == "met", end in {"met", "late"}
    assert (counters.met, counters.missed) == (
        ({("m", "64"): 1}, {}) if is_met else ({}, {("m", "64"): 1})
    )
    assert counters.stages.keys() == {("m", "denoise"), *[("m", "upscale")] * is_made}


def test_an_image_that_may_be_in_the_store_already_is_deleted_with_its_request() -> None:
    core = make_core(model(), upscaler())
    assert core.offer([request("a"), request("b")], 0.0).accepted
    lease(core, "r", 0.0)
    # the replica of the first has perhaps stored it, and not said so
    core.abort(["a", "b"])
    assert core.take_unpublished() == ["a.candidate"]


def test_a_later_dispatcher_knows_the_upscaler_of_before() -> None:
    core = make_core(epoch=2)
    core.remember([model(), upscaler(image_s=5.0)], 100.0)
    core.restore(Restored(request("old", output=OutputSpec(is_stored=True)), 1.0, 60.0), 100.0)
    # it is waited for as for a model, and its time counts
    assert core.queue.pool(LANE) is not None
    assert core.offer([request("a")], 101.0).accepted
    assert core.offer([strict(4.0, request_id="b")], 101.0).reason == "too_late"
    core.register(model(), 102.0)
    core.register(upscaler(), 102.0)
    # whoever enlarged it has to wait until it is made anew
    reply = core.poll(poll_of("u", 0, {"old": 0}, epoch=2), 102.0)
    assert (reply.adopted, reply.aborts, reply.moved) == ({}, ("old",), ("old",))
    assert core.offer([request("c")], 500.0).accepted


def test_an_upscaler_is_needed_by_what_is_still_at_the_model() -> None:
    core = make_core(model(), upscaler())
    assert core.offer([request(request_id="a"), request(request_id="b", factor=1)], 0.0).accepted
    assert core.num_open_by_model() == {"m": 2, LANE: 1}
