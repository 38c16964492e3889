"""The event stream of a job: what it says, and that it can be taken up again anywhere."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from ray_cluster.config.loading import ClusterConfig
from ray_cluster.errors import DispatcherUnavailable
from tests.api.checks import check_error
from tests.api.conftest import app_of, http_of
from tests.jobs.jobs_cell import JobsCell, Replica, until

BODY = {"prompt": "a red circle", "seed": 7}


@dataclass(frozen=True)
class Event:
    event_id: str
    name: str
    job: dict[str, Any]


async def events(lines: AsyncIterator[str]) -> AsyncIterator[Event]:
    """Parse a stream as a browser does; comments are passed over."""
    fields: dict[str, str] = {}
    async for line in lines:
        if line:
            name, _, value = line.partition(": ")
            fields[name] = value
        elif "data" in fields:
            yield Event(fields["id"], fields["event"], json.loads(fields["data"]))
            fields = {}


@pytest.fixture
def app(cell: JobsCell, config: ClusterConfig) -> FastAPI:
    return app_of(cell, config, results=cell.results)


class Gateway:
    """The application on the test's own loop, streaming as it goes."""

    def __init__(self, app: FastAPI) -> None:
        self._app = app
        self.http = http_of(app)

    async def watch(self, job_id: str, after: str | None = None) -> AsyncIterator[Event]:
        queue: asyncio.Queue[str | None] = asyncio.Queue()
        scope = {
            "type": "http",
            "method": "GET",
            "path": f"/v1/jobs/{job_id}/events",
            "raw_path": b"",
            "query_string": b"",
            "headers": [] if after is None else [(b"last-event-id", after.encode())],
            "server": ("gateway", 80),
            # httpx's own
            "client": ("127.0.0.1", 123),
            "scheme": "http",
        }

        async def receive() -> dict[str, Any]:
            await asyncio.Event().wait()
            raise AssertionError

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                assert message["status"] == 200
            for line in message.get("body", b"").decode().split("\n")[:-1]:
                await queue.put(line)
            if message["type"] == "http.response.body" and not message.get("more_body"):
                await queue.put(None)

        async def lines() -> AsyncIterator[str]:
            while (line := await queue.get()) is not None:
                yield line

        serving = asyncio.create_task(self._app(scope, receive, send))
        try:
            async for event in events(lines()):
                yield event
        finally:
            serving.cancel()


@pytest.fixture
async def gateway(app: FastAPI, replica: Replica) -> AsyncIterator[Gateway]:
    running = Gateway(app)
    async with running.http:
        yield running


async def new_job(gateway: Gateway) -> str:
    return str((await gateway.http.post("/v1/jobs", json=BODY)).json()["id"])


async def test_a_stream_from_queued_to_completed(gateway: Gateway, replica: Replica) -> None:
    stream = gateway.watch(await new_job(gateway))
    async with asyncio.timeout(20):
        first = await anext(stream)
        assert (first.name, first.job["queue_position"]) == ("queued", 0)
        await replica.poll()
        second = await anext(stream)
        assert (second.name, second.job["step"]) == ("started", 0)
        for steps in (3, 7):
            replica.steps_done = steps
            await replica.poll()
            progress = await anext(stream)
            assert (progress.name, progress.job["step"]) == ("progress", steps)
        (lease,) = replica.leases.values()
        await replica.finish(lease)
        rest = [event async for event in stream]
    assert rest[-1].name == "completed"
    assert rest[-1].job["data"][0]["seed"] == 7
    assert all(event.name == "progress" for event in rest[:-1])


async def test_it_goes_on_after_the_last_event_that_was_seen(
    gateway: Gateway, replica: Replica
) -> None:
    job_id = await new_job(gateway)
    async with asyncio.timeout(20):
        seen = await anext(gateway.watch(job_id))
        await replica.poll()
        # what was missed in between is told by what comes now
        news = await anext(gateway.watch(job_id, after=seen.event_id))
        assert news.name == "started"
        waiting = asyncio.ensure_future(anext(gateway.watch(job_id, after=news.event_id)))
        await asyncio.sleep(0.3)
        assert not waiting.done(), "nothing has changed since"
        (lease,) = replica.leases.values()
        await replica.finish(lease)
        last = await waiting
        assert last.name in {"progress", "completed"}
        ended = [event async for event in gateway.watch(job_id)]
        # its end may still be on the way to the store
        assert ended[-1].name == "completed"
        # which ends an EventSource
        seen_last = {"Last-Event-ID": ended[-1].event_id}
        again = await gateway.http.get(f"/v1/jobs/{job_id}/events", headers=seen_last)
        assert (again.status_code, again.content) == (204, b"")


