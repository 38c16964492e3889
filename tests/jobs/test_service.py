"""Durable jobs beside a real dispatch service: accepted once, made whoever dies, ended once."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ray_cluster.jobs.store.sql_store import SqlJobStore
from ray_cluster.protocol.jobs import Job, JobQuery
from tests.jobs.jobs_cell import TIMING, JobsCell, Replica, job, until


async def state_of(cell: JobsCell, job_id: str, client: str = "alice") -> str | None:
    view = await cell.job(client, job_id)
    return None if view is None else view.job.state


async def test_a_job_goes_from_queued_to_completed(tmp_path: Path) -> None:
    async with JobsCell(tmp_path) as cell:
        replica = await Replica(cell).register()
        created = await cell.create_job(job("j", num_images=2))
        assert created.is_new
        assert created.view is not None
        assert created.view.job.state == "queued"
        assert [one.position for one in created.view.progress if one] == [0, 1]
        first, second = (await replica.poll()).values()
        replica.steps_done = 3
        await replica.poll()
        view = await cell.job("alice", "j")
        assert view is not None
        assert view.job.state == "running"
        assert [(one.position, one.steps_done) for one in view.progress if one] == [(None, 3)] * 2
        assert all(one.predicted_s for one in view.progress if one)
        await replica.finish(first)
        view = await cell.job("alice", "j")
        assert view is not None
        # what the image that is no longer open took counts on
        assert (view.job.state, view.job.attempts) == ("running", 1)
        waiting = asyncio.create_task(cell.job("alice", "j", 10.0))
        await replica.finish(second)
        done = await waiting
        assert done is not None
        assert done.job.state == "completed"
        assert [image.timing for image in done.job.images if image] == [TIMING, TIMING]
        assert [image.num_bytes for image in done.job.images if image] == [5, 5]
        assert done.job.attempts == 2
        assert done.job.finished_s is not None
        assert done.progress == ()
        assert cell.results.get("j-1.png") == b"image"


async def test_nobody_sees_the_job_of_another(tmp_path: Path) -> None:
    async with JobsCell(tmp_path) as cell:
        await Replica(cell).register()
        await cell.create_job(job("j"))
        assert await cell.job("bob", "j", 1.0) is None
        assert await cell.cancel_job("bob", "j") is None
        assert (await cell.jobs(JobQuery("bob"))).views == ()
        assert await state_of(cell, "j") == "queued"
        assert await cell.job("alice", "nothing") is None


async def test_a_key_names_one_job_however_often_it_is_sent(tmp_path: Path) -> None:
    async with JobsCell(tmp_path) as cell:
        replica = await Replica(cell).register()
        sent = [cell.create_job(replace(job(f"j{i}"), idempotency_key="k")) for i in range(10)]
        created = await asyncio.gather(*sent)
        assert [one.is_new for one in created].count(True) == 1
        assert len({one.view.job.job_id for one in created if one.view}) == 1
        (lease,) = (await replica.poll()).values()
        await replica.finish(lease)
        (job_id,) = {one.view.job.job_id for one in created if one.view}
        await until(lambda: cell.store.get(job_id).state == "completed")
        again = await cell.create_job(replace(job("j99"), idempotency_key="k"))
        assert again.view is not None
        assert (again.is_new, again.view.job.state) == (False, "completed")
        assert cell.core.num_waiting == 0


async def test_what_a_replica_writes_too_late_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # a busy disk takes a while over the cancellation, before which nothing is late
    monkeypatch.setattr("ray_cluster.jobs.sweeper.LATE_WRITE_S", 2.0)
    async with JobsCell(tmp_path) as cell:
        replica = await Replica(cell).register()
        await cell.create_job(job("j"))
        await replica.poll()
        await cell.cancel_job("alice", "j")
        cell.results.put("j-0.png", b"image")
        await until(lambda: list(cell.results.entries()) == [])


async def test_a_refused_job_leaves_nothing(tmp_path: Path) -> None:
    async with JobsCell(tmp_path, max_queued=2, max_open=2) as cell:
        await Replica(cell).register()
        refused = await cell.create_job(job("big", num_images=3, idempotency_key="k"))
        assert (refused.view, refused.offer.reason) == (None, "never_fits")
        assert await state_of(cell, "big") is None
        # a refusal does not use the key up
        assert (await cell.create_job(job("small", idempotency_key="k"))).is_new
        assert (await cell.create_job(job("other"))).is_new
        third = await cell.create_job(job("third"))
        assert third.offer.reason == "too_many_jobs"
        assert cell.core.num_waiting == 2


async def test_one_failed_image_fails_its_job_and_frees_the_rest(tmp_path: Path) -> None:
    async with JobsCell(tmp_path) as cell:
        replica = await Replica(cell).register()
        await cell.create_job(job("j", num_images=3))
        first, second, _ = (await replica.poll()).values()
        await replica.finish(first)
        await replica.fail(second)
        view = await cell.job("alice", "j", 10.0)
        assert view is not None
        assert view.job.state == "failed"
        assert view.job.error is not None
        assert view.job.error.message == "out of luck"
        assert view.job.attempts == 3
        assert await replica.poll() == {}
        # nothing of a job that failed is left
        await until(lambda: list(cell.results.entries()) == [])


async def test_cancelling_frees_the_row_and_what_was_made(tmp_path: Path) -> None:
    async with JobsCell(tmp_path) as cell:
        replica = await Replica(cell).register()
        await cell.create_job(job("j", num_images=2))
        first = next(iter((await replica.poll()).values()))
        await replica.finish(first)
        view = await cell.cancel_job("alice", "j")
        assert view is not None
        assert (view.job.state, view.job.error) == ("cancelled", None)
        assert await replica.poll() == {}
        await until(lambda: list(cell.results.entries()) == [])
        # again, and after the end, it stays what it is
        again = await cell.cancel_job("alice", "j")
        assert again == view


async def test_cancelling_what_is_completed_changes_nothing(tmp_path: Path) -> None:
    async with JobsCell(tmp_path) as cell:
        replica = await Replica(cell).register()
        await cell.create_job(job("j"))
        (lease,) = (await replica.poll()).values()
        await replica.finish(lease)
        view = await cell.cancel_job("alice", "j")
        assert view is not None
        assert view.job.state == "completed"
        assert cell.results.get("j-0.png") == b"image"


async def test_a_new_dispatcher_goes_on_where_the_old_one_was_killed(tmp_path: Path) -> None:
    old = JobsCell(tmp_path)
    await old.jobs_service.start()
    replica = await Replica(old).register()
    await old.create_job(job("part", num_images=3, created_s=1000.0))
    await old.create_job(job("done"))
    await old.create_job(job("waits", slo_s=5.0))
    first, second, third, _ = (await replica.poll()).values()
    await replica.finish(first)
    await replica.finish(next(x for x in replica.leases.values() if "done" in x.request.request_id))
    await until(lambda: old.store.get("done").state == "completed")
    # killed: nothing is closed. The replica lives on with two rows, of which one is ready
    async with JobsCell(tmp_path, epoch=2) as new:
        replica.cell = new
        assert await state_of(new, "done") == "completed"
        view = await new.job("alice", "part")
        assert view is not None
        assert view.progress[0] is None
        assert new.core.num_waiting == 3
        await replica.register()
        held = await replica.poll()
        assert held.keys() >= {second.request.request_id, third.request.request_id}
        for lease in list(held.values()):
            await replica.finish(lease)
        for job_id in ("part", "waits"):
            view = await new.job("alice", job_id, 10.0)
            assert view is not None
            assert view.job.state == "completed"
        images = new.store.get("part").images
        assert [image.num_bytes for image in images] == [5, 5, 5]
        # what nobody was left to note is not made up
        assert [image.timing for image in images] == [None, TIMING, TIMING]
        assert new.store.unfinished() == []
    await old.dispatch.close()


async def test_a_job_that_was_all_made_is_ended_by_the_next_dispatcher(tmp_path: Path) -> None:
    old = JobsCell(tmp_path)
    old.store.insert(job("j", num_images=2))
    for index in range(2):
        old.results.put(f"j-{index}.png", b"image")
    async with JobsCell(tmp_path, epoch=2) as new:
        view = await new.job("alice", "j", 10.0)
        assert view is not None
        assert view.job.state == "completed"
        assert new.core.num_waiting == 0


async def test_pages_show_open_jobs_as_they_are(tmp_path: Path) -> None:
    async with JobsCell(tmp_path) as cell:
        replica = await Replica(cell).register()
        for index in range(5):
            await cell.create_job(job(f"j{index}", created_s=1000.0 + index))
        held = await replica.poll()
        assert len(held) == 4
        await replica.finish(held["j0-0"])
        await until(lambda: cell.store.get("j0").state == "completed")

        async def ids(**query: Any) -> list[str]:
            page = await cell.jobs(JobQuery("alice", **query))
            return [view.job.job_id for view in page.views]

        assert await ids() == ["j4", "j3", "j2", "j1", "j0"]
        states = [view.job.state for view in (await cell.jobs(JobQuery("alice"))).views]
        assert states == ["queued", "running", "running", "running", "completed"]
        assert await ids(state="running") == ["j3", "j2", "j1"]
        assert await ids(state="running", limit=2) == ["j3", "j2"]
        assert await ids(state="running", after="j3") == ["j2", "j1"]
        assert await ids(state="running", after="nobody") == []
        assert await ids(state="queued") == ["j4"]
        assert await ids(state="completed") == ["j0"]
        assert await ids(after="j1") == ["j0"]
        # the last job of a page has ended when the next page is asked for
        await replica.finish(held["j2-0"])
        await until(lambda: cell.store.get("j2").state == "completed")
        assert await ids(state="running", after="j2") == ["j1"]
        await until(lambda: cell.jobs_service.num_open == 3)
        other = await cell.jobs(JobQuery("bob", "running", after="j2"))
        assert (other.views, other.has_more) == ((), False)
        more = {
            limit: (await cell.jobs(JobQuery("alice", "running", limit))).has_more
            for limit in (1, 2, 3)
        }
        assert more == {1: True, 2: False, 3: False}


async def test_what_is_old_is_forgotten_with_its_images(tmp_path: Path) -> None:
    store = SqlJobStore.open(f"sqlite:///{tmp_path}/jobs.db")
    old = job("old", created_s=10.0)
    store.insert(old)
    store.update(replace(old, state="completed", finished_s=20.0))
    cell = JobsCell(tmp_path, store=store, retention_s=1000.0)
    cell.results.put("old-0.png", b"image")
    cell.results.put("new-0.png", b"image")
    async with cell:
        await until(lambda: store.get("old") is None)
        await until(lambda: cell.results.get("old-0.png") is None)
        assert cell.results.get("new-0.png") == b"image"


async def test_the_next_dispatcher_knows_a_model_before_its_replicas_come(tmp_path: Path) -> None:
    async with JobsCell(tmp_path) as cell:
        await Replica(cell).register(pool="sd", load_s=20.0)
        await until(cell.store.workers)
        assert await cell.starting() == ()
    async with JobsCell(tmp_path, epoch=2) as cell:
        assert (await cell.models()).keys() == {"m"}
        assert await cell.starting() == ("m",)
        creation = await cell.create_job(job("j"))
        assert creation.offer.accepted
        assert creation.offer.predicted_s > 20.0
        await Replica(cell).register()
        assert await cell.starting() == ()


async def test_on_an_open_service_jobs_are_everybodys_and_shares_are_an_addresss(
    tmp_path: Path,
) -> None:
    def of(caller: str, name: str, num_images: int = 1) -> Job:
        one = job(name, num_images=num_images, client="")
        requests = (replace(each, owner="open", caller=caller) for each in one.requests)
        return replace(one, requests=tuple(requests))

    hers, his = "address 10.0.0.1", "address 10.0.0.2"
    async with JobsCell(tmp_path, max_queued=4, max_open=3) as cell:
        await Replica(cell).register()
        for name in ("a", "b", "c"):
            assert (await cell.create_job(of(hers, name))).is_new
        assert (await cell.create_job(of(hers, "d"))).offer.reason == "too_many_jobs"
        assert (await cell.create_job(of(his, "e"))).is_new
        # and in the queue he has a share of his own
        assert (await cell.create_job(of(his, "f"))).is_new
        refused = (await cell.create_job(of(his, "g", num_images=3))).offer
        assert (refused.reason, refused.limit) == ("queue_full", 3)
        for caller in (hers, his):
            assert (await cell.job(caller, "a")) is not None
            page = await cell.jobs(JobQuery(caller))
            assert {one.job.job_id for one in page.views} == set("abcef")
        assert await cell.job("alice", "a") is None
        assert await cell.cancel_job(his, "a") is not None


async def test_a_job_that_ends_while_it_is_read_is_seen_as_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with JobsCell(tmp_path) as cell:
        replica = await Replica(cell).register()
        await cell.create_job(job("j"))
        (lease,) = (await replica.poll()).values()
        page = cell.store.page

        def slow_page(query: JobQuery) -> list[Job]:
            rows = page(query)
            asyncio.run_coroutine_threadsafe(replica.finish(lease), loop).result()
            view = asyncio.run_coroutine_threadsafe(cell.job("alice", "j", 10.0), loop).result()
            assert view is not None
            assert view.job.state == "completed"
            return rows

        loop = asyncio.get_running_loop()
        monkeypatch.setattr(cell.store, "page", slow_page)
        (view,) = (await cell.jobs(JobQuery("alice"))).views
        assert view.job.state == "completed"
