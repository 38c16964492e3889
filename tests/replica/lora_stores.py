"""A store of LoRAs with a folder in memory, beside a real dispatch service."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ray_cluster.cell.worker import Worker
from ray_cluster.dispatch.loras import stores as lora_stores
from ray_cluster.dispatch.service import DispatchService
from ray_cluster.protocol.leases import Poll
from ray_cluster.protocol.loras import FailureKind, Lora, LoraFacts, LoraOrder, LoraStatus
from ray_cluster.replica import retries
from ray_cluster.replica.lora_store import skill as lora_skill
from ray_cluster.replica.lora_store.folder import LoraUnavailable
from ray_cluster.replica.lora_store.skill import LoraStoreSkill, store_registration
from ray_cluster.requests import AddOns, ImageRequest, LoraUse
from tests.fakes import image_request, registration
from tests.replica.setup import Link, new_service, until

FACTS = LoraFacts("ab" * 32, 1_000, (8,), 12)


def make_impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Repeat what was lost, and look at the folder, sooner than is right between machines."""
    monkeypatch.setattr(retries, "_DISPATCHER_RETRY_S", (0.01, 0.02))
    monkeypatch.setattr(lora_stores, "_REPEAT_S", 0.2)
    monkeypatch.setattr(lora_skill, "_LOOK_S", 0.05)


class MemoryFolder:
    """A folder of which each fetch waits until a test ends it.

    Attributes:
        here: what it has.
        begun: ids of all fetches, in order.
        failures: by id, how the next fetch of it fails.
        is_open: whether fetches end by themselves.
        max_bytes: of all, each of which has a thousand.
    """

    def __init__(self, here: Sequence[str] = (), *, is_open: bool = True) -> None:
        self.here = dict.fromkeys(here, FACTS)
        self.begun: list[str] = []
        self.failures: dict[str, FailureKind] = {}
        self.is_open = is_open
        self.max_bytes = 1_000_000
        self.mistake: Exception | None = None
        self.is_closed = False
        self._gates: dict[str, asyncio.Event] = {}

    def end(self, *lora_ids: str) -> None:
        for lora_id in lora_ids:
            self._gates.setdefault(lora_id, asyncio.Event()).set()

    @property
    def num_bytes(self) -> int:
        return 1_000 * len(self.here)

    def prepare(self) -> None: ...

    def path_of(self, lora_id: str) -> Path | None:
        return Path(lora_id) if lora_id in self.here else None

    @property
    def ids(self) -> set[str]:
        return set(self.here)

    def facts_of(self, lora_id: str) -> LoraFacts | None:
        return self.here.get(lora_id)

    async def ensure(self, order: LoraOrder) -> LoraFacts:
        lora_id = order.lora.lora_id
        self.begun.append(lora_id)
        if self.mistake is not None:
            raise self.mistake
        if not self.is_open:
            await self._gates.setdefault(lora_id, asyncio.Event()).wait()
        if (failure := self.failures.pop(lora_id, None)) is not None:
            raise LoraUnavailable(failure, "no such file")
        return self.here.setdefault(lora_id, FACTS)

    def evict(self, keep: Collection[str], removed: Collection[str]) -> list[str]:
        others = [one for one in self.here if one not in keep]
        gone = others[: max(0, self.num_bytes - self.max_bytes) // 1_000]
        gone += [one for one in others if one in removed and one not in gone]
        for lora_id in gone:
            del self.here[lora_id]
        return gone

    def close(self) -> None:
        self.is_closed = True


class StoreLink(Link):
    """The way of a store to its dispatcher.

    Attributes:
        took_s: by id, of each that was reported as ready after it was fetched.
        last_full: the last poll with reports.
        num_with_reports: polls with reports.
    """

    last_full: Poll

    def __init__(self, service: DispatchService) -> None:
        super().__init__(service)
        self.took_s: dict[str, float] = {}
        self.num_with_reports = 0

    async def poll(self, poll: Poll, wait_s: float) -> Any:
        if poll.loras is not None:
            self.last_full = poll
            self.num_with_reports += 1
            for one in poll.loras.reports:
                if one.state == "ready":
                    self.took_s[one.lora_id] = one.took_s
        return await super().poll(poll, wait_s)


@asynccontextmanager
async def storing(
    folder: MemoryFolder, link: StoreLink, *, clock: Callable[[], float] = time.monotonic
) -> AsyncIterator[Worker]:
    await link.service.register(registration("r", max_in_flight=100))
    memory: Any = folder
    skill = LoraStoreSkill(store_registration("s", "n"), memory, link=link, clock=clock)
    worker = Worker(skill)
    worker.start()
    try:
        await until(lambda: link.epochs)
        yield worker
    finally:
        link.fails = lambda _name, _side: False
        await worker.drain()
        assert folder.is_closed
        await link.service.close()


def new_link(*names: str, source: Callable[[str], str] = lambda name: f"/{name}") -> StoreLink:
    """Return the link to a service that knows some LoRAs."""
    link = StoreLink(new_service())
    for name in names:
        link.service.loras.add(Lora(f"id-{name}", name, "m", source(name)))
    return link


def with_loras(request_id: str, *names: str) -> ImageRequest:
    uses = tuple(LoraUse(name, 1.0, f"id-{name}") for name in names)
    return replace(image_request(request_id), add_ons=AddOns(loras=uses))


async def use(link: Link, *names: str) -> None:
    """Have a request accepted for each of some LoRAs."""
    for name in names:
        request = with_loras(f"{name}-{time.monotonic_ns()}", name)
        assert (await link.service.offer([request])).accepted


def pin(link: Link, name: str, source: str) -> None:
    link.service.loras.add(Lora(f"id-{name}", name, "m", source, is_pinned=True))
    link.service.note_loras()


def status(link: Link, name: str) -> LoraStatus:
    return link.service.loras.lookup([name]).found[name]


def states(link: Link, *names: str) -> list[str]:
    return [status(link, name).state for name in names]
