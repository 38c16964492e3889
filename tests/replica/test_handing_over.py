"""Rows that go from one replica to another."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

import pytest

from ray_cluster.image_coding import ImageCoder
from ray_cluster.leases import Poll, Registration, Returned
from ray_cluster.policies.types import StepCost
from tests.engine.staged import StagedModel
from tests.replica.setup import (
    BY_ID,
    REQUESTS,
    Link,
    check_image,
    new_agent,
    new_service,
    offer,
    outcomes,
    serving,
)

# --- handing over ---


@pytest.mark.parametrize("stage", ["encode", "denoise", "decode"])
async def test_what_a_drained_replica_hands_back_another_one_finishes(
    model: StagedModel, pixels: dict[str, Any], coder: ImageCoder, stage: Any
) -> None:
    link = Link(new_service())
    one = new_agent(model, link, coder, "one")
    gate = model.gate(stage, "r4", call=3 if stage == "denoise" else 0)
    one.start()
    await offer(link.service, REQUESTS[:6])
    await asyncio.to_thread(gate.await_reached)
    draining = asyncio.create_task(one.drain())
    await asyncio.sleep(0.1)
    gate.open()
    await draining
    returned = [event for event in link.reported if isinstance(event, Returned)]
    assert returned
    state_by_id = {event.request_id: event for event in returned}
    done = {key: event.steps_done for key, event in state_by_id.items()}
    if stage == "denoise":
        assert done["r4"] >= 4
    if stage == "decode":
        assert done["r4"] == BY_ID["r4"].num_steps
    snapshot = await link.service.snapshot()
    assert snapshot.replicas == ()
    assert snapshot.num_leased == 0
    num_calls = len(model.calls)
    async with serving(model, coder, "two", link=link):
        found = await outcomes(link.service, REQUESTS[:6])
        for outcome in found.values():
            check_image(outcome, pixels)
        later = [ids for at, ids in model.calls[num_calls:] if at == "denoise"]
        # no step is taken twice; rows that came by way of bytes have no name here
        left = sum(BY_ID[key].num_steps - count for key, count in done.items())
        assert sum(map(len, later)) == left
        assert (await link.service.snapshot()).totals["completed"] == 6


async def test_replicas_that_come_and_go_leave_every_image_as_it_is(
    model: StagedModel, pixels: dict[str, Any], coder: ImageCoder
) -> None:
    """Five replicas one after the other, each taken away at a random moment."""
    chance = random.Random(5)
    link = Link(new_service())
    model.before.append(lambda *_: time.sleep(0.01))
    first = new_agent(model, link, coder, "first")
    first.start()
    await offer(link.service, REQUESTS)
    agent = first
    for life in range(5):
        await asyncio.sleep(chance.uniform(0.1, 0.6))
        await agent.drain()
        agent = new_agent(model, link, coder, f"life-{life}")
        agent.start()
    for outcome in (await outcomes(link.service, REQUESTS)).values():
        check_image(outcome, pixels)
    await agent.drain()
    assert (await link.service.snapshot()).totals["completed"] == len(REQUESTS)
    await link.service.close()


async def test_a_state_that_cannot_be_read_starts_the_request_over(
    model: StagedModel, pixels: dict[str, Any], coder: ImageCoder, caplog: pytest.LogCaptureFixture
) -> None:
    link = Link(new_service())
    await link.register(Registration("thief", model.inner.profile, 4, 4, StepCost(0.01, 0.1)))
    await offer(link.service, REQUESTS[:2])
    leases = (await link.poll(Poll("thief", 1, 4))).leases
    assert len(leases) == 2
    await link.report(
        "thief",
        [Returned(lease.request.request_id, lease.fence, b"spoilt", 2) for lease in leases],
    )
    await link.unregister("thief")
    async with serving(model, coder, "one", link=link):
        for outcome in (await outcomes(link.service, REQUESTS[:2])).values():
            check_image(outcome, pixels)
    assert caplog.text.count("starts over") == 2
