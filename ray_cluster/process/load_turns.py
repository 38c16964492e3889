"""Turns of the processes of one machine that load models.

Importing the model libraries and loading a model keeps one core busy for ten seconds and more.
Where there are few cores, processes that do it at once only make each other late: the first one is
to serve while the others load.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

# of one that loads; the other is for what runs already
_CORES_EACH = 2
_LOOK_S = 0.1
# of a second process of the same kind, so that the first ones of others come before it
_LATER_S = 1.0


class LoadTurns:
    """Whose turn it is, by locks that end with their process, however it ends.

    Args:
        folder: of this machine, the same for all processes; made if it is not there.
        num_at_once: how many load at a time.
        patience_s: longest wait for a turn; whoever holds it may be downloading, or hang.
    """

    def __init__(self, folder: Path, num_at_once: int, patience_s: float = 60.0) -> None:
        self._folder = folder
        self._num_at_once = num_at_once
        self._patience_s = patience_s

    @classmethod
    def of_this_machine(cls, folder: Path) -> LoadTurns:
        """Return the turns that suit the cores that this process may use."""
        return cls(folder, max(1, len(os.sched_getaffinity(0)) // _CORES_EACH))

    @asynccontextmanager
    async def turn(self, kind: str) -> AsyncIterator[None]:
        """Wait for a turn, and have it while the block lasts.

        Args:
            kind: of the process; while one of a kind loads, those of other kinds come before the
                next of it.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        deadline_s = time.monotonic() + self._patience_s
        with ExitStack() as held:
            is_first = self._has_locked(f"first of {kind}", held)
            # nobody reports the end of a process: locks are looked at
            while time.monotonic() < deadline_s and not self._has_turn(held):  # noqa: ASYNC110
                await asyncio.sleep(_LOOK_S if is_first else _LATER_S)
            yield

    def _has_turn(self, held: ExitStack) -> bool:
        return any(self._has_locked(str(number), held) for number in range(self._num_at_once))

    def _has_locked(self, name: str, held: ExitStack) -> bool:
        """Try to lock a file until the stack ends."""
        file = (self._folder / name).open("wb")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return False
        held.enter_context(file)
        return True
