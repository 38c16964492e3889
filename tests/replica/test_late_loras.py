"""A replica begins images without their LoRAs where calls allow it, and fetches these meanwhile."""

from __future__ import annotations

import asyncio
import io
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from ray_cluster.engine.adapters.adapter_set import AdapterSet
from ray_cluster.engine.adapters.random_lora import random_lora
from ray_cluster.errors import RequestFailed
from ray_cluster.imaging.processes.image_coder import ImageCoder
from ray_cluster.policies.types import StepCost
from ray_cluster.protocol.calling.changes import Mark
from ray_cluster.protocol.leases import Lease, Poll, Registration, Returned
from ray_cluster.protocol.loras import Lora, LoraFacts, LoraReport, LoraReports
from ray_cluster.protocol.outcomes import Completed
from ray_cluster.requests import AddOns, Failure, ImageRequest, LoraUse
from tests.engine.harness import request
from tests.engine.staged import StagedModel
from tests.replica.setup import Link, new_service, new_worker, offer, outcomes, until

FACTS = LoraFacts("ab" * 32, 1_000_000, (8,), 12)
START = 2


class Shelf:
    """Has one set of LoRAs, once it may.

    Attributes:
        gate: holds it up while it is cleared.
        error: raised instead.
        asked: what it was to have, with whether a store goes first.
    """

    residents = ()

    def __init__(self, model: StagedModel) -> None:
        with torch.inference_mode():
            deltas = random_lora(model.inner.executor, 1)
        assert deltas is not None
        self.adapter_set = AdapterSet({key: _Loud(one) for key, one in deltas.items()}, None)
        self.gate = asyncio.Event()
        self.error: RequestFailed | None = None
        self.asked: list[tuple[str, bool]] = []

    async def adapters(self, lease: Lease, *, store_first: bool = False) -> AdapterSet | None:
        if not lease.request.add_ons.loras:
            return None
        self.asked.append((lease.request.request_id, store_first))
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        return self.adapter_set


class _Loud:
    """A delta of which images show something."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        return 1e5 * self._inner(inputs)


def late(request_id: str, start: int = START, **changes: Any) -> ImageRequest:
    add_ons = AddOns(loras=(LoraUse("one", 1.0, "id-one"),), lora_start_step=start)
    return request(request_id, num_steps=4, seed=9, add_ons=add_ons, **changes)


@asynccontextmanager
async def serving(
    model: StagedModel, coder: ImageCoder, shelf: Shelf
) -> AsyncIterator[tuple[Link, Any]]:
    link = Link(new_service())
    link.service.loras.add(Lora("id-one", "one", "m", "builtin:one"))
    worker = new_worker(model, link, coder, loras=shelf)
    worker.start()
    try:
        yield link, worker
    finally:
        await worker.drain()
        await link.service.close()


def pixels(outcome: Any) -> Any:
    assert isinstance(outcome, Completed), outcome
    return np.asarray(Image.open(io.BytesIO(outcome.result.data))).astype(int)


def gap(one: Any, other: Any) -> int:
    """The largest difference of a pixel's value."""
    return int(np.abs(pixels(one) - pixels(other)).max())


async def test_the_image_is_the_same_whenever_its_loras_arrive(
    model: StagedModel, coder: ImageCoder
) -> None:
    shelf = Shelf(model)
    async with serving(model, coder, shelf) as (link, worker):
        waits, plain = late("waits"), request("plain", num_steps=8)
        await offer(link.service, [waits, plain])
        # its peer goes on while it waits, in the middle of its steps
        assert isinstance((await outcomes(link.service, [plain]))["plain"], Completed)
        await until(lambda: worker.skill._runner.steps_done_by_id.get("waits") == START)
        assert shelf.asked == [("waits", True)]
        shelf.gate.set()
        there, others = late("there"), [late("from-the-start", 0), late("later", 3)]
        await offer(link.service, [there, *others])
        found = await outcomes(link.service, [waits, there, *others])
        assert gap(found["waits"], found["there"]) <= 1
        # and not that of another switch
        for other in others:
            assert gap(found["waits"], found[other.request_id]) > 5
        worker.check_alive()


