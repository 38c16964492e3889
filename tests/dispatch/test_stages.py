"""A request goes through its stages to exactly one end, whatever happens in which order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_cluster.dispatch.cascades.stages import (
    FailureKind,
    Publication,
    RequestStages,
    Route,
    StageSpec,
    cascade_route,
    decide,
    direct_route,
    fail,
    finish_image,
    single_route,
)
from ray_cluster.policies.cascade import CascadeDecision
from ray_cluster.policies.types import CascadeReason

CASCADE, SINGLE, DIRECT = cascade_route("l", "s", "h"), single_route("m"), direct_route("h")
DEFERRED = CascadeDecision(is_deferred=True, reason="deferred")
CONFIDENT = CascadeDecision(is_deferred=False, reason="confident")
AWAY_TO_HEAVY = CascadeDecision(is_deferred=True, reason="scorer_away")
# where a request can stand that has not ended
ALONE, STRAIGHT = RequestStages(SINGLE), RequestStages(DIRECT)
LIGHT = RequestStages(CASCADE)
SCORE = replace(LIGHT, index=1)
HEAVY = RequestStages(CASCADE, 2, 0.2, "deferred")
UNSCORED_HEAVY = RequestStages(CASCADE, 2, None, "scorer_away")
OPEN = (ALONE, STRAIGHT, LIGHT, SCORE, HEAVY, UNSCORED_HEAVY)

Event = Callable[[RequestStages, int], RequestStages]


def decided(decision: CascadeDecision, confidence: float | None = None) -> Event:
    return lambda stages, index: decide(stages, index, decision, confidence)


def failed(kind: FailureKind, *, keeps_light: bool = True) -> Event:
    return lambda stages, index: fail(stages, index, kind, keeps_light=keeps_light)


def kept(reason: CascadeReason) -> Event:
    return decided(CascadeDecision(is_deferred=False, reason=reason), 0.2)


@pytest.mark.parametrize(
    ("before", "event", "after"),
    [
        (LIGHT, finish_image, SCORE),
        (SCORE, decided(DEFERRED, 0.2), HEAVY),
        (SCORE, decided(AWAY_TO_HEAVY), UNSCORED_HEAVY),
    ],
)
def test_a_request_goes_on(before: RequestStages, event: Event, after: RequestStages) -> None:
    assert event(before, before.index) == after
    assert not after.has_ended


@pytest.mark.parametrize(
    ("before", "event", "image"),
    [
        (ALONE, finish_image, Publication(0, "m", "single")),
        (STRAIGHT, finish_image, Publication(0, "h", "direct")),
        (SCORE, decided(CONFIDENT, 0.9), Publication(0, "l", "confident")),
        (SCORE, kept("no_time"), Publication(0, "l", "no_time")),
        (SCORE, kept("random_routing"), Publication(0, "l", "random_routing")),
        (SCORE, kept("scorer_away"), Publication(0, "l", "scorer_away")),
        (HEAVY, finish_image, Publication(2, "h", "deferred")),
        (UNSCORED_HEAVY, finish_image, Publication(2, "h", "scorer_away")),
        (HEAVY, failed("too_late"), Publication(0, "l", "no_time")),
        (HEAVY, failed("lost"), Publication(0, "l", "heavy_failed")),
        (HEAVY, failed("error"), Publication(0, "l", "heavy_failed")),
        (UNSCORED_HEAVY, failed("error"), Publication(0, "l", "heavy_failed")),
    ],
)
def test_a_request_ends_with_an_image(
    before: RequestStages, event: Event, image: Publication
) -> None:
    after = event(before, before.index)
    assert (after.published, after.failure) == (image, None)
    assert after.has_ended
    assert after.index == before.index


@pytest.mark.parametrize("before", OPEN)
def test_an_aborted_request_gets_no_image_wherever_it_stands(before: RequestStages) -> None:
    after = fail(before, before.index, "aborted", keeps_light=True)
    assert after == replace(before, failure="aborted")


@pytest.mark.parametrize("before", [ALONE, STRAIGHT, LIGHT, HEAVY])
@pytest.mark.parametrize("kind", get_args(FailureKind))
def test_a_failure_ends_a_request_that_may_not_keep_a_light_image(
    before: RequestStages, kind: FailureKind
) -> None:
    after = fail(before, before.index, kind, keeps_light=False)
    assert after == replace(before, failure=kind)


@pytest.mark.parametrize("before", [ALONE, STRAIGHT, LIGHT])
def test_no_light_image_is_published_that_was_not_decided_on(before: RequestStages) -> None:
    after = fail(before, before.index, "lost", keeps_light=True)
    assert after == replace(before, failure="lost")


@pytest.mark.parametrize(
    ("stages", "event", "index", "message"),
    [
        (ALONE, decided(CONFIDENT, 0.5), 0, "stage 0 must be a score stage"),
        (LIGHT, decided(CONFIDENT, 0.5), 0, "stage 0 must be a score stage"),
        (SCORE, finish_image, 1, "stage 1 must be a denoise stage"),
        (SCORE, failed("error"), 1, "stage 1 must be a denoise stage"),
        (SCORE, failed("too_late"), 1, "stage 1 must be a denoise stage"),
        (SCORE, decided(CONFIDENT, 1.5), 1, r"lies in \[0, 1\]; given 1.5"),
        (SCORE, decided(CONFIDENT, float("nan")), 1, r"lies in \[0, 1\]; given nan"),
        (SCORE, finish_image, 0, "only the present stage, 1, can report; given 0"),
        (HEAVY, decided(DEFERRED, 0.2), 1, "only the present stage, 2, can report; given 1"),
        (LIGHT, finish_image, 2, "only the present stage, 0, can report; given 2"),
        (HEAVY, finish_image, 0, "only the present stage, 2, can report; given 0"),
        (finish_image(ALONE, 0), finish_image, 0, "has ended"),
        (finish_image(ALONE, 0), failed("aborted"), 0, "has ended"),
        (failed("lost")(LIGHT, 0), finish_image, 0, "has ended .lost."),
    ],
)
def test_what_cannot_happen_is_refused(
    stages: RequestStages, event: Event, index: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        event(stages, index)


def test_routes_have_the_stages_of_their_kind() -> None:
    assert [(one.model, one.kind, one.leaves) for one in CASCADE.stages] == [
        ("l", "denoise", "pixels"),
        ("s", "score", "nothing"),
        ("h", "denoise", "nothing"),
    ]
    with pytest.raises(ValueError, match="stages of a cascade route"):
        Route("cascade", CASCADE.stages[:2])
    with pytest.raises(ValueError, match="stages of a direct route"):
        Route("direct", (StageSpec("s", "score"),))


decisions = st.builds(CascadeDecision, st.booleans(), st.sampled_from(get_args(CascadeReason)))
events = st.one_of(
    st.just(finish_image),
    st.builds(decided, decisions, st.none() | st.floats(-0.1, 1.1)),
    st.builds(failed, st.sampled_from(get_args(FailureKind)), keeps_light=st.booleans()),
)
lives = st.lists(st.tuples(events, st.sampled_from([None, None, None, 0, 1, 2])), max_size=12)


@given(st.sampled_from([CASCADE, SINGLE, DIRECT]), lives)
def test_a_request_ends_once_with_one_image_and_is_never_shown_undecided(
    route: Route, life: list[tuple[Event, int | None]]
) -> None:
    stages, ends = RequestStages(route), 0
    for event, index in life:
        before = stages
        try:
            stages = event(before, before.index if index is None else index)
        except ValueError:
            continue
        # nothing happens after the end
        assert not before.has_ended
        assert index in (None, before.index)
        ends += stages.has_ended
        assert 0 <= stages.index - before.index <= 1
        _check(stages)
    assert ends == stages.has_ended


def _check(stages: RequestStages) -> None:
    """What holds of every state."""
    assert (stages.published is None) or (stages.failure is None)
    assert stages.present.kind in {"denoise", "score"}
    if stages.route.kind == "cascade":
        assert stages.index < 2 or stages.decided is not None
    if (image := stages.published) is not None:
        maker = stages.route.stages[image.stage_index]
        assert (maker.kind, maker.model) == ("denoise", image.model)
        is_last = image.stage_index == len(stages.route.stages) - 1
        assert is_last or stages.decided is not None
    if stages.failure == "aborted":
        assert stages.published is None


@pytest.mark.parametrize("stages", [*OPEN, finish_image(HEAVY, 2), failed("lost")(ALONE, 0)])
def test_a_later_dispatcher_reads_a_state_as_it_was(stages: RequestStages) -> None:
    data = msgspec.msgpack.encode(stages)
    assert msgspec.msgpack.decode(data, type=RequestStages) == stages
