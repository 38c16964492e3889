"""How a replica returns single leases while it goes on with the others."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from ray_cluster.engine.step.state import RequestState
from ray_cluster.errors import InvalidRequest, RequestFailed
from ray_cluster.protocol.leases import Lease
from ray_cluster.replica.denoise.endings import Endings
from ray_cluster.replica.denoise.runs import Runs
from ray_cluster.replica.states.transfer import StateTransfer
from ray_cluster.replica.unexpected import failing_alone


class Preemptions:
    """Takes requests out of the engine at a step boundary, and stores their states for others.

    Their leases are returned once these are there.
    """

    def __init__(self, runner: Runs, states: StateTransfer, endings: Endings) -> None:
        self._runner = runner
        self._states = states
        self._endings = endings
        self._steps_done: dict[str, int] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    @property
    def tasks(self) -> set[asyncio.Task[None]]:
        """The preemptions under way."""
        return set(self._tasks.values())

    @property
    def steps_done_by_id(self) -> Mapping[str, int]:
        """Denoising steps of requests that have left the engine and are not stored yet."""
        return self._steps_done

    def begin(self, lease: Lease) -> None:
        """Preempt a request, unless that has begun or its image is about to be decoded."""
        request_id = lease.request.request_id
        if request_id not in self._tasks:
            self._tasks[request_id] = task = asyncio.create_task(self._run(lease))
            task.add_done_callback(lambda _: self._tasks.pop(request_id))

    async def _run(self, lease: Lease) -> None:
        request, steps_stored = lease.request, 0
        try:
            with failing_alone(request):
                exported = await asyncio.wrap_future(self._runner.export(request.request_id))
                if exported is None:
                    return
                if exported.state is not None:
                    steps_stored = await self._stored(exported.state)
        except (RequestFailed, InvalidRequest):
            # its steps are lost: it begins anew elsewhere
            self._runner.abort(request.request_id)
        if self._endings.leases.holds(request):
            self._endings.give_back(lease, steps_stored)

    async def _stored(self, state: RequestState) -> int:
        """Store a state; return its steps once they are in the store."""
        request = state.request
        self._steps_done[request.request_id] = state.step_index
        try:
            holds = self._endings.leases.holds
            stored = await self._states.keep_all([state], lambda _: holds(request))
        finally:
            self._steps_done.pop(request.request_id, None)
        return stored.get(request.request_id, 0)
