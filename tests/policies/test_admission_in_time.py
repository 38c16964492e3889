"""Who would be late, or make others late, is let in only where nobody minds."""

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_cluster.policies.admission.admission import admit, predict_s
from ray_cluster.policies.admission.deadlines import LEAST_SAFETY_FACTOR
from ray_cluster.policies.types import Offer, RequestView
from tests.fakes import replica_view, request_view
from tests.policies.queues import BATCH_S, SHARE_S, ListQueue, queue_of


def strict(request: RequestView, **changes: Any) -> RequestView:
    return replace(request, when_late="refuse", **changes)


def test_who_minds_being_late_is_refused_until_it_would_be_in_time() -> None:
    queue = queue_of(num_waiting=4, num_in_progress=2)
    # as above: 5 departures and a batch
    needs_s = 5 * SHARE_S + BATCH_S
    late = admit([strict(request_view("new"), deadline_s=needs_s - 7)], queue)
    assert (late.accepted, late.reason) == (False, "too_late")
    assert late.retry_after_s == pytest.approx(7)
    assert admit([strict(request_view("new"), deadline_s=needs_s + 1e-6)], queue).accepted
    # whoever does not mind is let in
    assert admit([request_view("new", deadline_s=needs_s - 7)], queue).accepted
    both = [request_view("a", deadline_s=61.0), strict(request_view("b"), deadline_s=300.0)]
    assert admit(both, queue).accepted


def test_predictions_are_stretched_by_how_wrong_they_were() -> None:
    request = strict(request_view("new"), deadline_s=12.0)
    assert admit([request], queue_of()).accepted
    assert admit([request], replace(queue_of(), stretch=1.2)).reason == "too_late"
    # beside others it is worth a wait
    busy = replace(queue_of(num_waiting=4, num_in_progress=2), stretch=1.2)
    refused = admit([replace(request, deadline_s=14.0)], busy)
    assert refused.retry_after_s == pytest.approx(1.2 * (SHARE_S + BATCH_S) - 14.0)


@pytest.mark.parametrize("is_simulated", [False, True])
@pytest.mark.parametrize("stretch", [0.9, 1.0, 1.25])
@pytest.mark.parametrize("num_held", [0, 2])
def test_what_is_said_to_be_promised_with_nothing_else_there_is_promised_then(
    is_simulated: bool, stretch: float, num_held: int
) -> None:
    idle = replace(queue_of(), replicas=(replica_view(num_free=2),), stretch=stretch)
    idle = replace(idle, is_simulated=is_simulated)
    held = [request_view(f"p{index}") for index in range(num_held)]
    group = [strict(request_view(name), deadline_s=1.0) for name in ("a", "b")]
    offer = admit(group, replace(idle, in_progress=held))
    assert (offer.reason, offer.retry_after_s) == ("too_late", math.inf)

    def given(share: float) -> Offer:
        deadline_s = share * offer.predicted_s
        return admit([replace(one, deadline_s=deadline_s) for one in group], idle)

    assert given(1 + 1e-9).accepted
    assert given(1 - 1e-9).reason == "too_late"
    # for ever only without a safety factor above 1
    safety = max(LEAST_SAFETY_FACTOR, stretch) if is_simulated else stretch
    least = min(1.0, stretch) / safety
    assert given(least * (1 - 1e-9)).retry_after_s == math.inf
    if least < 1:
        # those who would be late are stepped in another order: the bound moves with the deadline
        assert given(1.05 * least).retry_after_s < math.inf


def test_who_would_be_late_alone_is_told_that_no_wait_helps() -> None:
    # 1.1 s a step, and 0.1 more for each further one of the batch
    busy = queue_of(num_waiting=4, num_in_progress=2)
    short = strict(request_view("new"), deadline_s=10.9)
    for queue in (queue_of(), busy):
        offer = admit([short], queue)
        assert (offer.reason, offer.retry_after_s) == ("too_late", math.inf)
        assert offer.predicted_s == pytest.approx(11.0)
    # with time for it, or with fewer steps, it is a matter of waiting
    assert admit([replace(short, deadline_s=11.1)], busy).retry_after_s < math.inf
    assert admit([replace(short, fewest_steps=9)], busy).retry_after_s < math.inf
    # those of the same group are not waited for either
    group = [strict(request_view(name), deadline_s=11.1) for name in ("a", "b")]
    assert admit(group, queue_of()).retry_after_s == math.inf
    # who minds nothing may take any time
    patient = request_view("patient", deadline_s=1.0)
    both = [strict(request_view("strict"), deadline_s=300.0), patient]
    assert admit(both, queue_of()).accepted


