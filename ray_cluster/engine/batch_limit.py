"""How many requests a replica steps together at most, while that may change."""

from __future__ import annotations


class BatchLimit:
    """Most requests of a batch: read by the stages' threads, set by whoever follows the settings.

    Args:
        planned: what memory was planned for; the limit never rises above it.
    """

    def __init__(self, planned: int) -> None:
        self._planned = planned
        self._most = planned

    @property
    def most(self) -> int:
        """The present limit."""
        return self._most

    def set(self, wanted: int) -> int:
        """Set the limit as near to ``wanted`` as memory allows; return it."""
        self._most = max(1, min(wanted, self._planned))
        return self._most
