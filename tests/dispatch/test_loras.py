"""Requests with LoRAs: they wait in the dispatcher until a store has what they need."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from ray_cluster.config.sections import DispatchConfig, LimitsConfig
from ray_cluster.dispatch.core import DispatchCore
from ray_cluster.policies.types import StepCost
from ray_cluster.protocol.leases import Poll, PollReply, Registration, Returned
from ray_cluster.protocol.loras import Lora, LoraFacts, LoraOrder, LoraReport
from ray_cluster.requests import AddOns, Failure, ImageRequest, LoraUse
from tests.dispatch.virtual_service import held, make_service, now
from tests.fakes import finished, image_request, poll_of, registration, run_virtually

FACTS = LoraFacts("ab" * 32, 1_000_000, (8,), 12)
CONFIG = DispatchConfig(default_slo_s=30.0, poll_s=1.0, replica_timeout_s=6.0, max_attempts=3)


def lora(name: str, **values: object) -> Lora:
    return replace(Lora(f"id-{name}", name, "m", f"builtin:{name}"), **values)  # type: ignore[arg-type]


def with_loras(request_id: str, *names: str, **values: object) -> ImageRequest:
    uses = tuple(LoraUse(name, 1.0, f"id-{name}") for name in names)
    return replace(image_request(request_id, **values), add_ons=AddOns(loras=uses))


def store(name: str = "s", node: str = "n") -> Registration:
    return Registration(name, None, 0, 1, StepCost(0.0, 0.0), kind="lora", node=node)


def ready(name: str, took_s: float = 2.0) -> LoraReport:
    return LoraReport(f"id-{name}", "ready", FACTS, took_s=took_s)


def failed(name: str, failure: str, attempt: int = 0) -> LoraReport:
    report = LoraReport(f"id-{name}", "failed", reason="no such file", attempt=attempt)
    return replace(report, failure=failure)  # type: ignore[arg-type]


def tell(
    core: DispatchCore, *reports: LoraReport, now_s: float = 0.0, name: str = "s"
) -> PollReply:
    return core.poll(Poll(name, 1, 0, loras=reports), now_s)


def leased(core: DispatchCore, now_s: float = 0.0) -> list[str]:
    return [one.request.request_id for one in core.poll(poll_of(), now_s).leases]


def names_of(orders: tuple[LoraOrder, ...] | None) -> list[str] | None:
    return None if orders is None else [one.lora.name for one in orders]


@pytest.fixture
def core() -> DispatchCore:
    """A core with one replica, one store and two LoRAs."""
    core = bare_core()
    core.register(store(), 0.0)
    assert tell(core).loras == ()
    return core


def bare_core(max_queued_images: int = 8) -> DispatchCore:
    limits = LimitsConfig(max_queued_images=max_queued_images)
    core = DispatchCore(config=CONFIG, limits=limits, epoch=1, configured=("m",))
    core.register(replace(registration(), arguments='{"model": "folder-of-m"}'), 0.0)
    for name in ("pastel", "outline"):
        core.loras.add(lora(name))
    return core


def test_a_request_waits_for_its_lora_and_holds_no_other_up(core: DispatchCore) -> None:
    assert core.offer([with_loras("styled", "pastel")], 0.0).accepted
    assert core.offer([image_request("plain")], 0.0).accepted
    assert leased(core) == ["plain"]
    reply = tell(core, LoraReport("id-pastel", "fetching"))
    assert names_of(reply.loras) == ["pastel"]
    assert reply.loras is not None
    assert reply.loras[0].base_model == "folder-of-m"
    assert leased(core, 1.0) == []
    tell(core, ready("pastel"), now_s=2.0)
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
    core: DispatchCore,
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
    assert names_of(tell(core, LoraReport("id-pastel", "fetching")).loras) == ["pastel"]


def test_one_that_is_returned_when_its_lora_is_due_waits_for_it(core: DispatchCore) -> None:
    core.offer([late("a", 2)], 0.0)
    for steps_done, waits in ((1, False), (2, True)):
        (lease,) = core.poll(poll_of(), 1.0).leases
        core.report("r", [Returned("a", lease.fence, steps_done)], 1.0)
        assert core.loras.holds_back(lease.request, steps_done) is waits
    assert leased(core, 2.0) == []
    tell(core, ready("pastel"), now_s=3.0)
    assert leased(core, 3.0) == ["a"]


def test_one_that_begins_without_a_lora_that_is_gone_is_ended(core: DispatchCore) -> None:
    core.loras.remove("pastel")
    core.offer([late("a", 2)], 0.0)
    assert leased(core) == []
    (outcome,) = core.take_outcomes()
    assert isinstance(outcome, Failure)
    assert outcome.code == "lora_failed"


def test_all_of_several_are_waited_for(core: DispatchCore) -> None:
    core.offer([with_loras("a", "pastel", "outline")], 0.0)
    assert names_of(tell(core).loras) == ["pastel", "outline"]
    tell(core, ready("pastel"))
    assert leased(core) == []
    tell(core, ready("pastel"), ready("outline"))
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
    core.register(store(), 5.0)
    assert names_of(tell(core, now_s=5.0).loras) == ["pastel"]
    tell(core, ready("pastel"), now_s=6.0)
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
    core.offer([with_loras("a", "pastel")], 0.0)
    if way == "unregister":
        core.unregister("s", 1.0)
    else:
        core.poll(poll_of(), 5.0)
        core.expire(6.5)
    assert leased(core, 7.0) == ["a"]


def test_a_lora_that_is_not_to_be_had_ends_its_requests_alone(core: DispatchCore) -> None:
    core.offer([with_loras("a", "pastel")], 0.0)
    core.offer([with_loras("b", "outline")], 0.0)
    tell(core, failed("pastel", "invalid"), LoraReport("id-outline", "fetching"))
    (outcome,) = core.take_outcomes()
    assert isinstance(outcome, Failure)
    assert (outcome.request_id, outcome.kind, outcome.code) == ("a", "invalid", "lora_failed")
    assert "'pastel' cannot be had: no such file" in outcome.message
    status = core.loras.lookup(["pastel"]).found["pastel"]
    assert (status.state, status.is_permanent) == ("failed", True)
    tell(core, failed("pastel", "invalid"), ready("outline"))
    assert leased(core) == ["b"]


def test_a_source_that_did_not_answer_is_asked_again_for_the_next_request(
    core: DispatchCore,
) -> None:
    core.offer([with_loras("a", "pastel")], 0.0)
    assert names_of(tell(core).loras) == ["pastel"]
    tell(core, failed("pastel", "unreachable"))
    (outcome,) = core.take_outcomes()
    assert isinstance(outcome, Failure)
    assert (outcome.kind, outcome.stage) == ("error", "lora")
    core.offer([with_loras("b", "pastel")], 1.0)
    assert not core.take_outcomes()
    (order,) = tell(core, failed("pastel", "unreachable"), now_s=1.0).loras or ()
    assert order.attempt == 1
    # until the store has begun anew, it may not have heard
    assert tell(core, failed("pastel", "unreachable"), now_s=1.5).loras is None
    (again,) = tell(core, failed("pastel", "unreachable"), now_s=6.5).loras or ()
    assert again == order
    # the store says the old failure until it has begun anew
    assert not core.take_outcomes()
    tell(core, failed("pastel", "unreachable", attempt=1), now_s=2.0)
    assert [one.request_id for one in core.take_outcomes()] == ["b"]


def test_one_store_that_fails_is_not_all_of_them(core: DispatchCore) -> None:
    core.register(store("other", "n2"), 0.0)
    core.offer([with_loras("a", "pastel")], 0.0)
    tell(core, failed("pastel", "unreachable"))
    assert not core.take_outcomes()
    tell(core, ready("pastel"), name="other")
    assert leased(core) == ["a"]
    assert core.loras.lookup(["pastel"]).found["pastel"].nodes == ("n2",)


def test_a_store_hears_what_is_needed_first_and_again_if_it_has_not_heard(
    core: DispatchCore,
) -> None:
    core.loras.add(lora("kept", is_pinned=True))
    core.offer([with_loras("a", "outline")], 0.0)
    reply = tell(core)
    assert names_of(reply.loras) == ["outline", "kept"]
    assert [one.is_needed for one in reply.loras or ()] == [True, False]
    assert tell(core, now_s=1.0).loras is None
    assert names_of(tell(core, now_s=6.0).loras) == ["outline", "kept"]
    everything = (ready("outline"), LoraReport("id-kept", "fetching"))
    assert tell(core, *everything, now_s=7.0).loras is None
    assert tell(core, *everything, now_s=20.0).loras is None


def test_a_lora_in_use_is_removed_once_that_has_ended(core: DispatchCore) -> None:
    core.offer([with_loras("a", "pastel")], 0.0)
    tell(core, ready("pastel"))
    (lease,) = core.poll(poll_of(), 0.0).leases
    status = core.loras.remove("pastel")
    assert status is not None
    assert status.state == "removing"
    assert not core.loras.lookup(["pastel"]).found
    assert core.loras.take_gone() == []
    # its name may be given again
    again = core.loras.add(lora("pastel", lora_id="id-2", source="builtin:other"))
    assert again.refused is None
    core.report("r", [finished(lease)], 1.0)
    assert core.loras.take_gone() == ["id-pastel"]
    assert core.loras.remove("outline") is not None
    assert core.loras.take_gone() == ["id-outline"]
    assert core.loras.remove("outline") is None


def test_what_was_removed_meanwhile_is_not_made_without_it(core: DispatchCore) -> None:
    core.loras.remove("pastel")
    assert core.offer([with_loras("a", "pastel")], 0.0).accepted
    (outcome,) = core.take_outcomes()
    assert isinstance(outcome, Failure)
    assert (outcome.kind, outcome.param) == ("invalid", "loras")


def test_admission_counts_what_fetching_takes(core: DispatchCore) -> None:
    core.offer([with_loras("a", "outline")], 0.0)
    tell(core, ready("outline", took_s=50.0))
    late = core.offer([with_loras("b", "pastel", slo_s=10.0, when_late="refuse")], 0.0)
    assert (late.accepted, late.reason) == (False, "too_late")
    assert core.offer([with_loras("c", "outline", slo_s=10.0, when_late="refuse")], 0.0).accepted
    offer = core.offer([with_loras("d", "pastel", slo_s=60.0, when_late="refuse")], 0.0)
    assert offer.accepted
    assert offer.predicted_s > 15.0


def test_what_is_held_back_counts_and_can_be_aborted() -> None:
    core = bare_core(max_queued_images=2)
    core.register(store(), 0.0)
    assert core.offer([with_loras("a", "pastel"), with_loras("b", "pastel")], 0.0).accepted
    assert core.offer([image_request("c")], 0.0).reason == "queue_full"
    snapshot = core.snapshot(1.0)
    assert (snapshot.num_waiting, snapshot.num_waiting_by_model) == (2, {"m": 2})
    assert (snapshot.num_held_back, snapshot.num_loras) == (2, 2)
    assert [one.replica_id for one in snapshot.replicas] == ["r"]
    core.abort(["a"])
    assert core.offer([image_request("c")], 0.0).accepted


def test_ten_thousand_are_listed_by_name_and_found_by_near_ones(core: DispatchCore) -> None:
    for number in range(10_000 - 2):
        assert core.loras.add(lora(f"style-{number:05}")).refused is None
    assert core.loras.add(lora("one-more")).refused == "too_many"
    first = core.loras.page("", 3)
    assert [one.lora.name for one in first] == ["outline", "pastel", "style-00000"]
    assert len(core.loras.page("pastel", 20_000)) == 9_998
    found = core.loras.lookup(["pastle", "pastel"])
    assert list(found.found) == ["pastel"]
    assert found.near == {"pastle": ("pastel",)}


@pytest.mark.parametrize("is_old_first", [True, False])
def test_a_removed_one_is_restored_beside_the_next_of_its_name(is_old_first: bool) -> None:
    core = DispatchCore(config=CONFIG, limits=LimitsConfig(), epoch=1, configured=("m",))
    core.register(registration(), 0.0)
    # as many as there may be by now, and more
    core.loras.max_loras = 0
    rows = [(lora("pastel", lora_id="id-new"), False), (lora("pastel"), True)]
    for one, is_removed in reversed(rows) if is_old_first else rows:
        core.loras.restore(one, FACTS, is_removed=is_removed)
    assert core.loras.lookup(["pastel"]).found["pastel"].lora.lora_id == "id-new"
    core.offer([with_loras("a", "pastel")], 0.0)
    (lease,) = core.poll(poll_of(), 0.0).leases
    assert [one.lora.lora_id for one in lease.loras] == ["id-pastel"]
    core.report("r", [finished(lease)], 1.0)
    assert core.loras.take_gone() == ["id-pastel"]


def test_the_same_one_twice_is_no_error_and_another_is(core: DispatchCore) -> None:
    same = core.loras.add(lora("pastel", lora_id="new", added_s=5.0))
    assert same.refused is None
    assert same.status is not None
    assert same.status.lora.lora_id == "id-pastel"
    assert core.loras.add(lora("pastel", source="builtin:outline")).refused == "exists"


def test_stores_and_replicas_hear_at_once() -> None:
    async def main() -> None:
        service = await make_service("r")
        service.loras.add(lora("pastel"))
        await service.register(store())
        assert await service.poll(Poll("s", 1, 0, loras=())) == PollReply(known=True, loras=())
        orders = await held(service.poll(Poll("s", 1, 0, loras=())))
        leases = await held(service.poll(poll_of()))
        await asyncio.sleep(0.5)
        await service.offer([with_loras("a", "pastel")])
        assert names_of((await orders).loras) == ["pastel"]
        assert now() == pytest.approx(0.5)
        await asyncio.sleep(0.1)
        again = await held(service.poll(Poll("s", 1, 0, loras=(ready("pastel"),))))
        assert [one.request.request_id for one in (await leases).leases] == ["a"]
        assert now() == pytest.approx(0.6)
        again.cancel()
        await service.close()

    run_virtually(main())