def test_nobody_is_let_in_who_would_make_late_who_waits() -> None:
    # alone it waits for one departure and takes its batch's time
    waits = [request_view("w", deadline_s=40.0)]
    queue = replace(queue_of(num_in_progress=2), waits=waits)
    urgent = strict(request_view("new"), deadline_s=39.0)
    assert predict_s(waits, queue, 0.0) == pytest.approx(SHARE_S + BATCH_S)
    offer = admit([urgent], queue)
    assert offer.reason == "too_late"
    assert offer.retry_after_s == pytest.approx(2 * SHARE_S + BATCH_S - 40.0)
    # behind it, it harms nobody; nor does it one who is late anyway
    assert admit([replace(urgent, deadline_s=60.0)], queue).accepted
    late = replace(queue, waits=[request_view("w", deadline_s=39.5, arrival_s=-60.0)])
    late = replace(late, stretch=1.3)
    assert admit([replace(urgent, deadline_s=38.9, num_steps=5)], late).accepted


def test_fewer_steps_are_taken_as_far_as_they_are_needed_and_allowed() -> None:
    # 1.1 s a step alone
    request = strict(request_view("new"), deadline_s=8.0)
    assert admit([request], queue_of()).reason == "too_late"
    willing = replace(request, fewest_steps=4)
    offer = admit([willing], queue_of())
    assert (offer.accepted, offer.num_steps) == (True, (7,))
    assert offer.predicted_s == pytest.approx(7.7)
    assert admit([replace(willing, fewest_steps=8)], queue_of()).reason == "too_late"
    assert admit([replace(willing, deadline_s=30.0)], queue_of()).num_steps == ()
    # whoever would rather not be refused gets the same, and at worst the fewest
    patient = replace(willing, when_late="accept")
    assert admit([patient], queue_of()).num_steps == (7,)
    assert admit([replace(patient, deadline_s=3.0)], queue_of()).num_steps == (4,)
    assert admit([replace(patient, deadline_s=30.0)], queue_of()).num_steps == ()
    # of a group each gives up as many, but no more than it may: 11 steps and 20 rows are 21.1 s
    group = [
        replace(willing, request_id="a", fewest_steps=9, deadline_s=21.5),
        replace(willing, request_id="b", num_steps=16, deadline_s=21.5),
    ]
    assert admit(group, queue_of()).num_steps == (9, 11)


@given(
    st.lists(st.tuples(st.integers(1, 20), st.floats(5, 400)), max_size=10),
    st.integers(1, 20),
    st.floats(1, 400),
    st.floats(1, 2),
)
def test_a_request_is_let_in_if_and_only_if_a_look_at_everybody_allows_it(
    waiting: list[tuple[int, float]], num_steps: int, deadline_s: float, stretch: float
) -> None:
    waits = [
        request_view(f"w{n}", num_steps=steps, deadline_s=at_s, arrival_s=-1.0)
        for n, (steps, at_s) in enumerate(waiting)
    ]
    new = strict(request_view("new"), num_steps=num_steps, deadline_s=deadline_s)
    queue = ListQueue(waits, [request_view("p")], [replica_view(num_free=0)], 100, stretch=stretch)
    joined = replace(queue, waits=[*waits, new])

    def in_time(one: RequestView, where: ListQueue) -> bool:
        return stretch * predict_s([one], where, 0.0) <= one.deadline_s

    harmed = [one for one in waits if in_time(one, queue) and not in_time(one, joined)]
    assert admit([new], queue).accepted == (in_time(new, joined) and not harmed)