@pytest.mark.parametrize("seen", ["running." + "9" * 4301, "running.1.1.-.", "9", "running..²"])
async def test_any_last_event_id_is_one_that_was_seen(
    gateway: Gateway, replica: Replica, seen: str
) -> None:
    job_id = await new_job(gateway)
    await replica.poll()
    async with asyncio.timeout(20):
        news = await anext(gateway.watch(job_id, after=seen))
    assert news.name in {"started", "progress", "preview"}


async def test_it_outlasts_a_dispatcher_that_is_away(
    gateway: Gateway, replica: Replica, cell: JobsCell, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = gateway.watch(await new_job(gateway))
    real, calls = cell.job_change, 0

    async def unreliable(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls <= 2:
            raise DispatcherUnavailable("it restarts")
        return await real(*args)

    monkeypatch.setattr(cell, "job_change", unreliable)
    async with asyncio.timeout(20):
        assert (await anext(stream)).name == "queued"
        await replica.poll()
        assert (await anext(stream)).name == "started"
    assert calls >= 3


async def test_failure_and_cancel_end_a_stream(gateway: Gateway, replica: Replica) -> None:
    async with asyncio.timeout(20):
        job_id = await new_job(gateway)
        (lease,) = (await replica.poll()).values()
        await replica.fail(lease)
        assert [event async for event in gateway.watch(job_id)][-1].name == "failed"
        job_id = await new_job(gateway)
        await gateway.http.delete(f"/v1/jobs/{job_id}")
        assert [event.name async for event in gateway.watch(job_id)] == ["cancelled"]


async def test_there_is_no_stream_of_what_is_not_there(gateway: Gateway) -> None:
    check_error(await gateway.http.get("/v1/jobs/nothing/events"), 404, code="job_not_found")


async def test_previews_are_events_with_links_that_work(gateway: Gateway, replica: Replica) -> None:
    body = {**BODY, "partial_images": 2, "num_inference_steps": 9}
    job_id = str((await gateway.http.post("/v1/jobs", json=body)).json()["id"])
    stream = gateway.watch(job_id)
    async with asyncio.timeout(20):
        assert (await anext(stream)).name == "queued"
        (lease,) = (await replica.poll()).values()
        assert (await anext(stream)).job["previews"] == []
        replica.steps_done = 3
        await replica.show(lease, 0, b"early")
        shown = await anext(stream)
        assert shown.name == "preview"
        [preview] = shown.job["previews"]
        assert (preview["image"], preview["index"], preview["step"]) == (0, 0, 3)
        reply = await gateway.http.get(preview["url"])
        assert (reply.status_code, reply.content) == (200, b"early")
        await stream.aclose()
        await replica.show(lease, 1, b"late")
        # whoever comes back hears of the newest only
        resumed = gateway.watch(job_id, after=shown.event_id)
        again = await anext(resumed)
        assert (again.name, again.job["previews"][0]["index"]) == ("preview", 1)
        # an old one that comes late is no news
        await replica.show(lease, 0, b"early")
        await replica.finish(lease)
        rest = [event async for event in resumed]
    assert "preview" not in [event.name for event in rest]
    assert rest[-1].name == "completed"
    assert rest[-1].job["previews"] == []


async def test_a_cancelled_job_leaves_no_preview(
    gateway: Gateway, replica: Replica, cell: JobsCell
) -> None:
    body = {**BODY, "partial_images": 1}
    job_id = str((await gateway.http.post("/v1/jobs", json=body)).json()["id"])
    (lease,) = (await replica.poll()).values()
    await replica.show(lease, 0)
    assert len(list(cell.results.entries())) == 1
    await gateway.http.delete(f"/v1/jobs/{job_id}")
    # soon after the answer
    await until(lambda: list(cell.results.entries()) == [])


async def test_streams_of_one_client_are_bounded_and_give_their_places_back(
    app: FastAPI, gateway: Gateway, replica: Replica
) -> None:
    job_id = await new_job(gateway)
    path = f"/v1/jobs/{job_id}/events"
    streams = [gateway.watch(job_id) for _ in range(4)]
    elsewhere = httpx.ASGITransport(app, client=("10.0.0.2", 1))
    async with (
        asyncio.timeout(20),
        httpx.AsyncClient(transport=elsewhere, base_url="http://gateway") as other,
    ):
        for stream in streams:
            assert (await anext(stream)).name == "queued"
        refused = await gateway.http.get(path)
        check_error(refused, 429, code="too_many_streams")
        assert "Retry-After" in refused.headers
        of_another = asyncio.create_task(other.get(path))
        # one that leaves makes room
        await streams.pop().aclose()
        streams.append(gateway.watch(job_id))
        assert (await anext(streams[-1])).name == "queued"
        (lease,) = (await replica.poll()).values()
        await replica.finish(lease)
        for stream in streams:
            assert [event async for event in stream][-1].name == "completed"
        assert (await of_another).status_code == 200
        for _ in range(9):
            assert (await gateway.http.get(path)).status_code == 200
