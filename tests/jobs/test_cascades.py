"""Jobs of cascades, whoever dies between their stages: the right image is published, once."""

from __future__ import annotations

import sqlite3
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ray_cluster.config.settings import Settings
from ray_cluster.protocol.jobs import Job, JobView
from ray_cluster.protocol.leases import Lease
from ray_cluster.protocol.outcomes import CascadeAnswer
from ray_cluster.requests import CascadeUse, LightStage, OutputSpec
from tests.fakes import image_request, some_settings
from tests.jobs.jobs_cell import JobsCell, Replica, job, until

STAGE = LightStage("shapes", "judge", num_steps=2, guidance_scale=1.0, sampler="ddim")
# a row as it was written before stages were data, of an image that is deferred
OLD_REQUESTS = """{"version": 1, "value": [{"request_id": "a", "model": "heavy",
"prompt": "a red circle", "width_px": 64, "height_px": 64, "num_steps": 10, "guidance_scale": 1.0,
"sampler": "ddim", "seed": 0, "negative_prompt": null, "priority": 0, "slo_s": null,
"when_late": "accept", "add_ons": {"controls": [], "loras": [], "lora_start_step": 0},
"edit": null, "terms": null, "output": {"image_format": "png", "compression": null,
"metadata": true, "is_stored": true, "num_previews": 0}, "embeds_guidance": false,
"cascade": {"name": "auto", "light": {"model": "shapes", "discriminator": "judge",
"num_steps": 2, "guidance_scale": 1.0, "sampler": "ddim", "embeds_guidance": false,
"schedule_steps": null}, "entry": "light", "reason": "routed"}, "call_id": "", "job_id": "",
"owner": "", "caller": ""}]}"""
OLD_DEFERRED = """{"version": 1, "value": [{"request_id": "a", "confidence": 0.1,
"threshold": 0.5, "reason": "deferred", "stages": [{"stage": "light", "name": "shapes",
"queue_s": 0.25, "took_s": 2.5}, {"stage": "score", "name": "judge", "queue_s": 0.125,
"took_s": 0.5}], "is_stored": true}]}"""


def settings() -> Settings:
    pools = [{"name": name, "model": "shapes-sd"} for name in ("shapes", "heavy")]
    cascade = {"name": "auto", "light": "shapes", "heavy": "heavy", "discriminator": "judge"}
    return some_settings(
        pools=pools,
        discriminators=[{"name": "judge", "model": "shapes-discriminator"}],
        cascades=[{**cascade, "threshold": 0.5}],
    )


def cascade_job() -> Job:
    use = CascadeUse("auto", STAGE)
    output = OutputSpec(is_stored=True)
    return job("j", requests=(image_request("a", "heavy", cascade=use, output=output),))


@dataclass
class Workers:
    """A light replica, a discriminator and a heavy replica."""

    light: Replica
    judge: Replica
    heavy: Replica

    @classmethod
    async def of(cls, cell: JobsCell) -> Workers:
        cell.core.apply(settings(), 0.0)
        scorer: dict[str, Any] = {"profile": None, "kind": "score", "served_as": "judge"}
        return cls(
            await Replica(cell, "l", "shapes").register(pool="shapes"),
            await Replica(cell, "s", "judge").register(**scorer),
            await Replica(cell, "h", "heavy").register(pool="heavy"),
        )


async def lease(replica: Replica) -> Lease:
    (found,) = (await replica.poll()).values()
    return found


async def defer(workers: Workers) -> None:
    """Bring the job's image to its heavy stage."""
    await workers.light.finish(await lease(workers.light), b"light")
    await workers.judge.score(await lease(workers.judge), 0.1)


async def ended(cell: JobsCell) -> JobView:
    view = await cell.job("alice", "j", 60.0)
    assert view is not None
    assert view.job.is_final
    return view


def names(cell: JobsCell) -> set[str]:
    return {blob.name for blob in cell.results.entries()}


@pytest.mark.parametrize(("confidence", "data"), [(0.9, b"light"), (0.1, b"heavy")])
async def test_one_image_is_published_and_nothing_else_is_left(
    tmp_path: Path, confidence: float, data: bytes
) -> None:
    async with JobsCell(tmp_path) as cell:
        workers = await Workers.of(cell)
        await cell.create_job(cascade_job())
        await workers.light.finish(await lease(workers.light), b"light")
        # nobody can fetch it before the decision
        assert names(cell) == {"a.candidate"}
        await workers.judge.score(await lease(workers.judge), confidence)
        if data == b"heavy":
            await workers.heavy.finish(await lease(workers.heavy), b"heavy")
        view = await ended(cell)
        (image,) = view.job.images
        assert image is not None
        assert image.cascade is not None
        assert (cell.results.get("a.png"), image.cascade.stage) == (data, data.decode())
        assert image.num_steps == (2 if data == b"light" else 10)
        await until(lambda: names(cell) == {"a.png"})


