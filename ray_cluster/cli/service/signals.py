"""SIGINT, SIGTERM and SIGHUP as one exception in the main thread, where it can be taken."""

from __future__ import annotations

import signal
import time
from types import FrameType
from typing import Any

_KINDS: tuple[signal.Signals, ...] = (signal.SIGINT, signal.SIGTERM)
# `timeout`, `make` and others send one to their child and one to the group: that is one stop
_SAME_STOP_S = 0.5


class StopSignals:
    """While it is entered and armed, a signal raises KeyboardInterrupt in the main thread.

    Before, a signal waits: should KeyboardInterrupt pass through an extension module that runs
    Python code while it is imported, Python would exit with 130 whoever catches it afterwards.

    Args:
        with_hangup: whether SIGHUP is one of them, unless this process was started to ignore it
            (``nohup``). It never is a second signal: a closed terminal sends several.
    """

    def __init__(self, *, with_hangup: bool = False) -> None:
        self._kinds = _KINDS
        if with_hangup and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            self._kinds = (*_KINDS, signal.SIGHUP)
        self._old: dict[signal.Signals, Any] = {}
        self._is_armed = False
        self._is_waiting = False
        self._raised_s: float | None = None

    def __enter__(self) -> StopSignals:
        self._old = {kind: signal.getsignal(kind) for kind in self._kinds}
        self._take()
        return self

    def __exit__(self, *_: object) -> None:
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
            self._raise()

    def ignore(self) -> None:
        """Let further signals pass without effect: what is running now is bounded in time."""
        for kind in self._kinds:
            signal.signal(kind, signal.SIG_IGN)

    def _take(self) -> None:
        for kind in self._kinds:
            signal.signal(kind, self._on_signal)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if not self._is_armed:
            self._is_waiting = True
        elif self._is_new_stop(number):
            self._raise()

    def _is_new_stop(self, number: int) -> bool:
        if self._raised_s is None:
            return True
        return number != signal.SIGHUP and time.monotonic() > self._raised_s + _SAME_STOP_S

    def _raise(self) -> None:
        self._raised_s = time.monotonic()
        raise KeyboardInterrupt
