"""The dispatch service in virtual time: long polls, waiting clients, lost replies."""

from __future__ import annotations

import asyncio

import pytest

from ray_cluster.policies.types import StepCost
from ray_cluster.protocol.leases import Poll, PollReply, Returned
from ray_cluster.requests import Failure
from tests.dispatch.virtual_service import held, lease_one, make_service, now
from tests.fakes import VirtualLoop, finished, image_request, poll_of, run_virtually


def test_an_idle_poll_is_held_for_poll_s_and_an_unknown_one_not_at_all() -> None:
    async def main() -> None:
        service = await make_service("r")
        assert await service.poll(poll_of()) == PollReply(known=True)
        assert not (await service.poll(poll_of("nobody"))).known
        assert now() == pytest.approx(1.0)
        await service.close()

    run_virtually(main())


def test_an_offer_wakes_a_held_poll_at_once() -> None:
    async def main() -> None:
        service = await make_service("r")
        poll = await held(service.poll(poll_of()))
        await asyncio.sleep(0.5)
        await service.offer([image_request("a")])
        reply = await poll
        assert [lease.request.request_id for lease in reply.leases] == ["a"]
        assert now() == pytest.approx(0.5)
        await service.close()

    run_virtually(main())


def test_an_offer_is_shared_by_all_that_poll() -> None:
    async def main() -> None:
        service = await make_service("r", "s")
        polls = [await held(service.poll(poll_of(one))) for one in ("r", "s")]
        await service.offer([image_request(f"a{i}") for i in range(4)])
        assert [len((await poll).leases) for poll in polls] == [2, 2]
        assert now() == 0
        await service.close()

    run_virtually(main())


def test_what_a_full_peer_leaves_goes_to_a_held_poll_at_once() -> None:
    async def main() -> None:
        service = await make_service("r", "s")
        slow = StepCost(fixed_s=1.0, per_megapixel_s=10.0)
        polls = [
            await held(service.poll(Poll("r", 1, 4, step_cost=slow))),
            await held(service.poll(poll_of("s", num_free=1))),
        ]
        # the long one is for the fast replica, which has no room for the short one then
        long_one, short_one = image_request("a", num_steps=100), image_request("b", num_steps=1)
        await service.offer([long_one, short_one])
        assert [(await poll).leases[0].request for poll in polls] == [short_one, long_one]
        assert now() == 0
        await service.close()

    run_virtually(main())


def test_an_abort_wakes_the_replica_and_the_client() -> None:
    async def main() -> None:
        service = await make_service("r")
        await service.offer([image_request("a")])
        await lease_one(service)
        poll = await held(service.poll(poll_of(steps_done_by_id={"a": 1})))
        client = asyncio.create_task(service.wait(["a"], 10.0))
        await asyncio.sleep(0.1)
        await service.abort(["a"])
        assert (await poll).aborts == ("a",)
        outcome = (await client)["a"]
        assert isinstance(outcome, Failure)
        assert outcome.kind == "aborted"
        assert now() == pytest.approx(0.1)
        await service.close()

    run_virtually(main())


def test_a_cancelled_poll_takes_no_leases_with_it() -> None:
    async def main() -> None:
        service = await make_service("r")
        poll = await held(service.poll(poll_of()))
        # woken and cancelled in the same turn of the loop
        await service.offer([image_request("a")])
        poll.cancel()
        with pytest.raises(asyncio.CancelledError):
            await poll
        assert (await service.snapshot()).num_waiting == 1
        assert (await lease_one(service)).request.request_id == "a"
        await service.close()

    run_virtually(main())


def test_a_poll_that_times_out_in_the_turn_of_an_offer_takes_no_leases_with_it() -> None:
    async def main() -> None:
        service = await make_service("r")
        poll = await held(service.poll(poll_of()))
        asyncio.get_running_loop().call_at(1.0, service._core.offer, [image_request("a")], 1.0)
        asyncio.get_running_loop().call_at(1.0, service._polls.wake)
        reply = await poll
        assert len(reply.leases) + (await service.snapshot()).num_waiting == 1
        await service.close()

    run_virtually(main())


