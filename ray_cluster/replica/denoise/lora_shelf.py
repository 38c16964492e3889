"""The LoRAs that a replica has in memory, bound to its model."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from ray_cluster.engine.adapters.adapter_set import AdapterSet, bind_adapters
from ray_cluster.engine.adapters.factors import FactorsUnreadable, open_factors
from ray_cluster.engine.models.loading import LoadedModel
from ray_cluster.errors import MODEL_ERRORS, ModelUnsupported, RequestFailed
from ray_cluster.policies.types import lora_resident
from ray_cluster.protocol.leases import Lease
from ray_cluster.protocol.loras import LoraFacts, LoraOrder
from ray_cluster.replica.lora_store.folder import LoraUnavailable

logger = logging.getLogger(__name__)

# it has the process that converts ready, and keeps a lock while it is at one
_STORE_FIRST_S, _LOOK_S = 2.0, 0.1

SetKey = tuple[tuple[str, float], ...]
"""LoRAs by id, with their scales."""


class Folder(Protocol):
    """The part of a :class:`~ray_cluster.replica.lora_store.folder.LoraFolder` that is used
    here."""

    def path_of(self, lora_id: str) -> Path | None: ...

    def discard(self, lora_id: str) -> None: ...

    async def ensure(self, order: LoraOrder) -> LoraFacts: ...

    def evict(self, keep: Collection[str]) -> list[str]: ...


class LoraShelf:
    """Binds the LoRAs of leases to a replica's model, and keeps the sets that were used last.

    Requests with the same LoRAs at the same scales get the same object, so that neighbours in a
    batch share its products.

    Args:
        folder: of the node, which a store of LoRAs fills, or else this replica.
        max_bytes: of all kept sets; one that is used is kept whatever its size.
        open_set: returns the set of some files with scales; replaced in tests.
    """

    def __init__(
        self,
        model: LoadedModel,
        folder: Folder,
        *,
        max_bytes: int,
        open_set: Callable[[LoadedModel, Sequence[tuple[Path, float]]], AdapterSet] | None = None,
    ) -> None:
        self._model = model
        self._folder = folder
        self._max_bytes = max_bytes
        self._open_set = _open_set if open_set is None else open_set
        self._kept: OrderedDict[SetKey, AdapterSet] = OrderedDict()
        self._opening: dict[SetKey, asyncio.Task[AdapterSet]] = {}

    @property
    def residents(self) -> tuple[str, ...]:
        """Ids of what is kept, as policies know it."""
        ids = {lora_id for key in self._kept for lora_id, _ in key}
        return tuple(map(lora_resident, sorted(ids)))

    @property
    def num_bytes(self) -> int:
        """Of the sets that are kept."""
        return sum(one.num_bytes for one in self._kept.values())

    async def adapters(self, lease: Lease, *, store_first: bool = False) -> AdapterSet | None:
        """Return the set of a lease's request; None if it names no LoRA.

        Args:
            store_first: whether the node's store is probably at them: it gets a moment before they
                are fetched here.

        Raises:
            RequestFailed: one of them cannot be had.
        """
        # in one order, whatever that of the call: the same set is the same object
        key = tuple(sorted((use.lora_id, use.scale) for use in lease.request.add_ons.loras))
        if not key:
            return None
        if (kept := self._kept.get(key)) is not None:
            self._kept.move_to_end(key)
            return kept
        # of several that ask, one opens; one that is cancelled leaves it to the others
        opening = self._opening.get(key)
        if opening is None:
            opening = self._opening[key] = asyncio.create_task(
                self._open(key, lease.loras, _STORE_FIRST_S if store_first else 0.0)
            )
            opening.add_done_callback(lambda done: self._note(key, done))
        return await asyncio.shield(opening)

    def _note(self, key: SetKey, done: asyncio.Task[AdapterSet]) -> None:
        del self._opening[key]
        if done.cancelled() or done.exception() is not None:
            return
        self._kept[key] = done.result()
        while self.num_bytes > self._max_bytes and len(self._kept) > 1:
            self._kept.popitem(last=False)

    async def _open(
        self, key: SetKey, orders: Sequence[LoraOrder], patience_s: float
    ) -> AdapterSet:
        order_by_id = {one.lora.lora_id: one for one in orders}
        discarded: set[Path] = set()
        # whatever goes wrong ends this request: an error of another kind would leave its lease open
        try:
            await self._wait_for_store([one for one, _ in key], patience_s)
            while True:
                files = [(await self._path(one, order_by_id), scale) for one, scale in key]
                try:
                    return await asyncio.to_thread(self._open_set, self._model, files)
                except FactorsUnreadable as error:
                    # pushed out just now, damaged, or of an earlier release: fetched again, once
                    if error.path in discarded:
                        raise
                    logger.warning("%s; fetching it again", error)
                    discarded.add(error.path)
                    self._folder.discard(error.path.stem)
        except (LoraUnavailable, ModelUnsupported, OSError) as error:
            raise RequestFailed(str(error), "lora") from error
        except MODEL_ERRORS as error:
            raise RequestFailed(f"{type(error).__name__}: {error}", "lora") from error

    async def _wait_for_store(self, lora_ids: Sequence[str], patience_s: float) -> None:
        for _ in range(round(patience_s / _LOOK_S)):
            if all(self._folder.path_of(one) is not None for one in lora_ids):
                return
            await asyncio.sleep(_LOOK_S)

    async def _path(self, lora_id: str, order_by_id: Mapping[str, LoraOrder]) -> Path:
        path = self._folder.path_of(lora_id)
        return await self._fetched(order_by_id[lora_id], set(order_by_id)) if path is None else path

    async def _fetched(self, order: LoraOrder, keep: Collection[str]) -> Path:
        await self._folder.ensure(order)
        # there may be no store that does
        await asyncio.to_thread(self._folder.evict, keep)
        path = self._folder.path_of(order.lora.lora_id)
        if path is None:
            raise RequestFailed(
                f"the LoRA {order.lora.name!r} was fetched and pushed out by others at once; raise "
                "loras.max_disk_bytes",
                "lora",
            )
        return path


def _open_set(model: LoadedModel, files: Sequence[tuple[Path, float]]) -> AdapterSet:
    return bind_adapters(model, [(open_factors(path), scale) for path, scale in files])
