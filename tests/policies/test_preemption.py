"""Who gives a place away, and that nobody is late for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_cluster.policies.admission.admission import admit
from ray_cluster.policies.admission.deadlines import LEAST_SAFETY_FACTOR
from ray_cluster.policies.admission.forecast import ForecastView, forecast_s
from ray_cluster.policies.admission.preemption import MOST_PREEMPTIONS, exchanges
from ray_cluster.policies.admission.replica_simulation import ForecastReplica, Leased
from ray_cluster.policies.leasing.ordering import queue_key
from ray_cluster.policies.types import Offer, RequestView, StepCost
from tests.fakes import replica_view, request_view
from tests.policies.queues import ListQueue

# a step of 0.3 s for one, 0.4 s for two
COST = StepCost(fixed_s=0.2, per_megapixel_s=0.1)


def view(name: str, deadline_s: float, steps: int = 10, **changes: Any) -> RequestView:
    return request_view(
        name, num_steps=steps, width_px=1000, height_px=1000, deadline_s=deadline_s, **changes
    )


def scene_of(
    held: Sequence[RequestView], line: Sequence[RequestView], room: int = 0
) -> ForecastView:
    replica = ForecastReplica(COST, max_batch=2, max_in_flight=len(held) + room, held=held)
    return ForecastView(0.0, [replica], queue=sorted(line, key=queue_key))


def queue_with(held: Sequence[RequestView], waits: Sequence[RequestView] = ()) -> ListQueue:
    replica = replica_view(step_cost=COST, max_batch=2, max_in_flight=len(held))
    return ListQueue(
        waits=waits, in_progress=held, replicas=(replica,), is_simulated=True, has_preemption=True
    )


def victims_of(group: Sequence[RequestView], scene: ForecastView) -> list[list[str]]:
    return [[victim for victim, _ in one.pairs] for one in exchanges(group, scene)]


def test_who_comes_last_gives_way_first_and_nobody_before_whoever_gets_the_place() -> None:
    new = view("new", 20.0)
    held = [view("soon", 10.0), view("late", 90.0), view("later", 95.0), view("latest", 99.0)]
    assert victims_of([new], scene_of(held, [new])) == [["latest"], ["later"]]
    assert victims_of([view("new", 91.0)], scene_of(held[:3], [new])) == [["later"]]
    assert victims_of([view("new", 99.0)], scene_of(held[:3], [new])) == []
    # strict priorities, as in the queue
    low, high = view("low", 5.0, priority=-1), view("high", 500.0, priority=1)
    assert victims_of([new], scene_of([low, high], [new])) == [["low"]]


def test_nobody_gives_way_where_there_is_room_nor_too_often_nor_at_the_very_end() -> None:
    new, old = view("new", 20.0), view("old", 90.0)
    assert victims_of([new], scene_of([old], [new], room=1)) == []
    tired = replace(old, num_preemptions=MOST_PREEMPTIONS)
    assert victims_of([new], scene_of([tired], [new])) == []
    assert victims_of([new], scene_of([replace(old, steps_done=9)], [new])) == []
    assert victims_of([new], scene_of([replace(old, steps_done=8)], [new])) == [["old"]]


def test_nobody_gives_way_where_it_would_start_over() -> None:
    new, old = view("new", 20.0), view("old", 90.0)
    scene = scene_of([old], [new])
    called = replace(scene, replicas=[replace(one, resumes=False) for one in scene.replicas])
    assert victims_of([new], scene) == [["old"]]
    assert victims_of([new], called) == []


def test_an_exchange_moves_places_and_nothing_else() -> None:
    first, second = view("first", 5.0), view("second", 6.0)
    held = [view("a", 90.0), view("b", 80.0), view("c", 70.0)]
    waits = view("waits", 85.0)
    told = ForecastReplica(
        COST, 2, 2, reported_s=-0.5, held=held[:1], leased=[Leased(held[1], -0.1)]
    )
    scene = ForecastView(
        0.0, [told, ForecastReplica(COST, 2, 1, held=held[2:])], queue=[first, second, waits]
    )
    found = next(exchanges([second, first], scene))
    assert found.pairs == (("a", "first"), ("b", "second"))
    assert [one.request_id for one in found.view.queue] == ["b", "waits", "a"]
    assert found.view.replicas[0].held == []
    assert [one.request.request_id for one in found.view.replicas[0].leased] == ["first", "second"]
    assert found.view.replicas[1] is scene.replicas[1]
    assert {one.request_id for one in found.view.requests} == {
        one.request_id for one in scene.requests
    }


def test_a_place_is_given_away_only_if_it_takes_that_to_be_in_time() -> None:
    # ten steps of 0.3 s
    held = [view("long", 60.0, steps=100)]
    strict = view("new", 4.0, when_late="refuse")
    offer = admit([strict], queue_with(held))
    assert (offer.accepted, offer.exchanges) == (True, (("long", "new"),))
    assert offer.predicted_s == pytest.approx(3.0)
    # whoever can wait does so
    assert admit([replace(strict, deadline_s=50.0)], queue_with(held)).exchanges == ()
    # whoever can't be in time either way gets no place
    assert admit([replace(strict, deadline_s=3.2)], queue_with(held)).reason == "too_late"
    # nor does who would make the other one late
    tight = [view("long", 34.0, steps=100)]
    assert admit([strict], queue_with(tight)).reason == "too_late"
    # where it is switched off, nobody gives way
    off = replace(queue_with(held), has_preemption=False)
    assert admit([strict], off).reason == "too_late"


def test_who_does_not_mind_being_late_is_given_a_place_as_well() -> None:
    held = [view("long", 60.0, steps=100)]
    offer = admit([view("new", 4.0)], queue_with(held))
    assert offer.exchanges == (("long", "new"),)
    late = admit([view("new", 2.0)], queue_with(held))
    assert (late.accepted, late.exchanges) == (True, ())


def test_a_place_is_given_away_before_steps_are_given_up() -> None:
    held = [view("long", 60.0, steps=100)]
    may = view("new", 4.0, when_late="refuse", fewest_steps=2)
    assert admit([may], queue_with(held)).num_steps == ()
    fewer = admit([replace(may, deadline_s=2.5)], queue_with(held))
    assert fewer.exchanges == (("long", "new"),)
    assert fewer.num_steps == (7,)


KINDS = st.tuples(st.integers(2, 30), st.floats(1, 60), st.integers(-1, 1), st.integers(0, 2))


def drawn(name: str, kind: tuple[int, float, int, int], **changes: Any) -> RequestView:
    steps, deadline_s, priority, times = kind
    return view(name, deadline_s, steps=steps, priority=priority, num_preemptions=times, **changes)


def in_time(scene: ForecastView) -> Mapping[str, bool]:
    ends_s = forecast_s(scene)
    return {
        one.request_id: LEAST_SAFETY_FACTOR * ends_s[one.request_id] <= one.deadline_s
        for one in scene.requests
    }


@given(
    st.lists(KINDS, min_size=1, max_size=4),
    st.lists(KINDS, max_size=3),
    st.lists(KINDS, min_size=1, max_size=2),
)
def test_nobody_is_made_late_by_an_exchange(
    held: list[Any], waiting: list[Any], group: list[Any]
) -> None:
    """Whoever is let in by one is in time, and everybody else who would have been."""
    here = [drawn(f"h{number}", kind) for number, kind in enumerate(held)]
    waits = [drawn(f"w{number}", kind) for number, kind in enumerate(waiting)]
    new = [drawn(f"n{number}", kind, when_late="refuse") for number, kind in enumerate(group)]
    queue = queue_with(here, waits)
    offer: Offer = admit(new, queue)
    if not offer.exchanges:
        assert admit(new, replace(queue, has_preemption=False)) == offer
        return
    heirs = dict(offer.exchanges)
    assert sorted(heirs.values()) == sorted(one.request_id for one in new)
    # where everybody stands then, put together by hand
    stays = [one for one in here if one.request_id not in heirs]
    gone = [one for one in here if one.request_id in heirs]
    leased = [Leased(one, 0.0) for one in sorted(new, key=queue_key)]
    replica = ForecastReplica(COST, 2, len(here), held=stays, leased=leased)
    after = in_time(ForecastView(0.0, [replica], queue=sorted([*waits, *gone], key=queue_key)))
    before = in_time(scene_of(here, waits))
    assert all(after[one.request_id] for one in new)
    assert all(after[name] for name, was_in_time in before.items() if was_in_time)
    for victim, heir in heirs.items():
        views = {one.request_id: one for one in (*here, *new)}
        assert queue_key(views[victim]) > queue_key(views[heir])
        assert views[victim].num_preemptions < MOST_PREEMPTIONS
