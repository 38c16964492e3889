"""A store of LoRAs beside a real dispatch service: what is ordered comes, and is reported."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Collection

import pytest

from ray_cluster.protocol.leases import Poll
from tests.fakes import FakeClock, registration
from tests.replica.lora_stores import (
    FACTS,
    MemoryFolder,
    make_impatient,
    new_link,
    pin,
    states,
    status,
    storing,
    use,
)
from tests.replica.setup import Link, until


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    make_impatient(monkeypatch)


async def test_what_requests_need_is_fetched_and_they_go_on_at_once() -> None:
    link, folder = new_link("pastel"), MemoryFolder(is_open=False)
    async with storing(folder, link) as worker:
        await use(link, "pastel")
        await until(lambda: folder.begun)
        assert states(link, "pastel") == ["fetching"]
        assert not (await link.service.poll(Poll("r", 1, 1), 0.0)).leases
        waiting = asyncio.create_task(link.service.poll(Poll("r", 1, 1), 60.0))
        folder.end("id-pastel")
        # at once, not when the store's held poll ends
        (lease,) = (await waiting).leases
        assert lease.request.add_ons.loras[0].name == "pastel"
        known = status(link, "pastel")
        assert (known.state, known.facts, known.nodes) == ("ready", FACTS, ("n",))
        worker.check_alive()
        counts = {family.name: family.samples for family in worker.metrics()}
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
        # the store has heard of it
        await until(lambda: link.last_poll["s"].lora_mark.number == 11)
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


async def test_the_time_of_a_fetch_is_not_that_since_the_first_order() -> None:
    link, folder, clock = new_link("other"), MemoryFolder(), FakeClock()
    folder.failures = {"id-pastel": "unreachable"}
    async with storing(folder, link, clock=clock):
        pin(link, "pastel", "/pastel")
        await until(lambda: states(link, "pastel") == ["failed"])
        # much later a request needs it, and later still somebody has deleted it
        clock.now_s += 3600.0
        await use(link, "pastel")
        for num_begun in (2, 3):
            await until(lambda: "id-pastel" in link.took_s)
            assert link.took_s.pop("id-pastel") == 0.0
            assert len(folder.begun) == num_begun
            clock.now_s += 3600.0
            folder.here.clear()


async def test_a_store_that_the_dispatcher_gave_up_says_everything_again() -> None:
    link, folder = new_link("pastel", "other"), MemoryFolder(["id-pastel"])
    async with storing(folder, link):
        await until(lambda: states(link, "pastel") == ["ready"])
        await link.service.unregister("s")
        await until(lambda: len(link.epochs) == 2)
        # of the same epoch: the dispatcher has not restarted
        assert len(set(link.epochs)) == 1
        await until(lambda: states(link, "pastel") == ["ready"])
        await use(link, "other")
        await until(lambda: states(link, "other") == ["ready"])


async def test_a_poll_that_comes_late_changes_nothing() -> None:
    link, folder = new_link("pastel"), MemoryFolder(is_open=False)
    async with storing(folder, link):
        await until(lambda: link.num_with_reports)
        old = link.last_full
        await use(link, "pastel")
        await until(lambda: folder.begun)
        folder.end("id-pastel")
        await until(lambda: states(link, "pastel") == ["ready"])
        # as one that was sent again on the way
        await link.service.poll(old, 0.0)
        assert states(link, "pastel") == ["ready"]


@pytest.mark.parametrize("seed", range(3))
async def test_whatever_calls_are_lost_all_come(seed: int) -> None:
    names = [f"lora{n}" for n in range(12)]
    link, folder = new_link(*names), MemoryFolder()
    chance = random.Random(seed)
    folder.failures = {f"id-{name}": "unreachable" for name in names[::3]}
    async with storing(folder, link) as worker:
        link.fails = lambda _name, _side: link.num_lost < 25 and chance.random() < 0.4
        for name in names:
            await use(link, name)
            if chance.random() < 0.2:
                await link.service.unregister("s")
        await until(lambda: states(link, *names[1::3]) == ["ready"] * 4)
        await until(lambda: {"ready", "failed"} >= set(states(link, *names)))
        await use(link, *names[::3])
        await until(lambda: states(link, *names) == ["ready"] * len(names))
        worker.check_alive()
    assert link.num_lost
    assert link.num_lost


async def test_a_store_that_leaves_gives_its_fetches_up() -> None:
    link, folder = new_link("pastel"), MemoryFolder(is_open=False)
    async with storing(folder, link):
        await use(link, "pastel")
        await until(lambda: folder.begun)
    assert not link.service.loras.store_ids


@pytest.mark.parametrize("seed", range(3))
async def test_the_factors_of_a_removed_lora_go_at_once(seed: int) -> None:
    link, folder = new_link("pastel", "outline", "ink"), MemoryFolder(["id-pastel"])
    chance = random.Random(seed)
    async with storing(folder, link):
        await until(lambda: states(link, "pastel") == ["ready"])
        folder.is_open = False
        link.fails = lambda _name, _side: link.num_lost < 8 and chance.random() < 0.4
        await use(link, "outline", "ink")
        await until(lambda: {"id-outline", "id-ink"} <= set(folder.begun))
        # one that nobody has used, one that is fetched just now, and one that is used still
        for name in ("pastel", "outline", "ink"):
            if name == "outline":
                await link.service.abort([_request_of(link, name)])
            assert link.service.loras.remove(f"id-{name}") is not None
            link.service.note_loras()
        await until(lambda: "id-pastel" not in folder.here)
        folder.end("id-outline", "id-ink")
        await until(lambda: "id-ink" in folder.here and "id-outline" not in folder.here)
        await link.service.abort([_request_of(link, "ink")])
        await until(lambda: not folder.here)


def _request_of(link: Link, lora: str) -> str:
    found = link.service.open_requests()
    return next(one.request_id for one in found if one.add_ons.loras[0].name == lora)


async def test_the_folder_is_tidied_though_nothing_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray_cluster.replica.lora_store.skill._TIDY_S", 0.0)
    link, folder, evicted = new_link("pastel"), MemoryFolder(["id-removed", "id-pastel"]), []
    pin(link, "outline", "/outline")

    def evict(keep: Collection[str], _removed: Collection[str]) -> list[str]:
        evicted.append(set(keep))
        return []

    folder.evict = evict  # type: ignore[method-assign]
    async with storing(folder, link):
        await until(lambda: {"id-outline"} in evicted)
