"""A request goes through its stages to exactly one end, whatever happens in which order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_cluster.dispatch.stages import (
    FailureKind,
    RequestStages,
    Specs,
    StageSpec,
    begin,
    cascade,
    decide,
    fail,
    finish,
    least_left,
    single,
)
from ray_cluster.policies.cascade import CascadeDecision
from ray_cluster.policies.types import CascadeReason

DEFERRED = CascadeDecision(is_deferred=True, reason="deferred")
CONFIDENT = CascadeDecision(is_deferred=False, reason="confident")
AWAY_TO_HEAVY = CascadeDecision(is_deferred=True, reason="scorer_away")
# where a request can stand that has not ended
ALONE, STRAIGHT, LIGHT = single("m"), single("h", "heavy"), cascade("l", "s", "h")
SCORE = replace(LIGHT, index=1, made=(0,))
HEAVY = replace(SCORE, index=2, confidence=0.2, reason="deferred")
UNSCORED_HEAVY = replace(SCORE, index=2, reason="scorer_away")
OPEN = (ALONE, STRAIGHT, LIGHT, SCORE, HEAVY, UNSCORED_HEAVY)

# an image's last stage, of a kind that there is not
UPSCALE = StageSpec("upscale", "u")

Event = Callable[[RequestStages, int], RequestStages]


def decided(decision: CascadeDecision, confidence: float | None = None) -> Event:
    return lambda stages, index: decide(stages, index, decision, confidence)


def failed(kind: FailureKind, *, keeps_image: bool = True) -> Event:
    return lambda stages, index: fail(stages, index, kind, keeps_image=keeps_image)


def kept(reason: CascadeReason) -> Event:
    return decided(CascadeDecision(is_deferred=False, reason=reason), 0.2)


@pytest.mark.parametrize(
    ("before", "event", "after"),
    [
        (LIGHT, finish, SCORE),
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
        (ALONE, finish, (0, "m", None)),
        (STRAIGHT, finish, (0, "h", None)),
        (SCORE, decided(CONFIDENT, 0.9), (0, "l", "confident")),
        (SCORE, kept("no_time"), (0, "l", "no_time")),
        (SCORE, kept("random_routing"), (0, "l", "random_routing")),
        (SCORE, kept("scorer_away"), (0, "l", "scorer_away")),
        (HEAVY, finish, (2, "h", "deferred")),
        (UNSCORED_HEAVY, finish, (2, "h", "scorer_away")),
        (HEAVY, failed("too_late"), (0, "l", "no_time")),
        (HEAVY, failed("lost"), (0, "l", "heavy_failed")),
        (HEAVY, failed("error"), (0, "l", "heavy_failed")),
        (UNSCORED_HEAVY, failed("error"), (0, "l", "heavy_failed")),
    ],
)
def test_a_request_ends_with_an_image(
    before: RequestStages, event: Event, image: tuple[int, str, str | None]
) -> None:
    after = event(before, before.index)
    assert (after.made[-1], after.author.model, after.reason) == image
    assert (after.is_published, after.failure, after.has_ended) == (True, None, True)
    assert after.index == before.index


@pytest.mark.parametrize("before", OPEN)
def test_an_aborted_request_gets_no_image_wherever_it_stands(before: RequestStages) -> None:
    after = fail(before, before.index, "aborted", keeps_image=True)
    assert after == replace(before, failure="aborted")


@pytest.mark.parametrize("before", [ALONE, STRAIGHT, LIGHT, HEAVY])
@pytest.mark.parametrize("kind", get_args(FailureKind))
def test_a_failure_ends_a_request_that_may_not_keep_a_light_image(
    before: RequestStages, kind: FailureKind
) -> None:
    after = fail(before, before.index, kind, keeps_image=False)
    assert after == replace(before, failure=kind)


@pytest.mark.parametrize("before", [ALONE, STRAIGHT, LIGHT])
def test_no_light_image_is_published_that_was_not_decided_on(before: RequestStages) -> None:
    after = fail(before, before.index, "lost", keeps_image=True)
    assert after == replace(before, failure="lost")


@pytest.mark.parametrize(
    ("stages", "event", "index", "message"),
    [
        (ALONE, decided(CONFIDENT, 0.5), 0, "stage 0 must decide"),
        (LIGHT, decided(CONFIDENT, 0.5), 0, "stage 0 must decide"),
        (SCORE, finish, 1, "stage 1 must make an image"),
        (SCORE, failed("error"), 1, "stage 1 must make an image"),
        (SCORE, failed("too_late"), 1, "stage 1 must make an image"),
        (SCORE, decided(CONFIDENT, 1.5), 1, r"lies in \[0, 1\]; given 1.5"),
        (SCORE, decided(CONFIDENT, float("nan")), 1, r"lies in \[0, 1\]; given nan"),
        (SCORE, finish, 0, "only the present stage, 1, can report; given 0"),
        (HEAVY, decided(DEFERRED, 0.2), 1, "only the present stage, 2, can report; given 1"),
        (LIGHT, finish, 2, "only the present stage, 0, can report; given 2"),
        (HEAVY, finish, 0, "only the present stage, 2, can report; given 0"),
        (finish(ALONE, 0), finish, 0, "has ended"),
        (finish(ALONE, 0), failed("aborted"), 0, "has ended"),
        (failed("lost")(LIGHT, 0), finish, 0, "has ended .lost."),
    ],
)
def test_what_cannot_happen_is_refused(
    stages: RequestStages, event: Event, index: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        event(stages, index)


def test_lists_of_stages_lead_to_one_image() -> None:
    assert [(one.model, one.kind, one.lane, one.skips_to) for one in LIGHT.specs] == [
        ("l", "denoise", "l", None),
        ("s", "score", "score:s", 3),
        ("h", "denoise", "h", None),
    ]
    light, score, heavy = LIGHT.specs
    early = replace(score, skips_to=2)
    for wrong in (
        (),
        (score, heavy),
        (UPSCALE,),
        (light, score),
        (light, heavy),
        (light, UPSCALE, heavy),
        (light, early, heavy),
        (light, early, heavy, UPSCALE),
        (light, score, heavy, score, heavy, UPSCALE),
        (light, replace(score, skips_to=None), heavy),
        (replace(light, skips_to=1),),
    ):
        with pytest.raises(ValueError, match="; given"):
            begin(wrong)


def test_a_good_image_goes_on_to_the_last_stage_and_so_does_one_that_answers() -> None:
    stages = begin((*LIGHT.specs, UPSCALE))
    assert [one.kind for one in least_left(stages.specs, 0)] == ["score", "upscale"]
    assert [one.kind for one in least_left(stages.specs, 2)] == ["upscale"]
    score = finish(stages, 0)
    good = decided(CONFIDENT, 0.9)(score, 1)
    unmade = failed("lost")(decided(DEFERRED, 0.2)(score, 1), 2)
    for one, reason in ((good, "confident"), (unmade, "heavy_failed")):
        assert (one.index, one.made, one.reason, one.has_ended) == (3, (0,), reason, False)
        ended = finish(one, 3)
        assert (ended.made, ended.author.model, ended.is_published) == ((0, 3), "l", True)
        # nothing answers for an image that is not there
        assert failed("error")(one, 3).failure == "error"
    heavy = finish(decided(DEFERRED, 0.2)(score, 1), 2)
    ended = finish(heavy, 3)
    assert (ended.made, ended.author.model) == ((0, 2, 3), "h")


decisions = st.builds(CascadeDecision, st.booleans(), st.sampled_from(get_args(CascadeReason)))
events = st.one_of(
    st.just(finish),
    st.builds(decided, decisions, st.none() | st.floats(-0.1, 1.1)),
    st.builds(failed, st.sampled_from(get_args(FailureKind)), keeps_image=st.booleans()),
)
lives = st.lists(st.tuples(events, st.sampled_from([None, None, None, 0, 1, 2])), max_size=12)


@given(st.sampled_from([LIGHT, ALONE, STRAIGHT]), lives)
def test_a_request_ends_once_with_one_image_and_is_never_shown_undecided(
    stages: RequestStages, life: list[tuple[Event, int | None]]
) -> None:
    ends = 0
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
    assert not stages.is_published or stages.failure is None
    assert stages.present.kind in {"denoise", "score"}
    assert stages.index < 2 or stages.reason is not None
    if stages.is_published:
        maker = stages.specs[stages.made[-1]]
        assert maker is stages.author
        is_last = stages.made[-1] == len(stages.specs) - 1
        assert is_last or stages.reason is not None
    if stages.failure == "aborted":
        assert not stages.is_published


parts = st.sampled_from([("score", "denoise"), ("score", "upscale"), ("upscale",)])
any_specs = st.builds(
    StageSpec,
    st.sampled_from(["denoise", "score", "upscale"]),
    st.just("m"),
    skips_to=st.none() | st.integers(-1, 6),
)


@st.composite
def lists(draw: st.DrawFn) -> Specs:
    """A list of stages that makes sense."""
    kinds: list[Any] = ["denoise", *chain.from_iterable(draw(st.lists(parts, max_size=4)))]
    found = []
    for index, kind in enumerate(kinds):
        ends = [i for i in range(index + 2, len(kinds)) if kinds[i] == "upscale"]
        skips_to = draw(st.sampled_from([*ends, len(kinds)])) if kind == "score" else None
        found.append(StageSpec(kind, f"{kind}{index}", skips_to=skips_to))
    return tuple(found)


@given(lists() | st.lists(any_specs, max_size=5).map(tuple), st.data())
def test_any_list_ends_with_one_image_of_what_ran(specs: Specs, data: st.DataObject) -> None:
    try:
        stages = begin(specs)
    except ValueError:
        return
    ran, finished, has_failed = [], [], False
    while not stages.has_ended:
        index, goes_well = stages.index, data.draw(st.integers(0, 3)) > 0
        has_failed = not goes_well and not stages.present.rules.decides
        ran.append(index)
        if stages.present.rules.decides:
            deferral = CascadeDecision(goes_well, "deferred" if goes_well else "confident")
            stages = decide(stages, index, deferral, 0.5)
        elif goes_well:
            stages = finish(stages, index)
            finished.append(index)
        else:
            keeps_image = data.draw(st.booleans())
            stages = fail(stages, index, "error", keeps_image=keeps_image)
    assert ran == sorted(set(ran))
    assert stages.made == tuple(finished)
    if stages.is_published:
        # what works on the image so far is done to no other
        author = specs.index(stages.author)
        assert all(specs[one].kind == "upscale" for one in finished if one > author)
        # nothing that was to be done to it in any case is left out
        assert has_failed or not list(least_left(specs, ran[-1]))
    else:
        assert (stages.failure, stages.index) == ("error", ran[-1])


@pytest.mark.parametrize("stages", [*OPEN, finish(HEAVY, 2), failed("lost")(ALONE, 0)])
def test_a_later_dispatcher_reads_a_state_as_it_was(stages: RequestStages) -> None:
    data = msgspec.msgpack.encode(stages)
    assert msgspec.msgpack.decode(data, type=RequestStages) == stages
