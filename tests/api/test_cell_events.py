"""What operators watch, and what a call would be answered: over a real gateway and dispatcher."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import httpx
import pytest

from ray_cluster.dispatch.reports import cell_views
from ray_cluster.dispatch.reports.cell_views import History
from tests.api.checks import check_error
from tests.jobs.jobs_cell import JobsCell, Replica

EVENTS, ESTIMATE = "/v1/cell/events", "/v1/images/estimate"
BODY = {"prompt": "a red circle", "num_inference_steps": 10, "n": 2}


@pytest.fixture
async def http(url: str) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=url, timeout=20, trust_env=False) as one:
        yield one


async def cells(http: httpx.AsyncClient) -> AsyncIterator[dict[str, Any]]:
    async with http.stream("GET", EVENTS) as reply:
        assert reply.headers["content-type"].startswith("text/event-stream")
        async for line in reply.aiter_lines():
            if line.startswith("data: "):
                yield json.loads(line.removeprefix("data: "))


async def test_a_stream_shows_what_waits_what_runs_and_hides_whole_ids(
    http: httpx.AsyncClient, replica: Replica
) -> None:
    async with aclosing(cells(http)) as stream:
        first = await anext(stream)
        assert first["object"] == "cell"
        assert first["history"] == []
        [model] = first["models"]
        assert (model["id"], model["waiting"], model["running"]) == ("shapes", 0, 0)
        assert [one["id"] for one in model["replicas"]] == ["r"]
        posting = asyncio.create_task(http.post("/v1/images/generations", json=BODY))
        waiting = await anext(stream)
        assert waiting["models"][0]["waiting"] == 2
        assert len(waiting["queue"]) == 2
        assert 0 < waiting["queue"][0]["in_s"] < 3600
        leases = await replica.poll()
        assert len(leases) == 2
        replica.steps_done = 4
        await replica.poll()
        running = await anext(stream)
        images = running["models"][0]["replicas"][0]["images"]
        assert [(one["steps_done"], one["num_steps"]) for one in images] == [(4, 10)] * 2
        shown = {one["id"] for one in [*images, *waiting["queue"]]}
        assert all(len(one) == 12 for one in shown)
        assert {one[:12] for one in leases} == shown
        for lease in list(leases.values()):
            await replica.finish(lease)
        assert (await posting).status_code == 200
        assert (await anext(stream))["models"][0]["running"] == 0


async def test_a_client_has_so_many_streams_and_no_more(http: httpx.AsyncClient) -> None:
    opened = [cells(http) for _ in range(4)]
    for one in opened:
        await anext(one)
    check_error(await http.get(EVENTS), 429, code="too_many_streams")
    for one in opened:
        await one.aclose()


async def test_history_has_what_has_happened_since_the_last_point(
    cell: JobsCell, replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cell_views, "_MOST_POINTS", 2)
    history = History()
    snapshot = cell.core.snapshot(0.0)
    for at_s, done in ((10.0, 3), (20.0, 0), (30.0, 1)):
        snapshot.counters.totals["completed"] += done
        history.note(snapshot, at_s)
    assert [(one.at, one.done) for one in history.after(0.0)] == [(20.0, 0), (30.0, 1)]
    assert [one.at for one in history.after(20.0)] == [30.0]


async def test_an_estimate_is_what_the_call_is_answered_and_makes_nothing(
    http: httpx.AsyncClient, cell: JobsCell, replica: Replica
) -> None:
    found = (await http.post(ESTIMATE, json=BODY)).json()
    assert found["accepted"]
    assert found["in_time"]
    assert found["num_inference_steps"] == 10
    assert 0 < found["finish_in_s"] < found["deadline_s"]
    assert cell.core.num_waiting == 0
    assert not cell.core.snapshot(0.0).totals
    late = {**BODY, "slo_s": 0.001, "when_late": "refuse"}
    refused = (await http.post(ESTIMATE, json=late)).json()
    answer = await http.post("/v1/images/generations", json=late)
    assert not refused["accepted"]
    assert refused["finish_in_s"] is None
    assert (refused["reason"], refused["message"]) == (
        answer.json()["error"]["code"],
        answer.json()["error"]["message"],
    )
    check_error(await http.post(ESTIMATE, json={"prompt": ""}), 400)
    check_error(await http.post(ESTIMATE, json={**BODY, "model": "other"}), 404)
