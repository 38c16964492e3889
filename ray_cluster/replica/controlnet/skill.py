"""What a ControlNet's worker does: it registers an endpoint, and leases nothing.

Replicas of models find the endpoint in the directory of peers, and call it step by step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from ray_cluster.observability.metrics_snapshot import Snapshot
from ray_cluster.protocol.dispatcher import DispatcherLink
from ray_cluster.protocol.leases import Endpoint, Poll, Registration
from ray_cluster.protocol.settings import WorkerSettings
from ray_cluster.replica.controlnet.server import ControlNetServer
from ray_cluster.replica.skill import Shell, Skill
from ray_cluster.transport.connecting import listen


class ControlNetSkill(Skill):
    """Serves one ControlNet to the replicas of its bases.

    Args:
        registration: still without the endpoint.
        server: of the loaded ControlNet; :meth:`start` starts it.
        max_silence_s: longest batch that still counts as alive.
    """

    def __init__(
        self,
        registration: Registration,
        server: ControlNetServer,
        *,
        link: DispatcherLink,
        max_silence_s: float = 60.0,
        settings: WorkerSettings | None = None,
    ) -> None:
        self._listener = listen(registration.node, server.accept)
        endpoint = Endpoint(self._listener.target, self._listener.secret)
        super().__init__(replace(registration, endpoint=endpoint), link, settings)
        self._server = server
        self._max_silence_s = max_silence_s

    def start(self, _shell: Shell) -> Sequence[asyncio.Task[None]]:
        """Start to compute."""
        self._server.start()
        return ()

    def metrics(self) -> Snapshot:
        """Return what it has measured so far."""
        return self._server.metrics()

    def check_alive(self) -> None:
        """Raise RuntimeError when a thread has died, or a batch hangs."""
        self._server.check_alive(self._max_silence_s)

    async def close(self) -> None:
        """Stop; what is outstanding is asked of others."""
        await asyncio.to_thread(self._listener.close)
        await asyncio.to_thread(self._server.stop)

    def poll(self, poll: Poll) -> Poll:
        """Return a poll that asks for no leases."""
        return replace(poll, num_free=0)

    def apply(self, settings: WorkerSettings) -> None:
        """Apply another size of batches."""
        super().apply(settings)
        self._server.max_batch = settings.max_batch
