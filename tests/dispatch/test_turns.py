"""What concerns many requests at once is done in parts, between which others have their turn."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from ray_cluster.config.sections.cell_wide import DispatchConfig, LimitsConfig
from ray_cluster.dispatch.core import DispatchCore
from ray_cluster.dispatch.service import DispatchService
from ray_cluster.protocol.leases import Returned
from ray_cluster.protocol.outcomes import Outcome
from ray_cluster.requests import Failure
from tests.dispatch.lora_store import FakeStore, failed, lora, ready, with_loras
from tests.dispatch.virtual_service import now
from tests.dispatch.work import MOST_LINES, lines_of
from tests.fakes import image_request, poll_of, registration, run_virtually

MANY = 300


def core_of(*models: str) -> DispatchCore:
    limits = LimitsConfig(max_queue_s=1e9, max_queued_images=2000)
    core = DispatchCore(config=DispatchConfig(), limits=limits, epoch=1, configured=models)
    for model in models:
        core.register(replace(registration(model, model), arguments='{"model": "f"}'), 0.0)
    return core


def parts(core: DispatchCore, act: Callable[[], object], now_s: float) -> Iterator[int]:
    """Do something, and what is left of it then; yield the lines of each part."""
    yield lines_of(act)[1]
    while core.is_behind:
        yield lines_of(lambda: core.catch_up(now_s))[1]


def failures(outcomes: tuple[Outcome, ...]) -> int:
    assert all(isinstance(one, Failure) for one in outcomes)
    return len(outcomes)


@pytest.mark.parametrize("is_ready", [True, False])
def test_a_lora_comes_or_fails_for_many(is_ready: bool) -> None:
    core = core_of("m")
    core.loras.add(lora("pastel"))
    store = FakeStore(core, "s", "n")
    for number in range(MANY):
        assert core.offer([with_loras(f"a{number}", "pastel")], 0.0).accepted
    assert core.num_waiting == 0
    store.poll()
    store.say(ready("pastel") if is_ready else failed("pastel", "invalid"))
    poll, ended = store.make_poll(), 0

    def hear() -> None:
        nonlocal ended
        core.poll(poll, 1.0)
        ended += failures(core.take_outcomes())

    costs = [lines_of(hear)[1]]
    while core.is_behind:
        outcomes, cost = lines_of(lambda: core.catch_up(1.0))
        ended += failures(outcomes)
        costs.append(cost)
    assert (core.num_waiting, ended) == ((MANY, 0) if is_ready else (0, MANY))
    assert max(costs) < MOST_LINES / 2
    assert len(costs) >= 6
    # nobody else's requests are looked at for another LoRA
    assert max(parts(core, lambda: core.loras.add(lora("outline")), 1.0)) < 5000


def test_calls_for_a_lost_model_end() -> None:
    core = core_of("m")
    for number in range(MANY):
        core.offer([image_request(f"a{number}")], 0.0, client=f"c{number % 7}")
    core.offer([image_request("job")], 0.0, client=None)
    core.unregister("m", 1.0)
    core.touch([f"a{number}" for number in range(MANY)], 125.0)
    outcomes, first = lines_of(lambda: core.expire(125.0))
    costs, ended = [first], failures(outcomes)
    while core.is_behind:
        outcomes, cost = lines_of(lambda: core.catch_up(125.0))
        costs.append(cost)
        ended += failures(outcomes)
    assert (ended, core.num_waiting) == (MANY, 1)
    assert max(costs) < MOST_LINES / 2


def test_many_clients_are_gone_at_once() -> None:
    core = core_of("m")
    for number in range(MANY):
        core.offer([image_request(f"a{number}")], 0.0, client=f"c{number % 7}")
    ended, costs = 0, []
    while (due_s := core.next_event_s()) is not None and due_s <= 70.0 and ended < MANY:
        outcomes, cost = lines_of(lambda: core.expire(70.0))
        ended += failures(outcomes)
        costs.append(cost)
    assert (ended, core.num_waiting) == (MANY, 0)
    assert max(costs) < MOST_LINES / 2


def test_many_age_at_once_and_in_the_order_of_their_deadlines() -> None:
    core = core_of("m")
    for number in range(MANY):
        one = image_request(f"a{number:03}", priority=-1, slo_s=1.0 + number / 1000)
        core.offer([one], 0.0, client=None)
    core.offer([image_request("young", slo_s=1e6)], 0.0, client=None)
    poll, cost = lines_of(lambda: core.poll(poll_of("m", 2), 700.0))
    assert cost < MOST_LINES / 2
    assert [one.request.request_id for one in poll.leases] == ["a000", "a001"]


def test_housekeeping_beside_many_costs_little() -> None:
    core = core_of(*"abcdefgh")
    for number in range(1000):
        model = "abcdefgh"[number % 8]
        group = [image_request(f"{number}-{one}", model) for one in range(2)]
        core.offer(group, 0.0, client=None if number % 2 else f"c{number % 5}")
    assert lines_of(lambda: (core.expire(1.0), core.next_event_s()))[1] < 3000
    # a client's sign of life is found out when its first instant comes
    core.touch([f"{number}-{one}" for number in range(1000) for one in range(2)], 30.0)
    gone_s = 30.0 + DispatchConfig().attached_timeout_s
    assert (core.next_event_s() or math.inf) < gone_s
    for now_s in (40.0, 59.9, 60.1, 70.0, gone_s - 0.1):
        assert lines_of(lambda at=now_s: core.expire(at))[1] < 5000  # type: ignore[misc]
        assert core.num_waiting > 1900


def test_a_service_does_all_of_it() -> None:
    async def main() -> None:
        core = core_of("m")
        core.loras.add(lora("pastel"))
        service = DispatchService(core, config=DispatchConfig(), clock=now)
        store = FakeStore(core, "s", "n")
        calls = [
            asyncio.create_task(service.submit([with_loras(f"a{one}", "pastel")], f"c{one}", 50.0))
            for one in range(MANY)
        ]
        await asyncio.sleep(0.1)
        store.poll()
        store.say(failed("pastel", "invalid"))
        await service.poll(store.make_poll(), 0.0)
        began_s = now()
        ended = [(await call).outcomes for call in calls]
        assert all(len(one) == 1 for one in ended)
        assert now() == began_s
        await service.close()

    run_virtually(main())


def test_an_offer_ends_nobody_elses_requests_unnoticed() -> None:
    async def main() -> None:
        core = core_of("m")
        for name in ("pastel", "outline"):
            core.loras.add(lora(name))
        service = DispatchService(core, config=DispatchConfig(), clock=now)
        store = FakeStore(core, "s", "n")
        calls = [
            asyncio.create_task(service.submit([with_loras(f"a{one}", "pastel")], "c", 50.0))
            for one in range(120)
        ]
        await asyncio.sleep(0.1)
        store.poll()
        store.say(failed("pastel", "invalid"))
        await service.poll(store.make_poll(), 0.0)
        await service.offer([with_loras("other", "outline")], "d")
        for number, call in enumerate(calls):
            (end,) = (await call).outcomes.values()
            assert isinstance(end, Failure)
            assert end.kind == "invalid", number
        await service.close()

    run_virtually(main())


def test_what_is_held_back_again_after_its_lora_has_failed_ends() -> None:
    core = core_of("m")
    core.loras.add(lora("pastel"))
    store = FakeStore(core, "s", "n")
    one = with_loras("late", "pastel")
    one = replace(one, add_ons=replace(one.add_ons, lora_start_step=5))
    assert core.offer([one], 0.0, client=None).accepted
    (lease,) = core.poll(poll_of("m", 1), 0.0).leases
    store.poll()
    store.tell(failed("pastel", "invalid"))
    core.report("m", [Returned("late", lease.fence, 5)], 1.0)
    ended = failures(core.take_outcomes())
    while core.is_behind:
        ended += failures(core.catch_up(1.0))
    assert ended == 1


def test_an_id_that_was_used_again_ends_once() -> None:
    core = core_of("m")
    for now_s in (0.0, 1.0):
        assert core.offer([image_request("a")], now_s, client="c").accepted
        if not now_s:
            core.abort(["a"])
    core.touch(["a"], 2.0)
    assert failures(core.expire(1000.0)) == 1
