"""A ControlNet's worker as the dispatcher sees it: it registers an endpoint, and leases nothing.

Replicas of models find the endpoint in the directory of peers, and call it step by step.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace

from ray_cluster.config.sections.cell_wide import DispatchConfig
from ray_cluster.errors import DispatcherUnavailable
from ray_cluster.observability.metrics_snapshot import Snapshot
from ray_cluster.protocol.dispatcher import DispatcherLink
from ray_cluster.protocol.leases import Endpoint, Poll, PollReply, Registration
from ray_cluster.protocol.settings import Capacity, WorkerSettings
from ray_cluster.replica.controlnet.server import ControlNetServer
from ray_cluster.replica.poller import LeasePoller, check_running
from ray_cluster.transport.connecting import listen


class ControlNetAgent:
    """Serves one ControlNet to the replicas of its bases, and tells the dispatcher that it does.

    Args:
        registration: sent to each dispatcher, with the endpoint once there is one.
        server: of the loaded ControlNet; :meth:`start` starts it.
        link: the dispatcher.
        max_silence_s: longest batch that still counts as alive.
        settings: those of the registration; later ones come with replies to polls.
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
        self._link = link
        self._max_silence_s = max_silence_s
        self._capacity = Capacity(registration.max_in_flight, registration.max_batch)
        self._settings_version = "" if settings is None else settings.version
        self._server = server
        self._listener = listen(registration.node, server.accept)
        endpoint = Endpoint(self._listener.target, self._listener.secret)
        self._replica_id = registration.replica_id
        self._polls = LeasePoller(
            link,
            replace(registration, endpoint=endpoint),
            make_poll=self._poll,
            on_reply=self._on_reply,
            poll_s=DispatchConfig().poll_s if settings is None else settings.poll_s,
        )
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Start to compute, and to poll on the running loop."""
        self._server.start()
        self._tasks = [
            asyncio.create_task(self._polls.poll_forever(), name="the polling task"),
        ]

    def metrics(self) -> Snapshot:
        """Return what it has measured so far."""
        return self._server.metrics()

    def check_alive(self) -> None:
        """Raise RuntimeError when a task or thread has died, or a batch hangs."""
        check_running(self._tasks)
        self._server.check_alive(self._max_silence_s)

    async def drain(self) -> None:
        """Stop; what is outstanding is asked of others."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        with contextlib.suppress(DispatcherUnavailable):
            await self._link.unregister(self._replica_id)
        await asyncio.to_thread(self._listener.close)
        await asyncio.to_thread(self._server.stop)

    def _poll(self, epoch: int) -> Poll:
        return Poll(
            replica_id=self._replica_id,
            epoch=epoch,
            num_free=0,
            metrics=self._server.metrics(),
            settings_version=self._settings_version,
            capacity=self._capacity,
        )

    def _on_reply(self, reply: PollReply) -> None:
        if reply.settings is not None:
            self._capacity = Capacity(reply.settings.max_in_flight, reply.settings.max_batch)
            self._server.max_batch = reply.settings.max_batch
            self._polls.poll_s = reply.settings.poll_s
            self._settings_version = reply.settings.version
