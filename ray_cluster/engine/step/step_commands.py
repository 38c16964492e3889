"""What other threads want of a step thread, carried out between two steps."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable


class StepCommands:
    """Commands of other threads, in the order in which they came."""

    def __init__(self) -> None:
        self._arrived = threading.Condition()
        self._commands: deque[Callable[[], None]] = deque()

    def put(self, command: Callable[[], None]) -> None:
        """Have a command carried out; from any thread."""
        with self._arrived:
            self._commands.append(command)
            self._arrived.notify()

    def wake(self) -> None:
        """Have the step thread look at once what can go on; from any thread."""
        self.put(_nothing)

    def carry_out(self, wait_s: float = 0.0) -> None:
        """Carry out what has come; with nothing there, wait so long for something to come."""
        for command in self._take(wait_s):
            command()

    def _take(self, wait_s: float) -> list[Callable[[], None]]:
        with self._arrived:
            if not self._commands and wait_s:
                self._arrived.wait(wait_s)
            commands = list(self._commands)
            self._commands.clear()
        return commands


def _nothing() -> None:
    """Do nothing: that there is a command wakes its thread."""
