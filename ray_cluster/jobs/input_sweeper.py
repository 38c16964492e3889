"""Deletes the images that clients have sent once no request needs them any more."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

from ray_cluster.jobs.sweeper import rest_after_sweep
from ray_cluster.requests import ImageRequest
from ray_cluster.storage.blob_store import BlobStoreError
from ray_cluster.storage.inputs import InputStore, input_names

logger = logging.getLogger(__name__)


class InputSweeper:
    """Keeps the input store to what open requests name, and to what was sent lately.

    A request that is accepted later names inputs that were sent lately: the grace age is at least
    twice the time that a call may take to arrive.

    Args:
        open_requests: returns every request of the cell that has not ended; called on the event
            loop. Not to be used before the jobs of an earlier dispatcher are among them.
        wall_clock: Unix time in seconds.
    """

    def __init__(
        self,
        inputs: InputStore,
        *,
        open_requests: Callable[[], Iterable[ImageRequest]],
        wall_clock: Callable[[], float],
    ) -> None:
        self._inputs = inputs
        self._open_requests = open_requests
        self._wall_clock = wall_clock
        self._is_failing = False

    @property
    def is_failing(self) -> bool:
        """Whether the last sweep could not be done."""
        return self._is_failing

    async def run(self) -> None:
        """Sweep now and again, for ever."""
        while True:
            started_s = asyncio.get_running_loop().time()
            try:
                await self.sweep()
                self._is_failing = False
            except BlobStoreError as error:
                self._is_failing = True
                logger.error("images that clients have sent are not deleted: %s", error)
            await rest_after_sweep(started_s)

    async def sweep(self) -> int:
        """Delete old inputs that no open request names; return how many.

        Raises:
            BlobStoreError: the store failed.
        """
        # taken before the look at the requests: what is accepted after it names younger inputs
        sent_before_s = self._wall_clock() - self._inputs.grace_s
        keep = input_names(self._open_requests())
        return await asyncio.to_thread(self._inputs.sweep, sent_before_s=sent_before_s, keep=keep)
