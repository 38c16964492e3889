"""LoRAs of requests that take their first steps without them: fetched meanwhile."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from ray_cluster.engine.adapters.adapter_set import AdapterSet
from ray_cluster.errors import InvalidRequest, RequestFailed
from ray_cluster.process.tasks import Tasks
from ray_cluster.protocol.leases import Lease
from ray_cluster.replica.denoise.endings import Endings
from ray_cluster.replica.denoise.lora_shelf import LoraShelf
from ray_cluster.replica.denoise.runs import Runs
from ray_cluster.replica.unexpected import failing_alone
from ray_cluster.requests import ImageRequest

# between two looks whether a request already waits for its LoRAs
_LOOK_S = 0.5
# a request that waits holds a slot: no longer than this, whatever deadline its caller has chosen
_LONGEST_WAIT_S = 2.0


class LateLoras:
    """Brings requests in the engine the LoRAs that they begin without.

    Those that have waited for them for two seconds, or wait at their deadline, are given up: they
    wait in the queue, and the slot is for others.

    Args:
        on_overdue: called with the id of a request that has waited for too long.

    Attributes:
        shelf: of all LoRAs in memory.
        tasks: the requests whose LoRAs are fetched now.
    """

    def __init__(
        self,
        runner: Runs,
        shelf: LoraShelf,
        endings: Endings,
        on_overdue: Callable[[str], None],
    ) -> None:
        self._runner = runner
        self.shelf = shelf
        self._endings = endings
        self._leases = endings.leases
        self._on_overdue = on_overdue
        self.tasks = Tasks()

    def begin(self, lease: Lease, deadline_s: float) -> None:
        """Fetch the LoRAs of a request that was submitted to the runner without them."""
        self.tasks.spawn(self._bring(lease, deadline_s))

    async def _bring(self, lease: Lease, deadline_s: float) -> None:
        request = lease.request
        try:
            with failing_alone(request, "lora"):
                adapters = await self._fetched(lease, deadline_s)
                if adapters is not None and self._leases.holds(request):
                    self._runner.add_loras(request.request_id, adapters)
        except (RequestFailed, InvalidRequest) as error:
            if self._leases.holds(request):
                self._runner.abort(request.request_id)
                self._endings.fail(lease, error)

    async def _fetched(self, lease: Lease, deadline_s: float) -> AdapterSet | None:
        """Return a request's LoRAs; None if it is given up."""
        request, until_s = lease.request, math.inf
        fetching = asyncio.ensure_future(self.shelf.adapters(lease, store_first=True))
        try:
            while True:
                await asyncio.wait({fetching}, timeout=_LOOK_S)
                if fetching.done():
                    return await fetching
                if not self._leases.holds(request):
                    return None
                if not self._waits(request):
                    continue
                now_s = self._runner.clock()
                until_s = min(until_s, max(now_s, deadline_s), now_s + _LONGEST_WAIT_S)
                if now_s >= until_s:
                    self._on_overdue(request.request_id)
                    return None
        finally:
            # others that want the same go on
            fetching.cancel()

    def _waits(self, request: ImageRequest) -> bool:
        steps_done = self._runner.steps_done_by_id.get(request.request_id, 0)
        return steps_done >= request.add_ons.lora_start_step