def test_a_lease_whose_reply_was_lost_is_given_again() -> None:
    async def main() -> None:
        service = await make_service("r")
        await service.offer([image_request("a")])
        lost = await lease_one(service)
        while not (reply := await service.poll(poll_of())).leases:
            assert now() < 4.0
        assert reply.leases[0].fence > lost.fence
        assert await service.report("r", [finished(lost)]) == ("a",)
        assert await service.report("r", [finished(reply.leases[0])]) == ()
        await service.close()

    run_virtually(main())


def test_a_second_poll_ends_the_first_without_leases() -> None:
    async def main() -> None:
        service = await make_service("r")
        first = await held(service.poll(poll_of()))
        # in one turn of the loop: the first has not noticed yet when there is work
        second = asyncio.create_task(service.poll(poll_of()))
        await asyncio.create_task(service.offer([image_request("a")]))
        assert [len((await poll).leases) for poll in (first, second)] == [0, 1]
        assert now() == 0
        await service.close()

    run_virtually(main())


def test_a_report_ends_the_held_poll_so_that_the_replica_can_ask_for_more() -> None:
    async def main() -> None:
        service = await make_service("r")
        await service.offer([image_request(f"a{i}") for i in range(5)])
        leases = (await service.poll(poll_of())).leases
        full = poll_of(num_free=0, steps_done_by_id={one.request.request_id: 0 for one in leases})
        poll = await held(service.poll(full))
        assert not poll.done()
        await service.report("r", [finished(leases[0])])
        assert await poll == PollReply(known=True)
        rest = {one.request.request_id: 1 for one in leases[1:]}
        assert len((await service.poll(poll_of(num_free=1, steps_done_by_id=rest))).leases) == 1
        assert now() == 0
        await service.close()

    run_virtually(main())


def test_a_returned_lease_wakes_the_others() -> None:
    async def main() -> None:
        service = await make_service("r", "s")
        await service.offer([image_request("a")])
        lease = await lease_one(service)
        poll = await held(service.poll(poll_of("s")))
        await service.report("r", [Returned("a", lease.fence, 3)])
        (again,) = (await poll).leases
        assert (lease.may_resume, again.may_resume) == (False, True)
        await service.close()

    run_virtually(main())


def test_housekeeping_gives_a_dead_replicas_request_to_a_held_poll() -> None:
    async def main() -> None:
        service = await make_service("r", "s")
        await service.offer([image_request("a")])
        await lease_one(service)
        while not (reply := await service.poll(poll_of("s"))).leases:
            assert now() < 8.0
        assert now() == pytest.approx(6.0, abs=0.1)
        assert reply.leases[0].request.request_id == "a"
        assert service.is_healthy
        await service.close()
        assert not service.is_healthy

    run_virtually(main())


def test_a_dispatcher_that_was_stopped_takes_nobody_for_dead_before_it_has_read() -> None:
    async def main() -> None:
        service = await make_service("r", "s")
        await service.offer([image_request("a")])
        lease = await lease_one(service)
        await asyncio.sleep(0.3)
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        loop.stand_still(60.0)
        # what replica and client have sent meanwhile is read some turns later
        await asyncio.sleep(0.1)
        waiting = asyncio.create_task(service.wait([lease.request.request_id], 5.0))
        alive = poll_of(steps_done_by_id={lease.request.request_id: 3}, num_free=0)
        assert (await service.poll(alive)).known
        snapshot = await service.snapshot()
        # the other one is really dead
        assert [one.replica_id for one in snapshot.replicas] == ["r"]
        assert (snapshot.num_leased, snapshot.totals.get("requeued", 0)) == (1, 0)
        assert not waiting.done()
        waiting.cancel()
        await service.close()

    run_virtually(main())


def test_models_come_with_their_profiles() -> None:
    async def main() -> None:
        service = await make_service("r")
        await service.unregister("r")
        assert (await service.models())["m"].max_px == 256
        await service.close()

    run_virtually(main())
