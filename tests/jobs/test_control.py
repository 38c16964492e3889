"""The controller's way to the dispatcher, over a job store that outlives it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ray_cluster.codec.values import Codec
from ray_cluster.config.loading import ClusterConfig
from ray_cluster.config.settings import Settings
from ray_cluster.config.slices import registered, worker_arguments
from ray_cluster.errors import DispatcherUnavailable
from ray_cluster.jobs import controller as control
from ray_cluster.observability.metrics_snapshot import Snapshot
from ray_cluster.policies.planning.plan import PlannedSettings
from ray_cluster.protocol.controller import Observation, PlannedPool, RoundRecord
from ray_cluster.protocol.leases import Poll, Registration
from tests.fakes import image_request, registration, some_settings
from tests.jobs.jobs_cell import JobsCell, until

CONFIG = ClusterConfig.model_validate({"pools": [{"name": "shapes", "model": "shapes-sd"}]})


def settings(**pool: Any) -> Settings:
    """Settings of that pool."""
    return some_settings(pools=[{"name": "shapes", "model": "shapes-sd", **pool}])


def worker() -> Registration:
    """A replica of the settings' pool."""
    arguments = registered(worker_arguments(CONFIG, "shapes").own)
    return replace(registration(model="shapes"), pool="shapes", load_s=9.0, arguments=arguments)


async def test_a_dispatcher_without_settings_cannot_be_observed(tmp_path: Path) -> None:
    cell = JobsCell(tmp_path)
    with pytest.raises(DispatcherUnavailable, match="starting"):
        await cell.jobs_service.control.observe({})


async def test_a_pool_without_replicas_is_known_after_a_restart(tmp_path: Path) -> None:
    async with JobsCell(tmp_path) as cell:
        cell.dispatch.apply(cell.jobs_service.control.planned(settings()))
        service = cell.jobs_service.control
        assert (await service.observe({})).pools == ()
        await cell.dispatch.register(worker())
        (pool,) = (await service.observe({})).pools
        assert [one.replica_id for one in pool.replicas] == ["r"]
        await until(cell.store.workers)
    async with JobsCell(tmp_path, epoch=2) as cell:
        cell.dispatch.apply(cell.jobs_service.control.planned(settings()))
        (pool,) = (await cell.jobs_service.control.observe({})).pools
        assert (pool.pool, pool.load_s, pool.replicas) == ("shapes", 9.0, ())


async def test_an_observation_travels_as_it_is(tmp_path: Path) -> None:
    async with JobsCell(tmp_path) as cell:
        cell.dispatch.apply(cell.jobs_service.control.planned(settings()))
        await cell.dispatch.register(worker())
        seen = await cell.jobs_service.control.observe({})
    codec: Codec[Observation] = Codec(Observation)
    assert codec.decode(codec.encode(seen)) == seen


PLAN = PlannedSettings(4, (("shapes", 3),), ())


def cap_of(cell: JobsCell) -> int:
    """What a replica of the pool would be told."""
    given = cell.core.worker_settings("shapes")
    assert given is not None
    return given.max_batch


async def test_a_plan_is_in_force_until_a_later_one_and_after_a_restart(tmp_path: Path) -> None:
    async with JobsCell(tmp_path) as cell:
        service = cell.jobs_service.control
        cell.dispatch.apply(service.planned(settings(max_batch=6)))
        assert cap_of(cell) == 6
        await service.apply_plan(PLAN)
        assert cap_of(cell) == 3
        assert (await service.observe({})).plan == PLAN
        await service.apply_plan(replace(PLAN, max_batches=(("shapes", 1),)))
        assert cap_of(cell) == 3
        # other settings: the plan stays within them
        cell.dispatch.apply(service.planned(settings(max_batch=2)))
        assert cap_of(cell) == 2
    async with JobsCell(tmp_path, epoch=2) as cell:
        cell.dispatch.apply(cell.jobs_service.control.planned(settings(max_batch=6)))
        assert cap_of(cell) == 3


async def test_a_saved_plan_is_in_force_where_settings_come_first(tmp_path: Path) -> None:
    async with JobsCell(tmp_path) as cell:
        cell.dispatch.apply(cell.jobs_service.control.planned(settings(max_batch=6)))
        await cell.jobs_service.control.apply_plan(PLAN)
    cell = JobsCell(tmp_path, epoch=2)
    cell.dispatch.apply(cell.jobs_service.control.planned(settings(max_batch=6)))
    async with cell:
        assert cap_of(cell) == 3


async def test_without_a_controller_a_saved_plan_is_not_in_force(tmp_path: Path) -> None:
    async with JobsCell(tmp_path) as cell:
        service = cell.jobs_service.control
        cell.dispatch.apply(service.planned(settings(max_batch=6)))
        await service.apply_plan(PLAN)
        service.is_enabled = False
        cell.dispatch.apply(service.planned(settings(max_batch=6)))
        assert cap_of(cell) == 6


