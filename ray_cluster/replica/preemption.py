"""How a replica hands single leases back while it goes on with the others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from ray_cluster.engine.runner import EngineRunner
from ray_cluster.protocol.leases import Lease
from ray_cluster.replica.state_transfer import StateTransfer
from ray_cluster.requests import ImageRequest


class Preemptions:
    """Takes requests out of the engine at a step boundary, and leaves their states for others.

    Args:
        holds: whether the replica still has the lease of that very request.
        hand_back: called with a lease and the steps of its state in the store, once it is there.
    """

    def __init__(
        self,
        runner: EngineRunner,
        states: StateTransfer,
        *,
        holds: Callable[[ImageRequest], bool],
        hand_back: Callable[[Lease, int], None],
    ) -> None:
        self._runner = runner
        self._states = states
        self._holds = holds
        self._hand_back = hand_back
        self._steps_done: dict[str, int] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    @property
    def tasks(self) -> set[asyncio.Task[None]]:
        """Those under way."""
        return set(self._tasks.values())

    @property
    def steps_done_by_id(self) -> Mapping[str, int]:
        """Denoising steps done of what the engine has no more."""
        return self._steps_done

    def begin(self, lease: Lease) -> None:
        """Hand a lease back, unless its image is as good as made: then it stays.

        Who is asked again meanwhile need not do it twice.
        """
        request_id = lease.request.request_id
        if request_id not in self._tasks:
            self._tasks[request_id] = task = asyncio.create_task(self._run(lease))
            task.add_done_callback(lambda _: self._tasks.pop(request_id))

    async def _run(self, lease: Lease) -> None:
        request, steps_kept = lease.request, {}
        exported = await asyncio.wrap_future(self._runner.export(request.request_id))
        if exported is None:
            return
        if exported.state is not None:
            self._steps_done[request.request_id] = exported.state.step_index
            try:
                steps_kept = await self._states.keep_all(
                    [exported.state], lambda _: self._holds(request)
                )
            finally:
                self._steps_done.pop(request.request_id, None)
        if self._holds(request):
            self._hand_back(lease, steps_kept.get(request.request_id, 0))
