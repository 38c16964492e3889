"""Ranks as processes: who starts them, and how they end whatever they are at."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Protocol

from ray_cluster.protocol.groups import GROUP_START, GroupStart

_END_S = 10.0


class RankProcess(Protocol):
    """A rank that was started, and may be dead, stopped, or in a collective that never ends."""

    def has_ended(self) -> bool:
        """Whether it is gone."""

    def kill(self) -> None:
        """End it; returns once it is gone, or soon will be."""


StartRank = Callable[[GroupStart], RankProcess]
"""Starts a rank; it comes to the head's listener when it has loaded."""


class _Child:
    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def kill(self) -> None:
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)


def start_child(start: GroupStart, module: str = "ray_cluster.replica.group.rank") -> RankProcess:
    """Start a rank as a child of this process; the module's code is what it runs."""
    process = subprocess.Popen(
        [sys.executable, "-m", module],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdin is not None, "it is a pipe"
    with contextlib.suppress(BrokenPipeError), process.stdin as given:
        given.write(GROUP_START.encode(start))
    return _Child(process)


def kill_process(pid: int) -> None:
    """End a process of this machine at once, also one that was stopped."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
