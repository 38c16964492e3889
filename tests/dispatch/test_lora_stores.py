"""Stores of LoRAs hear of what has changed and no more, and all lists converge."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import Any

import pytest

from ray_cluster.config.sections.cell_wide import LimitsConfig
from ray_cluster.config.sections.loras import LorasConfig
from ray_cluster.dispatch.core import DispatchCore
from ray_cluster.dispatch.loras import stores as lora_stores
from ray_cluster.dispatch.loras.loras import Loras
from ray_cluster.protocol.calling.changes import ChangeLog, Mark
from ray_cluster.protocol.leases import Poll, PollReply
from ray_cluster.protocol.loras import LoraOrders, LoraReports
from ray_cluster.replica.lora_store import lists as lora_lists
from tests.dispatch.lora_store import CONFIG, FakeStore, bare_core, failed, lora, ready, with_loras
from tests.fakes import poll_of, registration


@pytest.fixture
def core() -> DispatchCore:
    """A core with one replica and two LoRAs."""
    return bare_core()


@pytest.fixture
def one(core: DispatchCore) -> FakeStore:
    """A store that has heard that it need not have anything."""
    found = FakeStore(core, "s", "n")
    assert found.poll().loras == LoraOrders(Mark(1, 0), 0)
    return found


def leased(core: DispatchCore, now_s: float = 0.0) -> list[str]:
    return [one.request.request_id for one in core.poll(poll_of(), now_s).leases]


def test_a_store_hears_what_is_needed_and_again_if_it_has_not_heard(
    core: DispatchCore, one: FakeStore
) -> None:
    core.loras.add(lora("kept", is_pinned=True))
    core.offer([with_loras("a", "outline")], 0.0)
    # lost on its way
    lost = core.answer("s", 0.0).loras
    assert lost is not None
    assert [(one.lora.name, one.is_needed) for one in lost.orders] == [
        ("kept", False),
        ("outline", True),
    ]
    assert one.poll(now_s=1.0).loras is None
    # what follows is of no use to it, and no reason to wait longer
    core.offer([with_loras("b", "pastel")], 4.0)
    assert one.poll(now_s=4.0).loras is not None
    assert not one.orders
    assert one.poll(now_s=6.0).loras is not None
    assert list(one.orders) == ["id-kept", "id-outline", "id-pastel"]
    assert one.poll(now_s=7.0).loras is None
    assert one.poll(now_s=20.0).loras is None


def test_a_lora_that_only_pinning_finds_no_room_for_is_had_once_it_is_needed(
    core: DispatchCore, one: FakeStore
) -> None:
    core.loras.add(lora("kept", is_pinned=True))
    one.tell(failed("kept", "no_room"))
    status = core.loras.lookup(["kept"]).found["kept"]
    assert (status.state, status.is_permanent) == ("failed", False)
    core.offer([with_loras("a", "kept")], 1.0)
    # also where the store says so only now
    other = FakeStore(core, "other", "n2")
    other.tell(failed("kept", "no_room"))
    assert not core.take_outcomes()
    one.poll(now_s=1.0)
    for each in (one, other):
        assert each.orders["id-kept"].is_needed
    other.tell(ready("kept"))
    assert leased(core, 2.0) == ["a"]


def test_a_store_that_could_not_get_it_tries_again_for_the_next_request(
    core: DispatchCore, one: FakeStore
) -> None:
    other = FakeStore(core, "other", "n2")
    request = with_loras("a", "pastel")
    core.loras.note_open(request)
    one.tell(failed("pastel", "unreachable"))
    other.tell(ready("pastel"))
    core.loras.note_end(request)
    core.loras.take_alerted()
    core.loras.note_open(request)
    assert core.loras.take_alerted() == {"s"}
    one.poll()
    assert one.orders["id-pastel"].attempt == 1


def test_what_a_pool_calls_its_model_is_ordered_anew(core: DispatchCore, one: FakeStore) -> None:
    core.loras.add(lora("kept", is_pinned=True))
    one.tell(failed("kept", "unreachable"))
    core.register(replace(registration("r2"), arguments='{"model": "other"}'), 1.0)
    one.poll(now_s=1.0)
    order = one.orders["id-kept"]
    assert (order.base_model, order.attempt) == ("other", 1)


class Weather:
    """A cell between whose processes messages are lost, doubled, late and out of order.

    Requests begin and end, LoRAs are pinned and removed, stores fetch, fail, delete and register
    anew, and the dispatcher restarts, all as a seed says.
    """

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        self._epoch = 0
        self.now_s = 0.0
        self._open = [with_loras(f"r{n}", f"l{n % 12}") for n in range(0, 24, 5)]
        self._loras = {f"id-l{n}": lora(f"l{n}", is_pinned=n % 4 == 0) for n in range(12)}
        self._removed: set[str] = set()
        self._on_its_way: list[Callable[[], None]] = []
        self.core = self._new_core()
        self.stores = [FakeStore(self.core, f"s{n}", f"n{n}") for n in range(3)]

    def _new_core(self) -> DispatchCore:
        self._epoch += 1
        core = DispatchCore(config=CONFIG, limits=LimitsConfig(), epoch=self._epoch)
        core.register(registration(), self.now_s)
        for lora_id, one in self._loras.items():
            core.loras.restore(one, None, is_removed=lora_id in self._removed)
        for request in self._open:
            core.loras.note_open(request)
        core.loras.drop_removed()
        return core

    def step(self) -> None:
        """Have one thing happen."""
        chance, store = self._chance, self._chance.choice(self.stores)
        acts = [self._begin] * 3 + [self._end] * 3 + [self._change_registry]
        acts += [lambda: self._work(store)] * 4 + [lambda: self._send(store)] * 6
        acts += [self._deliver] * 12
        if chance.random() < 0.005:
            acts = [self._restart, lambda: store.register(self.now_s)]
        self.now_s += chance.random()
        chance.choice(acts)()

    def _begin(self) -> None:
        usable = [one.name for name, one in self._loras.items() if name not in self._removed]
        self._open.append(with_loras(f"x{self.now_s}", self._chance.choice(usable)))
        self.core.loras.note_open(self._open[-1])

    def _end(self) -> None:
        if self._open:
            self.core.loras.note_end(self._open.pop(self._chance.randrange(len(self._open))))

    def _change_registry(self) -> None:
        there = [one for one in self._loras if one not in self._removed]
        if len(there) > 4 and self._chance.random() < 0.5:
            gone = self._chance.choice(there)
            self._removed.add(gone)
            self.core.loras.remove(gone)
        else:
            name = f"l{len(self._loras)}"
            added = lora(name, is_pinned=self._chance.random() < 0.3)
            self._loras[added.lora_id] = added
            self.core.loras.add(added)

    def _work(self, store: FakeStore) -> None:
        """Have a store fetch something that it is to have, fail at it, or delete something."""
        said = store.said
        lacking = [one for name, one in store.orders.items() if name not in said]
        if lacking and self._chance.random() < 0.7:
            order = self._chance.choice(lacking)
            name, attempt = order.lora.name, order.attempt
            said[order.lora.lora_id] = (
                failed(name, "unreachable", attempt)
                if self._chance.random() < 0.2
                else replace(ready(name), attempt=attempt)
            )
        for name in [one for one in said if one not in store.orders]:
            if said[name].state == "failed" or self._chance.random() < 0.3:
                del said[name]
        store.say(*said.values())

    def _restart(self) -> None:
        self.core = self._new_core()
        for store in self.stores:
            store.core = self.core

    def _send(self, store: FakeStore) -> None:
        poll = store.make_poll()
        for _ in range(self._chance.choice([0, 1, 1, 1, 2])):
            self._on_its_way.append(lambda: self._answer(store, poll))

    def _answer(self, store: FakeStore, poll: Poll) -> None:
        reply = self.core.poll(poll, self.now_s)
        for _ in range(self._chance.choice([0, 1, 1, 1, 2])):
            self._on_its_way.append(lambda: self._hear(store, reply))

    def _hear(self, store: FakeStore, reply: PollReply) -> None:
        if reply.known:
            store.apply(reply)
        else:
            store.register(self.now_s)

    def _deliver(self) -> None:
        # any of the latest few, however long the others have waited
        if self._on_its_way:
            place = self._chance.randrange(len(self._on_its_way))
            self._on_its_way.pop(place)()

    def clear_up(self) -> None:
        """Have every store poll until it has nothing to say, and hears nothing."""
        self._on_its_way.clear()
        for _ in range(40):
            self.now_s += 1.0
            for store in self.stores:
                self._hear(store, self.core.poll(store.make_poll(), self.now_s))


@pytest.mark.parametrize("seed", range(8))
def test_lists_converge_in_any_weather(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # pieces, and more ends than are remembered
    monkeypatch.setattr(lora_stores, "_MOST_AT_ONCE", 3)
    monkeypatch.setattr(lora_lists, "_MOST_AT_ONCE", 3)
    monkeypatch.setattr(lora_stores, "_MOST_ENDS", 4)
    cell, num_lacking = Weather(seed), 0
    for _ in range(3):
        for _ in range(400):
            cell.step()
        cell.clear_up()
        wanted = {one.lora.lora_id: one for one in cell.core.loras._stores.wanted}
        for store in cell.stores:
            # what it lacks it has heard of
            lacking = [name for name in wanted if name not in store.said]
            num_lacking += len(lacking)
            assert {name: store.orders.get(name) for name in lacking} == {
                name: cell.core.loras._order(wanted[name]) for name in lacking
            }
            # once it is about to make room, it knows all
            store.say(*store.said.values(), ready(f"probe-{cell.now_s}"))
        cell.clear_up()
        for store in cell.stores:
            assert store.orders == {
                name: cell.core.loras._order(one) for name, one in wanted.items()
            }
            for known in cell.core.loras._registry:
                assert (store.name in known.ready) == (known.lora.lora_id in store.ready)
    assert num_lacking


def test_a_message_of_an_earlier_session_changes_nothing(core: DispatchCore) -> None:
    store = FakeStore(core, "s", "n")
    store.say(ready("pastel"))
    late = store.make_poll()
    store.poll()
    store.register()
    store.say()
    # the first one after a registration, and the last one that it has to say
    store.poll()
    core.poll(late, 1.0)
    assert core.loras.lookup(["pastel"]).found["pastel"].state == "registered"


def lines_of(act: Callable[[], object]) -> int:
    """Return how many lines of this project's code run."""
    count = 0

    def trace(frame: FrameType, event: str, _argument: Any) -> Any:
        nonlocal count
        count += event == "line" and "ray_cluster" in frame.f_code.co_filename
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        act()
    finally:
        sys.settrace(before)
    return count


