"""What a store of LoRAs does: it hears what it is to have, fetches it, and reports.

Knows the lease protocol and one folder; knows nothing of Ray or HTTP.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial

from ray_cluster.observability.metrics_snapshot import Snapshot
from ray_cluster.policies.types import StepCost
from ray_cluster.protocol.dispatcher import DispatcherLink
from ray_cluster.protocol.leases import Poll, PollReply, Registration
from ray_cluster.protocol.loras import LoraFacts, LoraOrder, LoraReport
from ray_cluster.replica.lora_store.folder import LoraFolder, LoraUnavailable
from ray_cluster.replica.lora_store.lists import OrderList, ReportList
from ray_cluster.replica.lora_store.metrics import LoraMetrics
from ray_cluster.replica.lora_store.room import FetchSlots, kept_ids
from ray_cluster.replica.skill import Shell, Skill

logger = logging.getLogger(__name__)

# between two looks at what others have done to the folder
_LOOK_S = 10.0
# between two times that it is tidied though nothing has come
_TIDY_S = 3600.0
_NO_ROOM = "other pinned LoRAs fill their share of the disk (loras.max_disk_bytes)"


class LoraStoreSkill(Skill):
    """Keeps the LoRAs that the dispatcher orders in the folder of its node.

    Args:
        registration: of kind ``lora``.
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
        super().__init__(registration, link)
        self._folder = folder
        self._clock = clock
        self._metrics = LoraMetrics(registration.node)
        self._orders = OrderList()
        self._reports = ReportList()
        self._has_news = asyncio.Event()
        self._must_make_room = False
        # by id, since when it is to be here; those that are fetched, too
        self._pending: dict[str, float] = {}
        self._sizes: dict[str, int] = {}
        self._num_bytes = 0
        self._slots = FetchSlots()
        # the fetch of what has no room beside all that is needed
        self._beyond = ""
        self._fetches: dict[str, asyncio.Task[None]] = {}

    def start(self, shell: Shell) -> Sequence[asyncio.Task[None]]:
        """Begin with what is in the folder already."""
        self._folder.prepare()
        for lora_id in self._folder.ids:
            if (facts := self._folder.facts_of(lora_id)) is not None:
                self._note_found(lora_id, facts)
        self._num_bytes = self._folder.num_bytes
        return (
            asyncio.create_task(self._tell_forever(shell), name="the telling task"),
            asyncio.create_task(self._look_forever(), name="the looking task"),
        )

    def metrics(self) -> Snapshot:
        """Return what it has measured so far."""
        return self._metrics.snapshot(self._num_bytes)

    async def end_tasks(self) -> None:
        """Give up what is fetched just now."""
        self._pending = {}
        fetches = [*self._fetches.values()]
        for task in fetches:
            task.cancel()
        await asyncio.gather(*fetches, return_exceptions=True)

    async def close(self) -> None:
        """End the folder's processes."""
        await asyncio.to_thread(self._folder.close)

    # the dispatcher

    def on_registered(self) -> None:
        """Begin anew with a dispatcher that knows nothing."""
        self._orders.begin()
        self._reports.begin()

    def poll(self, poll: Poll) -> Poll:
        """Return a poll with what is here, and how far the orders are known."""
        return replace(poll, loras=self._reports.news(), lora_mark=self._orders.mark)

    async def _tell_forever(self, shell: Shell) -> None:
        """Report news at once: a second poll ends the one that is held.

        The answers say all that is to be kept, so that room is made after them.
        """
        while True:
            await self._has_news.wait()
            self._has_news.clear()
            reply = await shell.poll_now()
            if reply.loras is not None:
                # there may be more
                self._has_news.set()
            elif self._must_make_room:
                self._must_make_room = False
                await self._make_room()

    def on_reply(self, reply: PollReply) -> None:
        """Apply what has changed of what is to be here."""
        if reply.lora_mark is not None:
            self._reports.note_heard(reply.lora_mark)
        if reply.loras is not None:
            for lora_id in self._orders.apply(reply.loras):
                self._compare(lora_id)
            self._start_fetches()
            if self._orders.removed:
                self._want_room()
        if reply.lora_mark is not None and self._reports.has_news:
            self._has_news.set()

    # what is to be here, and what is

    def _compare(self, lora_id: str) -> None:
        """Note whether a LoRA is to be fetched, or a failure need not be known any more."""
        order, report = self._orders.by_id.get(lora_id), self._reports.get(lora_id)
        # that it is named counts as a use of it
        is_here = report is not None and report.state == "ready" and self._is_here(lora_id)
        if order is None:
            self._pending.pop(lora_id, None)
            self._sizes.pop(lora_id, None)
            if report is not None and report.state == "failed":
                self._reports.drop(lora_id)
            return
        if report is not None and report.state == "failed":
            is_final = report.attempt >= order.attempt
            if is_final and not (report.is_for_want_of_room and order.is_needed):
                return
        if not is_here and lora_id not in self._slots:
            # not since it was first ordered: it may have been here, or have failed, for hours
            self._pending.setdefault(lora_id, self._clock())

    def _is_here(self, lora_id: str) -> bool:
        """Whether a LoRA that was here has not been deleted by somebody."""
        if self._folder.path_of(lora_id) is not None:
            return True
        self._drop(lora_id)
        return False

    def _drop(self, lora_id: str) -> None:
        self._reports.drop(lora_id)
        self._has_news.set()

    def _kept(self) -> set[str]:
        sizes = self._sizes | self._sizes_here()
        return kept_ids(self._orders.by_id.values(), sizes, self._folder.max_bytes)

    def _sizes_here(self) -> dict[str, int]:
        ready = self._reports.ready.items()
        return {name: one.facts.num_bytes for name, one in ready if one.facts is not None}

    def _start_fetches(self) -> None:
        """Begin with those that requests wait for, the first of them first."""
        kept, sizes, by_id = self._kept(), self._sizes_here(), self._orders.by_id
        self._sort_pinned(kept)
        needed = sum(
            size for name, size in sizes.items() if name in by_id and by_id[name].is_needed
        )
        is_full = needed >= self._folder.max_bytes
        for lora_id in sorted(kept & self._pending.keys(), key=self._ranks().__getitem__):
            # where what is needed fills the disk alone, one more at a time: the first request in
            # the queue gets all of its LoRAs, and may end
            if self._slots.are_full or (is_full and self._beyond in self._slots):
                return
            order = by_id[lora_id]
            if self._slots.take(order):
                self._beyond = lora_id if is_full else self._beyond
                fetch = self._fetch(order, self._pending.pop(lora_id))
                task = asyncio.create_task(fetch, name=f"LoRA {order.lora.name}")
                self._fetches[lora_id] = task
                task.add_done_callback(partial(self._end_fetch, lora_id))

    def _ranks(self) -> dict[str, tuple[bool, int]]:
        orders = enumerate(self._orders.by_id.items())
        return {name: (not order.is_needed, place) for place, (name, order) in orders}

    def _sort_pinned(self, kept: Collection[str]) -> None:
        """Give up pinned LoRAs for which there is no room, and take those for which there is."""
        for lora_id, order in self._orders.by_id.items():
            if order.is_needed:
                continue
            report = self._reports.get(lora_id)
            has_failed = report is not None and report.is_for_want_of_room
            if lora_id in kept and has_failed:
                self._drop(lora_id)
                self._compare(lora_id)
            elif lora_id not in kept and lora_id in self._pending:
                del self._pending[lora_id]
                self._fail(order, LoraUnavailable("no_room", _NO_ROOM))

    def _end_fetch(self, lora_id: str, done: asyncio.Task[None]) -> None:
        del self._fetches[lora_id]
        self._slots.release(lora_id)
        if done.cancelled():
            return
        if lora_id in self._orders.removed:
            self._want_room()
        # it may have been ordered again meanwhile, or not be needed any more
        self._compare(lora_id)
        self._start_fetches()

    async def _fetch(self, order: LoraOrder, began_s: float) -> None:
        lora_id = order.lora.lora_id
        try:
            facts = await self._ensured(order)
        except LoraUnavailable as error:
            logger.warning("LoRA %s is not to be had: %s", order.lora.name, error)
            self._metrics.ended(error.failure, self._clock() - began_s)
            self._fail(order, error)
            return
        took_s = self._clock() - began_s
        self._metrics.ended("ready", took_s)
        report = LoraReport(lora_id, "ready", facts, attempt=order.attempt, took_s=took_s)
        self._reports.put(report)
        self._sizes[lora_id] = facts.num_bytes
        self._want_room()

    async def _ensured(self, order: LoraOrder) -> LoraFacts:
        try:
            return await self._folder.ensure(order)
        except LoraUnavailable:
            raise
        except Exception as error:
            logger.exception("LoRA %s has failed unexpectedly", order.lora.name)
            # of this one alone, as far as is known: the others are still to be had
            why = f"an unexpected {type(error).__name__}; the log of the store tells more"
            raise LoraUnavailable("unreachable", why) from error

    def _fail(self, order: LoraOrder, error: LoraUnavailable) -> None:
        self._reports.put(
            LoraReport(
                order.lora.lora_id,
                "failed",
                failure=error.failure,
                reason=error.reason,
                attempt=order.attempt,
            )
        )
        self._has_news.set()

    # the folder

    def _want_room(self) -> None:
        """Have the folder tidied once the dispatcher has said all that is to be kept."""
        self._must_make_room = True
        self._has_news.set()

    async def _make_room(self) -> None:
        kept = self._kept()
        # one that is fetched just now goes after that
        removed = self._orders.removed - self._fetches.keys()
        try:
            gone = await asyncio.to_thread(self._folder.evict, kept, removed)
            self._num_bytes = await asyncio.to_thread(lambda: self._folder.num_bytes)
        except OSError as error:
            logger.warning("the folder of LoRAs cannot be tidied: %s", error)
            return
        self._orders.removed -= removed
        self._metrics.evicted(len(gone))
        self._note_gone(gone)

    def _note_gone(self, lora_ids: Collection[str]) -> None:
        for lora_id in lora_ids:
            self._drop(lora_id)
            self._compare(lora_id)
        if lora_ids:
            self._start_fetches()

    async def _look_forever(self) -> None:
        """Find what replicas have fetched for themselves, or anybody has deleted."""
        tidied_s = self._clock()
        while True:
            await asyncio.sleep(_LOOK_S)
            if self._clock() - tidied_s >= _TIDY_S:
                tidied_s = self._clock()
                self._want_room()
            known, kept = set(self._reports.ready), self._kept()
            try:
                found = await asyncio.to_thread(self._look, known, kept)
            except OSError as error:
                logger.warning("the folder of LoRAs cannot be read: %s", error)
                continue
            for lora_id, facts in found.items():
                if facts is not None and lora_id not in self._slots:
                    self._note_found(lora_id, facts)
            missing = known - found.keys()
            self._note_gone([one for one in missing if self._folder.path_of(one) is None])

    def _look(self, known: Collection[str], kept: Collection[str]) -> dict[str, LoraFacts | None]:
        """Return what is here, with the facts of what was not known to be."""
        for lora_id in kept:
            # replicas make room, too, and begin with what was not used for longest
            self._folder.path_of(lora_id)
        return {
            one: None if one in known else self._folder.facts_of(one) for one in self._folder.ids
        }

    def _note_found(self, lora_id: str, facts: LoraFacts) -> None:
        self._pending.pop(lora_id, None)
        self._reports.put(LoraReport(lora_id, "ready", facts))
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
