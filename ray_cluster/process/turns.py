"""Work that many may ask an event loop for, so that others have their turn: in parts, or shared."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextvars import Context
from typing import Generic, TypeVar

T = TypeVar("T")


async def in_parts(items: Iterable[T], at_once: int) -> AsyncIterator[T]:
    """Yield items, so many before others have their turn; the items must not change meanwhile."""
    for number, item in enumerate(items, start=1):
        yield item
        if not number % at_once:
            await asyncio.sleep(0)


async def act_in_parts(items: Iterable[T], at_once: int, act: Callable[[T], None]) -> None:
    """Do something with each item; see :func:`in_parts`."""
    async for item in in_parts(items, at_once):
        act(item)


class Shared(Generic[T]):
    """Answers all who ask at about the same time by one run of some work, every so often at most.

    Whoever asks gets the result of a run that begins after that, so it is never an old one.

    Args:
        every_s: seconds from the begin of a run to that of the next one.
    """

    def __init__(self, work: Callable[[], Awaitable[T]], every_s: float = 0.25) -> None:
        self._work = work
        self._every_s = every_s
        self._next: asyncio.Task[T] | None = None
        self._present: asyncio.Task[T] | None = None
        self._earliest_s = 0.0

    async def get(self) -> T:
        """Return the result of the next run, or raise what it raises."""
        if self._next is None:
            # in a context of its own: Serve cancels what a cancelled request has called
            self._next = asyncio.create_task(self._run(), context=Context())
            self._next.add_done_callback(look_at_error)
        return await asyncio.shield(self._next)

    async def _run(self) -> T:
        loop = asyncio.get_running_loop()
        if self._present is not None:
            # runs that hang do not pile up
            await asyncio.wait({self._present})
        self._present = asyncio.current_task()
        await asyncio.sleep(max(0.0, self._earliest_s - loop.time()))
        self._earliest_s = loop.time() + self._every_s
        # who asks from now on may have seen what this run does not
        self._next = None
        return await self._work()


def look_at_error(task: asyncio.Task[T]) -> None:
    """Look at an error that nobody waits for any more."""
    if not task.cancelled():
        task.exception()
