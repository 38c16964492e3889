"""Other settings for a dispatcher that is at work: each takes effect, and nothing is lost."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from ray_cluster.config.loading import ClusterConfig
from ray_cluster.config.settings import Settings, settings_of
from ray_cluster.dispatch.core import DispatchCore
from ray_cluster.dispatch.service import DispatchService
from ray_cluster.protocol.leases import Poll, PollReply
from ray_cluster.protocol.settings import Capacity
from tests.fakes import FakeClock, finished, image_request, poll_of, registration, run_virtually

POOLS = [{"name": "p", "model": "x", "served_as": "m", "max_batch": 2, "max_in_flight": 4}]


def settings(**sections: Any) -> Settings:
    return settings_of(ClusterConfig.model_validate({"pools": POOLS, **sections}))


def core_by(first: Settings) -> DispatchCore:
    core = DispatchCore(config=first.dispatch, limits=first.limits, epoch=1, configured=["m"])
    core.apply(first, 0.0)
    return core


def register(core: DispatchCore, replica_id: str = "r", now_s: float = 0.0, **fields: Any) -> None:
    core.register(replace(registration(replica_id), pool="p", **fields), now_s)


def poll(core: DispatchCore, now_s: float, **fields: Any) -> PollReply:
    return core.poll(replace(poll_of(), **fields), now_s)


def test_the_queue_and_each_client_are_bounded_anew() -> None:
    core = core_by(settings(limits={"max_queued_images": 4}))
    register(core)
    assert core.offer([image_request("a"), image_request("b")], 0.0).accepted
    core.apply(settings(limits={"max_queued_images": 2}), 1.0)
    refused = core.offer([image_request("c")], 1.0)
    assert refused.reason == "queue_full"
    assert core.num_waiting == 2, "what was accepted stays"
    lower = {"max_attached_images_per_client": 2, "max_images_per_request": 2}
    core.apply(settings(limits=lower), 1.0)
    assert core.offer([image_request("d")], 1.0).reason == "client_limit"
    core.apply(settings(), 1.0)
    assert core.offer([image_request("e")], 1.0).accepted


def test_times_that_are_derived_follow() -> None:
    core = core_by(settings())
    assert (core.hold_s, core.grace_s) == (1.0, 2.0)
    core.apply(settings(dispatch={"poll_s": 3.0, "replica_timeout_s": 30.0}), 0.0)
    assert (core.hold_s, core.grace_s) == (3.0, 6.0)
    core.apply(settings(dispatch={"default_slo_s": 5.0}), 0.0)
    register(core)
    core.offer([image_request("a")], 0.0)
    [lease] = poll(core, 0.0).leases
    assert lease.deadline_in_s == pytest.approx(5.0)


def test_a_shorter_patience_holds_no_earlier_silence_against_anybody() -> None:
    core = core_by(settings(dispatch={"replica_timeout_s": 60.0, "attached_timeout_s": 60.0}))
    register(core)
    core.offer([image_request("a")], 0.0)
    poll(core, 0.0)
    short = {"replica_timeout_s": 2.0, "attached_timeout_s": 3.0}
    core.apply(settings(dispatch=short), 30.0)
    assert core.expire(31.0) == ()
    assert "r" in core.replicas
    [outcome] = core.expire(33.5)
    assert outcome.request_id == "a"
    assert "r" not in core.replicas


def test_a_new_number_of_attempts_counts_for_what_waits() -> None:
    core = core_by(settings())
    core.offer([image_request("a")], 0.0)
    register(core)
    core.offer([image_request("b")], 0.0)
    assert poll(core, 0.0).leases
    core.apply(settings(dispatch={"max_attempts": 1}), 0.0)
    core.unregister("r", 0.0)
    assert [one.request_id for one in core.take_outcomes()] == ["b"]


def test_who_waits_ages_by_the_new_time() -> None:
    core = core_by(settings(dispatch={"starvation_s": 1000.0, "attached_timeout_s": 1e6}))
    register(core)
    core.offer([image_request("old", slo_s=1.0, priority=-1)], 0.0)
    core.offer([image_request("new", priority=5)], 0.0)
    core.apply(settings(dispatch={"starvation_s": 10.0, "attached_timeout_s": 1e6}), 5.0)
    leases = core.poll(replace(poll_of(), num_free=1), 20.0).leases
    assert [one.request.request_id for one in leases] == ["old"]


def test_a_replica_hears_of_another_version_until_it_goes_by_it() -> None:
    first = settings()
    core = core_by(first)
    register(core)
    news = poll(core, 0.0).settings
    assert news is not None
    assert (news.version, news.max_batch, news.max_in_flight) == (first.version, 2, 4)
    assert poll(core, 0.0, settings_version=first.version).settings is None
    raised = settings(pools=[POOLS[0] | {"max_batch": 3, "max_in_flight": 5}])
    core.apply(raised, 0.0)
    news = poll(core, 0.0, settings_version=first.version).settings
    assert news is not None
    assert news.max_batch == 3


def test_a_replica_of_a_pool_that_is_not_listed_gets_none() -> None:
    core = core_by(settings())
    core.register(replace(registration(), pool="another"), 0.0)
    assert poll(core, 0.0).settings is None


def test_predictions_go_by_the_capacity_that_a_replica_reports() -> None:
    core = core_by(settings())
    register(core)
    before = core.queue.pool("m")
    assert before is not None
    assert before.max_batch == 2
    poll(core, 0.0, num_free=4, capacity=Capacity(max_in_flight=1, max_batch=1))
    after = core.queue.pool("m")
    assert after is not None
    assert after.max_batch == 1
    core.offer([image_request(name) for name in "abc"], 0.0)
    leases = poll(core, 0.0, num_free=4, capacity=Capacity(1, 1)).leases
    assert len(leases) == 1, "no more than it says that it holds"
    [row] = core.snapshot(0.0).replicas
    assert (row.max_batch, row.max_in_flight) == (1, 1)


def test_a_removed_model_is_not_offered_and_what_was_accepted_is_made() -> None:
    two = [*POOLS, {"name": "q", "model": "x", "served_as": "n"}]
    core = core_by(settings(pools=two))
    register(core)
    core.register(replace(registration("s", "n"), pool="q"), 0.0)
    assert core.offer([image_request("a", "n"), image_request("b", "n")], 0.0).accepted
    reply = core.poll(replace(poll_of("s"), num_free=1), 0.0)
    core.apply(settings(), 0.0)
    assert core.offer([image_request("c", "n")], 0.0).reason == "unknown_model"
    assert set(core.models()) == {"m"}
    assert core.num_open_by_model() == {"n": 2}
    outcomes, _ = core.report("s", [finished(reply.leases[0])], 0.1)
    assert [one.request_id for one in outcomes] == ["a"]
    # nobody is left who would make the other one
    core.unregister("s", 0.2)
    [left] = core.expire(0.3)
    assert left.request_id == "b"
    # and it may come back
    core.apply(settings(pools=two), 1.0)
    core.register(replace(registration("s", "n"), pool="q"), 1.0)
    assert core.offer([image_request("d", "n")], 1.0).accepted


def test_a_new_model_is_not_ready_rather_than_unknown() -> None:
    core = core_by(settings())
    assert core.offer([image_request("a", "n")], 0.0).reason == "unknown_model"
    core.apply(settings(pools=[*POOLS, {"name": "n", "model": "x"}]), 0.0)
    assert core.offer([image_request("a", "n")], 0.0).reason == "model_not_ready"


def test_everybody_who_waits_comes_again_with_the_new_times() -> None:
    async def main() -> None:
        clock, first = (
            asyncio.get_running_loop().time,
            settings(
                dispatch={"poll_s": 15.0, "replica_timeout_s": 60.0, "attached_timeout_s": 60.0}
            ),
        )
        core = core_by(first)
        service = DispatchService(core, config=first.dispatch, clock=clock)
        epoch = await service.register(replace(registration(), pool="p"))
        idle = Poll("r", epoch, 0, {}, settings_version=first.version)
        polling = asyncio.create_task(service.poll(idle))
        await service.offer([image_request("a")])
        waiting = asyncio.create_task(service.wait(["a"], 20.0))
        await asyncio.sleep(1.0)
        second = settings(dispatch={"attached_timeout_s": 3.0})
        service.apply(second)
        assert (await polling).known
        assert await waiting == {}
        assert clock() == pytest.approx(1.0)
        news = (await service.poll(idle)).settings
        assert news is not None
        assert news.version == second.version
        assert news.poll_s == 1.0
        found = await service.pool_settings("p")
        assert found == news
        await service.close()

    run_virtually(main())


def test_a_poll_is_answered_at_once_while_there_are_news() -> None:
    core = core_by(settings())
    service = DispatchService(core, config=settings().dispatch, clock=FakeClock())

    async def main() -> PollReply:
        epoch = await service.register(replace(registration(), pool="p"))
        reply = await service.poll(Poll("r", epoch, 0, {}))
        await service.close()
        return reply

    assert run_virtually(main()).settings is not None