async def goes_on_with_the_heavy(later: JobsCell, *, fails: bool) -> CascadeAnswer:
    """Have the heavy stage of the deferred image "a" done; return how its cascade ended."""
    workers = await Workers.of(later)
    assert not await workers.light.poll()
    heavy = await lease(workers.heavy)
    await (workers.heavy.fail(heavy) if fails else workers.heavy.finish(heavy, b"heavy"))
    (image,) = (await ended(later)).job.images
    assert image is not None
    assert image.cascade is not None
    expected = ("heavy_failed", b"light") if fails else ("deferred", b"heavy")
    assert (image.cascade.reason, later.results.get("a.png")) == expected
    await until(lambda: names(later) == {"a.png"})
    return image.cascade


@pytest.mark.parametrize("heavy_fails", [False, True])
async def test_a_later_dispatcher_goes_on_with_the_heavy_stage(
    tmp_path: Path, heavy_fails: bool
) -> None:
    async with JobsCell(tmp_path) as cell:
        workers = await Workers.of(cell)
        await cell.create_job(cascade_job())
        await defer(workers)
        await until(lambda: cell.store.unfinished()[0].deferred)
    async with JobsCell(tmp_path, epoch=2) as later:
        answer = await goes_on_with_the_heavy(later, fails=heavy_fails)
        assert answer.confidence == 0.1


@pytest.mark.parametrize("heavy_fails", [False, True])
async def test_a_row_of_before_goes_on_with_the_heavy_stage(
    tmp_path: Path, heavy_fails: bool
) -> None:
    async with JobsCell(tmp_path) as cell:
        cell.results.put("a.candidate", b"light")
    values = {
        "job_id": "j",
        "client": "alice",
        "body_digest": "digest",
        "state": "queued",
        "slo_s": 60.0,
        "created_s": time.time() - 5.0,
        "attempts": 0,
        "requests": OLD_REQUESTS,
        "images": '{"version": 1, "value": [null]}',
        "error": '{"version": 1, "value": null}',
        "deferred": OLD_DEFERRED,
    }
    with sqlite3.connect(tmp_path / "jobs.db") as db:
        columns, marks = ", ".join(values), ", ".join("?" * len(values))
        db.execute(f"insert into jobs ({columns}) values ({marks})", [*values.values()])
    db.close()
    async with JobsCell(tmp_path, epoch=2) as later:
        answer = await goes_on_with_the_heavy(later, fails=heavy_fails)
        assert (answer.confidence, answer.threshold) == (0.1, 0.5)
        times = [(one.stage, one.name, one.took_s) for one in answer.stages[:2]]
        assert times == [("light", "shapes", 2.5), ("score", "judge", 0.5)]
        assert answer.stages[2].stage == "heavy"


async def test_a_later_dispatcher_begins_anew_before_the_decision(tmp_path: Path) -> None:
    async with JobsCell(tmp_path) as cell:
        workers = await Workers.of(cell)
        await cell.create_job(cascade_job())
        await workers.light.finish(await lease(workers.light), b"light")
        await lease(workers.judge)
    async with JobsCell(tmp_path, epoch=2) as later:
        workers = await Workers.of(later)
        await workers.light.finish(await lease(workers.light), b"light again")
        await workers.judge.score(await lease(workers.judge), 0.9)
        assert (await ended(later)).job.state == "completed"
        assert later.results.get("a.png") == b"light again"
        assert names(later) == {"a.png"}


async def test_what_a_dead_dispatcher_has_not_deleted_is_deleted(tmp_path: Path) -> None:
    async with JobsCell(tmp_path) as cell:
        await Workers.of(cell)
        await cell.create_job(cascade_job())
        # the heavy image is there, and the light one still
        cell.results.put("a.png", b"heavy")
        cell.results.put("a.candidate", b"light")
    async with JobsCell(tmp_path, epoch=2) as later:
        assert (await ended(later)).job.state == "completed"
        await until(lambda: names(later) == {"a.png"})


async def test_a_store_that_does_not_publish_fails_the_job_after_several_tries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ray_cluster.dispatch.cascades.candidates._RETRY_S", (0.0, 0.0))
    async with JobsCell(tmp_path) as cell:
        workers = await Workers.of(cell)
        await cell.create_job(cascade_job())
        await workers.light.finish(await lease(workers.light), b"light")
        cell.results.delete(["a.candidate"])
        await workers.judge.score(await lease(workers.judge), 0.9)
        view = await ended(cell)
        assert view.job.error is not None
        assert (view.job.state, view.job.error.stage) == ("failed", "storing")
