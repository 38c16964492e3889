"""Closes what several threads use at once, after the last of them has left it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ray_cluster.transport.links import LinkClosed


class Lifetime:
    """Whether a link is open, and who is in it.

    File descriptors are closed only when no thread uses them any more: a number that is closed too
    early may mean another file already.

    Args:
        wake: makes waiting calls of other threads return; called once.
        free: closes the descriptors; called once, when nobody is inside.
    """

    def __init__(self, wake: Callable[[], None], free: Callable[[], None]) -> None:
        self._wake = wake
        self._free = free
        self._lock = threading.Lock()
        self._num_users = 0
        self._is_ended = False
        self._reason = "this side has closed the link"

    @contextmanager
    def use(self) -> Iterator[None]:
        """Keep the descriptors open meanwhile.

        Raises:
            LinkClosed: the link is closed, or an OSError came up inside, which closes it.
        """
        with self._lock:
            if self._is_ended:
                raise LinkClosed(self._reason)
            self._num_users += 1
        try:
            yield
            if self._is_ended:
                raise LinkClosed(self._reason)
        except OSError as error:
            self.end(f"the link broke: {error}")
            raise LinkClosed(self._reason) from error
        except LinkClosed as error:
            self.end(str(error))
            raise LinkClosed(self._reason) from error
        finally:
            self._leave()

    def end(self, reason: str = "this side has closed the link") -> None:
        """Close the link; a second call does nothing."""
        with self._lock:
            if self._is_ended:
                return
            self._is_ended, self._reason = True, reason
            self._num_users += 1
            self._wake()
        self._leave()

    def _leave(self) -> None:
        with self._lock:
            self._num_users -= 1
            is_last = self._is_ended and self._num_users == 0
        if is_last:
            self._free()
