"""Requests with LoRAs: they wait in the dispatcher until a store has what they need."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from ray_cluster.dispatch.core import DispatchCore
from ray_cluster.protocol.calling.changes import Mark
from ray_cluster.protocol.leases import Poll, PollReply, Returned
from ray_cluster.protocol.loras import LoraOrders, LoraReports
from ray_cluster.replica.lora_store.skill import store_registration
from ray_cluster.requests import Failure, ImageRequest
from tests.dispatch.lora_store import FakeStore, bare_core, failed, lora, ready, with_loras
from tests.dispatch.virtual_service import held, make_service, now
from tests.fakes import finished, image_request, poll_of, run_virtually


def leased(core: DispatchCore, now_s: float = 0.0) -> list[str]:
    return [one.request.request_id for one in core.poll(poll_of(), now_s).leases]


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


def test_a_request_waits_for_its_lora_and_holds_no_other_up(
    core: DispatchCore, one: FakeStore
) -> None:
    assert core.offer([with_loras("styled", "pastel")], 0.0).accepted
    assert core.offer([image_request("plain")], 0.0).accepted
    assert leased(core) == ["plain"]
    assert one.tell() == ["pastel"]
    assert one.orders["id-pastel"].base_model == "folder-of-m"
    assert leased(core, 1.0) == []
    one.tell(ready("pastel"), now_s=2.0)
    (lease,) = core.poll(poll_of(), 2.0).leases
    assert (lease.request.request_id, lease.deadline_in_s) == ("styled", 28.0)
    assert [one.lora.name for one in lease.loras] == ["pastel"]
    core.report("r", [finished(lease)], 3.0)
    assert not core.knows("styled")


def late(request_id: str, start: int, **values: object) -> ImageRequest:
    """A request that takes its first steps without its LoRA."""
    one = with_loras(request_id, "pastel", **values)
    return replace(one, add_ons=replace(one.add_ons, lora_start_step=start))


def test_one_that_begins_without_its_lora_is_leased_while_it_is_fetched(
    core: DispatchCore, one: FakeStore
) -> None:
    for name in ("fetched", "outline"):
        core.loras.add(lora(name))
    # such a wait is no part of what is promised
    waiting, beginning = with_loras("waiting", "pastel"), late("beginning", 2)
    assert core.loras.fetch_s([waiting], 0.0) > 0
    assert core.loras.fetch_s([beginning], 0.0) == 0
    core.offer([waiting], 0.0)
    core.offer([beginning], 0.0)
    (lease,) = core.poll(poll_of(), 0.0).leases
    assert lease.request == beginning
    assert lease.deadline_in_s == 30.0
    assert [one.lora.name for one in lease.loras] == ["pastel"]
    assert one.tell() == ["pastel"]


def test_one_that_is_returned_when_its_lora_is_due_waits_for_it(
    core: DispatchCore, one: FakeStore
) -> None:
    core.offer([late("a", 2)], 0.0)
    for steps_done, waits in ((1, False), (2, True)):
        (lease,) = core.poll(poll_of(), 1.0).leases
        core.report("r", [Returned("a", lease.fence, steps_done)], 1.0)
        assert core.loras.holds_back(lease.request, steps_done) is waits
    assert leased(core, 2.0) == []
    one.tell(ready("pastel"), now_s=3.0)
    assert leased(core, 3.0) == ["a"]


def test_one_that_begins_without_a_lora_that_is_gone_is_ended(core: DispatchCore) -> None:
    core.loras.remove("id-pastel")
    core.offer([late("a", 2)], 0.0)
    assert leased(core) == []
    (outcome,) = core.take_outcomes()
    assert isinstance(outcome, Failure)
    assert outcome.code == "lora_failed"


def test_all_of_several_are_waited_for(core: DispatchCore, one: FakeStore) -> None:
    core.offer([with_loras("a", "pastel", "outline")], 0.0)
    assert one.tell() == ["pastel", "outline"]
    one.tell(ready("pastel"))
    assert leased(core) == []
    one.tell(ready("pastel"), ready("outline"))
    assert leased(core) == ["a"]


def test_without_a_store_replicas_get_the_orders_at_once() -> None:
    core = bare_core()
    core.offer([with_loras("a", "pastel")], 0.0)
    (lease,) = core.poll(poll_of(), 0.0).leases
    assert [one.lora.name for one in lease.loras] == ["pastel"]


def test_the_first_store_is_waited_for_a_while() -> None:
    core = bare_core()
    core.loras.expect_stores(60.0)
    core.offer([with_loras("a", "pastel")], 0.0)
    assert leased(core) == []
    one = FakeStore(core, "s", "n", now_s=5.0)
    assert one.tell(now_s=5.0) == ["pastel"]
    one.tell(ready("pastel"), now_s=6.0)
    assert leased(core, 6.0) == ["a"]
    late = bare_core()
    late.loras.expect_stores(60.0)
    late.offer([with_loras("b", "pastel")], 0.0, client=None)
    for now_s in (20.0, 40.0, 59.0):
        assert leased(late, now_s) == []
        late.expire(now_s)
    late.poll(poll_of(num_free=0), 60.0)
    late.expire(60.0)
    assert leased(late, 60.0) == ["b"]


@pytest.mark.parametrize("way", ["unregister", "silence"])
def test_what_waits_goes_on_when_the_last_store_dies(core: DispatchCore, way: str) -> None:
    core.register(store_registration("s", "n"), 0.0)
    core.offer([with_loras("a", "pastel")], 0.0)
    if way == "unregister":
        core.unregister("s", 1.0)
    else:
        core.poll(poll_of(), 5.0)
        core.expire(6.5)
    assert leased(core, 7.0) == ["a"]


def test_a_lora_that_is_not_to_be_had_ends_its_requests_alone(
    core: DispatchCore, one: FakeStore
) -> None:
    core.offer([with_loras("a", "pastel")], 0.0)
    core.offer([with_loras("b", "outline")], 0.0)
    one.tell(failed("pastel", "invalid"))
    (outcome,) = core.take_outcomes()
    assert isinstance(outcome, Failure)
    assert (outcome.request_id, outcome.kind, outcome.code) == ("a", "invalid", "lora_failed")
    assert "'pastel' cannot be had: no such file" in outcome.message
    status = core.loras.lookup(["pastel"]).found["pastel"]
    assert (status.state, status.is_permanent) == ("failed", True)
    one.tell(failed("pastel", "invalid"), ready("outline"))
    assert leased(core) == ["b"]


def test_a_source_that_did_not_answer_is_asked_again_for_the_next_request(
    core: DispatchCore, one: FakeStore
) -> None:
    core.offer([with_loras("a", "pastel")], 0.0)
    assert one.tell() == ["pastel"]
    one.tell(failed("pastel", "unreachable"))
    (outcome,) = core.take_outcomes()
    assert isinstance(outcome, Failure)
    assert (outcome.kind, outcome.stage) == ("error", "lora")
    core.offer([with_loras("b", "pastel")], 1.0)
    assert not core.take_outcomes()
    one.tell(failed("pastel", "unreachable"), now_s=1.0)
    assert one.orders["id-pastel"].attempt == 1
    # the store says the old failure until it has begun anew
    assert not core.take_outcomes()
    one.tell(failed("pastel", "unreachable", attempt=1), now_s=2.0)
    assert [one.request_id for one in core.take_outcomes()] == ["b"]


def test_one_store_that_fails_is_not_all_of_them(core: DispatchCore, one: FakeStore) -> None:
    other = FakeStore(core, "other", "n2")
    core.offer([with_loras("a", "pastel")], 0.0)
    one.tell(failed("pastel", "unreachable"))
    assert not core.take_outcomes()
    other.tell(ready("pastel"))
    assert leased(core) == ["a"]
    assert core.loras.lookup(["pastel"]).found["pastel"].nodes == ("n2",)


def test_what_the_last_store_that_could_get_it_takes_along_is_lost(
    core: DispatchCore, one: FakeStore
) -> None:
    FakeStore(core, "other", "n2")
    core.offer([with_loras("a", "pastel")], 0.0)
    one.tell(failed("pastel", "unreachable"))
    core.unregister("other", 1.0)
    assert [one.request_id for one in core.take_outcomes()] == ["a"]


def test_a_lora_in_use_is_removed_once_that_has_ended(core: DispatchCore, one: FakeStore) -> None:
    core.offer([with_loras("a", "pastel")], 0.0)
    one.tell(ready("pastel"))
    (lease,) = core.poll(poll_of(), 0.0).leases
    status = core.loras.remove("id-pastel")
    assert status is not None
    assert status.state == "removing"
    assert not core.loras.lookup(["pastel"]).found
    assert core.loras.take_gone() == []
    # its name may be given again
    again = core.loras.add(lora("pastel", lora_id="id-2", source="builtin:other"))
    assert again.refused is None
    core.report("r", [finished(lease)], 1.0)
    assert core.loras.take_gone() == ["id-pastel"]
    assert core.loras.remove("id-outline") is not None
    assert core.loras.take_gone() == ["id-outline"]
    assert core.loras.remove("id-outline") is None
    # the next of the name stays
    assert core.loras.id_of("pastel") == "id-2"


def test_what_was_removed_meanwhile_is_not_made_without_it(core: DispatchCore) -> None:
    core.loras.remove("id-pastel")
    assert core.offer([with_loras("a", "pastel")], 0.0).accepted
    (outcome,) = core.take_outcomes()
    assert isinstance(outcome, Failure)
    assert (outcome.kind, outcome.param) == ("invalid", "loras")


def test_admission_counts_what_fetching_takes(core: DispatchCore, one: FakeStore) -> None:
    core.offer([with_loras("a", "outline")], 0.0)
    one.tell(ready("outline", took_s=50.0))
    late = core.offer([with_loras("b", "pastel", slo_s=10.0, when_late="refuse")], 0.0)
    assert (late.accepted, late.reason) == (False, "too_late")
    assert core.offer([with_loras("c", "outline", slo_s=10.0, when_late="refuse")], 0.0).accepted
    offer = core.offer([with_loras("d", "pastel", slo_s=60.0, when_late="refuse")], 0.0)
    assert offer.accepted
    assert offer.predicted_s > 15.0


def test_what_is_held_back_takes_its_clients_share_and_can_be_aborted() -> None:
    core = bare_core(max_queued_images=2)
    core.register(store_registration("s", "n"), 0.0)
    assert core.offer([with_loras("a", "pastel"), with_loras("b", "pastel")], 0.0).accepted
    assert core.offer([with_loras("c", "pastel")], 0.0).reason == "held_back_full"
    # another client finds its share of it, and the queue is as it was
    assert core.offer([with_loras("d", "pastel")], 0.0, client="other").accepted
    core.abort(["d"])
    assert core.offer([image_request("e")], 0.0).accepted
    core.abort(["e"])
    snapshot = core.snapshot(1.0)
    assert (snapshot.num_waiting, snapshot.num_waiting_by_model) == (2, {"m": 2})
    assert (snapshot.num_held_back, snapshot.num_loras) == (2, 2)
    assert [one.replica_id for one in snapshot.replicas] == ["r"]
    core.abort(["a"])
    assert core.offer([with_loras("c", "pastel")], 0.0).accepted


def test_one_lora_after_another_fills_no_more_than_a_share_of_the_queue() -> None:
    core = bare_core(max_queued_images=4)
    for number in range(8):
        core.loras.add(lora(f"l{number}"))
    store = FakeStore(core, "s", "n")
    for number in range(8):
        names = [f"{number}-{each}" for each in range(4)]
        for name in names:
            core.offer([with_loras(name, f"l{number}")], 0.0, client="a")
        store.tell(*(ready(f"l{each}") for each in range(number + 1)))
    assert core.num_waiting <= 8
    assert core.offer([image_request("b")], 0.0, client="b").accepted


def test_stores_and_replicas_hear_at_once() -> None:
    async def main() -> None:
        service = await make_service("r")
        service.loras.add(lora("pastel"))
        await service.register(store_registration("s", "n"))
        begun = await service.poll(Poll("s", 1, 0, lora_mark=Mark()))
        assert begun == PollReply(known=True, loras=LoraOrders(Mark(1, 0), 0))
        orders = await held(service.poll(Poll("s", 1, 0, lora_mark=Mark(1, 0))))
        leases = await held(service.poll(poll_of()))
        await asyncio.sleep(0.5)
        await service.offer([with_loras("a", "pastel")])
        said = (await orders).loras
        assert said is not None
        assert [one.lora.name for one in said.orders] == ["pastel"]
        assert now() == pytest.approx(0.5)
        await asyncio.sleep(0.1)
        news = LoraReports(Mark(1, 0), 1, (ready("pastel"),))
        told = await service.poll(Poll("s", 1, 0, loras=news, lora_mark=Mark(1, said.upto)))
        assert told.lora_mark == Mark(1, 1)
        assert [one.request.request_id for one in (await leases).leases] == ["a"]
        assert now() == pytest.approx(0.6)
        await service.close()

    run_virtually(main())
