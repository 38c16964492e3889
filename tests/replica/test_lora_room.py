"""Which LoRAs a node keeps, and whose fetches may run."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from ray_cluster.imaging.processes.worker_process import CoderProcess, Message
from ray_cluster.protocol.loras import Lora, LoraOrder
from ray_cluster.replica.lora_store.processes import LoraProcesses
from ray_cluster.replica.lora_store.room import FetchSlots, kept_ids
from tests.replica.lora_stores import (
    MemoryFolder,
    make_impatient,
    new_link,
    pin,
    states,
    status,
    storing,
    use,
)
from tests.replica.setup import until


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    make_impatient(monkeypatch)


def order(name: str, *, owner: str = "", needed: bool = True, source: str = "") -> LoraOrder:
    added_s = float(name.strip("abcdefghijklmnopqrstuvwxyz") or 0)
    lora = Lora(name, name, "m", source or f"https://{name}/a", added_s=added_s, owner=owner)
    return LoraOrder(lora, "m", is_needed=needed)


def pinned(name: str, owner: str = "") -> LoraOrder:
    return order(name, owner=owner, needed=False)


def test_what_is_needed_is_kept_whatever_is_pinned() -> None:
    orders = [order("a"), pinned("p"), pinned("q"), order("b")]
    assert kept_ids(orders, {"a": 50, "b": 5, "p": 5, "q": 5}, 10) == {"a", "b", "p"}
    # while it is not known how large they are, they may fit
    assert kept_ids(orders, {}, 10) == {"a", "b", "p", "q"}


def test_pinned_ones_have_half_of_the_disk_and_their_owners_share_it() -> None:
    hers = [pinned(f"a{n}", "alice") for n in range(8)]
    his = [pinned(f"b{n}", "bob") for n in range(10, 12)]
    sizes = {one.lora.lora_id: 10 for one in [*hers, *his]}
    assert kept_ids(hers, sizes, 80) == {"a0", "a1", "a2", "a3"}
    # his came later, and are as good
    assert kept_ids([*hers, *his], sizes, 80) == {"a0", "a1", "b10", "b11"}
    # a large one leaves room for others
    assert kept_ids([*hers, *his], sizes | {"a1": 60}, 80) == {"a0", "a2", "b10", "b11"}
    new = pinned("a99", "alice")
    assert "a99" not in kept_ids([*hers, *his, new], sizes, 80)


def test_one_clients_slow_sources_leave_slots_for_all_others() -> None:
    slots = FetchSlots()
    hers = [order(f"a{n}", owner="alice") for n in range(100)]
    assert sum(map(slots.take, hers)) == 8
    # of however many others
    for owner, num_slots in (("bob", 4), ("carol", 2), ("dave", 1)):
        theirs = [order(f"{owner}{n}", owner=owner) for n in range(100)]
        assert sum(map(slots.take, theirs)) == num_slots
    assert slots.take(order("s0"))
    assert slots.are_full
    assert not slots.take(order("s1"))
    for one in hers[:8]:
        slots.release(one.lora.lora_id)
    assert "a0" not in slots
    assert not slots.are_full


def test_one_place_that_hangs_is_shared_likewise() -> None:
    slots = FetchSlots()

    def taken(owner: str) -> int:
        source = "https://host/a"
        return sum(slots.take(order(f"{owner}{n}", owner=owner, source=source)) for n in range(9))

    assert [taken(owner) for owner in ("alice", "bob", "carol", "dave")] == [2, 1, 1, 0]
    # the settings' own have no owner
    slots = FetchSlots()
    assert taken("") == 4


async def test_evicted_ones_are_reported_as_gone_and_ordered_ones_stay() -> None:
    link, folder = new_link("old", "pastel"), MemoryFolder(["id-old"])
    folder.max_bytes = 1_000
    async with storing(folder, link):
        await until(lambda: states(link, "old") == ["ready"])
        await use(link, "pastel")
        await until(lambda: states(link, "old", "pastel") == ["registered", "ready"])
        assert list(folder.here) == ["id-pastel"]


async def test_what_requests_wait_for_stays_though_the_store_was_not_woken_for_it() -> None:
    here = ["id-idle", "id-old", "id-older"]
    link, folder = new_link("old", "older", "pastel"), MemoryFolder(here, is_open=False)
    folder.max_bytes = 1_000
    async with storing(folder, link):
        await until(lambda: states(link, "old", "older") == ["ready", "ready"])
        await use(link, "old")
        await use(link, "pastel")
        await until(lambda: folder.begun == ["id-pastel"])
        # while it fetches
        num_polls = link.num_with_reports
        await use(link, "older")
        await asyncio.sleep(0.02)
        assert link.num_with_reports == num_polls
        folder.end("id-pastel")
        await until(lambda: "id-idle" not in folder.here)
        assert set(folder.here) == {"id-old", "id-older", "id-pastel"}


async def test_where_needed_ones_fill_the_disk_one_more_comes_at_a_time() -> None:
    names = [f"lora{n}" for n in range(6)]
    ids = [f"id-{name}" for name in names]
    link, folder = new_link(*names), MemoryFolder(is_open=False)
    folder.max_bytes = 4_000
    async with storing(folder, link):
        await use(link, *names)
        await until(lambda: folder.begun == ids[:4])
        folder.end(*ids[:4])
        await until(lambda: folder.begun == ids[:5])
        await until(lambda: states(link, *names).count("ready") == 4)
        assert folder.begun == ids[:5]
        folder.end(*ids[4:])
        await until(lambda: states(link, *names) == ["ready"] * 6)


async def test_pinned_ones_beyond_their_share_are_given_up_until_there_is_room_or_need() -> None:
    pins = [f"pin{n}" for n in range(5)]
    link, folder = new_link("pastel"), MemoryFolder()
    folder.max_bytes = 4_000
    async with storing(folder, link):
        for name in pins:
            pin(link, name, f"/{name}")
        await until(lambda: states(link, *pins) == [*["ready"] * 4, "failed"])
        assert "share of the disk" in status(link, "pin4").reason
        # what a request needs has the other half
        await use(link, "pastel")
        await until(lambda: states(link, *pins) == ["ready", "ready", "failed", "ready", "failed"])
        await use(link, "pin4")
        await until(lambda: states(link, *pins) == ["ready", "ready", "failed", "failed", "ready"])
        assert folder.begun.count("id-pin2") == 1
        link.service.loras.remove("id-pin0")
        await until(lambda: states(link, "pin2") == ["ready"])


async def test_conversions_of_one_client_take_turns_with_those_of_others() -> None:
    begun: list[str] = []

    class Processes(LoraProcesses):
        def warm_up(self) -> None:
            self._converter = cast(CoderProcess, object())

        async def _run(self, process: Any, job: Message, max_s: float, keep: Any) -> Message:
            begun.append(str(job.header["name"]))
            await asyncio.sleep(0)
            return job

    processes = Processes()
    names = [("a0", "alice"), ("a1", "alice"), ("a2", "alice"), ("b0", "bob"), ("c0", "carol")]
    await asyncio.gather(
        *(processes.convert(Message({"name": name}), owner) for name, owner in names)
    )
    assert begun == ["a0", "b0", "c0", "a1", "a2"]
