"""Cascades in the dispatch core: light, scored, published or made anew; each request ends once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ray_cluster.config.sections.controlnets import ControlNetConfig
from ray_cluster.dispatch.records import RequestRecord, Restored
from ray_cluster.protocol.outcomes import Completed, Deferred
from ray_cluster.requests import (
    AddOns,
    BlobRef,
    CascadeUse,
    ControlNetUse,
    Failure,
    ImageResult,
    OutputSpec,
    Timing,
)
from tests.dispatch.cascade_core import (
    CONFIG,
    SMALL,
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
from tests.fakes import failed, image_request, poll_of, registration


def test_a_confident_image_is_published_as_the_light_model_made_it() -> None:
    core = make_core()
    score = up_to_score(core, routed())
    assert (score.scored, score.is_candidate) == (SMALL, True)
    assert score.request.prompt == "a red circle"
    outcome = only(core.report("s0", [scored(score, 0.7)], 1.25)[0])
    assert (outcome.result.data, outcome.num_steps, outcome.attempts) == (b"light", 2, 1)
    answer = outcome.cascade
    assert answer is not None
    assert (answer.name, answer.model, answer.stage, answer.reason) == (
        *("auto", "light", "light", "confident"),
    )
    assert (answer.confidence, answer.threshold) == (0.7, 0.6)
    assert [(one.stage, one.name, one.took_s) for one in answer.stages] == [
        ("light", "light", 1.0),
        ("score", "judge", 0.25),
    ]
    assert not core.knows("a")
    counters = core.snapshot(2.0).counters
    assert counters.answered == {("auto", "light", "confident"): 1}
    found = {key: sum(one.counts) for key, one in counters.stages.items()}
    assert found == {("auto", "light"): 1, ("auto", "score"): 1}
    assert counters.met == {("auto", "64"): 1}


def test_an_image_below_the_threshold_is_made_anew() -> None:
    core = make_core()
    request = routed()
    deferred(core, request)
    (note,) = core.take_deferred()
    assert (note.request_id, note.confidence, note.threshold) == ("a", 0.1, 0.6)
    heavy = lease(core, "h", 2.0)
    assert (heavy.request, heavy.is_candidate, heavy.scored) == (request, False, None)
    # the deadline is the call's
    assert heavy.deadline_in_s == pytest.approx(28.0)
    outcome = only(core.report("h", [made(heavy, b"heavy")], 4.0)[0])
    assert (outcome.result.data, outcome.num_steps, outcome.elapsed_s) == (b"heavy", 10, 4.0)
    answer = outcome.cascade
    assert answer is not None
    assert (answer.model, answer.stage, answer.reason) == ("heavy", "heavy", "deferred")
    assert [one.stage for one in answer.stages] == ["light", "score", "heavy"]
    assert answer.stages[2].queue_s == pytest.approx(0.5)
    assert sum(one.took_s for one in answer.stages) == pytest.approx(4.0)


@pytest.mark.parametrize("entry", ["light", "heavy"])
def test_a_request_that_is_not_routed_has_one_stage(entry: Any) -> None:
    core = make_core()
    use = CascadeUse("auto", None, entry, "quality")
    assert core.offer([image_request("a", entry, cascade=use)], 0.0).accepted
    held = lease(core, entry[0], 0.0)
    assert not held.is_candidate
    answer = only(core.report(entry[0], [made(held)], 1.0)[0]).cascade
    assert answer is not None
    assert (answer.model, answer.stage, answer.reason) == (entry, entry, "quality")
    assert (answer.confidence, len(answer.stages)) == (None, 1)


def test_the_second_stage_is_not_refused_by_a_full_queue() -> None:
    core = make_core(max_queued=2)
    score = up_to_score(core, routed())
    assert core.offer([image_request("b", "heavy"), image_request("c", "heavy")], 1.0).accepted
    assert core.offer([image_request("d", "heavy")], 1.0).reason == "queue_full"
    core.report("s0", [scored(score, 0.1)], 1.5)
    assert core.num_waiting == 3
    names = [one.request.request_id for one in core.poll(poll_of("h"), 2.0).leases]
    assert set(names) == {"a", "b", "c"}


def test_a_full_share_of_the_heavy_model_refuses_what_may_be_deferred() -> None:
    core = make_core(max_queued=8)
    for number in range(8):
        assert core.offer([routed(f"c{number}", slo_s=1e6)], 0.0).accepted
        core.report("l", [made(lease(core, "l", 0.0), b"light")], 0.0)
        core.report("s0", [scored(lease(core, "s0", 0.0), 0.1)], 0.0)
    assert core.offer([routed("c8", slo_s=1e6)], 0.0).reason == "queue_full"
    # another client has its part
    assert core.offer([image_request("b", "heavy")], 0.0, client="b").accepted
    assert core.offer([routed("c", slo_s=1e6)], 0.0, client="c").accepted


def test_a_heavy_image_that_would_be_late_is_not_begun() -> None:
    core = make_core()
    # 10 steps of 0.1 s do not fit into the rest of 2 s
    score = up_to_score(core, routed(slo_s=2.0))
    outcome = only(core.report("s0", [scored(score, 0.1)], 1.5)[0])
    assert outcome.cascade is not None
    assert (outcome.cascade.stage, outcome.cascade.reason) == ("light", "no_time")
    assert outcome.cascade.threshold == 0.0
    assert outcome.deadline_met
    counters = core.snapshot(2.0).counters
    assert (sum(counters.met.values()), counters.unfinished) == (0, {("auto", "64"): 1})


def test_without_a_reserve_lateness_does_not_count() -> None:
    core = make_core(reserve_s=None)
    score = up_to_score(core, routed(slo_s=2.0))
    assert core.report("s0", [scored(score, 0.1)], 1.5)[0] == ()
    assert lease(core, "h", 1.5).request.request_id == "a"
    assert core.expire(2.5) == ()


def test_the_threshold_falls_with_the_slack() -> None:
    core = make_core(reserve_s=40.0)
    score = up_to_score(core, routed())
    outcome = only(core.report("s0", [scored(score, 0.5)], 1.5)[0])
    answer = outcome.cascade
    assert answer is not None
    assert answer.reason == "no_time"
    # about 27 s of the reserve of 40 are left once the heavy model is done
    assert answer.threshold == pytest.approx(0.6 * 27 / 40, abs=0.05)


def test_a_waiting_heavy_image_that_cannot_be_in_time_any_more_is_given_up() -> None:
    core = make_core()
    deferred(core, routed(slo_s=4.0))
    due_s = core.next_event_s()
    assert due_s is not None
    # 10 steps of a tenth of a second
    assert due_s == pytest.approx(3.0, abs=0.1)
    assert core.expire(due_s - 0.01) == ()
    outcome = only(core.expire(due_s))
    assert outcome.cascade is not None
    assert (outcome.result.data, outcome.cascade.reason) == (b"light", "no_time")
    assert [one.stage for one in outcome.cascade.stages] == ["light", "score", "heavy"]
    assert core.poll(poll_of("h"), 4.0).leases == ()


def test_a_held_heavy_image_that_comes_too_late_is_taken_back_at_the_deadline() -> None:
    core = make_core()
    deferred(core, routed(slo_s=4.0))
    heavy = lease(core, "h", 1.6)
    core.poll(poll_of("h", 3, {"a": 5}), 2.0)
    assert core.expire(3.0) == ()
    outcome = only(core.expire(3.96))
    assert outcome.cascade is not None
    assert (outcome.cascade.stage, outcome.cascade.reason) == ("light", "no_time")
    assert outcome.deadline_met
    assert core.poll(poll_of("h", 3, {"a": 6}), 3.97).aborts == ("a",)
    assert core.report("h", [made(heavy)], 4.0) == ((), ("a",))


def test_an_image_that_is_not_scored_by_its_deadline_is_late_and_not_unscored() -> None:
    core = make_core()
    up_to_score(core, routed(slo_s=2.0))
    outcome = only(core.expire(2.0))
    assert outcome.cascade is not None
    assert (outcome.cascade.stage, outcome.cascade.reason) == ("light", "no_time")
    # where slack does not count, its score is waited for
    patient = make_core(reserve_s=None)
    score = up_to_score(patient, routed(slo_s=2.0))
    assert patient.expire(2.0) == ()
    assert only(patient.report("s0", [scored(score, 0.9)], 2.5)[0]).result.data == b"light"


def test_without_a_reserve_an_unscored_image_is_made_anew_even_if_late() -> None:
    core = make_core(scorers=0, when_unscored="heavy", reserve_s=None)
    core.offer([routed(slo_s=0.01)], 0.0)
    assert core.report("l", [made(lease(core, "l", 0.0))], 1.0)[0] == ()
    assert lease(core, "h", 1.0).request.request_id == "a"


@pytest.mark.parametrize("when_unscored", ["light", "heavy"])
def test_without_a_discriminator_the_settings_say_whose_image_it_is(when_unscored: Any) -> None:
    core = make_core(scorers=0, when_unscored=when_unscored)
    core.offer([routed()], 0.0)
    outcomes, _ = core.report("l", [made(lease(core, "l", 0.0))], 1.0)
    if when_unscored == "heavy":
        assert outcomes == ()
        outcomes, _ = core.report("h", [made(lease(core, "h", 1.0))], 2.0)
    answer = only(outcomes).cascade
    assert answer is not None
    assert (answer.stage, answer.reason) == (when_unscored, "scorer_away")
    assert (answer.confidence, answer.threshold) == (None, None)
    (warning,) = core.snapshot(2.0).warnings
    assert warning == (
        f"no replica of the discriminator judge lives; auto answers with {when_unscored} images"
    )


def test_a_discriminator_that_is_lost_for_long_is_no_reason_to_refuse() -> None:
    core = make_core()
    core.unregister("s0", 1.0)
    assert core.offer([routed()], 1000.0).accepted
    answer = only(core.report("l", [made(lease(core, "l", 1000.0))], 1001.0)[0]).cascade
    assert answer is not None
    assert (answer.stage, answer.reason) == ("light", "scorer_away")


def test_a_discriminator_that_dies_or_fails_costs_only_the_confidence() -> None:
    core = make_core()
    up_to_score(core, routed("a"))
    core.unregister("s0", 2.0)
    # it waits for another one, and there is none
    assert only(core.expire(2.0)).cascade is not None
    core.register(scorer(), 2.0)
    score = up_to_score(core, routed("b"), 3.0)
    answer = only(core.report("s0", [failed(score)], 4.5)[0]).cascade
    assert answer is not None
    assert answer.reason == "scorer_away"


def test_another_discriminator_scores_what_a_dead_one_has_held() -> None:
    core = make_core(scorers=2)
    up_to_score(core, routed())
    core.unregister("s0", 2.0)
    score = lease(core, "s1", 2.0)
    assert score.scored == SMALL
    assert only(core.report("s1", [scored(score, 0.9)], 2.5)[0]).result.data == b"light"


@pytest.mark.parametrize("how", ["error", "lost"])
def test_the_light_image_answers_for_a_heavy_one_that_fails(how: str) -> None:
    core = make_core()
    deferred(core, routed())
    heavy = lease(core, "h", 2.0)
    if how == "error":
        outcomes, _ = core.report("h", [failed(heavy)], 3.0)
    else:
        for number in range(CONFIG.max_attempts):
            core.unregister("h", 3.0 + number)
            core.register(registration("h", "heavy"), 3.0 + number)
            if number + 1 < CONFIG.max_attempts:
                lease(core, "h", 3.0 + number)
        outcomes = core.take_outcomes()
    outcome = only(outcomes)
    assert outcome.cascade is not None
    assert (outcome.result.data, outcome.cascade.reason) == (b"light", "heavy_failed")


def test_a_stage_waits_for_its_own_add_ons_alone_and_the_light_image_answers_without() -> None:
    core = make_core()
    edges = ControlNetConfig(name="edges", model="m", bases=("light", "heavy"))
    core.controls.apply([edges])
    core.register(replace(scorer("c"), kind="control", served_as="edges"), 0.0)
    uses = (ControlNetUse("edges", BlobRef("ab", 1)),)
    assert core.offer([routed(add_ons=AddOns(controls=uses))], 0.0).accepted
    light = lease(core, "l", 0.0)
    core.unregister("c", 0.5)
    core.report("l", [made(light, b"light")], 1.0)
    core.report("s0", [scored(lease(core, "s0", 1.0), 0.1)], 1.5)
    assert core.poll(poll_of("h"), 2.0).leases == ()
    core.controls.apply([])
    core.advance_held_back(2.5)
    outcome = only(core.take_outcomes())
    assert outcome.cascade is not None
    assert (outcome.result.data, outcome.cascade.reason) == (b"light", "heavy_failed")


def test_a_light_model_that_fails_fails_its_request() -> None:
    core = make_core()
    core.offer([routed()], 0.0)
    (outcome,), _ = core.report("l", [failed(lease(core, "l", 0.0))], 1.0)
    assert isinstance(outcome, Failure)


@pytest.mark.parametrize("stage", ["light", "score", "heavy"])
def test_an_abort_ends_a_request_without_an_image_in_any_stage(stage: str) -> None:
    core = make_core()
    if stage == "light":
        core.offer([routed()], 0.0)
        lease(core, "l", 0.0)
    elif stage == "score":
        up_to_score(core, routed())
    else:
        deferred(core, routed())
    (outcome,) = core.abort(["a"])
    assert isinstance(outcome, Failure)
    assert outcome.kind == "aborted"
    assert (core.num_waiting, core.knows("a"), core.next_event_s()) == (0, False, 6.0)


def test_reports_of_a_stage_that_has_ended_are_stale() -> None:
    core = make_core()
    core.offer([routed()], 0.0)
    light = lease(core, "l", 0.0)
    core.report("l", [made(light)], 1.0)
    assert core.report("l", [made(light)], 1.1) == ((), ("a",))
    score = lease(core, "s0", 1.2)
    core.report("s0", [scored(score, 0.1)], 1.3)
    assert core.report("s0", [scored(score, 0.9)], 1.4) == ((), ("a",))
    assert core.poll(poll_of("l", 3, {"a": 2}), 1.5).aborts == ("a",)


def test_a_stream_shows_the_light_image_while_the_heavy_one_is_made() -> None:
    core = make_core()
    deferred(core, routed(output=OutputSpec(num_previews=3)))
    preview = core.preview("a")
    assert preview is not None
    assert (preview.index, preview.data, preview.num_steps) == (0, b"light", 10)
    heavy = lease(core, "h", 2.0)
    assert heavy.request.output.num_previews == 2


def test_an_image_that_is_to_be_stored_is_published_from_the_store() -> None:
    core = make_core()
    score = up_to_score(core, routed(output=OutputSpec(is_stored=True)))
    outcome = only(core.report("s0", [scored(score, 0.9)], 1.5)[0])
    assert outcome.is_candidate
    deferred(core, routed("b", output=OutputSpec(is_stored=True)), 2.0)
    (note,) = core.take_deferred()
    assert note.is_stored
    assert core.preview("b") is None


def test_a_later_dispatcher_goes_on_with_a_deferred_image() -> None:
    core = make_core()
    request = routed(output=OutputSpec(is_stored=True))
    note = Deferred("a", 0.1, 0.6, "deferred", is_stored=True)
    light = ImageResult("a", b"", "png", Timing(), 6)
    core.restore(Restored(request, 5.0, 30.0, note, light), 10.0)
    heavy = lease(core, "h", 10.0)
    assert (heavy.request, heavy.may_resume) == (request, True)
    outcome = only(core.report("h", [failed(heavy)], 11.0)[0])
    assert outcome.cascade is not None
    assert (outcome.cascade.reason, outcome.is_candidate) == ("heavy_failed", True)
    assert outcome.cascade.confidence == 0.1


def test_a_later_dispatcher_makes_an_image_anew_that_was_not_decided_on() -> None:
    core = make_core()
    core.restore(Restored(routed(), 5.0, 30.0), 10.0)
    assert lease(core, "l", 10.0).is_candidate
    # and adopts what a heavy replica still makes of a decided one
    request = routed("b")
    core.restore(Restored(request, 5.0, 30.0, Deferred("b", 0.1, 0.6, "deferred")), 10.0)
    reply = core.poll(poll_of("h", 3, {"b": 4}), 10.5)
    assert set(reply.adopted) == {"b"}
    progress = core.progress(["b"], 10.5, predicts="no")[0]
    assert progress is not None
    assert (progress.stage, progress.steps_done) == ("heavy", 4)


def test_what_a_cascade_routes_fills_the_queue_of_its_light_model() -> None:
    core = make_core(max_queued=2)
    assert core.offer([routed("a"), routed("b")], 0.0).accepted
    assert core.offer([routed("c")], 0.0).reason == "queue_full"
    assert core.offer([image_request("d", "heavy")], 0.0).accepted


def test_a_discriminator_that_dies_of_an_image_again_and_again_costs_only_the_confidence() -> None:
    core = make_core()
    up_to_score(core, routed("a"))
    for number in range(CONFIG.max_attempts):
        core.unregister("s0", 2.0 + number)
        core.register(scorer(), 2.0 + number)
        core.poll(poll_of("s0"), 2.0 + number)
    answer = only(core.take_outcomes()).cascade
    assert answer is not None
    assert (answer.stage, answer.reason) == ("light", "scorer_away")


def test_what_is_no_confidence_counts_as_none_and_holds_up_nobody() -> None:
    core = make_core()
    core.offer([routed("a")], 0.0)
    core.offer([routed("b")], 0.0)
    leases = core.poll(poll_of("l"), 0.0).leases
    core.report("l", [made(one) for one in leases], 1.0)
    first, second = core.poll(poll_of("s0"), 1.0).leases
    outcomes, _ = core.report("s0", [scored(first, 1.5), scored(second, 0.9)], 1.5)
    answers = [one.cascade for one in outcomes if isinstance(one, Completed)]
    assert [one.reason for one in answers if one] == ["scorer_away", "confident"]


def test_a_mistake_over_one_request_ends_it_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    core = make_core()
    core.offer([routed("a")], 0.0)
    core.offer([routed("b")], 0.0)
    leases = core.poll(poll_of("l"), 0.0).leases
    core.report("l", [made(one) for one in leases], 1.0)
    first, second = core.poll(poll_of("s0"), 1.0).leases
    decide = core.cascades._decide

    def mistaken(record: RequestRecord, *others: Any) -> None:
        assert record.view.request_id != "a", "a mistake"
        decide(record, *others)

    monkeypatch.setattr(core.cascades, "_decide", mistaken)
    outcomes, _ = core.report("s0", [scored(first, 0.9), scored(second, 0.9)], 1.5)
    ends = {one.request_id: one for one in outcomes}
    assert isinstance(ends["a"], Failure)
    assert isinstance(ends["b"], Completed)
    assert not core.knows("a")
