"""Requests with ControlNets: they wait in the dispatcher while nobody serves what they need."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ray_cluster.config.loading import ClusterConfig
from ray_cluster.config.settings import Settings, settings_of
from ray_cluster.dispatch.core import DispatchCore
from ray_cluster.policies.types import StepCost
from ray_cluster.protocol.leases import Endpoint, Poll, PollReply, Registration
from ray_cluster.requests import AddOns, BlobRef, ControlNetUse, Failure, ImageRequest
from tests.fakes import image_request, poll_of, registration

POOLS = [{"name": "p", "model": "x", "served_as": "m"}]
NETS = [
    {"name": "edges", "model": "e", "bases": ["m"]},
    {"name": "inside", "model": "i", "bases": ["m"], "mode": "local"},
]


def settings(controlnets: list[dict[str, Any]] | None = None) -> Settings:
    nets = NETS if controlnets is None else controlnets
    content = {
        "pools": POOLS,
        "controlnets": nets,
        "dispatch": {"default_slo_s": 30.0, "replica_timeout_s": 6.0},
    }
    return settings_of(ClusterConfig.model_validate(content))


def following(request_id: str, *names: str, **values: Any) -> ImageRequest:
    uses = tuple(ControlNetUse(name, BlobRef("ab", 1)) for name in names)
    return replace(image_request(request_id, **values), add_ons=AddOns(controls=uses))


def worker(name: str = "c", served_as: str = "edges") -> Registration:
    return Registration(
        name,
        None,
        8,
        8,
        StepCost(0.0, 0.0),
        kind="control",
        served_as=served_as,
        load_s=4.0,
        endpoint=Endpoint("127.0.0.1:9", "secret"),
    )


@pytest.fixture
def core() -> DispatchCore:
    """A core with one replica of a model, and two ControlNets that nobody serves yet."""
    found = settings()
    core = DispatchCore(config=found.dispatch, limits=found.limits, epoch=1, configured=["m"])
    core.apply(found, 0.0)
    core.register(replace(registration(), pool="p"), 0.0)
    return core


def leased(core: DispatchCore, now_s: float) -> list[str]:
    return [one.request.request_id for one in poll(core, now_s).leases]


def poll(core: DispatchCore, now_s: float) -> PollReply:
    return core.poll(poll_of(), now_s)


def test_a_request_waits_for_its_controlnet_and_holds_no_other_up(core: DispatchCore) -> None:
    assert core.offer([following("a", "edges")], 0.0).accepted
    assert core.offer([image_request("plain")], 0.0).accepted
    assert leased(core, 0.0) == ["plain"]
    core.register(worker(), 2.0)
    reply = poll(core, 2.0)
    assert [one.request.request_id for one in reply.leases] == ["a"]
    assert reply.leases[0].deadline_in_s == 28.0
    assert reply.peers is not None
    [peer] = reply.peers.named("control", "edges")
    assert peer.endpoint == Endpoint("127.0.0.1:9", "secret")


def test_what_runs_beside_the_model_is_always_there(core: DispatchCore) -> None:
    core.offer([following("a", "inside")], 0.0)
    assert leased(core, 0.0) == ["a"]


def test_it_counts_as_waiting_and_is_expected_when_one_has_loaded(core: DispatchCore) -> None:
    first = core.offer([following("a", "edges")], 0.0)
    plain = core.offer([image_request("b")], 0.0)
    assert first.predicted_s - plain.predicted_s >= 5.0
    assert core.snapshot(0.0).num_held_back == 1
    assert "nobody serves the ControlNet edges" in "".join(core.snapshot(0.0).warnings)
    core.register(worker(), 1.0)
    assert core.snapshot(1.0).warnings == ()
    core.unregister("c", 2.0)
    later = core.offer([following("d", "edges")], 2.0)
    assert 4.0 <= later.predicted_s < first.predicted_s


def test_it_ends_when_nobody_has_come_until_its_deadline(core: DispatchCore) -> None:
    core.offer([following("a", "edges", slo_s=20.0)], 0.0, client=None)
    for now_s in (5.0, 10.0, 15.0):
        core.poll(poll_of(num_free=0), now_s)
    # it is looked at once before
    assert core.catch_up(0.0) == ()
    assert core.next_event_s() == 20.0
    assert core.expire(19.9) == ()
    [outcome] = core.expire(20.0)
    assert isinstance(outcome, Failure)
    assert (outcome.kind, outcome.stage) == ("error", "control")
    assert "'edges' has had no replica" in outcome.message
    assert not core.knows("a")


def test_one_whose_deadline_is_near_waits_a_little_all_the_same(core: DispatchCore) -> None:
    core.offer([following("a", "edges", slo_s=0.5)], 0.0, client=None)
    assert core.expire(4.9) == ()
    core.register(worker(), 4.9)
    assert leased(core, 4.9) == ["a"]


def test_one_that_comes_back_to_the_queue_waits_again(core: DispatchCore) -> None:
    core.register(worker(), 0.0)
    core.offer([following("a", "edges")], 0.0)
    assert leased(core, 0.0) == ["a"]
    core.unregister("c", 1.0)
    core.unregister("r", 1.0)
    core.register(replace(registration(), pool="p"), 1.0)
    assert leased(core, 1.0) == []
    core.register(worker("c2"), 2.0)
    assert leased(core, 2.0) == ["a"]


def test_a_removed_one_ends_what_waits_for_it(core: DispatchCore) -> None:
    core.offer([following("a", "edges")], 0.0)
    core.apply(settings([]), 1.0)
    [outcome] = core.take_outcomes()
    assert isinstance(outcome, Failure)
    assert "the ControlNet 'edges' was removed" in outcome.message


def test_both_of_two_are_waited_for(core: DispatchCore) -> None:
    core.apply(settings([*NETS, {"name": "layout", "model": "l", "bases": ["m"]}]), 0.0)
    core.offer([following("a", "edges", "layout")], 0.0)
    core.register(worker(), 1.0)
    assert leased(core, 1.0) == []
    core.register(worker("d", "layout"), 2.0)
    assert leased(core, 2.0) == ["a"]


def test_only_those_who_call_others_hear_who_there_is(core: DispatchCore) -> None:
    """A worker that would be told each time would poll without a pause."""
    core.register(worker(), 0.0)
    core.register(worker("d", "layout"), 0.0)
    reply = core.poll(Poll("c", 1, 0), 0.0)
    assert reply.peers is None
    assert poll(core, 0.0).peers is not None


def test_how_far_one_is_can_be_asked_while_it_is_held_back(core: DispatchCore) -> None:
    core.offer([following("a", "edges")], 0.0)
    core.offer([image_request("plain")], 0.0)
    held_back, plain = core.progress(["a", "plain"], 0.0, predicts="anew")
    assert held_back is not None
    assert plain is not None
    assert held_back.predicted_s is not None
    assert plain.predicted_s is not None
    # the wait for its ControlNet is in it
    assert held_back.predicted_s >= plain.predicted_s + 5.0