def cell_of(num_loras: int, num_stores: int) -> Loras:
    """LoRAs that all stores have, twenty of them pinned, and all of it is known everywhere."""
    loras = Loras(lambda _base: "model")
    for number in range(num_loras):
        loras.add(lora(f"style-{number}", is_pinned=number < 20))
    reports = tuple(ready(f"style-{number}") for number in range(num_loras))
    for number in range(num_stores):
        name = f"s{number}"
        loras.join(name, f"n{number}")
        loras.hear(name, LoraReports(Mark(1, 0), num_loras, reports))
        while (said := loras.orders(name, 0.0)) is not None:
            loras.note_applied(name, Mark(said.after.session, said.upto))
    loras.take_alerted()
    return loras


def use_ready_one(loras: Loras) -> None:
    """A request with a LoRA that is ready everywhere, from its offer to its end."""
    request = with_loras("a", "style-50")
    loras.fetch_s([request], 1.0)
    loras.note_open(request)
    loras.holds_back(request)
    loras.lookup(["style-50"])
    loras.note_end(request)


def test_the_work_for_a_call_does_not_grow_with_the_loras_on_disk() -> None:
    few, many = cell_of(100, 50), cell_of(2000, 50)
    used = [lines_of(partial(use_ready_one, loras)) for loras in (few, many)]
    assert used[0] == used[1] < 200
    for loras in (few, many):
        assert loras.take_alerted() == set()
        assert not any(loras.orders(f"s{number}", 2.0) for number in range(50))
    # what one store says of one LoRA
    report = replace(ready("style-50"), took_s=3.0)
    heard = []
    for loras in (few, many):
        number = len(loras)
        news = LoraReports(Mark(1, number), number + 1, (report,))
        heard.append(lines_of(partial(loras.hear, "s7", news)))
    assert 10 < heard[0] == heard[1] < 100
    # one that no store has: each of them is told of it, and of little else
    for loras in (few, many):
        loras.add(lora("new"))
        loras.note_open(with_loras("b", "new"))
        assert len(loras.take_alerted()) == 50
        for number in range(50):
            said = loras.orders(f"s{number}", 3.0)
            assert said is not None
            assert [one.lora.name for one in said.orders] == ["new"]
            assert len(said.dropped) <= 1


