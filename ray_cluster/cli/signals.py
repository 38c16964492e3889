"""SIGINT and SIGTERM as one exception in the main thread."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any, NoReturn

_KINDS = (signal.SIGINT, signal.SIGTERM)


class StopSignals:
    """While it is entered, either signal raises KeyboardInterrupt in the main thread."""

    def __init__(self) -> None:
        self._old: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignals:
        self._old = {kind: signal.getsignal(kind) for kind in _KINDS}
        self.arm()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for signal_kind, handler in self._old.items():
            signal.signal(signal_kind, handler)

    def arm(self) -> None:
        """Take the signals back from a library that has taken them (``ray.init`` does)."""
        for kind in _KINDS:
            signal.signal(kind, _interrupt)

    def ignore(self) -> None:
        """Let further signals pass without effect: what is running now is bounded in time."""
        for kind in _KINDS:
            signal.signal(kind, signal.SIG_IGN)


def _interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt
