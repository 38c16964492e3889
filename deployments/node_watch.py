"""Watches how many nodes the Ray cluster has, for the sake of what is kept on one node's disk."""

from __future__ import annotations

import asyncio
import logging
from contextvars import Context

import ray

from ray_cluster.config.sections import StorageArguments
from ray_cluster.config.storage_check import check_storage
from ray_cluster.errors import ConfigError

logger = logging.getLogger(__name__)

_EVERY_S = 10.0


def refuse_local_storage(config: StorageArguments) -> None:
    """Raise :class:`ConfigError` where this process might not find the files of the others."""
    check_storage(config, _num_nodes())


class NodeWatch:
    """Says so when nodes join a cell whose storage is on one node's disk.

    What runs goes on: it is on the node that has the files. What is started from then on is
    refused.
    """

    def __init__(self, config: StorageArguments) -> None:
        self._config = config
        self._warning = ""
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin on the running loop."""
        # in a context of its own: Serve cancels what a cancelled request has called
        self._task = asyncio.create_task(self._watch_forever(), context=Context())

    def warnings(self) -> list[str]:
        """Return what is wrong now."""
        return [self._warning] if self._warning else []

    async def _watch_forever(self) -> None:
        while True:
            num_nodes = await asyncio.to_thread(_num_nodes)
            before, self._warning = self._warning, ""
            try:
                check_storage(self._config, num_nodes)
            except ConfigError as error:
                self._warning = f"{error}. What starts anew is refused until then"
            if self._warning and self._warning != before:
                logger.error(self._warning)
            await asyncio.sleep(_EVERY_S)


def _num_nodes() -> int:
    return sum(bool(node["Alive"]) for node in ray.nodes())
