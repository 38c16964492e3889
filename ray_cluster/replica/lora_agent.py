"""A store of LoRAs as the dispatcher sees it: it registers, hears what it is to have, and reports.

Knows the lease protocol and one folder; knows nothing of Ray or HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Protocol

from ray_cluster.config.sections import DispatchSettings
from ray_cluster.errors import DispatcherUnavailable
from ray_cluster.models.lora_sources import origin_of
from ray_cluster.observability.metrics_snapshot import Snapshot
from ray_cluster.policies.types import StepCost
from ray_cluster.protocol.dispatcher import DispatcherLink
from ray_cluster.protocol.leases import Poll, PollReply, Registration
from ray_cluster.protocol.loras import LoraFacts, LoraOrder, LoraReport
from ray_cluster.replica.lora_folder import LoraUnavailable
from ray_cluster.replica.lora_metrics import LoraMetrics
from ray_cluster.replica.poller import LeasePoller, check_running

logger = logging.getLogger(__name__)

# fetches at once: of all sources, and of one place that may hang
_AT_ONCE, _AT_ONCE_OF_ONE = 16, 4
# of what no dispatcher was told
_NEVER = (0, -1)


class Folder(Protocol):
    """What is used of a :class:`~ray_cluster.replica.lora_folder.LoraFolder` here."""

    @property
    def num_bytes(self) -> int: ...

    def prepare(self) -> None: ...

    def warm_up(self) -> None: ...

    def path_of(self, lora_id: str) -> Path | None: ...

    def facts(self) -> dict[str, LoraFacts]: ...

    async def ensure(self, order: LoraOrder) -> LoraFacts: ...

    def evict(self, keep: Collection[str]) -> list[str]: ...

    def close(self) -> None: ...


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
        folder: Folder,
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
            on_lost=self._tell_again,
            poll_s=DispatchSettings().poll_s,
        )
        # of the reports, and what each dispatcher was told of them
        self._version = 0
        self._told: tuple[int, int] = _NEVER
        self._has_news = asyncio.Event()
        self._ordered_s: dict[str, float] = {}
        self._num_bytes = 0
        # by id, with what has to answer
        self._fetching: dict[str, tuple[str, asyncio.Task[None]]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._mistake: BaseException | None = None

    def start(self) -> None:
        """Begin to poll on the running loop, with what is in the folder already."""
        self._folder.prepare()
        self._folder.warm_up()
        for lora_id, facts in self._folder.facts().items():
            self._reports[lora_id] = LoraReport(lora_id, "ready", facts)
        self._num_bytes = self._folder.num_bytes
        self._tasks = [
            asyncio.create_task(self._polls.poll_forever(), name="the polling task"),
            asyncio.create_task(self._tell_forever(), name="the reporting task"),
        ]

    def metrics(self) -> Snapshot:
        """Return what it has measured so far."""
        return self._metrics.snapshot(self._num_bytes)

    def check_alive(self) -> None:
        """Raise RuntimeError when a task has died."""
        check_running(self._tasks)
        if self._mistake is not None:
            raise RuntimeError("fetching a LoRA has failed unexpectedly") from self._mistake

    async def drain(self) -> None:
        """Stop; what is fetched just now is given up."""
        self._orders = {}
        tasks = [*self._tasks, *(task for _, task in self._fetching.values())]
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
                self._tell_again()
                continue
            if reply.known:
                self._on_reply(reply)

    def _tell_again(self) -> None:
        """Have the next poll report everything: whether the last one was heard is not known."""
        self._told = _NEVER

    def _on_reply(self, reply: PollReply) -> None:
        if reply.settings is not None:
            self._polls.poll_s = reply.settings.poll_s
        if reply.loras is None:
            return
        self._orders = {order.lora.lora_id: order for order in reply.loras}
        self._forget_unordered()
        now_s = self._clock()
        for lora_id, order in self._orders.items():
            if self._is_done(order) and not self._is_missing(lora_id):
                continue
            report = self._reports.get(lora_id)
            if report is None or report.state != "fetching":
                # not since it was first ordered: it may have been here, or have failed, for hours
                self._ordered_s[lora_id] = now_s
            self._reports[lora_id] = LoraReport(lora_id, "fetching", attempt=order.attempt)
        self._start_fetches()
        # orders come again where a report was not heard
        self._tell_again()
        self._note_news()

    def _forget_unordered(self) -> None:
        for lora_id, report in list(self._reports.items()):
            is_kept = lora_id in self._orders or lora_id in self._fetching
            if report.state != "ready" and not is_kept:
                del self._reports[lora_id]
        self._ordered_s = {one: at for one, at in self._ordered_s.items() if one in self._orders}

    def _is_done(self, order: LoraOrder) -> bool:
        report = self._reports.get(order.lora.lora_id)
        if report is None or report.state == "fetching":
            return False
        return report.state == "ready" or report.attempt >= order.attempt

    def _is_missing(self, lora_id: str) -> bool:
        """Whether it was here and somebody has deleted it; notes a use of it if not."""
        return self._reports[lora_id].state == "ready" and self._folder.path_of(lora_id) is None

    def _start_fetches(self) -> None:
        """Begin with the first orders, those that requests wait for."""
        num_by_origin = Counter(origin for origin, _ in self._fetching.values())
        for lora_id, order in self._orders.items():
            if len(self._fetching) >= _AT_ONCE:
                return
            origin = origin_of(order.lora.source)
            is_full = num_by_origin[origin] >= _AT_ONCE_OF_ONE
            if is_full or lora_id in self._fetching or self._is_done(order):
                continue
            num_by_origin[origin] += 1
            fetch = self._fetch(order, self._ordered_s[lora_id])
            task = asyncio.create_task(fetch, name=f"LoRA {order.lora.name}")
            self._fetching[lora_id] = origin, task
            task.add_done_callback(partial(self._end_fetch, lora_id))

    def _end_fetch(self, lora_id: str, done: asyncio.Task[None]) -> None:
        del self._fetching[lora_id]
        if done.cancelled():
            return
        self._mistake = self._mistake or done.exception()
        self._start_fetches()

    async def _fetch(self, order: LoraOrder, began_s: float) -> None:
        lora_id = order.lora.lora_id
        try:
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
        self._reports[lora_id] = report
        self._note_news()
        await self._make_room()

    async def _make_room(self) -> None:
        try:
            gone = await asyncio.to_thread(self._folder.evict, set(self._orders))
            self._num_bytes = await asyncio.to_thread(lambda: self._folder.num_bytes)
        except OSError as error:
            logger.warning("the folder of LoRAs cannot be tidied: %s", error)
            return
        self._metrics.evicted(len(gone))
        for lora_id in gone:
            self._reports.pop(lora_id, None)
        if gone:
            self._note_news()

    def _note_news(self) -> None:
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
