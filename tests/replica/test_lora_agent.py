"""A store of LoRAs beside a real dispatch service: what is ordered comes, and is reported."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ray_cluster.protocol.leases import Poll
from ray_cluster.protocol.loras import FailureKind, Lora, LoraFacts, LoraOrder, LoraStatus
from ray_cluster.replica.lora_agent import LoraStoreAgent, store_registration
from ray_cluster.replica.lora_folder import LoraUnavailable
from ray_cluster.replica.poller import LeasePoller
from ray_cluster.requests import AddOns, ImageRequest, LoraUse
from tests.fakes import image_request, registration
from tests.replica.setup import Link, new_service, until

FACTS = LoraFacts("ab" * 32, 1_000, (8,), 12)


class MemoryFolder:
    """A folder of which each fetch waits until a test ends it.

    Attributes:
        here: what it has.
        begun: ids of all fetches, in order.
        failures: by id, how the next fetch of it fails.
        is_open: whether fetches end by themselves.
        num_kept: how many it keeps beside what is ordered; None keeps all.
    """

    def __init__(self, here: Sequence[str] = (), *, is_open: bool = True) -> None:
        self.here = dict.fromkeys(here, FACTS)
        self.begun: list[str] = []
        self.failures: dict[str, FailureKind] = {}
        self.is_open = is_open
        self.num_kept: int | None = None
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

    def warm_up(self) -> None: ...

    def path_of(self, lora_id: str) -> Path | None:
        return Path(lora_id) if lora_id in self.here else None

    def facts(self) -> dict[str, LoraFacts]:
        return dict(self.here)

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

    def evict(self, keep: Collection[str]) -> list[str]:
        others = [one for one in self.here if one not in keep]
        gone = [] if self.num_kept is None else others[: max(0, len(others) - self.num_kept)]
        for lora_id in gone:
            del self.here[lora_id]
        return gone

    def close(self) -> None:
        self.is_closed = True


class StoreLink(Link):
    """Attributes:
    heard: states by id, as the store reported them last.
    """

    heard: dict[str, str]

    async def poll(self, poll: Poll, wait_s: float) -> Any:
        if poll.loras is not None:
            self.heard = {one.lora_id: one.state for one in poll.loras}
        return await super().poll(poll, wait_s)


@asynccontextmanager
async def storing(folder: MemoryFolder, link: StoreLink) -> AsyncIterator[LoraStoreAgent]:
    await link.service.register(registration("r", max_in_flight=100))
    agent = LoraStoreAgent(store_registration("s", "n"), folder, link=link, clock=time.monotonic)
    agent.start()
    try:
        await until(lambda: link.epochs)
        yield agent
    finally:
        link.fails = lambda _name, _side: False
        await agent.drain()
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


async def test_what_requests_need_is_fetched_and_they_go_on_at_once() -> None:
    link, folder = new_link("pastel"), MemoryFolder(is_open=False)
    async with storing(folder, link) as agent:
        await use(link, "pastel")
        await until(lambda: folder.begun)
        await until(lambda: link.heard == {"id-pastel": "fetching"})
        assert states(link, "pastel") == ["fetching"]
        assert not (await link.service.poll(Poll("r", 1, 1), 0.0)).leases
        waiting = asyncio.create_task(link.service.poll(Poll("r", 1, 1), 60.0))
        folder.end("id-pastel")
        # at once, not when the store's held poll ends
        (lease,) = (await waiting).leases
        assert lease.request.add_ons.loras[0].name == "pastel"
        known = status(link, "pastel")
        assert (known.state, known.facts, known.nodes) == ("ready", FACTS, ("n",))
        agent.check_alive()
        counts = {family.name: family.samples for family in agent.metrics()}
        fetches = counts["ray_cluster_lora_fetch_seconds"]
        assert fetches["ray_cluster_lora_fetch_seconds_count", (("result", "ready"),)] == 1


async def test_what_is_on_the_disk_is_known_from_the_start_and_after_a_restart() -> None:
    link, folder = new_link("pastel"), MemoryFolder(["id-pastel", "id-of-another-life"])
    async with storing(folder, link):
        await until(lambda: states(link, "pastel") == ["ready"])
        await link.service.close()
        link.service = new_link("pastel").service
        # also for a dispatcher that gives the same epoch
        await link.service.register(registration("r"))
        await until(lambda: states(link, "pastel") == ["ready"])
        await use(link, "pastel")
        assert (await link.service.poll(Poll("r", 1, 1), 60.0)).leases
    assert not folder.begun


@pytest.mark.parametrize("side", ["before", "after"])
@pytest.mark.parametrize("every", [1, 2, 3])
async def test_no_news_is_lost_with_the_polls_that_are(side: str, every: int) -> None:
    names = [f"lora{n}" for n in range(8)]
    link, folder = new_link(*names), MemoryFolder(is_open=False)
    calls = iter(range(1_000_000))
    async with storing(folder, link):
        link.fails = lambda name, at: (
            name == "poll" and at == side and link.num_lost < 8 and next(calls) % every == 0
        )
        await use(link, *names)
        for name in names:
            folder.end(f"id-{name}")
            await asyncio.sleep(0.01)
        await until(lambda: states(link, *names) == ["ready"] * len(names))
    assert link.num_lost
    assert sorted(folder.begun) == sorted(f"id-{name}" for name in names)


async def test_what_is_on_the_disk_is_said_again_when_the_first_poll_was_lost() -> None:
    link, folder = new_link("pastel"), MemoryFolder(["id-pastel"])
    link.fails = lambda name, at: (name, at) == ("poll", "before") and link.num_lost < 1
    async with storing(folder, link):
        await until(lambda: states(link, "pastel") == ["ready"])
    assert link.num_lost


async def test_sources_that_hang_keep_no_place_of_other_ones() -> None:
    hanging = [f"hang{n}" for n in range(30)]
    link = new_link(
        *hanging,
        "pastel",
        source=lambda name: f"{'https://slow' if name.startswith('hang') else 's3://fast'}/{name}",
    )
    folder = MemoryFolder(is_open=False)
    async with storing(folder, link):
        await use(link, *hanging)
        await until(lambda: len(folder.begun) == 4)
        await use(link, "pastel")
        folder.end("id-pastel")
        await until(lambda: states(link, "pastel") == ["ready"])
        assert len(folder.begun) == 5
        folder.end(*(f"id-{name}" for name in hanging))
        await until(lambda: states(link, *hanging) == ["ready"] * len(hanging))


async def test_what_a_request_waits_for_is_fetched_before_what_is_only_pinned() -> None:
    pinned = [f"pinned{n}" for n in range(10)]
    link, folder = new_link("pastel"), MemoryFolder(is_open=False)
    async with storing(folder, link):
        for name in pinned:
            pin(link, name, f"/{name}")
        await until(lambda: len(folder.begun) == 4)
        await use(link, "pastel")
        await until(lambda: "id-pastel" in link.heard)
        folder.end(folder.begun[0])
        await until(lambda: len(folder.begun) == 5)
        assert folder.begun[4] == "id-pastel"


async def test_a_failure_is_reported_and_a_new_request_tries_again() -> None:
    link, folder = new_link("pastel"), MemoryFolder()
    folder.failures = {"id-pastel": "unreachable"}
    async with storing(folder, link):
        await use(link, "pastel")
        await until(lambda: status(link, "pastel").state == "failed")
        known = status(link, "pastel")
        assert (known.reason, known.is_permanent) == ("no such file", False)
        await use(link, "pastel")
        await until(lambda: states(link, "pastel") == ["ready"])
        folder.failures = {"id-pastel": "invalid"}
    assert folder.begun == ["id-pastel"] * 2


async def test_a_file_that_somebody_deleted_is_fetched_again() -> None:
    link, folder = new_link("pastel"), MemoryFolder(["id-pastel"])
    async with storing(folder, link):
        await until(lambda: states(link, "pastel") == ["ready"])
        folder.here.clear()
        await use(link, "pastel")
        await until(lambda: folder.begun == ["id-pastel"])
        await until(lambda: states(link, "pastel") == ["ready"])


async def test_evicted_ones_are_reported_as_gone_and_ordered_ones_stay() -> None:
    link, folder = new_link("old", "pastel"), MemoryFolder(["id-old"])
    folder.num_kept = 0
    async with storing(folder, link):
        await until(lambda: states(link, "old") == ["ready"])
        await use(link, "pastel")
        await until(lambda: states(link, "old", "pastel") == ["registered", "ready"])
        assert list(folder.here) == ["id-pastel"]


async def test_a_mistake_in_a_fetch_is_seen_by_the_health_check() -> None:
    link, folder = new_link("pastel"), MemoryFolder()
    folder.mistake = AssertionError("a mistake")
    async with storing(folder, link) as agent:
        agent.check_alive()
        await use(link, "pastel")
        await until(lambda: folder.begun)
        with pytest.raises(RuntimeError, match="unexpectedly"):
            await until(agent.check_alive)


async def test_a_store_that_leaves_gives_its_fetches_up() -> None:
    link, folder = new_link("pastel"), MemoryFolder(is_open=False)
    async with storing(folder, link):
        await use(link, "pastel")
        await until(lambda: folder.begun)
    assert not link.service.loras.store_ids


async def test_a_poller_says_which_polls_may_be_lost() -> None:
    link, lost = new_link(), []
    poller = LeasePoller(
        link,
        store_registration("s", "n"),
        make_poll=lambda epoch: Poll("s", epoch, 0, loras=()),
        on_reply=lambda _reply: None,
        on_lost=lambda: lost.append(link.num_lost),
        poll_s=0.01,
    )
    link.fails = lambda name, _side: name == "poll" and link.num_lost < 2
    task = asyncio.create_task(poller.poll_forever())
    await until(lambda: len(link.last_poll) and lost == [1, 2])
    task.cancel()
    await link.service.close()
