"""SIGTERM in a process whose main thread, and so every Python signal handler, belongs to Ray.

On SIGTERM a Ray worker waits for running calls, up to half a minute, while the actor goes on, and
then ends without telling the actor.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import signal
from collections.abc import Callable


class TerminationNotice:
    """Has SIGTERM call back on the running event loop, instead of whatever it did before.

    Only the main thread may set Python signal handlers, but any thread may register
    :mod:`faulthandler`: what it writes into a pipe is the notice.

    Args:
        on_notice: called once, on the loop.
    """

    def __init__(self, on_notice: Callable[[], None]) -> None:
        self._on_notice = on_notice
        self._loop = asyncio.get_running_loop()
        self._read_end, self._write_end = os.pipe()
        # repeated signals must not block the process in its handler
        os.set_blocking(self._write_end, False)
        self._loop.add_reader(self._read_end, self._notice)
        faulthandler.register(signal.SIGTERM, self._write_end, all_threads=False, chain=False)

    def _notice(self) -> None:
        self._loop.remove_reader(self._read_end)
        self._on_notice()
