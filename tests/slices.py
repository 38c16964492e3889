"""Parts of the slow tests, with an end in time: what a run takes that has only minutes for them."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType
from zlib import crc32

import pytest


class Slice:
    """One of some parts of the slow and the property tests; a module's stay together.

    Args:
        spec: ``number/count``. Numbers count on: each round of ``count`` of them covers every
            module once, and each round is cut otherwise, so that none is the last of its part
            for ever.
    """

    def __init__(self, spec: str) -> None:
        number, _, count = spec.partition("/")
        self._count = int(count)
        self._round, self._part = divmod(int(number), self._count)

    def has(self, item: pytest.Item) -> bool:
        """Whether it is a test of this part."""
        is_rare = any(item.get_closest_marker(mark) for mark in ("slow", "hypothesis"))
        return is_rare and self.part_of(item.nodeid.partition("::")[0]) == self._part

    def part_of(self, module: str) -> int:
        return crc32(f"{self._round} {module}".encode()) % self._count

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Keep the tests of this part, once every other hook has given its marks."""
        ours = [item for item in items if self.has(item)]
        config.hook.pytest_deselected(items=[item for item in items if not self.has(item)])
        items[:] = ours


class End:
    """Skips what is left after some minutes, and the test that runs then.

    A signal from outside would leave what a test has started: here every fixture comes to its end.
    A coroutine is not cut off: its loop would wait for tasks that only the test can end.
    """

    def __init__(self, minutes: float) -> None:
        self._minutes = minutes
        self._end_s = time.monotonic() + 60 * minutes
        self._running: pytest.Item | None = None
        signal.signal(signal.SIGUSR1, self._interrupt)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Iterator[None]:
        if time.monotonic() >= self._end_s:
            pytest.skip(f"not run, {self._minutes:g} minutes are over: {item.nodeid}")
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        if item.get_closest_marker("asyncio"):
            return (yield)
        left_s = max(0.0, self._end_s - time.monotonic())
        here = threading.get_ident()
        timer = threading.Timer(left_s, signal.pthread_kill, (here, signal.SIGUSR1))
        self._running = item
        timer.start()
        try:
            return (yield)
        finally:
            self._running = None
            timer.cancel()

    def _interrupt(self, _number: int, _frame: FrameType | None) -> None:
        if self._running is not None:
            pytest.skip(f"cut off, {self._minutes:g} minutes are over: {self._running.nodeid}")
