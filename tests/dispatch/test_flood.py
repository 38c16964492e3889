"""Two gateways flood two unreliable replicas: the queue stays bounded, every image is made."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from ray_cluster.config.sections.cell_wide import DispatchConfig, LimitsConfig
from ray_cluster.dispatch.core import DispatchCore
from ray_cluster.dispatch.service import DispatchService
from ray_cluster.protocol.leases import Lease, Poll, PollReply
from ray_cluster.protocol.outcomes import Completed, Outcome
from tests.fakes import finished, image_request, registration, run_virtually

# a reply that gets lost costs an attempt, and many do here
CONFIG = DispatchConfig(
    poll_s=1.0, replica_timeout_s=6.0, attached_timeout_s=15.0, max_attempts=1000
)
BOUND = 6


async def replica_life(service: DispatchService, replica_id: str, step_s: float) -> None:
    """A replica that works off its leases one step at a time, and now and then drops a poll."""
    held_leases: dict[str, Lease] = {}
    num_polls = 0
    while True:
        poll = Poll(replica_id, 1, 4 - len(held_leases), dict.fromkeys(held_leases, 0))
        num_polls += 1
        try:
            async with asyncio.timeout(step_s if num_polls % 3 == 0 or held_leases else None):
                reply = await service.poll(poll)
        except TimeoutError:
            reply = PollReply(known=True)
        if num_polls % 5 == 0:
            reply = PollReply(known=True, aborts=reply.aborts)
        for request_id in reply.aborts:
            held_leases.pop(request_id, None)
        held_leases.update({lease.request.request_id: lease for lease in reply.leases})
        if held_leases:
            await asyncio.sleep(step_s)
            done = [held_leases[request_id] for request_id in sorted(held_leases)[:2]]
            await service.report(replica_id, [finished(lease) for lease in done])
            for lease in done:
                del held_leases[lease.request.request_id]


async def flood(
    service: DispatchService, name: str, sizes: list[int], pause_s: float
) -> dict[str, Outcome]:
    """A gateway that offers groups until all are accepted, and waits for every image."""
    outcomes: dict[str, Outcome] = {}
    waiters: list[asyncio.Task[None]] = []

    async def collect(ids: set[str]) -> None:
        while ids:
            found = await service.wait(ids, 2.0)
            assert outcomes.keys().isdisjoint(found)
            outcomes.update(found)
            ids -= found.keys()

    for index, size in enumerate(sizes):
        group = [image_request(f"{name}{index}-{one}") for one in range(size)]
        while not (offer := await service.offer(group)).accepted:
            assert offer.reason == "queue_full"
            await asyncio.sleep(max(pause_s, offer.retry_after_s))
        assert (await service.snapshot()).num_waiting <= BOUND
        waiters.append(asyncio.create_task(collect({one.request_id for one in group})))
        await asyncio.sleep(0)
    await asyncio.gather(*waiters)
    return outcomes


floods = st.lists(st.integers(1, 4), min_size=1, max_size=12)


@given(floods, floods, st.sampled_from([0.01, 0.3]), st.sampled_from([0.05, 0.7]))
def test_two_flooding_gateways_stay_within_the_bound_and_get_every_image(
    one: list[int], other: list[int], pause_s: float, step_s: float
) -> None:
    async def main() -> None:
        core = DispatchCore(config=CONFIG, limits=LimitsConfig(max_queued_images=BOUND), epoch=1)
        service = DispatchService(core, config=CONFIG, clock=asyncio.get_running_loop().time)
        for replica_id in ("r", "s"):
            await service.register(registration(replica_id))
        lives = [asyncio.create_task(replica_life(service, name, step_s)) for name in ("r", "s")]
        found = await asyncio.gather(
            flood(service, "a", one, pause_s), flood(service, "b", other, pause_s)
        )
        ended = {**found[0], **found[1]}
        assert len(ended) == sum(one) + sum(other)
        assert all(isinstance(outcome, Completed) for outcome in ended.values())
        for life in lives:
            life.cancel()
        await asyncio.gather(*lives, return_exceptions=True)
        snapshot = await service.snapshot()
        assert (snapshot.num_waiting, snapshot.num_leased) == (0, 0)
        assert service.is_healthy
        await service.close()

    run_virtually(main())
