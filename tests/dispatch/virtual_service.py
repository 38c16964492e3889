"""A dispatch service in virtual time, for the tests beside."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from ray_cluster.config.sections.cell_wide import DispatchConfig, LimitsConfig
from ray_cluster.dispatch.core import DispatchCore
from ray_cluster.dispatch.service import DispatchService
from ray_cluster.protocol.leases import Lease, PollReply
from tests.fakes import poll_of, registration

CONFIG = DispatchConfig(
    default_slo_s=30.0, poll_s=1.0, replica_timeout_s=6.0, attached_timeout_s=15.0, max_attempts=3
)
BOUND = 6


def now() -> float:
    return asyncio.get_running_loop().time()


async def make_service(*replica_ids: str) -> DispatchService:
    core = DispatchCore(config=CONFIG, limits=LimitsConfig(max_queued_images=BOUND), epoch=1)
    service = DispatchService(core, config=CONFIG, clock=now)
    for replica_id in replica_ids:
        assert await service.register(registration(replica_id)) == 1
    return service


async def held(call: Coroutine[Any, Any, PollReply]) -> asyncio.Task[PollReply]:
    """Start a poll and let it get as far as it can without time passing."""
    task = asyncio.create_task(call)
    for _ in range(3):
        await asyncio.sleep(0)
    return task


async def lease_one(service: DispatchService, replica_id: str = "r") -> Lease:
    (lease,) = (await service.poll(poll_of(replica_id))).leases
    return lease
