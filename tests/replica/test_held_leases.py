"""The ends of leases on their way to the dispatcher."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import pytest

from ray_cluster.protocol.calling import sizes
from ray_cluster.protocol.dispatcher import DispatcherLink
from ray_cluster.protocol.leases import Fence, Lease, ReplicaEvent
from ray_cluster.replica.held_leases import HeldLeases
from tests.fakes import finished, image_request


class Reports:
    """A dispatcher that knows the replica for so many reports, and has what was reported."""

    def __init__(self, num_known: int = 1000) -> None:
        self.ids: list[tuple[str, ...]] = []
        self._num_known = num_known

    async def report(
        self, _replica_id: str, events: Sequence[ReplicaEvent]
    ) -> tuple[str, ...] | None:
        self.ids.append(tuple(event.request_id for event in events))
        return () if len(self.ids) <= self._num_known else None


def ended(reports: Reports, names: str) -> HeldLeases:
    """Return leases of these names, all of them ended."""
    held = HeldLeases(cast(DispatcherLink, reports), "r", lambda _request_id: None)
    for index, name in enumerate(names):
        lease = Lease(Fence(1, index), image_request(name), 10.0, 0.0)
        held.add(lease)
        held.end(lease.request, finished(lease))
    return held


async def test_ends_go_in_as_many_messages_as_their_images_need(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Together they would never arrive, and nothing after them either."""
    reports = Reports()
    held = ended(reports, "abcde")
    num_bytes = len(finished(Lease(Fence(1, 0), image_request("a"), 10.0, 0.0)).result.data)
    assert num_bytes > 0
    monkeypatch.setattr(sizes, "_MOST_BYTES", 2 * num_bytes)
    await held.report()
    assert reports.ids == [("a", "b"), ("c", "d"), ("e",)]
    assert held.num_unacknowledged == 0
    # larger than a message may be for several: alone
    monkeypatch.setattr(sizes, "_MOST_BYTES", 1)
    reports.ids.clear()
    await ended(reports, "ab").report()
    assert reports.ids == [("a",), ("b",)]


async def test_what_a_new_dispatcher_does_not_know_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "_MOST_BYTES", 1)
    reports = Reports(num_known=1)
    held = ended(reports, "abc")
    await held.report()
    assert reports.ids == [("a",), ("b",)]
    assert held.num_unacknowledged == 2
