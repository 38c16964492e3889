"""Sessions of their own for child processes that somebody else's code starts."""

from __future__ import annotations

import os
from types import TracebackType


class OwnSessions:
    """While it is entered, child processes that run Python code begin a session each.

    A signal to this process's group, as of Ctrl-C in a terminal or of ``timeout``, then misses
    them. Python code runs in forks, and in what :mod:`subprocess` starts with ``preexec_fn``, as
    Ray does; other children stay in the group.
    """

    def __init__(self) -> None:
        self._is_entered = False

    def __enter__(self) -> OwnSessions:
        self._is_entered = True
        # it cannot be removed again
        os.register_at_fork(after_in_child=self._begin)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_entered = False

    def _begin(self) -> None:
        if self._is_entered:
            os.setsid()
