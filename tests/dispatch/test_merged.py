"""The core leases a merged replica its set alone, and nobody waits for that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from ray_cluster.config.sections.cell_wide import DispatchConfig, LimitsConfig
from ray_cluster.dispatch.core import DispatchCore
from ray_cluster.policies.types import MOST_PASSES, lora_resident
from ray_cluster.protocol.leases import PollReply
from ray_cluster.requests import AddOns, LoraUse
from tests.fakes import finished, image_request, poll_of, registration

A = "a@1.0"


def new_core(*names: str, slots: int = 4) -> DispatchCore:
    core = DispatchCore(config=DispatchConfig(), limits=LimitsConfig(), epoch=1)
    for name in names:
        core.register(registration(name, max_in_flight=slots), 0.0)
    return core


def offer(core: DispatchCore, *kinds: str, scale: float = 1.0) -> None:
    """Have requests wait, named for their LoRA; later ones have later deadlines."""
    for number, kind in enumerate(kinds):
        uses = () if kind[0] == "-" else (LoraUse(kind[0], scale),)
        request = image_request(kind, add_ons=AddOns(loras=uses), slo_s=1000.0 + number)
        assert core.offer([request], 1.0, client=None).accepted


def polled(core: DispatchCore, name: str, num_free: int, merged: str = "") -> PollReply:
    poll = poll_of(name, num_free)
    residents = (lora_resident("a"),) if merged else ()
    return core.poll(replace(poll, merged=merged, residents=residents), 1.0)


def leased(reply: PollReply) -> Sequence[str]:
    return [lease.request.request_id for lease in reply.leases]


def test_a_merged_replica_is_leased_its_set_alone_and_the_others_go_to_its_peer() -> None:
    core = new_core("m", "u")
    polled(core, "u", 4)
    offer(core, "b1", "a1", "-1", "a2")
    reply = polled(core, "m", 2, A)
    assert leased(reply) == ["a1", "a2"]
    assert not reply.others_wait
    assert leased(polled(core, "u", 4)) == ["b1", "-1"]


def test_another_scale_is_another_set() -> None:
    core = new_core("m", "u")
    polled(core, "u", 4)
    offer(core, "a1", scale=0.5)
    assert leased(polled(core, "m", 4, A)) == []
    assert leased(polled(core, "m", 4, "a@0.5")) == ["a1"]


@pytest.mark.parametrize("kind", ["b1", "-1"])
def test_alone_it_is_told_at_once_that_others_wait_and_then_leased_them(kind: str) -> None:
    core = new_core("m")
    assert not polled(core, "m", 4, A).others_wait
    offer(core, kind)
    # asked while its poll is held, too
    assert list(core.takers("m", 1.0)) == ["m"]
    reply = core.answer("m", 1.0)
    assert reply.others_wait
    assert leased(reply) == []
    assert leased(polled(core, "m", 4)) == [kind]


def test_others_are_passed_over_only_so_often() -> None:
    core = new_core("m", "u", slots=1)
    # the peer is busy, and m is never without its set
    offer(core, "-0")
    assert leased(polled(core, "u", 1)) == ["-0"]
    offer(core, "b1", *(f"a{n}" for n in range(MOST_PASSES + 3)))
    found = []
    for _ in range(MOST_PASSES):
        reply = polled(core, "m", 1, A)
        assert not reply.others_wait
        found += leased(reply)
        core.report("m", [finished(one) for one in reply.leases], 1.0)
    assert found == [f"a{n}" for n in range(MOST_PASSES)]
    reply = polled(core, "m", 1, A)
    assert (leased(reply), reply.others_wait) == ([], True)
    assert leased(polled(core, "m", 1)) == ["b1"]


def test_a_peer_that_is_gone_takes_nothing() -> None:
    core = new_core("m", "u")
    polled(core, "u", 4)
    offer(core, "b1")
    assert not polled(core, "m", 4, A).others_wait
    core.unregister("u", 1.0)
    assert polled(core, "m", 4, A).others_wait


def test_a_merged_replica_that_is_gone_leaves_no_trace() -> None:
    core = new_core("m", "u")
    polled(core, "m", 4, A)
    core.unregister("m", 1.0)
    core.register(registration("m", max_in_flight=4), 1.0)
    offer(core, "b1")
    assert leased(polled(core, "m", 4)) == ["b1"]
