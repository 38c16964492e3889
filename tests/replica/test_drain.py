"""Requests that move from one replica to another when one is drained."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

import pytest

from ray_cluster.imaging.processes.image_coder import ImageCoder
from ray_cluster.protocol.leases import Returned
from ray_cluster.requests import state_name
from tests.engine.staged import StagedModel
from tests.replica.setup import (
    BY_ID,
    REQUESTS,
    Link,
    MemoryBlobs,
    check_image,
    new_service,
    new_worker,
    offer,
    outcomes,
    serving,
)


@pytest.mark.parametrize("stage", ["encode", "denoise", "decode"])
async def test_what_a_drained_replica_hands_back_another_one_finishes(
    model: StagedModel, pixels: dict[str, Any], coder: ImageCoder, stage: Any
) -> None:
    link, blobs = Link(new_service()), MemoryBlobs()
    one = new_worker(model, link, coder, "one", blobs=blobs)
    gate = model.gate(stage, "r4", call=3 if stage == "denoise" else 0)
    one.start()
    await offer(link.service, REQUESTS[:6])
    await asyncio.to_thread(gate.await_reached)
    draining = asyncio.create_task(one.drain())
    await asyncio.sleep(0.1)
    gate.open()
    await draining
    returned = [event for event in link.reported if isinstance(event, Returned)]
    assert returned
    done = {event.request_id: event.steps_done for event in returned}
    assert blobs.entries.keys() >= {state_name(key) for key, steps in done.items() if steps}
    if stage == "denoise":
        assert done["r4"] >= 4
    if stage == "decode":
        assert done["r4"] == BY_ID["r4"].num_steps
    snapshot = await link.service.snapshot()
    assert snapshot.replicas == ()
    assert snapshot.num_leased == 0
    num_calls = len(model.calls)
    async with serving(model, coder, "two", link=link, blobs=blobs):
        found = await outcomes(link.service, REQUESTS[:6])
        for outcome in found.values():
            check_image(outcome, pixels)
        later = [ids for at, ids in model.calls[num_calls:] if at == "denoise"]
        # no step is taken twice; rows that came by way of the store have no name here
        left = sum(BY_ID[key].num_steps - count for key, count in done.items())
        assert sum(map(len, later)) == left
        assert (await link.service.snapshot()).totals["completed"] == 6
    assert not blobs.entries


async def test_a_drained_replica_tells_all_that_it_has_counted(
    model: StagedModel, coder: ImageCoder
) -> None:
    link = Link(new_service())
    one = new_worker(model, link, coder, "one")
    gate = model.gate("denoise", "r4", call=3)
    one.start()
    await offer(link.service, REQUESTS[:6])
    await asyncio.to_thread(gate.await_reached)
    draining = asyncio.create_task(one.drain())
    await asyncio.sleep(0.1)
    gate.open()
    await draining
    steps = [ids for stage, ids in model.calls if stage == "denoise"]
    told = {
        name: value
        for family in link.last_poll["one"].metrics or ()
        for (name, _labels), value in family.samples.items()
    }
    assert told["ray_cluster_step_seconds_count"] == len(steps) >= 4
    assert told["ray_cluster_step_batch_images_sum"] == sum(map(len, steps))
    assert (await link.service.snapshot()).replicas == ()
    await link.service.close()


async def test_replicas_that_come_and_go_leave_every_image_as_it_is(
    model: StagedModel, pixels: dict[str, Any], coder: ImageCoder
) -> None:
    """Five replicas one after the other, each taken away at a random moment."""
    chance = random.Random(5)
    link, blobs = Link(new_service()), MemoryBlobs()
    model.before.append(lambda *_: time.sleep(0.01))
    first = new_worker(model, link, coder, "first", blobs=blobs)
    first.start()
    await offer(link.service, REQUESTS)
    worker = first
    for life in range(5):
        await asyncio.sleep(chance.uniform(0.1, 0.6))
        await worker.drain()
        worker = new_worker(model, link, coder, f"life-{life}", blobs=blobs)
        worker.start()
    for outcome in (await outcomes(link.service, REQUESTS)).values():
        check_image(outcome, pixels)
    await worker.drain()
    assert (await link.service.snapshot()).totals["completed"] == len(REQUESTS)
    assert not blobs.entries
    await link.service.close()
