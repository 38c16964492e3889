"""A dispatcher's ownership of its job store: taken before anything is read, shown while it lasts.

Two dispatchers on one store would run every job twice. So one that starts owns the store first:

- at once, if the last owner has released it, its process has ended, or it was of the same cell: a
  cell starts a dispatcher only in place of another, which writes no more from then on;
- else once the owner has been silent for some seconds, by the new one's clock alone; one that is
  not silent keeps the store, and the new one does not start.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from functools import partial

from ray_cluster.jobs.store.holder import Holder
from ray_cluster.jobs.store.sql_engine import JobStoreError
from ray_cluster.jobs.store.sql_owner import JobStoreTaken, Owner
from ray_cluster.jobs.store.sql_store import SqlJobStore
from ray_cluster.jobs.store.store_threads import StoreThreads
from ray_cluster.process.tasks import Tasks

logger = logging.getLogger(__name__)

# how often an owner writes if it has nothing else to write, and how long a silent one is waited for
_BEAT_EVERY_S = 2.0
_SILENT_S = 10.0
_LOOK_EVERY_S = 0.5


class JobStoreInUse(JobStoreError):
    """Another dispatcher owns the job store."""


class Ownership:
    """Takes a store for a dispatcher, and shows that it is alive.

    Attributes:
        cell: what all dispatchers of the same cell have in common; one of its own unless set.
        is_lost: whether another has taken the store: nothing is written any more.
    """

    def __init__(self, store: SqlJobStore, threads: StoreThreads) -> None:
        self._store = store
        self._threads = threads
        self.cell = secrets.token_hex(8)
        self._keeping = Tasks()
        self._is_owner = False
        self.is_lost = False

    async def take(self) -> None:
        """Own the store.

        Raises:
            JobStoreInUse: another dispatcher does.
        """
        if self._is_owner:
            return
        first = await self._threads.call("read", self._store.owner)
        owner, clock = first, asyncio.get_running_loop().time
        silent_until_s = clock() + _SILENT_S
        while owner is not None and not self._may_follow(owner) and clock() < silent_until_s:
            assert first is not None, "owners stay"
            if (owner.epoch, owner.beat) != (first.epoch, first.beat):
                raise JobStoreInUse(_in_use(owner))
            await asyncio.sleep(_LOOK_EVERY_S)
            owner = await self._threads.call("read", self._store.owner)
        await self._threads.call("write", partial(self._store.take, Holder.here(self.cell), owner))
        self._is_owner = True
        self._keeping.spawn(self._keep())
        if owner is not None and not owner.is_released:
            logger.warning("took the job store over from %s", _place(owner))

    def _may_follow(self, owner: Owner) -> bool:
        if owner.is_released or owner.holder is None:
            return owner.is_released
        return owner.holder.is_dead or owner.holder.cell == self.cell

    async def _keep(self) -> None:
        """Write now and then, until another has taken the store."""
        while not self.is_lost:
            await asyncio.sleep(_BEAT_EVERY_S)
            try:
                await self._threads.call("write", self._store.beat)
            except JobStoreTaken as error:
                self.is_lost = True
                logger.error("%s", error)
            except JobStoreError as error:
                logger.warning("the job store is not kept: %s", error)

    async def release(self) -> None:
        """Let the next dispatcher take the store at once."""
        await self._keeping.close()
        if self._is_owner and not self.is_lost:
            try:
                await self._threads.call("write", self._store.release)
            except JobStoreError as error:
                logger.warning("the job store is not released: %s", error)


def _in_use(owner: Owner) -> str:
    return (
        f"the job store is in use by another dispatcher, {_place(owner)}: each cell needs a store "
        "of its own. Stop that one, or name another store in 'storage.jobs'"
    )


def _place(owner: Owner) -> str:
    return "one of a later release" if owner.holder is None else owner.holder.place