async def test_a_replica_hears_of_a_lower_cap_with_its_next_poll(tmp_path: Path) -> None:
    async with JobsCell(tmp_path) as cell:
        service = cell.jobs_service.control
        document = settings(max_batch=6)
        cell.dispatch.apply(service.planned(document))
        epoch = await cell.dispatch.register(worker())
        poll = Poll("r", epoch, 4, settings_version=document.version)
        assert (await cell.dispatch.poll(poll, 0.0)).settings is None
        await service.apply_plan(PLAN)
        given = (await cell.dispatch.poll(poll, 0.0)).settings
        assert given is not None
        assert given.max_batch == 3


async def test_the_next_controller_gets_the_memory_and_operators_what_changed(
    tmp_path: Path,
) -> None:
    quiet = RoundRecord(1.0, 1, 0.1, "applied")
    loud = replace(quiet, at_s=2.0, actions=("shapes: 1 to 2 replicas",))
    async with JobsCell(tmp_path) as cell:
        service = cell.jobs_service.control
        assert await service.memory() == ""
        await service.note_round(quiet, "what it knows")
        await service.note_round(loud, None)
    async with JobsCell(tmp_path, epoch=2) as cell:
        assert await cell.jobs_service.control.memory() == "what it knows"
        assert (await cell.jobs_service.control.plan_report()).history == (loud,)


async def test_the_history_is_the_last_rounds_whichever_dispatcher_heard_of_them(
    tmp_path: Path,
) -> None:
    """Each round is written once, in the place of the oldest; a damaged one is left out."""
    rounds = [replace(planned(1), version=number) for number in range(control.MAX_HISTORY + 7)]
    async with JobsCell(tmp_path) as cell:
        for one in rounds[:5]:
            await cell.jobs_service.control.note_round(one, None)
    async with JobsCell(tmp_path, epoch=2) as cell:
        service = cell.jobs_service.control
        assert (await service.plan_report()).history == tuple(rounds[:5])
        for one in rounds[5:]:
            await service.note_round(one, None)
        assert (await service.plan_report()).history == tuple(rounds[7:])
        saved = {
            name: text for name, text in cell.store.control().items() if name.startswith("round-")
        }
        assert len(saved) == control.MAX_HISTORY
        assert max(map(len, saved.values())) < 2_000
        # number 8
        cell.store.save_control("round-8", '{"version": 1, "value": [8, {"at_s": "late"}]}')
    async with JobsCell(tmp_path, epoch=3) as cell:
        service = cell.jobs_service.control
        cell.dispatch.apply(service.planned(settings()))
        assert (await service.plan_report()).history == (rounds[7], *rounds[9:])
        assert (await service.observe({})).last_version == rounds[-1].version


def planned(num_replicas: int) -> RoundRecord:
    """A round that has planned so many replicas of the pool."""
    pool = PlannedPool("shapes", 1, 0, num_replicas, 4)
    return RoundRecord(1.0, 2, 0.1, "applied", (pool,), actions=("shapes: 1 to 0 replicas",))


async def asleep(cell: JobsCell) -> None:
    """Have the pool's only replica stopped by a plan, after it has loaded for 9 s."""
    cell.dispatch.apply(cell.jobs_service.control.planned(settings()))
    await cell.dispatch.register(worker())
    await cell.dispatch.unregister("r")
    await cell.jobs_service.control.note_round(planned(0), None)


async def test_a_call_for_a_model_at_zero_replicas_is_accepted_and_wakes_the_controller(
    tmp_path: Path,
) -> None:
    async with JobsCell(tmp_path) as cell:
        await asleep(cell)
        service = cell.jobs_service.control
        seen = await service.wake(-1, 0.0)
        assert (await cell.dispatch.snapshot()).warnings == ()
        waking = asyncio.create_task(service.wake(seen, 30.0))
        await asyncio.sleep(0)
        assert not waking.done()
        offer = await cell.dispatch.offer([image_request("a", "shapes")])
        assert offer.accepted
        # its model has to be loaded first
        assert offer.predicted_s > 9.0
        assert await waking > seen
        # one of a model with a replica wakes nobody
        await cell.dispatch.register(worker())
        seen = await service.wake(-1, 0.0)
        assert (await cell.dispatch.offer([image_request("b", "shapes")])).accepted
        assert await service.wake(seen, 0.0) == seen


async def test_a_model_at_zero_replicas_is_not_ready_while_nobody_would_wake_it(
    tmp_path: Path,
) -> None:
    async with JobsCell(tmp_path) as cell:
        await asleep(cell)
        await until(cell.store.control)
    cell = JobsCell(tmp_path, epoch=2)
    cell.dispatch.apply(cell.jobs_service.control.planned(settings()))
    async with cell:
        # no controller has been heard of by this dispatcher yet
        offer = await cell.dispatch.offer([image_request("a", "shapes")])
        assert offer.reason == "model_not_ready"
        # the others are ready to be served
        assert cell.dispatch.starting == ()
        await cell.jobs_service.control.note_round(planned(0), None)
        assert (await cell.dispatch.offer([image_request("a", "shapes")])).accepted


