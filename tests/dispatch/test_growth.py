"""A decision takes no more the larger the cell is, or the longer its queue.

Calls of functions are counted, not seconds: what numpy does over all rows at once is one call.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from types import FrameType
from typing import TypeVar

import pytest

from ray_cluster.config.sections.cell_wide import DispatchConfig, LimitsConfig
from ray_cluster.dispatch.core import DispatchCore
from ray_cluster.policies.types import Offer, WhenLate, lora_resident
from ray_cluster.protocol.leases import Lease, Poll
from ray_cluster.requests import AddOns, LoraUse
from tests.fakes import finished, image_request, registration

T = TypeVar("T")
PLACES = 2


class FullCell:
    """Every place is taken, and many wait.

    Args:
        num_loras: every request needs one of so many, and every replica has one of them.
    """

    def __init__(self, replicas: int, waiting: int, num_loras: int = 0) -> None:
        self.num_loras = num_loras
        limits = LimitsConfig(max_queued_images=10**6)
        self.core = DispatchCore(config=DispatchConfig(), limits=limits, epoch=1)
        self.held: dict[str, dict[str, Lease]] = {}
        self.num = 0
        for number in range(replicas):
            comes = registration(f"r{number}", max_in_flight=PLACES)
            residents = (lora_resident(self.lora(number)),) if num_loras else ()
            self.core.register(replace(comes, residents=residents), 0.0)
        for _ in range(waiting + PLACES * replicas):
            self.offer("accept")
        for number in range(replicas):
            self.poll(f"r{number}")

    def lora(self, number: int) -> str:
        return f"lora-{number % self.num_loras}"

    def offer(self, when_late: WhenLate) -> Offer:
        self.num += 1
        # all of them in the middle of the queue
        slo_s = 1e6 + self.num * (-1) ** self.num
        request = image_request(f"{self.num}", slo_s=slo_s, when_late=when_late)
        if self.num_loras:
            add_ons = AddOns(loras=(LoraUse(self.lora(self.num // 2)),))
            request = replace(request, add_ons=add_ons)
        return self.core.offer([request], 1.0, client=None)

    def poll(self, name: str) -> None:
        held = self.held.setdefault(name, {})
        reply = self.core.poll(Poll(name, 1, PLACES - len(held), dict.fromkeys(held, 1)), 1.0)
        held |= {lease.request.request_id: lease for lease in reply.leases}

    def end_one(self, name: str) -> None:
        _, lease = self.held[name].popitem()
        outcomes, stale = self.core.report(name, [finished(lease)], 1.0)
        assert (len(outcomes), stale) == (1, ())


def counted(act: Callable[[], T]) -> tuple[T, int]:
    """The reply, and how many functions were called for it."""
    count = 0

    def note(_: FrameType, event: str, __: object) -> None:
        nonlocal count
        count += event in {"call", "c_call"}

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        reply = act()
    finally:
        sys.setprofile(before)
    return reply, count


def decisions(cell: FullCell) -> dict[str, int]:
    """The calls of each kind of decision, once those before it have been taken in."""
    found = {}
    cell.offer("accept")
    offer, found["offer"] = counted(lambda: cell.offer("accept"))
    minded, found["offer that minds being late"] = counted(lambda: cell.offer("refuse"))
    assert offer.accepted
    assert minded.accepted
    _, found["report"] = counted(lambda: cell.end_one("r1"))
    _, found["poll"] = counted(lambda: cell.poll("r1"))
    assert len(cell.held["r1"]) == PLACES
    return found


@pytest.mark.parametrize("num_loras", [0, 4])
@pytest.mark.parametrize(("replicas", "waiting"), [(4, 1000), (100, 100), (200, 3000)])
def test_a_decision_makes_no_more_calls_in_a_large_cell_than_in_a_small_one(
    replicas: int, waiting: int, num_loras: int
) -> None:
    small = decisions(FullCell(4, 20, num_loras))
    large = decisions(FullCell(replicas, waiting, num_loras))
    for decision, calls in small.items():
        assert large[decision] <= calls + 3, decision
