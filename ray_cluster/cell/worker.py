"""A worker as the dispatcher sees it: it registers, polls, applies settings, reports, and drains.

What it does with leases, orders or calls is its skill's, a class in a folder of `replica/`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

from ray_cluster.config.sections.cell_wide import DispatchConfig
from ray_cluster.errors import DispatcherUnavailable
from ray_cluster.observability.metrics_snapshot import Snapshot
from ray_cluster.protocol.dispatcher import DispatcherLink
from ray_cluster.protocol.leases import Poll, PollReply
from ray_cluster.protocol.settings import WorkerSettings
from ray_cluster.replica.retries import answered
from ray_cluster.replica.skill import Skill

logger = logging.getLogger(__name__)


async def first_settings(link: DispatcherLink, name: str) -> WorkerSettings | None:
    """Return what a worker of an application starts with, as soon as a dispatcher answers."""
    return await answered(lambda: link.pool_settings(name))


class Worker:
    """The shell of every kind of worker, around a skill that is not started yet.

    Everything runs on one event loop, and nothing computes there.
    """

    def __init__(self, skill: Skill) -> None:
        self.skill = skill
        self._link = skill.link
        self._replica_id = skill.registration.replica_id
        settings = skill.settings
        self._settings_version = "" if settings is None else settings.version
        self._poll_s = DispatchConfig().poll_s if settings is None else settings.poll_s
        # of the dispatcher that it has registered with
        self._epoch: int | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._leaving: asyncio.Task[None] | None = None
        self._death: str | None = None

    def start(self) -> None:
        """Start the skill, and begin to poll and to report on the running loop."""
        tasks = self.skill.start(self)
        self._tasks = [
            asyncio.create_task(self._poll_forever(), name="the polling task"),
            asyncio.create_task(self.skill.leases.report_forever(), name="the reporting task"),
            *tasks,
        ]

    def metrics(self) -> Snapshot:
        """Return what it has measured so far."""
        return self.skill.metrics()

    def check_alive(self) -> None:
        """Raise RuntimeError when a thread or a task has died, or a piece of work hangs."""
        if self._death is not None:
            raise RuntimeError(self._death)
        self.skill.check_alive()
        for task in self._tasks:
            if task.done() and not task.cancelled():
                raise RuntimeError(f"{task.get_name()} has died: {task.exception()}")

    async def drain(self) -> None:
        """Return all leases, unregister, and stop; calls after the first one wait for its end."""
        if self._leaving is None:
            self._leaving = asyncio.create_task(self._leave())
        await self._leaving

    def give_up(self, death: object) -> None:
        """Stop for good: without what has died, the worker would only hold leases up.

        The dispatcher counts them as lost, as one of them may be the cause: a request that ends
        every worker is thus tried a bounded number of times.
        """
        if self._leaving is None:
            logger.error("%s; this replica gives up its leases", death)
            self._death = str(death)
            self._leaving = asyncio.create_task(self._leave())

    async def _leave(self) -> None:
        if self._death is None:
            await self.skill.release(self._end_tasks)
        else:
            await self._end_tasks()
        self.skill.leases.clear()
        with contextlib.suppress(DispatcherUnavailable):
            await self.skill.leases.report()
            # whoever is leased the requests now is alone with them
            await self.skill.stop_writing()
            await self._link.unregister(self._replica_id)
            # asks for nothing: it carries the last metrics, and is answered at once
            await self._link.poll(self._poll(epoch=0), 0.0)
        await self.skill.close()

    async def _end_tasks(self) -> None:
        for task in self._tasks:
            task.cancel()
        await self.skill.end_tasks()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def poll_now(self) -> PollReply:
        """Poll at once, which ends the poll that is held; return the reply, applied already."""
        reply = PollReply(known=False)
        if self._epoch is not None:
            # what is lost comes again with the next poll
            with contextlib.suppress(DispatcherUnavailable):
                reply = await self._link.poll(self._poll(self._epoch), 0.0)
        if reply.known:
            self._on_reply(reply)
        return reply

    async def _poll_forever(self) -> None:
        while True:
            epoch = await answered(lambda: self._link.register(self.skill.registration))
            self.skill.on_registered()
            self._epoch = epoch
            await self._poll_while_known(epoch)
            logger.warning("the dispatcher does not know this replica; registering again")

    async def _poll_while_known(self, epoch: int) -> None:
        while True:
            reply = await answered(lambda: self._link.poll(self._poll(epoch), self._poll_s))
            if not reply.known:
                return
            self._on_reply(reply)

    def _poll(self, epoch: int) -> Poll:
        capacity, leases = self.skill.capacity, self.skill.leases
        num_free = 0 if self._leaving else max(0, capacity.max_in_flight - len(leases))
        poll = Poll(
            self._replica_id,
            epoch,
            num_free,
            metrics=self.metrics(),
            settings_version=self._settings_version,
            capacity=capacity,
        )
        return self.skill.poll(poll)

    def _on_reply(self, reply: PollReply) -> None:
        skill = self.skill
        skill.on_reply(reply)
        if self._leaving is not None:
            # a poll that goes on naming what has ended is answered at once, for ever
            for request_id in reply.aborts:
                skill.leases.drop(request_id)
            for lease in reply.leases:
                skill.leases.add(lease)
            return
        if reply.settings is not None:
            self._apply(reply.settings)
        for request_id in reply.aborts:
            skill.abort(request_id, is_ended=request_id not in reply.moved)
        skill.leases.adopt(reply.adopted)
        for request_id in reply.preempted:
            skill.preempt(request_id)
        for lease in reply.leases:
            skill.take(lease)

    def _apply(self, settings: WorkerSettings) -> None:
        self.skill.apply(settings)
        self._poll_s = settings.poll_s
        self._settings_version = settings.version
        logger.info("settings %s are applied: %s", settings.version, self.skill.capacity)
