"""Streamed images as the official client sees them: previews, the image, errors, a client gone."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import openai
import pytest
from openai.types import ImageGenCompletedEvent, ImageGenPartialImageEvent

from ray_cluster.api.output.image_schemas import CompletedEvent, PartialImageEvent
from ray_cluster.errors import DispatcherUnavailable, JobStoreUnavailable
from tests.api.checks import URL, check_error, refused
from tests.api.conftest import make
from tests.jobs.jobs_cell import JobsCell, Replica

PROMPT = "a red circle"


@pytest.fixture
async def cell(tmp_path: Path) -> AsyncIterator[JobsCell]:
    async with JobsCell(tmp_path, max_queued=4) as running:
        yield running


async def drain(reply: Any) -> list[Any]:
    return [event async for event in reply]


async def stream(client: openai.AsyncOpenAI, previews: int = 2, **options: Any) -> list[Any]:
    reply = await client.images.generate(
        prompt=PROMPT, size="64x64", stream=True, partial_images=previews, **options
    )
    return await drain(reply)


@pytest.mark.parametrize("key", [None, "a key"])
async def test_previews_then_the_image(
    client: openai.AsyncOpenAI, replica: Replica, key: str | None
) -> None:
    headers = {} if key is None else {"Idempotency-Key": key}
    making = asyncio.create_task(make(replica))
    *previews, completed = await stream(client, extra_headers=headers, extra_body={"seed": 7})
    await making
    for index, event in enumerate(previews):
        ImageGenPartialImageEvent.model_validate(event.model_dump(), strict=True)
        PartialImageEvent.model_validate(
            event.model_dump(exclude_unset=True), strict=True, extra="forbid"
        )
        assert event.partial_image_index == index
        assert base64.b64decode(event.b64_json) == f"preview {index}".encode()
    assert len(previews) == 2
    ImageGenCompletedEvent.model_validate(completed.model_dump(), strict=True)
    CompletedEvent.model_validate(
        completed.model_dump(exclude_unset=True), strict=True, extra="forbid"
    )
    assert base64.b64decode(completed.b64_json) == b"the image"
    assert (completed.seed, completed.size, completed.quality) == (7, "64x64", "auto")
    assert completed.deadline["met"] is True


async def test_a_stream_without_previews_is_one_event(
    client: openai.AsyncOpenAI, replica: Replica
) -> None:
    making = asyncio.create_task(make(replica))
    [event] = await stream(client, previews=0)
    await making
    assert event.type == "image_generation.completed"


async def test_a_key_gives_the_same_image_again(
    client: openai.AsyncOpenAI, replica: Replica
) -> None:
    making = asyncio.create_task(make(replica))
    headers = {"Idempotency-Key": "one"}
    first = await stream(client, extra_headers=headers)
    await making
    # it is done: there is nothing left to preview
    [again] = await stream(client, extra_headers=headers)
    assert again.b64_json == first[-1].b64_json
    assert again.seed == first[-1].seed


async def test_a_failure_on_the_way_raises_in_the_client(
    client: openai.AsyncOpenAI, replica: Replica
) -> None:
    making = asyncio.create_task(make(replica, fails=True))
    reply = await client.images.generate(prompt=PROMPT, size="64x64", stream=True, partial_images=1)
    assert (await anext(reply)).type == "image_generation.partial_image"
    with pytest.raises(openai.APIError) as caught:
        await anext(reply)
    await making
    assert caught.value.code == "model_error"


async def test_a_dispatcher_that_dies_on_the_way_ends_the_stream_with_an_error(
    client: openai.AsyncOpenAI, replica: Replica, cell: JobsCell, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def dead(*_: object) -> None:
        raise DispatcherUnavailable("it has died")

    reply = await client.images.generate(prompt=PROMPT, size="64x64", stream=True)
    await replica.poll()
    monkeypatch.setattr(cell, "watch", dead)
    [lease] = replica.leases.values()
    # the gateway watches already: it hears of a preview first
    await replica.show(lease, 0)
    with pytest.raises(openai.APIError) as caught:
        await drain(reply)
    assert caught.value.code == "dispatcher_unavailable"


async def test_a_job_store_that_fails_on_the_way_ends_a_keyed_stream_with_an_error(
    client: openai.AsyncOpenAI, cell: JobsCell, replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away(*_: object) -> None:
        raise JobStoreUnavailable("it is locked")

    monkeypatch.setattr(cell, "job_change", away)
    with pytest.raises(openai.APIError) as caught:
        await stream(client, extra_headers={"Idempotency-Key": "one"})
    assert caught.value.code == "job_store_unavailable"


@pytest.mark.parametrize("when", ["waiting", "leased"])
async def test_a_client_that_leaves_a_stream_ends_its_image(
    client: openai.AsyncOpenAI, replica: Replica, cell: JobsCell, when: str
) -> None:
    reply = await client.images.generate(prompt=PROMPT, size="64x64", stream=True)
    snapshot = await cell.dispatch.snapshot()
    assert snapshot.num_waiting == 1
    if when == "leased":
        await replica.poll()
    await reply.close()
    for _ in range(1000):
        if (snapshot := await cell.dispatch.snapshot()).totals.get("aborted"):
            break
        await asyncio.sleep(0.01)
    assert snapshot.totals["aborted"] == 1
    assert snapshot.num_waiting + snapshot.num_leased == 0


async def test_a_keyed_stream_goes_on_without_its_client(
    client: openai.AsyncOpenAI, replica: Replica
) -> None:
    headers = {"Idempotency-Key": "one"}
    reply = await client.images.generate(
        prompt=PROMPT, size="64x64", stream=True, extra_headers=headers
    )
    await reply.close()
    await make(replica)
    replayed = await client.images.generate(
        prompt=PROMPT, size="64x64", stream=True, extra_headers=headers
    )
    events = await drain(replayed)
    assert base64.b64decode(events[-1].b64_json) == b"the image"


async def test_what_is_not_admitted_is_an_error_and_no_stream(
    url: str, replica: Replica, client: openai.AsyncOpenAI
) -> None:
    async with httpx.AsyncClient(base_url=url) as http:
        body = {"prompt": PROMPT, "stream": True}
        check_error(await http.post(URL, json=body | {"model": "none"}), 404)
    full = [
        await client.images.generate(prompt=PROMPT, size="64x64", stream=True) for _ in range(4)
    ]
    with pytest.raises(openai.RateLimitError):
        await client.with_options(max_retries=0).images.generate(prompt=PROMPT, stream=True)
    for reply in full:
        await reply.close()


async def test_what_does_not_go_with_a_stream_is_refused_by_name(http: httpx.AsyncClient) -> None:
    shown = {"prompt": PROMPT, "stream": True}
    assert "must be 1 with 'stream'" in await refused(http, "n", **shown, n=2)
    assert "carry the image" in await refused(
        http, "response_format", **shown, response_format="url"
    )
    assert "at most 3" in await refused(http, "partial_images", **shown, partial_images=4)
    said = await refused(http, "partial_images", prompt=PROMPT, partial_images=1)
    assert "without 'stream'" in said
    reply = await http.post("/v1/jobs", json=shown)
    check_error(reply, 400, param="stream")
    assert "/events" in reply.json()["error"]["message"]


async def test_the_schema_of_events_holds_for_what_is_sent(
    url: str, client: openai.AsyncOpenAI, replica: Replica
) -> None:
    async with httpx.AsyncClient(base_url=url) as http:
        document = (await http.get("/openapi.json")).json()
    content = document["paths"][URL]["post"]["responses"]["200"]["content"]
    schema = content["text/event-stream"]["schema"]
    assert "$ref" not in str(schema)
    making = asyncio.create_task(make(replica))
    events = await stream(client)
    await making
    kinds = {kind["properties"]["event"]["const"]: kind for kind in schema["anyOf"]}
    assert {event.type for event in events} < set(kinds)
    for event in events:
        data = kinds[event.type]["properties"]["data"]["contentSchema"]
        jsonschema.validate(event.model_dump(exclude_unset=True), data)
