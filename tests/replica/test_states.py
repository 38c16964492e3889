"""Replicas that die, and others that go on from the states they left."""

from __future__ import annotations

import asyncio
import io
import os
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ray_cluster.dispatch.service import DispatchService
from ray_cluster.dispatch.state_sweeper import StateSweeper
from ray_cluster.imaging.processes.image_coder import ImageCoder
from ray_cluster.protocol.outcomes import Completed
from ray_cluster.requests import Failure, ImageRequest
from ray_cluster.storage.blob_store import BlobStore, BlobStoreError
from tests.engine.harness import request
from tests.engine.staged import Gate, StagedModel
from tests.replica.setup import (
    BY_ID,
    REQUESTS,
    Link,
    MemoryBlobs,
    Replica,
    check_image,
    new_service,
    new_worker,
    offer,
    outcomes,
    serving,
    until,
)

EVERY = 2


def is_settled(worker: Replica) -> bool:
    """Whether what the steps so far have exported is in the store."""
    writer = worker.skill._states.writer
    return writer.cost_s is not None and not writer._waiting and writer._busy_with is None


def export_before_the_next_step(model: StagedModel, worker: Replica) -> None:
    """Have every step wait until the copies of the one before are kept."""
    num_steps = 0

    def hook(stage: str, _ids: Sequence[str]) -> None:
        nonlocal num_steps
        if stage == "denoise":
            end_s = time.monotonic() + 20
            while num_steps and not is_settled(worker) and time.monotonic() < end_s:
                time.sleep(0.002)
            num_steps += 1

    model.before.append(hook)


