"""An event loop that counts the work between two looks at its sockets: lines of Python, not time.

What a machine takes for it differs by a factor of three and by who else is on it; the number of
lines does not. A usual core takes about 5 ms for seventy thousand of them.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")

# about 5 ms of a usual core
MOST_LINES = 70_000


class WorkLoop(asyncio.SelectorEventLoop):
    """Attributes:
    longest: most lines that ran while nobody else could have a turn.
    """

    def __init__(self) -> None:
        super().__init__()
        self.longest = 0
        self._num_lines = 0

    def _run_once(self) -> None:
        before = self._num_lines
        super()._run_once()  # type: ignore[misc]
        self.longest = max(self.longest, self._num_lines - before)

    def count(self, _frame: FrameType, event: str, _arg: object) -> Callable[..., Any]:
        self._num_lines += event == "line"
        return self.count


def longest_stall(main: Coroutine[Any, Any, T]) -> tuple[T, int]:
    """Run a coroutine to its end; return what it returns, and the most lines at a stretch.

    What comes before :func:`begin` does not count.
    """
    with asyncio.Runner(loop_factory=WorkLoop) as runner:
        try:
            result = runner.run(main)
        finally:
            sys.settrace(None)
        loop = runner.get_loop()
        assert isinstance(loop, WorkLoop)
        return result, loop.longest


def lines_of(act: Callable[[], T]) -> tuple[T, int]:
    """Return what a call returns, and how many lines of Python ran for it."""
    counted = 0

    def count(_frame: FrameType, event: str, _arg: object) -> Callable[..., Any]:
        nonlocal counted
        counted += event == "line"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        return act(), counted
    finally:
        sys.settrace(before)


async def begin() -> None:
    """Count from the next turn on."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, WorkLoop)
    sys.settrace(loop.count)
    await asyncio.sleep(0)
    loop.longest = 0
