"""A store of LoRAs as the dispatcher sees it: it registers, hears what it is to have, and reports.

Knows the lease protocol and one folder; knows nothing of Ray or HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from ray_cluster.config.sections import DispatchSettings
from ray_cluster.errors import DispatcherUnavailable
from ray_cluster.observability.metrics_snapshot import Snapshot
from ray_cluster.policies.types import StepCost
from ray_cluster.protocol.dispatcher import DispatcherLink
from ray_cluster.protocol.leases import Poll, PollReply, Registration
from ray_cluster.protocol.loras import LoraOrder, LoraReport
from ray_cluster.replica.lora_folder import LoraFolder, LoraUnavailable
from ray_cluster.replica.lora_metrics import LoraMetrics
from ray_cluster.replica.poller import LeasePoller, check_running

logger = logging.getLogger(__name__)

# a source that hangs takes one of these places
_AT_ONCE = 8


class LoraStoreAgent:
    """Keeps the LoRAs that the dispatcher orders in the folder of its node.

    Args:
        registration: sent to each dispatcher; of kind ``lora``.
        link: the dispatcher.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        registration: Registration,
        folder: LoraFolder,
        *,
        link: DispatcherLink,
        clock: Callable[[], float],
    ) -> None:
        self._registration = registration
        self._folder = folder
        self._link = link
        self._clock = clock
        self._metrics = LoraMetrics(registration.node)
        self._orders: dict[str, LoraOrder] = {}
        self._reports: dict[str, LoraReport] = {}
        self._polls = LeasePoller(
            link,
            registration,
            make_poll=self._poll,
            on_reply=self._on_reply,
            poll_s=DispatchSettings().poll_s,
        )
        # of the reports, and what each dispatcher was told of them
        self._version = 0
        self._told: tuple[int, int] = (0, -1)
        self._has_news = asyncio.Event()
        self._places = asyncio.Semaphore(_AT_ONCE)
        self._fetching: dict[str, asyncio.Task[None]] = {}
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin to poll on the running loop, with what is in the folder already."""
        self._folder.prepare()
        self._folder.warm_up()
        for lora_id, facts in self._folder.facts().items():
            self._reports[lora_id] = LoraReport(lora_id, "ready", facts)
        self._tasks = [
            asyncio.create_task(self._polls.poll_forever(), name="the polling task"),
            asyncio.create_task(self._tell_forever(), name="the reporting task"),
        ]

    def metrics(self) -> Snapshot:
        """Return what it has measured so far."""
        return self._metrics.snapshot(self._folder.num_bytes)

    def check_alive(self) -> None:
        """Raise RuntimeError when a task has died."""
        check_running(self._tasks)

    async def drain(self) -> None:
        """Stop; what is fetched just now is given up."""
        tasks = [*self._tasks, *self._fetching.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        with contextlib.suppress(DispatcherUnavailable):
            await self._link.unregister(self._registration.replica_id)
        await asyncio.to_thread(self._folder.close)

    def _poll(self, epoch: int) -> Poll:
        is_known = self._told == (epoch, self._version)
        self._told = (epoch, self._version)
        return Poll(
            replica_id=self._registration.replica_id,
            epoch=epoch,
            num_free=0,
            metrics=self.metrics(),
            loras=None if is_known else tuple(self._reports.values()),
        )

    async def _tell_forever(self) -> None:
        """Report news at once: a second poll ends the one that is held."""
        while True:
            await self._has_news.wait()
            self._has_news.clear()
            epoch = self._polls.epoch
            if epoch is None:
                continue
            try:
                reply = await self._link.poll(self._poll(epoch), 0.0)
            except DispatcherUnavailable:
                # whether it was heard is not known
                self._told = (0, -1)
                continue
            if reply.known:
                self._on_reply(reply)

    def _on_reply(self, reply: PollReply) -> None:
        if reply.settings is not None:
            self._polls.poll_s = reply.settings.poll_s
        if reply.loras is None:
            return
        orders = {order.lora.lora_id: order for order in reply.loras}
        if orders == self._orders:
            # said again: the last report was not heard
            self._told = (0, -1)
            self._has_news.set()
        self._orders = orders
        for lora_id, order in self._orders.items():
            report = self._reports.get(lora_id)
            is_done = report is not None and (
                report.state == "ready" or report.attempt >= order.attempt
            )
            if lora_id not in self._fetching and not is_done:
                self._report(LoraReport(lora_id, "fetching", attempt=order.attempt))
                task = asyncio.create_task(self._fetch(order), name=f"LoRA {order.lora.name}")
                self._fetching[lora_id] = task

    async def _fetch(self, order: LoraOrder) -> None:
        lora_id, began_s = order.lora.lora_id, self._clock()
        try:
            async with self._places:
                facts = await self._folder.ensure(order)
        except LoraUnavailable as error:
            logger.warning("LoRA %s is not to be had: %s", order.lora.name, error)
            self._metrics.ended(error.failure, self._clock() - began_s)
            report = LoraReport(
                lora_id,
                "failed",
                failure=error.failure,
                reason=error.reason,
                attempt=order.attempt,
            )
        else:
            took_s = self._clock() - began_s
            self._metrics.ended("ready", took_s)
            report = LoraReport(lora_id, "ready", facts, attempt=order.attempt, took_s=took_s)
        finally:
            del self._fetching[lora_id]
        await self._make_room()
        self._report(report)

    async def _make_room(self) -> None:
        gone = await asyncio.to_thread(self._folder.evict, set(self._orders))
        self._metrics.evicted(len(gone))
        for lora_id in gone:
            self._reports.pop(lora_id, None)

    def _report(self, report: LoraReport) -> None:
        self._reports[report.lora_id] = report
        self._version += 1
        self._has_news.set()


def store_registration(replica_id: str, node: str) -> Registration:
    """Return how a store registers: it makes no images, and they cost it nothing."""
    return Registration(
        replica_id=replica_id,
        profile=None,
        max_in_flight=0,
        max_batch=1,
        step_cost=StepCost(0.0, 0.0),
        kind="lora",
        node=node,
    )
