"""How a replica returns single leases while it goes on with the others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from ray_cluster.engine.stages.runner import EngineRunner
from ray_cluster.engine.step.state import RequestState
from ray_cluster.errors import InvalidRequest, RequestFailed
from ray_cluster.protocol.leases import Lease
from ray_cluster.replica.states.transfer import StateTransfer
from ray_cluster.replica.unexpected import failing_alone
from ray_cluster.requests import ImageRequest


class Preemptions:
    """Takes requests out of the engine at a step boundary, and stores their states for others.

    Args:
        holds: whether the replica still has the lease of that very request.
        on_stored: called with a lease and the steps of its state in the store, once it is there.
    """

    def __init__(
        self,
        runner: EngineRunner,
        states: StateTransfer,
        *,
        holds: Callable[[ImageRequest], bool],
        on_stored: Callable[[Lease, int], None],
    ) -> None:
        self._runner = runner
        self._states = states
        self._holds = holds
        self._on_stored = on_stored
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
        if self._holds(request):
            self._on_stored(lease, steps_stored)

    async def _stored(self, state: RequestState) -> int:
        """Store a state; return its steps once they are in the store."""
        request = state.request
        self._steps_done[request.request_id] = state.step_index
        try:
            stored = await self._states.keep_all([state], lambda _: self._holds(request))
        finally:
            self._steps_done.pop(request.request_id, None)
        return stored.get(request.request_id, 0)
