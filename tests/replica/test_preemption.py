"""Images that are preempted by more urgent ones, on a real engine and dispatch service."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from ray_cluster.engine.stages.building import build_runner
from ray_cluster.engine.stages.events import Exported
from ray_cluster.imaging.processes.image_coder import ImageCoder
from ray_cluster.protocol.leases import Returned
from ray_cluster.requests import state_name
from ray_cluster.storage.blob_store import BlobStoreError
from tests.engine.harness import pool
from tests.engine.staged import Gate, StagedModel, StageName
from tests.replica.setup import (
    BY_ID,
    Link,
    MemoryBlobs,
    Replica,
    check_image,
    new_service,
    new_worker,
    offer,
    outcomes,
    until,
)

# the one of most steps, and one of few
LONG, SHORT = BY_ID["r4"], BY_ID["r5"]


def totals_of(link: Link) -> Counter[str]:
    return Counter(link.service._core.snapshot(0.0).totals)


@asynccontextmanager
async def exchanging(
    model: StagedModel, coder: ImageCoder, blobs: MemoryBlobs, stage: StageName, call: int = 0
) -> AsyncIterator[tuple[Link, Replica, Gate]]:
    """A replica of one place, whose long image was asked back when a stage began with it.

    Whether that is worth while is the policy's affair. It goes on when the gate is opened.
    """
    link = Link(new_service())
    worker = new_worker(model, link, coder, max_in_flight=1, blobs=blobs)
    gate = model.gate(stage, LONG.request_id, call=call)
    worker.start()
    try:
        await offer(link.service, [LONG])
        await asyncio.to_thread(gate.await_reached)
        await offer(link.service, [SHORT])
        link.service._core._exchanges.plan([(LONG.request_id, SHORT.request_id)])
        link.service._polls.wake()
        await until(lambda: totals_of(link)["preempted"], "the exchange")
        yield link, worker, gate
    finally:
        gate.open()
        await worker.drain()
        await link.service.close()


def returned(link: Link) -> list[Returned]:
    return [one for one in link.reported if isinstance(one, Returned)]


@pytest.mark.parametrize(("stage", "call"), [("encode", 0), ("denoise", 1), ("denoise", 4)])
async def test_an_image_gives_way_and_goes_on_where_it_was(
    model: StagedModel, pixels: dict[str, Any], coder: ImageCoder, stage: Any, call: int
) -> None:
    blobs = MemoryBlobs()
    async with exchanging(model, coder, blobs, stage, call) as (link, _, gate):
        gate.open()
        found = await outcomes(link.service, [LONG, SHORT])
        for outcome in found.values():
            check_image(outcome, pixels)
        [back] = returned(link)
        assert back.request_id == LONG.request_id
        if stage == "denoise":
            # the step that it was in counts, and none is taken twice
            assert back.steps_done == call + 1
            assert state_name(LONG.request_id) in blobs.puts
        steps = [ids for at, ids in model.calls if at == "denoise"]
        assert sum(map(len, steps)) == LONG.num_steps + SHORT.num_steps
        totals = totals_of(link)
        assert (totals["preempted"], totals["requeued"]) == (1, 1)
        assert found[LONG.request_id].attempts == 2
    assert not blobs.entries


async def test_an_image_that_is_as_good_as_made_stays(
    model: StagedModel, pixels: dict[str, Any], coder: ImageCoder
) -> None:
    async with exchanging(model, coder, MemoryBlobs(), "decode") as (link, _, gate):
        await until(lambda: model.steps_of(SHORT.request_id), "the second image")
        gate.open()
        for outcome in (await outcomes(link.service, [LONG, SHORT])).values():
            check_image(outcome, pixels)
            assert outcome.attempts == 1
        assert not returned(link)


async def test_what_is_cancelled_while_it_gives_way_leaves_no_state(
    model: StagedModel, coder: ImageCoder
) -> None:
    blobs, reached, go_on = MemoryBlobs(), asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def hold(call: str, name: str) -> None:
        if call == "put" and name == state_name(LONG.request_id):
            loop.call_soon_threadsafe(reached.set)
            asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result(20)

    blobs.before = hold
    async with exchanging(model, coder, blobs, "denoise", 2) as (link, worker, gate):
        gate.open()
        async with asyncio.timeout(20):
            await reached.wait()
        await link.service.abort([LONG.request_id])
        await until(lambda: not worker.skill.leases.get(LONG.request_id), "the abort")
        go_on.set()
        await outcomes(link.service, [LONG, SHORT])
        await until(lambda: state_name(LONG.request_id) not in blobs.entries, "the deletion")
        assert not returned(link)


async def test_a_store_that_fails_costs_steps_and_no_image(
    model: StagedModel, pixels: dict[str, Any], coder: ImageCoder
) -> None:
    blobs = MemoryBlobs()

    def fail(call: str, _name: str) -> None:
        if call == "put":
            raise BlobStoreError("no space left")

    blobs.before = fail
    async with exchanging(model, coder, blobs, "denoise", 2) as (link, _, gate):
        gate.open()
        for outcome in (await outcomes(link.service, [LONG, SHORT])).values():
            check_image(outcome, pixels)
        assert [one.steps_done for one in returned(link)] == [0]


async def test_an_urgent_call_is_made_at_once_between_the_steps_of_a_long_image(
    model: StagedModel, pixels: dict[str, Any], coder: ImageCoder
) -> None:
    """The whole way, by the policy's own decision: there is one place, and it is taken."""
    link, blobs = Link(new_service()), MemoryBlobs()
    long = replace(LONG, request_id="long", num_steps=40, slo_s=600.0)
    truth = StagedModel(model.inner, [long]).pixels()
    model.before.append(lambda stage, _ids: time.sleep(0.05 if stage == "denoise" else 0.0))
    worker = new_worker(model, link, coder, max_in_flight=1, blobs=blobs)
    worker.start()
    # so that it is known what a step takes with its delay
    await offer(link.service, [BY_ID["r9"]])
    await outcomes(link.service, [BY_ID["r9"]])
    await offer(link.service, [long])
    await until(lambda: model.steps_of("long") >= 2, "the long image")
    # alone it takes some 0.3 s, and after the long one more than 2 s
    urgent = replace(SHORT, slo_s=1.3)
    await offer(link.service, [urgent])
    found = await outcomes(link.service, [long, urgent])
    for outcome in found.values():
        check_image(outcome, pixels | truth)
    assert totals_of(link)["preempted"] == 1
    steps = [ids for at, ids in model.calls if at == "denoise"]
    last = max(at for at, ids in enumerate(steps) if urgent.request_id in ids)
    assert last < len(steps) - 10
    await worker.drain()
    await link.service.close()


async def test_an_export_that_was_given_up_takes_nothing_out(model: StagedModel) -> None:
    """Whoever asks for one and waits no more leaves the image where it is."""
    events: list[Any] = []
    runner = build_runner(model.loaded, pool("unused"), clock=time.monotonic)
    gate = model.gate("denoise", LONG.request_id, call=1)
    runner.start(events.append)
    runner.submit(LONG, deadline_s=time.monotonic() + 60)
    await asyncio.to_thread(gate.await_reached)
    given_up = runner.export(LONG.request_id)
    assert given_up.cancel()
    gate.open()
    await until(lambda: [one for one in events if not hasattr(one, "report")], "the image")
    assert model.steps_of(LONG.request_id) == LONG.num_steps
    assert runner.export(LONG.request_id).result(20) is None
    assert runner.export("nobody").result(20) is None
    runner.submit(SHORT, deadline_s=time.monotonic() + 60)
    taken = runner.export(SHORT.request_id).result(20)
    assert isinstance(taken, Exported)
    assert taken.request is SHORT
    assert runner.num_in_flight == 0
    runner.stop()
