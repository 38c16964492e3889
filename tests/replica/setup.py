"""A model's replica beside a real dispatch service, on one event loop."""

from __future__ import annotations

import asyncio
import io
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
from PIL import Image

from ray_cluster.cell.front import core_of
from ray_cluster.cell.worker import Worker
from ray_cluster.config.loading import ClusterConfig
from ray_cluster.config.sections.cell_wide import DispatchConfig
from ray_cluster.dispatch.service import DispatchService
from ray_cluster.engine.stages.building import build_runner
from ray_cluster.errors import DispatcherUnavailable
from ray_cluster.policies.types import StepCost
from ray_cluster.protocol.leases import Poll, Registration
from ray_cluster.protocol.outcomes import Completed, Outcome
from ray_cluster.replica.delivery import Delivery, ResultStore, Templates
from ray_cluster.replica.denoise.skill import DenoiseSkill
from ray_cluster.replica.states.transfer import StateTransfer
from ray_cluster.requests import SAMPLER_NAMES, ImageRequest
from tests.engine.harness import pool, request
from tests.engine.staged import StagedModel

CONFIG = DispatchConfig(
    poll_s=0.3,
    replica_timeout_s=60.0,
    attached_timeout_s=120.0,
    default_slo_s=600.0,
    max_attempts=50,
)
WHOLE = ClusterConfig.model_validate(
    {"pools": [{"name": "tiny", "model": "shapes-sd"}], "loras": {"num_stores": 0}}
)
PATIENCE_S = 120.0
REQUESTS = [
    request(f"r{i}", sampler=SAMPLER_NAMES[i % 5], seed=i, num_steps=3 + i % 5) for i in range(12)
]
BY_ID = {one.request_id: one for one in REQUESTS}


def new_service(epoch: int = 1, **changes: Any) -> DispatchService:
    config = CONFIG.model_copy(update=changes)
    core = core_of(WHOLE.model_copy(update={"dispatch": config}), epoch)
    return DispatchService(core, config=config, clock=time.monotonic)


class MemoryBlobs:
    """A state store in this process.

    Attributes:
        before: called with the name of the call and of each entry; may raise, or wait.
        puts: the names of all entries that were put, in order.
    """

    def __init__(self) -> None:
        self.entries: dict[str, bytes] = {}
        self.before: Callable[[str, str], None] = lambda _call, _name: None
        self.puts: list[str] = []

    def put(self, name: str, data: bytes) -> None:
        self.before("put", name)
        self.entries[name] = data
        self.puts.append(name)

    def get(self, name: str) -> bytes | None:
        self.before("get", name)
        return self.entries.get(name)

    def delete(self, names: Iterable[str]) -> None:
        for name in names:
            self.before("delete", name)
            self.entries.pop(name, None)


class Link:
    """The way to a dispatcher, which may fail before a call is delivered, or after.

    Attributes:
        service: whom the calls reach; may be exchanged, as by a restart.
        fails: asked with the call's name and the side; true loses the call, or its answer.
        last_poll: the last poll of each replica.
    """

    def __init__(self, service: DispatchService) -> None:
        self.service = service
        self.fails: Callable[[str, str], bool] = lambda _name, _side: False
        self.num_lost = 0
        self.reported: list[Any] = []
        self.epochs: list[int] = []
        self.last_poll: dict[str, Poll] = {}

    async def register(self, registration: Registration) -> int:
        epoch: int = await self._call("register", registration)
        self.epochs.append(epoch)
        return epoch

    async def unregister(self, replica_id: str) -> None:
        await self._call("unregister", replica_id)

    async def poll(self, poll: Poll, wait_s: float) -> Any:
        self.last_poll[poll.replica_id] = poll
        return await self._call("poll", poll, wait_s)

    async def report(self, replica_id: str, events: Sequence[Any]) -> Any:
        self.reported += events
        return await self._call("report", replica_id, events)

    async def show(self, replica_id: str, shown: Any) -> None:
        await self._call("show", replica_id, shown)

    async def _call(self, name: str, *arguments: Any) -> Any:
        self._maybe_fail(name, "before")
        answer = await getattr(self.service, name)(*arguments)
        self._maybe_fail(name, "after")
        return answer

    def _maybe_fail(self, name: str, side: str) -> None:
        if self.fails(name, side):
            self.num_lost += 1
            raise DispatcherUnavailable(f"{name} lost {side} it was delivered")


class Replica(Worker):
    """A worker that makes images."""

    skill: DenoiseSkill


def new_worker(
    model: StagedModel,
    link: Link,
    coder: Any,
    replica_id: str = "one",
    max_in_flight: int = 6,
    *,
    blobs: Any = None,
    every: int | None = None,
    results: ResultStore | None = None,
    edits: Templates | None = None,
    loras: Any = None,
) -> Replica:
    """A worker over a store, memory of its own unless given, that exports every so many steps.

    With LoRAs, it merges them.
    """
    profile = model.inner.profile
    states = StateTransfer(MemoryBlobs() if blobs is None else blobs)
    skill = DenoiseSkill(
        Registration(replica_id, profile, max_in_flight, 4, StepCost(0.01, 0.1), pool="p"),
        runner=build_runner(
            model.loaded,
            pool("unused", max_batch=4),
            clock=time.monotonic,
            sink=states.writer,
            interval=lambda _row_step_s, _export_s: every,
            merges=loras is not None,
        ),
        delivery=Delivery(coder, results, edits),
        states=states,
        loras=loras,
        link=link,
    )
    return Replica(skill)


@asynccontextmanager
async def serving(
    model: StagedModel,
    coder: Any,
    *replica_ids: str,
    link: Link | None = None,
    blobs: Any = None,
    every: int | None = None,
    edits: Templates | None = None,
) -> AsyncIterator[tuple[Link, list[Replica]]]:
    link = link or Link(new_service())
    blobs = MemoryBlobs() if blobs is None else blobs
    workers = [
        new_worker(model, link, coder, name, blobs=blobs, every=every, edits=edits)
        for name in replica_ids
    ]
    for worker in workers:
        worker.start()
    try:
        yield link, workers
    finally:
        link.fails = lambda _name, _side: False
        for worker in workers:
            await worker.drain()
        await link.service.close()


async def until(condition: Callable[[], Any], what: str = "the condition") -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end_s, f"waited in vain for {what}"
        await asyncio.sleep(0.01)


async def offer(service: DispatchService, requests: Sequence[ImageRequest]) -> None:
    """Offer the requests once a replica has registered."""
    end_s = time.monotonic() + PATIENCE_S
    while not await service.models():
        assert time.monotonic() < end_s, "no replica has registered"
        await asyncio.sleep(0.01)
    for one in requests:
        assert (await service.offer([one])).accepted


async def outcomes(
    service: DispatchService, requests: Sequence[ImageRequest]
) -> dict[str, Outcome]:
    """Wait for the end of all requests; each ends once."""
    found: dict[str, Outcome] = {}
    left = {one.request_id for one in requests}
    async with asyncio.timeout(PATIENCE_S):
        while left:
            new = await service.wait(left, 5.0)
            assert found.keys().isdisjoint(new)
            found |= new
            left -= new.keys()
    return found


def check_image(outcome: Outcome, pixels: dict[str, Any]) -> None:
    assert isinstance(outcome, Completed), outcome
    found = np.asarray(Image.open(io.BytesIO(outcome.result.data)))
    gap = np.abs(found.astype(int) - pixels[outcome.request_id].astype(int)).max()
    assert gap <= 1
