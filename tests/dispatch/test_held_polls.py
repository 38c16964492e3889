"""Who is asked when there is a lease to give: one after the other, never everybody."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from ray_cluster.config.sections.cell_wide import LimitsConfig
from ray_cluster.dispatch.core import DispatchCore
from ray_cluster.dispatch.service import DispatchService
from ray_cluster.policies.types import StepCost
from ray_cluster.protocol.leases import PollReply, Registration
from tests.dispatch.virtual_service import CONFIG, held, make_service, now
from tests.fakes import image_request, model_profile, poll_of, registration, run_virtually


class CountingCore(DispatchCore):
    """Counts how often a held poll looks for something to take."""

    looks = 0

    def answer(self, replica_id: str, now_s: float) -> PollReply:
        self.looks += 1
        return super().answer(replica_id, now_s)


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def counting_service(num_replicas: int) -> tuple[DispatchService, CountingCore]:
    core = CountingCore(config=CONFIG, limits=LimitsConfig(), epoch=1)
    service = DispatchService(core, config=CONFIG, clock=now)
    for number in range(num_replicas):
        await service.register(registration(f"r{number}"))
    return service, core


def leased(polls: Sequence[asyncio.Task[PollReply]]) -> list[str]:
    done = [poll.result() for poll in polls if poll.done()]
    return sorted(lease.request.request_id for reply in done for lease in reply.leases)


def test_a_request_costs_no_more_looks_with_many_idle_replicas() -> None:
    async def main() -> None:
        service, core = await counting_service(50)
        polls = [await held(service.poll(poll_of(f"r{number}"))) for number in range(50)]
        core.looks = 0
        for number in range(20):
            assert (await service.offer([image_request(f"a{number}")])).accepted
            await settle()
        assert leased(polls) == sorted(f"a{number}" for number in range(20))
        assert core.looks == 20
        await service.close()

    run_virtually(main())


def test_busy_replicas_with_room_are_not_asked_before_idle_ones() -> None:
    async def main() -> None:
        service, core = await counting_service(20)
        polls = [await held(service.poll(poll_of(f"r{number}"))) for number in range(20)]
        for number in range(19):
            assert (await service.offer([image_request(f"a{number}")])).accepted
            await settle()
        # those that took something have room for more, and poll again
        busy = [number for number in range(20) if polls[number].done()]
        again = [
            await held(service.poll(poll_of(f"r{number}", 3, {f"a{number}": 1}))) for number in busy
        ]
        core.looks = 0
        assert (await service.offer([image_request("last")])).accepted
        await settle()
        (idle,) = set(range(20)) - set(busy)
        assert leased([polls[idle]]) == ["last"]
        assert leased(again) == []
        assert core.looks == 1
        await service.close()

    run_virtually(main())


def test_a_request_costs_no_look_while_all_replicas_are_full() -> None:
    async def main() -> None:
        service, core = await counting_service(50)
        polls = [
            await held(service.poll(poll_of(f"r{number}", num_free=0))) for number in range(50)
        ]
        core.looks = 0
        await service.offer([image_request("a")])
        await settle()
        assert (leased(polls), core.looks) == ([], 0)
        await service.close()

    run_virtually(main())


def test_a_burst_is_spread_over_the_replicas_at_once() -> None:
    async def main() -> None:
        service = await make_service("r1", "r2", "r3")
        polls = [await held(service.poll(poll_of(one))) for one in ("r1", "r2", "r3")]
        await service.offer([image_request(f"a{number}") for number in range(6)])
        await settle()
        assert now() == 0.0
        assert [len(poll.result().leases) for poll in polls] == [2, 2, 2]
        await service.close()

    run_virtually(main())


def test_who_declines_hands_the_question_on() -> None:
    async def main() -> None:
        service = await make_service()
        # the slow one has had room for longest, and so is asked first
        for name, step_s in (("slow", 1.0), ("fast", 0.01)):
            cost = StepCost(step_s, step_s)
            await service.register(Registration(name, model_profile("m"), 4, 2, cost))
        slow = await held(service.poll(poll_of("slow")))
        fast = await held(service.poll(poll_of("fast")))
        await service.offer([image_request("a")])
        await settle()
        assert now() == 0.0
        assert not slow.done()
        assert [lease.request.request_id for lease in fast.result().leases] == ["a"]
        await service.close()
        await slow

    run_virtually(main())


def test_who_leaves_when_asked_hands_the_question_on() -> None:
    async def main() -> None:
        service = await make_service("gone", "there")
        gone = await held(service.poll(poll_of("gone")))
        there = await held(service.poll(poll_of("there")))
        await service.offer([image_request("a")])
        # before its poll has had a turn
        gone.cancel()
        await settle()
        assert now() == 0.0
        assert [lease.request.request_id for lease in there.result().leases] == ["a"]
        await service.close()

    run_virtually(main())


def test_who_is_let_go_when_asked_hands_the_question_on() -> None:
    async def main() -> None:
        service = await make_service("gone", "there")
        gone = await held(service.poll(poll_of("gone")))
        there = await held(service.poll(poll_of("there")))
        await service.offer([image_request("a")])
        # a report ends the held poll in the same turn
        await service.report("gone", [])
        await settle()
        assert now() == 0.0
        assert gone.result().leases == ()
        assert [lease.request.request_id for lease in there.result().leases] == ["a"]
        await service.close()

    run_virtually(main())
