"""Time-outs of calls to other processes, for a process that may itself be stopped meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

# a process that runs again reads within this what has arrived
_READ_S = 0.3
# an event loop that is this late was not run
_FROZEN_S = 0.5


async def within(seconds: float, work: Coroutine[Any, Any, T]) -> T:
    """Return what ``work`` returns.

    A time-out means that the other side was silent. After a stop of this process, what arrived
    meanwhile is read first.

    Raises:
        TimeoutError: it has not returned in so many seconds; it is cancelled.
    """
    task = asyncio.create_task(work)
    try:
        await asyncio.wait({task}, timeout=seconds)
        if not task.done():
            await asyncio.wait({task}, timeout=_READ_S)
        if task.done():
            return task.result()
        raise TimeoutError(f"no answer within {seconds:g} s")
    finally:
        task.cancel()


async def sleep_and_read(seconds: float) -> None:
    """Sleep before others' silence is judged; after a stop of this process, read first.

    Otherwise a process that was stopped would take all others for dead.
    """
    clock = asyncio.get_running_loop().time
    started_s = clock()
    await asyncio.sleep(seconds)
    if clock() - started_s > seconds + _FROZEN_S:
        await asyncio.sleep(_READ_S)