async def kill(worker: Replica, gate: Gate | None = None) -> None:
    """End a worker as a crash would: nothing is handed back, exported or reported."""
    tasks = (*worker._tasks, *worker.skill._beginnings.tasks, *worker.skill._endings.tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    stopping = asyncio.create_task(asyncio.to_thread(worker.skill._runner.stop))
    await until(lambda: worker.skill._runner.num_in_flight == 0)
    if gate is not None:
        gate.open()
    await stopping
    await asyncio.to_thread(worker.skill._states.stop)


async def be_let_go(service: DispatchService) -> None:
    await service.unregister("one")


async def fall_silent(service: DispatchService) -> None:
    await until(lambda: not service._core.snapshot(0.0).replicas, "the end of its silence")


async def run_to_step(
    model: StagedModel, worker: Replica, link: Link, one: ImageRequest, num_steps: int
) -> Gate:
    """Start a request alone and stop it when it has taken so many steps."""
    export_before_the_next_step(model, worker)
    gate = model.gate("denoise", one.request_id, call=num_steps)
    worker.start()
    await offer(link.service, [one])
    await asyncio.to_thread(gate.await_reached)
    return gate


def steps_since(model: StagedModel, num_calls: int) -> int:
    return sum(len(ids) for stage, ids in model.calls[num_calls:] if stage == "denoise")


@pytest.mark.parametrize(
    ("num_steps", "end"),
    [*((steps, be_let_go) for steps in range(7)), (5, fall_silent)],
    ids=lambda one: getattr(one, "__name__", str(one)),
)
async def test_the_request_of_a_killed_replica_repeats_few_steps(
    model: StagedModel,
    pixels: dict[str, Any],
    coder: ImageCoder,
    num_steps: int,
    end: Callable[[DispatchService], Awaitable[None]],
) -> None:
    one, blobs = BY_ID["r4"], MemoryBlobs()
    assert one.num_steps == 7
    timeout_s = 1.0 if end is fall_silent else 60.0
    link = Link(new_service(replica_timeout_s=timeout_s))
    worker = new_worker(model, link, coder, "one", blobs=blobs, every=EVERY)
    gate = await run_to_step(model, worker, link, one, num_steps)
    await kill(worker, gate)
    model.before.clear()
    assert bool(blobs.entries) == (num_steps >= EVERY)
    await end(link.service)
    num_calls = len(model.calls)
    async with serving(model, coder, "two", link=link, blobs=blobs, every=EVERY):
        outcome = (await outcomes(link.service, [one]))["r4"]
        assert isinstance(outcome, Completed)
        assert outcome.attempts == 2
        found = np.asarray(Image.open(io.BytesIO(outcome.result.data)))
        assert (found == pixels["r4"]).all()
        repeated = steps_since(model, num_calls) - (one.num_steps - num_steps)
        assert repeated == num_steps % EVERY
        await until(lambda: not blobs.entries, "the end of its state")


async def test_replicas_that_are_killed_at_any_moment_leave_every_image_as_it_is(
    model: StagedModel, pixels: dict[str, Any], coder: ImageCoder
) -> None:
    chance, blobs, link = random.Random(7), MemoryBlobs(), Link(new_service())
    model.before.append(lambda *_: time.sleep(0.01))
    for life in range(5):
        worker = new_worker(model, link, coder, f"life-{life}", blobs=blobs, every=EVERY)
        worker.start()
        if life == 0:
            await offer(link.service, REQUESTS)
        await asyncio.sleep(chance.uniform(0.1, 0.6))
        await kill(worker)
        await link.service.unregister(f"life-{life}")
    async with serving(model, coder, "last", link=link, blobs=blobs, every=EVERY):
        for outcome in (await outcomes(link.service, REQUESTS)).values():
            check_image(outcome, pixels)
        await until(lambda: not blobs.entries, "the end of all states")
        assert (await link.service.snapshot()).totals["completed"] == len(REQUESTS)


class Fault:
    """One way in which a store is no help."""

    def __init__(self, how: str) -> None:
        self.how = how
        self.num_times = 0

    def __call__(self, call: str, name: str) -> None:
        if call == self.how:
            self.num_times += 1
            raise BlobStoreError(f"no {call} of {name}")
        if (call, self.how) == ("get", "hang"):
            self.num_times += 1
            time.sleep(1.0)


@pytest.mark.parametrize("how", ["put", "get", "delete", "hang", "damage", "another's"])
async def test_a_store_that_is_no_help_costs_no_request(
    model: StagedModel,
    pixels: dict[str, Any],
    coder: ImageCoder,
    how: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    blobs, link = MemoryBlobs(), Link(new_service())
    fault = blobs.before = Fault(how)
    worker = new_worker(model, link, coder, "one", blobs=blobs, every=1)
    export_before_the_next_step(model, worker)
    gate = model.gate("denoise", "r1", call=3)
    worker.start()
    await offer(link.service, REQUESTS[:5])
    await asyncio.to_thread(gate.await_reached)
    await kill(worker, gate)
    model.before.clear()
    num_states = len(blobs.entries)
    assert bool(num_states) == (how != "put")
    if how == "damage":
        blobs.entries = {name: data[:-9] for name, data in blobs.entries.items()}
    if how == "another's":
        names, entries = list(blobs.entries), list(blobs.entries.values())
        blobs.entries = dict(zip(names, [*entries[1:], entries[0]], strict=True))
    await link.service.unregister("one")
    num_left = (await link.service.snapshot()).num_waiting
    async with serving(model, coder, link=link):
        two = new_worker(model, link, coder, "two", blobs=blobs, every=1)
        two.skill._states._max_load_s = 0.2
        two.start()
        for outcome in (await outcomes(link.service, REQUESTS[:5])).values():
            check_image(outcome, pixels)
        two.check_alive()
        await two.drain()
    if how in {"get", "hang"}:
        assert caplog.text.count("starts over") == num_left >= 4
    if how in {"damage", "another's"}:
        assert caplog.text.count("starts over") == num_states
    if how not in {"damage", "another's"}:
        assert fault.num_times
    if how != "delete":
        assert not blobs.entries


async def test_a_drain_whose_store_takes_nothing_hands_the_leases_back_all_the_same(
    model: StagedModel, pixels: dict[str, Any], coder: ImageCoder
) -> None:
    blobs, link = MemoryBlobs(), Link(new_service())
    blobs.before = Fault("put")
    worker = new_worker(model, link, coder, "one", blobs=blobs)
    gate = await run_to_step(model, worker, link, BY_ID["r4"], 4)
    draining = asyncio.create_task(worker.drain())
    await asyncio.sleep(0.1)
    gate.open()
    await draining
    assert [event.steps_done for event in link.reported] == [0]
    async with serving(model, coder, "two", link=link, blobs=blobs):
        (outcome,) = (await outcomes(link.service, [BY_ID["r4"]])).values()
        check_image(outcome, pixels)
        assert (await link.service.snapshot()).totals["requeued"] == 1


async def test_a_slow_load_does_not_hold_up_other_requests_and_can_be_aborted(
    model: StagedModel, pixels: dict[str, Any], coder: ImageCoder
) -> None:
    blobs, link = MemoryBlobs(), Link(new_service())
    worker = new_worker(model, link, coder, "one", blobs=blobs, every=EVERY)
    gate = await run_to_step(model, worker, link, BY_ID["r4"], 4)
    await kill(worker, gate)
    model.before.clear()
    await link.service.unregister("one")
    blobs.before = Fault("hang")
    async with serving(model, coder, "two", link=link, blobs=blobs) as (_, (two,)):
        await until(lambda: two.skill._beginnings.ids, "the load")
        # it has not begun: what it takes part in says so
        assert two._poll(1).steps_done_by_id == {"r4": 0}
        await link.service.offer([BY_ID["r0"]])
        check_image((await outcomes(link.service, [BY_ID["r0"]]))["r0"], pixels)
        await link.service.abort(["r4"])
        await until(lambda: not two.skill.leases, "the abort")
        assert not two.skill._beginnings.ids
        await until(lambda: not blobs.entries, "the end of its state")
    assert model.steps_of("r4") == 5


async def test_many_requests_with_aborts_and_a_death_leave_nothing_behind(
    model: StagedModel, coder: ImageCoder, tmp_path: Path
) -> None:
    chance, store = random.Random(3), BlobStore(str(tmp_path))
    link = Link(new_service())
    core = link.service._core
    left = StateSweeper(store, knows=core.knows, note_stored=core.note_stored, wall_clock=time.time)
    link.service._on_outcome = left.on_outcome
    left.start()
    # enough steps that some are on their way when the replica dies
    requests = [request(f"n{i}", seed=i, num_steps=8 + i % 16) for i in range(24)]
    aborted = set(chance.sample([one.request_id for one in requests], 8))
    mortal = new_worker(model, link, coder, "mortal", blobs=store, every=1)
    mortal.start()
    async with serving(model, coder, "two", "three", link=link, blobs=store, every=1):
        await until(lambda: len(link.epochs) == 3)
        await offer(link.service, requests)
        waiting = asyncio.create_task(outcomes(link.service, requests))
        for index, request_id in enumerate(sorted(aborted)):
            await asyncio.sleep(chance.uniform(0.0, 0.15))
            await link.service.abort([request_id])
            if index == 3:
                await until(lambda: list(store.entries()), "the first state")
                await kill(mortal)
                await link.service.unregister("mortal")
        found = await waiting
        assert len(found) == 24
        gone = {key for key, outcome in found.items() if isinstance(outcome, Failure)}
        assert gone <= aborted
        await until(lambda: not os.listdir(tmp_path), "the end of all states")
    assert not list(store.entries())
    await left.close()