async def test_a_controller_that_falls_silent_is_not_counted_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "_SILENT_S", 0.01)
    monkeypatch.setattr(control, "_SILENT_PERIODS", 0)
    async with JobsCell(tmp_path) as cell:
        await asleep(cell)
        await until(lambda: not cell.core.queue.is_woken)
        offer = await cell.dispatch.offer([image_request("a", "shapes")])
        assert offer.reason == "model_not_ready"
        (warning,) = (await cell.dispatch.snapshot()).warnings
        assert "no replica of shapes lives" in warning
        # a replica that lives all the same is used
        await cell.dispatch.register(worker())
        assert (await cell.dispatch.offer([image_request("a", "shapes")])).accepted


async def test_a_model_at_zero_replicas_is_not_ready_while_the_controller_is_paused(
    tmp_path: Path,
) -> None:
    async with JobsCell(tmp_path) as cell:
        await asleep(cell)
        service = cell.jobs_service.control

        async def reason() -> str | None:
            return (await cell.dispatch.offer([image_request("a", "shapes")])).reason

        await service.pause_plan(True)
        assert await reason() == "model_not_ready"
        # it would start one, and does not
        would = replace(planned(1).pools[0], num_before=0)
        await service.note_round(replace(planned(1), mode="paused", pools=(would,)), None)
        assert await reason() == "model_not_ready"
        await service.pause_plan(False)
        await service.note_round(planned(0), None)
        assert await reason() is None


async def test_a_later_controller_is_told_the_version_of_the_last_plan(tmp_path: Path) -> None:
    async with JobsCell(tmp_path) as cell:
        service = cell.jobs_service.control
        cell.dispatch.apply(service.planned(settings()))
        assert (await service.observe({})).last_version == 0
        await service.note_round(replace(planned(1), version=17), None)
        assert (await service.observe({})).last_version == 17


async def test_a_pause_is_seen_by_the_controller_and_by_a_later_dispatcher(tmp_path: Path) -> None:
    async with JobsCell(tmp_path) as cell:
        service = cell.jobs_service.control
        cell.dispatch.apply(service.planned(settings()))
        seen = await service.wake(-1, 0.0)
        # what the next round will do, whatever the last one did
        assert (await service.pause_plan(True)).mode == "paused"
        assert (await service.pause_plan(False)).mode == "applied"
        dry = {"enabled": True, "dry_run": True, "period_s": 15}
        service.planned(some_settings(control=dry))
        found = await service.plan_report()
        assert (found.mode, found.silent_s) == ("dry_run", 60.0)
        service.planned(settings())
        assert (await service.pause_plan(True)).mode == "paused"
        # it plans at once, to say so
        assert await service.wake(seen, 0.0) > seen
        assert (await service.observe({})).limits.is_paused
    cell = JobsCell(tmp_path, epoch=2)
    cell.dispatch.apply(cell.jobs_service.control.planned(settings()))
    async with cell:
        service = cell.jobs_service.control
        assert (await service.observe({})).limits.is_paused
        assert (await service.pause_plan(False)).mode == "applied"


async def test_rounds_are_counted_and_those_that_changed_something_are_listed(
    tmp_path: Path,
) -> None:
    async with JobsCell(tmp_path) as cell:
        service = cell.jobs_service.control
        quiet = replace(planned(1), actions=())
        await service.note_round(quiet, None)
        await service.note_round(planned(0), None)
        await service.note_round(replace(planned(2), mode="paused"), None)
        for _ in range(3):
            await service.note_round(replace(quiet, failures=("it is away",)), None)
        late = replace(quiet, overdue=("0 of 1",), rollbacks=("shapes: back from 1 to 0 replicas",))
        await service.note_round(late, None)
        report = await service.plan_report()
        # what goes on is listed once
        assert [len(report.history), report.num_rounds] == [4, 7]
        # what a paused round would have done is no action
        assert (report.num_actions, report.num_failures) == (1, 3)
        families = {one.name: one for one in await cell.cell.own_metrics()}
        (rollbacks,) = dict(families["ray_cluster_plan_rollbacks"].samples).values()
        assert rollbacks == 1
        replicas = dict(families["ray_cluster_plan_replicas"].samples)
        assert sorted(replicas.values()) == [0, 1]
        service.is_enabled = False
        names = {one.name for one in await cell.cell.own_metrics()}
        assert not any(name.startswith("ray_cluster_plan") for name in names)


async def test_metrics_of_the_controller_travel_to_gateways(tmp_path: Path) -> None:
    """Flags among them, which are numbers there."""
    async with JobsCell(tmp_path) as cell:
        cell.dispatch.apply(cell.jobs_service.control.planned(settings()))
        service = cell.jobs_service.control
        await service.pause_plan(True)
        await service.note_round(RoundRecord(1.0, 1, 0.1, "paused", infeasible="no GPU"), None)
        found = service.metrics()
        codec = Codec(Snapshot)
        assert codec.decode(codec.encode(found)) == found
        samples = {one.name: set(one.samples.values()) for one in found}
        assert samples["ray_cluster_plan_paused"] == samples["ray_cluster_plan_infeasible"] == {1.0}