async def test_loras_that_cannot_be_had_end_the_request_alone(
    model: StagedModel, coder: ImageCoder
) -> None:
    shelf = Shelf(model)
    async with serving(model, coder, shelf) as (link, worker):
        one = late("one")
        await offer(link.service, [one])
        await until(lambda: worker.skill._runner.steps_done_by_id.get("one") == START)
        shelf.error = RequestFailed("no such file", "lora")
        shelf.gate.set()
        outcome = (await outcomes(link.service, [one]))["one"]
        assert isinstance(outcome, Failure)
        assert (outcome.stage, outcome.message) == ("lora", "no such file")
        await until(lambda: worker.skill._runner.num_in_flight == 0)
        plain = request("plain")
        await offer(link.service, [plain])
        assert isinstance((await outcomes(link.service, [plain]))["plain"], Completed)
        worker.check_alive()


async def test_one_that_waits_beyond_its_deadline_is_returned_and_goes_on_later(
    model: StagedModel, coder: ImageCoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ray_cluster.replica.denoise.late_loras._LOOK_S", 0.02)
    shelf = Shelf(model)
    async with serving(model, coder, shelf) as (link, worker):
        store = Registration("s", None, 0, 1, StepCost(0.0, 0.0), kind="lora", node="n")
        await link.service.register(store)
        one = late("one", slo_s=0.2)
        await offer(link.service, [one])
        await until(lambda: len(link.reported) == 1, "the return of the lease")
        assert link.reported[0].steps_done == START
        # until a store has what its next step takes, no replica holds it
        await until(lambda: worker.skill._runner.num_in_flight == 0)
        assert shelf.asked == [("one", True)]
        shelf.gate.set()
        ready = LoraReport("id-one", "ready", FACTS, took_s=0.1)
        news = LoraReports(Mark(1, 0), 1, (ready,))
        await link.service.poll(Poll("s", 1, 0, loras=news), 0.0)
        found = await outcomes(link.service, [one])
        # the rest of its steps is with its LoRAs
        again = late("again")
        await offer(link.service, [again])
        expected = await outcomes(link.service, [again])
        assert gap(found["one"], expected["again"]) <= 1
        # it did not begin anew; rows that go on from a state are not known by their names
        assert model.steps_of("one") == START


async def test_those_that_wait_leave_their_slots_to_others_long_before_their_deadline(
    model: StagedModel, coder: ImageCoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ray_cluster.replica.denoise.late_loras._LOOK_S", 0.02)
    monkeypatch.setattr("ray_cluster.replica.denoise.late_loras._LONGEST_WAIT_S", 0.2)
    shelf = Shelf(model)
    async with serving(model, coder, shelf) as (link, worker):
        store = Registration("s", None, 0, 1, StepCost(0.0, 0.0), kind="lora", node="n")
        await link.service.register(store)
        flood = [late(f"f{number}", 1, slo_s=86400.0) for number in range(6)]
        await offer(link.service, flood)
        await until(lambda: len(worker.skill.leases) == len(flood), "all slots to be held")
        other = request("other")
        await offer(link.service, [other])
        assert isinstance((await outcomes(link.service, [other]))["other"], Completed)
        await until(lambda: worker.skill._runner.num_in_flight == 0)
        assert [one.steps_done for one in link.reported if isinstance(one, Returned)] == [1] * 6


async def test_a_replica_that_leaves_does_not_wait_for_loras(
    model: StagedModel, coder: ImageCoder
) -> None:
    shelf = Shelf(model)
    async with serving(model, coder, shelf) as (link, worker):
        await offer(link.service, [late("one")])
        await until(lambda: worker.skill._runner.steps_done_by_id.get("one") == START)
        began_s = time.monotonic()
        await worker.drain()
        assert time.monotonic() - began_s < 30
        assert link.reported[-1].steps_done == START
        assert not worker.skill._late_loras.tasks
