"""The registry of LoRAs: in the dispatcher's memory, and in the job store so that it lasts."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ray_cluster.config.loras import LoraEntry
from ray_cluster.config.settings import Settings
from ray_cluster.dispatch.loras import Loras
from ray_cluster.errors import InvalidRequest, JobStoreUnavailable
from ray_cluster.jobs.sql_engine import JobStoreError
from ray_cluster.jobs.sql_store import SqlJobStore
from ray_cluster.jobs.store_threads import StoreThreads
from ray_cluster.models.lora_sources import check_source
from ray_cluster.protocol.loras import Lora, LoraAdded, LoraLookup, LoraStatus

logger = logging.getLogger(__name__)

_HOUSEKEEPING_S = 1.0


class LoraService:
    """Implements :class:`~ray_cluster.protocol.dispatcher.LoraCalls`; sole writer of its table.

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
        self._tasks: set[asyncio.Task[None]] = set()
        self._housekeeping: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Read what an earlier dispatcher has registered, and register what the settings name."""
        for lora, facts, is_removed in await self._threads.call("read", self._store.loras):
            self._loras.restore(lora, facts, is_removed=is_removed)
        self._is_read = True
        self._register()
        self._housekeeping = asyncio.create_task(self._keep_house(), name="LoRAs' housekeeping")

    def begin_sweeping(self) -> None:
        """Forget removed LoRAs that no open request uses; not before the open ones are known."""
        self._loras.drop_removed()

    def apply(self, settings: Settings) -> None:
        """Register what other settings name; what they do not name any more stays."""
        self._bases = frozenset(pool.model_name for pool in settings.pools)
        self._loras.max_loras = settings.loras.max_loras
        self._entries = settings.loras.registered
        self._register()

    def _register(self) -> None:
        if not self._is_read:
            return
        for entry in self._entries:
            lora = Lora("", entry.name, entry.base, entry.source, entry.sha256, entry.is_pinned)
            if (refused := self._refusal(lora)) is not None:
                reason = refused.reason or f"{entry.base} is no model of theirs"
                message = "the LoRA %s of the settings is not registered: %s"
                logger.warning(message, entry.name, reason)
                continue
            known = self._loras.lookup([entry.name]).found
            if not known:
                self._spawn(self._add_quietly(lora))

    async def add_lora(self, lora: Lora) -> LoraAdded:
        """Register a LoRA; once this returns it is written."""
        if (refused := self._refusal(lora)) is not None:
            return refused
        lora = replace(lora, lora_id=f"lora-{secrets.token_hex(8)}", added_s=self._wall_clock())
        added = self._loras.add(lora)
        if added.refused is not None or added.status is None or added.status.lora is not lora:
            return added
        try:
            await self._threads.visit().write(self._store.add_lora, lora)
        except JobStoreUnavailable:
            self._loras.withdraw(lora)
            raise
        self._on_change()
        return added

    def _refusal(self, lora: Lora) -> LoraAdded | None:
        if lora.base not in self._bases:
            return LoraAdded(None, "unknown_base")
        try:
            check_source(lora.source, self._sources)
        except InvalidRequest as error:
            return LoraAdded(None, "source_not_allowed", error.message)
        return None

    async def _add_quietly(self, lora: Lora) -> None:
        try:
            await self.add_lora(lora)
        except JobStoreUnavailable as error:
            logger.warning("the LoRA %s is not registered: %s", lora.name, error)

    async def loras(self, after: str, limit: int) -> tuple[LoraStatus, ...]:
        """Return LoRAs by name, those after a name."""
        return self._loras.page(after, limit)

    async def find_loras(self, names: tuple[str, ...]) -> LoraLookup:
        """Return the LoRAs of these names, and for others names that look like them."""
        return self._loras.lookup(names)

    async def remove_lora(self, name: str) -> LoraStatus | None:
        """Forget a LoRA once no open request uses it; None if there is none of that name."""
        found = self._loras.lookup([name]).found.get(name)
        if found is None:
            return None
        # written first: a LoRA that is gone does not come back
        await self._threads.visit().write(self._store.remove_lora, found.lora.lora_id)
        status = self._loras.remove(name)
        self._on_change()
        await self._write_changes()
        return status

    async def _keep_house(self) -> None:
        while True:
            await asyncio.sleep(_HOUSEKEEPING_S)
            await self._write_changes()

    async def _write_changes(self) -> None:
        """Write what was found out, and delete what is forgotten; failures are only logged."""
        writes = [
            *(partial(self._store.note_facts, *one) for one in self._loras.take_found()),
            *(partial(self._store.forget_lora, one) for one in self._loras.take_gone()),
        ]
        for write in writes:
            try:
                await self._threads.call("write", write)
            except JobStoreError as error:
                logger.warning("a change of a LoRA is not written: %s", error)

    async def close(self) -> None:
        """Stop; what is registered stays in the store."""
        tasks = [*self._tasks, *([self._housekeeping] if self._housekeeping else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
