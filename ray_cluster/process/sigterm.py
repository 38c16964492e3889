"""SIGTERM, heard in a process whose main thread, and so every Python signal handler, is another's.

A Ray worker's is: on SIGTERM it waits for calls of its own, half a minute if need be, in which the
actor works on, and then ends in the midst of it without a word to the actor.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import signal
from collections.abc import Callable


class TerminationNotice:
    """Has SIGTERM call back on the running event loop, instead of whatever it did before.

    Python lets only the main thread set handlers of its own. The one of :mod:`faulthandler` any
    thread may set; what it writes, into a pipe here, is the notice.

    Args:
        on_notice: called once, on the loop.
    """

    def __init__(self, on_notice: Callable[[], None]) -> None:
        self._on_notice = on_notice
        self._loop = asyncio.get_running_loop()
        self._read_end, self._write_end = os.pipe()
        # whoever sends the signal again and again must not block the process in its handler
        os.set_blocking(self._write_end, False)
        self._loop.add_reader(self._read_end, self._notice)
        faulthandler.register(signal.SIGTERM, self._write_end, all_threads=False, chain=False)

    def _notice(self) -> None:
        self._loop.remove_reader(self._read_end)
        self._on_notice()
