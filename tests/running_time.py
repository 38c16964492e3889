"""Time that passes while the machine runs: shared ones stand still for seconds now and then."""

from __future__ import annotations

import threading
import time
from types import TracebackType

_TICK_S = 0.02
# a thread that is woken this much too late was not given a processor
_STALL_S = 0.2


class RunningTime:
    """Measures a block on the monotonic clock, less the stalls of the whole machine.

    Attributes:
        seconds: once it is left.
    """

    seconds = float("nan")

    def __enter__(self) -> RunningTime:
        self._stalled_s = 0.0
        self._ends = threading.Event()
        self._watch = threading.Thread(target=self._count_stalls, daemon=True)
        self._begin_s = time.monotonic()
        self._watch.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        passed_s = time.monotonic() - self._begin_s
        self._ends.set()
        self._watch.join()
        self.seconds = passed_s - self._stalled_s

    def _count_stalls(self) -> None:
        before_s = time.monotonic()
        while not self._ends.wait(_TICK_S):
            now_s = time.monotonic()
            late_s = now_s - before_s - _TICK_S
            before_s = now_s
            if late_s > _STALL_S:
                self._stalled_s += late_s
