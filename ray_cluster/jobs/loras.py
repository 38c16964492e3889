"""The registry of LoRAs: in the dispatcher's memory, and in the job store so that it lasts."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from ray_cluster.config.sections.loras import LoraEntry
from ray_cluster.config.settings import Settings
from ray_cluster.dispatch.loras.loras import Loras
from ray_cluster.errors import InvalidRequest, JobStoreUnavailable
from ray_cluster.jobs.store.sql_engine import JobStoreError
from ray_cluster.jobs.store.sql_store import SqlJobStore
from ray_cluster.jobs.store.store_threads import StoreThreads, StoreVisit, is_refusal
from ray_cluster.models.sources.lora_sources import check_source
from ray_cluster.process.tasks import Tasks
from ray_cluster.process.turns import look_at_error
from ray_cluster.protocol.loras import Lora, LoraAdded, LoraLookup, LoraStatus

logger = logging.getLogger(__name__)

T = TypeVar("T")

_HOUSEKEEPING_S = 1.0


class LoraService:
    """Implements :class:`~ray_cluster.protocol.dispatcher.LoraCalls`; sole writer of its table.

    Calls for one name take turns, and each sees what the one before has written.

    Args:
        loras: those of the dispatch core.
        threads: in which the store is called.
        on_change: called when there may be something to say to stores.
        wall_clock: Unix time in seconds.
        sources: what sources may begin with; stores check it again where the files are.
    """

    def __init__(
        self,
        loras: Loras,
        store: SqlJobStore,
        threads: StoreThreads,
        *,
        on_change: Callable[[], None],
        wall_clock: Callable[[], float],
        sources: Sequence[str],
    ) -> None:
        self._loras = loras
        self._store = store
        self._threads = threads
        self._on_change = on_change
        self._wall_clock = wall_clock
        self._sources = sources
        self._bases: frozenset[str] = frozenset()
        self._entries: Sequence[LoraEntry] = ()
        self._is_read = False
        # of the settings, which the store did not take yet
        self._unwritten: list[Lora] = []
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._tasks = Tasks()

    async def start(self) -> None:
        """Read what an earlier dispatcher has registered, and register what the settings name."""
        self._loras.keep_removed()
        for lora, facts, is_removed in await self._threads.call("read", self._store.loras):
            self._loras.restore(lora, facts, is_removed=is_removed)
        self._is_read = True
        self._register()
        self._tasks.spawn(self._keep_house(), "LoRAs' housekeeping")

    def begin_sweeping(self) -> None:
        """Forget removed LoRAs that no open request uses; not before the open ones are known."""
        self._loras.drop_removed()

    def apply(self, settings: Settings) -> None:
        """Register what other settings name; what they do not name any more stays."""
        self._bases = frozenset(pool.model_name for pool in settings.pools)
        self._loras.apply(settings.loras)
        self._entries = settings.loras.registered
        self._register()

    def _register(self) -> None:
        if not self._is_read:
            return
        for entry in self._entries:
            if self._loras.id_of(entry.name) is None:
                lora = Lora("", entry.name, entry.base, entry.source, entry.sha256, entry.is_pinned)
                self._spawn(self._add_quietly(lora))

    async def _add_quietly(self, lora: Lora) -> None:
        message = "the LoRA %s of the settings is not registered: %s"
        try:
            added = await self.add_lora(lora)
        except JobStoreUnavailable as error:
            logger.warning(message, lora.name, f"{error}; it is tried again")
            self._unwritten.append(lora)
            return
        if added.refused == "unknown_base":
            logger.warning(message, lora.name, f"{lora.base} is no model of theirs")
        elif added.refused is not None:
            logger.warning(message, lora.name, f"{added.refused} {added.reason}".rstrip())

    async def add_lora(self, lora: Lora) -> LoraAdded:
        """Register a LoRA; once this returns it is written."""
        return await self._whole(self._add(lora, self._threads.visit()))

    async def _add(self, lora: Lora, visit: StoreVisit) -> LoraAdded:
        if (refused := await self._refusal(lora)) is not None:
            return refused
        async with self._turn(lora.name):
            if (there := self._loras.find(lora)) is not None:
                return there
            lora_id = f"lora-{secrets.token_hex(8)}"
            lora = replace(lora, lora_id=lora_id, added_s=self._wall_clock())
            if (refused := self._loras.reserve(lora)) is not None:
                return refused
            try:
                # nobody sees it before: it may fail
                await visit.insert(self._store.add_lora, lora)
                added = self._loras.keep(lora)
            except JobStoreUnavailable as error:
                if not is_refusal(error):
                    # it may be there, and must not come back after a restart
                    forget = partial(self._store.forget_lora, lora_id)
                    self._spawn(self._threads.write_surely(f"that {lora_id} was refused", forget))
                raise
            finally:
                self._loras.release(lora)
        self._on_change()
        return added

    async def _refusal(self, lora: Lora) -> LoraAdded | None:
        if lora.base not in self._bases:
            return LoraAdded(None, "unknown_base")
        try:
            # a folder of the network may take its time
            await asyncio.to_thread(check_source, lora.source, self._sources)
        except InvalidRequest as error:
            return LoraAdded(None, "source_not_allowed", error.message)
        return None

    async def loras(self, after: str, limit: int) -> tuple[LoraStatus, ...]:
        """Return LoRAs by name, those after a name, some at a time."""
        return self._loras.page(after, limit)

    async def find_loras(self, names: tuple[str, ...]) -> LoraLookup:
        """Return the LoRAs of these names; for the first that there is not, names like it."""
        return self._loras.lookup(names)

    async def remove_lora(self, name: str) -> LoraStatus | None:
        """Forget a LoRA once no open request uses it; None if there is none of that name.

        The one that has the name when the call comes: not a later one, if others remove it first.
        """
        lora_id = self._loras.id_of(name)
        if lora_id is None:
            return None
        return await self._whole(self._remove(name, lora_id, self._threads.visit()))

    async def _remove(self, name: str, lora_id: str, visit: StoreVisit) -> LoraStatus | None:
        async with self._turn(name):
            if self._loras.id_of(name) != lora_id:
                return None
            # written first: a LoRA that is gone does not come back
            await visit.write(self._store.remove_lora, lora_id)
            status = self._loras.remove(lora_id)
        self._on_change()
        await self._write_changes()
        return status

    def _turn(self, name: str) -> asyncio.Lock:
        return self._turns.setdefault(name, asyncio.Lock())

    async def _whole(self, work: Coroutine[Any, Any, T]) -> T:
        """Do what a call asks for to its end, though its caller may be gone before that."""
        return await asyncio.shield(self._spawn(work))

    async def _keep_house(self) -> None:
        while True:
            await asyncio.sleep(_HOUSEKEEPING_S)
            await self._write_changes()
            unwritten, self._unwritten = self._unwritten, []
            named = {entry.name for entry in self._entries}
            for lora in unwritten:
                if lora.name in named:
                    self._spawn(self._add_quietly(lora))

    async def _write_changes(self) -> None:
        """Write what was found out, and delete what is forgotten; failures are only logged."""
        writes = [
            *(partial(self._store.note_facts, *one) for one in self._loras.take_found().items()),
            *(partial(self._store.forget_lora, one) for one in self._loras.take_gone()),
        ]
        for write in writes:
            try:
                await self._threads.call("write", write)
            except JobStoreError as error:
                logger.warning("a change of a LoRA is not written: %s", error)

    async def close(self) -> None:
        """Stop; what is registered stays in the store."""
        await self._tasks.close()

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = self._tasks.spawn(work)
        # its caller has its error, or is gone
        task.add_done_callback(look_at_error)
        return task