def test_only_stores_that_lack_a_lora_are_woken() -> None:
    loras = cell_of(60, 5)
    gone = LoraReports(Mark(1, 60), 61, gone=("id-style-50",))
    loras.hear("s3", gone)
    loras.note_open(with_loras("a", "style-50"))
    assert loras.take_alerted() == {"s3"}
    assert loras.orders("s2", 1.0) is None
    # who is about to make room hears of it as well
    loras.hear("s2", LoraReports(Mark(1, 60), 61, (ready("other"),)))
    said = loras.orders("s2", 1.0)
    assert said is not None
    assert [one.lora.name for one in said.orders] == ["style-50"]


def test_ten_thousand_orders_come_in_pieces() -> None:
    loras = Loras(lambda _base: "model")
    loras.apply(LorasConfig(max_pinned=10_000))
    for number in range(10_000):
        loras.add(lora(f"style-{number}", is_pinned=True))
    loras.join("s", "n")
    pieces: list[LoraOrders] = []
    cost = []
    while True:
        cost.append(lines_of(lambda: pieces.append(loras.orders("s", 0.0))))  # type: ignore[arg-type]
        if pieces[-1] is None:
            break
        loras.note_applied("s", Mark(pieces[-1].after.session, pieces[-1].upto))
    assert [len(one.orders) for one in pieces[:-1]] == [200] * 50
    assert max(cost) < 5000


def test_a_log_of_changes_stays_as_small_as_its_list() -> None:
    log = ChangeLog()
    for number in range(10_000):
        log.note(f"entry-{number % 7}")
    assert len(log._log) < 200
    piece = log.since(9_995, 3, lambda _name: True)
    assert list(piece.names) == ["entry-6", "entry-0", "entry-1"]
    assert piece.upto == 9_998
    assert log.since(piece.upto, 3, lambda _name: True).upto == log.number == 10_000
