"""How a worker tries again: a dispatcher until it answers, a store until an image fails for it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from ray_cluster.errors import DispatcherUnavailable
from ray_cluster.requests import ImageRequest

logger = logging.getLogger(__name__)

T = TypeVar("T")

_DISPATCHER_RETRY_S = (0.1, 0.3, 1.0)
# a client waits for the reply
RETRY_S = (0.2, 1.0, 3.0)
# a job outlives the death of every process, so also a while without its store
JOB_RETRY_S = (*RETRY_S, 10.0, 30.0, 60.0, 120.0)


async def answered(call: Callable[[], Awaitable[T]]) -> T:
    """Call the dispatcher until it can be reached; return its answer."""
    failures = 0
    while True:
        try:
            return await call()
        except DispatcherUnavailable as error:
            if failures == 0:
                logger.warning("the dispatcher cannot be reached (%s); trying again", error)
            await asyncio.sleep(_DISPATCHER_RETRY_S[min(failures, len(_DISPATCHER_RETRY_S) - 1)])
            failures += 1


def retry_waits_s(request: ImageRequest) -> tuple[float, ...]:
    """Return the seconds between the tries of a request."""
    return JOB_RETRY_S if request.job_id else RETRY_S
