"""A dispatcher's ownership of its job store: taken before anything is read, shown while it lasts.

Two dispatchers on one store would run every job twice. So one that starts owns the store first:

- at once, if the last owner has released it, its process has ended, or it was of the same cell: a
  cell starts a dispatcher only in place of another, which writes no more from then on;
- when the last owner hands it over, which it does for a later cell of the same service, such as the
  new Ray cluster of an upgrade, once that is ready to serve;
- else once the owner has been silent for some seconds, by the new one's clock alone; one that is
  not silent keeps the store, and the new one does not start.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from functools import partial

from ray_cluster.jobs.store.holder import Holder
from ray_cluster.jobs.store.sql_engine import JobStoreError, NothingWritten
from ray_cluster.jobs.store.sql_owner import JobStoreTaken, Owner
from ray_cluster.jobs.store.sql_store import SqlJobStore
from ray_cluster.jobs.store.store_threads import StoreThreads
from ray_cluster.process.tasks import Tasks

logger = logging.getLogger(__name__)

# how often an owner writes if it has nothing else to write, and how long a silent one is waited for
_BEAT_EVERY_S = 1.0
_SILENT_S = 10.0
# of one that has taken the store over from this one: it may be starting again
_SUCCESSOR_SILENT_S = 30.0
_LOOK_EVERY_S = 0.5


class JobStoreInUse(JobStoreError):
    """Another dispatcher owns the job store."""


class Ownership:
    """Takes a store for a dispatcher, shows that it is alive, and hands the store over.

    Attributes:
        cell: what all dispatchers of the same cell have in common; one of its own unless set.
        service: what the cells of one service have in common, of which a later one takes over from
            an earlier one; empty for a cell that is alone.
        on_wanted: called every second, on the event loop, once a later cell's dispatcher is ready.
        is_lost: whether another has taken the store: nothing is written any more.
        is_leaving: whether it is to be left to another, on purpose.
        is_handed_over: whether it was.
        is_succeeded: whether another owns it by now.
    """

    def __init__(self, store: SqlJobStore, threads: StoreThreads) -> None:
        self._store = store
        self._threads = threads
        self.cell = secrets.token_hex(8)
        self.service = ""
        self.on_wanted: Callable[[], None] = lambda: None
        self._keeping = Tasks()
        self._is_owner = False
        self.is_lost = False
        self.is_leaving = False
        self.is_handed_over = False
        self.is_succeeded = False

    async def stands_by(self) -> bool:
        """Whether a living dispatcher of another cell of the service owns the store."""
        owner = await self._threads.call("read", self._store.owner)
        return owner is not None and not self._may_follow(owner) and self._is_of_service(owner)

    async def take_over(self, is_ready: Callable[[], bool]) -> None:
        """Own the store after a dispatcher of the service, however long that keeps it.

        As :meth:`take`; that others are quicker, or that the store fails for a while, ends nothing.
        """
        while not self._is_owner:
            try:
                await self.take(is_ready)
            except (JobStoreTaken, NothingWritten) as error:
                logger.warning("the job store is not taken over yet: %s", error)
                await asyncio.sleep(_BEAT_EVERY_S)

    async def take(self, is_ready: Callable[[], bool] = lambda: True) -> None:
        """Own the store, once that may be.

        Args:
            is_ready: whether the store may be asked for, where the owner would hand it over.

        Raises:
            JobStoreInUse: a dispatcher of another service owns it.
        """
        if self._is_owner:
            return
        owner = await self._threads.call("read", self._store.owner)
        silence = _Silence(owner)
        while owner is not None and not self._may_follow(owner):
            silent_s = silence.seconds(owner)
            said = owner.hand_over
            if said is not None and self._is_of_service(owner):
                is_superseded = self.cell in said.superseded
                if silent_s >= (_SUCCESSOR_SILENT_S if is_superseded else _SILENT_S):
                    break
                if not is_superseded and said.wanted_by != self.cell and is_ready():
                    await self._threads.call("write", partial(self._store.ask, owner, self.cell))
            elif silent_s >= _SILENT_S:
                break
            elif silence.is_over:
                raise JobStoreInUse(_in_use(owner))
            await asyncio.sleep(_LOOK_EVERY_S)
            owner = await self._threads.call("read", self._store.owner)
        holder = Holder.here(self.cell)
        await self._threads.call("write", partial(self._store.take, holder, owner, self.service))
        self._is_owner = True
        self._keeping.spawn(self._keep())
        if owner is not None and not owner.is_released:
            logger.warning("took the job store over from %s", _place(owner))

    def _may_follow(self, owner: Owner) -> bool:
        if owner.is_released or owner.holder is None:
            return owner.is_released
        return owner.holder.is_dead or owner.holder.cell == self.cell

    def _is_of_service(self, owner: Owner) -> bool:
        said = owner.hand_over
        return said is not None and bool(self.service) and said.service == self.service

    async def _keep(self) -> None:
        """Write now and then, until another has taken the store or is to have it."""
        while not (self.is_lost or self.is_handed_over):
            await asyncio.sleep(_BEAT_EVERY_S)
            if self.is_handed_over:
                return
            try:
                wanted_by = await self._threads.call("write", self._store.beat)
            except JobStoreTaken as error:
                if not self.is_handed_over:
                    self.is_lost = True
                    logger.error("%s", error)
                continue
            except JobStoreError as error:
                logger.warning("the job store is not kept: %s", error)
                continue
            if wanted_by:
                self.on_wanted()

    async def hand_over(self) -> None:
        """Let the dispatcher that asks have the store; nothing is written here any more."""
        self.is_handed_over = True
        await self._threads.write_surely("that the jobs are handed over", self._store.release)
        self._keeping.spawn(self._watch_successor())

    async def _watch_successor(self) -> None:
        """Note that the store is to be taken back once nobody owns it for long."""
        silence: _Silence | None = None
        while not self.is_lost:
            await asyncio.sleep(_BEAT_EVERY_S)
            try:
                owner = await self._threads.call("read", self._store.owner)
            except JobStoreError:
                continue
            self.is_succeeded = owner is not None and not owner.is_released
            silence = silence or _Silence(owner)
            if owner is None or silence.seconds(owner) >= _SUCCESSOR_SILENT_S:
                logger.error("the dispatcher that has taken the job store over is gone")
                self.is_lost = True

    async def release(self) -> None:
        """Let the next dispatcher take the store at once."""
        await self._keeping.close()
        if self._is_owner and not (self.is_lost or self.is_handed_over):
            try:
                await self._threads.call("write", self._store.release)
            except JobStoreError as error:
                logger.warning("the job store is not released: %s", error)


class _Silence:
    """How long an owner has written nothing, by the looks of one who waits.

    One who was held up for long, between two looks or in one, has not seen what was written
    meanwhile: of that time no more than two beats count.

    Attributes:
        is_over: whether it has written since the first look.
    """

    def __init__(self, owner: Owner | None) -> None:
        self._clock = asyncio.get_running_loop().time
        self._seen = self._beat_of(owner)
        self._looked_s = self._clock()
        self._silent_s = 0.0
        self.is_over = False

    def seconds(self, owner: Owner | None) -> float:
        """Return that, after one more look."""
        before_s, self._looked_s = self._looked_s, self._clock()
        self._silent_s += min(self._looked_s - before_s, 2 * _BEAT_EVERY_S)
        if (beat := self._beat_of(owner)) != self._seen:
            self._seen, self._silent_s, self.is_over = beat, 0.0, True
        return self._silent_s

    @staticmethod
    def _beat_of(owner: Owner | None) -> tuple[int, int] | None:
        return None if owner is None else (owner.epoch, owner.beat)


def _in_use(owner: Owner) -> str:
    return (
        f"the job store is in use by another dispatcher, {_place(owner)}: each cell needs a store "
        "of its own. Stop that one, or name another store in 'storage.jobs'"
    )


def _place(owner: Owner) -> str:
    return "one of a later release" if owner.holder is None else owner.holder.place
