"""Lines of the log that are written a moment later, so that no request waits for them."""

from __future__ import annotations

import logging
import threading
import time
from logging.handlers import MemoryHandler

_MOST_LINES = 1000


class LogBuffer(MemoryHandler):
    """Keeps records for a moment, and has a thread hand them on together.

    A warning or worse is handed on at once, with what came before it, and so is everything when
    logging is shut down or too much has gathered. A process that is killed takes its last quieter
    lines along.

    Args:
        target: formats and writes them, in their order.
        delay_s: how long they are kept.
    """

    def __init__(self, target: logging.Handler, delay_s: float) -> None:
        super().__init__(_MOST_LINES, flushLevel=logging.WARNING, target=target)
        self._delay_s = delay_s
        self._has_lines = threading.Event()
        # as long as the process: a daemon, which nobody waits for
        threading.Thread(target=self._write, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record."""
        super().emit(record)
        if self.buffer and not self._has_lines.is_set():
            self._has_lines.set()

    def _write(self) -> None:
        while True:
            self._has_lines.wait()
            time.sleep(self._delay_s)
            self._has_lines.clear()
            self.flush()
