"""SIGINT and SIGTERM as one exception in the main thread, where it can be taken."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any

_KINDS = (signal.SIGINT, signal.SIGTERM)


class StopSignals:
    """While it is entered and armed, either signal raises KeyboardInterrupt in the main thread.

    Before, a signal waits: should KeyboardInterrupt pass through an extension module that runs
    Python code while it is imported, Python would exit with 130 whoever catches it afterwards.
    """

    def __init__(self) -> None:
        self._old: dict[signal.Signals, Any] = {}
        self._is_armed = False
        self._is_waiting = False

    def __enter__(self) -> StopSignals:
        self._old = {kind: signal.getsignal(kind) for kind in _KINDS}
        self._take()
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
        """Raise from now on, also for a signal that has waited.

        Takes the signals back from a library that has taken them (``ray.init`` does).
        """
        self._take()
        self._is_armed = True
        if self._is_waiting:
            self._is_waiting = False
            raise KeyboardInterrupt

    def ignore(self) -> None:
        """Let further signals pass without effect: what is running now is bounded in time."""
        for kind in _KINDS:
            signal.signal(kind, signal.SIG_IGN)

    def _take(self) -> None:
        for kind in _KINDS:
            signal.signal(kind, self._on_signal)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        if self._is_armed:
            raise KeyboardInterrupt
        self._is_waiting = True
