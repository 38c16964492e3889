"""A client fills a model's queue alone, and its part of it where others wait."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ray_cluster.policies.admission.admission import admit
from ray_cluster.policies.admission.load import NO_LOAD, total_load
from ray_cluster.policies.admission.queue_share import MOST_BOUNDS, ShareView
from ray_cluster.policies.types import RequestView
from tests.fakes import request_view
from tests.policies.queues import SHARE_S, ListQueue, queue_of


def queued(num: int, *, max_waiting: int = 12, max_waiting_s: float = 1e9) -> ListQueue:
    queue = queue_of(num_waiting=num, max_waiting=max_waiting)
    return ListQueue(
        queue.waits,
        queue.in_progress,
        queue.replicas,
        max_waiting,
        max_waiting_s,
        configured=queue.configured,
    )


def share(num_own: int, num_clients: int, num_waiting: int, **more: bool) -> ShareView:
    return ShareView(
        total_load([request_view(f"w{i}") for i in range(num_own)]),
        num_clients,
        num_waiting,
        **more,
    )


def group(num: int = 1) -> list[RequestView]:
    return [request_view(f"g{i}") for i in range(num)]


@pytest.mark.parametrize(
    ("num_own", "num_clients", "fits"),
    [(11, 1, True), (12, 1, False), (5, 2, True), (6, 2, False), (3, 3, True), (4, 3, False)],
)
def test_a_client_has_an_equal_part_of_the_images(
    num_own: int, num_clients: int, fits: bool
) -> None:
    offer = admit(group(), queued(12), share=share(num_own, num_clients, 12))
    assert (offer.accepted, offer.reason) == (fits, None if fits else "queue_full")


@pytest.mark.parametrize(
    ("num_own", "num_clients", "fits"), [(7, 1, True), (8, 1, False), (3, 2, True), (4, 2, False)]
)
def test_a_client_has_an_equal_part_of_the_time(num_own: int, num_clients: int, fits: bool) -> None:
    queue = queued(10, max_waiting_s=8 * SHARE_S)
    assert admit(group(), queue, share=share(num_own, num_clients, 10)).accepted == fits


def test_a_client_with_nothing_waiting_queues_one_call_however_long() -> None:
    queue = queued(10, max_waiting_s=SHARE_S)
    assert admit(group(10), queue, share=share(0, 5, 10)).accepted
    assert not admit(group(1), queue, share=share(1, 5, 10)).accepted


def test_all_clients_together_have_a_bound() -> None:
    most = MOST_BOUNDS * 12
    empty = ShareView(NO_LOAD, 40, most - 1)
    assert admit(group(1), queued(12), share=empty).accepted
    assert admit(group(2), queued(12), share=empty).reason == "queue_full"


def test_the_wait_is_until_enough_of_the_clients_own_have_left() -> None:
    alone = admit(group(), queued(12), share=share(12, 1, 12))
    assert (alone.retry_after_s, alone.limit) == (SHARE_S, 12)
    # five of another client stand before its first one
    behind = replace(share(6, 2, 12), num_until=lambda number: 5 + number)
    offers = [admit(group(num), queued(12), share=behind) for num in (1, 2)]
    assert [one.retry_after_s for one in offers] == [6 * SHARE_S, 7 * SHARE_S]
    assert [one.limit for one in offers] == [6, 6]


def test_nobody_knows_when_what_is_held_back_goes_on() -> None:
    offer = admit(group(), queued(0), share=share(12, 1, 12, is_held_back=True))
    assert (offer.reason, offer.retry_after_s) == ("held_back_full", 0.0)
    assert admit(group(), queued(12), share=share(11, 1, 12, is_held_back=True)).accepted
